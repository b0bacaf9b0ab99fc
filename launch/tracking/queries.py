"""Queries of a held-out set with what the model finds for them: a table in W&B at every evaluation,
with pictures of images and sounds, right and wrong marked."""

from __future__ import annotations

from typing import Any

from data.index.sources import Source
from data.modalities.audio.decoding import decode_audio
from launch.inference.kinds import KINDS, Encoded, played, whole_picture
from launch.run.queries import Answers

COLUMNS = ("query", "place of the right one")
HEARD = "sound of the query"  # a column where queries can be heard


def table_of(direction: str, answers: Answers) -> Any:
    """A wandb.Table: a row per query, a column per answer, and where queries are sounds one in
    which they can be heard. `direction`: `image_to_text`. What has no picture is shown by its text,
    or else by its id."""
    import wandb

    asks, _, answers_with = direction.partition("_to_")
    source, samples, found = answers.source, answers.samples, answers.found[direction]
    number = found.shape[1]
    heard = [_sound(source, asks, int(samples[query])) for query in answers.queries]
    more = [HEARD] if any(sound is not None for sound in heard) else []
    table = wandb.Table(columns=[*COLUMNS, *(str(k + 1) for k in range(number)), *more])
    for query, own, sound in zip(answers.queries.tolist(), found.tolist(), heard):
        # an answer is its row + 1; 0 stands where there are fewer candidates than answers
        right = [is_right > 0 for _, _, is_right in own]
        place = str(right.index(True) + 1) if any(right) else f"after {number}"
        cells = [
            _cell(
                source,
                answers_with,
                int(samples[int(row) - 1]),
                f"{_mark(is_right > 0)} {alike:.2f}",
            )
            if row > 0
            else None
            for row, alike, is_right in own
        ]
        asked = _cell(source, asks, int(samples[query]), "")
        table.add_data(asked, place, *cells, *([sound] if more else []))
    return table


def _mark(is_right: bool) -> str:
    return "right" if is_right else "wrong"


def _cell(source: Source, modality: str, sample: int, mark: str) -> Any:
    """A picture with its caption below it, or a text."""
    words = f"{mark} {_text(source, sample)}".strip()
    if modality not in KINDS:
        return words
    import wandb

    try:
        kind = KINDS[modality]
        value = Encoded(modality, kind.read(source, sample))
        picture = whole_picture(value)
    except (OSError, ValueError, LookupError):  # the sample has none that can be read
        return None
    return wandb.Image(picture, caption=words)


def _sound(source: Source, modality: str, sample: int) -> Any:
    """A wandb.Audio of a short sound; None of what is no sound, is long or cannot be read."""
    if modality not in KINDS:
        return None
    import wandb

    try:
        heard = played(Encoded(modality, KINDS[modality].read(source, sample)))
    except (OSError, ValueError, LookupError):
        return None
    if heard is None:
        return None
    sound = decode_audio(heard)
    return wandb.Audio(sound.samples, sound.rate, caption=_text(source, sample))


def _text(source: Source, sample: int) -> str:
    return next(iter(source.captions(sample)), source.identity(sample))
