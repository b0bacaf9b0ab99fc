"""What each rank does in the tests of clipping and of skipped steps; a module of its own, because
ranks import it by name."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from cost_models import BRANCHES
from split_training import (
    Case,
    gradient_pieces,
    make_engine,
    micro_batches_of_rank,
    whole,
    with_loss,
)
from torch.utils._python_dispatch import TorchDispatchMode

from engine.optimizer.clipping import GroupedClipping
from engine.optimizer.clipping_rules import clipping_rules
from models.losses import InfoNCE

# on ranks that have both
TIED = ("text.encoder.layers.0.mlp.fc2.weight", "text.encoder.layers.1.mlp.fc2.weight")
FROZEN = "image.encoder.layers.encoder_layer_1.mlp.0.bias"
SPIKE = 50.0
# by which the adaptive group's gradients are multiplied, step by step
FACTORS = (1.0, 1.2, 0.8, SPIKE, 1.0, SPIKE, 1.5, 0.9)


class Layers:
    """Builds layers; one parameter is frozen and, if `tied`, two are one."""

    def __init__(self, case: Case, tied: bool):
        self.case, self.tied, self.first = case, tied, None

    def __call__(self, spec):
        layer = spec.build(self.case.seed)
        local = {canonical: name for name, canonical in layer.canonical_names.items()}
        if FROZEN in local:
            layer.get_parameter(local[FROZEN]).requires_grad_(False)
        if self.tied and TIED[0] in local:
            self.first = layer.get_parameter(local[TIED[0]])
        if self.first is not None and TIED[1] in local:
            owner, _, name = local[TIED[1]].rpartition(".")
            setattr(layer.get_submodule(owner), name, self.first)
        return layer


def clip_under_rules(
    case: Case, blocks: dict[str, Any], adaptive: dict[str, Any], tied: bool
) -> dict[str, Any]:
    """In the first optimizer step of a run: the gradients, and what each of the `gradient_clipping`
    blocks makes of them.

    There is one parameter group: of several, ZeRO-1 hands the optimizer one at a time
    (`test_parameter_groups.py`)."""
    engine, _, image_size = make_engine(
        replace(case, optimizer_groups={"no_decay": []}), Layers(case, tied)
    )
    rules = {
        name: clipping_rules(block, BRANCHES)
        for name, block in {**blocks, "adaptive": adaptive}.items()
    }
    result: dict[str, Any] = {}

    def clipping(name: str) -> GroupedClipping:
        parameters = engine.module.canonical_parameters
        return GroupedClipping(parameters, rules[name], engine.comm, engine.backend)

    def try_all(*_) -> None:
        parameters = {
            id(p): p for p in engine.module.canonical_parameters.values() if p.requires_grad
        }.values()
        gradients = [g for g in map(engine.backend.gradient, parameters) if g is not None]
        original = [g.clone() for g in gradients]
        result["gradients"] = gradient_pieces(engine)
        for name in blocks:
            own = clipping(name)
            own.clip()
            result[name] = {"clipped": gradient_pieces(engine), **numbers(own)}
            torch._foreach_copy_(gradients, original)
        own, state = clipping("own"), clipping("own").state_dict()
        del state["clipped_steps"]["frozen"]  # 0.1.0 had no numbers of groups without parameters
        own.load_state_dict(state)
        result["adaptive"], own = [], clipping("adaptive")
        for number, factor in enumerate(FACTORS):
            torch._foreach_copy_(gradients, torch._foreach_mul(original, factor))
            if number == len(FACTORS) // 2:  # go on from what was saved
                state, own = own.state_dict(), clipping("adaptive")
                more = {**state["mean_norm"], "another": 1.0}
                own.load_state_dict({**copy.deepcopy(state), "mean_norm": more})
                if any(own.members[group] for group in adaptive):
                    with pytest.raises(ValueError, match="mean_norm of .* is not in the"):
                        own.load_state_dict({**state, "mean_norm": {"another": 1.0}})
            own.start_step()
            own.clip()
            result["adaptive"].append(numbers(own))
        result["state"] = own.state_dict()
        torch._foreach_copy_(gradients, original)

    engine.backend.optimizer.register_step_pre_hook(try_all)
    metrics = engine.train_batch(micro_batches_of_rank(case, engine, 0, image_size))
    return {**result, "measured": metrics.grad_norm, "optimizer": engine.backend.wrapper}


def numbers(clipping: GroupedClipping) -> dict[str, dict[str, float]]:
    found = {
        "norms": clipping.norms,
        "coefficients": clipping.coefficients,
        "shares": clipping.clipped_share,
    }
    return {name: dict(zip(clipping.rules, of.tolist())) for name, of in found.items()}


# -- steps that are skipped

BAD_PLACE = 5  # in the global batch: the sample whose image or text is spoilt


def train_with_bad_steps(
    case: Case, image: int, gradients: dict[int, tuple[int, float]], loss: int = -1
) -> dict[str, Any]:
    """Train; in step `image` one image is not-a-number, in the steps of `gradients` = {step:
    (rank, value)} one gradient is `value`, and in step `loss` the loss is infinite, but none of its
    gradients.

    Returns the metrics, the final parameters and buffers, and of each step whether it left
    parameters, buffers, optimizer state and learning rate as they were, to the last bit.
    """
    engine, _, image_size = make_engine(case)
    step = 0

    class Spoilt(InfoNCE):
        def _part(self, *given, **more):
            part = super()._part(*given, **more)
            spoilt = float("inf") if step == loss else 0.0
            return part._replace(
                shares={branch: shares + spoilt for branch, shares in part.shares.items()}
            )

    engine.last_stage_loss.objective = with_loss(engine.objective, Spoilt())

    def spoil(gradient):
        rank, value = gradients.get(step, (None, 0.0))
        return torch.full_like(gradient, value) if engine.comm.rank == rank else gradient

    def spoil_share(parameter):
        share = parameter.grad.to_local()
        share.copy_(spoil(share))

    learned = [p for p in engine.module.parameters() if p.requires_grad]
    first = learned[0]
    if case.zero_stage == 3:  # what a backward reaches are the gathered weights
        # of which each replica has a share
        first = next(p for p in learned if len(p) > 1)
        first.register_post_accumulate_grad_hook(spoil_share)
    else:
        first.register_hook(spoil)
    metrics, untouched, scales = [], [], []
    for step in range(case.steps):
        before = everything(engine)
        batches = micro_batches_of_rank(case, engine, step, image_size)
        metrics.append(
            engine.train_batch(
                spoilt(batches) if step == image and batches is not None else batches
            )
        )
        untouched.append(equal(before, everything(engine)))
        scales.append(metrics[-1].loss_scale)
    return {
        "metrics": metrics,
        "untouched": untouched,
        "loss_scales": scales,
        "learning_rates": [group["lr"] for group in engine.backend.optimizer.param_groups],
        "parameters": {
            n: whole(p).float().clone() for n, p in engine.module.canonical_parameters.items()
        },
        "buffers": {n: b.detach().clone() for n, b in engine.module.canonical_buffers.items()},
        "optimizer": engine.backend.wrapper,
        "stage": engine.stage.name,
        "record": metrics[-1].record(case.steps, 0.0, 1.0, 1.0),
    }


def spoilt(batches):
    for tensors in batches:
        if "pixel_values" in tensors:
            tensors["pixel_values"][tensors["image_position"] == BAD_PLACE] = float("nan")
        yield tensors


def everything(engine) -> Any:
    return copy.deepcopy(
        {
            "parameters": [whole(p) for p in engine.module.parameters()],
            "buffers": list(engine.module.buffers()),
            "optimizer": engine.backend.optimizer.state_dict()["state"],
            "master weights": [
                p.detach()
                for group in engine.backend.optimizer.param_groups
                for p in group["params"]
            ],
            "learning rate": [group["lr"] for group in engine.backend.optimizer.param_groups],
            "clipping": engine.clipping.state_dict(),
        }
    )


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


# -- kernels


class Kernels(TorchDispatchMode):
    """Counts operators that are neither views nor allocations: kernels, on a GPU."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        views = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
        is_view = any(not alias.is_write for alias in views)
        self.number += not is_view and not func._schema.name.startswith("aten::empty")
        return func(*args, **(kwargs or {}))


def kernels_of_clipping(case: Case, block: dict[str, Any]) -> tuple[int, int]:
    """Kernels of the clipping of a step, and the number of parameters."""
    engine, _, image_size = make_engine(replace(case, clipping=block))
    clip, kernels = engine.clipping.clip, Kernels()

    def counted() -> None:
        with kernels:
            clip()

    engine.clipping.clip = counted
    engine.train_batch(micro_batches_of_rank(case, engine, 0, image_size))
    return kernels.number, len(engine.module.canonical_parameters)
