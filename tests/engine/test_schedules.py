"""Optimizers and schedules of the JSON do what the JSON says: no default of a library takes the place
of a given value, and what only works on whole tensors is not cut."""

import inspect
import itertools
import math
from functools import partial

import pytest
import torch
from cost_models import BRANCHES
from deepspeed.runtime import lr_schedules
from refusals import not_refused, refused

from engine.config.deepspeed_keys import params_model
from engine.config.reading import check_config
from engine.optimizer.classes import (
    OPTIMIZERS,
    SCHEDULES,
    SHORT_DECAY,
    make_schedule,
    optimizer_class,
    with_length,
)
from engine.optimizer.parameter_groups import GroupSchedule, Setting
from engine.optimizer.preview import CLOSE, preview, unreached
from launch.config.hyperparameters import PRESETS

LR, TOTAL = 1e-4, 21  # the length that "auto" gives a run of 20 steps


def curve(kind, params, warmup_steps=None, steps=20):
    """The rates of a run by step, from 1 on."""
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=LR)
    make = partial(make_schedule, optimizer, kind, params)
    settings = [Setting(1.0, None, warmup_steps)]
    schedule, rates = GroupSchedule(optimizer, make, settings, [warmup_steps]), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    return rates


def constant(step, warmup):
    return 1.0


def to_zero(step, warmup):
    return (TOTAL - step) / (TOTAL - max(1, warmup))


def cosine(step, warmup):
    progress = (step - max(1, warmup)) / (TOTAL - max(1, warmup))
    return 0.1 + 0.9 * (1 + math.cos(math.pi * min(1.0, progress))) / 2


LENGTH = {"total_num_steps": TOTAL}
WARM = [
    ("WarmupLR", {}, constant),
    ("WarmupDecayLR", LENGTH, to_zero),
    ("WarmupCosineLR", LENGTH | {"cos_min_ratio": 0.1}, cosine),
]


def test_step_k_of_a_warm_up_of_n_has_k_nths_of_the_rate():
    """With 0 or 1 steps the first step has the whole rate (DeepSpeed#771); also of a group."""
    for (kind, params, after), warmup in itertools.product(WARM, (0, 1, 2, 5)):
        parts = [step / warmup if step < warmup else after(step, warmup) for step in range(1, 21)]
        expected = pytest.approx([LR * part for part in parts], rel=1e-9)
        own = {**params, "warmup_type": "linear"}
        assert curve(kind, {**own, "warmup_num_steps": warmup}) == expected, (kind, warmup)
        assert curve(kind, {**own, "warmup_num_steps": 9}, warmup) == expected, (kind, warmup)


def test_longer_warm_ups_are_deepspeeds_own():
    for (kind, params, _), form in itertools.product(WARM, ("log", "linear")):
        own = {**params, "warmup_num_steps": 6, "warmup_type": form}
        if kind == "WarmupCosineLR":  # a short decay is another one
            own |= {"total_num_steps": 6 + SHORT_DECAY + 1}
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=LR)
        filled = own if kind == "WarmupCosineLR" else {**own, "warmup_max_lr": LR}
        theirs, rates = getattr(lr_schedules, kind)(optimizer, **filled), []
        for step in range(1, 21):
            theirs.step(step)
            rates.append(optimizer.param_groups[0]["lr"])
        assert curve(kind, own) == rates, (kind, form)


def test_a_run_of_any_length_reaches_its_rate_and_wastes_no_step():
    """Of as many steps of warm-up as the preset gives it, and of any number up to the run's own
    length: once at the whole rate, and no step at a thousandth of it or less."""
    for kind, steps in itertools.product(("WarmupCosineLR", "WarmupDecayLR"), range(1, 51)):
        params = with_length({"total_num_steps": "auto", "warmup_type": "linear"}, steps)
        values = PRESETS["short"].values(120, steps, {})
        own = values["scheduler.params.warmup_num_steps"]
        for warmup in {1, own, max(1, steps - 2), steps}:
            rates = curve(kind, {**params, "warmup_num_steps": warmup}, steps=steps)
            assert rates[warmup - 1] == max(rates) == pytest.approx(LR, rel=1e-9), (steps, warmup)
            assert rates[:warmup] == sorted(rates[:warmup]), (steps, warmup)
            assert rates[warmup - 1 :] == sorted(rates[warmup - 1 :], reverse=True)
            assert min(rates) > 1e-3 * LR, (kind, steps, warmup)
        assert own <= max(1, steps / 2), "half of the run, at most, is warm-up"


