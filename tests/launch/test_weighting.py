"""From the `sample_weights` block to the order of the training samples, or to weights of the loss."""

import pytest

from data.options import DataOptions
from data.prepare import prepare_data
from data.sampler import GlobalOrder
from engine.config import SampleWeightsBlock
from launch.weighting import loss_weights_of, training_order


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare_data(DataOptions(("demo:en+de+es+fr+it",)), None, tmp_path_factory.mktemp("run"))


def test_the_block_makes_the_order_or_the_weights_of_the_loss(data):
    plain = GlobalOrder(len(data.train), 48, 3, data.parts)
    for block in (None, SampleWeightsBlock(use="loss")):
        assert training_order(data, 48, 3, block) == plain
    assert loss_weights_of(data, None) is None and loss_weights_of(data, SampleWeightsBlock(use="curriculum", epochs=1)) is None
    weights_of = loss_weights_of(data, SampleWeightsBlock(use="loss", image=0, text=1))
    indices = data.train[:5]
    characters = data.source.column("num_characters")[indices]
    assert weights_of(indices) / 1e6 == pytest.approx(characters / characters.mean(), abs=1e-6)
    taught = training_order(data, 48, 3, SampleWeightsBlock(use="curriculum", image=0, text=1, epochs=2))
    lengths = data.source.column("num_characters")[data.train]
    steps = plain.steps_per_epoch
    mean = [lengths[taught.batch(step)].mean() for step in (0, steps // 2, steps - 1, 2 * steps, 3 * steps - 1)]
    assert mean[0] < 0.7 * mean[1] < 0.6 * mean[2] and 0.6 < mean[3] / mean[4] < 1.6
