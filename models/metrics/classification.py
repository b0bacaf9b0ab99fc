"""Classes from embeddings: zero-shot by prompts, by the nearest neighbours, by a linear probe."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from models.metrics.retrieval import TOLERANCE, similarities

TOP = (1, 5)
# as Wu et al. 2018 and DINO (Caron et al. 2021) weigh neighbours
NEIGHBOURS, TEMPERATURE = (20, 0.07)
LEAST_TO_PROBE = 5  # training images: a fifth of them chooses the strength
# of the penalty's inverse, as CLIP's sweep begins
PROBE_STRENGTHS = tuple(10.0**power for power in range(-6, 7, 2))


def class_embeds(prompts: Tensor, label: Tensor, num_classes: int) -> Tensor:
    """[C, D], of length 1: the mean of the prompts [m, D] of each class, `label` [m] (Radford et
    al. 2021, section 3.1.4)."""
    sums = torch.zeros(num_classes, prompts.shape[1]).index_add_(
        0, label, F.normalize(prompts, dim=1)
    )
    return F.normalize(sums, dim=1)


def class_ranks(
    image: Tensor, label: Tensor, classes: Tensor, same: Tensor | None = None
) -> Tensor:
    """Rank (0 = first) of the class `label` [n] of each image [n, D] among all C: int64 [n].

    `classes` [U, D]: `class_embeds`; `same` [C]: the row there of each class, where several have
    the same prompts (ImageNet has two classes "missile"). Of such classes the earlier is before the
    later, as in `argmax`. Any other class that ties with the right one, and one whose similarity is
    not a number, counts as ranked before it, so that a collapsed model scores nothing.
    """
    same = torch.arange(len(classes)) if same is None else same
    earlier = torch.tensor([int((same[:c] == row).sum()) for c, row in enumerate(same.tolist())])
    number = torch.bincount(same, minlength=len(classes)).to(classes.dtype)  # classes of each row
    ranks = torch.empty_like(label)
    for rows, similarity in similarities(image, classes):  # [b, U]
        right = same[label[rows]]
        of_right = similarity.gather(1, right[:, None])
        before = ~(similarity < of_right - TOLERANCE)  # not-a-number is before
        before.scatter_(1, right[:, None], False)
        ranks[rows] = (before.to(number.dtype) @ number).long() + earlier[label[rows]]
    return ranks


def zero_shot_accuracy(
    image: Tensor, label: Tensor, classes: Tensor, same: Tensor | None = None
) -> dict[str, float]:
    """{"top_1": …, "top_5": …, "mean_per_class": …} in 0..1 of images with the ranks of
    `class_ranks`. The last is the mean over all classes that `label` has of their top-1 (VTAB and
    CLIP report Caltech-101, Flowers-102 and pets so: Radford et al. 2021, table 9)."""
    ranks = class_ranks(image, label, classes, same)
    found, first = label.unique(return_inverse=True)[1], (ranks < 1).double()
    sums = torch.zeros(int(found.max()) + 1, dtype=torch.float64).index_add_(0, found, first)
    return {
        **{f"top_{k}": float((ranks < k).double().mean()) for k in TOP},
        "mean_per_class": float((sums / torch.bincount(found)).mean()),
    }


def neighbour_accuracy(
    train: Tensor, train_label: Tensor, test: Tensor, test_label: Tensor, num_classes: int
) -> float:
    """Top-1 of the classes that the `NEIGHBOURS` nearest training images vote for, and any other
    that ties with the last of these, each with exp(similarity / `TEMPERATURE`). A class whose
    votes tie with those of the right one is before it."""
    right = 0.0
    for rows, similarity in similarities(test, train):
        last = similarity.topk(min(NEIGHBOURS, len(train)), dim=1).values[:, -1:]
        row, column = (similarity >= last - TOLERANCE).nonzero(as_tuple=True)
        weight = torch.exp((similarity[row, column] - 1) / TEMPERATURE)
        votes = weight.new_zeros(len(similarity), num_classes)
        votes.index_put_((row, train_label[column]), weight, accumulate=True)
        own = test_label[rows, None]
        of_right = votes.gather(1, own) * (1 - TOLERANCE / TEMPERATURE)
        right += float((votes.scatter(1, own, -torch.inf).amax(1) < of_right[:, 0]).sum())
    return right / len(test)


def probe_accuracy(
    train: Tensor, train_label: Tensor, test: Tensor, test_label: Tensor, seed: int = 0
) -> tuple[float, float]:
    """(top-1, strength) of a logistic regression on frozen embeddings; its strength is chosen on a
    fifth of the training images."""
    from sklearn.linear_model import LogisticRegression

    def fitted(strength: float, rows: Tensor) -> LogisticRegression:
        return LogisticRegression(C=strength, max_iter=1000, random_state=seed).fit(
            train[rows].numpy(), train_label[rows].numpy()
        )

    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    held_out, rest = order[: len(order) // 5], order[len(order) // 5 :]
    if len(train_label[rest].unique()) < 2 or not len(held_out):
        raise ValueError(
            f"a linear probe needs at least {LEAST_TO_PROBE} training images of 2 classes; there "
            f"are {len(train)}"
        )
    scores = {
        s: fitted(s, rest).score(train[held_out].numpy(), train_label[held_out].numpy())
        for s in PROBE_STRENGTHS
    }
    strength = max(scores, key=lambda s: (scores[s], -s))
    return float(fitted(strength, order).score(test.numpy(), test_label.numpy())), strength
