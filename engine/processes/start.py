"""Starting and ending the processes of a run: environment, the store that they meet in, the
process group."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import itertools
import logging
import os
import random
import resource
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from engine.checks import AUTO
from engine.json_messages import wait_for_all
from engine.processes.communication import DEVICE, HOST, communication_of
from engine.processes.launchers import PORTS, adopt_launcher
from engine.processes.ops import compile_shared_memory_op
from engine.processes.places import Place, Places, meet
from engine.processes.store import connect, meeting, open_store, torch_version

COLLECTIVE_LIMIT_S = 1800.0
PREPARATION_LIMIT = timedelta(days=1)
# What each rank last did with NCCL is written to /tmp/nccl_trace_rank_N when a collective runs out of
# time (torch's flight recorder). Newer versions do so by themselves, under other names.
FLIGHT_RECORDER = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
RECORDS_BY_ITSELF = (2, 9)  # version of torch
QUEUES, CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS", 32  # as many as CUDA has


@dataclass(frozen=True)
class Processes:
    """This process among the others. `places`: where all of them are. `communication`: "device" or
    "host". `secret`: drawn for this run, known to its ranks only."""

    rank: int
    world_size: int
    local_rank: int
    places: Places
    device: torch.device
    timeout: timedelta
    communication: str
    secret: str

    @property
    def ranks_on_node(self) -> int:
        return len(self.places.beside(self.rank))

    @property
    def ranks_on_cores(self) -> int:
        """That may use the same cores as this one; a launcher may give each its own."""
        return self.places.cores.count(self.places.cores[self.rank])


def start_processes(
    timeout_s: float = COLLECTIVE_LIMIT_S,
    notice: Callable[[str], object] | None = None,
    communication: str = AUTO,
    place: Place | None = None,
    watch: Callable[[int, Places, str], object] | None = None,
) -> Processes:
    """Join the process group that the launcher describes in the environment; without a launcher, a
    group of one.

    `timeout_s` limits every wait for other ranks. `notice` is told, on the first process of a node,
    of what takes long. `communication`: see `communication_of`. `place`: where this rank is,
    found out unless given. `watch` gets this rank, where all are and their secret, before the first
    of them waits for another one in anything but the store. Raises ValueError where ranks are not
    started alike, or share GPUs and may not, before any of them is touched; OSError where ranks do
    not meet; TimeoutError when the C++ op is not compiled within ten minutes.
    """
    if not os.environ.get("WYE_VERBOSE"):
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    rank, world_size, local_rank = _launched()
    _raise_file_limit()
    few = _prepare_devices(world_size)
    # What was imported stays until the end. A full collection would look through all of it, half a
    # second each time, and DeepSpeed asks for six of them before the first step. At the end, though,
    # it is looked through: libraries made with nanobind, triton among them, print a screen of
    # "leaks" where it is not.
    gc.freeze()
    atexit.register(gc.unfreeze)
    accelerator = get_accelerator()
    kind, num_devices = accelerator.device_name(), accelerator.device_count()
    if few and kind == "cuda" and notice is not None and local_rank == 0:
        notice(
            f"CUDA_DEVICE_MAX_CONNECTIONS is {few}, with which a kernel that waits for another rank "
            f"holds up others behind it: set to {CONNECTIONS} for this run"
        )
    number, timeout = local_rank, timedelta(seconds=timeout_s)
    if kind == "cpu":
        compile_shared_memory_op(notice if local_rank == 0 else None)
        _keep_freed_memory()
    elif num_devices:
        number = local_rank % num_devices
    place = place or Place.here(kind, number, num_devices)
    with meeting(rank, world_size, timeout):
        store = open_store(rank, world_size, timeout)
        decide = partial(communication_of, communication, kind)
        places, chosen, secret = meet(store, rank, world_size, place, decide)
    prepare_for(places, rank, chosen)
    if watch is not None:
        watch(rank, places, secret)
    if kind != "cpu":
        accelerator.set_device(number)
        # cuDNN tries its algorithms and keeps the fastest for each shape, as OpenCLIP's trainer lets
        # it: the shapes of images hardly ever change
        torch.backends.cudnn.benchmark = True
    # Not by DeepSpeed, which takes a group that is there as it is: it would bind the device, and
    # torch then makes every later group by an ncclCommSplit over all ranks, also on those that are
    # not in it (which hangs in torch before 2.7.1, pytorch#153960). Without it a group costs its
    # members only, at its first operation.
    on_host = kind != "cpu" and chosen == HOST
    dist.init_process_group(
        "gloo" if on_host else accelerator.communication_backend_name(),
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    # DeepSpeed prints that its op is built, on every rank
    with contextlib.redirect_stdout(io.StringIO()):
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False, timeout=timeout)
    # all are ready, and NCCL makes the communicator of the group with this first operation
    wait_for_all()
    if kind == "cpu":
        _unlink_shared_memory()
    return Processes(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        places=places,
        device=torch.device(accelerator.device_name(number)),
        timeout=timeout,
        communication=chosen,
        secret=secret,
    )


def _launched() -> tuple[int, int, int]:
    """Rank, number of ranks and rank on the node, by the environment; a group of one without a
    launcher. Errors: ValueError."""
    adopt_launcher(os.environ)
    if "WORLD_SIZE" not in os.environ:
        os.environ.update(
            RANK="0",
            WORLD_SIZE="1",
            LOCAL_RANK="0",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(free_port()),
        )
    names = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} not set, for {os.environ['WORLD_SIZE']} ranks; start with "
            "deepspeed, torchrun or srun, which say all, or unset WORLD_SIZE; mpirun on several "
            "hosts needs -x MASTER_ADDR=HOST (MPICH and Intel MPI: -genv MASTER_ADDR HOST), the "
            "host of the first rank"
        )
    environment = os.environ
    return int(environment["RANK"]), int(environment["WORLD_SIZE"]), int(environment["LOCAL_RANK"])


def _raise_file_limit() -> None:
    """As many open files as the system allows: each connection to another rank is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _prepare_devices(world_size: int) -> str:
    """Set what CUDA and torch's allocator read when they begin, where nothing is set. Returns the
    number of queues that was set and is too small for several ranks; empty: none."""
    # Streams share the queues of a device, 8 by default: a kernel that waits for another rank
    # would hold up those behind it. Whoever trains with Megatron has 1 in the environment.
    given, few = os.environ.get(QUEUES, ""), ""
    if not given or (world_size > 1 and given.isdecimal() and int(given) < CONNECTIONS):
        os.environ[QUEUES], few = str(CONNECTIONS), given
    # what was freed in pieces of one size serves other sizes, too
    if "PYTORCH_ALLOC_CONF" not in os.environ:  # the newer name
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    return few


