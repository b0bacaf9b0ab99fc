"""Regions and phrases, rows beside those of samples: split training equals unsplit training."""

from dataclasses import replace

import pytest
from ranks import about, run_all
from split_training import (
    RELATIVE,
    Case,
    check_all_gradients,
    evaluate_whole,
    train_split,
    train_whole,
)
from split_training import merged_of as merged


def fork(stages, replicas, sizes, **more):
    names = ("image", "text")
    return Case("fork", *(dict(zip(names, each)) for each in (stages, replicas, sizes)), **more)


WEIGHTED = ("image", "text")
CASES = [
    merged(1, 1, 24),
    merged(1, 2, 4, towers="resnet+bert", region_loss="sigmoid"),
    merged(2, 1, 8, schedule="replay"),
    Case("chain", {"image": 1, "text": 2}, 1, 8, duplicates="masked"),
    fork((1, 1), (1, 1), (8, 24), towers="resnet+bert"),
    fork((2, 1), (1, 1), (6, 8), region_loss="sigmoid", duplicates="negatives"),
    fork((1, 1), (1, 3), (8, 4), zero_stage=0, weighted=WEIGHTED),
    fork((1, 1), (3, 1), (2, 12), schedule="replay", region_loss="sigmoid", weighted=WEIGHTED),
    fork((1, 2), (2, 1), (3, 6), schedule="replay"),
    fork((1, 1), (1, 2), (12, 6), without_regions=tuple(range(24))),
]
CASES = [replace(case, regions=True, evaluated=True) for case in CASES]


def test_regions_equal_unsplit_training():
    for case, results in run_all(train_split, CASES):
        reference = train_whole(case)
        assert len({r["metrics"][0].loss for r in results}) == 1, case
        for name, loss in reference["losses_by_name"][0].items():
            own = results[0]["metrics"][0].losses[name.replace("/", "_loss/")]
            assert own == pytest.approx(loss, rel=RELATIVE), (case, name)
        loss = pytest.approx(reference["losses"][0], rel=RELATIVE)
        assert results[0]["metrics"][0].loss == loss, case
        expected = evaluate_whole(case)
        for found in (result["measured"] for result in results):
            for pair, ways in expected.items():
                for way, sums in ways.items():
                    assert found[pair][way] == pytest.approx(sums, rel=1e-4), (case, pair, way)
        with about(case):
            check_all_gradients(results, reference)
