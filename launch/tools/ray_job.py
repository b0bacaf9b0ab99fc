"""train.py on a Ray cluster: Ray Train starts a rank in each of its workers, and all of them again,
from the newest checkpoint, when one fails.

    python -m launch.tools.ray_job --num-workers 4:8 -- --run-dir /shared/runs/long …
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

try:
    import ray.train
    from ray.train.backend import Backend, BackendConfig
    from ray.train.collective import broadcast_from_rank_zero
except ImportError as error:
    sys.exit(f"python -m launch.tools.ray_job: error: {error}; pip install -r requirements-ray.txt")

from common.command_line import CommandParser
from common.files import write_text
from common.output import INTERRUPTED, outlive_output
from launch.config.options import ROOT, parse_options
from launch.config.options import make_parser as make_train_parser
from launch.tools.command import run_tool

# train.py ends with its worker, however that ends: PR_SET_PDEATHSIG of prctl(2), SIGKILL
TIED = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"


def run_rank(job: dict[str, Any]) -> int:
    """train.py as the rank that Ray Train gives this worker; returns its exit status. Errors:
    RuntimeError where another start may do better."""
    own = ray.train.get_context()
    with socket.socket() as free:
        free.bind(("", 0))
        place = ray.util.get_node_ip_address(), free.getsockname()[1]
    address, port = broadcast_from_rank_zero(place)
    variables = {
        "RANK": own.get_world_rank(),
        "WORLD_SIZE": own.get_world_size(),
        "LOCAL_RANK": own.get_local_rank(),
        "LOCAL_WORLD_SIZE": own.get_local_world_size(),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    words = [sys.executable, "-c", TIED, sys.executable, *job["words"]]
    status = subprocess.run(words, cwd=job["folder"], env=environment).returncode
    if status not in (0, 2, 75):  # done, wrong input, stopped as asked
        raise RuntimeError(f"rank {own.get_world_rank()} of train.py ended with status {status}")
    return status


class NoProcessGroup(Backend):
    """Ray's own for torch makes a process group in each worker, where train.py is not."""

    share_cuda_visible_devices = True  # of a node, so that its GPUs reach each other


class Alone(BackendConfig):
    backend = "none"  # which TorchTrainer would choose
    backend_cls = NoProcessGroup


def _workers(text: str) -> int | tuple[int, int]:
    numbers = [int(number) for number in text.split(":")]
    if len(numbers) > 2 or numbers != sorted(numbers) or numbers[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number from 1 on, or MIN:MAX")
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m launch.tools.ray_job",
        description="Train on a Ray cluster whose nodes have this folder, the data and RUN_DIR "
        "under the same paths. Each worker is a rank, with a GPU of its own where the cluster has "
        "GPUs. Ctrl-C and SIGTERM save and end; a second one ends at once.",
    )
    add = parser.add_argument
    add("--num-workers", type=_workers, required=True, metavar="N|MIN:MAX", help="number of ranks")
    add("--address", help="of the cluster (default: as ray.init finds or makes it)")
    add("--failures", type=int, default=3, metavar="N", help="so many are survived (default: 3)")
    add("options", nargs="+", help="of train.py, after --; with --run-dir")
    return parser


def main(arguments: argparse.Namespace) -> int:
    arguments.options = make_train_parser().words(arguments.options)
    options = parse_options(arguments.options)
    if options.run_dir is None or options.resume == "never":
        raise ValueError("every start would begin anew; give --run-dir, and no --resume never")
    from ray.train.torch import TorchTrainer  # imports torch, which no worker needs

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(arguments.address)
    run_dir = options.run_dir.absolute()
    run_dir.mkdir(parents=True, exist_ok=True)
    words = [str(ROOT / "train.py"), *arguments.options]
    trainer = TorchTrainer(
        run_rank,
        train_loop_config={"words": words, "folder": os.getcwd()},
        torch_config=Alone(),
        scaling_config=ray.train.ScalingConfig(
            num_workers=arguments.num_workers,
            use_gpu=ray.cluster_resources().get("GPU", 0) > 0,
            placement_strategy="PACK",  # on few nodes; Ray numbers those of a node in a row
        ),
        run_config=ray.train.RunConfig(
            name="ray",
            storage_path=str(run_dir),
            failure_config=ray.train.FailureConfig(max_failures=arguments.failures),
        ),
    )
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda which, _: asked.append(which))
    with ThreadPoolExecutor(1) as beside:  # in this thread it would answer Ctrl-C itself, at once
        training = beside.submit(trainer.fit)
        while not training.done():
            time.sleep(0.5)
            if asked:  # again and again: train.py does not look at a file older than itself
                write_text(run_dir / "stop", "")
            if len(asked) > 1:
                ray.shutdown()  # the workers end with the job
                os._exit(INTERRUPTED)
    try:
        return training.result().return_value
    except ray.train.TrainingFailedError as error:
        print(f"python -m launch.tools.ray_job: given up: {error}", file=sys.stderr)
        return 1


def run(arguments: list[str] | None = None) -> int:
    return run_tool(make_parser(), main, arguments)


if __name__ == "__main__":
    outlive_output()
    sys.exit(run())
