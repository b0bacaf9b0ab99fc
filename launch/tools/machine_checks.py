"""What can be wrong with one machine before a run begins. `launch.tools.doctor` starts this module
on every host; it prints its findings as one line of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from common.files import write_text
from common.output import outlive_output
from common.sizes import GIB, MIB, sized

OK, WARN, FAIL = "ok", "warn", "fail"
PACKAGES = ("torch", "deepspeed", "transformers", "torchvision", "numpy")
WRITTEN = 64 * MIB
NEVER_S = 60  # after which a file of another host is not waited for
SMI = "name,memory.used,memory.total,utilization.gpu,ecc.errors.uncorrected.volatile.total"


class Finding(NamedTuple):
    """`advice`: what to do; empty where all is well."""

    check: str
    status: str
    found: str
    advice: str = ""


def judged(
    check: str, have: float, least: float, enough: float, found: str, advice: str
) -> Finding:
    """Fails below `least`, warns below `enough`."""
    if have >= enough:
        return Finding(check, OK, found)
    return Finding(check, WARN if have >= least else FAIL, found, advice)


def check_versions(own: Mapping[str, str], first: Mapping[str, str]) -> Finding:
    """`first`: of the first host."""
    unlike = [f"{name} {own[name]}, not {first[name]}" for name in own if own[name] != first[name]]
    if unlike:
        return Finding("versions", FAIL, "; ".join(unlike), "install the same on all hosts")
    return Finding("versions", OK, ", ".join(f"{name} {number}" for name, number in own.items()))


def list_gpus() -> list[list[str]]:
    """What nvidia-smi, which takes no memory of them, says of each that a run would use."""
    if os.environ.get("DS_ACCELERATOR") == "cpu" or not shutil.which("nvidia-smi"):
        return []
    words = ["nvidia-smi", f"--query-gpu={SMI}", "--format=csv,noheader,nounits"]
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        words.append(f"--id={os.environ['CUDA_VISIBLE_DEVICES']}")
    said = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
    return [[cell.strip() for cell in line.split(",")] for line in said.strip().splitlines()]


def check_gpus(gpus: list[list[str]], slots: int) -> Iterator[Finding]:
    """`slots`: ranks that the hostfile wants here; ranks may share a CPU."""
    names = ", ".join(sorted({gpu[0] for gpu in gpus}))
    found = f"{len(gpus)} × {names}" if gpus else "none in use: ranks run on the CPU"
    have = len(gpus) or slots
    yield judged("gpus", have, slots, slots, found, f"the hostfile wants {slots} of this host")
    for number, (_, *cells) in enumerate(gpus):
        # some GPUs do not know all: [N/A]
        used, total, busy, errors = (float(c) if c.isdecimal() else 0.0 for c in cells)
        if errors:
            found = f"number {number} has {errors:.0f} uncorrected memory errors"
            yield Finding("gpus", FAIL, found, "reset it, or leave the host out")
        free = min(100 * (1 - used / max(1.0, total)), 90 if busy > 5 else 100)
        if free < 95:
            found = f"number {number} is busy: {used:,.0f} of {total:,.0f} MiB, {busy:.0f} %"
            advice = "end the other processes (nvidia-smi), or leave it out"
            yield judged("gpus", free, 80, 95, found, advice)


def check_names(hosts: Sequence[str]) -> Finding:
    """Those of the hostfile, and the host's own, which some launchers look up. Ranks do not: they
    listen where a way leads to the other hosts."""
    names = [*hosts, *([] if "GLOO_SOCKET_IFNAME" in os.environ else [socket.gethostname()])]
    advice = "add it to DNS or /etc/hosts"
    for name in names:
        try:
            socket.getaddrinfo(name, None)
        except OSError:
            status = FAIL if name in hosts else WARN
            return Finding("names", status, f"{name} does not resolve", advice)
    return Finding("names", OK, f"known: {', '.join(names[:4])}{' …' * (len(names) > 4)}")


def check_limits() -> Iterator[Finding]:
    """Open files, of which a connection to another rank is one, and /dev/shm, where loaders and
    gloo have their buffers."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if most == resource.RLIM_INFINITY else most
    advice = "raise the hard limit: ulimit -Hn, limits.conf or that of the service"
    yield judged("open files", most, 256, 4096, f"at most {most:,}", advice)
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    advice = "clear or enlarge it; in a container: --shm-size=8g"
    yield judged("/dev/shm", free, 64 * MIB, GIB, f"{sized(free)} free", advice)


def check_folder(file: Path, several: bool, writes: bool) -> Iterator[Finding]:
    """The run's folder: how late `file` of the first host is seen there, which `writes` it once the
    others have looked; room, and speed, by a file without a name that reaches the disk."""
    start, folder, late = time.monotonic(), file.parent, 0.0
    if writes:
        time.sleep(several)
        with contextlib.suppress(OSError):
            write_text(file, "")
    else:
        while not file.exists() and (late := time.monotonic() - start) < NEVER_S:
            time.sleep(0.05)
        advice = "all hosts must share the run's folder, mounted with an actimeo of a few seconds"
        seen = "not seen in" if late >= NEVER_S else "seen after"
        found = f"{folder}: the first host's file was {seen} {late:.1f} s"
        yield judged("shared folder", -late, -NEVER_S + 1, -5, found, advice)
    start = time.monotonic()
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            for _ in range(WRITTEN // MIB):
                probe.write(os.urandom(MIB))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        advice = "make room there, or give a --run-dir that all hosts can write"
        yield Finding("disk", FAIL, f"{folder}: {error.strerror}", advice)
        return
    speed = WRITTEN / max(time.monotonic() - start, 1e-9)
    free, advice = shutil.disk_usage(folder).free, "checkpoints may not fit, or take long"
    yield judged("disk", free, GIB // 4, 20 * GIB, f"{folder}: {sized(free)} free", advice)
    yield judged("disk speed", speed, MIB, 50 * MIB, f"{sized(speed)}/s", advice)


def check_port(port: int) -> Finding:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("", port))
        except OSError as error:
            advice = "end the run that has it, or give the launcher another --master_port"
            return Finding("port", FAIL, f"{port}: {error.strerror}", advice)
    return Finding("port", OK, f"{port} is free")


def look(file: Path, slots: int, port: int, hosts: Sequence[str]) -> dict[str, Any]:
    """At everything. `port`: that the first host listens on, 0 elsewhere."""
    gpus: list[list[str]] = []
    try:
        findings = list(check_gpus(gpus := list_gpus(), slots))
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stdout", None) or error).strip()
        findings = [Finding("gpus", FAIL, f"nvidia-smi: {said}", "see dmesg, or leave it out")]
    findings += [check_names(hosts), *check_limits(), *check_folder(file, len(hosts) > 1, port > 0)]
    findings += [check_port(port)] if port else []
    found = {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
    return {"findings": findings, "versions": found, "gpus": len(gpus), "clock": time.time()}


if __name__ == "__main__":
    outlive_output()
    where, slots, port, *names = sys.argv[1:]
    print(json.dumps(look(Path(where), int(slots), int(port), names)))
