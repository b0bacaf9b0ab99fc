"""Which pairs the matching loss asks about, and what it makes of their scores."""

import math

import pytest
import torch

from engine.loss_protocols import Side
from models.losses import Matching
from models.losses.matching import gumbel_noise

PARAMETERS = {"logit_scale": torch.tensor([1.0])}


def sides(images=12, texts_per_image=1, width=8, weight=None):
    generator = torch.Generator().manual_seed(0)
    embeds = {
        b: torch.nn.functional.normalize(torch.randn(n, width, generator=generator), dim=1)
        for b, n in (("image", images), ("text", images * texts_per_image))
    }
    return {
        "image": Side(embeds["image"], torch.arange(images), weight),
        "text": Side(
            embeds["text"],
            torch.arange(images).repeat_interleave(texts_per_image),
            None if weight is None else weight.repeat_interleave(texts_per_image),
        ),
    }


@pytest.mark.parametrize("branch", ["image", "text"])
def test_negatives_never_belong_to_the_row_and_depend_on_no_block_nor_share(branch):
    both = sides(images=30, texts_per_image=2)
    everyone = torch.arange(len(both[branch].label))

    def draw(rows=everyone, seed=7, **blocks):
        return Matching(**blocks).negatives(both, branch, rows, PARAMETERS, seed)

    other = both["text" if branch == "image" else "image"]
    drawn, some = draw(), torch.tensor([17, 3, 28, 0])
    assert (other.label[drawn] != both[branch].label).all()
    assert torch.equal(draw(some), drawn[some])
    assert torch.equal(draw(work_bytes=1), drawn)
    assert not torch.equal(draw(seed=8), drawn)


def test_negatives_are_drawn_with_the_probabilities_of_the_similarities():
    """Of 4,000 draws each share is within five standard deviations of the softmax without the
    positive."""
    both, number = sides(images=6), 4000
    drawn = torch.stack(
        [
            Matching().negatives(both, "image", torch.arange(6), PARAMETERS, seed)
            for seed in range(number)
        ]
    )
    logits = math.e * both["image"].embeds @ both["text"].embeds.T
    expected = logits.masked_fill(torch.eye(6, dtype=torch.bool), -math.inf).softmax(1)
    found = torch.stack([(drawn == text).float().mean(0) for text in range(6)], 1)
    assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / number).sqrt()).all()


def test_both_directions_draw_independently():
    both = sides(images=40)
    both["text"] = Side(both["image"].embeds, *both["text"][1:])  # the same similarities both ways
    drawn = {
        branch: Matching().negatives(both, branch, torch.arange(40), PARAMETERS, seed=1)
        for branch in both
    }
    assert (drawn["image"] != drawn["text"]).any()


def test_a_row_to_which_all_others_belong_has_no_negative():
    both = sides(images=1, texts_per_image=3)
    assert Matching().negatives(both, "text", torch.arange(3), PARAMETERS, seed=0).tolist() == [
        -1,
        -1,
        -1,
    ]


def test_noise_is_that_of_a_gumbel_distribution():
    noise = gumbel_noise(3, torch.arange(500), 400).double()
    assert noise.mean().item() == pytest.approx(
        0.5772, abs=0.01
    ) and noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.02)
    assert (
        abs(torch.corrcoef(noise[:, :2].T)[0, 1]) < 0.15
        and abs(torch.corrcoef(noise[:2])[0, 1]) < 0.15
    )
    assert torch.equal(noise, gumbel_noise(3, torch.arange(500), 500)[:, :400].double())


def test_losses_are_cross_entropies_and_weights_add_up_to_a_mean_over_three_kinds_of_pairs():
    scores, belong = torch.tensor([0.3, -2.0]), torch.tensor([True, False])
    expected = torch.stack([-torch.sigmoid(scores[0]).log(), -(1 - torch.sigmoid(scores[1])).log()])
    assert torch.allclose(Matching().losses(scores, belong), expected)
    weights = Matching().weights(
        sides(images=4, texts_per_image=2, weight=torch.tensor([1, 2, 0, 1]))
    )
    assert (2 * weights["text"].sum() + weights["image"].sum()).item() == pytest.approx(1)
    assert torch.allclose(weights["image"] * 3, torch.tensor([0.25, 0.5, 0, 0.25]))
