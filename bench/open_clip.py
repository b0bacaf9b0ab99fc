"""OpenCLIP's own trainer and this program, side by side: what is learned by step and by second,
samples/s, and memory.

    python bench/open_clip.py                         3 seeds of each variant, 4 epochs; tables and curves to bench/out/open_clip/
    python bench/open_clip.py --speed                 throughput alone, in rounds
    python bench/open_clip.py --speed --towers near   with towers that cost about the same
    python bench/open_clip.py --language zh           the same images with their Chinese names
    pip install -r requirements-test.txt              what it needs beside the project's requirements

Both programs read the same csv files with the same tokenizer, on two ranks without a GPU: about 28
million parameters (a ResNet-50 at 64 pixels, a BERT of 4 layers and width 256; `--towers near`: a
ResNet-18 and a BERT of 4 layers and width 384), fp32, global batch 256. `RECIPE`
has the optimizer and the schedule, which are equal in all variants but the one that is called so.
Everything else is each program's own default: `VARIANTS` lists what is compared, and a further
variant is one more line there. What the defaults differ in (augmentation, initial weights, the
pooling of texts, clipping, micro-batches) is thus part of what is measured.

OpenCLIP runs as `open_clip_train.main.main` under torchrun, with DistributedDataParallel over gloo,
`--local-loss` and `--gather-with-grad` (bench/open_clip_rank.py). Both programs drop the samples
that do not fill a batch and evaluate after each epoch. Seconds are those of steps, their waiting
for data included; the start, evaluations and checkpoints are in none of them, on either side.
OpenCLIP logs the loss of its first rank, 128 of the 256 rows, where this program logs the loss of
all. A rank's memory is the largest resident size of its process (VmHWM) from start to end.

Runs come in turn, seed by seed and variant by variant, so that what else the machine does hits all
alike. A finished run is kept in bench/out/open_clip/runs/ and is not run again: after an
interruption the same command goes on. A run that was broken off starts anew. After a change of the
program, delete that folder.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
# Python puts bench/ at the front of the path of a script that lies there. There `import open_clip`
# would find this file, not the library.
sys.path = [str(ROOT), *(folder for folder in sys.path if Path(folder).resolve() != ROOT / "bench")]
OUT = ROOT / "bench" / "out" / "open_clip"

import psutil

from bench.common import laid_over
from bench.open_clip_data import (
    EMBED_DIM,
    IMAGE_SIZE,
    MAX_TEXT_TOKENS,
    TOWERS,
    Files,
    Towers,
    prepare_data,
    text_weights,
    tower_description,
)
from bench.open_clip_report import (
    Record,
    by_second,
    by_step,
    draw,
    load_record,
    read_open_clip,
    read_own,
    save_record,
    speed,
)

RANKS = 2
RUN_LIMIT_S = 4 * 3600
SAMPLED_EVERY_S = (
    1.0  # VmHWM never falls, so only what a process takes in its last second can be missed
)
WARMUP_STEPS = 3  # of a measurement of speed: memory is allocated for the first time in them
NEVER = "1000000000"


@dataclass(frozen=True)
class Recipe:
    """What is equal in both programs. The rate rises in equal steps from lr / `warmup_steps` in the
    first step, and then stays at `lr`."""

    batch_size: int = 256
    lr: float = 5e-4
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-6
    weight_decay: float = 0.2  # both programs leave out parameters of one dimension
    warmup_steps: int = 20


RECIPE = Recipe()


@dataclass(frozen=True)
class Variant:
    """One way to train, by OpenCLIP's trainer or by this program ("wye").

    `options` are further flags of the program, which win over those of `RECIPE`. `config` is laid
    over the JSON file that it is given: for OpenCLIP the description of its towers, for this
    program the DeepSpeed file. With `shipped`, this program leaves the optimizer and the schedule
    to ds_configs/cpu_fp32.json instead of `RECIPE`: what a user gets who gives no numbers.
    """

    name: str
    program: Literal["open_clip", "wye"]
    config: Mapping[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    shipped: bool = False


MERGED = {"branches": {"layout": "merged", "stages": {"merged": 1}, "replicas": 2}}
VARIANTS = (
    Variant("OpenCLIP", "open_clip"),
    Variant("ours", "wye", {"branches": {"layout": "fork"}}),
    Variant("ours, merged × 2", "wye", MERGED),
    Variant("ours, merged × 2, shipped recipe", "wye", MERGED, shipped=True),
)
REPLAY = {"branches": {"schedule": "replay", "micro_batch_size": 32}}
# Both programs run the encoders twice here, to hold the activations of 32 samples at a time.
SAVING_MEMORY = (
    Variant(
        "OpenCLIP, --accum-freq 4", "open_clip", options=("--batch-size", "32", "--accum-freq", "4")
    ),
    Variant("ours, replay", "wye", laid_over({"branches": {"layout": "fork"}}, REPLAY)),
    Variant("ours, merged × 2, replay", "wye", laid_over(MERGED, REPLAY)),
)
ALL = (*VARIANTS, *SAVING_MEMORY)


@dataclass(frozen=True)
class Run:
    """One run of a variant. `evaluated`: on the held-out samples after each epoch; a measurement of
    speed is not."""

    variant: Variant
    seed: int
    epochs: int
    language: str
    workers: int
    evaluated: bool = True
    towers: Towers = TOWERS["unequal"]

    @property
    def folder(self) -> Path:
        """The name ends with a hash of what is trained and how, so that a changed recipe or variant
        does not find earlier runs."""
        identity = {
            **asdict(self),
            "recipe": asdict(RECIPE),
            "open_clip": version("open_clip_torch"),
        }
        del identity["variant"]["name"]
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
        words = "".join(
            c if c.isascii() and c.isalnum() else "-" for c in self.variant.name.lower()
        )
        return (
            OUT
            / "runs"
            / f"{words}-{self.language}-{'seed' if self.evaluated else 'speed'}-{self.seed}-{digest}"
        )

    def file(self, ending: str) -> Path:
        """A file beside the folder, which must not exist when the program starts."""
        return self.folder.with_name(f"{self.folder.name}.{ending}")

    @property
    def record(self) -> Path:
        """Of the finished run."""
        return self.file("record.json")


# -- how each program is called


def open_clip_command(run: Run, files: Files, port: int) -> list[str]:
    """OpenCLIP's trainer under torchrun, the module found from ROOT. Writes the JSON files that it
    and the trainer read."""
    towers, arguments = run.file("towers.json"), run.file("arguments.json")
    weights = text_weights(files, run.towers, run.seed)
    description = tower_description(run.towers, weights, files.tokenizer)
    towers.write_text(
        json.dumps(laid_over(description, run.variant.config), indent=2), encoding="utf-8"
    )
    options = {
        "train-data": files.train,
        **({"val-data": files.held_out} if run.evaluated else {}),
        "dataset-type": "csv",
        "model": towers.stem,
        "batch-size": RECIPE.batch_size // RANKS,
        "epochs": run.epochs,
        "lr": RECIPE.lr,
        "beta1": RECIPE.betas[0],
        "beta2": RECIPE.betas[1],
        "eps": RECIPE.eps,
        "wd": RECIPE.weight_decay,
        "warmup": RECIPE.warmup_steps,
        "lr-scheduler": "const",
        "precision": "fp32",
        "device": "cpu",
        "workers": run.workers,
        "seed": run.seed,
        "logs": run.folder.parent,
        "name": run.folder.name,
        "log-every-n-steps": 1,
        "save-frequency": 0,
    }
    flags = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    flags += ["--local-loss", "--gather-with-grad", *run.variant.options]
    arguments.write_text(
        json.dumps({"towers": str(towers), "options": flags}, indent=2), encoding="utf-8"
    )
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(RANKS),
        "--master-port",
        str(port),
    ]
    return [*launcher, "-m", "bench.open_clip_rank", str(arguments)]


def own_command(run: Run, files: Files, port: int) -> list[str]:
    """train.py under DeepSpeed's launcher, the script found from ROOT. Writes the JSON file with
    the recipe."""
    config = run.file("deepspeed.json")
    config.write_text(json.dumps(own_configuration(run.variant), indent=2), encoding="utf-8")
    options = {
        "deepspeed_config": config,
        "run-dir": run.folder,
        "data": table_spec(files.train),
        **({"val-data": table_spec(files.held_out)} if run.evaluated else {"val-fraction": 0}),
        "tokenizer": files.tokenizer,
        "image-tower": run.towers.image,
        "text-tower": run.towers.text,
        "embed-dim": EMBED_DIM,
        "image-size": IMAGE_SIZE,
        "max-text-tokens": MAX_TEXT_TOKENS,
        "epochs": run.epochs,
        "seed": run.seed,
        "workers": run.workers,
        "save-every": NEVER,
        "trace-every": 0,
    }
    launcher = [
        str(Path(sys.executable).parent / "deepspeed"),
        "--quiet",
        "--num_gpus",
        str(RANKS),
        "--master_port",
        str(port),
        "train.py",
    ]
    return [
        *launcher,
        *(word for key, value in options.items() for word in (f"--{key}", str(value))),
        *run.variant.options,
    ]


def own_configuration(variant: Variant) -> dict[str, Any]:
    """The JSON file of a variant of this program: the recipe, the layout, and defaults."""
    if variant.shipped:
        shipped = json.loads((ROOT / "ds_configs" / "cpu_fp32.json").read_text(encoding="utf-8"))
        return laid_over({**shipped, "train_batch_size": RECIPE.batch_size}, variant.config)
    optimizer = {
        "lr": RECIPE.lr,
        "betas": list(RECIPE.betas),
        "eps": RECIPE.eps,
        "weight_decay": RECIPE.weight_decay,
        "torch_adam": True,
    }
    schedule = {
        "warmup_num_steps": RECIPE.warmup_steps,
        "warmup_max_lr": RECIPE.lr,
        "warmup_type": "linear",
    }
    recipe = {
        "train_batch_size": RECIPE.batch_size,
        "optimizer": {"type": "AdamW", "params": optimizer},
        "scheduler": {"type": "WarmupLR", "params": schedule},
        "branches": {"gradient_clipping": "auto", "optimizer_groups": "auto"},
    }
    return laid_over(recipe, variant.config)


def table_spec(file: Path) -> str:
    """A csv file whose separator is a tab, as train.py's --data wants it."""
    return f"csv:{file}?separator=%09"


