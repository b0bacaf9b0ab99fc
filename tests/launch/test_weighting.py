"""From the `sample_weights` block to the order of the training samples, or to weights of the
loss."""

from dataclasses import replace

import numpy as np
import pytest

from data.batching.sampler import GlobalOrder
from data.options import DataOptions
from data.prepare import prepare_data
from launch.balancing.weighting import loss_weights_of, text_lengths, training_order
from launch.config.blocks import SampleWeightsBlock


@pytest.fixture(scope="module")
def data(module_folder):
    return prepare_data(DataOptions(data=("demo:en+de+es+fr+it",)), None, module_folder("run"))


def tokens(data, i):
    """Of the longest caption, the special ones included."""
    return max(
        len(data.tokenizer(caption)["input_ids"]) for caption in data.source.captions(int(i))
    )


def test_the_block_makes_the_order_or_the_weights_of_the_loss(data, tmp_path):
    plain = GlobalOrder(len(data.train), 48, 3, data.parts)
    for block in (None, SampleWeightsBlock(use="loss")):
        lengths = text_lengths(data, block, 32, tmp_path)
        assert training_order(data, 48, 3, block, lengths) == plain
    assert loss_weights_of(data, None, None) is None
    assert loss_weights_of(data, SampleWeightsBlock(use="curriculum", epochs=1), lengths) is None
    weights_of = loss_weights_of(data, SampleWeightsBlock(use="loss", image=0, text=1), lengths)
    indices = data.train[[7, 0, 300, 41, 5]]
    expected = np.array([tokens(data, i) for i in indices])
    assert weights_of(indices) / 1e6 == pytest.approx(expected / expected.mean(), abs=1e-6)
    taught = training_order(
        data, 48, 3, SampleWeightsBlock(use="curriculum", image=0, text=1, epochs=2), lengths
    )
    steps = plain.steps_per_epoch
    mean = [
        lengths[taught.batch(step)].mean()
        for step in (0, steps // 2, steps - 1, 2 * steps, 3 * steps - 1)
    ]
    assert mean[0] < 0.7 * mean[1] < 0.6 * mean[2] and 0.6 < mean[3] / mean[4] < 1.6


def test_a_caption_weighs_by_its_tokens_in_any_script(tmp_path):
    """Chinese has a third as many characters as English for about the same tokens."""
    data = prepare_data(DataOptions(data=("demo:en", "demo:zh"), val_fraction=0.0), None, tmp_path)
    block = SampleWeightsBlock(use="loss", image=0, text=1)
    by = {
        unit: text_lengths(data, replace(block, length=unit), 32, tmp_path)
        for unit in ("tokens", "characters")
    }
    chinese = data.train >= data.source_starts[1]
    means = {
        unit: lengths[chinese].mean() / lengths[~chinese].mean() for unit, lengths in by.items()
    }
    assert means["characters"] < 0.5 and 0.7 < means["tokens"] < 1.5
    assert by["tokens"][[0, -1]].tolist() == [
        tokens(data, data.train[0]),
        tokens(data, data.train[-1]),
    ]
    assert by["characters"][0] == max(map(len, data.source.captions(int(data.train[0]))))
    share = (
        loss_weights_of(data, block, by["tokens"])(data.train)[chinese].sum()
        / 1e6
        / len(data.train)
    )
    assert share == pytest.approx(by["tokens"][chinese].sum() / by["tokens"].sum(), abs=1e-4)
