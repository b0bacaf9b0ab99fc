"""Benchmarks: sets in the layout of CLIP_benchmark, measured as it measures them.

Zero-shot classes, several classes of an image, and retrieval; each figure has CLIP_benchmark's name
and definition (`metrics/` of clip_benchmark 1.6.2). What it leaves to the order of the rows, ties, has
a rule here: a wrong answer that ties counts as ranked before the right one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from rich.table import Table as TerminalTable
from torch import Tensor

from data.benchmarks import BenchmarkSamples, BenchmarkSet, find_sets, read_samples, set_of
from data.formats.classes import CLASSIFICATION, MULTILABEL, RETRIEVAL
from data.index.sources import KnownSource
from data.modalities.tokenizer_open_clip import repaired
from data.stored.image import IMAGE
from data.stored.kinds import text_of
from launch.inference.classes import class_embeddings
from launch.inference.datacomp import (
    AVERAGES,
    TASKS,
    WITHOUT_FIGURE,
    averages_of,
    key_of,
    record_of,
    refuse_same_tasks,
    scores_of,
    task_of,
    why_missing,
)
from launch.inference.embedding import Embedder, Rows
from launch.terminal.tables import Table
from models.metrics.classification import (
    class_ranks,
    f1_macro,
    group_means,
    mean_average_precision,
    predicted_classes,
)
from models.metrics.retrieval import (
    RECALL_AT,
    TIES,
    TOLERANCE,
    Relevance,
    equal_labels,
    rank_bounds,
)

LEAST_FOR_ACC5 = 5  # classes
MARGINS = (TOLERANCE, -TOLERANCE)  # ties before the right answer, and behind it
SAME_DIGITS = 5e-5  # a figure has four digits in a table
EQUAL_AS_ONE = "equal_as_one"
PROTOCOL = (
    "as clip_benchmark 1.6.2 defines them: texts are repaired by ftfy; a class is the mean of its "
    "prompts' embeddings; all rows of a retrieval set are queries and candidates of their own, and "
    "where it says `equal as one`, equal images and equal captions are one, right for all samples that "
    "have them"
)

Figures = dict[str, float]


@dataclass(frozen=True)
class Measured:
    """The figures of a set. `metrics`: by CLIP_benchmark's names, each tie before the right answer;
    `at_best`: each tie behind it. `counts`: queries, candidates and answers of a query, by what is
    asked. `equal_as_one`: metrics of retrieval where equal values are one."""

    metrics: Figures
    at_best: Figures
    counts: Mapping[str, Mapping[str, float]]
    equal_as_one: Figures = field(default_factory=dict)


@dataclass(frozen=True)
class Opened:
    """A set with its samples."""

    given: BenchmarkSet
    samples: BenchmarkSamples

    @property
    def source(self) -> KnownSource:
        """For what loads values."""
        return cast(KnownSource, self.samples)


# -- how each kind is measured


def of_classes(embedder: Embedder, opened: Opened, image: Rows) -> Measured:
    """acc1, acc5 and mean_per_class_recall, and what DataComp asks of groups of samples."""
    given, samples = opened.given, opened.samples
    label = torch.tensor(samples.judged_by, dtype=torch.int64)[image.sample]
    classes, same = class_embeddings(embedder, prompts_of(given))
    bounds = [class_ranks(image.embeds, label, classes, same, margin) for margin in MARGINS]
    metrics, at_best = (
        {
            "acc1": float((ranks < 1).double().mean()),
            "acc5": float((ranks < 5).double().mean()) if len(same) >= LEAST_FOR_ACC5 else np.nan,
            "mean_per_class_recall": float(group_means(ranks < 1, label).mean()),
            **_of_groups(opened, image, label, ranks),
        }
        for ranks in bounds
    )
    if (task := task_of(given.name)) and task.metric == "F1-macro_all":
        for figures, ranks in zip((metrics, at_best), bounds):
            predicted = predicted_classes(image.embeds, label, classes, same, ranks)
            figures[task.metric] = f1_macro(predicted, label)
    return Measured(metrics, at_best, {"": _counts(len(label), len(same), 1.0)})


def _of_groups(opened: Opened, image: Rows, label: Tensor, ranks: Tensor) -> Figures:
    task = task_of(opened.given.name)
    if task is None or task.grouped is None:
        return {}
    groups, column = opened.samples.groups, task.grouped.column
    if groups is None or groups.shape[1] <= column:
        raise ValueError(
            f"--benchmark: {opened.given.folder} is DataComp's {task.title} by its name, whose samples "
            f"have their groups in .{opened.given.kind.groups}, and these have none; call the folder "
            "otherwise, or get it again"
        )
    group = torch.from_numpy(groups[:, column])[image.sample]
    return {task.metric: float(group_means(ranks < task.grouped.k, group).min())}


def of_several_classes(embedder: Embedder, opened: Opened, image: Rows) -> Measured:
    """mean_average_precision over the classes."""
    target = torch.from_numpy(np.stack(opened.samples.judged_by))[image.sample]
    classes, same = class_embeddings(embedder, prompts_of(opened.given))
    metrics, at_best = (
        {
            "mean_average_precision": mean_average_precision(
                image.embeds, target, classes, same, each
            )
        }
        for each in MARGINS
    )
    answers = float(target.sum(1).double().mean())
    return Measured(metrics, at_best, {"": _counts(len(target), len(same), answers)})


def of_captions(embedder: Embedder, opened: Opened, image: Rows) -> Measured:
    """The recalls of both directions: each row by itself, and equal values as one."""
    branch = text_of(embedder.branches)
    assert branch is not None
    text = embedder.rows(branch, opened.source, image.sample.numpy(), all_captions=True)
    every: list[tuple[Figures, Figures]] = []
    counts: dict[str, dict[str, float]] = {}
    for is_one in (False, True):
        metrics, at_best = dict[str, float](), dict[str, float]()
        for name, own, other in (("image_retrieval", text, image), ("text_retrieval", image, text)):
            key, other_key = (
                each.key if is_one else torch.arange(len(each.key)) for each in (own, other)
            )
            pairs = equal_labels(own.sample, other.sample)
            relevance = Relevance.of(key, other_key, *pairs)
            bounds = rank_bounds(own.embeds, other.embeds, relevance)
            for figures, ranks in zip((metrics, at_best), bounds):
                recalls = {f"{name}_recall@{k}": _share(ranks < k) for k in RECALL_AT}
                figures |= recalls
            asked = f"{name}_{EQUAL_AS_ONE}" if is_one else name
            answers = float(relevance.num_answers.double().mean())
            counts[asked] = _counts(len(relevance.query_row), len(relevance.candidate_row), answers)
        every.append((metrics, at_best))
    for figures in every[0]:
        both = (figures["text_retrieval_recall@1"], figures["image_retrieval_recall@1"])
        figures["mean_recall@1"] = 0.5 * sum(both)  # DataComp's
    return Measured(*every[0], counts, every[1][0])


def _share(right: Tensor) -> float:
    return float(right.double().mean())


def _counts(queries: int, candidates: int, answers: float) -> dict[str, float]:
    return {"queries": queries, "candidates": candidates, "answers": answers}


MEASURES: Mapping[str, Callable[[Embedder, Opened, Rows], Measured]] = {
    CLASSIFICATION: of_classes,
    MULTILABEL: of_several_classes,
    RETRIEVAL: of_captions,
}
"""By the name of a `data.benchmarks.Kind`."""


def prompts_of(given: BenchmarkSet) -> list[tuple[str, ...]]:
    """Of each class, in the order of their numbers."""
    return [
        tuple(repaired(template.replace("{}", name)) for template in given.classes.templates)
        for name in given.classes.names
    ]


# -- all sets of a folder


def open_sets(where: str) -> tuple[list[Opened], list[str]]:
    """The sets that are measured, with their samples, and notes on what is not. Errors: ValueError
    and OSError as `find_sets`, `set_of` and `read_samples`; ValueError where there is nothing to measure."""
    found = find_sets(where)
    chosen = [set_of(each) for each in found if key_of(each.name) not in WITHOUT_FIGURE]
    if not chosen:
        raise ValueError(
            f"--benchmark {where}: has {', '.join(each.name for each in found)} alone, which has no "
            "figure that counts in DataComp, and is not measured"
        )
    refuse_same_tasks([each.name for each in chosen])
    notes = [
        f"{each.name}: not measured, it has no figure that counts in DataComp"
        for each in found
        if key_of(each.name) in WITHOUT_FIGURE
    ]
    notes += [f"{each.name}: {note}" for each in chosen for note in each.notes]
    opened = [_opened(each) for each in chosen]
    return opened, notes + [note for each in opened for note in _empty_captions(each)]


def _opened(given: BenchmarkSet) -> Opened:
    """A set with its samples, and its texts as the tokenizers of OpenCLIP read them."""
    samples = read_samples(given)
    if given.kind.name == RETRIEVAL:
        # a text of no character is none to what loads texts; a space has as few tokens
        captions = [[repaired(line) or " " for line in lines] for lines in samples.judged_by]
        return Opened(given, replace(samples, judged_by=captions))
    prompts_of(given)  # what cannot be repaired is said before a model is loaded
    return Opened(given, samples)


def _empty_captions(opened: Opened) -> Iterator[str]:
    if opened.given.kind.name == RETRIEVAL:
        empty = sum(not line.strip() for captions in opened.samples.judged_by for line in captions)
        if empty:
            yield f"{opened.given.name}: {empty:,} captions are empty lines, and count as captions"


def measure_sets(
    embedder: Embedder, opened: Sequence[Opened], write: Callable[[Mapping[str, Any]], None]
) -> dict[str, Any]:
    """The record of all sets: {"sets": {name: …}, "datacomp": …}. `write` gets it after each set, so
    that what was measured stays where the next one fails. Errors: ValueError for a model without
    images and texts."""
    if text_of(embedder.branches) is None or IMAGE.name not in embedder.branches:
        raise ValueError(
            "--benchmark: its sets are of images and texts, and this model was trained with "
            f"{' and '.join(embedder.branches)}"
        )
    record: dict[str, Any] = {"sets": {}}
    for each in opened:
        every = np.arange(len(each.samples))
        image = embedder.rows(IMAGE.name, each.source, every)
        measured = MEASURES[each.given.kind.name](embedder, each, image)
        record["sets"][each.given.name] = _record(each, len(every) - len(image.sample), measured)
        metrics = {name: own["metrics"] for name, own in record["sets"].items()}
        if scores := scores_of(metrics):
            record["datacomp"] = record_of(scores)
        write(record)
    return record


def _record(opened: Opened, left_out: int, measured: Measured) -> dict[str, Any]:
    given = opened.given
    names, templates = given.classes.made_of
    about = {"class_names": names, "templates": templates} if given.kind.has_classes else {}
    best = {n: value for n, value in measured.at_best.items() if value != measured.metrics[n]}
    equal = {EQUAL_AS_ONE: measured.equal_as_one} if measured.equal_as_one else {}
    return {
        "data": given.folder,
        "kind": given.kind.name,
        **about,
        "num_samples": len(opened.samples) - left_out,
        "left_out": left_out,
        "counts": measured.counts,
        "metrics": measured.metrics,
        "metrics_at_best": {n: v for n, v in best.items() if not np.isnan(v)},
        **equal,
    }


# -- tables


def tables_of(
    record: Mapping[str, Any], model: str, precision: str, notes: Sequence[str]
) -> list[TerminalTable]:
    """A table of each kind of set, and DataComp's where a set is of it."""
    kinds: dict[str, list[dict[str, str]]] = {}
    for name, own in record["sets"].items():
        kinds.setdefault(own["kind"], []).extend(_rows(name, own))
    about = f"precision {precision}; {PROTOCOL}. {TIES}; a second figure has ties behind it"
    tables = [Table.of(f"Benchmarks, {kind}, {model}", rows, about) for kind, rows in kinds.items()]
    if "datacomp" in record:
        tables.append(datacomp_table(record["sets"], model))
    return [
        each if n < len(tables) - 1 or not notes else _with_notes(each, notes)
        for n, each in enumerate(table.for_terminal() for table in tables)
    ]


