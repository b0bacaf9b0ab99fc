"""One GPU, a few minutes: this program and OpenCLIP's own trainer, in turn, with the same models.

    python bench/gpu.py                                     the most important first, until 520 seconds are over
    python bench/gpu.py --models ViT-L-14 --budget-s 300    one model
    python bench/gpu.py --only wye,open_clip                two ways to train
    python bench/gpu.py --device cpu --tiny                 tries the program; its numbers mean nothing

Samples/s, model FLOPs utilisation and memory at the largest batch that OpenCLIP holds; kernels by
class, waiting and idle time of three profiled steps; the planner's prediction against the measured
step. bench/README.md has the predictions, and how to read the tables.

Each measurement is a process of its own with a time limit: one that fails, or for which memory does
not suffice, loses its own line only. Where memory runs out, it is tried twice more with a smaller
batch. Results are written after each measurement, to bench/out/gpu/results.json and report.md; the
same command later goes on with what is missing there, `--fresh` measures again. What no longer fits
into the budget is left out, which the table says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Python puts bench/ at the front of the path of a script that lies there. There `import open_clip`
# would find bench/open_clip.py instead of the library.
sys.path = [str(ROOT), *(folder for folder in sys.path if Path(folder).resolve() != ROOT / "bench")]

from bench.on_gpu.jobs import MODELS, WAYS, Job, batches_for, turns
from bench.on_gpu.report import report

OUT = ROOT / "bench" / "out" / "gpu"
BUDGET_S, SECONDS = 520.0, 2.5
SMALLER, TIMES_SMALLER = 0.92, 2
LIMIT_WITHOUT_GPU = 3.0  # times as long
PACKAGES = ("torch", "deepspeed", "transformers", "open_clip_torch", "triton")


@dataclass
class Bench:
    """The command line, and what was found so far: `records` by MODEL/WAY."""

    folder: Path
    device: str
    tiny: bool
    seconds: float
    deadline: float  # of time.monotonic
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    waiting: Worker | None = None  # started ahead

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def job(self, model: str, way: str) -> Job:
        batch, micro_batch = batches_for(way, model, self.records, self.tiny)
        return Job(
            model=model,
            way=way,
            batch=batch,
            micro_batch=micro_batch,
            device=self.device,
            tiny=self.tiny,
            seconds=self.seconds,
            folder=str(self.folder),
        )

    def save(self) -> None:
        results = {"about": self.about, "records": self.records}
        for name, text in (
            ("results.json", json.dumps(results, indent=1)),
            ("report.md", report(self.records, self.about)),
        ):
            partial = self.folder / f"{name}.partial"
            partial.write_text(text, encoding="utf-8")
            partial.replace(self.folder / name)

    def load(self) -> None:
        """What an earlier command has found."""
        file = self.folder / "results.json"
        if file.is_file():
            found = json.loads(file.read_text(encoding="utf-8"))
            if bool(found["about"].get("tiny")) != self.tiny:
                sys.exit(
                    f"bench/gpu.py: {file} is of {'tiny' if not self.tiny else 'whole'} models; "
                    "give another --out"
                )
            self.about, self.records = found["about"], found["records"]

    def has(self, model: str, way: str) -> bool:
        return self.records.get(f"{model}/{way}", {}).get("status") == "ok"

    # -- one after the other

    def measure_all(self, turns_: Sequence[tuple[str, str]]) -> None:
        left = deque(turns_)
        while left:
            model, way = left.popleft()
            if self.left_s < WAYS[way].needs_s * self._slower:
                needs = WAYS[way].needs_s * self._slower
                reason = (
                    f"{max(0, self.left_s):.0f} s of the budget are left, it may need {needs:.0f}"
                )
                self._note(model, way, {"status": "skipped", "reason": reason})
                continue
            following = WAYS[left[0][1]].program if left else None
            self._note(model, way, self._measured(self.job(model, way), following))
        if self.waiting:
            self.waiting.end()

    @property
    def _slower(self) -> float:
        """Of limits, where there is no GPU: imports and models take longer there, too."""
        return 1.0 if self.device == "cuda" else LIMIT_WITHOUT_GPU

    def _measured(self, job: Job, following: str | None) -> dict[str, Any]:
        """The record of a job, with a smaller batch where the memory does not suffice."""
        for smaller in range(TIMES_SMALLER + 1):
            record = self._once(job, following)
            if record.get("status") != "out of memory" or smaller == TIMES_SMALLER:
                return record
            tried = record.get("trying") or job.batch or record.get("batch")
            if not tried or self.left_s < job.of.needs_s:
                return record
            parts = max(1, (job.batch or 1) // (job.micro_batch or job.batch or 1))
            micro_batch = max(2, int(SMALLER * tried / parts))
            job = replace(job, batch=parts * micro_batch, micro_batch=micro_batch)
            print(f"  out of memory with {tried:,} samples: again with {job.batch:,}", flush=True)
        return record

    def _once(self, job: Job, following: str | None) -> dict[str, Any]:
        job.file.unlink(missing_ok=True)
        limit_s = min(job.of.limit_s * self._slower, max(1.0, self.left_s))
        worker, self.waiting = self.waiting, None
        if worker is not None and worker.program != job.of.program:
            worker.end()
            worker = None
        worker = worker or Worker(job.of.program, self.folder, self.device)
        worker.begin(job)
        if following and self.device == "cuda":  # it imports meanwhile; a CPU would be shared
            self.waiting = Worker(following, self.folder, self.device)
        status = worker.wait(limit_s)
        record = merged(job.file)
        if status is None:
            record["reason"] = f"ended after {limit_s:.0f} s"
            record.setdefault("status", "timeout")
        elif status and "status" not in record:
            record |= {"status": "failed", "reason": f"status {status}; {worker.last_line()}"}
        elif status and record["status"] == "ok":  # by a signal, behind the measurement
            record["reason"] = f"ended with status {status} behind the measurement"
        elif "status" not in record:
            record |= {"status": "failed", "reason": worker.last_line()}
        return record

    def _note(self, model: str, way: str, record: dict[str, Any]) -> None:
        key = f"{model}/{way}"
        here = record.pop("environment", {})
        earlier = self.about.get("device")
        if earlier and here and here["device"] != earlier:  # ratios across devices say nothing
            aside = self.folder / f"results-{earlier.replace(' ', '-')}.json"
            (self.folder / "results.json").replace(aside)
            print(f"what was measured on {earlier} is in {aside}, and left out here", flush=True)
            self.records.clear()
        self.about |= here
        self.records[key] = record
        self.save()
        rate = record.get("samples_per_s")
        said = f"{rate:,.1f} samples/s, batch {record['batch']:,}" if rate else record["status"]
        reason = f": {record['reason']}" if record.get("reason") else ""
        print(
            f"{model}, {WAYS[way].title}: {said}{reason}   [{self.left_s:.0f} s left]", flush=True
        )


class Worker:
    """A process that imports what a program needs, and then waits for its job."""

    def __init__(self, program: str, folder: Path, device: str) -> None:
        self.program = program
        self.log = folder / f"{program}-{time.monotonic_ns()}.log"
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "WANDB_MODE": "disabled",
            # of one process: where a machine has no network, this is there all the same
            "NCCL_SOCKET_IFNAME": "lo",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # of a launcher that started this
            environment.pop(name, None)
        if device == "cpu":
            environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        with self.log.open("w", encoding="utf-8") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.on_gpu.measure", program],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                text=True,
                start_new_session=True,
            )

    def begin(self, job: Job) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it has ended already: its status says so
                self._process.stdin.write(job.to_json() + "\n")
                self._process.stdin.close()

    def wait(self, limit_s: float) -> int | None:
        """The exit status; None: it was ended after `limit_s`."""
        try:
            status = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        self.end()
        return status

    def end(self) -> None:
        """It, and what it started: loaders, compilers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def last_line(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"{self.log.name} ends with: {lines[-1][:300]}" if lines else "it said nothing"


def merged(file: Path) -> dict[str, Any]:
    """The lines of a job as one record; of two that say the same the later."""
    record: dict[str, Any] = {}
    if file.is_file():
        for line in file.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # the last one, where its writer was ended
                record |= json.loads(line)
    return record


def hardware() -> dict[str, Any]:
    """The driver, and versions of packages. The device is told by who opens it."""
    known: dict[str, Any] = {}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit"]
        said = subprocess.run(
            [*query, "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        ).stdout.strip()
        if said:
            known["driver, clock, power"] = said.splitlines()[0]
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            known[package] = version(package)
    return {**known, "python": sys.version.split()[0], "cores": len(os.sched_getaffinity(0))}


def some_of(known: Sequence[str]) -> Any:
    """For argparse: names of `known`, separated by commas."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"{unknown[0]!r} is not known; known: {', '.join(known)}"
            )
        return names

    return read


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only",
        type=some_of(list(WAYS)),
        default=list(WAYS),
        metavar="WAY,...",
        help=f"some of {', '.join(WAYS)} (default: all)",
    )
    parser.add_argument(
        "--models",
        type=some_of(list(MODELS)),
        default=list(MODELS),
        metavar="MODEL,...",
        help=f"some of them (default: {','.join(MODELS)})",
    )
    parser.add_argument(
        "--seconds-per-measurement",
        type=float,
        default=SECONDS,
        metavar="S",
        help=f"that steps are timed, without start, warm-up and profile (default: {SECONDS})",
    )
    parser.add_argument(
        "--budget-s",
        type=float,
        default=BUDGET_S,
        metavar="S",
        help=f"for everything (default: {BUDGET_S:.0f})",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(default: cuda)")
    parser.add_argument(
        "--tiny", action="store_true", help="models of one layer: tries the program, on a CPU"
    )
    parser.add_argument(
        "--out", type=Path, default=OUT, metavar="DIR", help="(default: bench/out/gpu)"
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="measure again what an earlier command has measured",
    )
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu is for trying the program: add --tiny")
    if options.budget_s <= 0 or options.seconds_per_measurement <= 0:
        parser.error("--budget-s and --seconds-per-measurement must be above 0")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 where anything was measured."""
    options = parse(arguments)
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(
        folder,
        options.device,
        options.tiny,
        options.seconds_per_measurement,
        time.monotonic() + options.budget_s,
    )
    bench.load()
    asked = list(turns(options.models, options.only))
    if options.fresh:
        for model, way in asked:
            bench.records.pop(f"{model}/{way}", None)
    bench.about |= {"tiny": options.tiny, **hardware()}
    bench.measure_all([turn for turn in asked if not bench.has(*turn)])
    print(f"\n{report(bench.records, bench.about)}\n{folder / 'report.md'}, results.json")
    return 0 if any(record.get("status") == "ok" for record in bench.records.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
