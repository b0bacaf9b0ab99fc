"""--query: what is most like a text, or like a file of some modality of the model, among a folder
of embeddings or the samples to evaluate."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from common.output import plain
from data.batching.mixture import open_sources
from data.clips import Clip
from data.index.sources import KnownSource
from data.modules import import_recorded, modules_of_specs
from data.stored.derived import DERIVED
from data.stored.kinds import text_of
from launch.inference.clips import embedded_windows, in_time
from launch.inference.embedding import Embedder, as_source
from launch.inference.evaluation import caption_of
from launch.inference.folders import annotation_lines, lines_for, read_embeddings, refuse_other_data
from launch.inference.gallery import Cell, draw_rows
from launch.inference.samples import held_out
from launch.modalities import encoded, names_a_file, read_value, shown_as
from launch.terminal.tables import show
from launch.views import FilmView, View
from models.metrics.retrieval import nearest

WINDOW = "window"  # of a film
IN_A_ROW = 5  # answers that are drawn beside each other
Line = Mapping[str, Any]


@dataclass(frozen=True)
class Query:
    """`value`: what the file holds; None: the query is a text."""

    modality: str
    words: str
    value: View | None = None


def read_query(given: str, branches: Sequence[str]) -> Query:
    """A file of one of the modalities, recognised by its content; else a text. Raises ValueError
    for a file of none of them, for one that is damaged or not there, and for a text where the model
    has no texts."""
    file = Path(given).expanduser()
    if file.is_file():
        modality, value = read_value(file, branches)
        return Query(modality, given, value)
    if names_a_file(given) and " " not in given.strip():
        raise ValueError(
            f"--query {given}: there is no such file; give the path of a file, or a text of "
            "several words"
        )
    if (text := text_of(branches)) is None:
        raise ValueError(
            f"--query {given!r}: is a text, and this model was trained with "
            f"{' and '.join(branches)}; give a file of one of these"
        )
    return Query(text, given)


def answers_of(query: Query, embedder: Embedder, asked: str | None) -> str:
    """The modality among which answers are looked for: as asked, else the first that the model was
    trained to compare with that of the query. Raises ValueError for one that it does not have."""
    if asked is None:
        first = next(pair for pair in embedder.trained.compared if query.modality in pair)
        return next(name for name in first if name != query.modality)
    known = [*embedder.branches]
    known += [embedder.trained.derived.name] if embedder.trained.derived else []
    known += [WINDOW] if in_time(embedder.branches) else []
    if asked not in known:
        raise ValueError(f"--find {asked}: this model has {', '.join(known)}; give one of these")
    return asked


def embedded_query(query: Query, embedder: Embedder) -> Tensor:
    """[1, D]"""
    if query.value is None:
        return embedder.texts([query.words])
    value = query.value.clip if isinstance(query.value, FilmView) else query.value.data
    one = as_source([value], query.words)
    return embedder.rows(query.modality, one, np.zeros(1, np.int64)).embeds


def find(
    arguments: argparse.Namespace, embedder: Embedder, model: Mapping[str, str], number: int
) -> None:
    """Show what is most like the query, and draw it where that is asked for."""
    query = read_query(arguments.query, embedder.branches)
    modality = answers_of(query, embedder, arguments.find)
    embeds, lines, source = _searched(arguments, embedder, model, modality)
    found = search(embedded_query(query, embedder), embeds, lines, number, modality == WINDOW)
    show(search_table(query.words, found))
    if arguments.picture and source is not None:
        label = Path(query.words).name if query.value else query.words
        of = in_time(embedder.branches) if modality == WINDOW else shown_as(modality)
        cells = [_cell(source, of or modality, line) for line in found]
        # the query stands before the first row only
        rows = [
            [None if i else Cell(query.value, label), *cells[i : i + IN_A_ROW]]
            for i in range(0, max(1, len(cells)), IN_A_ROW)
        ]
        title = f"“{label}”, {model['checkpoint']}"
        draw_rows(rows, title, arguments.picture)


def search(
    query: Tensor,
    embeds: Tensor | np.ndarray,
    lines: Sequence[Line],
    number: int,
    every: bool = False,
) -> list[dict[str, Any]]:
    """The `number` rows most like a query [1, D], best first: their lines, with
    "similarity". `every`: rows are windows of films, of which each film's best one is shown."""
    how_many = len(lines) if every else number
    index, similarity = nearest(query, torch.as_tensor(np.array(embeds)), how_many)
    found: dict[int, dict[str, Any]] = {}  # of each film the best window
    for i, s in zip(index[0].tolist(), similarity[0].tolist()):
        found.setdefault(lines[i]["index"] if every else i, {**lines[i], "similarity": round(s, 4)})
    return [*found.values()][:number]


