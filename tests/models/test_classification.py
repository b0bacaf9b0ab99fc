"""Classes from embeddings, against what scikit-learn and counting by hand say."""

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    average_precision_score,
    balanced_accuracy_score,
    f1_score,
    top_k_accuracy_score,
)
from sklearn.neighbors import KNeighborsClassifier
from torch.nn import functional as F

from models.metrics.classification import (
    NEIGHBOURS,
    TEMPERATURE,
    average_precision,
    class_embeds,
    class_ranks,
    f1_macro,
    mean_average_precision,
    neighbour_accuracy,
    predicted_classes,
    probe_accuracy,
    zero_shot_accuracy,
)
from models.metrics.retrieval import TOLERANCE


def clusters(per_class, num_classes=4, width=8, spread=0.5, seed=0):
    """[n, D] of length 1 around a point per class, and the classes [n]."""
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(num_classes, width, generator=torch.Generator().manual_seed(99))
    label = torch.arange(num_classes).repeat(per_class)
    return F.normalize(
        centres[label] + spread * torch.randn(len(label), width, generator=draw), dim=1
    ), label


def test_a_class_is_the_mean_direction_of_its_prompts():
    prompts = torch.tensor([[2.0, 0.0], [0.0, -3.0], [0.0, 1.0]])
    torch.testing.assert_close(
        class_embeds(prompts, torch.tensor([0, 1, 0]), 2),
        torch.tensor([[0.5**0.5, 0.5**0.5], [0.0, -1.0]]),
    )


def test_zero_shot_counts_the_first_and_the_first_five():
    image = torch.eye(6)
    # the right class is second for each image
    classes = torch.roll(torch.eye(6), 1, 0) + 0.5 * torch.eye(6)
    expected = {"top_1": 0.0, "top_5": 1.0, "mean_per_class": 0.0}
    assert zero_shot_accuracy(image, torch.arange(6), classes) == expected
    assert zero_shot_accuracy(image, torch.arange(6), torch.eye(6))["top_1"] == 1.0
    collapsed = zero_shot_accuracy(image, torch.arange(6), torch.ones(6, 6))
    unknown = zero_shot_accuracy(image, torch.arange(6), torch.full((6, 6), torch.nan))
    assert collapsed == unknown == {"top_1": 0.0, "top_5": 0.0, "mean_per_class": 0.0}


def test_zero_shot_figures_are_scikit_learns():
    """Of classes with other numbers of images, one of which has none."""
    classes, _ = clusters(1, num_classes=8)
    image, label = clusters(40, num_classes=7, spread=1.0)
    kept = torch.rand(len(label), generator=torch.Generator().manual_seed(3)) < 0.1 + label / 8
    image, label = image[kept], label[kept]
    scores = (image @ classes.T).numpy()
    with pytest.warns(UserWarning, match="y_pred contains classes not in y_true"):
        balanced = balanced_accuracy_score(label, scores.argmax(1))
    found = zero_shot_accuracy(image, label, classes)
    assert found["mean_per_class"] == pytest.approx(balanced, abs=1e-12)
    for k in (1, 5):
        of_library = top_k_accuracy_score(label, scores, k=k, labels=range(8))
        assert found[f"top_{k}"] == pytest.approx(of_library, abs=1e-12)
    assert abs(found["top_1"] - found["mean_per_class"]) > 0.01 and found["top_1"] < 0.95


def test_of_classes_with_the_same_prompts_the_first_is_found():
    """As by argmax: the second is right behind it, and a class behind both has two before it."""
    embeds = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    same = torch.tensor([0, 1, 0])  # classes 0 and 2 have the same prompts
    image = torch.tensor([[1.0, 0.1], [1.0, 0.1], [1.0, 0.1]])
    assert class_ranks(image, torch.arange(3), embeds, same).tolist() == [0, 2, 1]


def test_neighbours_vote_as_scikit_learn_lets_them():
    train, train_label = clusters(30, spread=1.5)
    test, label = clusters(25, spread=1.5, seed=1)
    by_library = KNeighborsClassifier(
        NEIGHBOURS,
        algorithm="brute",
        metric="cosine",
        weights=lambda distance: np.exp(-distance / TEMPERATURE),
    ).fit(train.numpy(), train_label.numpy())
    found = neighbour_accuracy(train, train_label, test, label, 4)
    assert found == pytest.approx(
        by_library.score(test.numpy(), label.numpy()), abs=1.01 / len(test)
    )
    assert 0.3 < found < 1


