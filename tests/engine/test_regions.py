"""Regions and phrases, rows beside those of samples: split training equals unsplit training."""

import pytest
from ranks import about, run_all
from region_training import WithRegions, train_regions_split, train_regions_whole
from split_training import RELATIVE, check_all_gradients


def fork(stages, replicas, sizes, **more):
    names = ("image", "text")
    return WithRegions(
        "fork", *(dict(zip(names, each)) for each in (stages, replicas, sizes)), **more
    )


CASES = [
    WithRegions("merged", {"merged": 1}, 1, 24),
    WithRegions("merged", {"merged": 1}, 2, 4, towers="resnet+bert", loss="sigmoid"),
    WithRegions("merged", {"merged": 2}, 1, 8, schedule="replay"),
    WithRegions("chain", {"image": 1, "text": 2}, 1, 8, duplicates="masked"),
    fork((1, 1), (1, 1), (8, 24), towers="resnet+bert"),
    fork((2, 1), (1, 1), (6, 8), loss="sigmoid", duplicates="negatives"),
    fork((1, 1), (1, 3), (8, 4), zero_stage=0, weighted=True),
    fork((1, 1), (3, 1), (2, 12), schedule="replay", loss="sigmoid", weighted=True),
    fork((1, 2), (2, 1), (3, 6), schedule="replay"),
    fork((1, 1), (1, 2), (12, 6), none=True),
]


def test_regions_equal_unsplit_training():
    for case, results in run_all(train_regions_split, CASES):
        reference = train_regions_whole(case)
        assert len({r["metrics"].loss for r in results}) == 1, case
        for pair, loss in reference["losses"].items():
            own = results[0]["metrics"].losses[f"contrastive_loss/{pair}"]
            assert own == pytest.approx(loss, rel=RELATIVE), (case, pair)
        assert results[0]["metrics"].loss == pytest.approx(reference["loss"], rel=RELATIVE), case
        if case.towers != "resnet+bert":  # in an evaluation batch normalisation is another
            for found in (result["measured"] for result in results):
                for pair, expected in reference["measured"].items():
                    for way, sums in expected.items():
                        assert found[pair][way] == pytest.approx(sums, rel=1e-4), (case, pair, way)
        with about(case):
            check_all_gradients(results, reference)
