"""Token counts of the captions of the training samples, counted once and then memory-mapped.

N: training samples, T: their captions, all in a row.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from common.files import read_json, replacing_folder, write_text
from data.batching.draws import caption_numbers
from data.index.sources import Source
from data.modalities.tokenizer import token_lengths
from data.progress import progress_bar

TEXTS_AT_ONCE = 1000


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

    def longest(self) -> np.ndarray:
        """[N] int64: tokens of the longest caption of each sample."""
        return np.maximum.reduceat(self.counts, self.starts[:-1]).astype(np.int64)


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
        "samples": len(subset),
        "max_text_tokens": max_text_tokens,
        "vocabulary": len(tokenizer),
    }
    file = folder / "made_of.json"
    if not (file.is_file() and read_json(file) == made_of):
        counts, starts = _count(source, subset, tokenizer, max_text_tokens, progress)
        with replacing_folder(folder) as beside:
            np.save(beside / "counts.npy", counts)
            np.save(beside / "starts.npy", starts)
            write_text(beside / "made_of.json", json.dumps(made_of))
    return TokenCounts(
        *(np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("counts", "starts"))
    )


def _count(
    source: Source,
    subset: np.ndarray,
    tokenizer: PreTrainedTokenizerBase,
    max_text_tokens: int,
    progress: bool,
) -> tuple[np.ndarray, np.ndarray]:
    counts: list[np.ndarray] = []
    numbers, waiting = np.empty(len(subset), np.int64), []
    for k, i in enumerate(progress_bar(subset, "counting tokens", "sample", shown=progress)):
        # a sample without a text shows an empty one, which no pair compares
        captions = source.captions(int(i)) or [""]
        numbers[k] = len(captions)
        waiting += captions
        if len(waiting) >= TEXTS_AT_ONCE or k + 1 == len(subset):
            lengths = token_lengths(tokenizer, waiting, max_text_tokens)
            counts.append(np.array(lengths, np.uint16))
            waiting = []
    return np.concatenate(counts), np.concatenate([[0], np.cumsum(numbers)])
