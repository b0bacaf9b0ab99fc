"""A run's data of streams: what is held out, mixtures, and micro-batches on any ranks."""

from dataclasses import replace

import numpy as np
import pytest
from stream_shards import write_shards

from data.batching.batches import Batches, TextPacker
from data.batching.branch_cost import BranchCost
from data.batching.settings import Setting
from data.batching.stream_order import StreamOrder
from data.loader import MicroBatchDataset, micro_batches
from data.modalities.text import TextModality
from data.options import DataOptions
from data.prepare import prepare_data
from data.streams.division import divide_shards
from data.streams.lengths import stream_token_counts

COUNTS = [20, 14, 9, 25, 17, 11, 30, 8]


@pytest.fixture
def mixture(tmp_path, emoji_set):
    """A stream, twice an epoch, beside pairs that are looked at beforehand."""
    pattern = write_shards(tmp_path / "shards", COUNTS, first=200)
    specs = (f"stream:{tmp_path}/shards/{pattern}?mixed=3", f"jsonl:{emoji_set(30)}")
    options = DataOptions(data=specs, data_weights=(2.0, 1.0), val_fraction=0.1, seed=3)
    return options, prepare_data(options, None, tmp_path / "run")


def test_whole_shards_are_held_out_and_the_rest_is_trained_on(mixture, tmp_path):
    options, data = mixture
    held = data.held_out["validation"]
    division = divide_shards(np.array(COUNTS), 0.1, None, 3)
    assert len(held.subset) == sum(COUNTS[n] for n in division.held_out)
    of_stream = sum(COUNTS) - len(held.subset)
    assert len(data.train) == of_stream + 30
    assert [round(n) for n, _ in data.parts] == [of_stream, 30]
    captions = {data.source.captions(i)[0] for i in data.train[:of_stream].tolist()}
    assert captions.isdisjoint(held.source.captions(int(i))[0] for i in held.subset)
    # the same the second time, and another number of shards is refused
    again = prepare_data(options, None, tmp_path / "run")
    assert (again.train[:] == data.train[:]).all()
    for flag, value in (("limit_samples", 20), ("leak_bits", 4)):
        with pytest.raises(ValueError, match=flag.replace("_", "-")):
            prepare_data(replace(options, **{flag: value}), None, tmp_path / "other")
    fewer = replace(options, data=(options.data[0].replace("00007", "00006"), options.data[1]))
    with pytest.raises(ValueError, match="other samples|changed under the run"):
        prepare_data(fewer, None, tmp_path / "run")


def test_an_epoch_of_a_mixture_on_any_ranks_and_workers(mixture, tmp_path):
    _, data = mixture
    known = (data.source, data.train, data.stream_order, data.text_tokenizer)
    counts = stream_token_counts(*known, 12, tmp_path / "counts")
    setting = Setting(0, {"text": 2}, BranchCost(1, 1))
    order = data.order(24)
    assert isinstance(order, StreamOrder)
    batches = Batches(order, data.train, [setting], texts=TextPacker(counts, 12, seed=5))
    dataset = MicroBatchDataset(data.source, [TextModality(data.text_tokenizer, 12)], seed=5)

    def step_of(replicas, workers):
        rows = {}
        for replica in range(replicas):
            requests = list(batches.requests("text", replica, replicas, 2, 4))
            for request, batch in zip(requests, micro_batches(dataset, requests, workers)):
                lengths = batch["attention_mask"].sum(1)
                for n, (position, index) in enumerate(
                    zip(batch["text_position"].tolist(), batch["text_index"].tolist())
                ):
                    rows[request.step, position] = index, lengths[n].item()
        return rows

    one = step_of(1, 0)
    assert sorted(one) == [(step, position) for step in (2, 3) for position in range(24)]
    assert step_of(3, 0) == one and step_of(2, 2) == one
    # what was counted is what is loaded
    for step in (2, 3):
        batch = batches.at(step)
        expected = counts.of(batch.visited, batch.indices, 5, batch.epoch)[:, 0]
        for position in range(24):
            assert one[step, position] == (batch.indices[position], expected[position])


def test_a_limit_takes_samples_of_some_shards():
    counts = np.array(COUNTS)
    division = divide_shards(counts, 0.0, 40, 1)
    assert division.counts.sum() == 40 and len(division.held_out) == 0
    assert (division.counts <= counts[division.train]).all()
    with pytest.raises(ValueError, match="--val-data"):
        divide_shards(np.array([50]), 0.1, None, 0)
    assert len(divide_shards(np.full(4000, 10_000), 0.1, None, 0).held_out) == 1
