"""Losses over the rows of one branch, and over those of four: in parts and as a whole, against the
formula and autograd, in float64."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.losses import MILNCE, InfoNCE, Prefixed, Sigmoid, SimilarityKL, Targets, Views

SAMPLES, VIEWS, WIDTH = 7, 3, 8
SCALARS = {"logit_scale": 1.1, "logit_bias": -0.7}


@dataclass(frozen=True)
class Rows:
    embeds: Tensor
    label: Tensor
    weight: Tensor | None = None
    keys: Tensor | None = None
    sample: Tensor | None = None


def unit(number: int, width: int, seed: int) -> Tensor:
    drawn = torch.randn(number, width, generator=torch.Generator().manual_seed(seed))
    return F.normalize(drawn.double(), dim=1)


def views(weighted: bool = False) -> Rows:
    """Samples 1 and 4 have an equal row."""
    number = SAMPLES * VIEWS
    label = torch.arange(number) // VIEWS
    key = torch.arange(number)
    key[4 * VIEWS + 1] = key[1 * VIEWS]
    keys = torch.cat([key[:, None], key.view(SAMPLES, VIEWS)[label]], 1)
    weight = torch.arange(number) % 4 * 250_000 if weighted else None
    return Rows(unit(number, WIDTH, 3), label, weight, keys)


def learned(loss) -> dict[str, Tensor]:
    return {name: torch.tensor([SCALARS[name]]).double() for name in loss.parameters}


def by_autograd(formula, embeds, parameters):
    given = [each.clone().requires_grad_() for each in embeds]
    scalars = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    loss = formula(given, scalars)
    wanted = [*given, *scalars.values()]
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    found = [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, found)]
    return loss.detach(), found[: len(given)], dict(zip(scalars, found[len(given) :]))


def check(loss, sides, parameters, formula) -> None:
    """As a whole, and in parts of each side's rows."""
    embeds = [side.embeds for side in sides.values()]
    value, gradients, of_scalars = by_autograd(formula, embeds, parameters)
    whole = loss.whole(sides, parameters)
    cuts = {name: torch.arange(len(s.label)).tensor_split(3) for name, s in sides.items()}
    made = {
        name: [loss.statistics(sides, name, mine, parameters) for mine in each]
        for name, each in cuts.items()
    }
    statistics = {n: torch.cat(each) for n, each in made.items() if each[0] is not None}
    parts = {
        name: [loss.part(sides, name, mine, statistics, parameters) for mine in each]
        for name, each in cuts.items()
    }
    shares = sum(part.shares[name].sum() for name, each in parts.items() for part in each)
    first = next(iter(sides))
    for found, name in zip(gradients, sides):
        assert torch.allclose(whole.embeds[name], found, atol=1e-12)
        of_parts = torch.cat([part.embeds[name] for part in parts[name]])
        assert torch.allclose(of_parts, found, atol=1e-12)
    assert torch.allclose(sum(each.sum() for each in whole.shares.values()), value)
    assert torch.allclose(shares, value)
    for name, found in of_scalars.items():
        assert torch.allclose(whole.parameters[name], found)
        assert torch.allclose(sum(part.parameters[name] for part in parts[first]), found)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("duplicates", ["masked", "positives", "negatives"])
@pytest.mark.parametrize("kind", [InfoNCE, Sigmoid])
def test_views_of_one_branch(kind, duplicates, weighted):
    side = views(weighted)
    loss = Views(kind(targets=Targets(duplicates), work_bytes=4 * 4 * 8 * 21))

    def formula(embeds, scalars):
        raw = scalars["logit_scale"].exp() * embeds[0] @ embeds[0].T
        belongs = side.label[:, None] == side.label
        itself = torch.eye(len(raw), dtype=torch.bool)
        equal = belongs.clone()
        for a, b in ((1, 4), (4, 1)):
            # a row that equals one of the other sample, with all rows of that one, and all of its own
            # sample's with that row
            mine, theirs = (1 * VIEWS, 4 * VIEWS + 1) if a == 1 else (4 * VIEWS + 1, 1 * VIEWS)
            equal[mine, side.label == b] = True
            equal[side.label == a, theirs] = True
        positive = (equal if duplicates == "positives" else belongs) & ~itself
        masked = itself | (equal & ~belongs if duplicates == "masked" else itself)
        weight = torch.ones(len(raw)) if side.weight is None else side.weight
        weight = (weight / weight.sum()).double()
        if kind is Sigmoid:
            losses = -F.logsigmoid((2.0 * positive - 1) * (raw + scalars["logit_bias"]))
            losses = losses * ~masked
            return (weight @ losses.sum(1) + losses.sum(0) @ weight) / 2
        likely = raw.masked_fill(masked, -1e30).log_softmax(1)
        return -weight @ ((positive * likely).sum(1) / positive.sum(1))

    check(loss, {"image": side}, learned(loss), formula)


