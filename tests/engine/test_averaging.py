"""The average of the weights: by the formula, exchanged without a trace, sharded as the weights
are, and there again after a resume."""

from dataclasses import replace

import pytest
import torch
from averaging_cases import DECAY, go_on, train_and_average
from cost_models import BRANCHES
from ranks import run_cases
from refusals import not_refused
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


def test_what_is_wrong_is_refused_with_its_key():
    written = {"train_batch_size": 8, "optimizer": {"type": "AdamW"}}
    cases = [
        (0.999, "branches.ema … 0.999"),
        ({"deacy": 0.9}, "branches.ema.deacy … did you mean 'decay'?"),
        ({"decay": 1.0}, "branches.ema.decay … 1.0"),
        ({"warmup": 5}, "branches.ema.warmup … 5"),
    ]

    def check(block):
        check_config(written | {"branches": {"ema": block}}, BRANCHES)

    assert not_refused(check, cases) == []


def test_nothing_is_averaged_unless_the_file_says_so():
    assert average_block(None) is None and average_block({}) == AverageBlock(0.9999, True)


SCALE = "head.logit_scale"
AVERAGED = ((0, "fp32"), (1, "fp32"), (1, "bf16"), (2, "bf16"), (3, "fp32"), (3, "bf16"))


def test_averaged_weights_are_the_mean_of_what_was_trained(tmp_path):
    """In `averaged_weights` all weights of a stage are the average, on all its replicas; behind it
    the run is as it was."""
    fork = Case("fork", {"image": 1, "text": 1}, {"image": 2, "text": 1}, 12, steps=3)
    fork = replace(fork, ema={"decay": DECAY, "warmup": False})
    cases = [
        (
            replace(fork, zero_stage=stage, precision=precision),
            str(tmp_path / f"{stage}{precision}"),
        )
        for stage, precision in AVERAGED
    ]
    muon = {"type": "Muon", "params": {"lr": 1e-3}}
    cases.append((replace(fork, optimizer=muon), str(tmp_path / "muon")))
    trained = run_cases(3, train_and_average, cases)
    for (case, _), results, resumed in zip(cases, trained, run_cases(3, go_on, cases)):
        # of bf16 weights, whose history is rounded too
        rounding = 1e-6 if case.precision == "fp32" else 2**-7
        for result, after in zip(results, resumed):
            assert result["untouched"], "weights, master weights or averages changed"
            for name, history in result["history"].items():
                expected = history[0].double()
                for weight in history[1:]:
                    expected = DECAY * expected + (1 - DECAY) * weight.double()
                averaged, saved = (result[key][name].double() for key in ("averaged", "saved"))
                torch.testing.assert_close(
                    averaged, expected, rtol=rounding, atol=rounding * 1e-2, msg=f"{case} {name}"
                )
                if case.precision == "bf16" and case.zero_stage == 3:  # whose weights are in fp32
                    averaged = averaged if name == SCALE else averaged.bfloat16().double()
                elif case.precision == "bf16" and name == SCALE:  # is read in fp32
                    assert saved != averaged
                    saved = saved.bfloat16().double()
                assert torch.equal(saved, averaged), f"{case} {name}"
            later = result["later"]
            assert all(torch.equal(*two) for two in zip(later["averages"], after["averages"]))
            assert later["num_updates"] == after["num_updates"] == case.steps + 1
