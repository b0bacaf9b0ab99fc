"""Tables in the terminal, above the progress bar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from common.output import plain
from models.metrics.retrieval import FIGURES, RECALL_AT

SEVERAL = 1.05  # answers to a query on average; a few equal samples are not worth two columns
DIRECTIONS = {"image_to_text": "image → text", "text_to_image": "text → image"}


def measured_directions(values: Mapping[str, float], held_out: str) -> dict[str, str]:
    """Of the recalls of a held-out set: name -> in words, `tone_to_text` -> "tone → text"."""
    prefix, end = f"{held_out}/", "_R@1"
    found = [
        key[len(prefix) : -len(end)]
        for key in values
        if key.startswith(prefix) and key.endswith(end)
    ]
    return {key: key.replace("_to_", " → ") for key in found}


def retrieval_table(
    title: str,
    evaluations: Sequence[Mapping[str, float]],
    num_samples: Mapping[str, int],
    languages: Mapping[str, Mapping[str, Mapping[str, float]]] | None = None,
) -> Table:
    """Rows: held-out set and direction; columns: R@1, R@5, R@10 and, where it was measured, the
    median rank, each as first → last of `evaluations` (one: just that). Where queries have several
    answers, the numbers of both too. `languages`: by set and language the same figures with
    `num_samples`, of one evaluation."""
    if languages:
        num_samples, evaluations = _with_languages(evaluations[0], num_samples, languages)
    with_median = all(
        key.removesuffix("_R@1") + "_median_rank" in values
        for values in evaluations
        for key in values
        if key.endswith("_R@1")
    )
    table = Table(title=title, title_justify="left")
    for name in ("held-out set", "query → answer"):
        table.add_column(name, no_wrap=True)
    with_answers = any(
        key.endswith("_answers") and value >= SEVERAL for key, value in evaluations[-1].items()
    )
    for name in (
        *(["queries → candidates", "answers"] if with_answers else []),
        *(f"R@{k} %" for k in RECALL_AT),
        *(["median rank"] if with_median else []),
        f"chance R@{RECALL_AT[-1]} %",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for held_out, count in num_samples.items():
        for key, direction in measured_directions(evaluations[0], held_out).items():
            cells = [
                " → ".join(
                    f"{100 * values[f'{held_out}/{key}_R@{k}']:.1f}" for values in evaluations
                )
                for k in RECALL_AT
            ]
            if with_median:
                cells.append(
                    " → ".join(
                        f"{values[f'{held_out}/{key}_median_rank']:g}" for values in evaluations
                    )
                )
            with_both = _with_both(evaluations[-1], held_out, key, count)
            asked = asked_of(evaluations[-1], f"{held_out}/{key}", with_both)
            table.add_row(
                f"{held_out} ({with_both})",
                direction,
                *(asked.words() if with_answers else ()),
                *cells,
                f"{100 * asked.chance:.1f}",
            )
    return table


class Asked(NamedTuple):
    """Of the queries of a direction, in the order of `models.metrics.retrieval.FIGURES`."""

    queries: float
    candidates: float
    answers: float
    chance: float

    def words(self) -> tuple[str, str]:
        return f"{self.queries:g} → {self.candidates:g}", f"{self.answers:.3g}"


def asked_of(values: Mapping[str, float], direction: str, count: int) -> Asked:
    """From the figures of a direction; where it has none, each of `count` samples is asked about
    once, and is its own answer."""
    if f"{direction}_{FIGURES[0]}" in values:
        return Asked(*(values[f"{direction}_{name}"] for name in FIGURES))
    return Asked(count, count, 1.0, min(1.0, RECALL_AT[-1] / max(1, count)))


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
    first, second = direction.split("_to_")
    names = (f"{held_out}/num_samples/{a}_{b}" for a, b in ((first, second), (second, first)))
    return int(next((values[name] for name in names if name in values), count))


def retrieval_report(
    title: str, evaluations: Sequence[Mapping[str, float]], num_samples: Mapping[str, int]
) -> Table | str:
    """`retrieval_table`, or one line where there is no held-out set (`num_samples` is empty)."""
    if num_samples:
        return retrieval_table(title, evaluations, num_samples)
    return (
        "no samples were held out (--val-fraction 0), so nothing was evaluated; to hold samples "
        "out, train a new run with --val-fraction 0.1 or --val-data SPEC"
    )


def show(thing: object, first_rank: bool = True) -> None:
    """Print above the progress bar, if there is one."""
    if not first_rank:
        return
    thing = plain(thing) if isinstance(thing, str) else thing
    # a table is shown whole: a narrow terminal breaks its lines, and loses no number
    needed = (
        Console(width=1000, markup=False, emoji=False).measure(thing).maximum
        if isinstance(thing, Table)
        else 0
    )
    console = Console(
        highlight=False, markup=False, emoji=False, width=max(100, needed, Console().width)
    )
    with console.capture() as captured:
        console.print(thing)
    tqdm.write(captured.get().rstrip("\n"))
