"""Bytes of weights, gradients and optimizer state that each rank holds, predicted and measured:
ZeRO 0 and 1, an offloaded optimizer, a locked tower.

    python bench/state_bytes.py                 writes bench/out/state_bytes.md and prints it

A fork of three ranks, image 0 on two replicas and text 0 on one. Predicted: what the simulator
counts, parameters × bytes per parameter (`engine/planning/costs.py`, StateBytes). Measured: the
bytes of all tensors as the last backward of a step makes its last gradient; what the forwards kept
is gone by then, all gradients are there (`bench/memory_probe.py`). Without a GPU all tensors are in
one memory: of an offloaded optimizer those that DeepSpeed makes on the CPU whatever the device are
counted one by one, and kept apart.

Expected: measured = predicted within 5 %.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # with ranks.py
OUT = ROOT / "bench" / "out"

from bench.common import configuration, cost_model, make_engine, micro_batches
from bench.memory import SETUP
from bench.memory_probe import TensorBytes
from bench.strategies import MIB

if TYPE_CHECKING:
    from torch import Tensor

    from engine.executor import ForkEngine

FORK = {"layout": "fork", "stages": {"image": 1, "text": 1}, "replicas": {"image": 2, "text": 1}}
WORLD_SIZE, STEPS = 3, 2
ZERO_1 = {"stage": 1, "reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000}
BF16 = {
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": ZERO_1,
}
OFFLOADED = {"zero_optimization": {**ZERO_1, "offload_optimizer": {"device": "cpu"}}}
# What is run: DeepSpeed's keys, and the keys of `branches`.
WAYS = {
    "ZeRO-0, fp32": ({"zero_optimization": {"stage": 0}}, {}),
    "ZeRO-1, fp32": ({"zero_optimization": ZERO_1}, {}),
    "ZeRO-1, bf16": (BF16, {}),
    "ZeRO-1, bf16, offloaded": ({**BF16, **OFFLOADED}, {}),
    "ZeRO-1, bf16, image tower locked": (BF16, {"locked": {"image": True}}),
}


def measure(deepspeed: dict[str, Any], branches: dict[str, Any]) -> tuple[int, int]:
    """On each rank: (bytes of tensors at the end of the last backward, of these what an offloaded
    optimizer has on the CPU)."""
    setup = replace(SETUP, global_batch_size=2 * SETUP.micro_batch_size)
    with TensorBytes() as probe:
        engine = make_engine(setup, {**FORK, **branches}, deepspeed=deepspeed)
        gc.collect()  # what was only needed to build
        first = next(p for p in engine.module.parameters() if p.requires_grad)
        first.register_post_accumulate_grad_hook(lambda _: probe.mark())  # the last mark counts
        for step in range(STEPS):
            engine.train_batch(micro_batches(setup, engine, step))
    return probe.marked_bytes, sum(t.numel() * t.element_size() for t in offloaded_tensors(engine))


def offloaded_tensors(engine: ForkEngine) -> Iterator[Tensor]:
    """Those of DeepSpeed's ZeRO-1 optimizer that are on the CPU whatever the device is; none if it
    is not offloaded."""
    optimizer = engine.optimizer
    if not getattr(optimizer, "cpu_offload", False):
        return
    for weights in optimizer.single_partition_of_fp32_groups:
        yield weights
        if weights.grad is not None:
            yield weights.grad
        yield from (
            t for t in engine.basic_optimizer.state.get(weights, {}).values() if hasattr(t, "numel")
        )
    yield from optimizer.param_buffer_of_bit16_for_cpu_offload_groups
    yield optimizer.temp_grad_buffer_for_cpu_offload
    yield from optimizer.accumulated_grads_in_cpu.values()


def predict(deepspeed: dict[str, Any], branches: dict[str, Any]) -> list[float]:
    """By stage: image 0, text 0."""
    from engine.optimizer.locking import lock_costs
    from engine.planning.costs import StateBytes
    from engine.planning.planner import plan_run
    from engine.planning.simulator import simulate

    setup = replace(SETUP, global_batch_size=2 * SETUP.micro_batch_size)
    config, block = configuration(setup, {**FORK, **branches}, deepspeed)
    costs = replace(cost_model(setup.towers, setup.embed_dim), state=StateBytes.of(config))
    plan = plan_run(config, block, WORLD_SIZE, costs)
    return [
        stage.state_bytes
        for stage in simulate(
            plan.graph, plan.batches, plan.schedule, lock_costs(costs, plan.trainable)
        ).stages
    ]


def report(rows: list[tuple[str, list[float], list[tuple[int, int]]]]) -> str:
    """Markdown: a row for each way, image rank / text rank; of the two image replicas the one that
    holds more."""
    lines = [
        "# Weights, gradients and optimizer state by rank",
        "",
        f"{SETUP.describe().split(', global batch')[0]}, Adam; image 0 on two replicas, text 0 on "
        "one. MiB per rank, image / text.",
        "",
        "| | predicted | measured | measured ÷ predicted | on the CPU, where the optimizer is "
        "offloaded |",
        "|---|---|---|---|---|",
    ]
    for name, predicted, ranks in rows:
        most = [max(ranks[:2], key=sum), ranks[2]]
        device, cpu = [held - on_cpu for held, on_cpu in most], [on_cpu for _, on_cpu in most]
        ratios = " / ".join(f"{d / p:.3f}" for d, p in zip(device, predicted))
        lines.append(
            f"| {name} | {_mib(predicted)} | {_mib(device)} | {ratios} | "
            f"{_mib(cpu) if any(cpu) else '–'} |"
        )
    return "\n".join(lines) + "\n"


def _mib(values: list[float]) -> str:
    return " / ".join(f"{value / MIB:.1f}" for value in values)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    from ranks import run_ranks
    from tqdm import tqdm

    import bench.state_bytes as this  # so that the ranks find `measure` by name

    OUT.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, way in tqdm(WAYS.items(), unit="way"):
        rows.append((name, predict(*way), run_ranks(WORLD_SIZE, this.measure, *way, timeout_s=600)))
        (OUT / "state_bytes.md").write_text(
            report(rows), encoding="utf-8"
        )  # after each: what was measured is kept
    print((OUT / "state_bytes.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