def test_the_demo_keeps_its_curve():
    """Its 312 steps decay for longer than is moved: the rates are DeepSpeed's own."""
    params = with_length({"total_num_steps": "auto", "warmup_type": "linear"}, 312)
    warmup = PRESETS["short"].values(120, 312, {})["scheduler.params.warmup_num_steps"]
    rates = curve("WarmupCosineLR", {**params, "warmup_num_steps": warmup}, steps=312)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=LR)
    theirs = lr_schedules.WarmupCosineLR(optimizer, **{**params, "warmup_num_steps": warmup})
    for step, rate in enumerate(rates, 1):
        theirs.step(step)
        assert rate == optimizer.param_groups[0]["lr"], step
    assert warmup == 31


def test_a_warm_up_that_the_run_does_not_end_is_said():
    def said(steps, warmup=20, **groups):
        scheduler = {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}}
        scheduler["params"]["warmup_num_steps"] = warmup
        config, _ = checked(scheduler)
        block = check_config({**config, "branches": {"optimizer_groups": groups}}, BRANCHES)[1]
        return unreached(config, block.learning(BRANCHES), steps)

    assert said(21) == said(1, 1) == said(1, 0) == ""
    assert "warmup_num_steps is 20, and the run has 20 steps: " in said(20)
    assert "at the last of them" in said(20) and "at none of them" in said(19)
    assert "optimizer_groups.text.warmup_steps is 30" in said(25, text={"warmup_steps": 30})


def checked(scheduler, optimizer=None, **params):
    params = {"lr": LR, "betas": [0.7, 0.98], "torch_adam": True} if optimizer is None else params
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": optimizer or "AdamW", "params": params},
        "scheduler": scheduler,
    }
    return check_config(config, BRANCHES)


def test_the_rate_of_a_schedule_is_the_optimizers():
    """DeepSpeed's WarmupDecayLR would train at 1e-3 (DeepSpeed#7303), and OneCycle with betas of
    0.8 to 0.9 and 0.99. Both are on the first screen as they are."""
    groups = {"optimizer_groups": {"text": {"lr": LR / 4}}}
    for kind, params, highest in (
        ("WarmupLR", {"warmup_num_steps": 4}, LR),
        ("WarmupDecayLR", {"warmup_num_steps": 4, "total_num_steps": "auto"}, LR),
        ("OneCycle", {"cycle_min_lr": 1e-6, "cycle_first_step_size": 5}, LR),
        ("LRRangeTest", {"lr_range_test_step_size": 19}, 2 * LR),
    ):
        own = params | ({"cycle_momentum": False} if kind == "OneCycle" else {})
        config, block = checked({"type": kind, "params": own})
        said = preview(config, block.learning(BRANCHES), 20)
        assert "betas 0.7 and 0.98" in said and f" {highest:.4g} at step" in said, said
        rates = curve(kind, own | (LENGTH if kind == "WarmupDecayLR" else {}))
        assert max(rates) == pytest.approx(highest, rel=1e-6), kind
        config, block = check_config({**config, "branches": groups}, BRANCHES)
        said = preview(config, block.learning(BRANCHES), 20)
        assert f"text at most {highest / 4:.4g}" in said, kind


