"""The hosts of a hostfile that answer now, and how many GPUs each of them has."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

# Without its persistence mode the driver starts every GPU anew when it is asked, for many seconds.
SMI_LIMIT_S = 60
SSH_S = 30  # beside that, to reach a host and to come back
# A name that ssh would take for an option, or that a shell would not leave alone, is none.
NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.:@-]*")
LINE = re.compile(r"(\S+)\s+slots=([0-9]+)\s*(?:#.*)?")
# A GPU that fails is listed by nvidia-smi in a line of its own form, which does not count.
COUNT = (
    "command -v nvidia-smi >/dev/null || {{ echo all; exit; }}; "
    "said=$(timeout -k 5 {limit_s} nvidia-smi -L 2>/dev/null); "
    "case $? in 124|137) echo late; exit;; esac; "
    'echo "$said" | grep -c "^GPU "'
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
    this machine, which is asked without ssh; `limit_s`: for nvidia-smi."""

    hosts: Sequence[Host]
    ssh_options: Sequence[str] = field(default=())
    is_here: bool = False
    limit_s: int = SMI_LIMIT_S

    def available(self, most: int | None) -> tuple[list[Host], list[str]]:
        """The hosts that answer, with the ranks that a run of at most `most` gets on each; and a
        line for each one that is there and whose GPUs do not answer. All are asked at once, within
        `limit_s` and `SSH_S`."""
        with ThreadPoolExecutor(max(1, len(self.hosts))) as pool:
            counts = list(pool.map(self._count, self.hosts))
        available, total = [], 0
        late = [host.name for host, count in zip(self.hosts, counts) if count is None]
        for host, count in zip(self.hosts, counts):
            slots = min(count or 0, host.slots)
            if most is not None:
                slots = min(slots, most - total)
            if slots > 0:
                available.append(Host(host.name, slots))
                total += slots
        advice = "see dmesg there, or leave the host out"
        return available, [
            f"{name}: nvidia-smi -L has not answered within {self.limit_s} s; {advice}"
            for name in late
        ]

    def _count(self, host: Host) -> int | None:
        """GPUs; the slots as written where there is no nvidia-smi; 0 for a host that does not
        answer, None for one whose nvidia-smi does not."""
        on_cpu = os.environ.get("DS_ACCELERATOR") == "cpu"
        script = "echo all" if on_cpu else COUNT.format(limit_s=self.limit_s)
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
                timeout=self.limit_s + SSH_S,
            )
        except OSError:
            return 0
        except subprocess.TimeoutExpired:  # of a driver that hangs, not even a signal ends it
            return None
        last = answer.stdout.decode(errors="replace").strip().rpartition("\n")[2]
        if last in ("all", "late"):
            return host.slots if last == "all" else None
        return int(last) if re.fullmatch("[0-9]{1,6}", last) else 0
