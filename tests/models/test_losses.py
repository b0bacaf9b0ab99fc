"""InfoNCE in pieces against autograd through the plain cross entropy of the whole matrix, in float64.

Tolerance 1e-10 relative: float64 keeps about 16 digits, and a log-sum-exp over some tens of logits of up to 100 loses a few.
"""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from models.losses import LOGIT_SCALE_LIMIT, InfoNCE, logit_scale_exp

B, D = 13, 6  # samples in the global batch, width of the embeddings
BLOCKS = ((13,), (1, 12), (5, 1, 7), (2, 3, 7, 1))  # rows per replica of one side
CLOSE = {"rtol": 1e-10, "atol": 1e-13}


def embeddings(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(F.normalize(torch.randn(B, D, generator=generator, dtype=torch.float64), dim=1) for _ in range(2))


def reference(images: Tensor, texts: Tensor, logit_scale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss and ∂L/∂ images, texts, logit_scale: one cross entropy per direction, differentiated by autograd."""
    images, texts, logit_scale = (tensor.clone().requires_grad_() for tensor in (images, texts, logit_scale))
    logits = logit_scale.exp() * images @ texts.T
    target = torch.arange(len(images))
    loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    loss.backward()
    return loss.detach(), images.grad, texts.grad, logit_scale.grad


def side(
    own: Tensor, other: Tensor, other_statistics: Tensor, target: Tensor, logit_scale: Tensor, rows: tuple[int, ...]
) -> dict[str, Tensor]:
    """What the replicas of one side compute, each from its own rows: shares and scalar gradients added, rows in order."""
    loss, parameters = InfoNCE(), {"logit_scale": logit_scale}
    share, scalar, grads, statistics = 0.0, 0.0, [], []
    for mine, partner in zip(own.split(rows), target.split(rows)):
        logits = loss.logits(mine, other, parameters)  # [b, B]
        log_sum_exp = loss.statistics(logits)
        d_logits = loss.gradient(logits, log_sum_exp, other_statistics, partner)
        share = share + loss.share(logits, log_sum_exp, partner)
        scalar = scalar + loss.parameter_gradients(d_logits, logits, parameters)["logit_scale"]
        grads.append(loss.embedding_gradient(d_logits, other, parameters))
        statistics.append(log_sum_exp)
    scalar = loss.constrained({"logit_scale": scalar}, parameters)["logit_scale"]
    return {"share": share, "logit_scale": scalar, "embeds": torch.cat(grads), "statistics": torch.cat(statistics)}


def both_sides(images: Tensor, texts: Tensor, logit_scale: Tensor, image_rows=(B,), text_rows=(B,)) -> tuple[dict, dict]:
    """Image side and text side, which exchange nothing but embeddings, the logit scale and one number per row."""
    target, loss, parameters = torch.arange(B), InfoNCE(), {"logit_scale": logit_scale}
    rows, columns = (loss.statistics(loss.logits(a, b, parameters)) for a, b in ((images, texts), (texts, images)))
    return (
        side(images, texts, columns, target, logit_scale, image_rows),
        side(texts, images, rows, target, logit_scale, text_rows),
    )


@pytest.mark.parametrize("image_rows", BLOCKS, ids=str)
@pytest.mark.parametrize("text_rows", BLOCKS, ids=str)
@pytest.mark.parametrize("scale", [1.0, 14.3, 90.0])
def test_pieces_add_up_to_the_whole(image_rows, text_rows, scale):
    images, texts = embeddings(seed=1)
    logit_scale = torch.tensor([math.log(scale)], dtype=torch.float64)
    loss, d_images, d_texts, d_scale = reference(images, texts, logit_scale)
    image, text = both_sides(images, texts, logit_scale, image_rows, text_rows)
    torch.testing.assert_close((image["share"] + text["share"]).reshape(()), loss, **CLOSE)
    torch.testing.assert_close(image["embeds"], d_images, **CLOSE)
    torch.testing.assert_close(text["embeds"], d_texts, **CLOSE)
    # either side's rows hold the whole gradient of the scale: ∂L/∂s is the same matrix, seen by rows or by columns
    torch.testing.assert_close(image["logit_scale"], d_scale, **CLOSE)
    torch.testing.assert_close(text["logit_scale"], d_scale, **CLOSE)


def test_rows_may_stand_in_any_order():
    """A replica's rows are not a contiguous piece of the global batch: `target` says where the partners are."""
    images, texts = embeddings(seed=2)
    logit_scale = torch.tensor([2.0], dtype=torch.float64)
    _, d_images, _, d_scale = reference(images, texts, logit_scale)
    order = torch.randperm(B, generator=torch.Generator().manual_seed(3))
    columns = InfoNCE().statistics(InfoNCE().logits(texts, images, {"logit_scale": logit_scale}))
    image = side(images[order], texts, columns, order, logit_scale, (6, 7))
    torch.testing.assert_close(image["embeds"], d_images[order], **CLOSE)
    torch.testing.assert_close(image["logit_scale"], d_scale, **CLOSE)


def test_value_of_a_model_that_knows_nothing():
    """All embeddings equal: every candidate is as likely, the loss is log B and no embedding can do better alone."""
    same = F.normalize(torch.ones(B, D, dtype=torch.float64), dim=1)
    image, text = both_sides(same, same, torch.zeros(1, dtype=torch.float64))
    assert float(image["share"] + text["share"]) == pytest.approx(math.log(B), rel=1e-12)
    assert float(image["embeds"].abs().max()) < 1e-15


def test_large_logits_do_not_overflow():
    images, texts = (tensor.float() for tensor in embeddings(seed=4))
    image, text = both_sides(images, texts, torch.tensor([LOGIT_SCALE_LIMIT]))
    assert all(bool(tensor.isfinite().all()) for part in (image, text) for tensor in part.values())


# -- the limit of the scale ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "log_scale, expected", [(0.0, 1.0), (math.log(99.0), 99.0), (LOGIT_SCALE_LIMIT, 100.0), (5.0, 100.0), (80.0, 100.0)]
)
def test_the_scale_is_at_most_100(log_scale, expected):
    assert float(logit_scale_exp(torch.tensor([log_scale], dtype=torch.float64))) == pytest.approx(expected, rel=1e-12)


def test_beyond_the_limit_the_loss_is_that_at_100():
    images, texts = embeddings(seed=5)
    at_limit, beyond = (torch.tensor([value], dtype=torch.float64) for value in (math.log(100.0), 6.0))
    loss, d_images, d_texts, _ = reference(images, texts, at_limit)
    image, text = both_sides(images, texts, beyond)
    torch.testing.assert_close((image["share"] + text["share"]).reshape(()), loss, **CLOSE)
    torch.testing.assert_close(image["embeds"], d_images, **CLOSE)
    torch.testing.assert_close(text["embeds"], d_texts, **CLOSE)


@pytest.mark.parametrize("log_scale", [LOGIT_SCALE_LIMIT, 6.0])
def test_an_outward_gradient_is_stopped_and_an_inward_one_passes(log_scale):
    logit_scale, at_limit = (torch.tensor([value], dtype=torch.float64) for value in (log_scale, LOGIT_SCALE_LIMIT))
    images, _ = embeddings(seed=6)
    noise = 0.02 * torch.randn(B, D, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    matched = F.normalize(images + noise, dim=1)  # partners are each other's nearest: a larger scale would lower the loss
    mismatched = matched.roll(1, 0)  # partners are far apart: a larger scale would raise the loss
    assert float(reference(images, matched, at_limit)[3]) < -1e-6 and float(reference(images, mismatched, at_limit)[3]) > 1.0
    assert float(both_sides(images, matched, logit_scale)[0]["logit_scale"]) == 0.0
    torch.testing.assert_close(
        both_sides(images, mismatched, logit_scale)[0]["logit_scale"], reference(images, mismatched, at_limit)[3], **CLOSE
    )


def test_below_the_limit_an_outward_gradient_passes():
    images, _ = embeddings(seed=6)
    logit_scale = torch.tensor([math.log(99.9)], dtype=torch.float64)
    image, _ = both_sides(images, images.clone(), logit_scale)
    expected = reference(images, images, logit_scale)[3]
    assert float(expected) < 0
    torch.testing.assert_close(image["logit_scale"], expected, **CLOSE)


def test_at_the_limit_the_rule_does_not_depend_on_the_blocks():
    """Most pairs match well and want a larger scale, one is far off and wants a smaller one: blocks have both signs."""
    images, _ = embeddings(seed=6)
    texts = images.clone()
    texts[[0, 1]] = texts[[1, 0]]
    logit_scale = torch.tensor([LOGIT_SCALE_LIMIT], dtype=torch.float64)
    for others in (images, texts):
        whole = both_sides(images, others, logit_scale)[0]["logit_scale"]
        for rows in ((1, 12), (2, 11), (5, 1, 7)):
            torch.testing.assert_close(both_sides(images, others, logit_scale, image_rows=rows)[0]["logit_scale"], whole, **CLOSE)
