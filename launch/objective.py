"""The objective of a run: the branches that its towers make, the loss of each pair of them, and the
terms over one branch or several at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from common.spelling import near
from data.batching.load_control import FeedRates
from data.options import DEFAULT_LOSS, TermOption, loss_names, read_pairs, read_terms
from engine.loss_protocols import ContrastiveLoss, MatchingLoss
from engine.objective import Branch, Joint, Objective, Pair, Term
from models.losses import (
    DUPLICATES,
    MILNCE,
    PlainLoss,
    Prefixed,
    Views,
    build_loss,
    phrase_duplicates,
)
from models.towers.layers import Tower


def losses_of(
    given: str,
    loss: str,
    smoothing: float = 0.0,
    duplicates: str = DUPLICATES[0],
    prefixes: Sequence[int] = (),
) -> list[ContrastiveLoss]:
    """Of each pair of `--pairs` that of `--loss`. `smoothing`: of InfoNCE; `duplicates`: as
    `Targets`; of regions `phrase_duplicates` decides; `prefixes`: as `Prefixed`. Errors:
    ValueError."""
    losses = [
        build_loss(
            name,
            smoothing if name == DEFAULT_LOSS else 0.0,
            phrase_duplicates(name) if pair.made else duplicates,
        )
        for pair, name in zip(read_pairs(given), loss_names(loss, given))
    ]
    return [Prefixed(each, tuple(prefixes)) for each in losses] if prefixes else [*losses]


def pairs_of(
    given: str,
    loss: ContrastiveLoss | Sequence[ContrastiveLoss],
    matching: MatchingLoss | None = None,
) -> tuple[Pair, ...]:
    """The pairs of `--pairs`, each with the loss, or its own, and what that learns: `logit_scale`
    of images and texts, `tone_text_logit_scale` of others."""
    pairs = read_pairs(given)
    losses = loss if isinstance(loss, Sequence) else [loss] * len(pairs)
    return tuple(
        Pair(
            *pair.branches,
            own,
            weight=pair.weight,
            matching=matching,
            prefix="" if pair.name == "image_text" else f"{pair.name}_",
            made=pair.made,
        )
        for pair, own in zip(pairs, losses, strict=True)
    )


def joints_of(
    given: str,
    branches: Sequence[str],
    duplicates: str = DUPLICATES[0],
    prefixes: Sequence[int] = (),
) -> tuple[Joint, ...]:
    """The terms of `--terms`, between `branches`. `duplicates`, `prefixes`: as in `losses_of`.
    Errors: ValueError, in the words of a command line."""
    return tuple(_joint(term, branches, duplicates, prefixes) for term in read_terms(given))


def _joint(
    term: TermOption, branches: Sequence[str], duplicates: str, prefixes: Sequence[int]
) -> Joint:
    where = f"argument --terms: {term.name}"
    for name in term.branches:
        if name not in branches:
            raise ValueError(f"{where}: no pair of --pairs has '{name}'{near(name, branches)}")
    try:
        loss: ContrastiveLoss = build_loss(term.loss, duplicates=duplicates)
        if len(term.branches) == 1:
            loss = Views(loss)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if len(term.branches) > 1 and not isinstance(loss, PlainLoss):
        raise ValueError(
            f"{where}: '{term.loss}' compares two branches; a loss over {len(term.branches)} is one of "
            "--import-module, a PlainLoss of as many embeddings"
        )
    joint = Joint(term.branches, loss, term.weight)
    if prefixes:
        joint = replace(joint, loss=Prefixed(loss, tuple(prefixes)))
    return replace(joint, prefix=f"{joint.name}_")


def refuse_views(views: int, terms: Sequence[Term]) -> None:
    """Raise ValueError for several views of an image beside what takes one row of each."""
    for term in terms if views > 1 else ():
        own, rates = getattr(term.loss, "loss", term.loss), FeedRates(views_per_image=views)
        several = any(rates.rows(branch) > 1 for branch in term.branches)
        if several and (isinstance(own, PlainLoss | MILNCE) or term.made or term.matching):
            what = "regions" if term.made else "--fusion" if term.matching else "this loss"
            raise ValueError(
                f"argument --views-per-image: {views}, but {what} of {term.name} takes one row of each "
                "image; leave one of them out"
            )


def objective_of(towers: Sequence[Tower], terms: Sequence[Term]) -> Objective:
    """The branches of the towers, and the terms of the loss over them. The first tower of a term owns
    what its loss learns."""
    return Objective(tuple(Branch(tower.branch, tower.inputs) for tower in towers), tuple(terms))
