"""Contrastive losses over a batch in two sides, in blocks of rows. Plain functions of tensors:
nothing here knows of processes."""

from collections.abc import Callable

from models.losses.blocks import LOGIT_SCALE_LIMIT, Part, Side, logit_scale_exp
from models.losses.infonce import InfoNCE
from models.losses.matching import Matching
from models.losses.plain import PlainLoss
from models.losses.sigmoid import Sigmoid

__all__ = [
    "LOGIT_SCALE_LIMIT",
    "LOSSES",
    "InfoNCE",
    "Matching",
    "Part",
    "PlainLoss",
    "Side",
    "Sigmoid",
    "build_loss",
    "logit_scale_exp",
]

LOSSES: dict[str, Callable[[], InfoNCE | Sigmoid | PlainLoss]] = {
    "infonce": InfoNCE,
    "sigmoid": Sigmoid,
}
"""--loss -> what makes it. A module of one's own adds to it; see `PlainLoss`."""


def build_loss(name: str, label_smoothing: float = 0.0) -> InfoNCE | Sigmoid | PlainLoss:
    """The loss of a name in `LOSSES`. Errors: ValueError for another name, and for smoothing where
    there are no targets to smooth."""
    if name not in LOSSES:
        raise ValueError(f"loss {name!r} is not known; give one of {', '.join(LOSSES)}")
    if name == "infonce":
        return InfoNCE(label_smoothing)
    if label_smoothing:
        raise ValueError(
            f"label smoothing {label_smoothing} is for loss 'infonce'; '{name}' has no targets to "
            "smooth: leave it at 0"
        )
    return LOSSES[name]()
