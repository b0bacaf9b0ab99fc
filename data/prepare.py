"""Preparation of a run's data: source, splits and tokenizer, made of the command line's options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from data.batching.rows import Rows
from data.index.sources import Source
from data.modalities.tokenizer import load_tokenizer, refuse_unknown_words, train_tokenizer
from data.options import DataOptions, derived_of, read_pairs
from data.prepared import EXAMPLES, PreparedData
from data.sets import open_sets
from data.stored.kinds import annotations_of, stored, text_of
from data.streams.several import texts_alone

SAMPLES_TRIED = 1000  # with a tokenizer that is given


def prepare_data(
    options: DataOptions,
    tokenizer: str | None,
    folder: Path,
    workers: int | None = None,
    progress: bool = False,
    length_multiple: int = 1,
    looks: bool = True,
) -> PreparedData:
    """Open, check, divide and tokenize; what takes long is kept in `folder`, or in the cache, and
    found there the next time.

    Held-out samples come from `val_data` when given, else are `val_fraction` of `data`. `tokenizer`
    is a folder or a Hugging Face id; None trains a WordPiece on the training captions. Where no
    pair has texts there is none. `looks`: whether this process looks if shards of streams are still
    what they were; else it takes what another one found and kept in `folder`. Bad samples are
    listed in `folder`/bad_samples.jsonl. Where processes share `folder`, one goes first and the
    others find what it made. Errors: ValueError, OSError.
    """
    building: dict[str, Any] = {
        "workers": workers,
        "progress": progress,
        "check": options.index_check,
        "max_audio_seconds": options.max_audio_seconds,
        "pairs": options.compared(),
    }
    opened = open_sets(options, building, folder, looks)
    empty = empty_pairs(opened, options.pairs) if looks or not opened.shards else []
    if empty and not opened.shards:
        raise ValueError("\n".join(empty))
    return replace(
        opened,
        notes=tuple(empty),
        tokenizer=_tokenizer(options, tokenizer, folder / "tokenizer", opened),
        length_multiple=length_multiple,
    )


def empty_pairs(data: PreparedData, given: str) -> list[str]:
    """Of each pair of `--pairs` of which no training sample has both values, or none that was looked
    at, what is missing and where it would stand. A single pair is that of all usable samples."""
    found, pairs = [], read_pairs(given)
    for pair in pairs if len(pairs) > 1 else ():
        one, other = pair.modalities
        if data.first_with(one, other) is not None:
            continue
        missing = [name for name in (one, other) if data.first_with(name) is None]
        places = "".join(f" ({stored(name).sought})" for name in missing)
        which = "no sample of the shards that come first" if data.shards else "no training sample"
        word = f"{pair.first}:{pair.second}"
        found.append(
            f"{data.source.spec}: {which} has {' and '.join(missing or ('both', one, other))}, which "
            f"--pairs {word} compares{places}; give data that has them, or leave {word} out"
            + ", unless shards that come later have them"
            * bool(data.shards)
        )
    return found


def _tokenizer(
    options: DataOptions, where: str | None, kept: Path, data: PreparedData
) -> PreTrainedTokenizerBase | None:
    """The tokenizer at `where`, else the one that is kept or trained into the folder `kept`."""
    if text_of(options.branches) is None:
        return None
    if where is None and kept.is_dir():
        return load_tokenizer(str(kept))
    few = data.examples(EXAMPLES if where is None else SAMPLES_TRIED)
    whole = few if data.shards else data.train
    if where is None:
        return train_tokenizer(_texts(options, data.source, whole), kept)
    tokenizer = load_tokenizer(where)
    tried = whole[:: 1 + len(whole) // SAMPLES_TRIED]
    refuse_unknown_words(where, tokenizer, _texts(options, data.source, tried))
    return tokenizer


def _texts(options: DataOptions, source: Source, samples: np.ndarray | Rows) -> Iterator[str]:
    """Captions, and the phrases of annotations, where a pair has them."""
    derived = derived_of(options.pairs)
    kinds = annotations_of((derived.name,)) if derived else []
    have = [source.numbers(kind.count, samples[:]) for kind in kinds]
    source = source if kinds else texts_alone(source)
    for place, i in enumerate(samples[:].tolist()):
        yield from source.captions(i)
        for kind, numbers in zip(kinds, have):
            for each in source.value(kind.name, i) if numbers[place] else ():
                yield from each.phrases
