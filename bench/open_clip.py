"""OpenCLIP's own trainer and this program, side by side: what is learned by step and by second,
samples/s, and memory.

    python bench/open_clip.py learn                   3 seeds of each variant, 4 epochs
    python bench/open_clip.py speed                   throughput alone, in rounds
    python bench/open_clip.py speed --towers near     with towers that cost about the same
    python bench/open_clip.py learn --language zh     the same images with their Chinese names
    pip install -r requirements-test.txt              what it needs

Both programs read the same csv files with the same tokenizer, on two ranks without a GPU, in fp32,
with the same global batch, optimizer and schedule (but for the variant that is called shipped
recipe). Everything else is each program's own default: `VARIANTS` lists what is compared, and a
further variant is one more line there. What the defaults differ in (augmentation, initial weights,
the pooling of texts, clipping, micro-batches) is thus part of what is measured.

Seconds are those of steps, their waiting for data included; the start, evaluations after each epoch
and checkpoints are in none of them. OpenCLIP logs the loss of its first rank, 128 of the 256 rows,
where this program logs the loss of all. A rank's memory is its largest resident size.

Runs come in turn, seed by seed and variant by variant (`--rounds`: the seeds), so that what else the
machine does hits all alike. `--resume` goes on after an interruption; a run that was broken off starts
anew. Logs are in bench/out/open_clip/.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Python puts bench/ at the front of the path of a script that lies there. There `import open_clip`
# would find this file, not the library.
sys.path = [str(ROOT), *(folder for folder in sys.path if Path(folder).resolve() != ROOT / "bench")]


from bench import common
from bench.common import (
    MIB,
    Column,
    Seen,
    Study,
    Way,
    call,
    flags,
    main,
    read_metrics,
    settings,
    table,
    train_command,
)
from bench.open_clip_data import (
    EMBED_DIM,
    IMAGE_SIZE,
    MAX_TEXT_TOKENS,
    TOWERS,
    open_clip_towers,
    prepare_data,
    text_tower,
)
from launch.terminal.tables import DIRECTIONS

OUT = common.OUT / "open_clip"
RANKS, BATCH_SIZE = 2, 256
WARMUP_STEPS = 3
TARGET = 0.6  # of R@10, mean of both directions
RECALLS = {
    f"{direction}_R@{k}": f"R@{k} {words} %"
    for k in (10, 1)
    for direction, words in DIRECTIONS.items()
}
# Equal in both programs. The rate rises in equal steps from LR / WARMUP in the first step, and then
# stays; both leave out parameters of one dimension from weight decay.
LR, BETAS, EPS, DECAY, WARMUP = 5e-4, (0.9, 0.98), 1e-6, 0.2, 20
RECIPE = {
    "zero_optimization": {"stage": 0},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_num_steps": WARMUP, "warmup_max_lr": LR, "warmup_type": "linear"},
    },
}


@dataclass(frozen=True)
class Variant:
    """One way to train. `options`: of OpenCLIP's trainer, flags, which win over those that it is
    given anyway; of this program settings of `--set`. `shipped`: the optimizer and the schedule are
    those of ds_configs/cpu_fp32.json, what a user gets who gives no numbers."""

    options: str = ""
    of_open_clip: bool = False
    shipped: bool = False


FORK = "branches.layout=fork"
MERGED = 'branches.layout=merged branches.stages={"merged":1} branches.replicas=2'
REPLAY = "branches.schedule=replay branches.micro_batch_size=32"
VARIANTS = {
    "OpenCLIP": Variant(of_open_clip=True),
    "ours": Variant(FORK),
    "ours, merged × 2": Variant(MERGED),
    "ours, merged × 2, shipped recipe": Variant(MERGED, shipped=True),
}
# Both programs run the encoders twice here, to hold the activations of 32 samples at a time.
SAVING_MEMORY = {
    "OpenCLIP, --accum-freq 4": Variant("--batch-size 32 --accum-freq 4", of_open_clip=True),
    "ours, replay": Variant(f"{FORK} {REPLAY}"),
    "ours, merged × 2, replay": Variant(f"{MERGED} {REPLAY}"),
}
ALL = VARIANTS | SAVING_MEMORY


@dataclass(frozen=True)
class Run:
    """What all variants have in common. `workers` of each rank; `speed`: nothing is evaluated, and
    the first steps, in which memory is allocated for the first time, do not count."""

    towers: str
    language: str
    epochs: int  # of 13 steps
    workers: int
    speed: bool = False


@dataclass(frozen=True)
class Record:
    """A finished run. The first three lists have an entry per step, `peak_bytes` has one per rank.

    `step_s` is the whole of a step, its waiting for data (`data_wait_s`) included. `evaluations`:
    recalls among the held-out samples, from 0 to 1, after `step` steps.
    """

    losses: list[float]
    step_s: list[float]
    data_wait_s: list[float]
    peak_bytes: list[int]
    evaluations: list[dict[str, float]]

    def samples_per_s(self, batch_size: int, skip: int = 0) -> float:
        """Of all steps but the first `skip`."""
        return batch_size * len(self.step_s[skip:]) / sum(self.step_s[skip:])

    def seconds_to(self, target: float) -> float | None:
        """Of training until R@10 first reaches `target`, on straight lines between evaluations,
        from 0 before training; None where it does not."""
        until = list(accumulate(self.step_s))
        before_s, before = 0.0, 0.0
        for each in self.evaluations:
            seconds = until[int(each["step"]) - 1]
            after = statistics.mean(each[f"{direction}_R@10"] for direction in DIRECTIONS)
            if after >= target:
                return before_s + (seconds - before_s) * (target - before) / (after - before)
            before_s, before = seconds, after
        return None


# -- how each program is called


def open_clip_options(run: Run, data: Path, seed: int) -> dict[str, Any]:
    """Flags of OpenCLIP's trainer."""
    return {
        "train-data": data / "train.csv",
        **({} if run.speed else {"val-data": data / "val.csv"}),
        "dataset-type": "csv",
        "model": f"{run.towers}-{seed}",
        "batch-size": BATCH_SIZE // RANKS,
        "epochs": run.epochs,
        "lr": LR,
        "beta1": BETAS[0],
        "beta2": BETAS[1],
        "eps": EPS,
        "wd": DECAY,
        "warmup": WARMUP,
        "lr-scheduler": "const",
        "precision": "fp32",
        "device": "cpu",
        "workers": run.workers,
        "seed": seed,
        "log-every-n-steps": 1,
        "save-frequency": 0,
    }


