"""OpenCLIP's own trainer and this program, side by side: what is learned by step and by second,
samples/s, and memory.

    python bench/open_clip.py                         3 seeds of each variant, 4 epochs
    python bench/open_clip.py --speed                 throughput alone, in rounds
    python bench/open_clip.py --speed --towers near   with towers that cost about the same
    python bench/open_clip.py --language zh           the same images with their Chinese names
    pip install -r requirements-test.txt              what it needs

Both programs read the same csv files with the same tokenizer, on two ranks without a GPU, in fp32,
with the same global batch, optimizer and schedule (but for the variant that is called shipped
recipe). Everything else is each program's own default: `VARIANTS` lists what is compared, and a
further variant is one more line there. What the defaults differ in (augmentation, initial weights,
the pooling of texts, clipping, micro-batches) is thus part of what is measured.

Seconds are those of steps, their waiting for data included; the start, evaluations after each epoch
and checkpoints are in none of them. OpenCLIP logs the loss of its first rank, 128 of the 256 rows,
where this program logs the loss of all. A rank's memory is its largest resident size.

Tables go to bench/out/open_clip/. Runs come in turn, seed by seed and variant by variant, so that
what else the machine does hits all alike. A finished run is kept in bench/out/open_clip/runs/ and is
not run again; one that was broken off starts anew. After a change of the program, delete that folder.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Python puts bench/ at the front of the path of a script that lies there. There `import open_clip`
# would find this file, not the library.
sys.path = [str(ROOT), *(folder for folder in sys.path if Path(folder).resolve() != ROOT / "bench")]
OUT = ROOT / "bench" / "out" / "open_clip"

from bench.common import spread
from bench.open_clip_data import (
    EMBED_DIM,
    IMAGE_SIZE,
    MAX_TEXT_TOKENS,
    TOWERS,
    open_clip_towers,
    prepare_data,
    text_tower,
)
from bench.runs import call, flags, read_metrics, settings, table, train_command
from launch.terminal.tables import DIRECTIONS

RANKS, BATCH_SIZE = 2, 256
WARMUP_STEPS = 3  # of a measurement of speed: memory is allocated for the first time in them
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


def open_clip_options(
    run: argparse.Namespace, data: Path, seed: int, epochs: int
) -> dict[str, Any]:
    """Flags of OpenCLIP's trainer."""
    return {
        "train-data": data / "train.csv",
        **({} if run.speed else {"val-data": data / "val.csv"}),
        "dataset-type": "csv",
        "model": f"{run.towers}-{seed}",
        "batch-size": BATCH_SIZE // RANKS,
        "epochs": epochs,
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


def own_settings(
    run: argparse.Namespace, variant: Variant, data: Path, seed: int, epochs: int
) -> dict[str, Any]:
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
            "epochs": epochs,
            "seed": seed,
            "workers": run.workers,
            "save_every": 1_000_000_000,
            "trace_every": 0,
        },
        {} if variant.shipped else RECIPE,
        variant.options,
    )


def finished(run: argparse.Namespace, name: str, seed: int, epochs: int) -> Record:
    """The record of a run, which is run first where that was not done before. Its files are named
    by a hash of what is trained and how."""
    variant, data = ALL[name], OUT / "data" / run.language
    if variant.of_open_clip:
        given = flags(open_clip_options(run, data, seed, epochs))
        given += ["--local-loss", "--gather-with-grad", *variant.options.split()]
        identity: Any = [given, version("open_clip_torch")]
    else:
        identity = own_settings(run, variant, data, seed, epochs)
    digest = hashlib.sha256(json.dumps(identity, default=str, sort_keys=True).encode()).hexdigest()
    folder = OUT / "runs" / digest[:12]
    file = folder.with_suffix(".json")
    if not file.is_file():
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was broken off
        folder.parent.mkdir(parents=True, exist_ok=True)
        if variant.of_open_clip:
            given += flags({"logs": folder.parent, "name": folder.name})
            command = open_clip_command(given, open_clip_towers(data, run.towers, seed))
        else:
            command = train_command(RANKS, {**identity, "run_dir": folder})
        threads = max(1, len(os.sched_getaffinity(0)) // RANKS)
        log = folder.with_suffix(".log")
        peaks = call(command, log, f"{name}, seed {seed}", RANKS, threads)
        read = read_open_clip if variant.of_open_clip else read_own
        record = asdict(read(folder, BATCH_SIZE, peaks))
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # 0.3 GB
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(record), encoding="utf-8")
        partial.replace(file)
    return Record(**json.loads(file.read_text(encoding="utf-8")))


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


