"""A run's data of streams: what is held out, mixtures, and micro-batches on any ranks."""

import json
from dataclasses import replace

import numpy as np
import pytest
from stores import http_server
from stream_shards import write_shards

from data.batching.batches import Batches, TextPacker
from data.batching.branch_cost import BranchCost
from data.batching.mixture import Mixture
from data.batching.settings import Setting
from data.batching.stream_order import StreamOrder
from data.loader import MicroBatchDataset, micro_batches
from data.modalities.text import TextModality
from data.options import DataOptions
from data.prepare import prepare_data
from data.stored.image import IMAGE
from data.streams.division import divide_shards
from data.streams.lengths import stream_token_counts
from engine.topology import fork
from launch.setup.first_screen import _known_values, _streams

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


def test_examples_are_of_every_data_set(mixture):
    """By its share of an epoch; a first set does not take the places of the others."""
    _, data = mixture
    (of_stream, _), (of_pairs, _) = data.parts
    for flipped in (False, True):
        given = replace(data, parts=((of_stream, 0.5), (of_pairs, 1.0))) if flipped else data
        visits = [count * weight for count, weight in given.parts]
        numbers = given.example_numbers(20)
        assert len(numbers) == 20 and len(np.unique(numbers)) == 20
        own = np.count_nonzero(numbers < of_stream)
        assert own == pytest.approx(20 * visits[0] / sum(visits), abs=1)
        assert 0 < own < 20


def test_mixing_and_repeated_values_are_measured_over_every_data_set(mixture):
    """An indexed set that comes first is shuffled whole; the stream behind it is not."""
    options, data = mixture
    assert isinstance(data.source, Mixture)
    order = StreamOrder(
        len(data.train), 12, 3, tuple(reversed(data.parts)), shards=tuple(reversed(data.shards))
    )
    for number, mixing in order.mixing().items():
        lap = order._lap(number, 0)
        samples = lap.samples(0, order.parts[number][0])[0]
        assert mixing.rank_correlation == pytest.approx(
            np.corrcoef(np.arange(len(samples)), samples)[0, 1], rel=1e-9
        )
    first, second = order.mixing().values()
    assert first.rank_correlation != second.rank_correlation
    assert first.shards_per_batch == 1 and 1 < second.shards_per_batch <= len(data.shards[0].counts)
    # a picture that two samples of the indexed set have
    pairs = data.source.sources[1]
    keys = pairs.keys("content")[pairs.usable()]
    (known,) = _known_values(data, IMAGE)
    assert known.tolist() == keys[keys != 0].tolist() != []


def test_the_first_screen_says_how_shards_are_mixed_and_what_they_take(mixture, tmp_path):
    """--stream-cache counts in GiB, and what is smaller is shown in a smaller unit."""
    options, data = mixture
    (own, _) = data.order(12).mixing(data.order(12).steps_per_epoch // 2).values()
    stages = fork({"image": [range(1)], "text": [range(1)]}, {"image": 3, "text": 2}).stages
    for given, shown in ((1.5, "1.5 GiB"), (0.5 / 1024, "512.0 KiB")):
        asked = replace(options, stream_cache=given)
        found = prepare_data(asked, None, tmp_path / "run")
        first, second, *_ = _streams(found, 12, stages).splitlines()
        of = len(found.shards[0].counts)
        assert first.startswith(f"{of} shards, 3 of them mixed; at most {shown}, ")
        assert second == (
            f"a global batch has samples of {own.shards_per_batch} of them; the order of training "
            f"and that of storage have a rank correlation of {own.rank_correlation:.2f} (0: fully "
            "mixed, 1: as stored)"
        )
        (stream, *_) = found.source.sources
        assert stream.cache.limit_bytes == given * (1 << 30)


@pytest.mark.parametrize("shards, says", [(5.5, True), (12, False)])
def test_the_first_screen_says_where_the_next_shards_have_no_room(tmp_path, shards, says):
    """Of three that are mixed."""
    pattern = write_shards(tmp_path / "shards", [20] * 8)
    size = sum(file.stat().st_size for file in (tmp_path / "shards").glob("*.tar")) / 8
    with http_server(tmp_path / "shards") as url:
        options = DataOptions(
            data=(f"stream:{url}/{pattern}?mixed=3",), stream_cache=shards * size / (1 << 30)
        )
        data = prepare_data(options, None, tmp_path / "run")
        said = _streams(
            data, 12, fork({"image": [range(1)], "text": [range(1)]}, dict(image=1, text=1)).stages
        )
    line = "too little room to fetch the next 3 while these are read"
    assert (line in said) == says, said


def test_the_first_screen_says_which_shards_replicas_have_in_common(mixture):
    """Of images alone: texts are packed over the whole global batch."""
    _, data = mixture

    def said(image, batch_size):
        graph = fork({"image": [range(2)], "text": [range(2)]}, {"image": image, "text": 2})
        lines = _streams(data, batch_size, graph.stages).splitlines()
        return [line for line in lines if "fetch twice" in line]

    assert said(1, 12) == []
    (line,) = said(2, 12)
    assert line == (
        "replicas of image 0 read different shards, and neighbours have some in common, which two "
        "machines fetch twice; where 2 divides ?mixed=K and the samples that a global batch has of "
        "each data set, each replica has its own"
    )
    data = replace(data, parts=((data.parts[0][0], 1.0), (30, 0.0)))
    assert said(3, 12) == said(3, 15) == [] != said(5, 12)


def test_a_run_of_version_0_1_goes_on_in_its_order(mixture, tmp_path):
    options, data = mixture
    assert not any(each.slides for each in data.shards)
    record = tmp_path / "run" / "samples" / "made_of.json"
    made_of = json.loads(record.read_text())
    del made_of["stream_order"]
    record.write_text(json.dumps(made_of))
    before = prepare_data(options, None, tmp_path / "run")
    assert all(each.slides for each in before.shards)
    assert (before.order(12).batch(3) != data.order(12).batch(3)).any()


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