@pytest.mark.parametrize("weighted", [False, True])
def test_similarities_of_a_teacher(weighted):
    names = ("image", "text", "teacher_image", "teacher_text")
    widths = dict(zip(names, (WIDTH, WIDTH, 5, 5)))
    weight = torch.arange(SAMPLES) % 3 * 250_000 if weighted else None
    sides = {
        name: Rows(unit(SAMPLES, widths[name], seed), torch.arange(SAMPLES), weight)
        for seed, name in enumerate(names)
    }
    loss = SimilarityKL(13.0, work_bytes=2 * 4 * 2 * 8 * SAMPLES)

    def formula(embeds, scalars):
        student = scalars["logit_scale"].exp() * embeds[0] @ embeds[1].T
        teacher = 13.0 * embeds[2].detach() @ embeds[3].detach().T
        weights = torch.ones(SAMPLES) if weight is None else weight
        weights = (weights / weights.sum()).double()
        ways = ((student, teacher), (student.T, teacher.T))
        of_rows = [
            weights @ (t.softmax(1) * (t.log_softmax(1) - s.log_softmax(1))).sum(1) for s, t in ways
        ]
        return sum(of_rows) / 2

    check(loss, sides, learned(loss), formula)


def test_a_teacher_that_is_copied_teaches_nothing():
    rows = [unit(SAMPLES, WIDTH, seed) for seed in (1, 2)]
    names = ("image", "text", "teacher_image", "teacher_text")
    sides = {n: Rows(e, torch.arange(SAMPLES)) for n, e in zip(names, 2 * rows)}
    parameters = {"logit_scale": torch.tensor([13.0]).double().log()}
    part = SimilarityKL(13.0).whole(sides, parameters)
    assert all(each.abs().max() < 1e-12 for each in (*part.shares.values(), *part.embeds.values()))


def test_prefixes_of_views():
    side = views()
    loss = Prefixed(Views(InfoNCE(targets=Targets("negatives"))), (3,))

    def formula(embeds, scalars):
        found = []
        for each in (F.normalize(embeds[0][:, :3], dim=1), embeds[0]):
            itself = torch.eye(len(each), dtype=torch.bool)
            belongs = (side.label[:, None] == side.label) & ~itself
            raw = scalars["logit_scale"].exp() * each @ each.T
            likely = raw.masked_fill(itself, -1e30).log_softmax(1)
            found.append(-((belongs * likely).sum(1) / belongs.sum(1)).mean())
        return sum(found) / 2

    check(loss, {"image": side}, learned(loss), formula)


@pytest.mark.parametrize("loss", [MILNCE(), InfoNCE(label_smoothing=0.1)])
def test_losses_that_do_not_compare_views(loss):
    with pytest.raises(ValueError, match="views of one branch"):
        Views(loss)


def test_a_teacher_needs_a_row_for_each_of_the_students():
    names = ("image", "text", "teacher_image", "teacher_text")
    sides = {n: Rows(unit(SAMPLES, WIDTH, 1), torch.arange(SAMPLES)) for n in names}
    fewer = replace(sides["teacher_image"], label=torch.arange(3), embeds=unit(3, WIDTH, 1))
    sides |= {"teacher_image": fewer}
    statistics = {n: torch.zeros(len(s.label)).double() for n, s in sides.items()}
    loss = SimilarityKL()
    with pytest.raises(ValueError, match="a teacher needs a row for each of the student's"):
        loss.part(sides, "image", torch.arange(2), statistics, learned(loss))
