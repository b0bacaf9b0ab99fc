"""train.py and its companions in real processes, and what tests ask of a run.

`launch` starts train.py as a user does: DeepSpeed's launcher imports DeepSpeed twice before the
ranks import it once more, which takes 15 s and more on two cores. Where the start is not the
question, `start` runs the same scripts in processes that are forked from the server of `ranks.py`,
which has imported all of it once.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked_script import ROOT, lead
from ranks import PRELOAD

from data.index.sources import open_source
from engine.processes.start import free_port


def words(command: str) -> list[str]:
    """The words of a command line that has no quotes."""
    return command.split()


SMALL = words("--image-tower resnet18:layers=1-1-1-1 --image-size 32")
SMALL += words("--text-tower bert-tiny --embed-dim 32")
BATCH = 24
# ends what hangs, and nothing else: eight ranks that start beside other tests take three minutes
LIMIT_S = 1200
# what runs say, until the tests are over
OUTPUTS = tempfile.TemporaryDirectory(prefix="wye-tests-")

_context = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Run:
    """A process that leads a session, and the ranks below it."""

    pid: int
    poll: Callable[[], int | None]  # its exit status; None while it runs
    is_rank: Callable[[psutil.Process], bool]  # of the processes below it
    port: str
    output: Path  # what all of them say

    def said(self) -> str:
        return self.output.read_text(errors="replace")


def launch(world_size: int, *arguments: Any) -> Run:
    """train.py under DeepSpeed's launcher."""
    return command(lambda port: [*launcher(world_size, port), *arguments])


def launcher(world_size: int, port: str, script: str = "train.py") -> list[str]:
    return [
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        "--num_gpus",
        str(world_size),
        "--master_port",
        port,
        script,
    ]


