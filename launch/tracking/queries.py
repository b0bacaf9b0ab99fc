"""Queries of a held-out set with what the model finds for them: a table in W&B at every evaluation,
with pictures of images and sounds, right and wrong marked."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from data.decoding.sounds import decode_audio
from launch.run.queries import NUM_ANSWERS

COLUMNS = ("query", "place of the right one", *(str(k + 1) for k in range(NUM_ANSWERS)))
HEARD = "sound of the query"  # a column where queries can be heard


def table_of(direction: str, asked: Sequence[Mapping[str, Any]], samples: Mapping[str, Any]) -> Any:
    """A wandb.Table: a row per query, a column per answer, and where queries are sounds one in
    which they can be heard. `direction`: `image_to_text`; `asked`, `samples`: of queries.json. What
    has no picture is shown by its text, or else by its id."""
    import wandb

    asks, _, answers_with = direction.partition("_to_")
    rows = []
    for each in asked:
        query = samples[each["query"]]
        place = str(each["place"] or f"after {NUM_ANSWERS}")
        answers: list[Any] = [None] * NUM_ANSWERS
        for number, answer in enumerate(each["answers"]):
            mark = f"{'right' if answer['right'] else 'wrong'} {answer['similarity']:.2f} "
            answers[number] = _cell(samples[answer["sample"]], answers_with, mark)
        rows.append([_cell(query, asks), place, *answers, _sound(query, asks)])
    heard = any(row[-1] is not None for row in rows)
    columns = [*COLUMNS, *([HEARD] if heard else [])]
    return wandb.Table(columns, [row[: len(columns)] for row in rows])


def _cell(sample: Mapping[str, Any], modality: str, mark: str = "") -> Any:
    """A picture with its caption below it, or a text."""
    import wandb

    words, key = mark + _words(sample), f"{modality}_picture"
    if key not in sample:
        return words
    data = sample[key]
    return data and wandb.Image(Image.open(io.BytesIO(base64.b64decode(data))), caption=words)


def _sound(sample: Mapping[str, Any], modality: str) -> Any:
    """A wandb.Audio of a short sound, or None."""
    import wandb

    if not (data := sample.get(f"{modality}_sound")):
        return None
    sound = decode_audio(base64.b64decode(data))
    return wandb.Audio(sound.samples, sound.rate, caption=_words(sample))


def _words(sample: Mapping[str, Any]) -> str:
    return sample["text"] or sample["id"]
