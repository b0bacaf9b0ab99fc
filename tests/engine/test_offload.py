"""An optimizer whose state is on the CPU trains the same, and what cannot be offloaded is
refused."""

from dataclasses import replace

import pytest
import torch
from cost_models import BRANCHES
from ranks import run_all, run_ranks
from refusals import not_refused
from split_training import Case, train_split, train_whole

from engine.config.reading import check_config

CASE = Case(
    "fork",
    {"image": 1, "text": 1},
    {"image": 2, "text": 1},
    6,
    offload=True,
    steps=3,
    clipping={"image": 0.5, "text": 0.5},
)


def test_offloaded_bf16_equals_bf16_to_the_last_bit():
    """Both add up micro-batches in fp32 and step the same slices; where they lie is all that
    differs."""
    case = replace(CASE, precision="bf16")
    (_, offloaded), (_, in_place) = run_all(train_split, [case, replace(case, offload=False)])
    assert {r["optimizer"] for r in offloaded} == {"DeepSpeedZeroOptimizer"}
    assert {r["optimizer"] for r in in_place} == {"BF16_Optimizer"}
    assert [m.loss for m in offloaded[0]["metrics"]] == [m.loss for m in in_place[0]["metrics"]]
    for mine, other in zip(offloaded, in_place):
        for name, parameter in mine["parameters"].items():
            assert torch.equal(parameter, other["parameters"][name]), name


def test_offloaded_fp32_equals_unsplit_training():
    results = run_ranks(CASE.world_size, train_split, CASE)
    reference = train_whole(CASE)
    assert [m.loss for m in results[0]["metrics"]] == pytest.approx(reference["losses"], rel=1e-5)
    for group in ("image", "text", "head"):
        assert [m.grad_norm[group] for m in results[0]["metrics"]] == pytest.approx(
            [n[group] for n in reference["norms"]], rel=1e-3
        )


def test_what_cannot_be_offloaded_is_refused():
    written = {"train_batch_size": 8, "optimizer": {"type": "AdamW"}}
    cpu = {"offload_optimizer": {"device": "cpu"}}
    cases = [
        (
            {"stage": 1, "offload_optimizer": {"device": "nvme"}},
            "offload_optimizer.device … 'nvme'",
        ),
        ({"stage": 0, **cpu}, 'stage 0 … "stage": 1'),
        ({"stage": 1, "offload_param": {"device": "cpu"}}, "offload_param"),
        (
            {"stage": 1, "offload_optimizer": {"devcie": "cpu", "device": "cpu"}},
            "offload_optimizer.devcie … did you mean 'device'?",
        ),
    ]

    def check(zero):
        check_config(written | {"zero_optimization": zero}, BRANCHES)

    assert not_refused(check, cases) == []
