"""Whole runs of train.py, side by side: does a choice change what is learned, and what does it cost?

    python bench/convergence.py --experiment balance          3 seeds of each variant; table and curves to bench/out/convergence/

Every variant sees the same data for the same number of steps, on two ranks of a fork, variants and seeds in turn. A run that is done is not
run again: after an interruption the same command goes on. A difference counts where it is more than the spread of the seeds.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
OUT = ROOT / "bench" / "out" / "convergence"

TOWERS = ("--image-tower", "resnet18:layers=1-1-1-1", "--text-tower", "bert-mini", "--image-size", "48", "--embed-dim", "128")
FORK = {"layout": "fork", "stages": {"image": 1, "text": 1}, "schedule": "batch_sync", "micro_batch_size": 30}
MEASURE = "text_to_image_R@10"
RUN_LIMIT_S = 3600


@dataclass(frozen=True)
class Variant:
    """One way to train. `branches` and `config` change the JSON, `options` are flags of train.py."""

    name: str
    branches: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Experiment:
    """`question`; `expected`: what was predicted before it was run."""

    question: str
    expected: str
    variants: tuple[Variant, ...]
    options: tuple[str, ...] = ()  # of all variants


EXPERIMENTS = {
    "balance": Experiment(
        "does dealing texts by cost change what is learned?",
        "no: the loss is over the global batch; only dropout draws differ. Retrieval differs by no more than seeds do.",
        (Variant("in order"), Variant("dealt by cost", {"balance": {"strategy": "deal"}})),
    ),
}


def configuration(variant: Variant) -> dict[str, Any]:
    """The JSON of a variant: that of a CPU, with what the variant changes."""
    config = json.loads((ROOT / "ds_configs" / "cpu_fp32.json").read_text(encoding="utf-8"))
    config["branches"] = {"gradient_clipping": config["branches"]["gradient_clipping"], **FORK, **copy.deepcopy(dict(variant.branches))}
    return config | copy.deepcopy(dict(variant.config))


def command(variant: Variant, experiment: Experiment, seed: int, epochs: int, folder: Path) -> list[str]:
    launcher = [
        str(Path(sys.executable).parent / "deepspeed"),
        "--quiet",
        "--num_gpus",
        "2",
        "--master_port",
        str(_free_port()),
        "train.py",
    ]
    length = ("--epochs", str(epochs), "--seed", str(seed), "--trace-every", "0", "--workers", "0")
    return [
        *launcher,
        "--deepspeed_config",
        str(folder.with_suffix(".json")),
        "--run-dir",
        str(folder),
        *TOWERS,
        *length,
        *experiment.options,
        *variant.options,
    ]


def run(variant: Variant, experiment: Experiment, seed: int, epochs: int, folder: Path) -> None:
    """Train, unless it is done already."""
    if is_done(folder):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.with_suffix(".json").write_text(json.dumps(configuration(variant), indent=2), encoding="utf-8")
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "DLTS_HOSTFILE": "/nonexistent", "OMP_NUM_THREADS": "1"}
    with folder.with_suffix(".log").open("a", encoding="utf-8") as log:
        status = subprocess.run(
            command(variant, experiment, seed, epochs, folder), cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=RUN_LIMIT_S
        ).returncode
    if status:
        tail = folder.with_suffix(".log").read_text(encoding="utf-8")[-1500:]
        sys.exit(
            f"bench/convergence.py: {variant.name}, seed {seed} ended with status {status}; {folder.with_suffix('.log')} ends with:\n{tail}"
        )


def lines(folder: Path) -> list[dict[str, Any]]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def is_done(folder: Path) -> bool:
    config = folder / "config.json"
    if not config.is_file():
        return False
    total = json.loads(config.read_text(encoding="utf-8"))["total_steps"]
    return any(line["step"] == total and MEASURE in line for line in lines(folder))


def result(folder: Path) -> dict[str, Any]:
    """Of a run that is done: its loss curve, retrieval of each held-out set at the end, seconds of a step."""
    logged = lines(folder)
    steps = [line for line in logged if "loss" in line]
    end = max(line["step"] for line in steps)
    return {
        "losses": [line["loss"] for line in steps],
        "retrieval": {line["held_out"]: line[MEASURE] for line in logged if line["step"] == end and "held_out" in line},
        "step_s": statistics.median(line["step_s"] for line in steps[len(steps) // 4 :]),
        "sent_bytes": statistics.median(line["sent_bytes"] for line in steps),
        "peak_memory_bytes": steps[-1]["peak_memory_bytes"],
    }


def table(experiment: Experiment, results: Mapping[str, Sequence[Mapping[str, Any]]], epochs: int) -> str:
    """Markdown: mean and spread over the seeds, and whether the first variant's spread holds the difference."""
    held_out = list(next(iter(results.values()))[0]["retrieval"])
    seeds = len(next(iter(results.values())))
    steps = len(next(iter(results.values()))[0]["losses"])
    rows = [
        f"# {experiment.question}",
        "",
        f"Expected: {experiment.expected}",
        "",
        f"{steps} steps ({epochs} epochs of the embedded data), two ranks, {seeds} seeds each: mean (least – most). R@10: text → image, held-out samples.",
        "",
        f"| variant | {' | '.join(f'R@10 {name} %' for name in held_out)} | loss, last 10 steps | s / step |",
        "|---|" + "---|" * (len(held_out) + 2),
    ]
    for name, runs in results.items():
        cells = [_spread([100 * run["retrieval"][h] for run in runs], ".1f") for h in held_out]
        cells.append(_spread([statistics.mean(run["losses"][-10:]) for run in runs], ".3f"))
        cells.append(_spread([run["step_s"] for run in runs], ".2f"))
        rows.append(f"| {name} | {' | '.join(cells)} |")
    rows.append("")
    (first, base), *others = results.items()
    for name, runs in others:
        for h in held_out:
            a, b = ([100 * run["retrieval"][h] for run in group] for group in (base, runs))
            difference, spread = statistics.mean(b) - statistics.mean(a), max(max(a) - min(a), max(b) - min(b))
            verdict = "within" if abs(difference) <= spread else "beyond"
            rows.append(f"- {h}: {name} − {first} = {difference:+.1f} points, {verdict} the spread of the seeds ({spread:.1f}).")
    return "\n".join(rows) + "\n"


