"""All losses over sides of every kind, drawn at random: empty ones, single rows, rows that are
nobody's, whole rows and columns masked, weights of 0. Beside formulas that are written out pair by
pair and differentiated by autograd, in float64.

Tolerance 1e-9 of values around 1: float64 keeps about 16 digits, and similarities are up to 20.
"""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from models.losses import (
    DUPLICATES,
    LOSSES,
    InfoNCE,
    Matching,
    PlainLoss,
    Sigmoid,
    Targets,
    build_loss,
    phrase_duplicates,
)

CASES, D = 60, 3
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


class Rows(NamedTuple):
    embeds: Tensor
    label: Tensor
    weight: Tensor | None = None
    keys: Tensor | None = None


def drawn_sides(seed: int, both: bool = True) -> dict[str, Rows]:
    """Up to 4 samples with one image and as many texts each, and up to 3 texts, or with `both`
    images too, that are nobody's; in any order. Few keys, so that some are those of all."""
    draw = torch.Generator().manual_seed(seed)

    def below(number: int, *shape: int) -> Tensor:
        return torch.randint(0, number, shape, generator=draw)

    samples, texts, keys, weights = (int(below(n)) for n in (5, 2, 4, 2))
    numbers, more = {"image": 1, "text": 1 + texts}, {"image": int(below(3)), "text": int(below(4))}
    label = {
        branch: torch.cat(
            [
                torch.arange(samples).repeat(number),
                torch.full((more[branch] if both or branch == "text" else 0,), -1),
            ]
        )
        for branch, number in numbers.items()
    }
    key = {branch: below(keys + 1, len(each)) for branch, each in label.items()}
    has_weights, has_keys = bool(below(2)), bool(below(4))
    sides = {}
    for branch, other in (("image", "text"), ("text", "image")):
        partners = [
            key[other][label[other] == of] if of >= 0 else own.expand(numbers[other])
            for of, own in zip(label[branch].tolist(), key[branch])
        ]
        nothing = torch.empty(0, numbers[other], dtype=torch.int64)
        seen = torch.stack(partners) if partners else nothing
        order = torch.randperm(len(label[branch]), generator=draw)
        embeds = torch.randn(len(order), D, generator=draw, dtype=torch.float64)
        weight = below(1 + 2 * weights, len(order)) * 10**6  # all 0, or from 0 to 2
        sides[branch] = Rows(
            F.normalize(embeds, dim=1),
            label[branch][order],
            weight if has_weights else None,
            torch.cat([key[branch][:, None], seen], 1)[order] if has_keys else None,
        )
    return dict(reversed(sides.items())) if below(2) else sides


# -- the formulas, pair by pair


def joined(loss: InfoNCE | Sigmoid | Matching, sides: dict[str, Rows]) -> tuple[Tensor, Tensor]:
    """Positives, and what is masked: bool [M, N]."""
    first, second = sides.values()
    own, equal = torch.zeros(2, len(first.label), len(second.label), dtype=torch.bool)
    for i, a in enumerate(first.label.tolist()):
        for j, b in enumerate(second.label.tolist()):
            own[i, j] = a == b >= 0
            if first.keys is not None:
                one, another = first.keys[i].tolist(), second.keys[j].tolist()
                equal[i, j] = one[0] in another[1:] or another[0] in one[1:]
    how = loss.targets.duplicates
    nothing = torch.zeros_like(own)
    return own | equal if how == "positives" else own, equal & ~own if how == "masked" else nothing


def shares_of(side: Rows, somebody: bool) -> Tensor:
    """[B], of each row in the mean over all rows, or over those that are `somebody`'s; 0 where all
    have weight 0."""
    weight = torch.ones(len(side.label)) if side.weight is None else side.weight
    weight = weight.double() * ((side.label >= 0) if somebody else 1)
    return weight / weight.sum() if weight.sum() else weight


def infonce(loss, sides, s, bias) -> Tensor:
    positive, masked = joined(loss, sides)
    total, epsilon = s.sum() * 0, loss.label_smoothing
    both = (s, positive, masked), (s.T, positive.T, masked.T)
    for side, (matrix, belong, out) in zip(sides.values(), both):
        for i, share in enumerate(shares_of(side, somebody=True).tolist()):
            if share:
                losses = matrix[i][~out[i]].logsumexp(0) - matrix[i]
                of_row = (1 - epsilon) * losses[belong[i]].mean() + epsilon * losses.mean()
                total = total + share * of_row / 2
    return total


def milnce(loss, sides, s, bias) -> Tensor:
    _, masked = joined(loss, sides)
    total, clips, captions = s.sum() * 0, *sides.values()
    if len(captions.label) < len(clips.label):
        s, masked, clips, captions = s.T, masked.T, captions, clips
    for i, share in enumerate(shares_of(clips, somebody=True).tolist()):
        if share:
            own = [j for j, label in enumerate(captions.label) if label == clips.label[i]]
            every = [s[i][~masked[i]], *(s[:, j][~masked[:, j]] for j in own)]
            total = total + share * (torch.cat(every).logsumexp(0) - s[i][own].logsumexp(0))
    return total


def sigmoid(loss, sides, s, bias) -> Tensor:
    positive, masked = joined(loss, sides)
    p, q = (shares_of(side, somebody=False) for side in sides.values())
    total, (m, n) = s.sum() * 0, s.shape
    for i in range(m):
        for j in range(n):
            if not masked[i, j]:
                z = 1 if positive[i, j] else -1
                total = total - (p[i] + n * q[j] / m) / 2 * F.logsigmoid(z * (s[i, j] + bias))
    return total


