"""What a trained model can do, in numbers and in figures: retrieval, classes, examples."""

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
from data.prepare import HeldOut
from launch.inference.embedding import Embedded, Embedder, folders_of, read_images
from launch.inference.gallery import Found, Row
from launch.run.report import recalls
from models.metrics.alignment import alignment_figures, alignment_sums
from models.metrics.classification import (
    LEAST_TO_PROBE,
    NEIGHBOURS,
    TOP,
    class_embeds,
    neighbour_accuracy,
    probe_accuracy,
    zero_shot_accuracy,
)
from models.metrics.retrieval import best_ranks, hits, median_rank, nearest

SHOWN = 5  # answers to a query


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


def classification(embedder: Embedder, test: HeldOut, train: HeldOut | None) -> dict[str, float]:
    """Of data whose samples of a class have the same captions: zero-shot, by these as prompts; with
    `train` by neighbours and a linear probe.

    Zero-shot, an image is one of the classes of `test`; to those that `train` has besides,
    neighbours and probe may take it.
    """
    if train:
        refuse_unlike(test, train)
    index, image = embedder.images(test.source, test.subset)
    train_index, train_image = (
        embedder.images(train.source, train.subset) if train else (index[:0], image[:0])
    )
    captions = [test.source.captions(i) for i in index.tolist()]
    train_captions = [train.source.captions(i) for i in train_index.tolist()]
    prompts = {own[0]: own for own in captions}  # of each class, by its first
    classes = sorted(prompts)
    every = [*classes, *sorted({own[0] for own in train_captions} - set(classes))]
    number = {name: n for n, name in enumerate(every)}
    label, train_label = (
        torch.tensor([number[own[0]] for own in each], dtype=torch.int64)
        for each in (captions, train_captions)
    )
    of_prompt = torch.tensor([n for n, name in enumerate(classes) for _ in prompts[name]])
    by_class = class_embeds(
        embedder.texts([text for name in classes for text in prompts[name]]),
        of_prompt,
        len(classes),
    )
    values = {"num_samples": len(index), "num_classes": len(classes)}
    values |= {
        f"zero_shot_{key}": value
        for key, value in zero_shot_accuracy(image, label, by_class).items()
    }
    if train:
        values["neighbours_top_1"] = neighbour_accuracy(
            train_image, train_label, image, label, len(every)
        )
        values["linear_probe_top_1"], values["linear_probe_strength"] = probe_accuracy(
            train_image, train_label, image, label
        )
    return values


def refuse_unlike(test: HeldOut, train: HeldOut) -> None:
    """Errors: ValueError where classes cannot be learned from `train`: a class is known by its
    first caption."""
    tested, trained = (
        {part.source.captions(i)[0] for i in part.subset.tolist()} for part in (test, train)
    )
    if unknown := sorted(tested - trained):
        raise ValueError(
            f"{len(unknown)} of {len(tested)} classes of {test.source.spec} are not among those of "
            f"{train.source.spec}, the first is {unknown[0]!r}; give both the same names and "
            "templates"
        )
    if len(train.subset) < LEAST_TO_PROBE or len(trained) < 2:
        raise ValueError(
            f"a linear probe needs at least {LEAST_TO_PROBE} training images of 2 classes; "
            f"{train.source.spec} has {len(train.subset)} of {len(trained)}"
        )


def classification_table(values: Mapping[str, float], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("how")
    table.add_column("top-1 %", justify="right")
    table.add_column("top-5 %", justify="right")
    table.add_row("zero-shot", *(f"{100 * values[f'zero_shot_top_{k}']:.1f}" for k in TOP))
    if "neighbours_top_1" in values:
        table.add_row(
            f"{NEIGHBOURS} nearest neighbours", f"{100 * values['neighbours_top_1']:.1f}", ""
        )
        table.add_row(
            f"linear probe, C = {values['linear_probe_strength']:g}",
            f"{100 * values['linear_probe_top_1']:.1f}",
            "",
        )
    chance = [min(1.0, k / values["num_classes"]) for k in TOP]
    table.add_row(
        f"chance, {values['num_classes']:.0f} classes", *(f"{100 * c:.1f}" for c in chance)
    )
    return table


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
