"""Queries of a held-out set with what the model finds for them: a table in W&B at every evaluation,
with pictures of images and sounds, right and wrong marked."""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from typing import Any

from data.index.sources import Source
from data.modalities.audio.decoding import decode_audio
from launch.modalities import encoded, view_of
from launch.run.queries import Answers
from launch.views import View

COLUMNS = ("query", "place of the right one")
HEARD = "sound of the query"  # a column where queries can be heard


def table_of(direction: str, answers: Answers) -> Any:
    """A wandb.Table: a row per query, a column per answer, and where queries are sounds one in
    which they can be heard. `direction`: `image_to_text`. What has no picture is shown by its text,
    or else by its id."""
    import wandb

    asks, _, answers_with = direction.partition("_to_")
    source, found = answers.source, answers.found[direction]
    number = found.shape[1]
    rows = []
    for row, own in zip(answers.queries, found.tolist()):
        query = int(answers.samples[row])
        right = [is_right > 0 for _, _, is_right in own]
        cells = [_cell(source, asks, query, "")]
        cells.append(str(right.index(True) + 1) if any(right) else f"after {number}")
        for answer, similarity, is_right in own:
            mark = f"{'right' if is_right > 0 else 'wrong'} {similarity:.2f}"
            # an answer is its row + 1; 0 stands where there are fewer candidates than answers
            sample = int(answers.samples[int(answer) - 1])
            cells.append(_cell(source, answers_with, sample, mark) if answer > 0 else None)
        rows.append([*cells, _sound(source, asks, query)])
    heard = any(row[-1] is not None for row in rows)
    columns = [*COLUMNS, *(str(k + 1) for k in range(number)), *([HEARD] if heard else [])]
    return wandb.Table(columns, [row[: len(columns)] for row in rows])


def _cell(source: Source, modality: str, sample: int, mark: str) -> Any:
    """A picture with its caption below it, or a text."""
    import wandb

    words = f"{mark} {_text(source, sample)}".strip()
    if view_of(modality) is None:
        return words
    picture = _made(methodcaller("picture"), source, modality, sample)
    return None if picture is None else wandb.Image(picture, caption=words)


def _sound(source: Source, modality: str, sample: int) -> Any:
    """A wandb.Audio of a short sound; None of what is no sound, is long or cannot be read."""
    import wandb

    heard = _made(methodcaller("played"), source, modality, sample)
    if heard is None:
        return None
    sound = decode_audio(heard)
    return wandb.Audio(sound.samples, sound.rate, caption=_text(source, sample))


def _made(make: Callable[[View], Any], source: Source, modality: str, sample: int) -> Any:
    """What `make` makes of a sample's value; None where there is none that can be read."""
    try:
        value = encoded(source, modality, sample)
        return None if value is None else make(value)
    except (OSError, ValueError, LookupError):
        return None


def _text(source: Source, sample: int) -> str:
    return next(iter(source.captions(sample)), source.identity(sample))
