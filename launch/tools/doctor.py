"""Looks for what would break a run, before its time on the machines begins.

    python -m launch.tools.doctor                                  # this machine
    python -m launch.tools.doctor --hostfile HOSTS -- OPTIONS      # all hosts, and the planned run

Three rounds ask all hosts at once: to look at themselves, to send each other messages, and for a
dry run with the OPTIONS of train.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

from common.command_line import CommandParser
from common.files import remove, write_text
from common.output import outlive_output, plain
from launch.config.options import make_parser as make_train_parser
from launch.run.hosts import NAME
from launch.tools.command import run_tool
from launch.tools.machine_checks import FAIL, OK, WARN, Finding, check_versions, judged

# Keeps what it starts in a group of its own, and ends it when stdin closes: when ssh, or this
# program, is gone.
GUARD = """exec 3<&0; cd "$0" || exit; setsid "$@" </dev/null 3<&- & p=$!
{ cat; kill -- -$p; } <&3 >/dev/null 2>&1 & exec 3<&-; wait $p"""
STDIN = os.pipe()
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")
# beginnings of the names of variables that other hosts get, too
PASSED_ON = re.compile(
    "(CUDA|DS|GLOO|NCCL|OMP|PYTHON|WYE)|(HF_HOME|HF_HUB_OFFLINE|(LD_LIBRARY_)?PATH)$"
)
# by round: the longest wait in seconds, and what to do where there is no answer
ROUNDS = {
    "machine": (180, "try ssh HOST true; it must have this folder and this interpreter"),
    "links": (240, "a firewall, or the wrong GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"),
    "planned run": (3600, "see what train.py --dry-run says there"),
}
OF_PLAN = ("data:", "ranks:", "plan:", "predicted:")
Answers = dict[str, dict[str, Any]]  # by host


def read_hosts(path: Path) -> dict[str, int]:
    """Slots by name, of lines such as `node1 slots=8`, as DeepSpeed's launcher has them. Errors:
    ValueError."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    lines = [found for line in lines if (found := line.partition("#")[0].strip())]
    matches = [re.fullmatch(rf"({NAME.pattern})\s+slots=([1-9]\d*)", line) for line in lines]
    hosts = {match[1]: int(match[2]) for match in matches if match}
    if not lines or len(hosts) < len(lines):
        wrong = [line for line, match in zip(lines, matches) if not match] or lines
        raise ValueError(f"--hostfile {path} has {wrong[:1]}; it needs node1 slots=8 for each host")
    return hosts


def ask(check: str, words: Mapping[str, Sequence[str]]) -> Answers:
    """What hosts answer to these words for Python, in this folder and environment; a finding where
    one fails."""
    with ThreadPoolExecutor(len(words)) as pool:
        try:
            return dict(zip(words, pool.map(lambda host: _ask(check, host, words[host]), words)))
        except BaseException:  # such as Ctrl-C: what was started ends
            os.close(STDIN[1])
            raise


def _ask(check: str, host: str, words: Sequence[str]) -> dict[str, Any]:
    """Its `findings` and what else its line of JSON has, and how many seconds its clock is `off`,
    beyond what the time of the question explains; without these if it fails."""
    settings = [f"{k}={v}" for k, v in os.environ.items() if PASSED_ON.match(k)]
    command = ["sh", "-c", GUARD, os.getcwd(), "env", *settings, sys.executable, *words]
    command = [*SSH, "--", host, shlex.join(command)] if host else command
    before, (limit_s, advice) = time.time(), ROUNDS[check]
    try:
        done = subprocess.run(command, stdin=STDIN[0], stdout=PIPE, stderr=STDOUT, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"findings": [(check, FAIL, f"no answer in {limit_s} s", advice)]}
    after, said = time.time(), done.stdout.decode(errors="replace")
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if done.returncode:
        wrong = ([line for line in lines if "rror: " in line] or lines or ["it failed"])[-1]
        return {"findings": [(check, FAIL, wrong, advice)]}
    plan = "\n".join(line for line in lines if line.startswith(OF_PLAN))
    answer: dict[str, Any] = {"findings": [(check, OK, plan)] if plan else []}
    answer |= next((json.loads(line) for line in lines if line.startswith('{"')), {})
    clock = answer.get("clock", before)
    return {**answer, "off": max(0.0, clock - after, before - clock)}


