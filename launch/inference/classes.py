"""Classes of images, or of sounds, by a trained model: zero-shot by prompts, by neighbours, by a
linear probe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from data.index.sources import IndexedSource, Source
from data.prepared import HeldOut
from data.stored.kinds import is_text
from launch.inference.embedding import Embedder
from models.metrics.classification import (
    LEAST_TO_PROBE,
    NEIGHBOURS,
    TOP,
    class_embeds,
    neighbour_accuracy,
    probe_accuracy,
    zero_shot_accuracy,
)


def modality_to_classify(embedder: Embedder, test: HeldOut) -> str:
    """The one beside texts that the samples and the model have. Raises ValueError where it is none
    or several, and for a model without texts."""
    known = [branch for branch in embedder.branches if not is_text(branch)]
    there = [name for name in known if not test.source.lacking(name)[test.subset].all()]
    if len(known) == len(embedder.branches):
        raise ValueError(
            "--classify: zero-shot classes are told apart by their prompts, and this model was "
            f"trained with {' and '.join(known)}, without texts"
        )
    if len(there) != 1:
        raise ValueError(
            f"--classify {test.source.spec}: has {' and '.join(there) or 'nothing'} of "
            f"{' and '.join(known)}, which the model reads beside texts; give data with one of "
            "them, such as imagefolder:DIR or audiofolder:DIR"
        )
    return there[0]


def classification(embedder: Embedder, test: HeldOut, train: HeldOut | None) -> dict[str, float]:
    """Of data whose samples of a class have the same captions: zero-shot, by these as prompts; with
    `train` by neighbours and a linear probe.

    Zero-shot, a sample is one of the classes of `test`; to those that `train` has besides,
    neighbours and probe may take it. Errors: ValueError as `modality_to_classify`, and for data
    from which nothing can be learned.
    """
    modality = modality_to_classify(embedder, test)
    if train:
        refuse_unlike(test, train)
    own = embedder.rows(modality, test.source, test.subset)
    names = [class_of(test.source, i) for i in own.sample.tolist()]
    prompts: dict[str, tuple[str, ...]] = {}  # of each class
    for name, i in zip(names, own.sample.tolist()):
        if name not in prompts:
            prompts[name] = tuple(test.source.captions(i))
    classes = sorted(prompts)
    # zero-shot, only these are told apart; what is learned may know more, which follow below
    number = {name: n for n, name in enumerate(classes)}
    label = torch.tensor([number[name] for name in names], dtype=torch.int64)
    by_class, same = class_embeddings(embedder, [prompts[name] for name in classes])
    values: dict[str, float] = {"num_samples": len(label), "num_classes": len(classes)}
    accuracy = zero_shot_accuracy(own.embeds, label, by_class, same)
    values |= {f"zero_shot_{key}": value for key, value in accuracy.items()}
    if train:
        learned = embedder.rows(modality, train.source, train.subset)
        train_names = [class_of(train.source, i) for i in learned.sample.tolist()]
        for name in sorted(set(train_names) - set(classes)):
            number[name] = len(number)
        train_label = torch.tensor([number[name] for name in train_names], dtype=torch.int64)
        sets = learned.embeds, train_label, own.embeds, label
        values["neighbours_top_1"] = neighbour_accuracy(*sets, len(number))
        values["linear_probe_top_1"], values["linear_probe_strength"] = probe_accuracy(*sets)
    return values


def class_of(source: Source, i: int) -> str:
    """The class of a sample: its folder, or its first caption where the data set has no classes of
    its own."""
    label = getattr(source, "label", lambda i: None)(i)
    return source.captions(i)[0] if label is None else label


def made_of(source: Source) -> dict[str, str] | None:
    """Where a data set with classes has their names and their prompts from; None: it has none."""
    first = (
        next(iter(source.usable().tolist()), None) if isinstance(source, IndexedSource) else None
    )
    if first is None or not isinstance(source, IndexedSource) or not source.label(first):
        return None
    names, templates = getattr(source.format, "made_of", (None, None))
    number = len(source.captions(first))
    prompts = f"{number} usual ones" if templates is None else f"{number} of {templates}"
    return {"class_names": names or "as the data set gives them", "prompts": prompts}


def class_embeddings(
    embedder: Embedder, prompts: Sequence[tuple[str, ...]]
) -> tuple[Tensor, Tensor]:
    """([U, D] of length 1, [C] int64): one row for classes with the same prompts, and the row of
    each of the C classes. `prompts`: of each class."""
    rows = {own: row for row, own in enumerate(dict.fromkeys(prompts))}
    of_prompt = torch.tensor([row for own, row in rows.items() for _ in own])
    embeds = embedder.texts([text for own in rows for text in own])
    return (
        class_embeds(embeds, of_prompt, len(rows)),
        torch.tensor([rows[own] for own in prompts]),
    )


def refuse_unlike(test: HeldOut, train: HeldOut) -> None:
    """Errors: ValueError where classes cannot be learned from `train`."""
    tested, trained = (
        {class_of(part.source, i) for i in part.subset.tolist()} for part in (test, train)
    )
    if unknown := sorted(tested - trained):
        raise ValueError(
            f"{len(unknown)} of {len(tested)} classes of {test.source.spec} are not among those of "
            f"{train.source.spec}, the first is {unknown[0]!r}; a class has the same folder in "
            "both, or the same first caption"
        )
    if len(train.subset) < LEAST_TO_PROBE or len(trained) < 2:
        raise ValueError(
            f"a linear probe needs at least {LEAST_TO_PROBE} training images of 2 classes; "
            f"{train.source.spec} has {len(train.subset)} of {len(trained)}"
        )


def benchmark_metrics(values: Mapping[str, float]) -> dict[str, Any]:
    """The zero-shot figures under the names of CLIP_benchmark. Its acc5 is not a number where there
    are fewer than five classes."""
    return {
        "acc1": values["zero_shot_top_1"],
        "acc5": values["zero_shot_top_5"] if values["num_classes"] >= 5 else float("nan"),
        "mean_per_class_recall": values["zero_shot_mean_per_class"],
    }


def classification_table(values: Mapping[str, float], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("how")
    for name in ("top-1 %", "top-5 %", "mean per class %"):
        table.add_column(name, justify="right")
    figures = [f"zero_shot_top_{k}" for k in TOP] + ["zero_shot_mean_per_class"]
    table.add_row("zero-shot", *(f"{100 * values[name]:.1f}" for name in figures))
    if "neighbours_top_1" in values:
        table.add_row(f"{NEIGHBOURS} nearest neighbours", f"{100 * values['neighbours_top_1']:.1f}")
        table.add_row(
            f"linear probe, C = {values['linear_probe_strength']:g}",
            f"{100 * values['linear_probe_top_1']:.1f}",
        )
    chance = [min(1.0, k / values["num_classes"]) for k in (*TOP, 1)]
    table.add_row(
        f"chance, {values['num_classes']:.0f} classes", *(f"{100 * c:.1f}" for c in chance)
    )
    return table
