"""Queries with their answers, as they are at the newest evaluation: what `queries.json` in the
run's folder holds, with a small picture of each image and sound, so that a report needs no data
set. A short sound can be heard, too."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageDraw

from common.files import read_json
from data.stored.kinds import annotations_of
from launch.modalities import encoded, view_of

if TYPE_CHECKING:
    from data.index.sources import KnownSource
    from data.stored.derived import Derived

FILE = "queries.json"
NUM_QUERIES, NUM_ANSWERS = 4, 5  # queries of each direction; answers of each
MOST_SETS = 4  # held-out sets that are shown
JPEG_QUALITY = 70
MOST_LETTERS = 300  # of a caption


@dataclass(frozen=True)
class Answers:
    """What was found for some rows of one held-out set, in both directions of two modalities.

    `samples` [n]: of each row the index in the source; `which` [n]: which of its annotations it is,
    of the `kind`; None where it is the whole sample. `found`: by direction the queries [q], as row
    + 1, and their answers, float64 [q, k, 3], see `models.metrics.retrieval.first_answers`; 0:
    there is none.
    """

    source: KnownSource
    samples: np.ndarray
    which: np.ndarray | None
    found: Mapping[str, tuple[Any, Any]]
    kind: Derived | None = None

    def name(self, number: float) -> str:
        """Of the row of this number, from 1: what queries.json calls it."""
        row = int(number) - 1
        annotation = "" if self.which is None else f".{self.which[row]}"
        return f"{self.samples[row]}{annotation}"


def query_rows(count: int) -> np.ndarray:
    """[q] int64, the same for the same `count`: which of `count` rows are asked about, so that the
    evaluations of a run can be compared."""
    draw = np.random.default_rng(0)
    return np.sort(draw.choice(count, min(NUM_QUERIES, count), replace=False)).astype(np.int64)


def queries_record(step: int, by_set: Mapping[str, Sequence[Answers]]) -> dict[str, Any]:
    """What queries.json holds of the evaluation after `step`."""
    asked = dict([each for each in by_set.items() if each[1]][:MOST_SETS])
    return {"step": step, "sets": {name: _record(answers) for name, answers in asked.items()}}


def read_queries(folder: Path) -> dict[str, Any] | None:
    """queries.json; None where there is none. Errors: any, where it is damaged or lacks what a page
    shows."""
    if not (folder / FILE).is_file():
        return None
    record = read_json(folder / FILE)
    for of_set in record["sets"].values():
        for direction in of_set.keys() - {"samples"}:
            for query in of_set[direction]:
                _use(query, of_set["samples"])
    return record


def _use(query: Mapping[str, Any], samples: Mapping[str, Mapping[str, Any]]) -> None:
    """Take what a page shows of a query. Errors: any."""
    query["place"]
    for answer in query["answers"]:
        answer["right"]
        format(answer["similarity"], ".2f")
    for name in (query["query"], *(answer["sample"] for answer in query["answers"])):
        _ = samples[name]["text"], samples[name]["id"]


def _record(of_set: Sequence[Answers]) -> dict[str, Any]:
    """By direction the queries with their answers and the place of the first right one, and the
    samples that are shown."""
    directions: dict[str, list[dict[str, Any]]] = {}
    shown: dict[str, set[str]] = {}  # sample -> the modalities that are looked at
    for of_pair in of_set:
        for direction, (answers, queries) in of_pair.found.items():
            asks, answers_with = direction.split("_to_")
            asked = []
            for number, own in zip(queries.tolist(), answers.tolist()):
                if not number:
                    continue
                query, found = of_pair.name(number), _answers(of_pair, own)
                place = next((i for i, each in enumerate(found, 1) if each["right"]), None)
                asked.append({"query": query, "place": place, "answers": found})
                shown.setdefault(query, set()).add(asks)
                for answer in found:
                    shown.setdefault(answer["sample"], set()).add(answers_with)
            if asked:
                directions[direction] = asked
    source = of_set[0].source  # of all of a held-out set
    kind = next((each.kind for each in of_set if each.kind), None)
    samples = {each: _sample(source, kind, each, sorted(shown[each])) for each in sorted(shown)}
    return {**directions, "samples": samples}


def _answers(of: Answers, found: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    return [
        {"sample": of.name(number), "similarity": round(similarity, 4), "right": right > 0}
        for number, similarity, right in found
        if number
    ]


def _sample(
    source: KnownSource, kind: Derived | None, name: str, modalities: Sequence[str]
) -> dict[str, Any]:
    """Of what has this name, `Answers.name`: its id and text, and by `<modality>_picture` and
    `<modality>_sound` in base64 a small JPEG and an MP3 of a short sound; None where the sample
    cannot be read. The picture of an annotation is that of its sample with its place."""
    words, _, number = name.partition(".")
    i, box, captions = int(words), None, source.captions(int(words))
    if kind and number:
        annotation = source.value(kind.name, i)[int(number)]
        captions = annotation.phrases
        box = annotations_of((kind.name,))[0].box(source, i, annotation)
    sample: dict[str, Any] = {
        "id": source.identity(i),
        "text": captions[0][:MOST_LETTERS] if captions else "",
    }
    for modality in filter(view_of, modalities):
        file = io.BytesIO()
        sample[f"{modality}_picture"] = None
        try:
            value = encoded(source, modality, i)
            if value is None:
                continue
            picture = value.small_picture()
            if box is not None:
                _draw_box(picture, box)
            picture.save(file, "JPEG", quality=JPEG_QUALITY)
            sound = value.played()
        except Exception:  # BadSample, or whatever a format of the user's own raises
            continue
        sample[f"{modality}_picture"] = base64.b64encode(file.getvalue()).decode()
        if sound:
            sample[f"{modality}_sound"] = base64.b64encode(sound).decode()
    return sample


def _draw_box(picture: Image.Image, box: Sequence[float]) -> None:
    """x1, y1, x2, y2 in fractions of the sides: a line that is seen on any ground."""
    x1, y1, x2, y2 = (round(part * (side - 1)) for part, side in zip(box, picture.size * 2))
    draw = ImageDraw.Draw(picture)
    draw.rectangle((x1, y1, x2, y2), outline="white")
    if x2 - x1 > 2 and y2 - y1 > 2:
        draw.rectangle((x1 + 1, y1 + 1, x2 - 1, y2 - 1), outline="#0072B2")
