"""Predicted against measured step time with layers that sleep instead of computing, on 4 to 16
ranks.

    python bench/sleeping.py                 writes bench/out/sleeping.md and prints it
    python bench/sleeping.py --only fork --ranks 16

A machine has few cores, so many ranks that compute would wait for each other's turn. Ranks that
sleep do not: filling, draining, waiting and what overlaps take as long as they would with a device
each. Everything else is real: processes, messages, the loss, the average over replicas, the
optimizer. Its time is in the measurement and not in the prediction, which knows the sleeping alone,
so the sleep of a step is chosen to be long beside it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # with ranks.py
OUT = ROOT / "bench" / "out"

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.towers.layers import Layer, LayerSpec, Tower, reset

WIDTH, EMBED_DIM = 8, 8
BACKWARD = 2.0  # × a forward, as for most layers
WARMUP_STEPS = 1
WITHIN = 0.10  # of the measured time


@dataclass(frozen=True)
class Case:
    """One way to run. `seconds`: of a forward of one sample through all layers of a branch."""

    name: str
    ranks: int
    branches: Mapping[str, Any]
    seconds: Mapping[str, float]
    num_layers: Mapping[str, int]
    global_batch_size: int = 64
    schedules: tuple[str, ...] = ("batch_sync", "replay")
    deepspeed: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def pairs(self) -> list[tuple[str, str]]:
        first, *others = self.seconds
        return [(first, other) for other in others]


LAYERS = {"image": 16, "text": 8}
SECONDS = {"image": 0.08, "text": 0.027}
CASES = (
    Case(
        "fork 3 × 1 + 1 × 1",
        4,
        {"layout": "fork", "stages": {"image": 3, "text": 1}, "replicas": {"image": 1, "text": 1}},
        SECONDS,
        LAYERS,
    ),
    Case(
        "fork 1 × 6 + 1 × 2",
        8,
        {"layout": "fork", "stages": {"image": 1, "text": 1}, "replicas": {"image": 6, "text": 2}},
        SECONDS,
        LAYERS,
        global_batch_size=96,
    ),
    Case(
        "fork 6 × 2 + 2 × 2",
        16,
        {"layout": "fork", "stages": {"image": 6, "text": 2}, "replicas": {"image": 2, "text": 2}},
        SECONDS,
        LAYERS,
        global_batch_size=128,
    ),
    Case(
        "chain 4 + 2, × 1",
        6,
        {"layout": "chain", "stages": {"image": 4, "text": 2}, "replicas": 1},
        SECONDS,
        LAYERS,
    ),
    Case(
        "chain 6 + 2, × 2",
        16,
        {"layout": "chain", "stages": {"image": 6, "text": 2}, "replicas": 2},
        SECONDS,
        LAYERS,
        global_batch_size=128,
    ),
    Case(
        "merged 4 × 1",
        4,
        {"layout": "merged", "stages": {"merged": 4}, "replicas": 1},
        SECONDS,
        LAYERS,
        schedules=("batch_sync", "replay", "per_micro_batch"),
    ),
    Case(
        "merged 8 × 2",
        16,
        {"layout": "merged", "stages": {"merged": 8}, "replicas": 2},
        SECONDS,
        LAYERS,
        global_batch_size=128,
        schedules=("batch_sync", "replay", "per_micro_batch"),
    ),
)
MICRO_BATCH_SIZE = 8


# -- towers that sleep


class _Sleep(torch.autograd.Function):
    """The identity, which takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grad, None, None


class Stem(Layer):
    """[B, WIDTH] samples of a branch to hidden states; takes no time."""

    def __init__(self, branch: str):
        super().__init__()
        self.reads = self.drops = (f"{branch}_samples",)
        self.makes = (f"{branch}_features",)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def compute(self, samples: Tensor) -> Tensor:
        return self.linear(samples)


