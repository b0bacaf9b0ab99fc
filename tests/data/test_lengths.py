"""Token counts of the training captions are those that the loader will see."""

import numpy as np
import pytest
from plain_requests import request_of

from data.index.sources import open_source
from data.loader import MicroBatchDataset
from data.modalities import lengths
from data.modalities.lengths import token_counts
from data.modalities.text import TextModality


def test_counts_are_the_lengths_of_what_is_loaded(emoji_set, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(lengths, "TEXTS_AT_ONCE", 7)
    source = open_source(
        f"jsonl:{emoji_set(30, texts=lambda caption: [caption, caption + ' once more', 'x'][: 1 + len(caption) % 3])}"
    )
    subset = np.arange(3, 30, dtype=np.int64)
    counts = token_counts(source, subset, tokenizer, 9, tmp_path / "counts")
    dataset = MicroBatchDataset(source, [TextModality(tokenizer, 9)], seed=5)
    for epoch in range(4):
        visited = np.random.default_rng(epoch).permutation(27)
        expected = dataset[request_of(subset[visited], epoch)]["attention_mask"].sum(1)
        assert counts.of(visited, subset[visited], 5, epoch)[:, 0].tolist() == expected.tolist()
    assert counts.counts.max() == 9  # cut


def test_they_are_counted_once(emoji_set, tokenizer, tmp_path, monkeypatch):
    source = open_source(f"jsonl:{emoji_set(12)}")
    first = token_counts(source, source.usable(), tokenizer, 16, tmp_path / "counts")
    monkeypatch.setattr(lengths, "counts_of_captions", lambda *_: pytest.fail("counted again"))
    again = token_counts(source, source.usable(), tokenizer, 16, tmp_path / "counts")
    assert np.array_equal(first.counts, again.counts) and isinstance(again.counts, np.memmap)
    monkeypatch.undo()
    # of other samples: anew
    fewer = token_counts(source, source.usable()[:5], tokenizer, 16, tmp_path / "counts")
    assert fewer.counts.tolist() == first.counts[:5].tolist()
