"""Clips in time: whether a model knows what comes first, and where in a film a sentence holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from torch import Tensor

from data.bad_samples import Absent, BadSample
from data.clips import Clip
from data.index.sources import KnownSource
from data.stored.kinds import text_of
from launch.inference.embedding import Embedded, Embedder, as_source
from launch.modalities import in_windows
from models.metrics.grounding import (
    MOST,
    OVERLAPS,
    chosen_overlap,
    grounding_figures,
    overlap_shares,
    overlaps_by_text,
    windows,
)
from models.metrics.retrieval import TOLERANCE

PART = 0.95  # of its film, at most, has a clip that is looked for in it
LENGTHS = (0.25, 0.5, 0.75)  # quantiles of the clips' lengths, of which windows are made
PARTS = (1 / 8, 1 / 4, 1 / 2)  # of films of which no clip is known
ORDER = "video_to_order"

PROTOCOL = (
    "grounding: among windows of the film, as long as the quartiles of the set's clips and a "
    f"quarter of that apart, at most {MOST:,} of a length, the sentence chooses the most similar one; "
    "right if its intersection over union in time with a clip of that sentence is at least that. "
    "order: the caption is more similar to the film than the one that tells the same events backwards"
)


def in_time(branches: Iterable[str]) -> str | None:
    """The branch in whose values windows are looked for, if one is."""
    return next(filter(in_windows, branches), None)


def clip_figures(embedder: Embedder, embedded: Embedded, source: KnownSource) -> dict[str, float]:
    """Of the samples with a film and a text; none where there is nothing to ask."""
    films, text = in_time(embedded.rows), text_of(embedded.rows)
    if films is None or text is None:
        return {}
    asked = embedder, embedded, source, films, text
    return _order(*asked) | _grounding(*asked)


def _order(
    embedder: Embedder, embedded: Embedded, source: KnownSource, branch: str, text_branch: str
) -> dict[str, float]:
    reverse = getattr(source, "reversed_caption", lambda i: None)
    films, texts = embedded.both(branch, text_branch)
    reversals = enumerate(map(reverse, films.sample.tolist()))
    backwards = {row: text for row, text in reversals if text is not None}
    if not backwards:
        return {}
    asked, other = [*backwards], embedder.texts([*backwards.values()])
    own = films.embeds[asked]
    first = {i: row for row, i in reversed([*enumerate(texts.sample.tolist())])}
    told = texts.embeds[[first[int(films.sample[row])] for row in asked]]
    right = (own.double() * (told.double() - other.double())).sum(1) > TOLERANCE
    return {f"{ORDER}_right": right.float().mean().item(), f"{ORDER}_queries": float(len(asked))}


def _spans(
    source: KnownSource, branch: str, samples: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the clips of samples [n] begin and end in their films, and how long these are, in
    seconds: [n] each."""
    start, end, whole = (f"{branch}_{name}" for name in ("start_s", "end_s", "seconds"))
    return (
        source.numbers(start, samples),
        source.numbers(end, samples),
        source.numbers(whole, samples),
    )


def _film_windows(
    source: KnownSource, branch: str, samples: np.ndarray
) -> dict[bytes, tuple[list[int], np.ndarray]]:
    """By film: the samples, of `samples` [n], that are clips of it, and its windows [w, 2],
    seconds, as long as the quartiles of those clips that are a part of their films; where none is,
    as parts of the film."""
    starts, ends, films_s = _spans(source, branch, samples)
    lengths = (ends - starts)[ends - starts < PART * films_s]
    usual = np.quantile(lengths, LENGTHS).tolist() if len(lengths) else None
    of_film: dict[bytes, list[int]] = {}
    for i in samples.tolist():
        of_film.setdefault(source.content_hash(branch, i), []).append(i)
    seconds = dict(zip(samples.tolist(), films_s.tolist()))
    found = {}
    for key, own in of_film.items():
        film_s = seconds[own[0]]
        every = windows(film_s, usual or [part * film_s for part in PARTS])
        # those that share frames are loaded together
        found[key] = own, every[np.argsort(every[:, 0], kind="stable")]
    return found


def embedded_windows(
    embedder: Embedder, source: KnownSource, samples: np.ndarray
) -> Iterator[tuple[list[int], np.ndarray, Tensor]]:
    """Of each film of which some of `samples` [n] are clips: these, its windows [w, 2], seconds, as
    they begin, and their embeddings [w, D]. What cannot be read is left out, with a message."""
    branch = in_time(embedder.branches)
    assert branch is not None
    films: list[tuple[list[int], np.ndarray]] = []
    clips: list[Clip] = []
    for own, every in _film_windows(source, branch, samples).values():
        try:
            film = source.value(branch, own[0]).film
        except (BadSample, Absent) as problem:
            print(f"{source.where(own[0], branch)}: {problem}. Its windows are left out.")
            continue
        films.append((own, every))
        clips += [Clip(film, *span) for span in every.tolist()]
    rows = embedder.rows(branch, as_source(clips, source.spec), np.arange(len(clips)))
    number, at = rows.sample.numpy(), 0
    for own, every in films:
        begin, end = np.searchsorted(number, (at, at + len(every))).tolist()
        yield own, every[number[begin:end] - at], rows.embeds[begin:end]
        at += len(every)


def _grounding(
    embedder: Embedder, embedded: Embedded, source: KnownSource, branch: str, text_branch: str
) -> dict[str, float]:
    texts, rows = embedded.rows[text_branch], embedded.rows[branch].sample.numpy()
    starts, ends, films_s = _spans(source, branch, rows)
    is_part = ends - starts < PART * films_s
    if not is_part.any():
        return {}
    span = {int(i): (float(a), float(b)) for i, a, b in zip(rows, starts, ends)}
    queries: dict[int, list[int]] = {}
    for row, i in enumerate(texts.sample.tolist()):
        queries.setdefault(i, []).append(row)
    found = []
    for own, every, embeds in embedded_windows(embedder, source, rows[is_part]):
        asked = [(i, row, int(texts.key[row])) for i in own for row in queries.get(i, ())]
        if not asked or not len(every):
            continue
        places = overlaps_by_text(every, [(text, *span[i]) for i, _, text in asked])
        own_texts = texts.embeds[[row for _, row, _ in asked]].double()
        for (_, _, text), alike in zip(asked, (own_texts @ embeds.double().T).numpy()):
            found.append((chosen_overlap(alike, places[text]), overlap_shares(places[text])))
    return grounding_figures(found)


def clip_rows(values: Mapping[str, float], held_out: str) -> list[dict[str, str]]:
    """Lines of a table."""
    lines: list[tuple[str, float, float, float]] = []
    if f"{ORDER}_right" in values:
        queries = values[f"{ORDER}_queries"]
        lines.append(("video → order of events", queries, values[f"{ORDER}_right"], 0.5))
    for least in OVERLAPS if "grounding_queries" in values else ():
        found, chance = (values[f"grounding_{name}_iou_{least}"] for name in ("R@1", "chance"))
        queries = values["grounding_queries"]
        lines.append((f"text → window, IoU >= {least}", queries, found, chance))
    return [
        {
            "held-out set": f"{held_out} ({queries:g})",
            "query → answer": question,
            "right %": f"{100 * right:.1f}",
            "chance %": f"{100 * chance:.1f}",
        }
        for question, queries, right, chance in lines
    ]
