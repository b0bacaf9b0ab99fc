"""A loss or a gradient that is not finite: the step is skipped everywhere, nothing moves, and the
samples are reported.

Step 1 has an image that is not-a-number, step 3 a gradient that is not finite in one stage of one
replica; the other steps are good.
"""

import json
import math
from dataclasses import replace

import pytest
import torch
from clipping_cases import BAD_PLACE, train_with_bad_steps
from ranks import about, run_cases, run_ranks
from split_training import LR, Case, fork_of, train_whole

IMAGE, GRADIENT, STEPS, RESNET = 1, 3, 5, "resnet+bert"
RISING = {"warmup_min_lr": 0.0, "warmup_max_lr": LR, "warmup_num_steps": 4}
SCHEDULE = {"type": "WarmupLR", "params": {**RISING, "warmup_type": "linear"}}


def two(image, text, micro_batch_size, **kwargs):
    return fork_of(image, text, micro_batch_size, steps=STEPS, clipping={"image": 0.5}, **kwargs)


# Case, and the rank whose gradient is spoilt in step 3, with what.
CASES = [
    (two((1, 1), (1, 1), {"image": 8, "text": 24}, zero_stage=0, towers=RESNET), 1, math.nan),
    (two((1, 2), (1, 1), 12, towers=RESNET), 2, math.inf),
    (two((1, 1), (2, 1), 12, schedule="replay", zero_stage=0), 0, -math.inf),
    (two((1, 2), (1, 1), 12, precision="bf16"), 1, math.nan),
    (two((1, 2), (1, 1), 12, precision="fp16"), 1, math.inf),
    (two((1, 2), (1, 1), 6, zero_stage=2), 2, math.inf),
    (two((1, 2), (1, 1), 6, precision="bf16", zero_stage=2), 1, math.nan),
    (two((1, 2), (1, 1), 6, zero_stage=3), 2, math.nan),
    (two((1, 2), (1, 1), 6, precision="bf16", zero_stage=3), 1, math.inf),
    (two((1, 2), (1, 1), 12, precision="bf16", offload=True), 1, math.nan),
    (two((1, 2), (1, 1), 6, precision="bf16", zero_stage=2, offload=True), 0, math.inf),
]


def test_a_step_that_is_not_finite_is_skipped_by_all():
    for world_size in (2, 3):
        own = [each for each in CASES if each[0].world_size == world_size]
        given = [(case, IMAGE, {GRADIENT: (rank, value)}) for case, rank, value in own]
        for (case, *_), results in zip(given, run_cases(world_size, train_with_bad_steps, given)):
            with about(case):
                check_skipping(case, results)


def check_skipping(case, results):
    bad = [step in (IMAGE, GRADIENT) for step in range(STEPS)]
    for result in results:
        metrics = result["metrics"]
        assert result["untouched"] == bad, result["stage"]
        assert [not m.step_applied for m in metrics] == bad
        assert [m.skipped_steps for m in metrics] == [0, 1, 1, 2, 2]
        assert [math.isfinite(m.loss) for m in metrics] == [step != IMAGE for step in range(STEPS)]
        for m in metrics:
            assert all(math.isfinite(norm) == m.step_applied for norm in m.grad_norm.values())
        check_samples(case, metrics)
        for tensors in (result["parameters"], result["buffers"]):
            assert all(tensor.isfinite().all() for tensor in tensors.values())
        assert result["record"]["skipped_steps"] == 2 and json.dumps(result["record"])
    if case.precision == "fp16":  # each time once, for all
        scales = (1024.0, 512.0, 512.0, 256.0, 256.0)
        assert {tuple(r["loss_scales"]) for r in results} == {scales}
    if case.precision == "fp32":
        check_against_unsplit_training_without_those_updates(case, results)


def linear_keeps_rows_apart():
    """In bf16: torch 2.11's gives not-a-number to neighbouring rows on a CPU with AMX."""
    rows = torch.ones(12, 17, 48, dtype=torch.bfloat16)
    rows[BAD_PLACE] = math.nan
    made = torch.nn.functional.linear(rows, torch.ones(144, 48, dtype=torch.bfloat16))
    return [place for place, row in enumerate(made) if not row.isfinite().all()] == [BAD_PLACE]


def check_samples(case, metrics):
    everyone = tuple(10_000 + place for place in range(case.global_batch_size))
    assert metrics[IMAGE].bad_step.samples == everyone
    not_finite = metrics[IMAGE].bad_step.not_finite
    assert 10_000 + BAD_PLACE in not_finite["image"] and not_finite["text"] == ()
    # without batch normalisation it is alone
    if case.towers == "vit+clip" and (case.precision != "bf16" or linear_keeps_rows_apart()):
        assert not_finite["image"] == (10_000 + BAD_PLACE,)
    if case.precision == "fp16":  # the loss is finite: its scale looks for its place
        assert metrics[GRADIENT].bad_step is None
    else:
        assert metrics[GRADIENT].bad_step.samples == everyone
        assert metrics[GRADIENT].bad_step.not_finite == {"image": (), "text": ()}
    assert [m.bad_steps_in_a_row for m in metrics] == [0, 1, 0, int(case.precision != "fp16"), 0]
    assert all(m.bad_step is None for m in metrics if m.step_applied)


def check_against_unsplit_training_without_those_updates(case, results):
    reference = train_whole(replace(case, skipped=(IMAGE, GRADIENT)))
    for step in set(range(STEPS)) - {IMAGE, GRADIENT}:
        loss = pytest.approx(reference["losses"][step], rel=1e-4)
        assert results[0]["metrics"][step].loss == loss
    biases = ("key.bias", "k_proj.bias", "in_proj_bias")  # see test_parity.py
    for name, parameter in (p for result in results for p in result["parameters"].items()):
        if not any(bias in name for bias in biases):
            expected = reference["parameters"][name]
            # AdamW moves an element by about LR. Batch normalisation makes much of rounding,
            # without any bad step too.
            one_update = LR * math.sqrt(expected.numel())
            rounding = 0.2 if case.towers == RESNET else 0.02
            error = float((parameter - expected).norm())
            assert error <= 1e-4 * float(expected.norm()) + rounding * one_update, name


def test_the_learning_rate_schedule_counts_applied_steps():
    """A schedule that rises by a quarter of LR per step: three bad steps in a row, the third for
    its loss alone, and three good ones."""
    case = Case("merged", {"merged": 1}, 1, 24, steps=6, zero_stage=0, scheduler=SCHEDULE)
    (result,) = run_ranks(
        1, train_with_bad_steps, case, -1, dict.fromkeys((0, 1), (0, math.nan)), loss=2
    )
    rates = [*[LR / 4] * 4, LR / 2, LR * 3 / 4]
    assert [metrics.lr for metrics in result["metrics"]] == pytest.approx(rates)
    assert result["learning_rates"] == pytest.approx([LR] * 2)  # decayed, and not
    assert [metrics.bad_steps_in_a_row for metrics in result["metrics"]] == [1, 2, 3, 0, 0, 0]