def plain(first: Tensor, second: Tensor, scalars) -> Tensor:
    s = scalars["logit_scale"].exp() * first @ second.T
    return (s.logsumexp(1) - s.diagonal()).mean()


FORMULAS = {"infonce": infonce, "milnce": milnce, "sigmoid": sigmoid}
LOSSES_OF_ALL_KINDS = [
    (name, build_loss(name, smoothing, how))
    for name in LOSSES
    for how in DUPLICATES
    if how != "positives" or phrase_duplicates(name) == how
    for smoothing in ((0.0, 0.2) if name == "infonce" else (0.0,))
]


def expected_of(formula, loss, sides, parameters) -> dict[str, Tensor]:
    embeds = [side.embeds.clone().requires_grad_() for side in sides.values()]
    learned = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    s = learned["logit_scale"].exp() * embeds[0] @ embeds[1].T
    value = formula(loss, sides, s, learned.get("logit_bias", torch.zeros(1).double()))
    leaves = dict(zip((*sides, *learned), (*embeds, *learned.values())))
    found = torch.autograd.grad(value.sum(), list(leaves.values()), allow_unused=True)
    gradients = [torch.zeros_like(t) if g is None else g for t, g in zip(leaves.values(), found)]
    return {"loss": value.detach().reshape(()), **dict(zip(leaves, gradients))}


# -- the same by the losses


def at_once(loss, sides, parameters) -> dict[str, Tensor]:
    part = loss.whole(sides, parameters)
    total = sum(shares.sum() for shares in part.shares.values())
    return {"loss": total, **part.embeds, **part.parameters}


def in_parts(loss, sides, parameters) -> list[dict[str, Tensor]]:
    """Of two replicas of either side, the first with one row at most. Each side has the whole
    gradient of the scalars, so what is found comes twice."""
    mine = {
        branch: torch.arange(len(side.label)).split([*_two(side)]) for branch, side in sides.items()
    }
    statistics = {
        branch: [loss.statistics(sides, branch, rows, parameters) for rows in of_side]
        for branch, of_side in mine.items()
    }
    known = {b: torch.cat(values) for b, values in statistics.items() if values[0] is not None}
    parts = {
        branch: [loss.part(sides, branch, rows, known, parameters) for rows in of_side]
        for branch, of_side in mine.items()
    }
    total = sum(part.shares[b].sum() for b, of_side in parts.items() for part in of_side)
    embeds = {b: torch.cat([part.embeds[b] for part in of_side]) for b, of_side in parts.items()}
    return [
        {
            "loss": total,
            **embeds,
            **{name: sum(part.parameters[name] for part in parts[b]) for name in parameters},
        }
        for b in sides
    ]


def _two(side: Rows) -> tuple[int, int]:
    first = min(1, len(side.label))
    return first, len(side.label) - first


def check(loss, sides, parameters, expected) -> None:
    for found in (at_once(loss, sides, parameters), *in_parts(loss, sides, parameters)):
        for name, value in expected.items():
            assert found[name].isfinite().all(), name
            torch.testing.assert_close(found[name], value, **CLOSE)


@pytest.mark.parametrize(("name", "loss"), LOSSES_OF_ALL_KINDS, ids=str)
def test_whole_and_parts_equal_the_formula(name, loss):
    for seed in range(CASES):
        sides = drawn_sides(seed, both=name != "milnce")
        learned = {"logit_scale": math.log(1 + seed % 20), "logit_bias": -1.0}
        parameters = {each: torch.tensor([learned[each]]).double() for each in loss.parameters}
        try:
            check(loss, sides, parameters, expected_of(FORMULAS[name], loss, sides, parameters))
        except Exception as error:
            error.add_note(f"seed {seed}: {sides}")
            raise


def test_a_loss_of_ones_own_in_parts():
    loss = PlainLoss(plain, {"logit_scale": 0.0})
    for number in (1, 2, 5):
        draw = torch.Generator().manual_seed(number)
        sides = {
            branch: Rows(
                torch.randn(number, D, generator=draw, dtype=torch.float64), torch.arange(number)
            )
            for branch in ("image", "text")
        }
        parameters = {"logit_scale": torch.tensor([1.0]).double()}

        def formula(loss, sides, s, bias):
            return (s.logsumexp(1) - s.diagonal()).mean()

        check(loss, sides, parameters, expected_of(formula, loss, sides, parameters))


@pytest.mark.parametrize("how", DUPLICATES)
def test_drawn_negatives_are_negatives_and_what_cannot_draw_is_weighed(how):
    loss = Matching(targets=Targets(how))
    for seed in range(CASES):
        sides = drawn_sides(seed)
        parameters = {"logit_scale": torch.tensor([1.0]).double()}
        positive, masked = joined(loss, sides)
        allowed = ~(positive | masked)
        for (branch, side), may in zip(sides.items(), (allowed, allowed.T)):
            mine = torch.arange(len(side.label))
            drawn = loss.negatives(sides, branch, mine, parameters, seed).tolist()
            for place, row in zip(drawn, may):
                assert bool(row[place]) if place >= 0 else not row.any(), (seed, branch)
            weight = shares_of(side, somebody=False) / 3
            torch.testing.assert_close(loss.weights(sides)[branch], weight, **CLOSE)
