"""Starting and ending the processes of a run: environment, the store that they meet in, the
process group."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import logging
import os
import random
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.distributed.rendezvous import register_rendezvous_handler

from engine.config.checks import AUTO
from engine.config.communication import DEVICE, HOST, choose_communication
from engine.json_messages import from_first_rank
from engine.processes.ops import compile_shared_memory_op

COLLECTIVE_LIMIT_S = 1800.0
PREPARATION_LIMIT = timedelta(days=1)
LISTENING = range(20_000, 32_000)  # ports; Linux gives 32768 and above to outgoing connections
# What each rank last did with NCCL is written to /tmp/nccl_trace_rank_N when a collective runs out of
# time (torch's flight recorder). Newer versions do so by themselves, under other names.
FLIGHT_RECORDER = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
RECORDS_BY_ITSELF = (2, 9)  # version of torch
# version of torch whose newer store listens on a socket that it is given (pytorch#150215, or 2.8)
STORE_TAKES_SOCKET = (2, 9)
LOOPBACK = "wye-loopback://"  # of `_meet_on_loopback`


@dataclass(frozen=True)
class Processes:
    """This process among the others. `communication`: "device" or "host". `secret`: drawn for this
    run, known to its ranks only."""

    rank: int
    world_size: int
    local_rank: int
    ranks_on_node: int
    device: torch.device
    timeout: timedelta
    communication: str
    secret: str


def start_processes(
    timeout_s: float = COLLECTIVE_LIMIT_S,
    notice: Callable[[str], object] | None = None,
    communication: str = AUTO,
) -> Processes:
    """Join the process group that the launcher describes in the environment; without a launcher, a
    group of one.

    `timeout_s` limits every wait in a collective. `notice` is told, on the first process of a node,
    of what takes long. `communication`: see `choose_communication`. Raises ValueError for more
    processes on this node than GPUs where they may not share them, before any of them is touched;
    TimeoutError when the C++ op is not compiled within ten minutes.
    """
    if not os.environ.get("WYE_VERBOSE"):
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    alone = "WORLD_SIZE" not in os.environ
    if alone:
        os.environ.update(
            RANK="0",
            WORLD_SIZE="1",
            LOCAL_RANK="0",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(free_port()),
        )
    missing = [
        name
        for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        if name not in os.environ
    ]
    if missing:
        raise ValueError(
            f"WORLD_SIZE is set and {', '.join(missing)} not; start with deepspeed or torchrun, "
            "which set all, or unset WORLD_SIZE"
        )
    local_rank = int(os.environ["LOCAL_RANK"])
    ranks_on_node = int(os.environ.get("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", 1)))
    # What was imported stays until the end. A full collection would look through all of it, half a
    # second each time, and DeepSpeed asks for six of them before the first step. At the end, though,
    # it is looked through: libraries made with nanobind, triton among them, print a screen of
    # "leaks" where it is not.
    gc.freeze()
    atexit.register(gc.unfreeze)
    accelerator = get_accelerator()
    kind, num_devices = accelerator.device_name(), accelerator.device_count()
    several_nodes = int(os.environ["WORLD_SIZE"]) > ranks_on_node
    chosen = choose_communication(communication, ranks_on_node, num_devices, kind, several_nodes)
    timeout, number = timedelta(seconds=timeout_s), local_rank
    if kind == "cpu":
        compile_shared_memory_op(notice if local_rank == 0 else None)
        _keep_freed_memory()
    else:
        number = local_rank % num_devices
        accelerator.set_device(number)
        # cuDNN tries its algorithms and keeps the fastest for each shape, as OpenCLIP's trainer lets
        # it: the shapes of images hardly ever change
        torch.backends.cudnn.benchmark = True
    meeting = None if several_nodes else _stay_on_loopback()
    if kind != "cpu" and chosen == HOST:
        # DeepSpeed would give gloo a device; it takes a group that is there as it is
        dist.init_process_group("gloo", init_method=meeting, timeout=timeout)
    if chosen == DEVICE and _torch_version() < RECORDS_BY_ITSELF:
        for name, value in FLIGHT_RECORDER.items():
            os.environ.setdefault(name, value)
    with contextlib.redirect_stdout(
        io.StringIO()
    ):  # DeepSpeed prints that its op is built, on every rank
        deepspeed.init_distributed(
            auto_mpi_discovery=False, verbose=False, timeout=timeout, init_method=meeting
        )
    _unlink_shared_memory()
    return Processes(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=local_rank,
        ranks_on_node=ranks_on_node,
        device=torch.device(accelerator.device_name(number)),
        timeout=timeout,
        communication=chosen,
        secret=from_first_rank(secrets.token_hex(16)),
    )


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _stay_on_loopback() -> str | None:
    """Let the ranks of one node listen where no other machine can connect; what to give torch as
    `init_method` for that.

    None under torchrun, where the store is that of its agent: it listens on all interfaces, and
    only the connections of the ranks stay on loopback.
    """
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        return None
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    return LOOPBACK


def _meet_on_loopback(
    url: str, timeout: timedelta, **_: Any
) -> Iterator[tuple[dist.Store, int, int]]:
    """torch's `env://` with a store that listens on loopback only: torch's own socket listens on
    all interfaces, so the first rank makes it. Errors: OSError where the port is taken."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place, first, listening = ("127.0.0.1", int(os.environ["MASTER_PORT"])), rank == 0, None
    if first:
        try:
            listening = socket.create_server(place).detach()
        except OSError as error:
            raise OSError(
                f"port {place[1]} is taken ({error.strerror}); start this run with another one: "
                "deepspeed --master_port PORT train.py"
            ) from error
    store = dist.TCPStore(
        *place,
        world_size,
        is_master=first,
        timeout=timeout,
        master_listen_fd=listening,
        use_libuv=_torch_version() >= STORE_TAKES_SOCKET,
    )
    yield store, rank, world_size


