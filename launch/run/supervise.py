"""Keeps a run going: starts a command, and again from the newest checkpoint when it fails.

`launch/supervise.sh` runs it. It needs nothing but Python itself, so that it also runs on a machine
that only starts others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from common.command_line import CommandParser
from common.files import make_folder, remove, write_text
from common.output import INTERRUPTED, outlive_output, plain, run_program
from launch.run.elastic import ElasticCommand, Limits
from launch.run.hosts import Host

PROGRAM = "supervise.sh"
STOPPED = 75  # as in launch/run/stopping.py, which imports what this program does without
WRONG_USAGE = 2
NO_PROGRAM = (126, 127)  # exit status of a shell that could not run a command
TICK_S = 0.2
TELL_EVERY_S = 1.0
TAIL = 1 << 16  # bytes; a line of metrics.jsonl is shorter
CHECKPOINT = re.compile("step-([0-9]{1,18})")


def say(message: str) -> None:
    print(f"{PROGRAM}: {plain(message)}", file=sys.stderr, flush=True)


class Progress:
    """How far a run has come, by the files of its folder, which may be another one's work: what they
    hold is read up to a limit and taken only in the form in which train.py writes it."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir

    @property
    def checkpoint(self) -> str:
        """The name of the newest checkpoint; "none" without one."""
        text = _end_of(self.run_dir / "checkpoints" / "latest").strip()
        return text if CHECKPOINT.fullmatch(text) else "none"

    @property
    def checkpoint_step(self) -> int:
        found = CHECKPOINT.fullmatch(self.checkpoint)
        return int(found[1]) if found else 0

    @property
    def step(self) -> int:
        """Of the last whole line of metrics.jsonl; 0 without one."""
        lines = _end_of(self.run_dir / "metrics.jsonl").split("\n")[:-1]
        try:
            step = json.loads(lines[-1])["step"]
        except (IndexError, KeyError, TypeError, ValueError, RecursionError):
            return 0
        return step if isinstance(step, int) else 0

    @property
    def is_done(self) -> bool:
        return (self.run_dir / "done").exists()

    @property
    def written_ns(self) -> int:
        """When metrics.jsonl was written last; 0 where it is not there."""
        try:
            return (self.run_dir / "metrics.jsonl").stat().st_mtime_ns
        except OSError:
            return 0


def _end_of(path: Path) -> str:
    """The last `TAIL` bytes of a file as text; "" for what is no file or is not there."""
    try:
        # without O_NONBLOCK, opening a pipe that somebody has put there would wait for a writer
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            return ""
        file.seek(max(0, found.st_size - TAIL))
        return file.read(TAIL).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class Failure:
    """The end of a start that failed. `time_s`: when; `step`: how far training was."""

    time_s: float
    step: int