def open_clip_command(options: Sequence[str], towers: Path) -> list[str]:
    """OpenCLIP's trainer under torchrun, the module found from ROOT."""
    from engine.processes.start import free_port

    where = flags({"nproc-per-node": RANKS, "master-port": free_port()})
    given = json.dumps({"towers": str(towers), "options": options})
    launcher = [sys.executable, "-m", "torch.distributed.run", *where]
    return [*launcher, "-m", "bench.open_clip_rank", given]


def own_settings(run: Run, variant: Variant, data: Path, seed: int) -> dict[str, Any]:
    image, width = TOWERS[run.towers]
    return settings(
        {
            "deepspeed_config": "ds_configs/cpu_fp32.json",
            "train_batch_size": BATCH_SIZE,
            "data": f"csv:{data / 'train.csv'}?separator=%09",
            **({"val_fraction": 0} if run.speed else {}),
            **({} if run.speed else {"val_data": f"csv:{data / 'val.csv'}?separator=%09"}),
            "tokenizer": data / "tokenizer",
            "image_tower": image,
            "text_tower": text_tower(width),
            "embed_dim": EMBED_DIM,
            "image_size": IMAGE_SIZE,
            "max_text_tokens": MAX_TEXT_TOKENS,
            "epochs": run.epochs,
            "seed": seed,
            "workers": run.workers,
            "save_every": 1_000_000_000,
            "trace_every": 0,
        },
        {} if variant.shipped else RECIPE,
        variant.options,
    )


