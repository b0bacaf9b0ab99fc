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

from common.files import read_json
from launch.modalities import encoded, view_of

if TYPE_CHECKING:
    from data.index.sources import KnownSource
    from data.prepare import HeldOut

FILE = "queries.json"
NUM_QUERIES, NUM_ANSWERS = 4, 5  # queries of each direction; answers of each
MOST_SETS = 4  # held-out sets that are shown
JPEG_QUALITY = 70
MOST_LETTERS = 300  # of a caption


@dataclass(frozen=True)
class Answers:
    """What was found for some samples of one held-out set, in both directions of two modalities.

    `samples` [n]: the index in the source of each row that was compared. `found`: by direction
    float64 [q, k, 3], see `models.metrics.retrieval.first_answers`. `queries` [q]: rows.
    """

    source: KnownSource
    samples: np.ndarray
    queries: np.ndarray
    found: Mapping[str, Any]


def compared_samples(held_out: HeldOut, branches: tuple[str, str]) -> np.ndarray:
    """[n] int64: the samples of a held-out set that have both modalities."""
    source, subset = held_out.source, held_out.subset
    first, second = branches
    return subset[~(source.lacking(first) | source.lacking(second))[subset]]


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
        for direction, found in of_pair.found.items():
            asks, answers_with = direction.split("_to_")
            directions[direction] = []
            for row, own in zip(of_pair.queries.tolist(), found.tolist()):
                query, answers = str(of_pair.samples[row]), _answers(of_pair.samples, own)
                place = next((i for i, each in enumerate(answers, 1) if each["right"]), None)
                directions[direction].append({"query": query, "place": place, "answers": answers})
                shown.setdefault(query, set()).add(asks)
                for answer in answers:
                    shown.setdefault(answer["sample"], set()).add(answers_with)
    source = of_set[0].source  # of all of a held-out set
    samples = {each: _sample(source, int(each), sorted(shown[each])) for each in sorted(shown)}
    return {**directions, "samples": samples}


def _answers(samples: np.ndarray, found: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    # an answer is its row + 1; 0 stands where there are fewer candidates than answers
    return [
        {
            "sample": str(samples[int(row) - 1]),
            "similarity": round(similarity, 4),
            "right": right > 0,
        }
        for row, similarity, right in found
        if row > 0
    ]


def _sample(source: KnownSource, i: int, modalities: Sequence[str]) -> dict[str, Any]:
    """Its id and text, and by `<modality>_picture` and `<modality>_sound` in base64 a small JPEG
    and an MP3 of a short sound; None where the sample cannot be read."""
    captions = source.captions(i)
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
            value.small_picture().save(file, "JPEG", quality=JPEG_QUALITY)
            sound = value.played()
        except Exception:  # BadSample, or whatever a format of the user's own raises
            continue
        sample[f"{modality}_picture"] = base64.b64encode(file.getvalue()).decode()
        if sound:
            sample[f"{modality}_sound"] = base64.b64encode(sound).decode()
    return sample
