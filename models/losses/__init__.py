"""Contrastive losses over a batch in two sides, in blocks of rows. Plain functions of tensors:
nothing here knows of processes."""

from collections.abc import Callable
from dataclasses import replace

from models.losses.blocks import (
    DUPLICATES,
    LOGIT_SCALE_LIMIT,
    Part,
    Side,
    Targets,
    logit_scale_exp,
)
from models.losses.infonce import InfoNCE
from models.losses.matching import Matching
from models.losses.milnce import MILNCE
from models.losses.plain import PlainLoss
from models.losses.prefixes import Prefixed
from models.losses.sigmoid import Sigmoid
from models.losses.similarities import SimilarityKL
from models.losses.views import Views

__all__ = [
    "DUPLICATES",
    "LOGIT_SCALE_LIMIT",
    "LOSSES",
    "MILNCE",
    "InfoNCE",
    "Matching",
    "Part",
    "PlainLoss",
    "Prefixed",
    "Side",
    "Sigmoid",
    "SimilarityKL",
    "Targets",
    "Views",
    "build_loss",
    "logit_scale_exp",
    "phrase_duplicates",
]

LOSSES: dict[str, Callable[[], InfoNCE | Sigmoid | PlainLoss]] = {
    "infonce": InfoNCE,
    "sigmoid": Sigmoid,
    "milnce": MILNCE,
}
"""--loss -> what makes it. A module of one's own adds to it; see `PlainLoss`."""


def phrase_duplicates(name: str) -> str:
    """What regions with equal phrases are to each other under this loss: an equal phrase is as good
    an answer, so positives, or masked by a loss that has no further positives."""
    has_positives = name not in LOSSES or getattr(LOSSES[name](), "has_positives", True)
    return "positives" if has_positives else "masked"


def build_loss(
    name: str, label_smoothing: float = 0.0, duplicates: str = DUPLICATES[0]
) -> InfoNCE | Sigmoid | PlainLoss:
    """The loss of a name in `LOSSES`. `duplicates`: as in `Targets`; a loss of one's own sees them
    as all other samples. Errors: ValueError for another name, and for smoothing where there are no
    targets to smooth."""
    if name not in LOSSES:
        raise ValueError(f"loss {name!r} is not known; give one of {', '.join(LOSSES)}")
    if label_smoothing and name != "infonce":
        raise ValueError(
            f"label smoothing {label_smoothing} is for loss 'infonce'; '{name}' has no targets to "
            "smooth: leave it at 0"
        )
    loss = LOSSES[name]()
    if isinstance(loss, InfoNCE) and label_smoothing:
        loss = replace(loss, label_smoothing=label_smoothing)
    if isinstance(loss, (InfoNCE, Sigmoid)):
        loss = replace(loss, targets=Targets(duplicates))
    return loss