# -- tables

Records = Mapping[str, Sequence[Record]]  # of each variant, a record per seed


def by_step(records: Records) -> str:
    """Markdown: the loss of a step, and retrieval after it. docs/draw.py reads these rows."""
    rows = []
    for number, each in enumerate(next(iter(records.values()))[0].evaluations):
        for name, runs in records.items():
            found = [run.evaluations[number] for run in runs]
            losses = [run.losses[int(each["step"]) - 1] for run in runs]
            recalls = (spread([100 * one[key] for one in found], ".1f") for key in RECALLS)
            rows.append([each["step"], name, spread(losses, ".2f"), *recalls])
    return table(["steps", "variant", "loss", *RECALLS.values()], rows)


def costs(records: Records, skip: int = 0) -> str:
    """Markdown: seconds to the target, samples/s of all steps but the first `skip`, both also as a
    ratio to the first variant's, seed by seed; waiting, and memory of each rank."""
    first, base = next(iter(records.items()))
    rows = []
    for name, runs in records.items():
        seconds = [(run.seconds_to(TARGET), own.seconds_to(TARGET)) for run, own in zip(runs, base)]
        reached = [one for one, _ in seconds if one]
        rates = [run.samples_per_s(BATCH_SIZE, skip) for run in runs]
        ratios = [a / own.samples_per_s(BATCH_SIZE, skip) for a, own in zip(rates, base)]
        some = f", in {len(reached)} of {len(runs)} runs" if len(reached) < len(runs) else ""
        times = [a / b for a, b in seconds if a and b]
        row = [name, spread(reached, ".0f") + some if reached else "–"]
        row.append(spread(times, ".2f") if times else "–")
        row += [spread(rates, ".1f"), f"{statistics.median(ratios):.2f}"]
        row[-1] += f" ({min(ratios):.2f} – {max(ratios):.2f})"
        row.append(spread([statistics.mean(run.data_wait_s) for run in runs], ".2f"))
        peaks = zip(*([size / 2**20 for size in run.peak_bytes] for run in runs))
        rows.append([*row, *(spread(each, ",.0f") for each in peaks)])
    header = ["variant", f"seconds to R@10 {TARGET:.0%}", f"÷ {first}", "samples/s", f"÷ {first}"]
    header += ["waiting for data, s a step", *(f"peak MiB, rank {rank}" for rank in range(RANKS))]
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--variant",
        choices=ALL,
        action="append",
        help="(default: those with all activations kept; with --speed all)",
    )
    parser.add_argument("--towers", choices=TOWERS, default="unequal", help="(default: unequal)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N")
    parser.add_argument("--epochs", type=int, default=4, metavar="N", help="of 13 steps")
    parser.add_argument("--language", default="en", metavar="LANG", help="of --data demo:LANG")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="per rank (default: 0)")
    parser.add_argument("--speed", action="store_true", help="throughput alone, without evaluation")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of --speed")
    run = parser.parse_args()
    if run.epochs < 1 or run.rounds < 1:
        parser.error("--epochs and --rounds must be at least 1")
    needed = ("open_clip", "open_clip_train", "timm", "pandas", "webdataset")
    missing = ", ".join(name for name in needed if importlib.util.find_spec(name) is None)
    if missing:
        parser.error(f"not installed: {missing}; run: pip install -r requirements-test.txt")
    try:
        prepare_data(OUT / "data" / run.language, run.language)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    seeds = range(run.rounds) if run.speed else run.seeds
    records: dict[str, list[Record]] = {}
    for seed in seeds:
        for name in run.variant or (ALL if run.speed else VARIANTS):
            print(f"{name}, seed {seed}", file=sys.stderr)
            record = finished(run, name, seed, 1 if run.speed else run.epochs)
            records.setdefault(name, []).append(record)
    title = f"{len(seeds)} {'rounds' if run.speed else 'seeds'}, names in language {run.language}, "
    title += f"towers {run.towers}: mean (least – most)"
    skip = WARMUP_STEPS if run.speed else 0
    parts = [title] + ([] if run.speed else [by_step(records)]) + [costs(records, skip)]
    file = OUT / f"{run.language}-{run.towers}{'-speed' * run.speed}.md"
    file.write_text("\n\n".join(parts), encoding="utf-8")
    print("\n\n".join(parts))


if __name__ == "__main__":
    main()
