"""What a sample weighs in the loss."""

from functools import partial

import numpy as np
import pytest
from plain_requests import square_images

from data.batching.batches import Batches, GlobalBatch, TextPacker
from data.batching.branch_cost import BranchCost
from data.batching.load_control import FeedRates
from data.batching.mixture import open_sources
from data.batching.order import GlobalOrder
from data.batching.settings import Setting
from data.batching.weights import LARGEST, loss_weights, sample_weights
from data.loader import MicroBatchDataset, micro_batches
from data.modalities.lengths import TokenCounts
from data.modalities.text import TextModality

RNG = np.random.default_rng(0)
COMPLEXITY, CHARACTERS = (
    RNG.gamma(2, 0.1, 400).astype(np.float32),
    RNG.integers(3, 90, 400).astype(np.int32),
)


def batch_of(visited, indices):
    return GlobalBatch(0, 0, visited, indices, Setting(0, {}))


def weights(complexity, length, image, text, seconds=0, audio=0):
    seconds = np.zeros(len(length)) + seconds
    return sample_weights([(image, complexity), (text, length), (audio, seconds)])


# -- the formula


def test_the_documented_formula():
    assert weights(np.array([1, 3]), np.array([10, 30]), 0.3, 0.7) == pytest.approx([0.5, 1.5])
    found = weights(np.array([1, 3]), np.array([30, 10]), 0.3, 0.7)
    assert found == pytest.approx([0.3 * 0.5 + 0.7 * 1.5, 0.3 * 1.5 + 0.7 * 0.5])


def test_the_mean_is_one_whatever_the_units_and_the_sum_of_the_coefficients():
    for image, text in ((0.3, 0.7), (2, 5), (1, 0), (0, 1)):
        found = weights(COMPLEXITY, CHARACTERS, image, text)
        assert found.mean() == pytest.approx(1) and (found > 0).all()
        assert weights(1000 * COMPLEXITY, CHARACTERS, 3 * image, 3 * text) == pytest.approx(
            found, rel=1e-5
        )
    assert weights(COMPLEXITY, CHARACTERS, 1, 0) == pytest.approx(
        COMPLEXITY / COMPLEXITY.mean(), rel=1e-5
    )
    assert weights(np.zeros(4), np.array([1, 1, 1, 5]), 0.5, 0.5) == pytest.approx(
        [0.75, 0.75, 0.75, 1.75]
    )


def test_seconds_of_sounds_weigh_where_they_are_asked_for():
    complexity, length, seconds = np.array([1, 3]), np.array([30, 10]), np.array([4.0, 12.0])
    plain = weights(complexity, length, 0.3, 0.7)
    np.testing.assert_array_equal(weights(complexity, length, 0.3, 0.7, seconds), plain)
    assert weights(complexity, length, 0, 0, seconds, 2) == pytest.approx([0.5, 1.5])
    both = weights(complexity, length, 0, 1, seconds, 3)
    assert both == pytest.approx([0.25 * 1.5 + 0.75 * 0.5, 0.25 * 0.5 + 0.75 * 1.5])


def test_a_sample_without_an_image_or_a_text_counts_as_the_mean_of_the_others():
    complexity, length = np.array([2.0, 0.0, 4.0]), np.array([10, 30, 0])
    assert weights(complexity, length, 1, 0) == pytest.approx([2 / 3, 1, 4 / 3])
    assert weights(complexity, length, 0, 1) == pytest.approx([0.5, 1.5, 1])


def test_the_weights_of_a_global_batch_are_whole_millionths_of_the_indexs_columns(emoji_set):
    file = emoji_set(12, texts=lambda caption: caption * (1 + len(caption) % 5))
    source = open_sources([f"jsonl:{file}"])
    visited, indices = np.array([1, 4, 0, 3]), np.array([3, 11, 0, 7])
    lengths = np.array([9, 4, 100, 6, 2])
    batch = batch_of(visited, indices)
    found = loss_weights(source, lambda batch: lengths[batch.visited], 0.3, 0.7, 0.0, batch)
    assert found.dtype == np.int64 and len(set(found.tolist())) == 4
    expected = weights(source.column("complexity")[indices], np.array([4, 2, 9, 6]), 0.3, 0.7)
    assert found / 1e6 == pytest.approx(expected, abs=1e-6)


def test_no_weight_leaves_31_bits():
    class Source:
        def numbers(self, name, index):
            return np.array([1e8] + [1] * 9999)

    numbers = np.arange(10_000)
    found = loss_weights(Source(), None, 1, 0, 0, batch_of(numbers, numbers))
    assert found.tolist() == [LARGEST] + [100] * 9999 and LARGEST < 2**31


# -- how a weight travels


@pytest.mark.parametrize("captions, packed", [(1, False), (3, False), (3, True)])
def test_every_row_of_a_batch_has_the_weight_of_its_sample_in_the_whole_batch(
    demo, tokenizer, captions, packed
):
    """Whoever loads it, in however many micro-batches: a weight is of the global batch, not of the
    micro-batch."""
    lengths = np.random.default_rng(0).integers(3, 30, 40)
    texts = TextPacker(TokenCounts(lengths, np.arange(41)), 32, 0) if packed else None
    setting = Setting(0, {"image": 3, "text": 2}, BranchCost(1, 1), FeedRates(captions))
    batches = Batches(
        GlobalOrder(40, 12, seed=1),
        np.arange(300, 340),
        [setting],
        texts=texts,
        weights_of=partial(loss_weights, demo, lambda batch: lengths[batch.visited], 0.3, 0.7, 0),
    )
    expected = batches.weights_of(batches.at(2))
    dataset = {
        "image": MicroBatchDataset(demo, [square_images(16)]),
        "text": MicroBatchDataset(demo, [TextModality(tokenizer, 16)]),
    }
    for branch, per_sample in (("image", 1), ("text", captions)):
        found = np.zeros(12 * per_sample, np.int64)
        for replica in range(2):
            requests = batches.requests(branch, replica, 2, 2, 3)
            for batch in micro_batches(dataset[branch], requests):
                weight = batch[f"{branch}_weight"]
                assert str(weight.dtype) == "torch.int64"
                assert {n for n in batch if n.endswith("_weight")} == {f"{branch}_weight"}
                found[batch[f"{branch}_position"]] = weight
        assert found.tolist() == np.repeat(expected, per_sample).tolist()
    assert len(set(expected.tolist())) > 4
    batches.weights_of = None
    for batch in micro_batches(dataset["image"], batches.requests("image", 0, 1, 2, 3)):
        assert not any(name.endswith("weight") for name in batch)