def trained(run: Run, name: str, seed: int) -> Record:
    variant, data = ALL[name], OUT / "data" / run.language
    folder = OUT / f"{re.sub(r'[^a-z]+', '-', name.lower())}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
    if variant.of_open_clip:
        given = flags(open_clip_options(run, data, seed))
        given += ["--local-loss", "--gather-with-grad", *variant.options.split()]
        given += flags({"logs": folder.parent, "name": folder.name})
        command = open_clip_command(given, open_clip_towers(data, run.towers, seed))
    else:
        own = own_settings(run, variant, data, seed)
        command = train_command(RANKS, {**own, "run_dir": folder})
    threads = max(1, len(os.sched_getaffinity(0)) // RANKS)
    peaks = call(command, folder.with_suffix(".log"), f"{name}, seed {seed}", RANKS, threads)
    record = (read_open_clip if variant.of_open_clip else read_own)(folder, BATCH_SIZE, peaks)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # 0.3 GB
    return record


# -- what the programs log

# A line that OpenCLIP writes per step, for example:
# Train Epoch: 0 [ 256/3550 (8%)] Data (t): 0.412 Batch (t): 2.310, 110.8/s, 55.4/s/gpu LR: 0.000025
# Logit Scale: 14.286 … Loss: 5.5452 (5.5452)
STEP_LINE = re.compile(
    r"Train Epoch: \d+ .*? Data \(t\): (\S+) Batch \(t\): \S+, (\S+)/s, .* Loss: (\S+) \("
)


def read_open_clip(folder: Path, batch_size: int, peak_bytes: Sequence[int]) -> Record:
    found = STEP_LINE.findall((folder / "out.log").read_text(encoding="utf-8"))
    if not found:
        raise ValueError(f"{folder / 'out.log'}: no step's line is as OpenCLIP 3.3 writes it")
    waits, rates, losses = ([float(value) for value in column] for column in zip(*found))
    results = folder / "checkpoints" / "results.jsonl"
    lines = results.read_text(encoding="utf-8").splitlines() if results.is_file() else []
    evaluations = [json.loads(line) for line in lines]
    per_epoch = len(losses) // max((each["epoch"] for each in evaluations), default=1)
    steps = [per_epoch * each["epoch"] for each in evaluations]
    # by the rate, which has six digits, where seconds are rounded to a thousandth
    step_s = [batch_size / rate for rate in rates]
    return Record(losses, step_s, waits, list(peak_bytes), recalls_of(evaluations, steps))


def read_own(folder: Path, batch_size: int, peak_bytes: Sequence[int]) -> Record:
    """The evaluation before the first step is left out: OpenCLIP has none."""
    steps, evaluations = read_metrics(folder)
    evaluations = [each for each in evaluations if each["step"] > 0]
    waits = [max(v for k, v in line.items() if k.startswith("data_wait_s/")) for line in steps]
    return Record(
        [line["loss"] for line in steps],
        [line["step_s"] for line in steps],
        waits,
        list(peak_bytes),
        recalls_of(evaluations, [each["step"] for each in evaluations]),
    )


def recalls_of(
    evaluations: Sequence[Mapping[str, Any]], steps: Sequence[int]
) -> list[dict[str, float]]:
    return [
        {"step": step, **{key: each[key] for key in RECALLS if key in each}}
        for each, step in zip(evaluations, steps)
    ]


# -- studies

# Both as the harness keeps them: figures of a run, by seed.
COSTS = (
    Column("seconds_to", f"seconds to R@10 {TARGET:.0%}", "{:.0f}"),
    Column("seconds_to", "÷ OpenCLIP"),
    Column("samples_per_s", "samples/s", "{:.1f}"),
    Column("samples_per_s", "÷ OpenCLIP"),
    Column("data_wait_s", "waiting for data, s a step", "{:.2f}"),
    *(
        Column("peak_bytes", f"peak MiB, rank {rank}", "{:,.0f}", 1 / MIB, pick=itemgetter(rank))
        for rank in range(RANKS)
    ),
)


def figures(record: Record, skip: int = 0) -> dict[str, Any]:
    """Samples/s of all steps but the first `skip`; no seconds where the target is not reached."""
    found: dict[str, Any] = {
        "samples_per_s": record.samples_per_s(BATCH_SIZE, skip),
        "data_wait_s": statistics.mean(record.data_wait_s),
        "peak_bytes": record.peak_bytes,
    }
    for each in record.evaluations:
        step = int(each["step"])
        found |= {f"{step}/{key}": 100 * each[key] for key in RECALLS if key in each}
        found[f"{step}/loss"] = record.losses[step - 1]
    seconds = record.seconds_to(TARGET)
    return found | ({} if seconds is None else {"seconds_to": seconds})


def by_step(seen: Seen) -> Iterator[str]:
    """Markdown: the loss of a step, and retrieval after it. docs/draw.py reads these rows."""
    (first, *_), *_ = seen.rounds.values()
    rows = []
    for step in (key.partition("/")[0] for key in first if key.endswith("/loss")):
        columns = [Column(f"{step}/loss", "", "{:.2f}")]
        columns += [Column(f"{step}/{key}", "", "{:.1f}") for key in RECALLS]
        rows += [[step, name, *(seen.cell(name, c) for c in columns)] for name in seen.rounds]
    yield table(["steps", "variant", "loss", *RECALLS.values()], rows)
    for name in seen.rounds:
        reached, runs = len(seen.values(name, "seconds_to")), len(seen.rounds[name])
        yield f"- {name}: R@10 of {TARGET:.0%} in {reached} of {runs} runs"


def study(variants: Mapping[str, Variant], run: Run, **more: Any) -> Study:
    if run.towers not in TOWERS:
        raise ValueError(f"--towers {run.towers}: give one of {', '.join(TOWERS)}")
    needed = ("open_clip", "open_clip_train", "timm", "pandas", "webdataset")
    if missing := ", ".join(name for name in needed if importlib.util.find_spec(name) is None):
        raise ValueError(f"not installed: {missing}; run: pip install -r requirements-test.txt")
    try:
        prepare_data(OUT / "data" / run.language, run.language)
    except FileNotFoundError as error:
        raise ValueError(str(error)) from error
    return Study(
        "OpenCLIP's own trainer and this program",
        {
            name: Way(lambda seed, n=name: figures(trained(run, n, seed), WARMUP_STEPS * run.speed))
            for name in variants
        },
        COSTS,
        f"Names in language {run.language}, towers {run.towers}.",
        reference="OpenCLIP",
        seeds=True,
        **more,
    )


def learn(
    towers: str = "unequal", language: str = "en", epochs: int = 4, workers: int = 0
) -> Study:
    """What is learned: equal by step, and by second as much ahead as samples/s are."""
    return study(VARIANTS, Run(towers, language, epochs, workers), notes=by_step)


def speed(towers: str = "unequal", language: str = "en", workers: int = 0) -> Study:
    """Samples/s alone, without evaluation: 1.5 × OpenCLIP's at 0.75 of its memory."""
    return study(ALL, Run(towers, language, 1, workers, speed=True), rounds=5)


STUDIES = (learn, speed)

if __name__ == "__main__":
    main("bench.open_clip")