register_rendezvous_handler(LOOPBACK.removesuffix("://"), _meet_on_loopback)


@contextlib.contextmanager
def as_local_rank(device: torch.device) -> Iterator[None]:
    """In here LOCAL_RANK is the number of this rank's GPU, which DeepSpeed takes it for. They differ
    where ranks share a GPU."""
    before = os.environ["LOCAL_RANK"]
    if device.index is not None:
        os.environ["LOCAL_RANK"] = str(device.index)
    try:
        yield
    finally:
        os.environ["LOCAL_RANK"] = before


def _keep_freed_memory() -> None:
    """Let glibc keep what a step frees for the next one, as torch does on a GPU.

    Otherwise a step's activations go back to the kernel and come again page by page, which takes 4
    to 7 % of a small model's step and makes its time uneven. Without glibc nothing changes.
    """
    largest_block, trim_threshold, mmap_threshold = (
        32 * 2**20,
        -1,
        -3,
    )  # mallopt(3): glibc's upper limit, M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(mmap_threshold, largest_block)
        libc.mallopt(trim_threshold, 2**31 - 1)


@contextlib.contextmanager
def first_rank_first() -> Iterator[None]:
    """The first rank goes through the body alone, then all others do: what it leaves on disk is
    there for them.

    They wait for up to a day, since reading millions of images takes hours. That the first
    rank lives, the watchdog sees.
    """
    group: Any = dist.new_group(backend="gloo", timeout=PREPARATION_LIMIT)  # of all ranks
    if dist.get_rank() > 0:
        dist.barrier(group)
    yield
    if dist.get_rank() == 0:
        dist.barrier(group)


def has_bf16(device: torch.device) -> bool:
    """In hardware: torch also emulates it, slowly, on GPUs that have none."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return get_accelerator().is_bf16_supported()


def stop_processes() -> None:
    """Leave together: the first rank holds the store that the others still use."""
    if dist.is_initialized():
        dist.barrier()
        deepspeed.comm.destroy_process_group()


def free_port() -> int:
    """A port that nobody listens on, below those that the system gives to outgoing connections: one
    of these may be taken before the caller listens on it."""
    for port in (*random.SystemRandom().sample(LISTENING, 100), 0):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return s.getsockname()[1]
    raise OSError("no port is free on 127.0.0.1")


def _unlink_shared_memory() -> None:
    """Take this rank's buffer out of /dev/shm: DeepSpeed's op never does, and leaves 66 MiB of
    memory per rank and run.

    Once every rank has mapped every buffer, names are not needed any more; the memory goes with the
    last process, however it ends.
    """
    dist.barrier()
    name = "deepspeed_allreduce_buffer_{}_{MASTER_ADDR}_{MASTER_PORT}_{RANK}".format(
        os.getuid(), **os.environ
    )
    Path("/dev/shm", name).unlink(missing_ok=True)
