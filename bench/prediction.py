"""Predicted against measured step time on two ranks, for many ways to run, and how good the
planner's choice is.

    python bench/prediction.py                 writes bench/out/prediction.md and prints it

Per pair of towers: the layers are profiled on two ranks together, as `"layout": "auto"` does; then
every combination of layout, schedule and number of micro-batches is simulated with these costs and
run, each in fresh processes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # with ranks.py
OUT = ROOT / "bench" / "out"

from bench.common import Setup, configuration, make_engine, micro_batches, samples

VIT = Setup(
    image_tower="vit_b_16:hidden_dim=192,num_layers=6,num_heads=3,mlp_dim=768,patch_size=8",
    image_size=64,
    text_tower="bert-mini:hidden_size=192,num_attention_heads=3,intermediate_size=768,num_hidden_layers=6",
    num_tokens=60,
    vocab_size=2048,
    embed_dim=128,
    global_batch_size=64,
    micro_batch_size=16,
    num_batches=1,
)
RESNET = replace(VIT, image_tower="resnet18", image_size=64)
TOWERS = {"ViT + BERT": VIT, "ResNet-18 + BERT": RESNET}
LAYOUTS = {
    "fork 1 + 1": {
        "layout": "fork",
        "stages": {"image": 1, "text": 1},
        "replicas": {"image": 1, "text": 1},
    },
    "merged × 2": {"layout": "merged", "stages": {"merged": 1}, "replicas": 2},
    "merged 2": {"layout": "merged", "stages": {"merged": 2}, "replicas": 1},
    "chain 1 + 1": {"layout": "chain", "stages": {"image": 1, "text": 1}, "replicas": 1},
}
COMBINATIONS = [
    (layout, schedule, size)
    for layout in LAYOUTS
    for schedule, size in (("batch_sync", 16), ("replay", 16), ("batch_sync", 8))
]


def profile(setup: Setup, cache: str) -> dict:
    """On every rank: the cost model, as JSON."""
    import torch

    from engine.planning.costs import CostModel, cost_model_to_json
    from engine.planning.profile import profile_together
    from engine.processes.places import Places

    os.environ["WYE_CACHE"] = cache
    towers = setup.towers
    config, _ = configuration(setup, {})
    sizes = sorted({size for _, _, size in COMBINATIONS})
    measured = profile_together(
        {branch: tower.specs for branch, tower in towers.items()},
        lambda spec: spec.build(setup.seed),
        {
            branch: lambda size, b=branch: samples(setup, b, 0, torch.arange(size))
            for branch in towers
        },
        dtype=torch.float32,
        device=torch.device("cpu"),
        sizes=dict.fromkeys(towers, sizes),
        batch_size=setup.global_batch_size,
        embed_dim=setup.embed_dim,
        places=Places.together(2),
        budget_s=20.0,
    )
    return cost_model_to_json(
        CostModel.of(measured.layers, measured.machine, config, setup.embed_dim)
    )


def measure(
    setup: Setup, branches: dict, record: dict, steps: int
) -> tuple[list[float], dict[str, float], dict[str, float]]:
    """On every rank: seconds of each step after two, the mean of `idle`, and seconds per
    instruction."""
    from engine.planning.costs import cost_model_from_json

    engine = make_engine(setup, branches, cost_model_from_json(record))
    seconds, idle = [], []
    for step in range(steps + 2):
        batch = micro_batches(setup, engine, 0)
        batch = None if batch is None else iter(list(batch))
        start = time.perf_counter()
        metrics = engine.train_batch(batch)
        seconds.append(time.perf_counter() - start)
        idle.append(metrics.idle)
        if step == 1:
            engine.instruction_seconds.clear()
    return (
        seconds[2:],
        {name: statistics.mean(i[name] for i in idle[2:]) for name in idle[0]},
        {k: v / steps for k, v in engine.instruction_seconds.items()},
    )


def predict(setup: Setup, branches: dict, record: dict):
    from engine.optimizer.locking import lock_costs
    from engine.planning.costs import cost_model_from_json
    from engine.planning.planner import plan_run
    from engine.planning.simulator import simulate

    costs = cost_model_from_json(record)
    plan = plan_run(*configuration(setup, branches), 2, costs)
    return simulate(plan.graph, plan.batches, plan.schedule, lock_costs(costs, plan.trainable))


def report(rows: list[dict]) -> str:
    ratios = [row["predicted_s"] / row["measured_s"] for row in rows]
    within = sum(abs(ratio - 1) <= 0.1 for ratio in ratios)
    lines = [
        "# Predicted and measured step time, two ranks, one thread each",
        "",
        f"**{within} of {len(rows)} combinations within 10 %**; predicted ÷ measured: median "
        f"{statistics.median(ratios):.2f}, least {min(ratios):.2f}, most {max(ratios):.2f}. "
        f"Global batch {VIT.global_batch_size}.",
        "",
    ]
    for towers in TOWERS:
        own = [row for row in rows if row["towers"] == towers]
        if own:
            chosen, best = (
                min(own, key=lambda r: r["predicted_s"]),
                min(own, key=lambda r: r["measured_s"]),
            )
            lines.append(
                f"{towers}: the choice by prediction is {chosen['name']}, measured "
                f"{1e3 * chosen['measured_s']:.0f} ms; the best measured is {best['name']}, "
                f"{1e3 * best['measured_s']:.0f} ms: "
                f"**{chosen['measured_s'] / best['measured_s'] - 1:+.1%}**."
            )
    lines += [
        "",
        "| towers | way to run | predicted, ms | measured, ms (least–most) | predicted ÷ measured "
        "| idle predicted | idle measured |",
        "|---|---|---|---|---|---|---|",
    ]
    for row, ratio in zip(rows, ratios):
        lines.append(
            f"| {row['towers']} | {row['name']} | {1e3 * row['predicted_s']:.0f} | "
            f"{1e3 * row['measured_s']:.0f} ({1e3 * row['least_s']:.0f}–{1e3 * row['most_s']:.0f}) "
            f"| {ratio:.2f} | {row['idle_predicted']} | {row['idle_measured']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds",
        type=int,
        default=1,
        metavar="N",
        help="runs of each combination, in turn (default: 1)",
    )
    parser.add_argument(
        "--steps", type=int, default=6, metavar="N", help="steps per measurement (default: 6)"
    )
    arguments = parser.parse_args()
    from ranks import run_ranks
    from tqdm import tqdm

    import bench.prediction as this  # so that the ranks find the functions by name

    rows = []
    with tqdm(total=len(TOWERS) * len(COMBINATIONS) * arguments.rounds, unit="run") as bar:
        for towers, setup in TOWERS.items():
            with tempfile.TemporaryDirectory() as folder:
                record = run_ranks(2, this.profile, setup, folder, timeout_s=600)[0]
            seconds: dict[tuple, list[float]] = {}
            idle = {}
            for _ in range(arguments.rounds):
                for combination in COMBINATIONS:
                    layout, schedule, size = combination
                    own = replace(setup, micro_batch_size=size)
                    ranks = run_ranks(
                        2,
                        this.measure,
                        own,
                        {**LAYOUTS[layout], "schedule": schedule},
                        record,
                        arguments.steps,
                        timeout_s=600,
                    )
                    seconds.setdefault(combination, []).extend(
                        max(times) for times in zip(*(rank[0] for rank in ranks))
                    )
                    idle[combination] = ranks[0][1]
                    bar.update()
            for layout, schedule, size in COMBINATIONS:
                times = seconds[layout, schedule, size]
                predicted = predict(
                    replace(setup, micro_batch_size=size),
                    {**LAYOUTS[layout], "schedule": schedule},
                    record,
                )
                rows.append(
                    {
                        "towers": towers,
                        "name": f"{layout}, {schedule}, micro-batches of {size}",
                        "predicted_s": predicted.step_s,
                        "measured_s": statistics.median(times),
                        "least_s": min(times),
                        "most_s": max(times),
                        "idle_predicted": " / ".join(
                            f"{stage.idle_fraction:.0%}" for stage in predicted.stages
                        ),
                        "idle_measured": " / ".join(
                            f"{i:.0%}" for i in idle[layout, schedule, size].values()
                        ),
                    }
                )
    text = report(rows)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "prediction.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
