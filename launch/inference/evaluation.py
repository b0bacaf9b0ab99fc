"""What a trained model's embeddings find: retrieval in numbers, of each language too, and examples
to be drawn."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.files import make_folder, write_text
from common.secrets import redacted
from data.index.sources import KnownSource
from launch.inference.embedding import Embedded, Rows
from launch.inference.gallery import Cell, Row
from launch.modalities import encoded, in_windows
from models.metrics.alignment import alignment_figures, alignment_sums
from models.metrics.retrieval import (
    DUAL_SCALE,
    RECALL_AT,
    Relevance,
    dual_softmax_ranks,
    equal_labels,
    median_rank,
    nearest,
    query_figures,
    query_sums,
    relevant_ranks,
)

SHOWN = 5  # answers to a query
DUAL_SOFTMAX = "_dual_softmax"  # behind a direction
DUAL_SOFTMAX_PROTOCOL = (
    "dual softmax (CAMoE, Cheng et al. 2021): each similarity times the softmax over all queries "
    f"of the set, at a scale of {DUAL_SCALE:g}, which a single query does not have"
)


def retrieval(embedded: Embedded) -> dict[str, float]:
    """{"image_to_text_R@1": …, …, "image_to_text_median_rank": …} and the same from text to image,
    and so for every two modalities that are compared, each over the samples that have both; as
    `Relevance` and `relevant_ranks` count. With one text for each sample also how the embeddings
    lie to each other (`models/metrics/alignment.py`). Empty data: none.

    Where more than two modalities are compared, the figures of one pair end in its name, as in
    training: `alignment/audio_text`, `num_samples/audio_text`.
    """
    values: dict[str, float] = {}
    for pair in embedded.compared:
        of_pair = f"/{'_'.join(pair)}" if len(embedded.compared) > 1 else ""
        one, other = embedded.both(*pair)
        for direction, own, candidates, relevance in directions(embedded, pair):
            ranks = relevant_ranks(own.embeds, candidates.embeds, relevance)
            values |= rank_figures(direction, ranks, relevance)
            if any(map(in_windows, pair)):
                ranks = dual_softmax_ranks(own.embeds, candidates.embeds, relevance)
                values |= rank_figures(f"{direction}{DUAL_SOFTMAX}", ranks, relevance)
        # pairs of rows, which all captions of an image are not
        if torch.equal(one.sample, other.sample):
            target = torch.arange(len(one.sample))
            sums = (
                alignment_sums(one.embeds, other.embeds, target),
                alignment_sums(other.embeds, one.embeds, target),
            )
            figures = alignment_figures(*sums, len(target), pair)
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


def by_language(embedded: Embedded, source: KnownSource) -> dict[str, Embedded]:
    """The samples of each language, where the data says of several; a sample that does not say it
    is of none. Each is compared with samples of its own language."""
    found: dict[str, list[int]] = {}
    for i in embedded.samples.tolist():
        if (language := source.language(i)) is not None:
            found.setdefault(str(language), []).append(i)
    return {
        language: embedded.of(torch.tensor(own))
        for language, own in sorted(found.items())
        if len(found) > 1
    }


def directions(
    embedded: Embedded, pair: tuple[str, str]
) -> Iterator[tuple[str, Rows, Rows, Relevance]]:
    """(its name, queries, candidates, which of them are right) of both directions, over the samples
    that have both. Rows of one sample belong together, and equal images, sounds or captions are one
    query and one candidate."""
    rows = dict(zip(pair, embedded.both(*pair)))
    for asks, answers in (pair, pair[::-1]):
        own, other = rows[asks], rows[answers]
        relevance = Relevance.of(own.key, other.key, *equal_labels(own.sample, other.sample))
        yield f"{asks}_to_{answers}", own, other, relevance


def rank_figures(direction: str, ranks: Tensor, relevance: Relevance) -> dict[str, float]:
    """Of no queries: none."""
    if not len(ranks):
        return {}
    figures = query_figures(direction, query_sums(ranks, relevance).tolist())
    return figures | {f"{direction}_median_rank": median_rank(ranks)}


def examples(embedded: Embedded, source: KnownSource, number: int, seed: int = 0) -> list[Row]:
    """Queries drawn by chance, equally many of each direction, with their first `SHOWN` answers; of
    every pair texts are asked about first."""
    draw = torch.Generator().manual_seed(seed)
    asked = [each for pair in embedded.compared for each in [*directions(embedded, pair)][::-1]]
    rows: list[Row] = []
    for i, (direction, own, candidates, relevance) in enumerate(asked):
        asks, _, answers_with = direction.partition("_to_")
        # the first directions get one more where the number does not divide
        share = number // len(asked) + (i < number % len(asked))
        chosen = torch.randperm(len(relevance.query_row), generator=draw)[:share]
        queries, answers = relevance.query_row[chosen], relevance.candidate_row
        index, similarity = nearest(own.embeds[queries], candidates.embeds[answers], SHOWN)
        right = relevance.is_right(chosen, index).tolist()
        for query, *found in zip(
            queries.tolist(), answers[index].tolist(), similarity.tolist(), right
        ):
            answered = [_cell(source, answers_with, candidates, *each) for each in zip(*found)]
            rows.append([_cell(source, asks, own, query), *answered])
    return rows


def _cell(source: KnownSource, modality: str, rows: Rows, row: int, *judged: Any) -> Cell:
    """What is drawn of a row. `judged`: the similarity of an answer, and whether it is right."""
    sample = int(rows.sample[row])
    if rows.texts:
        return Cell(None, rows.texts[row], *judged)
    return Cell(encoded(source, modality, sample), caption_of(source, sample), *judged)


def caption_of(source: KnownSource, i: int) -> str:
    """The first caption of a sample, or else its name."""
    return next(iter(source.captions(i)), source.identity(i))


def write_numbers(path: Path, values: Mapping[str, Any]) -> None:
    """Into a folder that is made where it is not there. Not-a-number and infinity, which JSON does
    not have, become null."""
    make_folder(path.parent)
    write_text(path, json.dumps(redacted(_for_json(values)), indent=2) + "\n")


def _for_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _for_json(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