class Supervisor:
    """Runs `command` until the run in `run_dir` is done. `restarts`: failures in a row without a new
    checkpoint between them; `pause_s`: between an end and the next start; `elastic`: what starts the
    command on the hosts that are there."""

    def __init__(
        self,
        command: Sequence[str],
        run_dir: Path,
        restarts: int = 3,
        pause_s: float = 10,
        elastic: ElasticCommand | None = None,
    ):
        self.command, self.run_dir = list(command), run_dir
        self.restarts, self.pause_s, self.elastic = restarts, pause_s, elastic
        self.progress = Progress(run_dir)
        self.asked: signal.Signals | None = None  # to end
        self.at_once = False
        self._child: subprocess.Popen | None = None
        self._told_s: float | None = None
        self._hosts: list[Host] | None = None

    def listen(self) -> None:
        """From now on signals ask the run to end; SIGUSR2, with `elastic`, to start anew."""
        wanted = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]
        for number in [*wanted, *([signal.SIGUSR2] if self.elastic else [])]:
            if signal.getsignal(number) != signal.SIG_IGN:  # as `nohup` asks for
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.asked == signal.SIGINT:
            self.at_once = True
            return
        if number == signal.SIGUSR2 and (self.asked or self._child is None):
            return  # it ends already, or is about to start
        self.asked = signal.Signals(number)
        again = ", and starts again" if number == signal.SIGUSR2 else ""
        # not by `say`: this may interrupt a write to the same stream
        line = (
            f"{PROGRAM}: {self.asked.name}: the run saves and ends after its current step{again}\n"
        )
        with contextlib.suppress(OSError):
            os.write(2, line.encode())

    def run(self) -> int:
        """The exit status, see `usage`. Errors: OSError for a command that is not there."""
        failures, last = 0, None
        while True:
            if self.elastic is not None:
                hosts = self._wait_for_hosts(self.elastic)
                if hosts is None:
                    return STOPPED
                if hosts != self._hosts:  # which may have been the cause
                    failures, self._hosts = 0, hosts
                self.command = self._elastic_command(self.elastic, hosts)
            if self.asked:
                return STOPPED
            before = self.progress.checkpoint
            status = self._run_once(last)
            if self.at_once:
                return INTERRUPTED
            starts_again = self.asked == signal.SIGUSR2
            if status == STOPPED and starts_again:
                self.asked = None
                continue
            if status in (0, STOPPED, WRONG_USAGE):
                return status
            if self.asked and not starts_again:
                say(
                    f"the run ended with status {status} before it could save; the newest checkpoint "
                    f"is {self.progress.checkpoint}"
                )
                return STOPPED
            self.asked = None
            after = self.progress.checkpoint
            failures = failures + 1 if after == before else 1
            last = Failure(time.time(), self.progress.step)
            if failures > self.restarts:
                say(
                    f"given up: {failures} failures in a row without a new checkpoint, the last with "
                    f"status {status}; the newest checkpoint is {after}"
                )
                return 1
            pause_s = 0 if self.elastic is not None and failures == 1 else self.pause_s
            say(
                f"the run ended with status {status}; start {failures} of {self.restarts} from "
                f"checkpoint '{after}' in {pause_s:g} s"
            )
            self._wait(pause_s)

    def _run_once(self, last: Failure | None) -> int:
        """Start the command, pass on what is asked, and return its exit status, as a shell counts
        it."""
        written_ns, from_step = self.progress.written_ns, self.progress.checkpoint_step
        try:
            # in a session of its own: the launcher would answer the terminal's Ctrl-C by killing
            # the ranks
            self._child = subprocess.Popen(self.command, start_new_session=True)
        except OSError as error:
            self._say_missing(str(error.strerror))
            return WRONG_USAGE
        try:
            while True:
                if self.at_once:
                    say("ended at once")
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._child.wait(TICK_S)
                    break
                if self.asked:
                    self._tell()
                if last is not None and self._goes_on(last, written_ns, from_step):
                    last = None
        finally:
            self._end()
        return self._status()

    def _tell(self) -> None:
        """Ask by a file, every second: train.py does not look at a file that is older than itself,
        and it may still be starting."""
        now = time.monotonic()
        if self._told_s is None or now - self._told_s >= TELL_EVERY_S:
            make_folder(self.run_dir)
            write_text(self.run_dir / "stop", "")
            self._told_s = now

    def _goes_on(self, last: Failure, written_ns: int, from_step: int) -> bool:
        """Say, once it is so, that the run trains on after a failure. `written_ns`: of the lines at
        the start."""
        if self.progress.written_ns == written_ns or self.progress.step <= from_step:
            return False
        say(
            f"trains on from step {from_step}, {time.time() - last.time_s:.0f} s after it had ended; "
            f"steps lost: {max(0, last.step - from_step)}"
        )
        return True

    def _end(self) -> None:
        """End what the command has left, such as the ranks of a launcher that was killed."""
        child = self._child
        assert child is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        if self._told_s is not None:
            remove(self.run_dir / "stop", self.run_dir)
            self._told_s = None

    def _status(self) -> int:
        assert self._child is not None
        code, self._child = self._child.returncode, None
        status = code if code >= 0 else 128 - code
        if status == 0 and not self.progress.is_done:
            # DeepSpeed's launcher gives 0, too, when a signal has ended it
            say(
                f"the command ended without {self.run_dir}/done, which train.py makes when it is done"
            )
            return 1
        if status == WRONG_USAGE:
            say("exit status 2: another start would end the same way")
        elif status in NO_PROGRAM and not self.asked:
            self._say_missing(f"exit status {status}")
            return WRONG_USAGE
        return status

    def _say_missing(self, reason: str) -> None:
        say(
            f"{reason}: {self.command[0]!r}, or a program that it starts, is not there or may not be "
            "run; install it, or give its path"
        )

    def _wait_for_hosts(self, elastic: ElasticCommand) -> list[Host] | None:
        """The hosts of the next start, once they are enough; None: it was asked to end."""
        has_said = False
        has_named: set[str] = set()
        while True:
            hosts, late = elastic.pool.available(elastic.limits.most)
            if self.asked:
                return None
            for line in late:
                if line not in has_named:
                    say(line)
            has_named |= {*late}
            ranks = sum(host.slots for host in hosts)
            listed = f" ({', '.join(map(str, hosts))})" if hosts and elastic.has_file else ""
            if ranks >= elastic.limits.least:
                say(f"starts; ranks: {ranks}{listed}")
                return hosts
            if not has_said:
                say(f"waits until {elastic.limits.least} ranks are there; now: {ranks}{listed}")
                has_said = True
            self._wait(self.pause_s or 1)

    def _elastic_command(self, elastic: ElasticCommand, hosts: list[Host]) -> list[str]:
        if not elastic.has_file:
            return elastic.command(str(sum(host.slots for host in hosts)))
        make_folder(self.run_dir)
        file = self.run_dir / "hosts"
        write_text(file, "".join(f"{host}\n" for host in hosts))
        return elastic.command(str(file))

    def _wait(self, seconds: float) -> None:
        """Until the time is over or an end is asked for."""
        until = time.monotonic() + seconds
        while not self.asked and (left := until - time.monotonic()) > 0:
            time.sleep(min(TICK_S, left))


