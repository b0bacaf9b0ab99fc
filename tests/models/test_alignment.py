"""Alignment, uniformity, gap and effective rank, against their definitions written out; and sums of
parts."""

import math

import pytest
import torch
from torch.nn import functional as F

from models.metrics import retrieval
from models.metrics.alignment import alignment_figures, alignment_sums


def pairs(n=23, width=6, seed=0):
    draw = torch.Generator().manual_seed(seed)
    image = F.normalize(torch.randn(n, width, generator=draw), dim=1)
    return image, F.normalize(image + 0.4 * torch.randn(n, width, generator=draw) + 0.3, dim=1)


def figures(image, text, target=None):
    target = torch.arange(len(image)) if target is None else target
    return alignment_figures(
        alignment_sums(image, text, target),
        alignment_sums(text, image, target.argsort()),
        len(image),
    )


def test_every_figure_is_what_its_formula_says(monkeypatch):
    monkeypatch.setattr(retrieval, "BLOCK_BYTES", 4 * 23 * 5)  # blocks that do not divide
    image, text = pairs()
    found, n, x, y = figures(image, text), 23, image.double(), text.double()
    off = ~torch.eye(n, dtype=torch.bool)
    assert found["alignment"] == pytest.approx(float((x - y).square().sum(1).mean()), rel=1e-6)
    assert found["modality_gap"] == pytest.approx(float((x.mean(0) - y.mean(0)).norm()), rel=1e-6)
    assert found["cosine_pairs"] == pytest.approx(float((x * y).sum(1).mean()), rel=1e-6)
    assert found["cosine_others"] == pytest.approx(float((x @ y.T)[off].mean()), rel=1e-6)
    for branch, z in (("image", x), ("text", y)):
        uniformity = math.log(float(torch.exp(-2 * torch.cdist(z, z).square())[off].mean()))
        assert found[f"uniformity/{branch}"] == pytest.approx(uniformity, rel=1e-5)
        shares = torch.linalg.svdvals(z - z.mean(0)).square()
        shares /= shares.sum()
        assert found[f"effective_rank/{branch}"] == pytest.approx(
            math.exp(float(-(shares * shares.log()).sum())), rel=1e-5
        )


def test_parts_of_replicas_add_up_whatever_the_order():
    image, text = pairs()
    order = torch.randperm(23, generator=torch.Generator().manual_seed(1))
    target = order.argsort()  # image order[i] stands at i; text j belongs to the image at target[j]
    expected, shuffled = figures(image, text), figures(image[order], text, order)
    assert shuffled == pytest.approx(expected, rel=1e-6)
    whole = alignment_sums(text, image[order], target)
    parts = [
        alignment_sums(text[rows], image[order], target[rows])
        for rows in (slice(0, 4), slice(4, 4), slice(4, 23))
    ]
    torch.testing.assert_close(sum(parts), whole)


def test_a_collapsed_model_has_rank_one_and_no_uniformity():
    same = F.normalize(torch.ones(9, 4), dim=1)
    found = figures(same, same)
    assert found["effective_rank/image"] == 1.0 and found["uniformity/text"] == pytest.approx(
        0.0, abs=1e-5
    )
    assert found["alignment"] == pytest.approx(0.0, abs=1e-9) and found[
        "cosine_others"
    ] == pytest.approx(1.0, abs=1e-6)


def test_a_model_that_diverged_is_measured():
    image, text = pairs()
    image[3] = math.nan
    found = figures(image, text)
    assert (
        math.isnan(found["effective_rank/image"])
        and math.isnan(found["alignment"])
        and 1 < found["effective_rank/text"] < 6
    )


def test_directions_that_are_all_used_have_the_full_rank():
    axes = torch.cat([torch.eye(5), -torch.eye(5)])
    assert figures(axes, axes)["effective_rank/image"] == pytest.approx(5.0, rel=1e-9)


def test_less_than_two_pairs_have_no_figures():
    empty = torch.zeros(0, 4)
    assert len(alignment_sums(empty, empty, torch.zeros(0, dtype=torch.int64))) == 4 + 4 + 16
    assert figures(torch.eye(1, 4), torch.eye(1, 4)) == {}
