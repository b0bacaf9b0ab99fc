"""Where the ranks of a run are: which of them share a node, its cores or a device.

Launchers say it in different words, and some not at all. So the ranks tell each other in the store
in which they meet, before there is a process group: each says where it is, the first reads all of
it in one call, decides how they communicate, and tells the others. That takes each rank three calls
of the store.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import platform
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist

from common.cpus import quota

PACKAGES = ("torch", "deepspeed", "transformers")
HEARING_LIMIT = timedelta(seconds=10)


class RefusedByFirstRank(ValueError):
    """What the first rank refuses, on another one. The first rank says it."""


@dataclass(frozen=True)
class Place:
    """Where a rank is. Ranks with an equal `node` see each other's processes, those with equal
    `cores` or an equal `device` share them. `device`: empty where none is visible. `alike`: what
    must be the same on all ranks. `address`: its own, see `own_address`. `launch_blocking`: does
    its host wait for the end of each kernel?"""

    node: str
    cores: str
    device: str
    num_devices: int
    pid: int
    alike: Mapping[str, str]
    address: str = ""
    launch_blocking: bool = False

    @classmethod
    def here(cls, kind: str, number: int, num_devices: int) -> Place:
        """Of this process. `kind`, `number`: of its device, among `num_devices` that it sees."""
        boot, processes = "", ""  # equal on every container of a machine, and in one container
        with contextlib.suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            processes = os.readlink("/proc/self/ns/pid")
        node = f"{socket.gethostname()} {boot} {processes}"
        # ranks of two containers of a machine have their own time on the same cores
        limit = quota()
        limited = "" if limit is None else f" {limit.cpus} of {limit.group} in {node}"
        alike = {"accelerator": kind, "python": ".".join(platform.python_version_tuple()[:2])}
        alike |= {name: version(name) for name in PACKAGES}
        if kind == "cuda":
            alike["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        return cls(
            node=node,
            cores=f"{boot} {sorted(os.sched_getaffinity(0))}{limited}",
            device=_device(kind, number, f"{socket.gethostname()} {boot}") if num_devices else "",
            num_devices=num_devices,
            pid=os.getpid(),
            alike=alike,
            address=own_address(os.environ.get("MASTER_ADDR", "")),
            launch_blocking=os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"),
        )


def _device(kind: str, number: int, machine: str) -> str:
    """Of a device that each process may see under another number, its UUID. All ranks on a CPU
    share it."""
    if kind == "cpu":
        return machine
    properties = getattr(getattr(torch, kind, None), "get_device_properties", None)
    uuid = None if properties is None else getattr(properties(number), "uuid", None)
    return f"{machine} {kind} {number}" if uuid is None else str(uuid)


def own_address(other: str) -> str:
    """Of this machine, as packets to `other` (a name or an address) leave with it; empty where
    nothing leads there, or `other` is this machine by a name that stays inside, as Debian's
    installer gives it (127.0.1.1)."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(
            other, 9, type=socket.SOCK_DGRAM
        ):
            with socket.socket(family, kind, protocol) as probe, contextlib.suppress(OSError):
                probe.connect(place)  # sends nothing
                address = probe.getsockname()[0]
                return (
                    "" if ipaddress.ip_address(address.partition("%")[0]).is_loopback else address
                )
    return ""


