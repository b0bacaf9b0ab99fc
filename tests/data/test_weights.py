"""What a sample weighs, in the loss or for the order from easy to hard."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from data.batching.feed import FeedRates
from data.batching.mixture import open_sources
from data.batching.sampler import GlobalOrder, training_requests
from data.batching.settings import Setting, Settings
from data.batching.weights import LARGEST, SPREAD, Curriculum, loss_weights, sample_weights
from data.loader import MicroBatchDataset, micro_batches
from data.modalities.image import ImageModality
from data.modalities.text import TextModality
from data.modalities.transforms import eval_transform, train_transform

RNG = np.random.default_rng(0)
COMPLEXITY, CHARACTERS = (
    RNG.gamma(2, 0.1, 400).astype(np.float32),
    RNG.integers(3, 90, 400).astype(np.int32),
)


def spearman(a, b):
    return float(np.corrcoef(np.argsort(np.argsort(a)), np.argsort(np.argsort(b)))[0, 1])


# -- the formula


def test_the_documented_formula():
    assert sample_weights(np.array([1, 3]), np.array([10, 30]), 0.3, 0.7) == pytest.approx(
        [0.5, 1.5]
    )
    found = sample_weights(np.array([1, 3]), np.array([30, 10]), 0.3, 0.7)
    assert found == pytest.approx([0.3 * 0.5 + 0.7 * 1.5, 0.3 * 1.5 + 0.7 * 0.5])


def test_the_mean_is_one_whatever_the_units_and_the_sum_of_the_coefficients():
    for image, text in ((0.3, 0.7), (2, 5), (1, 0), (0, 1)):
        found = sample_weights(COMPLEXITY, CHARACTERS, image, text)
        assert found.mean() == pytest.approx(1) and (found > 0).all()
        assert sample_weights(1000 * COMPLEXITY, CHARACTERS, 3 * image, 3 * text) == pytest.approx(
            found, rel=1e-5
        )
    assert sample_weights(COMPLEXITY, CHARACTERS, 1, 0) == pytest.approx(
        COMPLEXITY / COMPLEXITY.mean(), rel=1e-5
    )
    assert sample_weights(np.zeros(4), np.array([1, 1, 1, 5]), 0.5, 0.5) == pytest.approx(
        [0.75, 0.75, 0.75, 1.75]
    )


def test_seconds_of_sounds_weigh_where_they_are_asked_for():
    complexity, length, seconds = np.array([1, 3]), np.array([30, 10]), np.array([4.0, 12.0])
    plain = sample_weights(complexity, length, 0.3, 0.7)
    np.testing.assert_array_equal(sample_weights(complexity, length, 0.3, 0.7, seconds), plain)
    assert sample_weights(complexity, length, 0, 0, seconds, 2) == pytest.approx([0.5, 1.5])
    both = sample_weights(complexity, length, 0, 1, seconds, 3)
    assert both == pytest.approx([0.25 * 1.5 + 0.75 * 0.5, 0.25 * 0.5 + 0.75 * 1.5])


def test_a_sample_without_an_image_or_a_text_counts_as_the_mean_of_the_others():
    complexity, length = np.array([2.0, 0.0, 4.0]), np.array([10, 30, 0])
    assert sample_weights(complexity, length, 1, 0) == pytest.approx([2 / 3, 1, 4 / 3])
    assert sample_weights(complexity, length, 0, 1) == pytest.approx([0.5, 1.5, 1])


def test_the_weights_of_a_global_batch_are_whole_millionths_of_the_indexs_columns(emoji_set):
    source = open_sources(
        [f"jsonl:{emoji_set(12, texts=lambda caption: caption * (1 + len(caption) % 5))}"]
    )
    indices, subset, lengths = (
        np.array([3, 11, 0, 7]),
        np.array([0, 3, 5, 7, 11]),
        np.array([9, 4, 100, 6, 2]),
    )
    found = loss_weights(source, subset, lengths, 0.3, 0.7, indices)
    assert found.dtype == np.int64 and len(set(found.tolist())) == 4
    expected = sample_weights(
        source.column("complexity")[indices], np.array([4, 2, 9, 6]), 0.3, 0.7
    )
    assert found / 1e6 == pytest.approx(expected, abs=1e-6)


def test_no_weight_leaves_31_bits():
    class Source:
        def column(self, name):
            return np.array([1e8] + [1] * 9999)

    numbers = np.arange(10_000)
    assert (
        loss_weights(Source(), numbers, numbers, 1, 0, numbers).tolist() == [LARGEST] + [100] * 9999
        and LARGEST < 2**31
    )


# -- how a weight travels


class Whole:
    """Deals texts in contiguous parts."""

    deals_texts, equal_shares = True, False

    def shares(self, batch, replicas, num_micro_batches):
        texts = np.arange(len(batch.visited) * batch.setting.feed_rates.captions_per_image)
        return [(part, None) for part in np.array_split(texts, replicas * num_micro_batches)]


@pytest.mark.parametrize("captions, dealer", [(1, None), (3, None), (3, Whole())])
def test_every_row_of_a_batch_has_the_weight_of_its_sample_in_the_whole_batch(
    demo, tokenizer, captions, dealer
):
    """Whoever loads it, in however many micro-batches: a weight is of the global batch, not of the
    micro-batch."""
    order, subset, weights_of = (
        GlobalOrder(40, 12, seed=1),
        np.arange(300, 340),
        partial(loss_weights, demo, np.arange(len(demo)), demo.column("num_characters"), 0.3, 0.7),
    )
    settings = Settings(
        [Setting(0, {"image": 3, "text": 2}, feed_rates=FeedRates(captions_per_image=captions))]
    )
    expected = weights_of(subset[order.batch(2)])
    dataset = {
        "image": MicroBatchDataset(demo, [ImageModality(train_transform(16), eval_transform(16))]),
        "text": MicroBatchDataset(demo, [TextModality(tokenizer, 16)]),
    }
    for branch, per_sample in (("image", 1), ("text", captions)):
        found = np.zeros(12 * per_sample, np.int64)
        for replica in range(2):
            own = [dealer] if branch == "text" and dealer else []
            requests = training_requests(
                order, subset, replica, 2, branch, settings, 2, 3, own, weights_of
            )
            for batch in micro_batches(dataset[branch], requests):
                weight = batch[f"{branch}_weight"]
                assert str(weight.dtype) == "torch.int64" and {
                    n for n in batch if n.endswith("_weight")
                } == {f"{branch}_weight"}
                found[batch[f"{branch}_position"]] = weight
        assert (
            found.tolist() == np.repeat(expected, per_sample).tolist()
            and len(set(expected.tolist())) > 4
        )
    plain = training_requests(order, subset, 0, 1, "image", settings, 2, 3)
    assert not any(
        name.endswith("weight")
        for batch in micro_batches(dataset["image"], plain)
        for name in batch
    )


# -- the curriculum

N, G, EPOCHS = 400, 24, 4
PLAIN = GlobalOrder(N, G, seed=5)
TAUGHT = replace(PLAIN, curriculum=Curriculum(CHARACTERS, EPOCHS))


def epoch(order, number):
    steps = order.steps_per_epoch
    return np.concatenate(
        [order.batch(step) for step in range(number * steps, (number + 1) * steps)]
    )


def test_every_epoch_visits_the_samples_of_the_plain_shuffle_once():
    for number in range(EPOCHS + 2):
        assert sorted(epoch(TAUGHT, number).tolist()) == sorted(epoch(PLAIN, number).tolist())
        assert len(set(epoch(TAUGHT, number).tolist())) == 16 * G


def test_the_order_goes_from_easy_to_hard_less_each_epoch_until_it_is_the_plain_shuffle():
    along = [
        spearman(np.arange(16 * G), CHARACTERS[epoch(TAUGHT, number)]) for number in range(EPOCHS)
    ]
    assert (
        along[0] > 0.9
        and all(later < earlier for earlier, later in zip(along, along[1:]))
        and 0.05 < along[-1] < 0.5
    )
    for number in (EPOCHS, EPOCHS + 1):
        assert epoch(TAUGHT, number).tolist() == epoch(PLAIN, number).tolist()


def test_the_documented_order_of_an_epoch():
    shuffled = epoch(PLAIN, 1)
    mixed = SPREAD + (1 - SPREAD) / EPOCHS
    rank = {
        visit: place
        for place, visit in enumerate(
            sorted(range(len(shuffled)), key=lambda u: (CHARACTERS[shuffled[u]], u))
        )
    }
    order = sorted(range(len(shuffled)), key=lambda u: (1 - mixed) * rank[u] + mixed * u)
    assert epoch(TAUGHT, 1).tolist() == shuffled[order].tolist()


def test_a_batch_is_not_made_of_equals_only():
    rank = np.argsort(np.argsort(CHARACTERS, kind="stable"))
    in_the_middle = [rank[TAUGHT.batch(step)] for step in range(4, 12)]
    assert np.mean([np.ptp(ranks) for ranks in in_the_middle]) > 0.25 * N


def test_only_the_order_of_the_difficulties_counts_and_equals_come_as_the_shuffle_has_them():
    assert (
        epoch(replace(PLAIN, curriculum=Curriculum(np.exp(0.1 * CHARACTERS), EPOCHS)), 0).tolist()
        == epoch(TAUGHT, 0).tolist()
    )
    assert (
        epoch(replace(PLAIN, curriculum=Curriculum(np.ones(N), EPOCHS)), 0).tolist()
        == epoch(PLAIN, 0).tolist()
    )


def test_a_curriculum_goes_together_with_weights_of_data_sets_and_with_resuming():
    parts = ((100, 2.0), (300, 0.5))
    order = GlobalOrder(N, G, 5, parts, curriculum=Curriculum(CHARACTERS, EPOCHS))
    assert sorted(epoch(order, 0).tolist()) == sorted(
        epoch(replace(order, curriculum=None), 0).tolist()
    )
    assert (
        np.bincount(epoch(replace(order, global_batch_size=1), 0), minlength=N)[:100].tolist()
        == [2] * 100
    )
    again = replace(order, curriculum=Curriculum(CHARACTERS.copy(), EPOCHS))
    assert all(np.array_equal(again.batch(step), order.batch(step)) for step in (40, 3, 17))


def test_a_curriculum_of_another_number_of_samples_is_refused():
    with pytest.raises(
        ValueError, match="a curriculum of 399 samples for an order of 400; they must be equal"
    ):
        replace(PLAIN, curriculum=Curriculum(CHARACTERS[1:], EPOCHS))