def test_ties_count_against_the_right_class_in_any_order():
    """Equal embeddings but for rounding: of prompts, and of neighbours."""
    draw = torch.Generator().manual_seed(4)
    one = F.normalize(torch.randn(1, 64, generator=draw))
    noise = 1e-7 * torch.randn(60, 64, generator=draw) / 8
    classes = F.normalize(one + noise[:5])
    image, label = F.normalize(one + noise), torch.arange(5).repeat(12)
    assert class_ranks(image, label, classes).tolist() == [4] * 60
    # all 60 tie with the 20th neighbour, and all classes have as many votes
    for order in (torch.arange(60), torch.randperm(60, generator=draw)):
        assert neighbour_accuracy(image[order], label[order], image, label, 5) == 0
        more = torch.cat([image[order], image[:1]]), torch.cat([label[order], label[:1]])
        assert neighbour_accuracy(*more, image, label, 5) == pytest.approx(1 / 5)


def test_a_linear_probe_learns_and_is_the_same_each_time():
    train, train_label = clusters(30)
    test, label = clusters(25, seed=1)
    first, again = (
        probe_accuracy(train, train_label, test, label),
        probe_accuracy(train, train_label, test, label),
    )
    assert first == again and first[0] > 0.8
    shuffled = train_label[
        torch.randperm(len(train_label), generator=torch.Generator().manual_seed(2))
    ]
    assert probe_accuracy(train, shuffled, test, label)[0] < 0.6


def test_too_few_images_are_refused():
    with pytest.raises(ValueError, match="at least 5 training images of 2 classes; there are 3"):
        probe_accuracy(torch.eye(3), torch.arange(3), torch.eye(3), torch.arange(3))


def test_mean_average_precision_is_scikit_learns(monkeypatch):
    """Of a class without an image it is 0; blocks leave no trace."""
    image, label = clusters(40)
    target = F.one_hot(label, 5).bool() | (
        torch.randn(160, 5, generator=torch.Generator().manual_seed(5)) > 1.5
    )
    target[:, 4] = False
    classes = F.normalize(torch.randn(5, 8, generator=torch.Generator().manual_seed(5)), dim=1)
    scores = (image.double() @ classes.double().T).numpy()
    expected = [average_precision_score(target[:, k], scores[:, k]) for k in range(4)]
    for size in (1 << 26, 1):
        monkeypatch.setattr("models.metrics.retrieval.BLOCK_BYTES", size)
        found = mean_average_precision(image, target, classes, torch.arange(5))
        assert found == pytest.approx(sum(expected) / 5, abs=1e-12)


def test_ties_of_precision_are_before_or_behind_in_any_order():
    """Of three that tie the positive is last, or first; one that is not a number is never behind."""
    score = torch.tensor([0.5, 0.9, 0.5, 0.5 + 5e-7, 0.1], dtype=torch.float64)
    positive = torch.tensor([True, True, False, False, False])
    for order in (range(5), (4, 3, 2, 1, 0), (2, 0, 4, 1, 3)):
        own = score[[*order]], positive[[*order]]
        assert average_precision(*own) == (1 + 2 / 4) / 2
        assert average_precision(*own, -TOLERANCE) == 1
    score[2] = torch.nan
    assert average_precision(score, positive, -TOLERANCE) == (1 / 2 + 2 / 3) / 2


def test_f1_of_classes_that_are_there_is_scikit_learns():
    draw = torch.Generator().manual_seed(5)
    label, predicted = (torch.randint(0, n, (200,), generator=draw) for n in (6, 9))
    expected = f1_score(label, predicted, labels=label.unique(), average="macro")
    assert f1_macro(predicted, label) == pytest.approx(expected, abs=1e-12)
    assert f1_macro(torch.full((4,), 7), torch.tensor([0, 1, 0, 1])) == 0


def test_what_an_image_is_taken_for_agrees_with_its_rank():
    """Also where a wrong class ties with the right one, which is then not what it is taken for."""
    image, label = clusters(30, spread=1.5)
    classes = clusters(1, spread=0.0)[0]
    for margin in (TOLERANCE, -TOLERANCE):
        ranks = class_ranks(image, label, classes, margin=margin)
        found = predicted_classes(image, label, classes, torch.arange(4), ranks)
        assert torch.equal(found == label, ranks == 0) and 0 < (ranks == 0).sum() < len(ranks)
        assert torch.equal(found, (image @ classes.T).argmax(1))
    twice, same = torch.cat([classes, classes]), torch.arange(8)
    expected = (image @ classes.T).argmax(1)
    for margin, right in ((TOLERANCE, 0), (-TOLERANCE, int((expected == label).sum()))):
        ranks = class_ranks(image, label, twice, margin=margin)
        found = predicted_classes(image, label, twice, same, ranks)
        assert torch.equal(found % 4, expected) and int((found == label).sum()) == right