class Block(Layer):
    """`seconds` of sleep for each sample, and a layer so small that it takes none.

    Half of the backward's sleep is for the gradient of the input, half for that of the weight.
    """

    def __init__(self, branch: str, seconds: float):
        super().__init__()
        self.reads = self.makes = (f"{branch}_features",)
        self.seconds = seconds
        self.linear = nn.Linear(WIDTH, WIDTH)

    def compute(self, features: Tensor) -> Tensor:
        forward_s = self.seconds * len(features)
        each_s = BACKWARD / 2 * forward_s
        weight = _Sleep.apply(self.linear.weight, 0.0, each_s)
        made = features + F.linear(features, weight, self.linear.bias)
        return _Sleep.apply(made, forward_s, each_s)


def tower(branch: str, num_layers: int, seconds: float, scalars: Mapping[str, float]) -> Tower:
    from models.towers.head import head

    specs = []
    with torch.device("meta"):
        layers = [Stem(branch), *(Block(branch, seconds / num_layers) for _ in range(num_layers))]
        for i, layer in enumerate(layers):
            layer.canonical_names = {own: f"{branch}.{i}.{own}" for own in layer.state_dict()}
            specs.append(LayerSpec(f"{branch}.{i}", branch, layer, reset))
    return Tower(branch, "sleeping", WIDTH, (*specs, head(branch, WIDTH, EMBED_DIM, scalars)), {})


def objective_of(case: Case) -> Any:
    from engine.objective import Branch, Objective, Pair
    from models.losses import InfoNCE

    return Objective(
        tuple(Branch(name, (f"{name}_samples",)) for name in case.seconds),
        tuple(
            Pair(*pair, InfoNCE(), weight=1.0, prefix="" if i == 0 else f"{'_'.join(pair)}_")
            for i, pair in enumerate(case.pairs)
        ),
    )


def towers_of(case: Case) -> dict[str, Tower]:
    objective = objective_of(case)
    return {
        name: tower(name, case.num_layers[name], seconds, objective.scalars_of(name))
        for name, seconds in case.seconds.items()
    }


def costs_of(case: Case) -> Any:
    """What the layers sleep, and nothing else."""
    from bench.common import free_machine
    from engine.planning.costs import CostModel, Curve, LayerCost, StateBytes

    def of(spec: LayerSpec) -> LayerCost:
        per_sample = getattr(spec.template, "seconds", 0.0)
        forward, backward, nothing = (
            Curve((1, 2), (value, 2 * value)) for value in (per_sample, BACKWARD * per_sample, 0.0)
        )
        return LayerCost(
            name=spec.name,
            num_parameters=spec.num_parameters,
            forward_s=forward,
            backward_s=backward,
            activation_bytes=nothing,
            output_bytes=nothing,
        )

    machine = free_machine("sleeping", 1e18)
    layers = {name: [of(spec) for spec in own.specs] for name, own in towers_of(case).items()}
    return CostModel(layers, machine, StateBytes(8, 12, 4), EMBED_DIM, compared=case.pairs)


def plan_of(case: Case, schedule: str) -> tuple[dict[str, Any], Any, Any]:
    """Configuration, plan, costs."""
    from engine.config.reading import check_config
    from engine.planning.planner import plan_run

    config, block = check_config(
        {
            "train_batch_size": case.global_batch_size,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": 1},
            "branches": {
                "micro_batch_size": MICRO_BATCH_SIZE,
                "schedule": schedule,
                "gradient_clipping": {},
                **case.branches,
            },
            **case.deepspeed,
        },
        tuple(case.seconds),
    )
    costs = costs_of(case)
    return config, plan_run(config, block, case.ranks, costs), costs


# -- on each rank


def measure(case: Case, schedule: str, steps: int) -> tuple[list[float], dict[str, float]]:
    """Seconds of each step, and how much of them each stage did not compute in the mean."""
    import torch.distributed as dist

    from engine.build import build_engine

    config, plan, _ = plan_of(case, schedule)
    towers = towers_of(case)
    engine = build_engine(
        plan,
        config,
        layers={name: own.specs for name, own in towers.items()},
        build_layer=lambda spec: spec.build(0),
        objective=objective_of(case),
        embed_dim=EMBED_DIM,
        total_num_steps=100,
        seed=0,
        timeout=timedelta(seconds=300),
    )
    seconds, idle = [], []
    for _ in range(WARMUP_STEPS + steps):
        batches = list(_micro_batches(case, engine))
        dist.barrier()
        start = time.perf_counter()
        metrics = engine.train_batch(iter(batches) if batches else None)
        seconds.append(time.perf_counter() - start)
        idle.append(metrics.idle)
    return seconds[WARMUP_STEPS:], {
        name: statistics.mean(one[name] for one in idle[WARMUP_STEPS:]) for name in idle[0]
    }