def test_a_cycle_leaves_the_second_beta():
    bounds = {"cycle_min_mom": 0.85, "cycle_max_mom": 0.95}
    own = {"cycle_min_lr": 1e-6, "cycle_first_step_size": 5, "cycle_momentum": True, **bounds}
    config, block = checked({"type": "OneCycle", "params": own})
    assert "betas 0.85 to 0.95 and 0.98" in preview(config, block.learning(BRANCHES), 20)


def test_a_schedule_that_would_replace_a_value_is_refused():
    cases = [
        ("WarmupLR", {"warmup_max_lr": 1e-3}, "warmup_max_lr … 0.0001"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1e-3}, "cycle_max_lr … 0.0001"),
        ("OneCycle", {"cycle_min_lr": 0}, "cycle_momentum … betas"),
    ]
    assert not_refused(lambda kind, own: checked({"type": kind, "params": own}), cases) == []


def test_another_optimizer_or_schedule_is_refused_with_the_one_to_use():
    taken = "only AdamW, Adam, Muon, Lion, Lamb and SGD are taken, so use AdamW"
    for kind in ("Adagrad", "adagrad", "RMSprop", "Adafactor", "LBFGS"):
        with refused(f"optimizer.type: got '{kind}'; {taken}"):
            checked({"type": "WarmupLR"}, kind, lr=LR)
    all_of_them = "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle and LRRangeTest"
    for kind, instead in (
        ("CosineAnnealingLR", "use WarmupCosineLR"),
        ("LinearLR", "use WarmupDecayLR"),
        ("ConstantLR", 'for a constant rate leave "scheduler" out'),
        ("StepLR", "use one of them"),
        ("ReduceLROnPlateau", "use one of them"),
    ):
        with refused(f"scheduler.type: got '{kind}'; only {all_of_them} are taken, so {instead}"):
            checked({"type": kind})


def test_a_long_run_is_looked_at_like_one_that_goes_on():
    """The last rate after a thousand jumps is that of all steps."""
    params = {"total_num_steps": "auto", "warmup_num_steps": 50}
    config, block = checked({"type": "WarmupCosineLR", "params": params})
    steps = CLOSE + 2_345
    last = curve("WarmupCosineLR", {**params, "total_num_steps": steps + 1}, steps=steps)[-1]
    said = preview(config, block.learning(BRANCHES), steps)
    assert said.endswith(f", {last:.4g} at step {steps:,}"), (said, last)


def test_an_optimizer_of_whole_tensors_is_refused_where_they_are_cut():
    config = {"train_batch_size": 8, "optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}
    check_config(config, BRANCHES)
    for keys in (
        {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True},
        {
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": {"stage": 1},
        },
    ):
        with pytest.raises(ValueError, match='Lamb uses the norm.*"stage": 0'):
            check_config(config | keys, BRANCHES)


def test_zero_1_asks_for_a_word_with_other_optimizers_before_anything_is_built():
    config = {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    config["zero_optimization"] = {"stage": 1}
    with pytest.raises(ValueError, match='"zero_allow_untested_optimizer": true'):
        check_config(config, BRANCHES)
    check_config(config | {"zero_allow_untested_optimizer": True}, BRANCHES)


def test_every_parameter_of_a_class_has_a_rule():
    """A new one of a newer torch or DeepSpeed shows here."""
    names = {"params", "model_params", "optimizer", "last_batch_iteration", "adamw_mode"}
    names |= {"max_grad_norm", "capturable", "differentiable"}
    for kind in SCHEDULES:
        known = params_model({"scheduler": {"type": kind}}, "scheduler").model_fields
        given = inspect.signature(getattr(lr_schedules, kind)).parameters
        assert set(given) - set(known) <= names, kind
    offload = {"offload_optimizer": {"device": "cpu"}}
    for kind, zero, torchs in itertools.product(OPTIMIZERS, ({}, offload), ({}, {"torch_adam": 1})):
        config = {"optimizer": {"type": kind, "params": torchs}, "zero_optimization": zero}
        known = params_model(config, "optimizer").model_fields
        given = inspect.signature(optimizer_class(config)).parameters
        assert set(given) - set(known) <= names, kind
