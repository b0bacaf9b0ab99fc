"""The baselines compute what they claim: over two ranks, loss, every gradient and every weight
equal one process with the whole batch."""

import pytest
import torch
from baseline_training import SETUP, train_baseline, train_whole
from ranks import run_ranks

from bench.towers import configuration


@pytest.mark.parametrize(
    "micro_batch_size", [None, SETUP.micro_batch_size], ids=["ddp", "ddp_cached"]
)
@pytest.mark.all("measures as the bench does")
def test_two_ranks_equal_one_process(micro_batch_size):
    whole = train_whole()
    for rank in run_ranks(2, train_baseline, micro_batch_size):
        assert rank["loss"] == pytest.approx(whole["loss"], rel=1e-6)
        assert rank["gradients"].keys() == whole["gradients"].keys()
        for name, expected in whole["gradients"].items():
            # fp32 sums in another order; the absolute part is for sums that cancel to nearly
            # nothing
            torch.testing.assert_close(
                rank["gradients"][name],
                expected,
                rtol=1e-4,
                atol=1e-6,
                msg=lambda m, n=name: f"{n}: {m}",
            )
            # Adam's first step divides a gradient by its own size: where it is nothing but
            # rounding, the step can be anything up to lr
            firm = expected.abs() > 1e-4
            torch.testing.assert_close(
                rank["weights"][name][firm], whole["weights"][name][firm], rtol=1e-4, atol=1e-5
            )


def test_the_configuration_of_the_measurements_is_accepted():
    """It is made in the ranks of most scripts of bench/, which no other test starts."""
    fork = {"layout": "fork", "stages": {"image": 1, "text": 1}}
    config, block = configuration(SETUP, fork)
    assert config["train_batch_size"] == SETUP.global_batch_size and block.layout == "fork"