def _with_notes(table: TerminalTable, notes: Sequence[str]) -> TerminalTable:
    table.caption = "\n".join([*filter(None, [cast(str, table.caption)]), *notes])
    return table


def _rows(name: str, own: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """One of classes, or of retrieval one for each direction and rule of equal values."""
    for asked, counts in own["counts"].items():
        direction, _, rule = asked.partition(f"_{EQUAL_AS_ONE}")
        is_one = asked.endswith(EQUAL_AS_ONE)
        metrics = own[EQUAL_AS_ONE] if is_one else own["metrics"]
        best = {} if is_one else own["metrics_at_best"]
        row = {"set": name}
        row |= {"asked": direction + (", equal as one" if is_one else "")} if asked else {}
        row["queries"] = f"{counts['queries']:,}"
        row["candidates"] = f"{counts['candidates']:,}"
        row["answers"] = f"{counts['answers']:.3g}"
        row["left out"] = f"{own['left_out']:,}"
        for metric, value in metrics.items():
            if metric.startswith(direction):
                row[metric.removeprefix(f"{direction}_")] = _cell(value, best.get(metric, value))
        yield row


def _cell(value: float, at_best: float) -> str:
    if np.isnan(value):
        return "–"
    return f"{value:.4f}" + (f"–{at_best:.4f}" if at_best - value > SAME_DIGITS else "")


def datacomp_table(sets: Mapping[str, Mapping[str, Any]], model: str) -> Table:
    scores = scores_of({name: own["metrics"] for name, own in sets.items()})
    rows = []
    for task in TASKS:
        score = f"{scores[task]:.4f}" if task in scores else "–"
        said = "" if task in scores else why_missing(task)
        rows.append({"task": task.title, "metric": task.metric, "score": score, "missing": said})
    for name, (mean, there, of) in averages_of(scores).items():
        said = "" if there == of else f"{there} of {of} sets are there"
        said += f", whose mean is {mean:.4f}" if 0 < there < of else ""
        score = f"{mean:.4f}" if there == of else "–"
        rows.append(
            {"task": f"mean: {name}", "metric": f"{of} sets", "score": score, "missing": said}
        )
    note = f"{len(scores)} of DataComp's {len(AVERAGES['Average'])} sets"
    return Table.of(f"DataComp, {model}", rows, note)
