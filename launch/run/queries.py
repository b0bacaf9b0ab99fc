"""Queries with their answers, as they are at the newest evaluation: what `queries.json` in the
run's folder holds, with a small picture of each image, so that a report needs no data set."""

from __future__ import annotations

import base64
import io
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.checkpoint.layout import replace_text

if TYPE_CHECKING:
    from data.index.sources import Source
    from data.prepare import HeldOut

FILE = "queries.json"
NUM_QUERIES, NUM_ANSWERS = 4, 5  # queries of each direction; answers of each
MOST_SETS = 4  # held-out sets that are shown
PICTURE_PIXELS = 96  # longest side
MOST_LETTERS = 300  # of a caption


@dataclass(frozen=True)
class Answers:
    """What was found for some samples of one held-out set.

    `samples` [n]: the index in the source of each row that was compared. `found`: by direction
    float64 [q, k, 2], see `models.metrics.retrieval.first_answers`. `queries` [q]: rows.
    """

    source: Source
    samples: np.ndarray
    queries: np.ndarray
    found: Mapping[str, Any]


def compared_samples(held_out: HeldOut) -> np.ndarray:
    """[n] int64: the samples of a held-out set that have an image and a text."""
    source, subset = held_out.source, held_out.subset
    return subset[~(source.lacking("image") | source.lacking("text"))[subset]]


def query_rows(count: int) -> np.ndarray:
    """[q] int64, the same for the same `count`: which of `count` rows are asked about, so that the
    evaluations of a run can be compared."""
    draw = np.random.default_rng(0)
    return np.sort(draw.choice(count, min(NUM_QUERIES, count), replace=False)).astype(np.int64)


def write_queries(folder: Path, step: int, by_set: Mapping[str, Answers]) -> None:
    """Replace queries.json. A failure is a warning, because training does not depend on it."""
    try:
        shown = dict(list(by_set.items())[:MOST_SETS])
        record = {
            "step": step,
            "sets": {name: _record(answers) for name, answers in shown.items()},
        }
        replace_text(folder / FILE, json.dumps(record, ensure_ascii=False) + "\n")
    except Exception as error:
        logging.getLogger("wye").warning(
            "%s was not written (%s: %s); training goes on", FILE, type(error).__name__, error
        )


def read_queries(folder: Path) -> tuple[dict[str, Any] | None, str | None]:
    """(queries.json, None), or (None, why there is none that can be read)."""
    try:
        text = (folder / FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None, None
    try:
        record = json.loads(text)
        if isinstance(record["step"], int) and isinstance(record["sets"], dict):
            return record, None
    except (ValueError, KeyError, TypeError):
        pass
    return None, f"{FILE} is damaged and left out; the next evaluation writes it again."


def _record(answers: Answers) -> dict[str, Any]:
    directions: dict[str, list[dict[str, Any]]] = {}
    for direction, found in answers.found.items():
        directions[direction] = [
            {"query": str(answers.samples[row]), "answers": _answers_of(answers.samples, own)}
            for row, own in zip(answers.queries.tolist(), found.tolist())
        ]
    pictured, named = set(), set()
    for direction, rows in directions.items():
        asked, answered = direction.split("_to_")
        for row in rows:
            by_branch = {asked: {row["query"]}, answered: {a["sample"] for a in row["answers"]}}
            pictured |= by_branch.get("image", set())
            named |= set().union(*by_branch.values())
    samples = {each: _sample(answers.source, int(each), each in pictured) for each in sorted(named)}
    return {**directions, "samples": samples}


def _answers_of(samples: np.ndarray, found: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    # an answer is its row + 1; 0 stands where there are fewer candidates than answers
    return [
        {"sample": str(samples[int(row) - 1]), "similarity": round(similarity, 4)}
        for row, similarity in found
        if row > 0
    ]


def _sample(source: Source, i: int, pictured: bool) -> dict[str, Any]:
    captions = source.captions(i)
    sample = {"id": source.identity(i), "text": captions[0][:MOST_LETTERS] if captions else ""}
    return {**sample, "picture": _picture(source, i)} if pictured else sample


def _picture(source: Source, i: int) -> str | None:
    """A small JPEG in base64; None where the image cannot be read."""
    from PIL import Image

    from launch.inference.gallery import on_white

    try:
        image = Image.fromarray(on_white(source.image_bytes(i)))
    except Exception:  # BadSample, or whatever a format of the user's own raises
        return None
    image.thumbnail((PICTURE_PIXELS, PICTURE_PIXELS))
    encoded = io.BytesIO()
    image.save(encoded, "JPEG", quality=80)
    return base64.b64encode(encoded.getvalue()).decode()
