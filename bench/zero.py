"""What ZeRO takes and saves: memory and seconds of a step on four ranks, as predicted and measured.

    python bench/zero.py --stages 0 1 2 --rounds 3        writes bench/out/zero.md and prints it

Two towers of the widths of ViT-B, with as many layers as `--layers` says, as a fork with two
replicas of each branch and merged with four replicas, in fp32 and bf16, under `replay`, so that of
the activations a rank holds those of one micro-batch. Ranks are processes of one thread over gloo.

Memory is resident memory beyond what the process had after its imports, of the rank of a stage that
needs most, in a second step of a run of its own: its peak, and its median between two backwards,
where weights, gradients and the optimizer's state are all there is. Predicted: by the planner, with
layers that are measured on all ranks at the same time, as `"layout": "auto"` does.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import MIB, Column, Figures, Study, Way, main, on_ranks
from bench.memory_probe import ProcessGrowth
from bench.steps import NO_DROPOUT, fork, merged
from bench.towers import Setup, make_engine, micro_batches, plan_of, samples

if TYPE_CHECKING:
    from engine.executor import ForkEngine
    from engine.planning.costs import CostModel

RANKS = 4
LAYOUTS = {"fork 2 + 2": fork(replicas=(2, 2)), "merged × 4": merged(1, RANKS)}
PRECISIONS: Mapping[str, Mapping[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
}


@dataclass(frozen=True)
class Run:
    """`profile_s`: seconds for measuring the layers."""

    setup: Setup
    layout: str
    precision: str
    stage: int
    profile_s: int

    @property
    def branches(self) -> dict[str, Any]:
        return {**LAYOUTS[self.layout], "schedule": "replay"}

    @property
    def deepspeed(self) -> dict[str, Any]:
        return {**PRECISIONS[self.precision], "zero_optimization": {"stage": self.stage}}

    @property
    def engine(self) -> ForkEngine:
        """A new one, of this rank."""
        return make_engine(self.setup, self.branches, self.deepspeed)


# -- on each rank


def measure_seconds(run: Run, steps: int) -> dict[str, Any]:
    """Of each step after the first; the loss of the last."""
    import torch.distributed as dist

    engine, seconds = run.engine, []
    for number in range(1 + steps):
        loaded = list(micro_batches(run.setup, engine, number) or ())
        dist.barrier()
        start = time.perf_counter()
        loss = engine.train_batch(iter(loaded)).loss
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds[1:], "loss": loss}


def measure_memory(run: Run) -> dict[str, Any]:
    """Bytes of the second step: at the peak, and between its backwards."""
    plan_of(run.setup, run.branches, RANKS, run.deepspeed)  # imports what the towers are made of
    growth, between = ProcessGrowth(), []
    engine = run.engine
    backward = engine.backend.backward

    def noting(*given: Any, **named: Any) -> None:
        backward(*given, **named)
        between.append(growth.held_bytes())

    engine.train_batch(micro_batches(run.setup, engine, 0))
    growth.mark()
    with mock.patch.object(engine.backend, "backward", noting):
        engine.train_batch(micro_batches(run.setup, engine, 1))
    return {
        "stage": engine.stage.name,
        "peak_bytes": growth.peak_bytes(),
        # behind the last one they are averaged, or about to be
        "between_bytes": statistics.median(between[:-1]),
    }


def profile(run: Run, cache: str) -> CostModel:
    """Measured on all ranks together. `cache`: an empty folder."""
    import torch

    from engine.planning.costs import CostModel, configured
    from engine.planning.profile import profile_together
    from engine.processes.places import Places

    os.environ["WYE_CACHE"] = cache
    setup, towers = run.setup, run.setup.towers
    measured = profile_together(
        {branch: tower.specs for branch, tower in towers.items()},
        lambda spec: spec.build(setup.seed),
        {b: lambda size, b=b: samples(setup, b, 0, torch.arange(size)) for b in towers},
        dtype=torch.bfloat16 if run.precision == "bf16" else torch.float32,
        device=torch.device("cpu"),
        sizes=dict.fromkeys(towers, (setup.micro_batch_size,)),
        batch_size=setup.global_batch_size,
        embed_dim=setup.embed_dim,
        places=Places.together(RANKS),
        budget_s=run.profile_s,
    )
    config, _ = plan_of(setup, run.branches, RANKS, run.deepspeed)
    own = {"embed_dim": setup.embed_dim, **configured(config)}
    return CostModel(measured.layers, measured.machine, **own)


# -- figures of a run


@functools.cache
def profiled(of_precision: Run) -> CostModel:
    """Once for all ways in a precision."""
    with tempfile.TemporaryDirectory() as folder:
        return on_ranks(RANKS, profile, of_precision, folder)[0]


def predicted(run: Run) -> Figures:
    """What the planner says of this run, on ranks that may use any memory."""
    from engine.planning.costs import configured

    costs = profiled(replace(run, layout="merged × 4", stage=1))
    config, _ = plan_of(run.setup, run.branches, RANKS, run.deepspeed)
    unlimited = replace(costs.machine, memory_bytes=math.inf)
    costs = replace(costs, machine=unlimited, **configured(config))
    _, plan = plan_of(run.setup, run.branches, RANKS, run.deepspeed, costs)
    return {
        "predicted_s": plan.predicted_step_s,
        "predicted_peak": [stage.peak_bytes for stage in plan.predicted],
        "predicted_between": [stage.state_bytes for stage in plan.predicted],
    }


def timed(run: Run, steps: int) -> Figures:
    """Of the slowest rank of each step."""
    ranks = on_ranks(RANKS, measure_seconds, run, steps)
    step_s = statistics.median(max(each) for each in zip(*(rank["seconds"] for rank in ranks)))
    return {"step_s": step_s, "loss": ranks[0]["loss"]}


def once(run: Run) -> Figures:
    """Memory, and what was predicted of it and of the seconds."""
    ranks = on_ranks(RANKS, measure_memory, run)
    stages = list(dict.fromkeys(rank["stage"] for rank in ranks))

    def most(key: str) -> list[float]:
        return [max(rank[key] for rank in ranks if rank["stage"] == stage) for stage in stages]

    said = predicted(run)
    measured = {"peak": most("peak_bytes"), "between": most("between_bytes")}
    shares = {
        f"{name}_share": [own / of for own, of in zip(each, said[f"predicted_{name}"])]
        for name, each in measured.items()
    }
    return {**measured, **said, **shares}


# -- the study


def zero(
    stages: Sequence[int] = (0, 1, 2),
    layers: int = 6,
    width: int = 768,
    heads: int = 12,
    image_size: int = 112,
    global_batch: int = 16,
    micro_batch: int = 2,
    steps: int = 3,
    profile_seconds: int = 30,
) -> Study:
    """Memory and seconds of a step under each stage of ZeRO: the replicas of a stage share out the
    optimizer's state, then the gradients too, at a message of all gradients in every backward. What
    is held between backwards is predicted within 5 %, but for some 30 MiB of any process. bf16 needs
    ZeRO-1 at least."""
    setup = Setup(
        image_tower=f"vit_b_16:hidden_dim={width},num_layers={layers},num_heads={heads},"
        f"mlp_dim={4 * width},patch_size=16",
        image_size=image_size,
        text_tower=f"bert-mini:hidden_size={width},num_attention_heads={heads},"
        f"intermediate_size={4 * width},num_hidden_layers={layers}{NO_DROPOUT}",
        num_tokens=48,
        vocab_size=30522,
        embed_dim=512,
        global_batch_size=global_batch,
        micro_batch_size=micro_batch,
        num_batches=1,
    )
    runs = {
        f"{layout}, {precision}, ZeRO-{stage}": Run(
            setup, layout, precision, stage, profile_seconds
        )
        for layout in LAYOUTS
        for precision in PRECISIONS
        for stage in stages
        if stage or precision == "fp32"
    }
    for run in runs.values():  # ValueError for what does not go together
        plan_of(setup, run.branches, RANKS, run.deepspeed)
    ways = {
        name: Way(
            partial(timed, run, steps),
            partial(once, run),
            f"{run.layout}, {run.precision}, ZeRO-1" if 1 in stages else None,
        )
        for name, run in runs.items()
    }
    return Study(
        "ZeRO on four ranks: memory and seconds",
        ways,
        (
            _mib("between", "between backwards, MiB"),
            _mib("predicted_between", "predicted"),
            Column("between_share", "÷ predicted", "{:.2f}"),
            _mib("peak", "peak, MiB"),
            _mib("predicted_peak", "predicted"),
            Column("peak_share", "÷ predicted", "{:.2f}"),
            Column("step_s", "step, s", "{:.2f}"),
            Column("step_s", "÷ ZeRO-1"),
            Column("predicted_s", "predicted, s", "{:.2f}"),
            Column("predicted_s", "÷ ZeRO-1"),
        ),
        setup.describe().replace("AdamW, fp32", "AdamW, fp32 or bf16")
        + " Four ranks, `replay`. Memory of a fork: image / text.",
        rounds=3,
        equal=("loss", 1e-3),
    )


def _mib(key: str, heading: str) -> Column:
    return Column(key, heading, "{:,.0f}", 1 / MIB)


STUDIES = (zero,)

if __name__ == "__main__":
    main("bench.zero")
