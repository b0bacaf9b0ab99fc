"""Token counts of the captions of the training samples, counted once and then memory-mapped.

N: training samples, T: their captions, all in a row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast
from zlib import crc32

import numpy as np
from transformers import PreTrainedTokenizerBase

from common.files import read_json, replacing_folder, write_text
from data.batching.draws import caption_numbers
from data.identity import fingerprint
from data.index.sources import KnownSource, Source
from data.modalities.tokenizer import token_lengths
from data.progress import progress_bar

TOKENS_VERSION = 2  # raised when the same texts and tokenizer give other counts
TEXTS_AT_ONCE = 1000
TYPICAL_TEXTS = 1 << 16


class Counts(Protocol):
    """Token counts of training samples, see `TokenCounts`."""

    def of(
        self, visited: np.ndarray, indices: np.ndarray, seed: int, epoch: int, captions: int = 1
    ) -> np.ndarray: ...

    def longest(self, visited: np.ndarray, indices: np.ndarray) -> np.ndarray: ...

    def typical(self) -> np.ndarray: ...


@dataclass(frozen=True, eq=False)
class TokenCounts:
    """`counts` [T] uint16; sample k of the training subset has those from `starts[k]` to `starts[k
    + 1]`, [N + 1] int64."""

    counts: np.ndarray
    starts: np.ndarray

    def of(
        self,
        visited: np.ndarray,
        indices: np.ndarray,
        seed: int,
        epoch: int,
        captions_per_image: int = 1,
    ) -> np.ndarray:
        """[G, c] int64: tokens of the c captions that each sample shows in this epoch. `visited`
        [G]: numbers in the subset, `indices` [G] in the source."""
        first = self.starts[visited]
        number = self.starts[visited + 1] - first
        shown = np.zeros((len(visited), captions_per_image), np.int64)
        for k in np.flatnonzero(number > 1).tolist():
            sample, captions = int(indices[k]), int(number[k])
            shown[k] = caption_numbers(seed, epoch, sample, captions, captions_per_image)
        return self.counts[first[:, None] + shown].astype(np.int64)

    def longest(self, visited: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """[G] int64: tokens of the longest caption of each sample."""
        return longest_of(self.counts, self.starts, visited)

    def typical(self) -> np.ndarray:
        """[n]: counts of some captions."""
        return self.counts[:TYPICAL_TEXTS]


def longest_of(counts: np.ndarray, starts: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """[n] int64: the largest of `counts[starts[row] : starts[row + 1]]` of each row [n]."""
    first, last = starts[rows], starts[rows + 1] - 1
    each = first[:, None] + np.arange((last - first).max(initial=0) + 1)
    return counts[np.minimum(each, last[:, None])].max(axis=1).astype(np.int64)


def token_counts(
    source: Source,
    subset: np.ndarray,
    tokenizer: PreTrainedTokenizerBase,
    max_text_tokens: int,
    folder: Path,
    progress: bool = False,
) -> TokenCounts:
    """Token counts from `folder`, where they are written the first time. The special tokens count
    too; longer texts count `max_text_tokens`."""
    made_of = {
        "version": TOKENS_VERSION,
        "samples": crc32(np.ascontiguousarray(subset).data),
        "texts": cast(KnownSource, source).texts_fingerprint(),
        "max_text_tokens": max_text_tokens,
        "tokenizer": tokenizer_digest(tokenizer),
    }
    file = folder / "made_of.json"
    if not (file.is_file() and read_json(file) == made_of):
        shown = progress_bar(subset, "counting tokens", "sample", shown=progress)
        captions = (source.captions(int(i)) for i in shown)
        counts, starts = counts_of_captions(captions, tokenizer, max_text_tokens)
        with replacing_folder(folder) as beside:
            np.save(beside / "counts.npy", counts)
            np.save(beside / "starts.npy", starts)
            write_text(beside / "made_of.json", json.dumps(made_of))
    return TokenCounts(
        *(np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("counts", "starts"))
    )


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Equal for tokenizers that make the same tokens."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return fingerprint(sorted(tokenizer.get_vocab().items()))
    content = json.loads(fast.to_str())
    # what the last call asked for, which is another one after each
    return fingerprint(content | {"truncation": None, "padding": None})


def counts_of_captions(
    captions: Iterable[Sequence[str]], tokenizer: PreTrainedTokenizerBase, max_text_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """`counts` and `starts` of the captions of each sample; one without shows an empty text, which
    no pair compares."""
    counts: list[np.ndarray] = [np.empty(0, np.uint16)]
    numbers: list[int] = []
    waiting: list[str] = []

    def count() -> None:
        counts.append(np.array(token_lengths(tokenizer, waiting, max_text_tokens), np.uint16))
        waiting.clear()

    for texts in captions:
        numbers.append(len(texts) or 1)
        waiting += texts or [""]
        if len(waiting) >= TEXTS_AT_ONCE:
            count()
    if waiting:
        count()
    return np.concatenate(counts), np.concatenate([[0], np.cumsum(numbers, dtype=np.int64)])
