"""The hosts of a hostfile that answer now, and how many GPUs each of them has."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

SSH_LIMIT_S = 90
# A name that ssh would take for an option, or that a shell would not leave alone, is none.
NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.:@-]*")
LINE = re.compile(r"(\S+)\s+slots=([0-9]+)\s*(?:#.*)?")
# Without its persistence mode the driver starts every GPU anew when it is asked, for many seconds.
# A GPU that fails is listed by nvidia-smi in a line of its own form, which does not count.
COUNT = (
    "command -v nvidia-smi >/dev/null || { echo all; exit; }; "
    'timeout 60 nvidia-smi -L 2>/dev/null | grep -c "^GPU "'
)


@dataclass(frozen=True)
class Host:
    """`slots`: how many ranks it may hold."""

    name: str
    slots: int

    def __str__(self) -> str:
        return f"{self.name} slots={self.slots}"


def read_hostfile(path: Path) -> list[Host]:
    """Hosts in the order of the file. Errors: OSError; ValueError for a line or a name that is
    none."""
    hosts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        parts = LINE.fullmatch(line.strip())
        if parts is None or not NAME.fullmatch(parts[1]):
            raise ValueError(
                f"{path}, line {number}: {line.strip()[:80]!r} is not a host; write NAME slots=N, "
                "where NAME does not begin with '-'"
            )
        hosts.append(Host(parts[1], int(parts[2])))
    return hosts


@dataclass(frozen=True)
class Pool:
    """The hosts that a run may use. `ssh_options`: for a port, say; `is_here`: the only host is
    this machine, which is asked without ssh."""

    hosts: Sequence[Host]
    ssh_options: Sequence[str] = field(default=())
    is_here: bool = False

    def available(self, most: int | None) -> list[Host]:
        """The hosts that answer, with the ranks that a run of at most `most` gets on each. All are
        asked at once, within `SSH_LIMIT_S`."""
        with ThreadPoolExecutor(max(1, len(self.hosts))) as pool:
            counts = list(pool.map(self._count, self.hosts))
        available, total = [], 0
        for host, count in zip(self.hosts, counts):
            slots = min(count, host.slots)
            if most is not None:
                slots = min(slots, most - total)
            if slots > 0:
                available.append(Host(host.name, slots))
                total += slots
        return available

    def _count(self, host: Host) -> int:
        """GPUs; the slots as written where there is no nvidia-smi; 0 for a host that does not
        answer."""
        script = "echo all" if os.environ.get("DS_ACCELERATOR") == "cpu" else COUNT
        command = ["sh", "-c", script]
        if not self.is_here:
            quiet = ["-n", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5"]
            command = ["ssh", *quiet, *self.ssh_options, "--", host.name, f"sh -c '{script}'"]
        try:
            answer = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=SSH_LIMIT_S,
            )
        except (OSError, subprocess.TimeoutExpired):
            return 0
        last = answer.stdout.decode(errors="replace").strip().rpartition("\n")[2]
        if last == "all":
            return host.slots
        return int(last) if re.fullmatch("[0-9]{1,6}", last) else 0