def search_table(query: str, found: Sequence[Line]) -> Table:
    """Texts that were found, and the captions of what else was, have a column of their own."""
    table = Table(title=f"“{query}”", title_justify="left")
    there = {name for line in found for name in line}
    names = [*(name for name in ("text", "caption") if name in there), "id", "where"]
    table.add_column("similarity", justify="right", overflow="fold")
    for name in names:
        table.add_column(name, overflow="fold")
    for line in found:
        table.add_row(
            f"{line['similarity']:.3f}", *(plain(str(line.get(name, ""))) for name in names)
        )
    return table


def _searched(
    arguments: argparse.Namespace, embedder: Embedder, model: Mapping[str, str], modality: str
) -> tuple[np.ndarray | Tensor, Sequence[Line], KnownSource | None]:
    """(rows [n, D], the line of each, where they are from if that is needed)."""
    if arguments.embeddings and modality == WINDOW:
        raise ValueError(
            "--find window: windows are embedded when they are looked for; leave out --embeddings "
            f"{arguments.embeddings}"
        )
    if arguments.embeddings:
        embeds, lines, specs = read_embeddings(arguments.embeddings, model, modality)
        if not (arguments.val_data or arguments.picture):
            return embeds, lines, None
        # about.json names the data, and whoever wrote it is not trusted to run modules
        if not arguments.val_data:
            import_recorded(modules_of_specs(specs), arguments.embeddings)
        given = [arguments.val_data] if arguments.val_data else specs
        source = open_sources(given, pairs=embedder.trained.read, progress=True)
        refuse_other_data(arguments.embeddings, lines, source, modality)
        return embeds, lines, source
    there_is = in_time(embedder.branches) if modality == WINDOW else modality
    assert there_is is not None
    parts = list(held_out(arguments, embedder.trained).values())
    source = parts[0].source  # of all parts
    subset = np.concatenate([part.subset for part in parts])
    there = subset[~source.lacking(there_is)[subset]]
    if not len(there):
        raise ValueError(
            f"--query: no sample of {source.spec} has {there_is} to find; give others with "
            "--val-data, or another modality with --find"
        )
    if modality in DERIVED:
        _, found = embedder.annotated(DERIVED[modality], source, there)
        return found.rows.embeds, [*annotation_lines(found, source, modality)], source
    if modality == WINDOW:
        films = [*embedded_windows(embedder, source, there)]
        of_windows = [
            line
            for own, spans, _ in films
            for line in _window_lines(source, there_is, own[0], spans)
        ]
        return torch.cat([found for *_, found in films]), of_windows, source
    rows = {modality: embedder.rows(modality, source, there)}
    return rows[modality].embeds, [*lines_for(rows, source, modality)], source


def _window_lines(source: KnownSource, branch: str, i: int, windows: np.ndarray) -> Iterator[Line]:
    """Of each window of the film of sample i; its text says when it is."""
    where, identity = source.where(i, branch), source.identity(i)
    for start_s, end_s in windows.tolist():
        text, span = f"{start_s:.1f} – {end_s:.1f} s", (start_s, end_s)
        yield {"index": i, "id": identity, "where": where, "text": text, "span": span}


def _cell(source: KnownSource, modality: str, line: Line) -> Cell:
    if "span" in line:  # a window of a film, or a moment
        clip: Any = Clip(source.value(modality, line["index"]).film, *line["span"])
        value: View | None = FilmView(clip)
    else:
        value = encoded(source, modality, line["index"])
    text = line.get("text")
    text = caption_of(source, line["index"]) if text is None else text
    return Cell(value, text, line["similarity"], box=line.get("box"))