def _micro_batches(case: Case, engine: Any) -> list[dict[str, Tensor]]:
    branches = engine.place.loads
    if not branches:
        return []
    batch = engine.batches[branches[0]]
    places = torch.arange(case.global_batch_size).view(
        batch.replicas, batch.num_micro_batches, batch.micro_batch_size
    )[engine.replica]
    return [
        {
            name: tensor
            for branch in branches
            for name, tensor in (
                (f"{branch}_samples", torch.randn(len(own), WIDTH)),
                (f"{branch}_position", own),
                (f"{branch}_index", own),
            )
        }
        for own in places
    ]


# -- the comparison


@dataclass(frozen=True)
class Row:
    case: Case
    schedule: str
    predicted_s: float
    seconds: list[float]
    idle_predicted: list[float]
    idle_measured: list[float]

    @property
    def ratio(self) -> float:
        return self.predicted_s / statistics.median(self.seconds)


def compare(case: Case, schedule: str, steps: int) -> Row:
    from ranks import run_ranks

    import bench.sleeping as this  # so that the ranks find the functions by name
    from engine.planning.simulator import simulate

    _, plan, costs = plan_of(case, schedule)
    predicted = simulate(plan.graph, plan.batches, plan.schedule, costs)
    ranks = run_ranks(case.ranks, this.measure, case, schedule, steps)
    seconds = [max(times) for times in zip(*(rank[0] for rank in ranks))]
    idle = [stage.idle_fraction for stage in predicted.stages]
    return Row(
        case=case,
        schedule=schedule,
        predicted_s=predicted.step_s,
        seconds=seconds,
        idle_predicted=idle,
        idle_measured=list(ranks[0][1].values()),
    )


def report(rows: list[Row]) -> str:
    """Markdown."""
    near = sum(abs(row.ratio - 1) <= WITHIN for row in rows)
    lines = [
        f"{near} of {len(rows)} within {WITHIN:.0%}; predicted ÷ measured: median "
        f"{statistics.median(row.ratio for row in rows):.2f}, least "
        f"{min(row.ratio for row in rows):.2f}, most {max(row.ratio for row in rows):.2f}",
        "",
        "| way to run | ranks | schedule | predicted, s | measured, s (least – most) | predicted ÷ "
        "measured | idle predicted, stage by stage | idle measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        idle = (
            " / ".join(f"{100 * value:.0f}" for value in values)
            for values in (row.idle_predicted, row.idle_measured)
        )
        lines.append(
            f"| {row.case.name} | {row.case.ranks} | {row.schedule} | {row.predicted_s:.2f} | "
            f"{statistics.median(row.seconds):.2f} ({min(row.seconds):.2f} – "
            f"{max(row.seconds):.2f}) | {row.ratio:.2f} | {' | '.join(f'{each} %' for each in idle)} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=3, metavar="N", help="steps per measurement (default: 3)"
    )
    parser.add_argument("--only", metavar="WORD", help="ways to run whose name holds this")
    parser.add_argument("--ranks", type=int, metavar="N", help="ways to run on so many ranks alone")
    parser.add_argument("--schedule", metavar="NAME", help="this schedule alone")
    arguments = parser.parse_args()
    from tqdm import tqdm

    chosen = [
        (case, schedule)
        for case in CASES
        for schedule in case.schedules
        if (arguments.only or "") in case.name
        and arguments.ranks in (None, case.ranks)
        and arguments.schedule in (None, schedule)
    ]
    if not chosen or arguments.steps < 1:
        parser.error("nothing to measure; see CASES in bench/sleeping.py")
    rows = [compare(*each, arguments.steps) for each in tqdm(chosen, unit="run")]
    text = report(rows)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "sleeping.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
