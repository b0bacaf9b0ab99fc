"""What a trained model can do, in numbers and in figures: retrieval, examples, a search."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from data.index.sources import Source
from launch.inference.embedding import Embedded, folders_of, read_images
from launch.inference.gallery import Found, Row
from launch.run.report import recalls
from models.metrics.alignment import alignment_figures, alignment_sums
from models.metrics.retrieval import RECALL_AT, best_ranks, hits, median_rank, nearest

SHOWN = 5  # answers to a query
NUM_ASKED = 32  # samples, for whether the data says languages


def retrieval(embedded: Embedded) -> dict[str, float]:
    """{"image_to_text_R@1": …, …, "image_to_text_median_rank": …} and the same from text to image;
    as `best_ranks` counts; with one text for each image also how they lie to each other
    (`models/metrics/alignment.py`). Empty data: none."""
    values = {}
    for direction, sides in directions(embedded).items():
        values |= rank_figures(direction, best_ranks(*sides))
    if embedded.is_paired:
        images = torch.arange(len(embedded.image))
        values |= alignment_figures(
            *(alignment_sums(*sides, images) for sides in _both(embedded.image, embedded.text)),
            len(images),
        )
    return values


BENCHMARK_NAMES = {"image_to_text": "text_retrieval", "text_to_image": "image_retrieval"}


def benchmark_metrics(values: Mapping[str, float]) -> dict[str, float]:
    """The recalls of `retrieval` under the names of CLIP_benchmark, which are of what is found:
    text_retrieval_recall@5 is of images as queries."""
    return {
        f"{name}_recall@{k}": values[f"{direction}_R@{k}"]
        for direction, name in BENCHMARK_NAMES.items()
        for k in RECALL_AT
        if f"{direction}_R@{k}" in values
    }


def by_language(embedded: Embedded, source: Source) -> dict[str, Embedded]:
    """The samples of each language, where the data says of several; a sample that does not say it is
    of none. Each is compared with samples of its own language.

    Some samples are asked first: a data set class may have to load an item to tell its language.
    """
    some = embedded.index[:: max(1, len(embedded.index) // NUM_ASKED)].tolist()
    if all(source.language(i) is None for i in some):
        return {}
    said = [source.language(i) for i in embedded.index.tolist()]
    languages = sorted({str(language) for language in said if language is not None})
    found = {}
    for language in languages if len(languages) > 1 else ():
        own = torch.tensor([str(each) == language for each in said])
        row = own.cumsum(0) - 1  # of an image among those of its language
        texts = own[embedded.image_of_text]
        found[language] = Embedded(
            embedded.index[own],
            embedded.image[own],
            embedded.text[texts],
            row[embedded.image_of_text[texts]],
            [text for text, is_own in zip(embedded.texts, texts.tolist()) if is_own],
        )
    return found


def directions(embedded: Embedded) -> dict[str, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """direction -> (queries, the image of each, candidates, the image of each)."""
    image, text = (
        (embedded.image, torch.arange(len(embedded.image))),
        (embedded.text, embedded.image_of_text),
    )
    return {"image_to_text": (*image, *text), "text_to_image": (*text, *image)}


def rank_figures(direction: str, ranks: Tensor) -> dict[str, float]:
    """Of no queries: none."""
    if not len(ranks):
        return {}
    return recalls({direction: hits(ranks).tolist()}, len(ranks)) | {
        f"{direction}_median_rank": median_rank(ranks)
    }


def _both(image: Tensor, text: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return (image, text), (text, image)


def examples(embedded: Embedded, source: Source, number: int, seed: int = 0) -> list[Row]:
    """Queries drawn by chance, half of them texts and half images, with their first `SHOWN`
    answers."""
    draw = torch.Generator().manual_seed(seed)
    texts = torch.randperm(len(embedded.text), generator=draw)[: -(-number // 2)]
    images = torch.randperm(len(embedded.image), generator=draw)[: number // 2]
    rows = []
    for query, *answers in zip(
        texts.tolist(), *map(Tensor.tolist, nearest(embedded.text[texts], embedded.image, SHOWN))
    ):
        found = [
            Found(
                source.image_bytes(int(embedded.index[i])),
                source.captions(int(embedded.index[i]))[0],
                s,
                i == int(embedded.image_of_text[query]),
            )
            for i, s in zip(*answers)
        ]
        rows.append(Row(embedded.texts[query], None, found))
    for query, *answers in zip(
        images.tolist(),
        *map(Tensor.tolist, nearest(embedded.image[images], embedded.text, SHOWN)),
    ):
        found = [
            Found(None, embedded.texts[i], s, int(embedded.image_of_text[i]) == query)
            for i, s in zip(*answers)
        ]
        rows.append(
            Row(
                source.captions(int(embedded.index[query]))[0],
                source.image_bytes(int(embedded.index[query])),
                found,
            )
        )
    return rows


def search(
    query: Tensor, embeds: Tensor | np.ndarray, lines: Sequence[Mapping[str, Any]], number: int
) -> list[dict[str, Any]]:
    """The `number` images most like a query [1, D], best first: their lines, with
    "similarity"."""
    index, similarity = nearest(query, torch.as_tensor(np.array(embeds)), number)
    return [
        {**lines[i], "similarity": round(s, 4)}
        for i, s in zip(index[0].tolist(), similarity[0].tolist())
    ]


def search_table(query: str, found: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=f"“{query}”", title_justify="left")
    for name in ("similarity", "id", "where"):
        table.add_column(name, justify="right" if name == "similarity" else "left", overflow="fold")
    for line in found:
        table.add_row(f"{line['similarity']:.3f}", str(line["id"]), str(line["where"]))
    return table


def embeddings_of(
    folder: Path, model: Mapping[str, str]
) -> tuple[np.ndarray, list[dict[str, Any]], list[str]]:
    """A folder of embeddings, or of several, if these weights made them: (images, their lines,
    the specs of the data). `model`: its `checksum`, the name of its `checkpoint`, and where its
    `run` is. Errors: ValueError, FileNotFoundError."""
    embeds, lines, abouts = zip(*(read_images(part) for part in folders_of(folder) or [folder]))
    for about in abouts:
        if any(about[key] != model[key] for key in ("checkpoint", "checksum")):
            raise ValueError(
                f"--embeddings {folder}: are of {about['checkpoint']} in {about['run']}, not of "
                f"the weights of {model['checkpoint']} in {model['run']}; give another folder, or "
                "make them again without --query"
            )
    specs = list(dict.fromkeys(chain.from_iterable(about["data"] for about in abouts)))
    return (
        embeds[0] if len(embeds) == 1 else np.concatenate(embeds),
        list(chain.from_iterable(lines)),
        specs,
    )


def write_numbers(path: Path, values: Mapping[str, Any]) -> None:
    """Not-a-number and infinity, which JSON does not have, become null."""
    path.write_text(json.dumps(_for_json(values), indent=2) + "\n", encoding="utf-8")


def _for_json(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _for_json(value)
        if isinstance(value, Mapping)
        else None
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for key, value in values.items()
    }
