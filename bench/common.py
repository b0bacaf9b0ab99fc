"""The harness of the measurements: ways to do one thing, measured in turn, round by round; the
programs that a measurement starts; what was found, in tables and in a file to go on from.

A script declares its studies as functions and ends with `main("bench.SCRIPT")`. The parameters of
such a function are its flags, its docstring is what was predicted, and it returns a `Study`:

    def split(steps: int = 12) -> Study:
        \"\"\"Two ranks with a tower each against one rank with both: 1.8 × as fast.\"\"\"
        return Study(
            "Two ranks against one",
            {way: Way(partial(measure, way, steps)) for way in ("single", "fork")},
            (Column("step_s", "step, ms", "{:.0f}", 1e3), Column("step_s", "÷ single")),
            reference="single",
        )

    python bench/SCRIPT.py split --rounds 3 --steps 2 --only fork

A ratio is taken within a round, because a machine is as fast as what else it does lets it be; the
table has the median of the rounds, least and most beside it. After each measurement the table goes
to bench/out/ and the figures to a JSON file beside it, from which `--resume` goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "bench" / "out"
MIB, GIB = 2**20, 2**30
LIMIT_S = 1800.0  # of what runs on ranks
# The kernel's peak never falls: only what a process takes in its last second can be missed.
SAMPLED_EVERY_S = 1.0

Figure = float | Sequence[float]
Figures = Mapping[str, Figure]


# -- ways in turn


@dataclass(frozen=True)
class Way:
    """`measure` is called once a round, `once` in the first round alone, for what needs a run of
    its own. `against`: the way whose figures its own are divided by, the study's reference if not
    given. `exact`: False where it need not end with the same loss as the others."""

    measure: Callable[..., Figures]
    once: Callable[[], Figures] | None = None
    against: str | None = None
    exact: bool = True


@dataclass(frozen=True)
class Column:
    """The figure `key` times `scale`; without a `form`, that of the way divided by that of the way
    it is compared with, `inverse` the other way round. `pick`: one of several figures."""

    key: str
    heading: str
    form: str = ""
    scale: float = 1.0
    inverse: bool = False
    pick: Callable[[Sequence[float]], float] | None = None


@dataclass(frozen=True)
class Study:
    """`setting`: what all ways have in common. `seeds`: rounds are seeds, which `measure` is given,
    and cells have their mean instead of the median. `equal`: a number that the exact ways must share
    with those that they are compared with, and the relative tolerance. `notes`: Markdown below the
    table, made of what was seen. `predicted`: the docstring of the function that declares it."""

    title: str
    ways: Mapping[str, Way]
    columns: Sequence[Column]
    setting: str = ""
    reference: str | None = None
    rounds: int = 3
    seeds: bool = False
    equal: tuple[str, float] | None = None
    notes: Callable[[Seen], Iterable[str]] = lambda seen: ()
    predicted: str = ""


@dataclass
class Seen:
    """The figures of each way by round."""

    study: Study
    rounds: dict[str, list[Figures]] = field(default_factory=dict)

    def values(self, name: str, key: str) -> list[Figure]:
        return [figures[key] for figures in self.rounds.get(name, ()) if key in figures]

    def median(self, name: str, key: str) -> float:
        return statistics.median(self.values(name, key))

    def pairs(self, name: str, key: str) -> list[tuple[Figure, Figure]]:
        """Round by round, a figure and that of the way it is compared with; none of a way that is
        compared with nothing."""
        to = self.study.ways[name].against or self.study.reference or ""
        both = zip(self.rounds.get(name, ()), self.rounds.get(to, ()))
        return [(own[key], other[key]) for own, other in both if key in own and key in other]

    def cell(self, name: str, column: Column) -> str:
        if column.form:
            found = [_parts(column, figure) for figure in self.values(name, column.key)]
        else:
            pairs = (reversed(p) if column.inverse else p for p in self.pairs(name, column.key))
            both = ([_parts(column, figure) for figure in pair] for pair in pairs)
            found = [[a / b for a, b in zip(*each, strict=True)] for each in both]
        scaled = [[part * column.scale for part in each] for each in found]
        middle = statistics.mean if self.study.seeds else statistics.median
        return spread(scaled, column.form or "{:.2f}", middle) if scaled else "–"


def _parts(column: Column, figure: Figure) -> Sequence[float]:
    several = isinstance(figure, Sequence)
    if several and column.pick:
        return (column.pick(figure),)
    return figure if several else (figure,)


def spread(
    rounds: Sequence[Sequence[float]],
    form: str,
    middle: Callable[[Iterable[float]], float] = statistics.median,
) -> str:
    """The middle of each part over the rounds; of a single part also (least – most)."""
    middles = " / ".join(form.format(middle(part)) for part in zip(*rounds))
    ends = [form.format(end) for end in (min(rounds)[0], max(rounds)[0])]
    return f"{middles} ({' – '.join(ends)})" if len(rounds[0]) == 1 < len(set(ends)) else middles


def table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(map(str, cells))} |\n" for cells in lines)


def compare(
    study: Study,
    file: Path,
    rounds: int,
    resume: bool = False,
    flags: Mapping[str, Any] = MappingProxyType({}),
) -> Seen:
    """All ways in turn, as many times; the report goes to `file` and to the screen. `resume`: what
    stands in the JSON beside it, where that was measured with the same flags, is not measured
    again."""
    from tqdm import tqdm

    file.parent.mkdir(parents=True, exist_ok=True)
    kept, seen = Kept(file.with_suffix(".json")), Seen(study)
    if resume and kept.records:
        if kept.records["flags"] != json.loads(json.dumps(dict(flags))):
            sys.exit(f"--resume: {kept.file} is of other flags: {kept.records['flags']}")
        seen.rounds = kept.records["rounds"]
    kept.records = {"flags": dict(flags), "rounds": seen.rounds}
    with tqdm(total=rounds * len(study.ways), unit="run") as bar:
        for number in range(rounds):
            for name, way in study.ways.items():
                bar.set_postfix_str(name)
                if len(seen.rounds.get(name, ())) <= number:
                    figures = dict(way.measure(number) if study.seeds else way.measure())
                    if number == 0 and way.once is not None:
                        figures |= way.once()
                    seen.rounds.setdefault(name, []).append(figures)
                    kept.write()
                bar.update()
                write(file, report(seen))
    print(file.read_text(encoding="utf-8"))
    _refuse_unequal(seen)
    return seen


def report(seen: Seen) -> str:
    """Markdown."""
    study = seen.study
    how = "Seeds: {}; mean" if study.seeds else "Rounds in turn: {}; median"
    how = how.format(max(map(len, seen.rounds.values())))
    notes = list(study.notes(seen)) if seen.rounds.keys() == study.ways.keys() else []
    rows = [
        [name if study.ways[name].exact else f"{name} (another objective)"]
        + [seen.cell(name, column) for column in study.columns]
        for name in seen.rounds
    ]
    parts = [
        f"# {study.title}",
        study.predicted,
        f"{study.setting} {how} (least – most).".strip(),
        table(["", *(column.heading for column in study.columns)], rows).rstrip(),
        "\n".join(notes),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _refuse_unequal(seen: Seen) -> None:
    if seen.study.equal is None:
        return
    key, tolerance = seen.study.equal
    for name in seen.rounds:
        for own, other in seen.pairs(name, key) if seen.study.ways[name].exact else ():
            if not math.isclose(own, other, rel_tol=tolerance):
                sys.exit(
                    f"{seen.study.title}: {key} must be the same in all ways, but with {name} it "
                    f"is {own} and not {other}"
                )


def main(module: str) -> None:
    """The command line of a script. Its functions are those of the module that is imported by name,
    where the ranks find them, and not of `__main__`."""
    script = importlib.import_module(module)
    studies = {study.__name__: study for study in script.STUDIES}
    parser = argparse.ArgumentParser(
        description=script.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parsers = {name: parser for name in studies}
    if len(studies) > 1:
        choices = parser.add_subparsers(dest="study", required=True, metavar="STUDY")
        for name, study in studies.items():
            what = study.__doc__.split(":")[0].replace("%", "%%")
            parsers[name] = choices.add_parser(name, help=what, description=study.__doc__)
    for name, own in parsers.items():
        own.add_argument("--rounds", type=_whole, metavar="N", help="times each way is measured")
        own.add_argument("--only", metavar="WORD[,WORD]", help="ways whose name holds one of these")
        own.add_argument("--resume", action="store_true", help="measure only what is missing")
        for flag in inspect.signature(studies[name]).parameters.values():
            word, default = "--" + flag.name.replace("_", "-"), flag.default
            if isinstance(default, bool):
                own.add_argument(word, action="store_true")
                continue
            texts = default == () or isinstance(default, str)  # else whole numbers
            has_zero = 0 in (default if isinstance(default, tuple) else (default,))
            own.add_argument(
                word,
                type=str if texts else partial(_whole, least=0 if has_zero else 1),
                default=default,
                nargs="+" if isinstance(default, tuple) else None,
                metavar="TEXT" if texts else "N",
                help="default: %(default)s",
            )
    given = vars(parser.parse_args())
    name = given.pop("study", next(iter(studies)))
    rounds, only, resume = given.pop("rounds"), given.pop("only"), given.pop("resume")
    asked = {**given, "only": only}
    try:
        study = replace(studies[name](**given), predicted=inspect.getdoc(studies[name]))
    except ValueError as error:
        parser.error(str(error))
    names = ", ".join(study.ways)
    if only:
        study = chosen(study, only.split(","))
    if not study.ways:
        parser.error(f"--only {only}: not among {names}")
    stem = module.rpartition(".")[2]
    file = OUT / (f"{stem}.md" if len(studies) == 1 else f"{stem}-{name}.md")
    compare(study, file, study.rounds if rounds is None else rounds, resume, asked)


def _whole(text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number of at least {least}")
    return int(text)


def chosen(study: Study, words: Sequence[str]) -> Study:
    """The ways whose name holds one of the words, with those that they are compared with; one that
    is such a word is taken alone."""
    ways = {
        name: way
        for name, way in study.ways.items()
        if any(word == name or (word in name and word not in study.ways) for word in words)
    }
    others = {way.against or study.reference for way in ways.values()}
    kept = {name: way for name, way in study.ways.items() if name in ways or name in others}
    return replace(study, ways=kept)


# -- what was found, in files


def write(file: Path, text: str) -> None:
    """The whole of it, or what was there before."""
    beside = file.with_name(f"{file.name}.partial")
    beside.write_text(text, encoding="utf-8")
    beside.replace(file)


class Kept:
    """Records by name, in a JSON file that is there after each of them."""

    def __init__(self, file: Path) -> None:
        self.file = file
        there = file.is_file()
        self.records: dict[str, Any] = json.loads(file.read_text("utf-8")) if there else {}

    def write(self) -> None:
        write(self.file, json.dumps(self.records, indent=1))


# -- functions in processes of their own


def on_ranks(
    number: int, function: Callable[..., Any], *arguments: Any, started: bool = True
) -> list[Any]:
    """What a function of a module returns on that many ranks, each a fresh process of one thread
    in one process group, where that is `started`."""
    sys.path.insert(1, str(ROOT / "tests"))
    from ranks import run_ranks

    return run_ranks(number, function, *arguments, timeout_s=LIMIT_S, started=started)


ALONE = """import importlib, json, sys
module, name, given = json.loads(sys.argv[1])
print(json.dumps(getattr(importlib.import_module(module), name)(*given)))"""


def alone(function: Callable[..., Any], *given: Any) -> Any:
    """What a function of a module returns in a fresh process of one thread."""
    words = json.dumps([function.__module__, function.__name__, given])
    run = subprocess.run(
        [sys.executable, "-c", ALONE, words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if run.returncode:
        sys.exit(f"{function.__name__} {given} ended with:\n{run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


# -- programs


class Program:
    """A program that has begun. What it says goes to `log`."""

    def __init__(
        self,
        command: Sequence[Any],
        log: Path,
        environment: Mapping[str, str] | None = None,
        folder: Path = ROOT,
    ) -> None:
        self.log, self.began = log, time.monotonic()
        with log.open("w", encoding="utf-8") as file:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                cwd=folder,
                env=environment,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def end(self, limit_s: float, peaks: dict[int, int] | None = None) -> int | None:
        """The status, when it has ended; None where `limit_s` from its beginning were over. Nothing
        that it started is left.

        `peaks` gets the largest resident size of each rank: torchrun and DeepSpeed's launcher
        number ranks by the variable RANK, which their loader processes inherit; the largest process
        of a rank counts.
        """
        try:
            while (status := self.process.poll()) is None:
                if (left := self.began + limit_s - time.monotonic()) <= 0:
                    break
                for process in below(self.process.pid) if peaks is not None else ():
                    note_peak(process, peaks)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(left if peaks is None else min(SAMPLED_EVERY_S, left))
        finally:
            kill_all(self.process)
        return status

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def last_words(self, most: int = 300) -> str:
        return (self.said().strip().splitlines() or ["nothing"])[-1][:most]


def below(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def note_peak(process: psutil.Process, peaks: dict[int, int]) -> None:
    with contextlib.suppress(psutil.Error, OSError, KeyError):  # it has ended, or is no rank
        rank = int(process.environ()["RANK"])
        peaks[rank] = max(peaks.get(rank, 0), resident_bytes(process.pid))


def kill_all(launcher: subprocess.Popen) -> None:
    """The launcher and all below it, and what has outlived it in its session. torchrun puts each
    rank in a session of its own, so a signal to a group would miss them."""
    if launcher.poll() is None:
        for process in [*below(launcher.pid), psutil.Process(launcher.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()


def unlaunched() -> dict[str, str]:
    """The environment without what a launcher that started this has put there, and offline."""
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    own = {name: value for name, value in os.environ.items() if name not in launched}
    offline = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    return own | offline | {"TOKENIZERS_PARALLELISM": "false"}


NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


def call(
    command: Sequence[Any], log: Path, what: str, ranks: int = 0, threads: int = 1
) -> list[int]:
    """Run `command` to its end, without a GPU and with so many threads a rank; returns the largest
    resident size of each rank. Ends this program where `what` fails."""
    # without a hostfile, for DeepSpeed's launcher may look for other machines
    own = {"OMP_NUM_THREADS": str(threads), "DLTS_HOSTFILE": "/nonexistent"}
    peaks: dict[int, int] = {}
    program = Program(command, log, unlaunched() | NO_GPU | own)
    status = program.end(math.inf, peaks)
    if status or not peaks.keys() >= set(range(ranks)):
        sys.exit(f"{what} ended with status {status}; {log} ends with:\n{program.said()[-1500:]}")
    return [peaks[rank] for rank in range(ranks)]


def resident_bytes(pid: int | str = "self", field: str = "VmHWM") -> int:
    """The most physical memory that a process has had; 0 for one that nobody has waited for."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = (line.split()[1] for line in text.splitlines() if line.startswith(f"{field}:"))
    return int(next(found, 0)) * 1024


