"""Which box of its image a phrase chooses, counted one phrase and one box after the other."""

import torch

from models.metrics import retrieval
from models.metrics.annotations import (
    OVERLAP,
    Said,
    choice,
    choice_sums,
    equal,
    overlapping,
    said_of,
)
from models.metrics.retrieval import query_figures


def overlap(one, other):
    """Intersection over union of two boxes x1, y1, x2, y2."""
    sides = [min(one[2 + d], other[2 + d]) - max(one[d], other[d]) for d in (0, 1)]
    both = max(0.0, sides[0]) * max(0.0, sides[1])
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return both / (sum(areas) - both)


def by_hand(own, other, sample, others_sample, is_right):
    """(right, chance, candidates): a tie with a wrong box is no hit."""
    found = torch.zeros(3, dtype=torch.float64)
    for phrase in range(len(own)):
        alike = {b: float(own[phrase] @ other[b]) for b in range(len(other))}
        here = [b for b in alike if others_sample[b] == sample[phrase]]
        right = [b for b in here if is_right(phrase, b)]
        best = max(alike[b] for b in right)
        hit = all(alike[b] < best for b in here if b not in right)
        found += torch.tensor([hit, len(right) / len(here), len(here)])
    return (found / len(own)).tolist()


def test_the_box_that_a_phrase_chooses(monkeypatch):
    """By overlap and by what it is said of, in blocks of any size; many ties. Some boxes have several
    phrases, and others none."""
    for seed, block_bytes in ((0, 1), (1, 1 << 9), (2, 1 << 26)):
        monkeypatch.setattr(retrieval, "BLOCK_BYTES", block_bytes)
        draw = torch.Generator().manual_seed(seed)
        image = torch.randint(6, (40,), generator=draw)
        other = torch.randint(-2, 3, (40, 4), generator=draw).float()
        corner = torch.randint(4, (40, 2), generator=draw)
        box = torch.cat([corner, corner + torch.randint(3, 6, (40, 2), generator=draw)], 1).double()
        region = torch.randint(40, (50,), generator=draw)
        own = torch.randint(-2, 3, (50, 4), generator=draw).float()
        key, sample = torch.randint(9, (50,), generator=draw), image[region]
        assert 10 < len(region.unique()) < 36

        def boxes_of(a):  # a phrase has several boxes
            alike = (sample == sample[a]) & (key == key[a])
            return set(region[alike].tolist())

        said = Said(sample, key, region)
        rules = {
            "overlap": (
                overlapping(box, said),
                lambda a, b: any(overlap(box[own], box[b]) >= OVERLAP for own in boxes_of(a)),
            ),
            "said": (said_of(40, said), lambda a, b: b in boxes_of(a)),
        }
        for name, (rule, one_by_one) in rules.items():
            found = choice(own, other, sample, image, rule)
            expected = torch.tensor(by_hand(own, other, sample, image, one_by_one))
            torch.testing.assert_close(torch.tensor(found), expected, msg=f"{name}, seed {seed}")
            assert found.chance < 0.9  # another box is wrong
        # one phrase for each box, as in training
        own, key = own[:40], key[:40]
        of_each = said_of(40, Said(image, key, torch.arange(40)))
        right = choice(own, other, image, image, of_each).right
        sums = choice_sums(own, other, image, image, equal(key, key))
        assert abs(query_figures("box", sums.tolist())["box_R@1"] - right) < 1e-9


def test_a_model_that_tells_nothing_apart_finds_nothing():
    for value in (0.0, float("nan")):
        same = torch.full((6, 3), value)
        box = torch.arange(6)[:, None].double() + torch.tensor([0.0, 0.0, 1.0, 1.0])
        image, key = torch.arange(6) // 2, torch.arange(6)
        rule = overlapping(box, Said(image, key, key))
        assert choice(same, same, image, image, rule).right == 0, value
