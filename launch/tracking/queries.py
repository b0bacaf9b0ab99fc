"""Queries of a held-out set with what the model finds for them: a table in W&B at every evaluation,
with pictures, right and wrong marked."""

from __future__ import annotations

from typing import Any

from data.index.sources import Source
from launch.run.queries import Answers

COLUMNS = ("query", "place of the right one")


def table_of(direction: str, answers: Answers) -> Any:
    """A wandb.Table: a row per query, a column per answer. `direction`: `image_to_text`. What has
    no picture is shown by its text, or else by its id."""
    import wandb

    asks, _, answers_with = direction.partition("_to_")
    source, samples, found = answers.source, answers.samples, answers.found[direction]
    number = found.shape[1]
    table = wandb.Table(columns=[*COLUMNS, *(str(k + 1) for k in range(number))])
    for query, own in zip(answers.queries.tolist(), found.tolist()):
        # an answer is its row + 1; 0 stands where there are fewer candidates than answers
        rows = [int(row) - 1 for row, _ in own]
        place = str(rows.index(query) + 1) if query in rows else f"after {number}"
        cells = [
            _cell(source, answers_with, int(samples[row]), f"{_mark(row == query)} {alike:.2f}")
            if row >= 0
            else None
            for row, (_, alike) in zip(rows, own)
        ]
        table.add_data(_cell(source, asks, int(samples[query]), ""), place, *cells)
    return table


def _mark(is_right: bool) -> str:
    return "right" if is_right else "wrong"


def _cell(source: Source, modality: str, sample: int, mark: str) -> Any:
    """A picture with its caption below it, or a text."""
    words = f"{mark} {_text(source, sample)}".strip()
    if modality == "image":
        import wandb

        from launch.inference.gallery import on_white  # imports matplotlib

        try:
            picture = on_white(source.image_bytes(sample))
        except (OSError, ValueError, LookupError):  # the sample has none that can be read
            return None
        return wandb.Image(picture, caption=words)
    return words


def _text(source: Source, sample: int) -> str:
    return next(iter(source.captions(sample)), source.identity(sample))
