"""Programs that a measurement starts: train.py by its settings, its logs, and memory by rank."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
# The kernel's peak never falls: only what a process takes in its last second can be missed.
SAMPLED_EVERY_S = 1.0


def settings(*given: str | Mapping[str, Any]) -> dict[str, Any]:
    """Settings of train.py's `--set`: mappings, or words KEY=VALUE. Later ones win."""
    found: dict[str, Any] = {}
    for each in given:
        words = (word.partition("=")[::2] for word in each.split()) if isinstance(each, str) else ()
        found |= dict(words) if isinstance(each, str) else each
    return found


def flags(options: Mapping[str, Any]) -> list[str]:
    return [word for key, value in options.items() for word in (f"--{key}", str(value))]


def train_arguments(given: Mapping[str, Any]) -> list[str]:
    texts = {k: v if isinstance(v, str | Path) else json.dumps(v) for k, v in given.items()}
    return ["--set", *(f"{key}={text}" for key, text in texts.items())]


def train_command(ranks: int, given: Mapping[str, Any]) -> list[str]:
    """train.py under DeepSpeed's launcher."""
    from engine.processes.start import free_port

    deepspeed = str(Path(sys.executable).parent / "deepspeed")
    where = flags({"num_gpus": ranks, "master_port": free_port()})
    return [deepspeed, "--quiet", *where, "train.py", *train_arguments(given)]


def learned(given: Mapping[str, Any], seeds: int, *flags: str) -> dict[str, list[float]]:
    """Every number that evaluate.py, with `flags`, finds of the end of a run of two ranks, of each
    seed."""
    figures: dict[str, list[float]] = {}
    fixed = "trace_every=0 wandb=disabled eval_every=1000000"
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            log, run = Path(folder) / "log", Path(folder) / "run"
            own = settings(fixed, {"run_dir": str(run), "seed": seed}, given)
            call(train_command(2, own), log, f"seed {seed}", 2)
            words = ("evaluate.py", run, "--trust-run", "--json", run / "found.json", *flags)
            call([sys.executable, *map(str, words)], log, f"evaluating seed {seed}")
            found = json.loads((run / "found.json").read_text())
        print({name: value for name, value in found.items() if "R@1" in name}, flush=True)
        for name, value in found.items():
            if isinstance(value, float):
                figures.setdefault(name, []).append(value)
    return figures


def call(
    command: Sequence[str], log: Path, what: str, ranks: int = 0, threads: int = 1
) -> list[int]:
    """Run `command` to its end, without a GPU and with so many threads a rank; returns the largest
    resident size of each rank, in bytes.

    Both torchrun and DeepSpeed's launcher number ranks by the variable RANK, which their loader
    processes inherit; the largest process of a rank counts. Ends this program where `what` fails.
    """
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "DLTS_HOSTFILE": "/nonexistent",  # else DeepSpeed's launcher may look for other machines
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    peaks: dict[int, int] = {}
    with log.open("w", encoding="utf-8") as file:
        started = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            while started.poll() is None:
                for process in below(started.pid):
                    note_peak(process, peaks)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    started.wait(SAMPLED_EVERY_S)
        finally:
            kill_all(started)
    if started.returncode or not peaks.keys() >= set(range(ranks)):
        end = log.read_text(encoding="utf-8", errors="replace")[-1500:]
        sys.exit(f"{what} ended with status {started.returncode}; {log} ends with:\n{end}")
    return [peaks[rank] for rank in range(ranks)]


ALONE = """import importlib, json, sys
sys.path.insert(1, "tests/data")
module, name, given = json.loads(sys.argv[1])
print(json.dumps(getattr(importlib.import_module(module), name)(*given)))"""


def alone(function: Callable[..., Any], *given: Any) -> Any:
    """What a function of a module returns in a fresh process of one thread."""
    module = function.__module__
    if module == "__main__":
        module = f"bench.{Path(sys.argv[0]).stem}"
    words = json.dumps([module, function.__name__, given])
    run = subprocess.run(
        [sys.executable, "-c", ALONE, words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if run.returncode:
        sys.exit(f"{function.__name__} {given} ended with:\n{run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def below(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def note_peak(process: psutil.Process, peaks: dict[int, int]) -> None:
    with contextlib.suppress(psutil.Error, OSError, KeyError):  # it has ended, or is no rank
        rank = int(process.environ()["RANK"])
        peaks[rank] = max(peaks.get(rank, 0), resident_bytes(process.pid))


def resident_bytes(pid: int | str = "self", field: str = "VmHWM") -> int:
    """The most physical memory that a process has had; 0 for one that nobody has waited for."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = (line.split()[1] for line in text.splitlines() if line.startswith(f"{field}:"))
    return int(next(found, 0)) * 1024


def kill_all(launcher: subprocess.Popen) -> None:
    """The launcher, unless it has ended, and all below it. torchrun puts each rank in a session of
    its own, so a signal to a group would miss them."""
    if launcher.poll() is None:
        for process in [*below(launcher.pid), psutil.Process(launcher.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        launcher.wait()


def read_metrics(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Lines of a run's metrics.jsonl: of its steps, and of evaluations on held-out samples.

    Raises ValueError for a run that is not done: DeepSpeed's launcher ends with status 0 even where
    a signal ended it.
    """
    if not (folder / "done").is_file():
        raise ValueError(f"{folder}: the run ended before its last step; start the command again")
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    return [line for line in lines if "loss" in line], [
        line for line in lines if "held_out" in line
    ]


def table(header: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(map(str, cells))} |\n" for cells in lines)
