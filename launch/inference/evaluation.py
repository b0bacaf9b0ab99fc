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

from common.files import make_folder, write_text
from common.output import plain
from common.secrets import redacted
from data.index.sources import Source
from launch.inference.embedding import Embedded, Rows, folders_of, read_embeddings
from launch.inference.gallery import Found, Row
from launch.inference.kinds import Encoded, encoded
from models.metrics.alignment import alignment_figures, alignment_sums
from models.metrics.retrieval import (
    RECALL_AT,
    Relevance,
    equal_labels,
    median_rank,
    nearest,
    query_figures,
    query_sums,
    relevant_ranks,
)

SHOWN = 5  # answers to a query
NUM_ASKED = 32  # samples, for whether the data says languages


def retrieval(embedded: Embedded) -> dict[str, float]:
    """{"image_to_text_R@1": …, …, "image_to_text_median_rank": …} and the same from text to image,
    and so for every two modalities that are compared, each over the samples that have both; as
    `Relevance` and `best_ranks` count. With one text for each sample also how the embeddings lie to each other
    (`models/metrics/alignment.py`). Empty data: none.

    Where more than two modalities are compared, the figures of one pair end in its name, as in
    training: `alignment/audio_text`, `num_samples/audio_text`.
    """
    values: dict[str, float] = {}
    for first, second in embedded.compared:
        of_pair = f"/{first}_{second}" if len(embedded.compared) > 1 else ""
        one, other = embedded.both(first, second)
        for direction, (own, candidates) in directions(embedded, (first, second)).items():
            relevance = relevance_of(own, candidates)
            ranks = relevant_ranks(own.embeds, candidates.embeds, relevance)
            values |= rank_figures(direction, ranks, relevance)
        if torch.equal(one.sample, other.sample):
            target = torch.arange(len(one.sample))
            figures = alignment_figures(
                alignment_sums(one.embeds, other.embeds, target),
                alignment_sums(other.embeds, one.embeds, target),
                len(target),
                (first, second),
            )
            values |= {f"{name}{of_pair}": value for name, value in figures.items()}
        if of_pair:
            values[f"num_samples{of_pair}"] = len(one.sample.unique())
    return values


BENCHMARK_NAMES = {"image_to_text": "text_retrieval", "text_to_image": "image_retrieval"}
"""CLIP_benchmark knows images and texts only."""


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
    samples = embedded.samples
    some = samples[:: max(1, len(samples) // NUM_ASKED)].tolist()
    if all(source.language(i) is None for i in some):
        return {}
    said = [source.language(i) for i in samples.tolist()]
    languages = sorted({str(language) for language in said if language is not None})
    found = {}
    for language in languages if len(languages) > 1 else ():
        own = torch.tensor([str(each) == language for each in said])
        found[language] = embedded.of(samples[own])
    return found


def directions(embedded: Embedded, pair: tuple[str, str]) -> dict[str, tuple[Rows, Rows]]:
    """direction -> (queries, candidates), of the samples that have both modalities."""
    first, second = pair
    one, other = embedded.both(first, second)
    return {f"{first}_to_{second}": (one, other), f"{second}_to_{first}": (other, one)}


def relevance_of(own: Rows, candidates: Rows) -> Relevance:
    """Rows of one sample belong together."""
    pairs = equal_labels(own.sample, candidates.sample)
    return Relevance.of(own.key, candidates.key, *pairs)


def rank_figures(direction: str, ranks: Tensor, relevance: Relevance) -> dict[str, float]:
    """Of no queries: none."""
    if not len(ranks):
        return {}
    figures = query_figures(direction, query_sums(ranks, relevance).tolist())
    return figures | {f"{direction}_median_rank": median_rank(ranks)}


def examples(embedded: Embedded, source: Source, number: int, seed: int = 0) -> list[Row]:
    """Queries drawn by chance, equally many of each direction, with their first `SHOWN` answers; of
    every pair texts are asked about first."""
    draw = torch.Generator().manual_seed(seed)
    found = [
        (modalities, *sides)
        for first, second in embedded.compared
        for modalities, sides in zip(
            ((second, first), (first, second)),
            reversed(directions(embedded, (first, second)).values()),
        )
    ]
    rows = []
    for i, (modalities, own, candidates) in enumerate(found):
        relevance = relevance_of(own, candidates)
        share = number // len(found) + (i < number % len(found))
        chosen = torch.randperm(len(relevance.query_row), generator=draw)[:share]
        queries, answers = relevance.query_row[chosen], relevance.candidate_row
        index, similarity = nearest(own.embeds[queries], candidates.embeds[answers], SHOWN)
        right = relevance.is_right(chosen, index).tolist()
        for query, *found_of in zip(
            queries.tolist(), answers[index].tolist(), similarity.tolist(), right
        ):
            cells = [
                Found(*_shown(source, modalities[1], candidates, row), *rest)
                for row, *rest in zip(*found_of)
            ]
            value, text = _shown(source, modalities[0], own, query)
            rows.append(Row(text, value, cells))
    return rows


def _shown(source: Source, modality: str, rows: Rows, row: int) -> tuple[Encoded | None, str]:
    """What is drawn of a row, None for a text alone, and the text with it."""
    sample = int(rows.sample[row])
    if rows.texts:
        return None, rows.texts[row]
    return encoded(source, modality, sample), caption_of(source, sample)


def caption_of(source: Source, i: int) -> str:
    """The first caption of a sample, or else its name."""
    return next(iter(source.captions(i)), source.identity(i))


def search(
    query: Tensor, embeds: Tensor | np.ndarray, lines: Sequence[Mapping[str, Any]], number: int
) -> list[dict[str, Any]]:
    """The `number` rows most like a query [1, D], best first: their lines, with
    "similarity"."""
    index, similarity = nearest(query, torch.as_tensor(np.array(embeds)), number)
    return [
        {**lines[i], "similarity": round(s, 4)}
        for i, s in zip(index[0].tolist(), similarity[0].tolist())
    ]


def search_table(query: str, found: Sequence[Mapping[str, Any]]) -> Table:
    """Texts, where they are what was found, have a column of their own."""
    table = Table(title=f"“{query}”", title_justify="left")
    columns = ("similarity", *(("text",) if any("text" in line for line in found) else ()))
    for name in (*columns, "id", "where"):
        table.add_column(name, justify="right" if name == "similarity" else "left", overflow="fold")
    for line in found:
        names = (*(("text",) if "text" in line else ()), "id", "where")
        table.add_row(f"{line['similarity']:.3f}", *(plain(str(line[name])) for name in names))
    return table


def embeddings_of(
    folder: Path, model: Mapping[str, str], modality: str = "image"
) -> tuple[np.ndarray, list[dict[str, Any]], list[str]]:
    """Of a folder of embeddings, or of several, if these weights made them: (those of a modality,
    their lines, the specs of the data). `model`: its `checksum`, the name of its `checkpoint`, and
    where its `run` is. Errors: ValueError, FileNotFoundError."""
    folders = folders_of(folder) or [folder]
    embeds, lines, abouts = zip(*(read_embeddings(part, modality) for part in folders))
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
    """Into a folder that is made where it is not there. Not-a-number and infinity, which JSON does
    not have, become null."""
    make_folder(path.parent)
    write_text(path, json.dumps(redacted(_for_json(values)), indent=2) + "\n")


def _for_json(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _for_json(value)
        if isinstance(value, Mapping)
        else None
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for key, value in values.items()
    }