def command(words: Callable[[str], list[Any]]) -> Run:
    """The words for a port, as a shell would start them."""
    env, output = environment(), _new_output()
    with output.open("w") as file:
        process = subprocess.Popen(
            list(map(str, words(env["MASTER_PORT"]))),
            cwd=ROOT,
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return _noted(
        Run(
            process.pid,
            process.poll,
            lambda p: "--local_rank" in " ".join(p.cmdline()),
            env["MASTER_PORT"],
            output,
        )
    )


def start(
    script: str,
    *arguments: Any,
    ranks: int | None = None,
    last: Sequence[Any] = (),
    folder: Path = ROOT,
    caches: Path | None = None,
) -> Run:
    """A script on `ranks` ranks without a launcher; or alone, as `python SCRIPT` is, without the
    variables that make it a rank. `last`: further arguments of the last rank; `folder`: where they
    are started; `caches`: in which each rank has a cache of its own, as hosts have."""
    env, output = environment(), _new_output()
    environments = (
        [env] if ranks is None else [env | _rank_variables(rank, ranks) for rank in range(ranks)]
    )
    for rank, variables in enumerate(environments if caches else ()):
        variables["WYE_CACHE"] = f"{caches}/{rank}"
    _context.set_forkserver_preload(PRELOAD)
    words = [str(ROOT / script), *map(str, arguments)]
    commands = [words] * (len(environments) - 1) + [[*words, *map(str, last)]]
    process = _context.Process(target=lead, args=(commands, environments, output, folder))
    process.start()
    return _noted(
        Run(
            process.pid,
            lambda: process.exitcode,
            lambda p: p.ppid() == process.pid,
            env["MASTER_PORT"],
            output,
        )
    )


def environment() -> dict[str, str]:
    # the launcher's default port may be in use by another run on this machine
    return {
        **os.environ,
        "DLTS_HOSTFILE": "/nonexistent",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }


def _rank_variables(rank: int, ranks: int) -> dict[str, str]:
    """As DeepSpeed's launcher sets them."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
    }


def _new_output() -> Path:
    number, name = tempfile.mkstemp(dir=OUTPUTS.name)
    os.close(number)
    return Path(name)


def _noted(run: Run) -> Run:
    atexit.register(end, run)  # a test that failed leaves it
    return run


def end(run: Run) -> None:
    if run.poll() is None:
        os.killpg(run.pid, signal.SIGKILL)


def finish(run: Run) -> tuple[int, str]:
    """(exit status, output); fails when it hangs or leaves a process behind."""
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended meanwhile
        if run.poll() is None:
            family = psutil.Process(run.pid).children(recursive=True)
    deadline = time.monotonic() + LIMIT_S
    while run.poll() is None:
        if time.monotonic() > deadline:
            end(run)
            pytest.fail(f"not done after {LIMIT_S} s:\n{run.said()[-3000:]}")
        time.sleep(0.02)
    _, left = psutil.wait_procs([p for p in family if p.is_running()], timeout=120)
    for p in left:
        p.kill()
    assert not left, f"processes left behind: {left}"
    assert not list(Path("/dev/shm").glob(f"*_{run.port}_*")), "shared memory left behind"
    return run.poll(), run.said()


def wait_for(condition: Callable[[], bool], run: Run) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if run.poll() is not None or time.monotonic() > deadline:
            end(run)
            pytest.fail(f"ended or waited too long:\n{run.said()[-3000:]}")
        time.sleep(0.1)


def ranks_of(run: Run) -> list[psutil.Process]:
    """In their order."""
    ranks = [p for p in psutil.Process(run.pid).children(recursive=True) if run.is_rank(p)]
    return sorted(ranks, key=lambda p: (p.create_time(), p.pid))


def run_to_end(script: str, *arguments: Any, **how: Any) -> tuple[int, str]:
    return finish(start(script, *arguments, **how))


def metrics(run_dir: Path, key: str = "loss") -> dict[int, dict[str, Any]]:
    """The lines of metrics.jsonl that have `key`, by step."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if key in line}


def reached(run_dir: Path, step: int) -> Callable[[], bool]:
    file = run_dir / "metrics.jsonl"
    return lambda: (
        file.is_file()
        and any(
            f'"step": {step},' in line and '"loss"' in line
            for line in file.read_text().splitlines()
        )
    )


def fork_flags(folder: Path) -> list[Any]:
    """A configuration that measures nothing and chooses nothing: for tests that compare runs or
    look for a stage by its rank."""
    config = json.loads((ROOT / "ds_configs" / "cpu_fp32.json").read_text())
    config["train_batch_size"] = BATCH
    config["branches"] |= {
        "layout": "fork",
        "stages": {"image": 1, "text": 1},
        "schedule": "batch_sync",
    }
    adaptive = {"kind": "adaptive", "factor": 1.01, "decay": 0.9, "warmup_steps": 2}
    config["branches"]["gradient_clipping"] = {"image": 1.0, "text": adaptive, "head": 1.0}
    config["branches"]["optimizer_groups"] = {
        "image": {"lr": 2e-3, "layer_decay": 0.8, "warmup_steps": 3}
    }
    config["branches"]["ema"] = {"decay": 0.9}
    file = folder / "fork.json"
    file.write_text(json.dumps(config))
    return ["--deepspeed_config", file]


def write_pairs(folder: Path, number: int, languages: str = "en") -> str:
    """The spec of a JSONL set of `number` emoji with their names: small enough to be prepared and
    evaluated at once."""
    demo = open_source(f"demo:{languages}")
    (folder / "images").mkdir(parents=True)
    with (folder / "pairs.jsonl").open("w", encoding="utf-8") as lines:
        for i in range(0, len(demo), len(demo) // number)[:number]:
            (folder / "images" / f"{i}.png").write_bytes(demo.value("image", i))
            lines.write(
                json.dumps(
                    {
                        "image_path": f"images/{i}.png",
                        "text": demo.captions(i),
                        "id": demo.identity(i),
                    }
                )
                + "\n"
            )
    return f"jsonl:{folder / 'pairs.jsonl'}"
