"""How many CPUs this process may use: those it is bound to, and the time that its container has.

`os.cpu_count()` and affinity see all CPUs of the machine in a container whose time is limited
(`docker run --cpus 2`, `resources.limits.cpu` of a pod). Threads and processes beyond the limit make
all of them stand still for the rest of each period.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/")
CGROUPS = "sys/fs/cgroup"


class Quota(NamedTuple):
    """`cpus`: seconds of CPU time per second. `group`: the control group that has it."""

    cpus: float
    group: str


def usable_cpus(root: Path = ROOT) -> int:
    """At least 1; a part of a CPU counts as one. `root`: of the file system with proc and sys."""
    bound = len(os.sched_getaffinity(0))
    limit = quota(root)
    return bound if limit is None else max(1, min(bound, math.ceil(limit.cpus)))


def quota(root: Path = ROOT) -> Quota | None:
    """The smallest limit of the control groups that this process is in; None: there is none."""
    return min(_quotas(root), default=None)


def _quotas(root: Path) -> Iterator[Quota]:
    lines: list[str] = []
    with contextlib.suppress(OSError):  # no Linux, or nothing mounted
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            yield from _above(root / CGROUPS, path, _limit_of_2)
        elif "cpu" in controllers.split(","):
            for mounted in {controllers, "cpu"}:
                yield from _above(root / CGROUPS / mounted, path, _limit_of_1)


def _above(mounted: Path, path: str, limit_of: Callable[[Path], float]) -> Iterator[Quota]:
    """Limits of a group and of all above it. A container may see its own group as the root, and be
    told the path that the host knows, of which it sees nothing."""
    group = PurePosixPath(path)
    for each in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):  # not there, or no limit
            cpus = limit_of(mounted / str(each).lstrip("/"))
            if cpus > 0:
                yield Quota(cpus, str(each))


def _limit_of_2(folder: Path) -> float:
    """`max 100000` where there is none: ValueError."""
    time, period = (folder / "cpu.max").read_text(encoding="ascii").split()
    return int(time) / int(period)


def _limit_of_1(folder: Path) -> float:
    """Below 0 where there is none."""
    names = "cpu.cfs_quota_us", "cpu.cfs_period_us"
    time, period = (int((folder / name).read_text(encoding="ascii")) for name in names)
    return time / period
