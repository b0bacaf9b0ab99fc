"""The average of the weights: by the formula, exchanged without a trace, sharded as the weights
are, and there again after a resume."""

import pytest
import torch
from averaging_cases import DECAY, go_on, train_and_average
from cost_models import BRANCHES
from ranks import run_ranks
from split_training import Case

from engine.config.reading import check_config
from engine.optimizer.averaging import AverageBlock, WeightAverage, average_block


@pytest.mark.parametrize("warmup", [True, False])
def test_the_average_follows_its_formula(warmup):
    weight, block = torch.tensor([1.0, 2.0]), AverageBlock(decay=0.5, warmup=warmup)
    average, expected = WeightAverage([weight], block), weight.clone().double()
    for step in range(1, 7):
        weight += step
        average.update()
        decay = min(0.5, (1 + step) / (10 + step)) if warmup else 0.5
        expected = decay * expected + (1 - decay) * weight.double()
        torch.testing.assert_close(average.averages[0].double(), expected, rtol=1e-6, atol=0)


def test_an_exchange_is_undone_to_the_last_bit():
    weight = torch.randn(100)
    average = WeightAverage([weight], AverageBlock())
    weight += torch.randn(100)
    before, mean = weight.clone(), average.averages[0].clone()
    average.exchange()
    assert torch.equal(weight, mean)
    average.exchange()
    assert torch.equal(weight, before) and torch.equal(average.averages[0], mean)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (0.999, ["branches.ema", "0.999"]),
        ({"deacy": 0.9}, ["branches.ema.deacy", "did you mean 'decay'?"]),
        ({"decay": 1.0}, ["branches.ema.decay", "1.0"]),
        ({"warmup": 5}, ["branches.ema.warmup", "5"]),
    ],
)
def test_what_is_wrong_is_refused_with_its_key(block, words):
    with pytest.raises(ValueError) as error:
        check_config(
            {"train_batch_size": 8, "optimizer": {"type": "AdamW"}, "branches": {"ema": block}},
            BRANCHES,
        )
    assert all(word in str(error.value) for word in words), error.value


def test_nothing_is_averaged_unless_the_file_says_so():
    assert average_block(None) is None and average_block({}) == AverageBlock(0.9999, True)


def fork(zero_stage, precision):
    stages, replicas = {"image": 1, "text": 1}, {"image": 2, "text": 1}
    return Case(
        "fork",
        stages,
        replicas,
        12,
        zero_stage=zero_stage,
        precision=precision,
        steps=3,
        ema={"decay": DECAY, "warmup": False},
    )


@pytest.mark.parametrize("case", [fork(0, "fp32"), fork(1, "fp32"), fork(1, "bf16")], ids=str)
def test_averaged_weights_are_the_mean_of_what_was_trained(case, tmp_path):
    """In `averaged_weights` all weights of a stage are the average, on all its replicas; behind it
    the run is as it was."""
    results = run_ranks(case.world_size, train_and_average, case, str(tmp_path))
    for result in results:
        assert result["untouched"], "weights, master weights or averages changed"
        for name, history in result["history"].items():
            expected = history[0].double()
            for weight in history[1:]:
                expected = DECAY * expected + (1 - DECAY) * weight.double()
            rounding = (
                1e-6 if case.precision == "fp32" else 2**-7
            )  # of bf16 weights, whose history is rounded too
            torch.testing.assert_close(
                result["averaged"][name].double(),
                expected,
                rtol=rounding,
                atol=rounding * 1e-2,
                msg=name,
            )
            torch.testing.assert_close(
                result["saved"][name].double(),
                result["averaged"][name].double(),
                rtol=0,
                atol=0,
                msg=name,
            )
    resumed = run_ranks(case.world_size, go_on, case, str(tmp_path))
    for result, after in zip(results, resumed):
        assert all(
            torch.equal(a, b) for a, b in zip(result["later"]["averages"], after["averages"])
        )
        assert result["later"]["num_updates"] == after["num_updates"] == case.steps + 1
