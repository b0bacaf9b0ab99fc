"""The store in which the ranks of a run meet, and which the process group and the watchdog use."""

from __future__ import annotations

import contextlib
import os
import re
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
    """The store of this run, in the first rank or, under torchrun on several nodes, in its agent.
    `timeout` limits every wait for a key.

    Keys name the start where the launcher is known, and a rank comes only once: two runs that were
    given one port must not hear each other.

    Where the launcher says that there is one node, it listens where no other machine can connect:
    torch's own socket listens on all interfaces, so the first rank makes it. The store of
    torchrun's agent listens on all interfaces, too: ranks of one node only ask it for the port of
    theirs. Errors: OSError where the port is taken, ValueError where another process has come as
    this rank, DistError where nobody listens.
    """
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    # before there is a store, nothing else is known of the others
    on_node = int(os.environ.get("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", 1)))
    one_node, listening = on_node == world_size, None
    serves = rank == 0 and (one_node or not agents)
    if one_node:
        port = 0 if agents else int(os.environ["MASTER_PORT"])
        served = _listen_on_loopback(port) if serves else None
        if agents:
            os.environ["MASTER_PORT"] = _agreed_port(served, timeout)
            agents = False
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        listening = served.detach() if served else None
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
        own = dist.PrefixStore(f"start-{_start(one_node)}", store)
        _refuse_second(own, rank)
        return own
    return dist.PrefixStore(_start_of_agents(), store)


def _start_of_agents() -> str:
    """Agents start their ranks again with the same store. The count is of the agent: one that has
    come later counts from 0 again, so it is no name where rank 0 makes a store."""
    return f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"


def _agreed_port(listening: socket.socket | None, timeout: timedelta) -> str:
    """The port of the first rank, which has it `listening`, by the store of torchrun's agent.
    Whoever reaches that store can keep the ranks from meeting, and no more: they connect to this
    machine only, and no key of the run is there."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agents = dist.TCPStore(host, port, is_master=False, timeout=timeout)
    store = dist.PrefixStore(_start_of_agents(), agents)
    if listening is not None:
        store.set("port", str(listening.getsockname()[1]))
    said = store.get("port").decode(errors="replace")
    if not re.fullmatch("[0-9]{1,5}", said):
        raise ValueError(
            f"the store of torchrun's agent at {host}:{port} says that the first rank listens on "
            f"port {said[:80]!r}, which none has written: somebody else reaches that store; start "
            "with deepspeed, whose runs on one node listen on the loopback interface only"
        )
    return said


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


def _listen_on_loopback(port: int) -> socket.socket:
    """`port`: 0 for any that is free."""
    try:
        return socket.create_server(("127.0.0.1", port))
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
