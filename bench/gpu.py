"""One GPU, a few minutes: this program and OpenCLIP's own trainer, in turn, with the same models.

    python bench/gpu.py                                     the most important first, for 520 s
    python bench/gpu.py --models ViT-L-14 --budget-s 300    one model
    python bench/gpu.py --only wye,open_clip                two ways to train
    python bench/gpu.py --device cpu --tiny                 a trial, whose numbers mean nothing

Samples/s, model FLOPs utilisation and memory at the largest batch that OpenCLIP holds; kernels by
class, waiting and idle time of three profiled steps; the planner's prediction against the measured
step. bench/README.md has the predictions, and how to read the tables.

Each measurement is a process of its own with a time limit: one that fails, or for which memory does
not suffice, loses its own line only. Where memory runs out, it is tried twice more with a smaller
batch. Results are written after each measurement, to results.json and report.md in a folder of
bench/out/gpu/ for each device; the same command later goes on with what is missing there, `--fresh`
measures again. What no longer fits into the budget is left out, which the table says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Python puts bench/ at the front of the path of a script that lies there. There `import open_clip`
# would find bench/open_clip.py instead of the library.
sys.path = [str(ROOT), *(folder for folder in sys.path if Path(folder).resolve() != ROOT / "bench")]

from bench.common import NO_GPU, Kept, Program, unlaunched, write
from bench.common import OUT as OUTPUT
from bench.on_gpu.jobs import MODELS, WAYS, Job, batches_for, turns
from bench.on_gpu.report import report

OUT = OUTPUT / "gpu"
SMALLER, TIMES_SMALLER = 0.92, 2
LIMIT = 4.0  # times what a way needs
SLOWER_CPU = 3.0  # imports and models take longer there, too
PACKAGES = ("torch", "deepspeed", "transformers", "open_clip_torch", "triton")


def measured(job: Job, deadline: float) -> dict[str, Any]:
    """The record of a job, with a smaller batch where the memory does not suffice. `deadline`: of
    time.monotonic."""
    record: dict[str, Any] = {}
    for _ in range(1 + TIMES_SMALLER):
        record = once(job, deadline)
        tried = record.get("trying") or job.batch or record.get("batch")
        if record["status"] != "out of memory" or not tried:
            break
        parts = max(1, (job.batch or 1) // (job.micro_batch or job.batch or 1))
        micro_batch = max(2, int(SMALLER * tried / parts))
        job = replace(job, batch=parts * micro_batch, micro_batch=micro_batch)
        print(f"  out of memory with {tried:,} samples; next: {job.batch:,}", flush=True)
    return record


def once(job: Job, deadline: float) -> dict[str, Any]:
    job.file.parent.mkdir(parents=True, exist_ok=True)
    job.file.unlink(missing_ok=True)
    left = deadline - time.monotonic()
    needs = job.of.needs_s * (SLOWER_CPU if job.device == "cpu" else 1)
    if left < needs:
        return {"status": "skipped", "reason": f"{left:.0f} s are left, it may need {needs:.0f}"}
    limit_s, log = min(LIMIT * needs, left), job.file.with_suffix(".log")
    command = [sys.executable, "-m", "bench.on_gpu.measure", job.to_json()]
    program = Program(command, log, environment(job.device))
    status = program.end(limit_s)
    record = merged(job.file)
    if status is None:
        return {"status": "timeout", **record, "reason": f"ended after {limit_s:.0f} s"}
    if "status" not in record:
        reason = f"exit status {status}; {log.name} ends with: {program.last_words()}"
        return {"status": "failed", **record, "reason": reason}
    if status and record["status"] == "ok":  # by a signal, after the measurement
        record["reason"] = f"ended with status {status} after the measurement"
    return record


def environment(device: str) -> dict[str, str]:
    # of one process: where a machine has no network, the loopback interface is there all the same
    own = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    return unlaunched() | own | (NO_GPU if device == "cpu" else {})


def merged(file: Path) -> dict[str, Any]:
    """The lines of a job as one record; of two values of a key the later one."""
    record: dict[str, Any] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        with contextlib.suppress(ValueError):  # the last one, where its writer was ended
            record |= json.loads(line)
    return record


def hardware(device: str) -> dict[str, Any]:
    """The device, its driver, and versions of packages. Ends this program where there is no GPU."""
    known: dict[str, Any] = {"device": "CPU"}
    if device == "cuda":
        # in a process of its own, which gives the memory of its context back
        known["device"] = output(sys.executable, "-c", NAME)
        if not known["device"]:
            sys.exit("bench/gpu.py: torch finds no GPU; to try the program: --device cpu --tiny")
        query = "--query-gpu=driver_version,clocks.max.sm,power.limit"
        known["driver, clock, power"] = output("nvidia-smi", query, "--format=csv,noheader")
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            known[package] = version(package)
    return {**known, "python": sys.version.split()[0], "cores": len(os.sched_getaffinity(0))}


NAME = "import torch; print(torch.cuda.get_device_name())"


def output(*command: str) -> str:
    """The first line that a program writes; empty where it fails."""
    with contextlib.suppress(OSError):
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return run.stdout.partition("\n")[0]
    return ""


def some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """For argparse: names of `known`, separated by commas."""

    def read(text: str) -> list[str]:
        for name in text.split(","):
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r}: give some of {', '.join(known)}")
        return text.split(",")

    return read


def above_zero(text: str) -> float:
    if float(text) <= 0:
        raise argparse.ArgumentTypeError(f"{text}: give a number above 0")
    return float(text)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )

    def add(flag: str, default: Any, kind: Callable[[str], Any], words: str, metavar: str) -> None:
        parser.add_argument(flag, default=default, type=kind, metavar=metavar, help=words)

    add("--only", ",".join(WAYS), some_of([*WAYS]), "ways to train", "WAY,...")
    add("--models", ",".join(MODELS), some_of([*MODELS]), "of them", "MODEL,...")
    add("--seconds-per-measurement", 2.5, above_zero, "that steps are timed", "S")
    add("--budget-s", 520.0, above_zero, "for everything", "S")
    add("--out", OUT, Path, "where a folder for the device is made", "DIR")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="to train on")
    parser.add_argument("--tiny", action="store_true", help="models of one layer, for a CPU")
    parser.add_argument("--fresh", action="store_true", help="measure again what is there")
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu is for trying the program: add --tiny")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 where anything was measured."""
    options = parse(arguments)
    deadline = time.monotonic() + options.budget_s
    about = {"tiny": options.tiny, **hardware(options.device)}
    name = about["device"].replace(" ", "-") + ("-tiny" if options.tiny else "")
    folder = options.out.resolve() / name
    folder.mkdir(parents=True, exist_ok=True)
    kept = Kept(folder / "results.json")
    records = kept.records.get("records", {})
    kept.records = {"about": about, "records": records}
    for model, way in turns(options.models, options.only):
        key = f"{model}/{way}"
        if records.get(key, {}).get("status") == "ok" and not options.fresh:
            continue
        batch, micro_batch = batches_for(way, model, records, options.tiny)
        job = Job(
            model=model,
            way=way,
            batch=batch,
            micro_batch=micro_batch,
            device=options.device,
            tiny=options.tiny,
            seconds=options.seconds_per_measurement,
            folder=str(folder),
        )
        records[key] = record = measured(job, deadline)
        kept.write()
        write(folder / "report.md", report(records, about))
        rate = f"{record['samples_per_s']:,.1f} samples/s" if "samples_per_s" in record else ""
        words = " ".join(filter(None, (rate or record["status"], record.get("reason"))))
        left = deadline - time.monotonic()
        print(f"{model}, {WAYS[way].title}: {words}   [{left:.0f} s left]", flush=True)
    print(f"\n{report(records, about)}\n{folder / 'report.md'}, results.json")
    return 0 if any(record.get("status") == "ok" for record in records.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