# -- running


def finished(run: Run, files: Files) -> Record:
    """The record of the run, which is run first where that was not done before."""
    if not run.record.is_file():
        shutil.rmtree(run.folder, ignore_errors=True)  # of a run that was broken off
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        from engine.processes.start import free_port

        of_open_clip = run.variant.program == "open_clip"
        command = (open_clip_command if of_open_clip else own_command)(run, files, free_port())
        peaks = launch(command, run.file("log"), f"{run.variant.name}, seed {run.seed}")
        read = (
            read_open_clip(run.folder, RECIPE.batch_size, peaks)
            if of_open_clip
            else read_own(run.folder, peaks)
        )
        shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)  # 0.3 GB
        save_record(run.record, read)
    return load_record(run.record)


def launch(command: Sequence[str], log: Path, what: str) -> list[int]:
    """Run the command to its end; returns the largest resident size of each rank, in bytes. Ends
    this program when the command fails."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // RANKS)),
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "DLTS_HOSTFILE": "/nonexistent",  # else DeepSpeed's launcher may look for other machines
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            with RankMemory(process.pid) as memory:
                status = process.wait(RUN_LIMIT_S)
        finally:
            if (
                process.poll() is None
            ):  # interrupted, or over the time limit: the ranks would go on without their launcher
                kill_all(process)
    if status or set(memory.peaks) != set(range(RANKS)):
        sys.exit(
            f"bench/open_clip.py: {what} ended with status {status}; {log} ends "
            f"with:\n{log.read_text(encoding='utf-8')[-1500:]}"
        )
    return [memory.peaks[rank] for rank in range(RANKS)]


def kill_all(launcher: subprocess.Popen) -> None:
    """The launcher and all processes below it. torchrun puts each rank in a session of its own, so
    a signal to a group would miss them."""
    processes = [*psutil.Process(launcher.pid).children(recursive=True), launcher]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    launcher.wait()


class RankMemory:
    """In a `with` block: the largest resident size of each rank below the launcher `pid`, in bytes,
    in `peaks`.

    Both launchers give a rank its number in the environment variable RANK, which the loader
    processes of the rank inherit; the largest process of a rank counts.
    """

    def __init__(self, pid: int) -> None:
        self.peaks: dict[int, int] = {}
        self._launcher = psutil.Process(pid)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> RankMemory:
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._ended.wait(SAMPLED_EVERY_S):
            try:
                processes = self._launcher.children(recursive=True)
            except psutil.NoSuchProcess:
                return
            for process in processes:
                self._sample(process)

    def _sample(self, process: psutil.Process) -> None:
        try:
            rank, peak = process.environ().get("RANK"), peak_resident_bytes(process.pid)
        except (psutil.Error, OSError):  # it has ended meanwhile
            return
        if rank is not None:
            self.peaks[int(rank)] = max(peak, self.peaks.get(int(rank), 0))


def peak_resident_bytes(pid: int) -> int:
    """The most physical memory the process has had so far; 0 for one that has ended and was not
    waited for."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


