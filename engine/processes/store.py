"""The store in which the ranks of a run meet, and which the process group and the watchdog use."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from common.shell import is_launcher

# version of torch whose newer store listens on a socket that it is given (pytorch#150215, or 2.8)
TAKES_SOCKET = (2, 9)


def torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def open_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The store of this run, in the first rank or, under torchrun, in its agent. `timeout` limits
    every wait for a key.

    Keys name the start where the launcher is known, and a rank comes only once: two runs that were
    given one port must not hear each other.

    Where the launcher says that there is one node, it listens where no other machine can connect:
    torch's own socket listens on all interfaces, so the first rank makes it. The store of
    torchrun's agent listens on all interfaces, too. Errors: OSError where the port is taken,
    ValueError where another process has come as this rank, DistError where nobody listens.
    """
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    # before there is a store, nothing else is known of the others
    on_node = int(os.environ.get("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", 1)))
    serves, listening = rank == 0 and not agents, None
    if on_node == world_size and not agents:
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        listening = _listen_on_loopback() if serves else None
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=serves,
        timeout=timeout,
        # who does not come is found out by name
        wait_for_workers=False,
        master_listen_fd=listening,
        use_libuv=listening is None or torch_version() >= TAKES_SOCKET,
    )
    if not agents:
        own = dist.PrefixStore(f"start-{_start(on_node == world_size)}", store)
        _refuse_second(own, rank)
        return own
    # agents start their ranks again with the same store. The count is of the agent: one that has
    # come later counts from 0 again, so it is no name where rank 0 makes a store
    return dist.PrefixStore(f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _start(one_node: bool) -> str:
    """What all ranks of this start know of it, and those of another one do not: the process of
    DeepSpeed's launcher on one node; of several nodes nothing."""
    launcher = os.getppid()
    return str(launcher) if one_node and is_launcher(launcher) else ""


def _refuse_second(store: dist.Store, rank: int) -> None:
    if store.add(f"came/{rank}", 1) > 1:
        address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        raise ValueError(
            f"another process has come to {address}:{port} as rank {rank}: two runs were started on "
            "one port. Give each its own: deepspeed --master_port PORT train.py"
        )


def _listen_on_loopback() -> int:
    port = int(os.environ["MASTER_PORT"])
    try:
        return socket.create_server(("127.0.0.1", port)).detach()
    except OSError as error:
        raise OSError(
            f"port {port} is taken ({error.strerror}); start this run with another one: "
            "deepspeed --master_port PORT train.py, or MASTER_PORT=PORT with mpirun and srun"
        ) from error


@contextlib.contextmanager
def meeting(rank: int, world_size: int, timeout: timedelta) -> Iterator[None]:
    """Say what it means when the store cannot be reached in here. Errors: ConnectionError."""
    try:
        yield
    except dist.DistError as error:
        raise ConnectionError(
            f"rank {rank} of {world_size} did not meet the others at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']} within {timeout.total_seconds():.0f} s. Rank 0, which "
            "listens there, was not started, has ended or cannot be reached, or the port is taken "
            f"({str(error).splitlines()[0]})"
        ) from error


def connect(secret: str, timeout: timedelta) -> dist.Store:
    """Another connection to the store, since the process group's own may be busy in a call that
    waits. `secret`: of the run, without which nobody finds what its ranks write there (torch's
    newer stores list all keys, though)."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
    return dist.PrefixStore(f"wye-{secret}", store)
