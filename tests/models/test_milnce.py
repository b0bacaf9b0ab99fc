"""MIL-NCE in pieces against autograd through the formula of its authors on the whole matrix, in
float64."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from models.losses import MILNCE, Targets


class Rows(NamedTuple):
    embeds: Tensor
    label: Tensor
    weight: Tensor | None = None
    keys: Tensor | None = None


S, K, D = 7, 3, 5  # samples, captions of each, width
CLOSE = {"rtol": 1e-10, "atol": 1e-13}


def unit(number, seed):
    draw = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(number, D, generator=draw, dtype=torch.float64), dim=1)


def authors(clips, captions, scale, weight):
    """`captions` [S * K, D], those of a sample one after the other."""
    x = (scale * clips @ captions.T).view(S, S, K)
    own = (x * torch.eye(S, dtype=x.dtype)[:, :, None]).sum(1).logsumexp(1)
    every = torch.cat([x, x.transpose(0, 1)], 1).reshape(S, -1).logsumexp(1)
    return (weight / weight.sum() * (every - own)).sum()


@pytest.mark.parametrize("captions_first", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_pieces_add_up_to_the_formula(captions_first, weighted):
    clips, captions = (unit(n, n).requires_grad_() for n in (S, S * K))
    log_scale = torch.tensor([1.7], dtype=torch.float64, requires_grad=True)
    weight = torch.arange(1.0, S + 1, dtype=torch.float64) if weighted else torch.ones(S)
    expected = authors(clips, captions, log_scale.exp(), weight.double())
    expected.backward()
    label = torch.arange(S).repeat_interleave(K)
    order = torch.randperm(S * K, generator=torch.Generator().manual_seed(1))
    sides = {
        "video": Rows(clips.detach(), torch.arange(S), weight if weighted else None),
        "text": Rows(
            captions.detach()[order], label[order], weight[label][order] if weighted else None
        ),
    }
    if captions_first:
        sides = dict(reversed(sides.items()))
    parameters, loss = {"logit_scale": log_scale.detach()}, MILNCE(work_bytes=1)
    rows = {branch: torch.arange(len(side.label)) for branch, side in sides.items()}
    whole = loss.whole(sides, parameters)
    statistics = {b: loss.statistics(sides, b, rows[b], parameters) for b in sides}
    found, shares, of_scale = {}, [], []
    for branch in sides:
        parts = [
            loss.part(sides, branch, mine, statistics, parameters)
            for mine in (rows[branch][:3], rows[branch][3:])
        ]
        found[branch] = torch.cat([part.embeds[branch] for part in parts])
        shares += [part.shares[branch].sum() for part in parts]
        of_scale.append(sum(part.parameters["logit_scale"] for part in parts))
    gradients = {"video": clips.grad, "text": captions.grad[order]}
    for branch, gradient in gradients.items():
        torch.testing.assert_close(found[branch], gradient, **CLOSE)
        torch.testing.assert_close(whole.embeds[branch], gradient, **CLOSE)
    for total in (sum(shares), sum(each.sum() for each in whole.shares.values())):
        torch.testing.assert_close(total, expected.detach(), **CLOSE)
    for each in (*of_scale, whole.parameters["logit_scale"]):
        torch.testing.assert_close(each, log_scale.grad, **CLOSE)


def test_what_is_nobodys_is_a_negative_of_all_and_asks_nothing():
    """Of captions alone; the loss of a clip with them is that of a larger denominator."""
    clips, captions, others = unit(S, 1), unit(S, 2), unit(4, 3)
    sides = {
        "video": Rows(clips, torch.arange(S)),
        "text": Rows(
            torch.cat([captions, others]), torch.cat([torch.arange(S), torch.full((4,), -1)])
        ),
    }
    x, more = clips @ captions.T, clips @ others.T
    every = torch.cat([x, more, x.T], 1).logsumexp(1)
    scale = {"logit_scale": torch.zeros(1, dtype=torch.float64)}
    whole = MILNCE().whole(sides, scale)
    loss = sum(share.sum() for share in whole.shares.values())
    torch.testing.assert_close(loss, (every - x.diagonal()).mean(), **CLOSE)


def test_equal_rows_are_masked():
    """Two samples with the same caption: each is as if the other one were not there."""
    clips, captions = unit(3, 4), unit(3, 5)
    captions[2] = captions[0]
    keys = torch.tensor([10, 11, 10])
    sides = {
        "video": Rows(clips, torch.arange(3), None, torch.stack([torch.arange(3), keys], 1)),
        "text": Rows(captions, torch.arange(3), None, torch.stack([keys, torch.arange(3)], 1)),
    }
    x = (clips @ captions.T).clone()
    x[0, 2] = x[2, 0] = -torch.inf
    every = torch.cat([x, x.T], 1).logsumexp(1)
    scale = {"logit_scale": torch.zeros(1, dtype=torch.float64)}
    whole = replace(MILNCE(), targets=Targets("masked")).whole(sides, scale)
    loss = sum(share.sum() for share in whole.shares.values())
    torch.testing.assert_close(loss, (every - x.diagonal()).mean(), **CLOSE)