# -- the command line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--variant",
        choices=[variant.name for variant in ALL],
        action="append",
        help="which (default: those with all activations kept; with --speed all); may be repeated",
    )
    parser.add_argument(
        "--towers",
        choices=TOWERS,
        default="unequal",
        help="unequal: a ResNet-50 beside a small BERT; near: about equal costs (default: unequal)",
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="(default: 0 1 2)"
    )
    parser.add_argument(
        "--epochs", type=int, default=4, metavar="N", help="of 13 steps (default: 4)"
    )
    parser.add_argument(
        "--language",
        default="en",
        metavar="LANG",
        help="of the emoji's names, as in --data demo:LANG (default: en)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=0,
        metavar="N",
        help="loader processes per rank, of both programs (default: 0)",
    )
    parser.add_argument("--speed", action="store_true", help="throughput alone, without evaluation")
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="of --speed, an epoch each (default: 5)"
    )
    arguments = parser.parse_args()
    if arguments.epochs < 1 or arguments.rounds < 1:
        parser.error("--epochs and --rounds must be at least 1")
    missing = [
        name
        for name in ("open_clip", "open_clip_train", "timm", "pandas", "webdataset")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        parser.error(
            f"not installed: {', '.join(missing)}; run: pip install -r requirements-test.txt"
        )
    try:
        files = prepare_data(OUT / "data" / arguments.language, arguments.language)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))

    usual = ALL if arguments.speed else VARIANTS
    variants = [v for v in ALL if v.name in (arguments.variant or [each.name for each in usual])]
    compare = measure_speed if arguments.speed else measure_learning
    print(compare(variants, files, arguments))