# -- train.py


def settings(*given: str | Mapping[str, Any]) -> dict[str, Any]:
    """Settings of train.py's `--set`: mappings, or words KEY=VALUE. Later ones win."""
    found: dict[str, Any] = {}
    for each in given:
        words = (word.partition("=")[::2] for word in each.split()) if isinstance(each, str) else ()
        found |= dict(words) if isinstance(each, str) else each
    return found


def flags(options: Mapping[str, Any]) -> list[str]:
    return [word for key, value in options.items() for word in (f"--{key}", str(value))]


def train_arguments(given: Mapping[str, Any]) -> list[str]:
    texts = {k: v if isinstance(v, str | Path) else json.dumps(v) for k, v in given.items()}
    return ["--set", *(f"{key}={text}" for key, text in texts.items())]


def train_command(ranks: int, given: Mapping[str, Any]) -> list[str]:
    """train.py under DeepSpeed's launcher."""
    from engine.processes.start import free_port

    deepspeed = str(Path(sys.executable).parent / "deepspeed")
    where = flags({"num_gpus": ranks, "master_port": free_port()})
    return [deepspeed, "--quiet", *where, "train.py", *train_arguments(given)]


def read_metrics(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Lines of a run's metrics.jsonl: of its steps, and of evaluations on held-out samples.

    Raises ValueError for a run that is not done: DeepSpeed's launcher ends with status 0 even where
    a signal ended it.
    """
    if not (folder / "done").is_file():
        raise ValueError(f"{folder}: the run ended before its last step; start the command again")
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    return [line for line in lines if "loss" in line], [
        line for line in lines if "held_out" in line
    ]
