"""Every parameter learns at the rate and with the decay that `optimizer_groups` says, whatever
shares the parameters out."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cost_models import BRANCHES
from deepspeed.runtime.lr_schedules import WarmupDecayLR
from ranks import run_all
from refusals import not_refused, refused
from split_training import LR, Case, train_split, train_whole

from engine.config.reading import check_config
from engine.optimizer.parameter_groups import (
    GroupSchedule,
    Setting,
    groups_of_names,
    optimizer_groups,
    settings_of,
)

OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}}
SHAPES = {  # of the layers of each branch; one is a pool
    "image": [
        {"image.stem.weight": (8, 3, 4, 4), "image.stem.bias": (8,)},
        {"image.block.weight": (8, 8), "image.block.norm": (8,)},
        {},
        {"head.image_projection.weight": (4, 8), "head.logit_scale": (1,)},
    ],
    "text": [{"text.embeddings.weight": (9, 8)}, {"head.text_projection.weight": (4, 8)}],
}
LAYERS = {
    branch: [SimpleNamespace(canonical_parameters=own) for own in layers]
    for branch, layers in SHAPES.items()
}


def test_without_a_block_only_what_has_one_dimension_is_not_decayed():
    settings = settings_of(optimizer_groups(None, BRANCHES), LAYERS, OPTIMIZER)
    undecayed = {name for name, setting in settings.items() if setting.weight_decay == 0}
    assert undecayed == {"image.stem.bias", "image.block.norm", "head.logit_scale"}
    assert set(settings.values()) == {Setting(1.0, 0.1, None), Setting(1.0, 0.0, None)}


def test_rates_fall_from_the_head_to_the_first_layer():
    block = {
        "image": {"lr": 5e-4, "layer_decay": 0.5, "warmup_steps": 7},
        "head": {"weight_decay": 0.3},
        "no_decay": ["*.bias"],
    }
    settings = settings_of(optimizer_groups(block, BRANCHES), LAYERS, OPTIMIZER)
    # 5e-4 / 1e-3 · 0.5²: the pool has no parameters and is no layer
    assert settings == {
        "image.stem.weight": Setting(0.125, 0.1, 7),
        "image.stem.bias": Setting(0.125, 0.0, 7),
        "image.block.weight": Setting(0.25, 0.1, 7),
        "image.block.norm": Setting(0.25, 0.1, 7),
        "head.image_projection.weight": Setting(1.0, 0.3, None),
        "head.logit_scale": Setting(1.0, 0.3, None),
        "text.embeddings.weight": Setting(1.0, 0.1, None),
        "head.text_projection.weight": Setting(1.0, 0.3, None),
    }
    assert groups_of_names(
        ["text.embeddings.weight", "head.logit_scale", "head.text_projection.weight"], settings
    ) == {
        Setting(1.0, 0.1, None): ["text.embeddings.weight"],
        Setting(1.0, 0.3, None): ["head.logit_scale", "head.text_projection.weight"],
    }


def test_what_is_wrong_is_refused_with_its_key():
    cases = [
        ([], "optimizer_groups … []"),
        ({"imgae": {}}, "optimizer_groups.imgae … did you mean 'image'?"),
        ({"image": {"wieght_decay": 0.1}}, "image.wieght_decay … did you mean 'weight_decay'?"),
        ({"head": {"layer_decay": 0.5}}, "optimizer_groups.head.layer_decay"),
        ({"image": 1e-4}, "optimizer_groups.image … 0.0001"),
        ({"image": {"lr": 0}}, "optimizer_groups.image.lr … locked"),
        ({"image": {"weight_decay": -1}}, "weight_decay … -1"),
        ({"image": {"layer_decay": 1.5}}, "layer_decay … 1.5"),
        ({"image": {"warmup_steps": -1}}, "warmup_steps … -1"),
        ({"image": {"warmup_steps": 5}}, "warmup_steps … warmup_num_steps … WarmupCosineLR"),
        ({"no_decay": "*.bias"}, "no_decay … *.bias"),
    ]

    def check(block, optimizer=OPTIMIZER):
        written = {"train_batch_size": 8, "optimizer": optimizer}
        check_config(written | {"branches": {"optimizer_groups": block}}, BRANCHES)

    assert not_refused(check, cases) == []
    with refused("optimizer.params.lr, which is None"):  # it needs one to be scaled by
        check({"text": {"lr": 1e-4}}, {"type": "AdamW"})
    with refused("'image.stem.bais' matches no parameter; did you mean 'image.stem.bias'"):
        idle = optimizer_groups({"no_decay": ["image.stem.bais"]}, BRANCHES)
        settings_of(idle, LAYERS, OPTIMIZER)


def warmup(steps):
    from deepspeed.runtime.lr_schedules import WarmupLR

    return lambda optimizer: (
        lambda own: WarmupLR(optimizer, warmup_num_steps=own or steps, warmup_type="linear")
    )


@pytest.mark.parametrize(
    ("make", "rates"),
    [
        (warmup(4), lambda t, own: (t + 1) / (own or 4)),
        (lambda optimizer: lambda own: None, lambda t, own: 1.0),
    ],
    ids=["warmup", "constant"],
)
def test_every_schedule_is_scaled_and_goes_on_from_its_state(make, rates):
    settings = [Setting(1.0, 0.1, None), Setting(0.25, 0.0, None), Setting(0.5, 0.0, 2)]

    def schedule():
        optimizer = torch.optim.SGD(
            [{"params": [torch.zeros(1, requires_grad=True)]} for _ in settings], lr=0.1
        )
        return GroupSchedule(optimizer, make(optimizer), settings, [None, 2])

    running = schedule()
    for step in range(6):
        expected = [0.1 * s.lr_scale * min(1.0, rates(step, s.warmup_steps)) for s in settings]
        assert running.get_last_lr() == pytest.approx(expected), step
        if step == 3:
            state, running = running.state_dict(), schedule()
            running.load_state_dict(state)
            assert running.get_last_lr() == pytest.approx(expected), "also before its first step"
        running.optimizer.step()
        running.step()


def test_a_state_of_a_schedule_of_torch_is_refused():
    """Which a checkpoint of 0.1 may hold."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    schedule = GroupSchedule(optimizer, warmup(4)(optimizer), [Setting(1.0, None, None)], [])
    theirs = torch.optim.lr_scheduler.StepLR(optimizer, 3).state_dict()
    with refused("the checkpoint was trained with one of torch's … begin another run"):
        schedule.load_state_dict({"rates": {"None": 0.1}, "schedules": {"None": theirs}})


