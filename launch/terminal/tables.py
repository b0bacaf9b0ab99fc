"""What is shown to a person: tables, also those of the report, lines above the progress bar, and
durations in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import rich.table
from rich.box import SIMPLE_HEAD
from rich.console import Console
from tqdm import tqdm

from common.output import plain
from models.metrics.retrieval import FIGURES, RECALL_AT

REPORT = "report.html"  # the page about a run, in its folder
SEVERAL = 1.05  # answers to a query on average; a few equal samples are not worth two columns
DIRECTIONS = {"image_to_text": "image → text", "text_to_image": "text → image"}


@dataclass(frozen=True)
class Table:
    """Cells are text; `title` says what they are."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    @classmethod
    def of(cls, title: str, rows: Sequence[Mapping[str, str]], note: str = "") -> Table:
        """Of rows that have their cells by column."""
        header = list(dict.fromkeys(column for row in rows for column in row))
        return cls(title, header, [[row.get(name, "–") for name in header] for row in rows], note)

    def for_terminal(self) -> rich.table.Table:
        """Columns of numbers end at the right."""
        table = rich.table.Table(
            title=self.title,
            title_justify="left",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
            caption=self.note or None,
            caption_justify="left",
        )
        for name, *cells in zip(self.header, *self.rows):
            numbers = all(cell[:1] in "0123456789–" for cell in cells)
            table.add_column(name, justify="right" if numbers else "left", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        return table


def retrieval_table(
    title: str,
    evaluations: Sequence[Mapping[str, float]],
    num_samples: Mapping[str, int],
    languages: Mapping[str, Mapping[str, Mapping[str, float]]] | None = None,
) -> rich.table.Table:
    """The rows of `retrieval_rows` for the terminal. `languages`: by set and language the same
    figures with `num_samples`, of one evaluation."""
    if languages:
        num_samples, evaluations = _with_languages(evaluations[0], num_samples, languages)
    return Table.of(title, retrieval_rows(evaluations, num_samples)).for_terminal()


def retrieval_rows(
    evaluations: Sequence[Mapping[str, float]], num_samples: Mapping[str, int]
) -> list[dict[str, str]]:
    """The recalls of each held-out set and direction, by column, first → last of `evaluations`
    (one: just that).

    The median rank, the number of answers of a query and, of more than two evaluations, the best
    one are there where they are known. `num_samples`: of each set.
    """
    last = evaluations[-1]
    several = any(key.endswith("_answers") and number >= SEVERAL for key, number in last.items())
    rows = []
    for held_out, count in num_samples.items():
        for direction in _directions(evaluations[0], held_out):
            key = f"{held_out}/{direction}"
            samples = _with_both(last, held_out, direction, count)
            # where these are not known, each sample is asked about once, and is its own answer
            alone = (samples, samples, 1.0, min(1.0, RECALL_AT[-1] / max(1, samples)))
            queries, candidates, answers, chance = (
                last.get(f"{key}_{name}", value) for name, value in zip(FIGURES, alone)
            )
            row = {
                "held-out set": f"{held_out} ({samples})",
                "query → answer": direction.replace("_to_", " → ").replace("_dual_", ", dual "),
            }
            if several:
                row["queries → candidates"] = f"{queries:g} → {round(candidates, 1):g}"
                row["answers"] = f"{answers:.3g}"
            for k in RECALL_AT:
                row[f"R@{k} %"] = _first_to_last(evaluations, f"{key}_R@{k}", "{:.1%}")
            if f"{key}_median_rank" in last:
                row["median rank"] = _first_to_last(evaluations, f"{key}_median_rank", "{:g}")
            if len(evaluations) > 2:
                best = max(evaluations, key=lambda values: values[f"{key}_R@{RECALL_AT[-1]}"])
                recall, step = best[f"{key}_R@{RECALL_AT[-1]}"], best[f"{held_out}/step"]
                row[f"best R@{RECALL_AT[-1]} %"] = f"{100 * recall:.1f} (step {step:,})"
            row[f"chance R@{RECALL_AT[-1]} %"] = f"{100 * chance:.1f}"
            rows.append(row)
    return rows


def _directions(values: Mapping[str, float], held_out: str) -> list[str]:
    """Those in which a set was measured, such as `tone_to_text`."""
    prefix, end = f"{held_out}/", "_R@1"
    own = [key for key in values if key.startswith(prefix) and key.endswith(end)]
    return [key[len(prefix) : -len(end)] for key in own]


def _first_to_last(evaluations: Sequence[Mapping[str, float]], key: str, words: str) -> str:
    ends = evaluations if len(evaluations) == 1 else (evaluations[0], evaluations[-1])
    return " → ".join(words.format(values[key]).removesuffix("%") for values in ends)


def _with_languages(
    values: Mapping[str, float],
    num_samples: Mapping[str, int],
    languages: Mapping[str, Mapping[str, Mapping[str, float]]],
) -> tuple[dict[str, int], list[dict[str, float]]]:
    """The sets, each followed by its languages as sets of their own."""
    sizes: dict[str, int] = {}
    figures = dict(values)
    for held_out, number in num_samples.items():
        sizes[held_out] = number
        for language, own in languages.get(held_out, {}).items():
            sizes[f"{held_out}, {language}"] = int(own["num_samples"])
            figures |= {f"{held_out}, {language}/{key}": value for key, value in own.items()}
    return sizes, [figures]


def _with_both(values: Mapping[str, float], held_out: str, direction: str, count: int) -> int:
    """Samples of a held-out set that have both halves of the pair of `direction`. `count`: of the
    set, where the run has one pair."""
    first, second = direction.removesuffix("_dual_softmax").split("_to_")
    names = (f"{held_out}/num_samples/{a}_{b}" for a, b in ((first, second), (second, first)))
    return int(next((values[name] for name in names if name in values), count))


def retrieval_report(
    title: str, evaluations: Sequence[Mapping[str, float]], num_samples: Mapping[str, int]
) -> rich.table.Table | str:
    """`retrieval_table`, or one line where there is no held-out set (`num_samples` is empty)."""
    if num_samples:
        return retrieval_table(title, evaluations, num_samples)
    return (
        "no samples were held out (--val-fraction 0), so nothing was evaluated; to hold samples "
        "out, train a new run with --val-fraction 0.1 or --val-data SPEC"
    )


def show(thing: object) -> None:
    """Print above the progress bar, if there is one."""
    thing, width = plain(thing) if isinstance(thing, str) else thing, max(100, Console().width)
    if isinstance(thing, rich.table.Table):
        # it is shown whole: a narrow terminal breaks its lines, and loses no number
        whole = Console(width=1000, markup=False, emoji=False)
        width = max(width, whole.measure(thing).maximum)
    console = Console(highlight=False, markup=False, emoji=False, width=width)
    with console.capture() as captured:
        console.print(thing)
    tqdm.write(captured.get().rstrip("\n"))


def duration(seconds: float) -> str:
    """Such as `740 ms`, `12.3 s`, `4 min 10 s`, `5 h 20 min` and `3 days 4 h`."""
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    if seconds < 3600:
        units, (large, small) = (60, 1), ("min", "s")
    elif seconds < 86400:
        units, (large, small) = (3600, 60), ("h", "min")
    else:
        units, (large, small) = (86400, 3600), ("days", "h")
    whole, rest = divmod(round(seconds / units[1]), units[0] // units[1])
    large = "day" if (whole, large) == (1, "days") else large
    return f"{whole:,} {large}" + (f" {rest} {small}" if rest else "")