def value_of(words: Sequence[str], flag: str) -> str | None:
    """The value of the last `flag VALUE` or `flag=VALUE` among the words of a command."""
    value = None
    for word, following in zip(words, [*words[1:], None]):
        if word == flag:
            value = following
        elif word.startswith(f"{flag}="):
            value = word[len(flag) + 1 :]
    return value


def whole_number(text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number is needed")
    return int(text)


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=PROGRAM,
        usage="bash launch/supervise.sh [--restarts N] [--wait SECONDS] [--elastic MIN[:MAX]] "
        "-- COMMAND ... --run-dir RUN_DIR ...",
        description="Starts COMMAND, a launcher with train.py, and starts it again whenever it fails. "
        "Ctrl-C, SIGTERM, SIGUSR1 and a closed terminal ask the run to save and end after its current "
        "step, by RUN_DIR/stop; a second Ctrl-C ends it at once.",
        epilog="Exit status: 0 the run is done; 75 it was asked to end and goes on with the same "
        "command; 2 wrong usage, or a mistake that another start would meet again; 1 given up.",
    )
    parser.add_argument(
        "--restarts",
        type=whole_number,
        default=3,
        metavar="N",
        help="failures in a row without a new checkpoint between them (default: 3)",
    )
    parser.add_argument(
        "--wait",
        type=whole_number,
        default=10,
        metavar="SECONDS",
        help="between an end and the next start (default: 10)",
    )
    parser.add_argument(
        "--elastic",
        type=Limits.parse,
        metavar="MIN[:MAX]",
        help="COMMAND is DeepSpeed's launcher with --hostfile FILE or --num_gpus N. Before each start "
        "the GPUs that answer on the hosts that answer are counted (without nvidia-smi: the slots or "
        "N as written), and the run gets these, at most MAX; it waits while there are fewer than "
        "MIN. A failure after a new checkpoint is started again at once. SIGUSR2: the run saves, "
        "ends, and starts again with what is there then",
    )
    return parser


def supervisor_of(options: argparse.Namespace, command: list[str]) -> Supervisor:
    """Errors: ValueError, OSError for a command that cannot be supervised."""
    if not command:
        raise ValueError("no command given; it goes after --")
    run_dir, resume = value_of(command, "--run-dir"), value_of(command, "--resume")
    if not run_dir:
        raise ValueError(
            "the command has no --run-dir; name one (outside of @FILE), or every start would begin a "
            "run of its own"
        )
    if resume == "never" or resume is not None and resume.startswith(f"{run_dir}/"):
        raise ValueError(
            f"--resume {resume}: every start would begin there again; leave it out, or give auto or a "
            "checkpoint of another run"
        )
    elastic = None
    if options.elastic is not None:
        elastic = ElasticCommand.of(options.elastic, command)
    return Supervisor(command, Path(run_dir), options.restarts, options.wait, elastic)


def main(arguments: list[str] | None = None) -> int:
    """Arguments: without the program's name; the command follows "--"."""
    words = sys.argv[1:] if arguments is None else arguments
    split = words.index("--") if "--" in words else len(words)
    command = words[split + 1 :]

    parser = make_parser()
    options = parser.parse_args(words[:split])

    def supervise() -> int:
        supervisor = supervisor_of(options, command)
        supervisor.listen()
        return supervisor.run()

    return run_program(parser.prog, supervise)


def program() -> int:
    """What supervise.sh runs."""
    outlive_output()
    return main()