def test_a_schedule_does_not_begin_in_the_middle_of_a_run_at_a_constant_rate():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    settings = [Setting(1.0, None, None)]
    constant = GroupSchedule(optimizer, lambda own: None, settings, [])
    schedule = GroupSchedule(optimizer, warmup(4)(optimizer), settings, [])
    with refused("the checkpoint was trained at a constant rate … take the scheduler out"):
        schedule.load_state_dict(constant.state_dict())


def test_a_schedule_that_goes_on_in_a_run_of_another_length_has_its_rates_from_the_next_step_on():
    def schedule(total_num_steps):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        own = {
            "total_num_steps": total_num_steps,
            "warmup_num_steps": 2,
            "warmup_max_lr": 0.1,
            "warmup_type": "linear",
        }
        return GroupSchedule(
            optimizer, lambda warmup: WarmupDecayLR(optimizer, **own), [Setting(0.5, 0.0, None)], []
        )

    before, now = schedule(10), schedule(20)
    for _ in range(4):
        before.optimizer.step()
        before.step()
    assert before.get_last_lr() == pytest.approx([0.05 * 5 / 8])  # of step 5
    now.load_state_dict(before.state_dict())
    for step in (5, 6, 7):
        assert now.get_last_lr() == pytest.approx([0.05 * (20 - step) / 18])
        now.optimizer.step()
        now.step()


SCHEDULE = {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_type": "linear"}}
GROUPS = {
    "image": {"lr": 2 * LR, "weight_decay": 0.3, "layer_decay": 0.7},
    "text": {"lr": LR / 2, "warmup_steps": 2},
    "head": {"weight_decay": 0.0},
}


def test_parameters_equal_those_of_unsplit_training():
    """Adam's first moves are of the size of the rate whatever the gradient, so that a wrong rate or
    decay shows at once. Clipped to half."""
    limits = {"image": 0.05, "text": 0.05, "head": 0.05}
    one, two = {"image": 1, "text": 1}, {"image": 2, "text": 1}
    cases = [
        Case("fork", two, one, 12),  # no two replicas: ZeRO-0
        Case("fork", one, two, 12),  # ZeRO-1: a stage has 10 groups, the other 4
        Case("fork", one, two, 12, precision="bf16"),
    ]
    own = {"steps": 5, "optimizer_groups": GROUPS, "scheduler": SCHEDULE, "clipping": limits}
    for case, results in run_all(train_split, [replace(case, **own) for case in cases]):
        reference = train_whole(case)
        metrics, is_fp32 = results[0]["metrics"], case.precision == "fp32"
        assert metrics[-1].lr == pytest.approx(LR * 5 / 8), case
        rates = {"image": 2 * LR * 5 / 8, "text": LR / 2}
        assert metrics[-1].group_lr == pytest.approx(rates), case
        if is_fp32:
            losses = pytest.approx(reference["losses"], rel=1e-5)
            assert [m.loss for m in metrics] == losses, case
            for m, norms in zip(metrics, reference["norms"], strict=True):
                assert m.grad_norm == pytest.approx(norms, rel=1e-3), case
        for name, parameter in (p for result in results for p in result["parameters"].items()):
            if name.endswith(("k_proj.bias", "in_proj_bias")):
                continue  # the gradient of a key bias is rounding, and Adam makes full moves of it
            error = float((parameter - reference["parameters"][name]).norm())
            moved = LR * parameter.numel() ** 0.5
            rounded = 0.3 * moved + 2**-8 * float(parameter.norm())
            assert error <= (0.02 * moved if is_fp32 else rounded), (case, name, error)
