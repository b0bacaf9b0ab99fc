"""The losses in pieces against autograd through the plain formula on the whole matrix, in float64.

Tolerance 1e-10 relative: float64 keeps about 16 digits, and a log-sum-exp over some tens of logits
of up to 100 loses a few.
"""

import math
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.memory_probe import TensorBytes
from engine.planning.costs import block_bytes
from models.losses import (
    DUPLICATES,
    LOGIT_SCALE_LIMIT,
    InfoNCE,
    Matching,
    Prefixed,
    Sigmoid,
    Targets,
    build_loss,
    logit_scale_exp,
    phrase_duplicates,
)
from models.losses.blocks import COPIES, similarity_blocks

B, D = 13, 6  # samples in the global batch, width of the embeddings
REPLICAS = ((13,), (1, 12), (5, 1, 7), (2, 3, 7, 1))  # rows of each
CLOSE = {"rtol": 1e-10, "atol": 1e-13}
FOUR_ROWS = COPIES * 8 * B * 4  # bytes for blocks of 4 of 13 rows against 13


class Rows(NamedTuple):
    embeds: Tensor
    label: Tensor
    weight: Tensor | None = None
    keys: Tensor | None = None
    sample: Tensor | None = None


def unit(*shape: int, seed: int) -> Tensor:
    return F.normalize(
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64),
        dim=1,
    )


def embeddings(seed: int) -> tuple[Tensor, Tensor]:
    return unit(B, D, seed=2 * seed), unit(B, D, seed=2 * seed + 1)


def pairs(images: Tensor, texts: Tensor) -> dict[str, Rows]:
    """Row i of either side is the one positive of row i of the other."""
    return {
        "image": Rows(images, torch.arange(len(images))),
        "text": Rows(texts, torch.arange(len(texts))),
    }


def scalars(loss, log_scale: float, bias: float = -10.0) -> dict[str, Tensor]:
    values = {"logit_scale": log_scale, "logit_bias": bias}
    return {name: torch.tensor([values[name]], dtype=torch.float64) for name in loss.parameters}


# -- the formulas, plainly


def infonce(logits, positive, image_weight, text_weight, loss, masked) -> dict[str, Tensor]:
    """What each row adds to the loss."""

    def direction(logits: Tensor, positive: Tensor, weight: Tensor, masked: Tensor) -> Tensor:
        target = (1 - loss.label_smoothing) * positive / positive.sum(1, keepdim=True).clamp(min=1)
        target = target + loss.label_smoothing / logits.shape[1]
        softmax_over = logits.masked_fill(masked, -math.inf).logsumexp(1, keepdim=True)
        return weight * (target * (softmax_over - logits)).sum(1) / weight.sum() / 2

    return {
        "image": direction(logits, positive, image_weight, masked),
        "text": direction(logits.T, positive.T, text_weight, masked.T),
    }


def sigmoid(logits, positive, image_weight, text_weight, loss, masked) -> dict[str, Tensor]:
    """The same: half of the loss of a pair by the weight of its image, half by that of its text."""
    losses = ~masked * -F.logsigmoid((2 * positive - 1) * logits) / len(logits) / 2
    by_image = image_weight[:, None] / image_weight.mean() * losses
    return {"image": by_image.sum(1), "text": (text_weight / text_weight.mean() * losses).sum(0)}


def targets_by_hand(loss, sides: dict[str, Rows]) -> tuple[Tensor, Tensor]:
    """Positives and masked pairs of images and texts, bool [M, N], pair by pair."""
    own = sides["image"].label[:, None] == sides["text"].label
    nothing = torch.zeros_like(own)
    if sides["image"].keys is None:
        return own, nothing
    equal = torch.tensor(
        [
            [image[0] in text[1:] or text[0] in image[1:] for text in sides["text"].keys.tolist()]
            for image in sides["image"].keys.tolist()
        ]
    )
    how = loss.targets.duplicates
    return equal if how == "positives" else own, equal & ~own if how == "masked" else nothing