@dataclass(frozen=True)
class Places:
    """Of every rank, in order: numbers of its node, of its cores and of its device, which are equal
    where ranks share them, its process, the name of its host, and its address there."""

    nodes: tuple[int, ...]
    cores: tuple[int, ...]
    devices: tuple[int, ...]
    pids: tuple[int, ...]
    hosts: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()

    @classmethod
    def of(cls, told: Sequence[Place]) -> Places:
        return cls(
            nodes=_numbered(place.node for place in told),
            cores=_numbered(place.cores for place in told),
            devices=_numbered(place.device for place in told),
            pids=tuple(place.pid for place in told),
            hosts=tuple(map(name_of_host, told)),
            addresses=tuple(place.address for place in told),
        )

    @classmethod
    def together(cls, world_size: int) -> Places:
        """Of ranks that share everything, as on a machine without GPUs."""
        same = (0,) * world_size
        return cls(same, same, same, same)

    @property
    def num_nodes(self) -> int:
        return len(set(self.nodes))

    def where(self, rank: int) -> str:
        """Such as ` on node7`; empty where all ranks are on one node."""
        return f" on {self.hosts[rank]}" if self.num_nodes > 1 and self.hosts else ""

    def interface(self, rank: int) -> str | None:
        """The network interface of its machine, which is this one, that leads to other nodes: to
        the first host, or from there to the first that found a way to it. None: none is known."""
        own, node = self.addresses[rank] if self.addresses else "", self.nodes[rank]
        others = (a for a, other in zip(self.addresses, self.nodes) if a and other != node)
        own = own or own_address(next(others, ""))
        named = psutil.net_if_addrs().items() if own else ()
        return next(
            (name for name, known in named if own in {each.address for each in known}), None
        )

    def beside(self, rank: int) -> list[int]:
        """The ranks of its node, itself among them, in order."""
        return [other for other, node in enumerate(self.nodes) if node == self.nodes[rank]]

    def across(self, rank: int) -> list[int]:
        """The ranks that have its position on their nodes, itself among them, a node after the
        other. A node with fewer ranks has none in a late position."""
        position = self.beside(rank).index(rank)
        firsts = dict.fromkeys(self.nodes)
        members = [self.beside(self.nodes.index(node)) for node in firsts]
        return [ranks[position] for ranks in members if len(ranks) > position]


def name_of_host(place: Place) -> str:
    """Of its host."""
    return place.node.split(" ")[0]


def _numbered(names: Iterable[str]) -> tuple[int, ...]:
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)


class Met(NamedTuple):
    """What ranks know once they have met: where all are, what the first has decided, and a random
    text that only they know."""

    places: Places
    decided: str
    secret: str


def meet(
    store: dist.Store,
    rank: int,
    world_size: int,
    place: Place,
    decide: Callable[[Sequence[Place]], str],
) -> Met:
    """Tell the other ranks where this one is. `decide` says on the first what follows from where
    all are. All ranks call it together.

    Errors: the ValueError of `decide` on the first rank, RefusedByFirstRank on the others.
    TimeoutError where a rank does not come before the store's time limit.
    """
    store.set(f"place/{rank}", json.dumps(asdict(place)))
    if rank == 0:
        _decide(store, world_size, decide)
    answer = json.loads(store.get("places"))
    if "refused" in answer:
        store.set(f"heard/{rank}", "")
        raise RefusedByFirstRank(answer["refused"])
    # whoever reaches the store later does not find the secret there
    if store.add("met", 1) == world_size:
        store.delete_key("places")
    places = Places(**{name: tuple(of) for name, of in answer["places"].items()})
    return Met(places, answer["decided"], answer["secret"])


def _decide(store: dist.Store, world_size: int, decide: Callable[[Sequence[Place]], str]) -> None:
    keys = [f"place/{rank}" for rank in range(world_size)]
    try:
        told = [Place(**json.loads(value)) for value in store.multi_get(keys)]
    except dist.DistStoreError as error:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        raise TimeoutError(
            f"of {world_size} ranks, {', '.join(missing[:8])}{' …' * (len(missing) > 8)} did not "
            "come; look whether they were started, with the same MASTER_ADDR, MASTER_PORT and "
            f"WORLD_SIZE, and what they say ({str(error).split(',')[0]})"
        ) from error
    try:
        decided = decide(told)
    except ValueError as error:
        store.set("places", json.dumps({"refused": str(error)}))
        # the store may end with this process: not before the others have read it
        with contextlib.suppress(dist.DistError):
            store.wait([f"heard/{rank}" for rank in range(1, world_size)], HEARING_LIMIT)
        raise
    answer = {"decided": decided, "places": asdict(Places.of(told)), "secret": token_hex(16)}
    store.set("places", json.dumps(answer))
