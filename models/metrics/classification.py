"""Classes from embeddings: zero-shot by prompts, by the nearest neighbours, by a linear probe."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from models.metrics.retrieval import TOLERANCE, nearest, similarities

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
    image: Tensor,
    label: Tensor,
    classes: Tensor,
    same: Tensor | None = None,
    margin: float = TOLERANCE,
) -> Tensor:
    """Rank (0 = first) of the class `label` [n] of each image [n, D] among all C: int64 [n].

    `classes` [U, D]: `class_embeds`; `same` [C]: the row there of each class, where several have
    the same prompts (ImageNet has two classes "missile"). Of such classes the earlier is before the
    later, as in `argmax`. Any other class that ties with the right one, and one whose similarity is
    not a number, counts as ranked before it, so that a collapsed model scores nothing. `margin`: of
    a tie; its negative ranks ties behind the right class.
    """
    same = torch.arange(len(classes)) if same is None else same
    earlier = torch.tensor([int((same[:c] == row).sum()) for c, row in enumerate(same.tolist())])
    number = torch.bincount(same, minlength=len(classes)).to(classes.dtype)  # classes of each row
    ranks = torch.empty_like(label)
    for rows, similarity in similarities(image, classes):  # [b, U]
        right = same[label[rows]]
        of_right = similarity.gather(1, right[:, None])
        before = ~(similarity < of_right - margin)  # not-a-number is before
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
    return {
        **{f"top_{k}": float((ranks < k).double().mean()) for k in TOP},
        "mean_per_class": float(group_means(ranks < 1, label).mean()),
    }


def group_means(right: Tensor, group: Tensor) -> Tensor:
    """How many of `right` [n] bool are, in each of the groups that `group` [n] has: float64 [g]."""
    found = group.unique(return_inverse=True)[1]
    sums = torch.zeros(int(found.max()) + 1, dtype=torch.float64)
    return sums.index_add_(0, found, right.double()) / torch.bincount(found)


def predicted_classes(
    image: Tensor, label: Tensor, classes: Tensor, same: Tensor, ranks: Tensor
) -> Tensor:
    """The class that each image [n, D] is taken for: int64 [n]. That is `label` where its rank of
    `class_ranks` is 0, else of the other classes the most similar, of equal ones the first."""
    predicted = label.clone()
    wrong = (ranks > 0).nonzero()[:, 0]
    if len(wrong):
        found = nearest(image[wrong], classes[same], 2)[0]
        is_label = found[:, 0] == label[wrong]
        predicted[wrong] = torch.where(is_label, found[:, -1], found[:, 0])
    return predicted


def f1_macro(predicted: Tensor, label: Tensor) -> float:
    """The mean over all classes of `label` [n] of 2·TP / (2·TP + FP + FN), as iWildCam is measured
    (WILDS: Koh et al. 2021)."""
    classes = label.unique()
    number = int(max(predicted.max(), label.max())) + 1
    found = label[predicted == label].bincount(minlength=number)[classes].double()
    named, there = (each.bincount(minlength=number)[classes] for each in (predicted, label))
    return float((2 * found / (named + there)).mean())


def average_precision(score: Tensor, positive: Tensor, margin: float = TOLERANCE) -> float:
    """The mean, over the positives, of the share of positives among all that are ranked down to it:
    of `score` [n] and `positive` [n] bool. Without positives 0.

    A negative that ties with a positive, within `margin`, and one whose score is not a number,
    counts as ranked before it; with the margin's negative a tie is behind it.
    """
    own = score[positive].nan_to_num(nan=-torch.inf).sort(descending=True).values
    others = score[~positive].nan_to_num(nan=torch.inf).sort().values
    before = len(others) - torch.searchsorted(others, own - margin)
    rank = torch.arange(1, len(own) + 1, dtype=torch.float64, device=own.device)
    return float((rank / (rank + before)).sum()) / max(1, len(own))


def mean_average_precision(
    image: Tensor, target: Tensor, classes: Tensor, same: Tensor, margin: float = TOLERANCE
) -> float:
    """The mean over all classes of `average_precision`, of images [n, D] by their similarity to
    each class. `target` [n, C] bool; `classes` and `same` as of `class_ranks`."""
    found: list[float] = []
    for rows, similarity in similarities(classes[same], image):  # [c, n]
        own = target[:, rows].T
        found += [average_precision(*each, margin) for each in zip(similarity, own)]
    return sum(found) / max(1, len(found))


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