def reference(loss, sides: dict[str, Rows], parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The loss and its gradients: one formula on the whole matrix, differentiated by autograd, in
    float64."""
    leaves = {
        branch: rows.embeds.double().clone().requires_grad_() for branch, rows in sides.items()
    }
    leaves |= {name: value.double().clone().requires_grad_() for name, value in parameters.items()}
    logits = leaves["logit_scale"].exp() * leaves["image"] @ leaves["text"].T + leaves.get(
        "logit_bias", 0.0
    )
    positive, masked = targets_by_hand(loss, sides)
    weights = [
        torch.ones(len(r.label)).double() if r.weight is None else r.weight.double()
        for r in sides.values()
    ]
    if isinstance(loss, InfoNCE):  # what is nobody's asks nothing
        weights = [weight * (r.label >= 0) for weight, r in zip(weights, sides.values())]
    formula = infonce if isinstance(loss, InfoNCE) else sigmoid
    shares = formula(logits, positive.double(), *weights, loss, masked)
    value = shares["image"].sum() + shares["text"].sum()
    shares = {f"shares of {branch}": share.detach() for branch, share in shares.items()}
    return {
        "loss": value.detach(),
        **shares,
        **dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())))),
    }


# -- the same in pieces


def side_by_side(loss, sides, parameters, rows: dict[str, tuple[int, ...]], order=None) -> dict:
    """What the replicas of both sides find, each from its own rows; they exchange nothing but rows,
    scalars and one number per row.

    `rows[branch]`: how many each replica has, of the places in `order` (from the first to the last
    if it is not given).
    """
    order = order or {branch: torch.arange(len(side.label)) for branch, side in sides.items()}
    mine = {branch: order[branch].split(rows[branch]) for branch in sides}
    statistics = {
        branch: torch.cat(
            [
                own
                for m in mine[branch]
                if (own := loss.statistics(sides, branch, m, parameters)) is not None
            ]
            or [torch.empty(0)]
        )
        for branch in sides
    }
    in_order = {
        branch: torch.empty_like(s).index_copy_(0, order[branch], s) if len(s) else None
        for branch, s in statistics.items()
    }
    found = {"loss": torch.zeros(())}
    for branch, side in sides.items():
        parts = [loss.part(sides, branch, m, in_order, parameters) for m in mine[branch]]
        shares = torch.cat([part.shares[branch] for part in parts])
        found[f"shares of {branch}"] = torch.empty_like(shares).index_copy_(
            0, order[branch], shares
        )
        found["loss"] = found["loss"] + shares.sum()
        found[branch] = torch.empty_like(side.embeds).index_copy_(
            0, order[branch], torch.cat([part.embeds[branch] for part in parts])
        )
        whole = {name: sum(part.parameters[name] for part in parts) for name in parameters}
        found[f"scalars of {branch}"] = loss.constrained(whole, parameters)
    return found


def at_once(loss, sides, parameters) -> dict:
    part = loss.whole(sides, parameters)
    shares = {f"shares of {branch}": share for branch, share in part.shares.items()}
    return {
        "loss": sum(s.sum() for s in shares.values()),
        **shares,
        **part.embeds,
        "scalars of image": loss.constrained(part.parameters, parameters),
    }


def check(found: dict, expected: dict[str, Tensor], **tolerance: float) -> None:
    compared = {name: found[name] for name in found if not name.startswith("scalars")}
    for side in ("scalars of image", "scalars of text"):
        # either side's rows hold the whole gradient of the scalars
        compared |= {f"{name} by {side}": value for name, value in found.get(side, {}).items()}
    for name, value in compared.items():
        of = name.partition(" by ")[0]
        if of in expected:
            torch.testing.assert_close(
                value.double(),
                expected[of],
                **(tolerance or CLOSE),
                msg=lambda m, n=name: f"{n}: {m}",
            )


both = pytest.mark.parametrize("loss", [InfoNCE(0.1), Sigmoid()], ids=str)


def fp32(sides: dict[str, Rows], parameters: dict[str, Tensor]):
    sides = {branch: rows._replace(embeds=rows.embeds.float()) for branch, rows in sides.items()}
    return sides, {name: value.float() for name, value in parameters.items()}


def test_pieces_add_up_to_the_whole(subtests):
    for loss, image_rows, text_rows in product(
        (InfoNCE(), InfoNCE(work_bytes=FOUR_ROWS), Sigmoid(), Sigmoid(FOUR_ROWS)),
        REPLICAS,
        REPLICAS,
    ):
        with subtests.test(f"{loss}, {image_rows}, {text_rows}"):
            sides = pairs(*embeddings(seed=1))
            for scale in (1.0, 14.3, 90.0):
                parameters = scalars(loss, math.log(scale))
                expected = reference(loss, sides, parameters)
                check(
                    side_by_side(loss, sides, parameters, {"image": image_rows, "text": text_rows}),
                    expected,
                )
            check(at_once(loss, sides, parameters), expected)


LABELS = {
    "several texts per image": (torch.arange(5), torch.arange(5).repeat_interleave(3)),
    "several images per text": (torch.arange(5).repeat(3), torch.arange(5)),
    "classes of all sizes": (
        torch.tensor([7, 7, 7, 2, 9, 7, 9]),
        torch.tensor([9, 2, 7, 2, 9, 9, 2, 7, 9, 9, 9]),
    ),
    "texts that are nobody's": (torch.arange(5), torch.tensor([3, 1, -1, 0, 2, 4, -1, -1])),
}


def test_positives_weights_and_smoothing(subtests):
    """Rows without weight ask nothing, but are candidates of the others. The numbers of rows differ
    between the sides."""
    smoothed = InfoNCE(0.1, work_bytes=1), InfoNCE(0.3, work_bytes=FOUR_ROWS)
    losses = InfoNCE(), InfoNCE(0.1), *smoothed, Sigmoid(), Sigmoid(1), Sigmoid(FOUR_ROWS)
    for loss, weighted, (kind, labels) in product(losses, (False, True), LABELS.items()):
        with subtests.test(f"{loss}, weighted={weighted}, {kind}"):
            generator = torch.Generator().manual_seed(3)
            sides = {
                branch: Rows(
                    unit(len(label), D, seed=len(label)),
                    label,
                    torch.randint(0, 4, label.shape, generator=generator) * 10**6
                    if weighted
                    else None,
                )
                for branch, label in zip(("image", "text"), labels)
            }
            parameters = scalars(loss, 1.3, bias=-2.0)
            expected = reference(loss, sides, parameters)
            rows = {
                branch: (2, len(label) - 3, 1) for branch, label in zip(("image", "text"), labels)
            }
            order = {
                branch: torch.randperm(len(label), generator=generator)
                for branch, label in zip(("image", "text"), labels)
            }
            check(side_by_side(loss, sides, parameters, rows, order), expected)
            check(at_once(loss, sides, parameters), expected)


def test_samples_with_equal_values(subtests):
    """Images with three texts each; some images and some texts are equal, also across both."""
    losses = InfoNCE(0.1), InfoNCE(work_bytes=FOUR_ROWS), Sigmoid(FOUR_ROWS)
    for loss, how in product(losses, DUPLICATES):
        with subtests.test(f"{loss}, {how}"):
            draw = torch.Generator().manual_seed(5)
            image, text = (
                torch.randint(0, n, (k,), generator=draw) for n, k in ((9, B), (25, 3 * B))
            )
            whose = torch.arange(B).repeat_interleave(3)
            sides = {
                "image": Rows(
                    unit(B, D, seed=1),
                    torch.arange(B),
                    None,
                    torch.cat([image[:, None], text.view(B, 3)], 1),
                ),
                "text": Rows(
                    unit(3 * B, D, seed=2), whose, None, torch.stack([text, image[whose]], 1)
                ),
            }
            loss, parameters = replace(loss, targets=Targets(how)), scalars(loss, 1.3, bias=-2.0)
            expected = reference(loss, sides, parameters)
            check(
                side_by_side(loss, sides, parameters, {"image": (4, 9), "text": (20, 19)}), expected
            )
            check(at_once(loss, sides, parameters), expected)


def test_equal_values_are_not_drawn_as_negatives():
    sides = pairs(*(unit(3, D, seed=s) for s in (1, 2)))
    keys = torch.tensor([[1, 5], [1, 6], [2, 6]])
    sides["image"] = sides["image"]._replace(keys=keys)
    sides["text"] = sides["text"]._replace(keys=keys[:, [1, 0]])
    given = sides, "image", torch.arange(3), scalars(InfoNCE(), 1.0), 7
    for how in DUPLICATES:
        drawn = Matching(targets=Targets(how)).negatives(*given).tolist()
        assert drawn == [2, -1, 0] or (how == "negatives" and drawn[1] in (0, 2)), how


@both
def test_rows_in_any_order_replicas_without_rows_and_equal_weights(loss):
    """A replica's rows are not a contiguous piece of the global batch: `mine` says which they
    are."""
    sides, parameters = pairs(*embeddings(seed=2)), scalars(loss, 2.0)
    order = {
        branch: torch.randperm(B, generator=torch.Generator().manual_seed(s))
        for s, branch in enumerate(sides)
    }
    expected = reference(loss, sides, parameters)
    check(side_by_side(loss, sides, parameters, {"image": (6, 7), "text": (13,)}, order), expected)
    check(side_by_side(loss, sides, parameters, {"image": (0, 13), "text": (13, 0)}), expected)
    equal = torch.full((B,), 250_000)
    weighted = {branch: rows._replace(weight=equal) for branch, rows in sides.items()}
    check(at_once(loss, weighted, parameters), expected)


@both
def test_in_fp32_it_is_within_1e_6_of_float64(loss):
    """Of the gradients' norm; bias 0, where the sigmoid loss is largest."""
    whose = torch.arange(40).repeat_interleave(3)
    sides = {"image": Rows(unit(40, 64, seed=1), torch.arange(40))}
    sides |= {"text": Rows(unit(120, 64, seed=2), whose)}
    given = fp32(sides, scalars(loss, math.log(14.3), bias=0.0))
    expected = reference(loss, *given)
    for found in (
        at_once(loss, *given),
        side_by_side(loss, *given, {"image": (9, 31), "text": (120,)}),
    ):
        assert found["loss"].dtype == found["image"].dtype == torch.float32
        for name in ("loss", "image", "text"):
            error = float((found[name] - expected[name]).norm())
            assert error <= 1e-6 * float(expected[name].norm()), name


class Largest(TorchDispatchMode):
    """The most elements that any tensor made here has."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        sizes = (leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, Tensor))
        self.numel = max([self.numel, *sizes])
        return made


@pytest.mark.parametrize(
    "loss", [InfoNCE(0.1, COPIES * 4 * 8 * 300), Sigmoid(COPIES * 4 * 8 * 300)], ids=str
)
def test_the_whole_matrix_is_never_there(loss):
    """Blocks of 8 rows of 300, embeddings of 300 × 6: of either side's gradient as much, of the
    matrix nothing larger than a block."""
    given = fp32(pairs(unit(300, D, seed=1), unit(300, D, seed=2)), scalars(loss, 2.0))
    for compute, more in ((at_once, ()), (side_by_side, [{"image": (300,), "text": (300,)}])):
        with Largest() as largest:
            compute(loss, *given, *more)
        assert largest.numel == 8 * 300


@pytest.mark.parametrize("loss", [InfoNCE(0.1, 2**22), Sigmoid(2**22)], ids=str)
def test_a_block_with_all_that_is_made_of_it_takes_no_more_than_it_may(loss):
    """Over many blocks, beside embeddings of 4000 × 2 and what is as small: that of the block
    before is gone when the next one is made."""
    sides, parameters = fp32(
        pairs(unit(4000, 2, seed=1), unit(4000, 2, seed=2)), scalars(loss, 2.0)
    )
    mine = torch.arange(1000)
    with torch.no_grad(), TensorBytes() as held:
        held.mark()
        statistics = {"image": torch.zeros(4000), "text": torch.zeros(4000)}
        loss.statistics(sides, "image", mine, parameters)
        loss.part(sides, "image", mine, statistics, parameters)
    assert 2**21 < held.peak_bytes - held.marked_bytes < 2**22 + 10 * 4 * 2 * 4000


def test_value_of_a_model_that_knows_nothing():
    """All embeddings equal: every candidate is as likely, the loss is log B and no embedding can do
    better alone."""
    same = F.normalize(torch.ones(B, D, dtype=torch.float64), dim=1)
    found = at_once(InfoNCE(), pairs(same, same), scalars(InfoNCE(), 0.0))
    assert float(found["loss"]) == pytest.approx(math.log(B), rel=1e-12)
    assert float(found["image"].abs().max()) < 1e-15


@both
def test_large_logits_do_not_overflow(loss):
    given = fp32(pairs(*embeddings(seed=4)), scalars(loss, LOGIT_SCALE_LIMIT))
    rows = {"image": (13,), "text": (13,)}
    for found in (at_once(loss, *given), side_by_side(loss, *given, rows)):
        assert all(bool(leaf.isfinite().all()) for leaf in tree_leaves(found))


@pytest.mark.parametrize("name", ["infonce", "milnce"])
def test_a_pair_that_is_compared_with_no_other_has_a_gradient_of_zero(name):
    """Ranks round log-sum-exps of the same similarity differently; here by a thousandth."""
    loss, parameters = build_loss(name), {"logit_scale": torch.full((1,), 3.0)}
    sides = pairs(*(unit(1, D, seed=seed).float() for seed in (1, 2)))
    for branch in sides:
        mine = torch.arange(1)
        own = loss.statistics(sides, branch, mine, parameters)
        other = own + 1e-3
        statistics = {each: own if each == branch else other for each in sides}
        part = loss.part(sides, branch, mine, statistics, parameters)
        assert not part.embeds[branch].any() and not part.parameters["logit_scale"].any()
    whole = loss.whole(sides, parameters)
    assert not any(gradient.any() for gradient in (*whole.embeds.values(),))
    two = pairs(*(unit(2, D, seed=seed).float() for seed in (1, 2)))
    assert all(gradient.any() for gradient in loss.whole(two, parameters).embeds.values())


def test_a_row_without_a_positive_is_not_overlooked():
    sides = pairs(*embeddings(seed=1))
    alone = {**sides, "text": sides["text"]._replace(label=torch.arange(B) + 1)}
    assert at_once(InfoNCE(), alone, scalars(InfoNCE(), 1.0))["loss"].isnan()


def test_equals_open_clip():
    """Their losses on the same embeddings, in float64, at the initial scale and bias of each."""
    open_clip = pytest.importorskip("open_clip.loss", reason="open_clip_torch is not installed")
    for loss, theirs in ((InfoNCE(), open_clip.ClipLoss()), (Sigmoid(), open_clip.SigLipLoss())):
        sides = pairs(*embeddings(seed=9))
        parameters = scalars(loss, loss.parameters["logit_scale"])
        given = (sides["image"].embeds, sides["text"].embeds, *parameters.values())
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        value = theirs(leaves[0], leaves[1], leaves[2].exp(), *leaves[3:])
        expected = dict(zip((*sides, *parameters), torch.autograd.grad(value, leaves)))
        expected |= {"loss": value.detach().reshape(())}
        for found in (
            at_once(loss, sides, parameters),
            side_by_side(loss, sides, parameters, {"image": (5, 8), "text": (13,)}),
        ):
            check(found, expected, rtol=1e-6, atol=1e-9)


# -- what is asked for


def test_losses_by_name():
    assert build_loss("infonce", 0.1) == InfoNCE(0.1) and build_loss("sigmoid") == Sigmoid()
    assert InfoNCE.parameters == {"logit_scale": math.log(1 / 0.07)}
    assert Sigmoid.parameters == {"logit_scale": math.log(10), "logit_bias": -10.0}
    for given, message in (
        (("siglip",), "'siglip' is not known; give one of infonce, sigmoid"),
        (("sigmoid", 0.1), "smoothing 0.1 is for loss 'infonce'"),
        (("infonce", 1.0), "smoothing 1.0 is not in 0 <= F < 1"),
    ):
        with pytest.raises(ValueError, match=message):
            build_loss(*given)
    # pairs that are judged alone
    assert Sigmoid().statistics(pairs(*embeddings(seed=1)), "image", torch.arange(B), {}) is None


# -- the limit of the scale


def test_the_scale_is_at_most_100():
    for given, expected in ((0.0, 1.0), (math.log(99.0), 99.0), (LOGIT_SCALE_LIMIT, 100.0)):
        found = float(logit_scale_exp(torch.tensor([given], dtype=torch.float64)))
        assert found == pytest.approx(expected, rel=1e-12)
    for above in (5.0, 80.0):
        assert float(logit_scale_exp(torch.tensor([above]))) == pytest.approx(100.0)
        for loss in (InfoNCE(), Sigmoid()):  # as metrics show it
            name, shown = loss.reported("logit_scale", above)
            assert name == "logit_scale_exp" and shown == pytest.approx(100.0)
            assert loss.reported("logit_bias", above) == ("logit_bias", above)


def scale_gradient(images: Tensor, texts: Tensor, log_scale: float) -> Tensor:
    found = at_once(InfoNCE(), pairs(images, texts), scalars(InfoNCE(), log_scale))
    return found["scalars of image"]["logit_scale"]


def plain_scale_gradient(images: Tensor, texts: Tensor, log_scale: float) -> Tensor:
    sides = pairs(images, texts)
    return reference(InfoNCE(), sides, scalars(InfoNCE(), log_scale))["logit_scale"]


@both
def test_beyond_the_limit_the_loss_is_that_at_100(loss):
    sides = pairs(*embeddings(seed=5))
    expected = reference(loss, sides, scalars(loss, math.log(100.0)))
    found = at_once(loss, sides, scalars(loss, 6.0))
    check({key: value for key, value in found.items() if not key.startswith("scalars")}, expected)


def test_an_outward_gradient_is_stopped_at_the_limit_and_an_inward_one_passes():
    images, _ = embeddings(seed=6)
    draw = torch.Generator().manual_seed(7)
    noise = 0.02 * torch.randn(B, D, generator=draw, dtype=torch.float64)
    # partners are each other's nearest: a larger scale would lower the loss
    matched = F.normalize(images + noise, dim=1)
    mismatched = matched.roll(1, 0)  # partners are far apart: a larger scale would raise it
    inward = plain_scale_gradient(images, mismatched, LOGIT_SCALE_LIMIT)
    assert float(plain_scale_gradient(images, matched, LOGIT_SCALE_LIMIT)) < -1e-6
    assert float(inward) > 1.0
    for log_scale in (LOGIT_SCALE_LIMIT, 6.0):
        assert float(scale_gradient(images, matched, log_scale)) == 0.0
        found = scale_gradient(images, mismatched, log_scale)
        torch.testing.assert_close(found, inward, **CLOSE)
    below = math.log(99.9)
    expected = plain_scale_gradient(images, images.clone(), below)
    assert float(expected) < 0
    torch.testing.assert_close(scale_gradient(images, images.clone(), below), expected, **CLOSE)


def test_at_the_limit_the_rule_does_not_depend_on_the_blocks():
    """Most pairs match well and want a larger scale, one is far off and wants a smaller one: blocks
    have both signs."""
    images, _ = embeddings(seed=6)
    texts = images.clone()
    texts[[0, 1]] = texts[[1, 0]]
    parameters = scalars(InfoNCE(), LOGIT_SCALE_LIMIT)
    for others, rows in product((images, texts), ((1, 12), (2, 11), (5, 1, 7))):
        rows = {"image": rows, "text": (13,)}
        found = side_by_side(InfoNCE(), pairs(images, others), parameters, rows)
        torch.testing.assert_close(
            found["scalars of image"]["logit_scale"],
            scale_gradient(images, others, LOGIT_SCALE_LIMIT),
            **CLOSE,
        )


@pytest.mark.parametrize("name", ["infonce", "milnce", "sigmoid"])
@pytest.mark.parametrize("how", DUPLICATES)
def test_a_negative_that_equals_every_phrase_leaves_loss_and_gradients_finite(name, how):
    """Regions that are all called "a dot", with "a dot" among the negatives too: under `masked` its
    column has nothing left to compare with."""
    if how == "positives" and phrase_duplicates(name) != how:
        return
    draw = torch.Generator().manual_seed(0)
    region, phrase = (
        F.normalize(torch.randn(n, 8, generator=draw, dtype=torch.float64), dim=1) for n in (3, 4)
    )
    label, own, same = torch.tensor([0, 1, 2, -1]), torch.arange(3), torch.full((4,), 9)
    sides = {
        "region": Rows(region, label[:3], None, torch.stack([own + 20, same[:3]], 1)),
        "phrase": Rows(phrase, label, None, torch.stack([same, torch.tensor([20, 21, 22, 9])], 1)),
    }
    loss = build_loss(name, duplicates=how)
    parameters = {each: torch.tensor([v]).double() for each, v in loss.parameters.items()}
    rows = {branch: torch.arange(len(side.label)) for branch, side in sides.items()}
    statistics = {b: loss.statistics(sides, b, rows[b], parameters) for b in sides}
    parts = [loss.part(sides, b, rows[b], statistics, parameters) for b in sides]
    whole = loss.whole(sides, parameters)
    for part in (*parts, whole):
        for values in (*part.shares.values(), *part.embeds.values(), *part.parameters.values()):
            assert values.isfinite().all(), (name, how)
    shares = sum(part.shares[b].sum() for part, b in zip(parts, sides))
    torch.testing.assert_close(shares, sum(share.sum() for share in whole.shares.values()))
    if how == "masked" and name != "sigmoid":  # a softmax over the own phrase alone
        assert max(float(each.abs().max()) for each in whole.embeds.values()) < 1e-12


@pytest.mark.parametrize(
    ("device", "gib", "rows"), [("cpu", 80, 8), ("cuda", 80, 160), ("cuda", 2, 8)]
)
def test_blocks_are_as_large_as_the_memory_of_the_device_allows(device, gib, rows):
    """Each block reads the whole other side, 1 GB of half a million rows. The planner counts as
    many bytes."""
    columns, memory = 2**19, SimpleNamespace(total_memory=gib << 30)
    made_up = mock.patch.object(torch.cuda, "get_device_properties", return_value=memory)
    with FakeTensorMode(), made_up, torch.device(device):
        sides = pairs(torch.zeros(2 * rows, 4), torch.zeros(columns, 4))
        mine, scale = torch.arange(2 * rows), torch.ones(())
        sizes = [len(own) for _, own, _ in similarity_blocks(sides, "image", mine, scale, None)]
    assert sizes == [rows, rows]
    counted = block_bytes((gib << 30) * (device == "cuda"))
    assert rows == counted // (COPIES * 4 * columns)


# -- prefixes of the embeddings


@pytest.mark.parametrize("name", ["infonce", "sigmoid", "milnce"])
def test_a_loss_over_prefixes_is_the_mean_over_embeddings_that_are_cut(name):
    """In pieces and whole, against autograd through cutting and normalising."""
    images, texts = embeddings(4)
    inner, dims = build_loss(name), (2, 4)
    loss, given = Prefixed(inner, dims), scalars(inner, 2.5)
    leaves = [images.clone().requires_grad_(), texts.clone().requires_grad_()]
    learned = {key: value.clone().requires_grad_() for key, value in given.items()}

    def of(width: int) -> Tensor:
        cut = leaves  # as they are
        if width < D:
            cut = [F.normalize(each[:, :width], dim=1) for each in leaves]
        return _Through.apply(inner, tuple(learned), *cut, *learned.values())

    expected = torch.stack([of(2), of(4), of(D)]).mean()
    expected.backward()
    sides = pairs(images, texts)
    whole = loss.whole(sides, given)
    for replicas in REPLICAS:
        parts = [list(torch.arange(B).split(replicas))] * 2
        statistics = {
            branch: torch.cat([loss.statistics(sides, branch, mine, given) for mine in split])
            for branch, split in zip(sides, parts)
            if loss.statistics(sides, branch, split[0], given) is not None
        }
        total, scalar = 0.0, {key: torch.zeros(1, dtype=torch.float64) for key in given}
        for branch, split, leaf in zip(sides, parts, leaves):
            made = [loss.part(sides, branch, mine, statistics, given) for mine in split]
            total = total + sum(part.shares[branch].sum() for part in made)
            gradient = torch.cat([part.embeds[branch] for part in made])
            torch.testing.assert_close(gradient, leaf.grad, **CLOSE)
            torch.testing.assert_close(whole.embeds[branch], leaf.grad, **CLOSE)
            if branch == "image":
                for part in made:
                    scalar = {key: scalar[key] + part.parameters[key] for key in scalar}
        torch.testing.assert_close(total, expected.detach(), **CLOSE)
        for key, value in learned.items():
            torch.testing.assert_close(scalar[key], value.grad, **CLOSE)
            torch.testing.assert_close(whole.parameters[key], value.grad, **CLOSE)


class _Through(torch.autograd.Function):
    """A loss of two sides, by its own gradients."""

    @staticmethod
    def forward(ctx, loss, names, images, texts, *values):
        found = loss.whole(pairs(images, texts), dict(zip(names, values)))
        ctx.found = [found.embeds["image"], found.embeds["text"]]
        ctx.found += [found.parameters[name] for name in names]
        return sum(shares.sum() for shares in found.shares.values())

    @staticmethod
    def backward(ctx, gradient):
        return None, None, *(gradient * each for each in ctx.found)


def test_prefixes_rise_and_are_shorter_than_the_embeddings():
    images, texts = embeddings(4)
    for wrong in ((), (4, 2), (2, 2), (0, 2)):
        with pytest.raises(ValueError, match="rise"):
            Prefixed(InfoNCE(), wrong)
    with pytest.raises(ValueError, match=f"below {D}"):
        Prefixed(InfoNCE(), (2, D)).whole(pairs(images, texts), scalars(InfoNCE(), 1.0))
