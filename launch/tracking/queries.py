"""Queries of a held-out set with what the model finds for them: a table in W&B at every evaluation,
with pictures, right and wrong marked."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from data.index.sources import Source
from data.prepare import HeldOut

COLUMNS = ("query", "place of the right one")


class Answers(NamedTuple):
    """Of some queries of a held-out set, in one direction: `queries` [Q], `found` [Q, K] (best
    first; −1: none) are places in its subset; `similarity` [Q, K]."""

    queries: np.ndarray
    found: np.ndarray
    similarity: np.ndarray


def table_of(held_out: HeldOut, direction: str, answers: Answers) -> Any:
    """A wandb.Table: a row per query, a column per answer. `direction`: `image_to_text`. What has
    no picture is shown by its text, or else by its id."""
    import wandb

    asks, _, answers_with = direction.partition("_to_")
    number = answers.found.shape[1]
    table = wandb.Table(columns=[*COLUMNS, *(str(k + 1) for k in range(number))])
    for query, found, similarity in zip(*answers):
        if query < 0:
            continue
        right = np.flatnonzero(found == query)
        place = str(right[0] + 1) if len(right) else f"after {number}"
        cells = [
            _cell(held_out, answers_with, int(i), f"{_mark(i == query)} {s:.2f}")
            if i >= 0
            else None
            for i, s in zip(found, similarity)
        ]
        table.add_data(_cell(held_out, asks, int(query), ""), place, *cells)
    return table


def _mark(is_right: bool) -> str:
    return "right" if is_right else "wrong"


def _cell(held_out: HeldOut, modality: str, place: int, mark: str) -> Any:
    """A picture with its caption below it, or a text."""
    sample = int(held_out.subset[place])
    words = f"{mark} {_text(held_out.source, sample)}".strip()
    if modality == "image":
        import wandb

        from launch.inference.gallery import on_white  # imports matplotlib

        try:
            picture = on_white(held_out.source.image_bytes(sample))
        except (OSError, ValueError, LookupError):  # the sample has none that can be read
            return None
        return wandb.Image(picture, caption=words)
    return words


def _text(source: Source, sample: int) -> str:
    return next(iter(source.captions(sample)), source.identity(sample))