def measure_learning(
    variants: Sequence[Variant], files: Files, arguments: argparse.Namespace
) -> str:
    records = run_in_turn(
        variants, arguments.seeds, arguments.epochs, files, arguments, evaluated=True
    )
    seeds = ", ".join(map(str, arguments.seeds))
    title = f"Names in language {arguments.language}, seeds {seeds}: mean (least – most)"
    text = f"{title}\n\n{by_step(records)}\n{by_second(records, RECIPE.batch_size)}"
    (OUT / f"{_subject(arguments)}.md").write_text(text, encoding="utf-8")
    draw(records, title.split(":")[0], OUT / f"{_subject(arguments)}.png")
    return text


def measure_speed(variants: Sequence[Variant], files: Files, arguments: argparse.Namespace) -> str:
    records = run_in_turn(variants, range(arguments.rounds), 1, files, arguments, evaluated=False)
    steps = len(next(iter(records.values()))[0].step_s)
    title = f"{arguments.rounds} rounds of {steps} steps in turn, the first {WARMUP_STEPS} of each left out: samples/s as mean (least – most), "
    title += "ratios within a round as median (least – most)"
    text = f"{title}\n\n{speed(records, RECIPE.batch_size, WARMUP_STEPS)}"
    (OUT / f"{_subject(arguments)}-speed.md").write_text(text, encoding="utf-8")
    return text


def _subject(arguments: argparse.Namespace) -> str:
    """How the files of a comparison are called."""
    towers = "" if arguments.towers == "unequal" else f"-{arguments.towers}"
    return f"{arguments.language}{towers}"


def run_in_turn(
    variants: Sequence[Variant],
    seeds: Sequence[int],
    epochs: int,
    files: Files,
    arguments: argparse.Namespace,
    evaluated: bool,
) -> dict[str, list[Record]]:
    """The records of each variant, in the order of the seeds."""
    from tqdm import tqdm

    records: dict[str, list[Record]] = {variant.name: [] for variant in variants}
    for seed, variant in tqdm(
        [(seed, variant) for seed in seeds for variant in variants], unit="run"
    ):
        run = Run(
            variant=variant,
            seed=seed,
            epochs=epochs,
            language=arguments.language,
            workers=arguments.workers,
            evaluated=evaluated,
            towers=TOWERS[arguments.towers],
        )
        records[variant.name].append(finished(run, files))
    return records


if __name__ == "__main__":
    main()
