"""The harness of the measurements: ways to do one thing, measured in turn, round by round.

A script declares its studies as functions and ends with `main("bench.SCRIPT")`. The parameters of
such a function are its flags, its docstring is what was predicted, and it returns a `Study`:

    def packing(steps: int = 4) -> Study:
        \"\"\"Texts packed by cost: at least 1.25 × as fast.\"\"\"
        return Study(
            "Texts packed by cost",
            {way: Way(partial(measure, way, steps)) for way in ("at random", "by cost")},
            (Column("step_s", "step, ms", "{:.0f}", 1e3), Column("step_s", "÷ at random")),
            reference="at random",
        )

    python bench/SCRIPT.py packing --rounds 3 --steps 2 --only cost

A ratio is taken within a round, because a machine is as fast as what else it does lets it be; the
table has the median of the rounds, least and most beside it. It is written to bench/out/ after each
measurement, so that an interruption loses none.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "bench" / "out"
MIB = 2**20
LIMIT_S = 1800.0

Figure = float | Sequence[float]
Figures = Mapping[str, Figure]


@dataclass(frozen=True)
class Way:
    """`measure` is called once a round, `once` in the first round alone, for what needs a run of
    its own. `against`: the way whose figures its own are divided by, the study's reference if not
    given. `exact`: False where it need not end with the same loss as the others."""

    measure: Callable[[], Figures]
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
    """`setting`: what all ways have in common. `equal`: a number that the exact ways must share
    with those that they are compared with, and the relative tolerance. `notes`: sentences below the
    table, made of what was seen. `predicted`: the docstring of the function that declares it."""

    title: str
    ways: Mapping[str, Way]
    columns: Sequence[Column]
    setting: str = ""
    reference: str | None = None
    rounds: int = 3
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
        to = self.study.ways[name].against or self.study.reference
        return list(zip(self.values(name, key), self.values(to, key))) if to else []

    def ratios(self, name: str, column: Column) -> list[Figure]:
        found = [
            [_picked(column, figure) for figure in pair] for pair in self.pairs(name, column.key)
        ]
        return [_divided(*(reversed(pair) if column.inverse else pair)) for pair in found]


def compare(study: Study, file: Path, rounds: int) -> Seen:
    """All ways in turn, as many times; the report goes to `file` and to the screen."""
    from tqdm import tqdm

    seen = Seen(study)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tqdm(total=rounds * len(study.ways), unit="run") as bar:
        for number in range(rounds):
            for name, way in study.ways.items():
                bar.set_postfix_str(name)
                figures = dict(way.measure())
                if number == 0 and way.once is not None:
                    figures |= way.once()
                seen.rounds.setdefault(name, []).append(figures)
                file.write_text(report(seen), encoding="utf-8")
                bar.update()
    print(file.read_text(encoding="utf-8"))
    _refuse_unequal(seen)
    return seen


def report(seen: Seen) -> str:
    """Markdown."""
    study = seen.study
    notes = list(study.notes(seen)) if seen.rounds.keys() == study.ways.keys() else []
    return "\n".join(
        [
            f"# {study.title}",
            "",
            *([study.predicted, ""] if study.predicted else []),
            f"{study.setting} Rounds in turn: {max(map(len, seen.rounds.values()))}; median "
            "(least – most).".strip(),
            "",
            "| | " + " | ".join(column.heading for column in study.columns) + " |",
            "|---" * (len(study.columns) + 1) + "|",
            *(_row(seen, name) for name in seen.rounds),
            *([""] if notes else []),
            *(f"- {note}" for note in notes),
            "",
        ]
    )


def _row(seen: Seen, name: str) -> str:
    note = "" if seen.study.ways[name].exact else " (another objective)"
    cells = []
    for column in seen.study.columns:
        found = [
            [part * column.scale for part in _parts(_picked(column, figure))]
            for figure in (
                seen.values(name, column.key) if column.form else seen.ratios(name, column)
            )
        ]
        cells.append(spread(found, column.form or "{:.2f}") if found else "–")
    return f"| {name}{note} | " + " | ".join(cells) + " |"


def spread(rounds: Sequence[Sequence[float]], form: str) -> str:
    """The median of each part over the rounds; of a single part also least and most."""
    medians = " / ".join(form.format(statistics.median(part)) for part in zip(*rounds))
    ends = [form.format(end) for end in (min(rounds)[0], max(rounds)[0])]
    return f"{medians} ({' – '.join(ends)})" if len(rounds[0]) == 1 < len(set(ends)) else medians


def _picked(column: Column, figure: Figure) -> Figure:
    return column.pick(figure) if column.pick and isinstance(figure, Sequence) else figure


def _parts(figure: Figure) -> Sequence[float]:
    return figure if isinstance(figure, Sequence) else (figure,)


def _divided(figure: Figure, by: Figure) -> Figure:
    if isinstance(figure, Sequence):
        return [a / b for a, b in zip(figure, _parts(by), strict=True)]
    return figure / by


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


def on_ranks(
    number: int, function: Callable[..., Any], *arguments: Any, started: bool = True
) -> list[Any]:
    """What a function of a module returns on that many ranks, each a fresh process of one thread
    in one process group, where that is `started`."""
    from ranks import run_ranks

    return run_ranks(number, function, *arguments, timeout_s=LIMIT_S, started=started)


def main(module: str) -> None:
    """The command line of a script. Its functions are those of the module that is imported by name,
    where the ranks find them, and not of `__main__`."""
    sys.path.insert(1, str(ROOT / "tests"))  # with ranks.py and nodes.py
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
        own.add_argument("--rounds", type=_positive, metavar="N", help="times each way is measured")
        own.add_argument("--only", metavar="WORD[,WORD]", help="ways whose name holds one of these")
        for flag in inspect.signature(studies[name]).parameters.values():
            several = isinstance(flag.default, tuple)
            own.add_argument(
                "--" + flag.name.replace("_", "-"),
                type=str if isinstance(flag.default, str) else _positive,
                default=flag.default,
                nargs="+" if several else None,
                metavar="DIR" if isinstance(flag.default, str) else "N",
                help="default: %(default)s",
            )
    given = vars(parser.parse_args())
    name = given.pop("study", next(iter(studies)))
    rounds, only = given.pop("rounds"), given.pop("only")
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
    compare(study, file, study.rounds if rounds is None else rounds)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number of at least 1")
    return int(text)


def chosen(study: Study, words: Sequence[str]) -> Study:
    """The ways whose name holds one of the words; one that is such a word is taken alone."""
    ways = {
        name: way
        for name, way in study.ways.items()
        if any(word == name or (word in name and word not in study.ways) for word in words)
    }
    return replace(study, ways=ways)
