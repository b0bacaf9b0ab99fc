"""The first hour on GPUs, in an order that gives the most knowledge first.

    bash bench/first_hour.sh one              on one GPU
    bash bench/first_hour.sh eight            on eight of one host
    bash bench/first_hour.sh eight --dry      the same commands on a CPU, over gloo, tiny

Each step is a command with a limit: one that fails or hangs loses its own line only. A line says
what was found, beside what the same step found before; everything is in bench/out/first_hour/.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import common
from bench.common import NO_GPU, Kept, Program, flags, train_command, unlaunched

OUT = common.OUT / "first_hour"
CHANGED = 0.05  # of a figure, from which on a line says what it was before
SHOWN = 4  # figures of a line; all are in the JSON
Figures = dict[str, float]


@dataclass(frozen=True)
class Place:
    """Where a step runs: with how many ranks, whether on a CPU and tiny, and its folder."""

    ranks: int
    dry: bool
    folder: Path

    def of(self, real: Any, dry: Any) -> Any:
        return dry if self.dry else real


Words = Sequence[Any]


# -- what a step found


def json_line(place: Place, said: str) -> Figures:
    """The line that a program prints for others: {"figures": …} or {"findings": …}."""
    lines = [line for line in said.splitlines() if line.startswith('{"')]
    found = json.loads(lines[-1]) if lines else {}
    return dict(found.get("figures", {}))


def speeds(place: Place, said: str) -> Figures:
    """GB/s of most links, and of the slowest."""
    found = re.findall(r"(\w+ \w+ ?\w*) ([\d.]+) GB/s, the slowest ([\d.]+)", said)
    return {f"{kind}, GB/s": float(most) for kind, most, _ in found} | {
        f"{kind}, the slowest": float(least) for kind, _, least in found
    }


def tests(place: Place, said: str) -> Figures:
    """Of pytest's last line."""
    return {word: float(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped)", said)}


def rows(place: Place, said: str) -> Figures:
    """The first number of each row of the tables in Markdown."""
    found: Figures = {}
    for line in said.splitlines():
        cells = [cell.strip(" *`") for cell in line.strip().strip("|").split("|")]
        numbers = [re.match(r"[\d,]*\d(\.\d+)?", cell) for cell in cells[1:]]
        if line.startswith("| ") and cells[0] and (numbers := [n for n in numbers if n]):
            found[cells[0]] = float(numbers[0][0].replace(",", ""))
    return found


def rates(place: Place, said: str) -> Figures:
    """samples/s of bench/gpu.py by model and way."""
    (file,) = place.folder.glob("*/results.json")
    records = json.loads(file.read_text(encoding="utf-8"))["records"]
    return {k: r["samples_per_s"] for k, r in records.items() if "samples_per_s" in r}


def steps(place: Place, said: str) -> Figures:
    """samples/s of a run of train.py but for its waiting for data, whose seconds stand beside."""
    lines = map(json.loads, (place.folder / "run" / "metrics.jsonl").read_text().splitlines())
    of_steps = [line for line in lines if "step_s" in line]
    late = of_steps[len(of_steps) // 2 :]
    waits = [max(v for k, v in line.items() if k.startswith("data_wait_s/")) for line in late]
    rate = [
        line["samples_per_s"] * line["step_s"] / (line["step_s"] - w)
        for line, w in zip(late, waits)
    ]
    return {"samples/s": statistics.median(rate), "waits for data, s": statistics.median(waits)}


def communicators(place: Place, said: str) -> Figures:
    """That NCCL says it made, a rank."""
    return {"communicators a rank": len(re.findall("Init COMPLETE", said)) / place.ranks}


def predicted(place: Place, said: str) -> Figures:
    """By the planner."""
    found = re.search(r"predicted ([\d.,]+) (ms|s) a step", said)
    if found is None:
        raise ValueError("no prediction")
    return {"a step, s": float(found[1].replace(",", "")) / (1000 if found[2] == "ms" else 1)}


def open_clip_rate(place: Place, said: str) -> Figures:
    found = [float(rate) for rate in re.findall(r" (\d+\.?\d*)/s, \d+\.?\d*/s/gpu", said)]
    return {"samples/s": statistics.median(found[len(found) // 2 :])}


# -- steps


@dataclass(frozen=True)
class Step:
    """`command`: its words. `beside`: it begins with the step before and needs no GPU."""

    name: str
    command: Callable[[Place], Words]
    limit_s: float
    read: Callable[[Place, str], Figures] = json_line
    environment: Mapping[str, str] = field(default_factory=dict)
    beside: bool = False


def fact(name: str, steps: int = 1, **more: Any) -> Callable[[Place], Words]:
    return lambda place: [
        *(sys.executable, "-m", "bench.on_gpu.first_facts", name),
        *("--ranks", place.ranks, "--steps", place.of(steps, 1)),
    ]


def gpu_tests(real: Words, dry: str) -> Callable[[Place], Words]:
    """Of tests/test_gpu.py; `dry`: names of the few that are tried."""
    pytest = [sys.executable, "-m", "pytest", "-q", "tests/test_gpu.py"]
    return lambda place: [*pytest, *place.of(real, ["-n", 2, "-k", dry])]


def gpu(models: str, ways: str, seconds: float = 2.5) -> Callable[[Place], Words]:
    tiny = ["--device", "cpu", "--tiny", "--models", "ViT-B-32", "--only", "open_clip,wye"]
    tiny += ["--seconds-per-measurement", 0.05]
    real = ["--models", models, "--only", ways, "--seconds-per-measurement", seconds]
    real += ["--budget-s", 900]
    script = [sys.executable, "bench/gpu.py", "--fresh", "--out"]
    return lambda place: [*script, place.folder, *place.of(real, tiny)]


FRAMES = "vit_b_16:hidden_dim=32,num_layers=1,num_heads=2,mlp_dim=64,patch_size=16"
SMALL = {
    "image_tower": FRAMES,
    "image_size": 32,
    "text_tower": "bert-tiny",
    "max_text_tokens": 16,
    "embed_dim": 32,
    "train_batch_size": 48,
}
B_16 = {
    "image_tower": "open_clip:ViT-B-16",
    "text_tower": "open_clip:ViT-B-16:pool=last",
    "max_text_tokens": 77,
    "image_size": 224,
    "embed_dim": 512,
    "train_batch_size": 2048,  # the demo has 3,156 pairs to train on
}
FORK = {"branches.layout": "fork"}
MERGED = {"branches.layout": "merged", "branches.stages": {"merged": 1}}


def train(real: Mapping[str, Any], dry: Mapping[str, Any] = SMALL, **both: Any) -> Any:
    """train.py in bf16 under DeepSpeed's launcher."""

    def words(place: Place) -> Words:
        given = {
            **{"data": "demo", "workers": place.of(8, 0), "wandb": "disabled"},
            **{"eval_every": 1_000_000, "trace_every": 0, "steps": place.of(60, 2)},
            **place.of(real, dry),
            **both,
            "deepspeed_config": f"ds_configs/{place.of('zero1', 'cpu')}_bf16.json",
            "run_dir": place.folder / "run",
        }
        return train_command(place.ranks, given)

    return words


def plan(place: Place) -> Words:
    tiny = ["--image-tower", SMALL["image_tower"], "--text-tower", SMALL["text_tower"]]
    tiny += ["--image-size", 32, "--max-text-tokens", 16, "--train-batch-size", 256]
    real = [f"--{key.replace('_', '-')}={value}" for key, value in B_16.items()]
    module = [sys.executable, "-m", "launch.tools.plan", "--top", 3, "--device", "H100"]
    return [*module, "--gpus", place.ranks, *place.of(real, tiny)]


def links(place: Place) -> Words:
    from engine.processes.start import free_port

    words = ["here", 0, place.ranks, place.ranks, "127.0.0.1", free_port()]
    return [sys.executable, "-m", "launch.tools.link_checks", *words]


def open_clip(place: Place) -> Words:
    """OpenCLIP's own trainer on all GPUs, with black images."""

    from bench.on_gpu.jobs import write_tiny
    from engine.processes.start import free_port

    towers = place.folder / "tiny"
    if place.dry:
        vision = {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16}
        text = {"context_length": 77, "vocab_size": 49408}
        write_tiny(towers, {"embed_dim": 32, "vision_cfg": vision, "text_cfg": text})
    each = B_16["train_batch_size"] // 8
    options = {
        "model": place.of("ViT-B-16", towers.name),
        "precision": "amp_bf16",
        "batch-size": place.of(each, 4),
        "train-num-samples": place.of(60 * 8 * each, 2 * 4 * place.ranks),
        **{"dataset-type": "synthetic", "epochs": 1, "workers": place.of(8, 0), "lr": 1e-4},
        **{"log-every-n-steps": 1, "save-frequency": 0, "logs": place.folder, "name": "run"},
        "device": place.of("cuda", "cpu"),
    }
    given = [*flags(options), "--local-loss", "--gather-with-grad"]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", place.ranks, "--master-port"]
    told = json.dumps({"towers": place.of(None, f"{towers}.json"), "options": given})
    return [sys.executable, *launcher, free_port(), "-m", "bench.open_clip_rank", told]


def loss(place: Place) -> Words:
    sizes = place.of(["--rows", 32768], ["--rows", 512, "--rounds", 1, "--only", "infonce"])
    return [sys.executable, "bench/loss.py", "speed", *sizes]


CLIPS = {"pairs": "video:text", "data": "demo:clips:64", "train_batch_size": 64}
SCENES = {"pairs": "image:text,region:text", "data": "demo:scenes:64", "train_batch_size": 32}
FEW = {"text_tower": "bert-tiny", "embed_dim": 32, "train_batch_size": 16, "image_size": 32}
SMALL_CLIPS = {**CLIPS, **FEW, "video_tower": FRAMES, "video_frames": 4}
SMALL_SCENES = {**SCENES, **FEW, "image_tower": FRAMES}
COMPILED = "open_clip_compiled,wye_compiled"
PAIRS = "ViT-B-16,ViT-L-14"
ONE = (
    Step("which calls wait for the device", fact("device_waits"), 120),
    *(
        Step(
            f"memory of groups of one rank, NCCL_RUNTIME_CONNECT={connect}",
            fact("one_rank_groups"),
            120,
            environment={"NCCL_RUNTIME_CONNECT": connect},
        )
        for connect in "01"
    ),
    Step("compile B/16 and L/14 once", gpu(PAIRS, COMPILED, 0.1), 900, rates),
    Step("the plan of B/16", plan, 300, predicted, NO_GPU, beside=True),
    Step("tests of one GPU", gpu_tests(["-n", 3], "copies or computes"), 900, tests),
    Step("the loss at 32,768 rows", loss, 300, rows),
    Step("B/16 and L/14 beside OpenCLIP", gpu(PAIRS, f"{COMPILED},open_clip,wye"), 1000, rates),
    Step('"fit": "measure"', train(B_16, **{"branches.fit": "measure"}), 600, steps),
    Step("video in bf16", train(CLIPS, SMALL_CLIPS), 400, steps),
    Step("regions in bf16", train(SCENES, SMALL_SCENES), 400, steps),
    Step(
        "eight test processes on one GPU, why they fail",
        gpu_tests(["-n", 8, "-k", "split_equals", "--maxfail", 1], "copies"),
        600,
        tests,
    ),
)
EIGHT = (
    Step(
        "doctor",
        lambda place: [
            *(sys.executable, "-m", "launch.tools.doctor", "--run-dir", place.folder / "run"),
        ],
        300,
    ),
    Step("links between all GPUs", links, 240, speeds),
    Step("two nodes of 3 and 5 processes", fact("unequal_nodes"), 300),
    Step(
        "a split equals one rank, over NCCL",
        gpu_tests(["-k", "split_equals"], "split_equals and merged and vit and not compile"),
        900,
        tests,
    ),
    Step("edges under stress", fact("edges", steps=300), 900),
    Step(
        "communicators of matching",
        train({**B_16, "steps": 3}, **MERGED, fusion=1),
        400,
        communicators,
        {"NCCL_DEBUG": "INFO"},
    ),
    Step("the plan of B/16", plan, 300, predicted, NO_GPU),
    Step("B/16 as a fork", train(B_16, **FORK), 600, steps),
    Step("B/16 merged", train(B_16, **MERGED), 600, steps),
    Step("B/16 with OpenCLIP, DDP", open_clip, 600, open_clip_rate),
)
COURSES = {"one": (1, ONE), "eight": (8, EIGHT)}


# -- running them


def environment(place: Place, step: Step) -> dict[str, str]:
    own = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "DS_ACCELERATOR": "cuda"}
    threads = max(1, len(os.sched_getaffinity(0)) // place.ranks)
    dry = {**NO_GPU, "WYE_GPU_TESTS": "cpu", "OMP_NUM_THREADS": str(threads)}
    return unlaunched() | own | (dry if place.dry else {}) | step.environment


def begun(place: Place, step: Step) -> Program:
    place.folder.mkdir(parents=True, exist_ok=True)
    return Program(step.command(place), place.folder / "log.txt", environment(place, step))


def record_of(place: Place, step: Step, program: Program) -> dict[str, Any]:
    """When it has ended, or its limit is over."""
    status = program.end(step.limit_s)
    seconds = time.monotonic() - program.began
    record: dict[str, Any] = {"seconds": seconds, "log": str(program.log)}
    if status != 0:
        why = "took too long" if status is None else f"status {status}"
        return {**record, "status": "failed", "reason": f"{why}: {program.last_words()}"}
    try:
        figures = step.read(place, program.said())
    except (OSError, ValueError, KeyError) as error:
        return {**record, "status": "failed", "reason": f"what it found: {error!r}"}
    return {**record, "status": "ok", "figures": figures}


def line(step: Step, record: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """What was found, with what was found before where that differs."""
    words = []
    for name, value in [*record.get("figures", {}).items()][:SHOWN]:
        old = before.get("figures", {}).get(name)
        differs = old is not None and abs(value - old) > CHANGED * abs(old)
        words.append(f"{name} {value:,.4g}" + (f" (before: {old:,.4g})" if differs else ""))
    told = record.get("reason", "; ".join(words) or "done")[:300]
    return f"{record['status']:7}{step.name}   [{record['seconds']:.0f} s]   {told}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 where all steps ended well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("course", nargs="?", default="one", choices=COURSES)
    parser.add_argument("--dry", action="store_true", help="on a CPU, tiny, to try the commands")
    parser.add_argument("--only", default="", metavar="WORD,...", help="of the names of steps")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR")
    given = parser.parse_args(arguments)
    ranks, course = COURSES[given.course]
    name = f"{given.course}{'-dry' * given.dry}"
    given.out.mkdir(parents=True, exist_ok=True)
    kept = Kept(given.out.resolve() / f"{name}.json")
    before = dict(kept.records)
    chosen = [s for s in course if any(w in s.name for w in given.only.split(","))]
    together: list[tuple[Step, Place, Program]] = []
    for step, after in zip(chosen, [*chosen[1:], None]):
        folder = kept.file.parent / name / re.sub(r"\W+", "-", step.name).strip("-")
        place = Place(ranks, given.dry, folder)
        together.append((step, place, begun(place, step)))
        if after is not None and after.beside:
            continue
        for one, place, program in together:
            kept.records[one.name] = record = record_of(place, one, program)
            print(line(one, record, before.get(one.name, {})), flush=True)
            kept.write()
        together.clear()
    print(kept.file)
    return 0 if all(kept.records[step.name]["status"] == "ok" for step in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
