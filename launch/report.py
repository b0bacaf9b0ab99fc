"""What a person sees in the terminal: the plan of the run, the progress bar, the retrieval table."""

from __future__ import annotations

from typing import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from models.retrieval import RECALL_AT

DIRECTIONS = {"image_to_text": "image → text", "text_to_image": "text → image"}


def recalls(totals: Mapping[str, Sequence[float]], num_samples: int) -> dict[str, float]:
    """{"image_to_text_R@1": …} in 0..1 from the hits per direction."""
    return {
        f"{direction}_R@{k}": float(hits) / num_samples for direction, counts in totals.items() for k, hits in zip(RECALL_AT, counts)
    }


def retrieval_table(title: str, columns: Mapping[str, Mapping[str, float]], num_samples: Mapping[str, int]) -> Table:
    """Rows: held-out set and direction; columns: R@1, R@5, R@10 for each entry of `columns` (such as before and after)."""
    table = Table(title=title, title_justify="left")
    table.add_column("held-out set")
    table.add_column("direction")
    for name in columns:
        for k in RECALL_AT:
            table.add_column(f"{name} R@{k}".strip(), justify="right")
    table.add_column("chance R@10", justify="right")
    for held_out, count in num_samples.items():
        for key, direction in DIRECTIONS.items():
            cells = [f"{100 * values[f'{held_out}/{key}_R@{k}']:.1f} %" for values in columns.values() for k in RECALL_AT]
            table.add_row(f"{held_out} ({count})", direction, *cells, f"{100 * min(1.0, RECALL_AT[-1] / count):.1f} %")
    return table


def show(thing: object, first_rank: bool = True) -> None:
    """Print above the progress bar, if there is one."""
    if not first_rank:
        return
    console = Console(highlight=False)
    with console.capture() as captured:
        console.print(thing)
    tqdm.write(captured.get().rstrip("\n"))