def prepare_for(places: Places, rank: int, communication: str) -> None:
    """Set what gloo, NCCL and DeepSpeed read from the environment, where nothing is set."""
    os.environ["LOCAL_SIZE"] = str(len(places.beside(rank)))  # some launchers do not say it
    if places.num_nodes == 1:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
    elif interface := places.interface(rank):
        # gloo takes the address that the host's own name has there, which Debian's installer makes
        # 127.0.1.1; NCCL takes no loopback interface by itself
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    # gloo connects two ranks when they first speak, not each with all others
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if communication == DEVICE and torch_version() < RECORDS_BY_ITSELF:
        for name, value in FLIGHT_RECORDER.items():
            os.environ.setdefault(name, value)


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
    # mallopt(3): glibc's upper limit, M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
    largest_block, trim_threshold, mmap_threshold = 32 * 2**20, -1, -3
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(mmap_threshold, largest_block)
        libc.mallopt(trim_threshold, 2**31 - 1)


@contextlib.contextmanager
def first_rank_first(processes: Processes) -> Iterator[None]:
    """The first rank goes through the body alone, then all others do: what it leaves on disk is
    there for them. All ranks call it together.

    They wait for up to a day, since reading millions of images takes hours. That the first
    rank lives, the watchdog sees.
    """
    key, store = f"first/{next(_turns)}", connect(processes.secret, PREPARATION_LIMIT)
    if processes.rank > 0:
        store.wait([key])
    yield
    if processes.rank == 0:
        store.set(key, "")


_turns = itertools.count()  # of `first_rank_first`, the same on every rank


def has_bf16(device: torch.device) -> bool:
    """In hardware: torch also emulates it, slowly, on GPUs that have none."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return get_accelerator().is_bf16_supported()


def stop_processes() -> None:
    """Leave together: the first rank holds the store that the others still use."""
    if dist.is_initialized():
        wait_for_all()
        deepspeed.comm.destroy_process_group()


def free_port() -> int:
    """A port that nobody listens on, below those that the system gives to outgoing connections: one
    of these may be taken before the caller listens on it."""
    for port in (*random.SystemRandom().sample(PORTS, 100), 0):
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
    name = "deepspeed_allreduce_buffer_{}_{MASTER_ADDR}_{MASTER_PORT}_{RANK}".format(
        os.getuid(), **os.environ
    )
    Path("/dev/shm", name).unlink(missing_ok=True)