def _spread(values: Sequence[float], form: str) -> str:
    return f"{statistics.mean(values):{form}} ({min(values):{form}} – {max(values):{form}})"


def draw(results: Mapping[str, Sequence[Mapping[str, Any]]], title: str, path: Path) -> None:
    """Loss curves, a thin line per seed, smoothed over ten steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for i, (name, runs) in enumerate(results.items()):
        for seed, run in enumerate(runs):
            smooth = np.convolve(run["losses"], np.ones(10) / 10, mode="valid")
            style = ["-", "--", ":", "-."][i % 4]
            axes.plot(np.arange(len(smooth)) + 10, smooth, style, color=f"C{i}", linewidth=1, label=name if seed == 0 else None)
    axes.set(xlabel="step", ylabel="loss, mean of 10 steps", title=title)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _free_port() -> int:
    from engine.processes import free_port

    return free_port()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experiment", choices=EXPERIMENTS, action="append", help="which (default: all); may be repeated")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each variant (default: 3)")
    parser.add_argument("--epochs", type=int, default=4, metavar="N", help="of the embedded data (default: 4)")
    arguments = parser.parse_args()
    if arguments.seeds < 1 or arguments.epochs < 1:
        parser.error("--seeds and --epochs must be at least 1")
    from tqdm import tqdm

    for key in arguments.experiment or EXPERIMENTS:
        experiment = EXPERIMENTS[key]
        base = OUT / key

        def folder(variant: Variant, seed: int, base: Path = base) -> Path:
            return base / f"{variant.name.replace(' ', '-')}-{arguments.epochs}-epochs-seed-{seed}"

        for seed, variant in tqdm([(s, v) for s in range(arguments.seeds) for v in experiment.variants], desc=key, unit="run"):
            run(variant, experiment, seed, arguments.epochs, folder(variant, seed))
        results = {v.name: [result(folder(v, seed)) for seed in range(arguments.seeds)] for v in experiment.variants}
        text = table(experiment, results, arguments.epochs)
        (base / "table.md").write_text(text, encoding="utf-8")
        draw(results, experiment.question, base / "loss.png")
        print(text)


if __name__ == "__main__":
    main()