def examine(
    hosts: Mapping[str, int], run_dir: Path, port: int, options: Sequence[str]
) -> Iterator[tuple[str, Finding]]:
    """(host, finding) of everything. `hosts`: slots by name; "" is this machine, without ssh."""
    file, first = run_dir.absolute() / f".doctor-{os.getpid()}", next(iter(hosts))
    module = ("-m", "launch.tools.machine_checks", str(file))
    given = {h: [str(n), str(port * (h == first))] for h, n in hosts.items()}
    try:
        answers = ask(
            "machine", {h: [*module, *own, *filter(None, hosts)] for h, own in given.items()}
        )
    finally:
        remove(file, within=run_dir)
    reached = {
        h: slots or answers[h]["gpus"] or 1 for h, slots in hosts.items() if "off" in answers[h]
    }
    for host in reached:
        yield host, check_versions(*(answers[h]["versions"] for h in (host, [*reached][0])))
        off, advice = answers[host]["off"], "synchronise it (chrony, ntpd): files would seem old"
        yield host, judged("clock", -off, -30, -2, f"{off:.0f} s off", advice)
    yield from _findings(answers)

    ranks, before, links = sum(reached.values()), 0, {}
    for host, slots in reached.items():
        place = [host or "here", before, slots, ranks, first or "127.0.0.1", port]
        links[host] = ["-m", "launch.tools.link_checks", *map(str, place)]
        before += slots
    if ranks > 1 and len(reached) == len(hosts):
        yield from _findings(ask("links", links))
    if options and reached:
        words = ["--ranks", str(ranks), *options] if first else options
        plan = ["train.py", "--dry-run", *words]
        yield from _findings(ask("planned run", dict.fromkeys(reached, plan)))


def _findings(answers: Answers) -> Iterator[tuple[str, Finding]]:
    for host, answer in answers.items():
        yield from ((host, Finding(*each)) for each in answer["findings"])


def check_launcher(hosts: Mapping[str, int]) -> Iterator[tuple[str, Finding]]:
    """Of this machine, where the run is started: DeepSpeed's launcher reaches several hosts by pdsh;
    others do without."""
    if len(hosts) > 1:
        have = [name for name in ("pdsh", "mpirun") if shutil.which(name)]
        status = OK if "pdsh" in have else WARN if have else FAIL
        found = f"{have[0]} is there" if status == OK else "pdsh is not installed here"
        advice = "deepspeed --hostfile needs it: apt install pdsh, or start with another launcher"
        yield "", Finding("launcher", status, found, "" if status == OK else advice)


def show(found: Sequence[tuple[str, Finding]]) -> None:
    """As a table, in which hosts that are all right share a row, and those with one fault."""
    rows: dict[tuple[str, ...], tuple[Finding, list[str]]] = {}
    for host, each in found:
        rows.setdefault(each[:2] if each.status == OK else each, (each, []))[1].append(host)
    width = max(60, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 10_000
    for each, hosts in rows.values():
        words = each.found + f"  ({len(hosts)} hosts)" * (len(hosts) > 1)
        if each.status != OK:
            some = ", ".join(hosts[:4]) + f" and {len(hosts) - 4} more" * (len(hosts) > 4)
            words = f"{some}: " * bool(some) + f"{each.found}\n→ {each.advice}"
        wrap = textwrap.TextWrapper(width, f"{each.status:6}{each.check:15}", " " * 23)
        wrap.break_long_words = wrap.break_on_hyphens = False  # paths and flags can be copied
        for line in plain(words).splitlines():
            print(wrap.fill(line))
            wrap.initial_indent = " " * 21


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m launch.tools.doctor",
        usage="%(prog)s [--hostfile FILE] [--run-dir DIR] [--port N] [--json FILE] [-- OPTIONS]",
        description="Look for what would break a run, on all its hosts: versions, GPUs, names, "
        "limits, disks, clocks, the shared folder, the port, links between ranks. With OPTIONS, "
        "those of train.py, also data and plan of the run, without training. Exit status: 0 "
        "nothing has failed, 1 something has.",
    )
    add = parser.add_argument
    add("--hostfile", type=Path, metavar="FILE", help="lines: node1 slots=8 (default: this host)")
    shared = "of the run, on all hosts; made where missing (default: that of OPTIONS, else runs)"
    add("--run-dir", type=Path, metavar="DIR", help=shared)
    of_launcher = "that the launcher uses, --master_port (default: 29500)"
    add("--port", type=int, metavar="N", default=29500, help=of_launcher)
    add("--json", type=Path, metavar="FILE", help="write the findings there, too")
    add("options", nargs="*", metavar="OPTIONS", help="those of train.py, after --")
    return parser


def main(arguments: argparse.Namespace) -> int:
    run_dir, file = arguments.run_dir, arguments.json
    # hosts are asked by a command that keeps them as they are
    options = make_train_parser().words(arguments.options)
    hosts = read_hosts(arguments.hostfile) if arguments.hostfile else {"": 0}
    run_dir = run_dir or Path(dict(zip(options, options[1:])).get("--run-dir", "runs"))
    run_dir.mkdir(parents=True, exist_ok=True)
    found = [*check_launcher(hosts), *examine(hosts, run_dir, arguments.port, options)]
    show(found)
    if file:
        listed = [{"host": host, **each._asdict()} for host, each in found]
        write_text(file, json.dumps(listed, indent=1) + "\n")
    failed = dict.fromkeys(each.check for _, each in found if each.status == FAIL)
    print(f"not ready: {', '.join(failed)}" if failed else "ready")
    return 1 if failed else 0


def run(arguments: list[str] | None = None) -> int:
    return run_tool(make_parser(), main, arguments)


if __name__ == "__main__":
    outlive_output()
    sys.exit(run())
