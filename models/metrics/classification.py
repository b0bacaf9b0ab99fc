"""Classes from embeddings: zero-shot by prompts, by the nearest neighbours, by a linear probe."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from models.metrics.retrieval import best_ranks, nearest

TOP = (1, 5)
NEIGHBOURS, TEMPERATURE = (
    20,
    0.07,
)  # as Wu et al. 2018 and DINO (Caron et al. 2021) weigh neighbours
LEAST_TO_PROBE = 5  # training images: a fifth of them chooses the strength
PROBE_STRENGTHS = tuple(
    10.0**power for power in range(-6, 7, 2)
)  # of the penalty's inverse, as CLIP's sweep begins


def class_embeds(prompts: Tensor, label: Tensor, num_classes: int) -> Tensor:
    """[C, D], of length 1: the mean of the prompts [m, D] of each class, `label` [m] (Radford et
    al. 2021, section 3.1.4)."""
    sums = torch.zeros(num_classes, prompts.shape[1]).index_add_(
        0, label, F.normalize(prompts, dim=1)
    )
    return F.normalize(sums, dim=1)


def zero_shot_accuracy(image: Tensor, label: Tensor, classes: Tensor) -> dict[str, float]:
    """{"top_1": …, "top_5": …} in 0..1 of images [n, D] with classes `label` [n], against
    `class_embeds` [C, D]."""
    ranks = best_ranks(image, label, classes, torch.arange(len(classes)))
    return {f"top_{k}": float((ranks < k).double().mean()) for k in TOP}


def neighbour_accuracy(
    train: Tensor, train_label: Tensor, test: Tensor, test_label: Tensor, num_classes: int
) -> float:
    """Top-1 of the classes that the `NEIGHBOURS` nearest training images vote for, each with
    exp(similarity / `TEMPERATURE`)."""
    index, similarity = nearest(test, train, NEIGHBOURS)
    votes = torch.zeros(len(test), num_classes).scatter_add_(
        1, train_label[index], torch.exp((similarity.float() - 1) / TEMPERATURE)
    )
    return float((votes.argmax(1) == test_label).double().mean())


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
