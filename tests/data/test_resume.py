"""A run that is killed again and again, and goes on with other counts each time, sees what one that
was left alone sees."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from plain_requests import plain_requests, square_images

from data.batching.order import GlobalOrder
from data.index.sources import open_source
from data.loader import MicroBatchDataset, micro_batches
from data.modalities.text import TextModality

N, G, EPOCHS, KILLS = 240, 24, 6, 50
STEPS = EPOCHS * N // G
REPLICAS, NUM_MICRO_BATCHES = (1, 2, 4), (1, 2, 3, 6)


@dataclass(frozen=True)
class Attempt:
    """From the checkpoint of step `start` on; killed after step `killed`. The next one goes on at
    its checkpoint, `saved` <= `killed`."""

    start: int
    saved: int
    killed: int
    replicas: dict[str, int]
    num_micro_batches: dict[str, int]
    workers: int


def attempts(seed: int) -> list[Attempt]:
    """51 of them, over all steps; 50 checkpoints at random, up to two steps of each attempt lost,
    two attempts with two workers."""
    rng = np.random.default_rng(seed)
    saved = [*np.sort(rng.choice(np.arange(1, STEPS), KILLS, replace=False)).tolist(), STEPS]
    drawn = []
    for number, (start, stop) in enumerate(zip([0, *saved], saved)):
        counts = [
            {branch: int(rng.choice(choices)) for branch in ("image", "text")}
            for choices in (REPLICAS, NUM_MICRO_BATCHES)
        ]
        killed = min(STEPS, stop + int(rng.integers(3)))
        drawn.append(Attempt(start, stop, killed, *counts, workers=2 * (number in (10, 35))))
    return drawn


@pytest.fixture(scope="module")
def source():
    return open_source("demo:en+de+es+it")


@pytest.fixture(scope="module")
def datasets(source, tokenizer):
    """Each branch loads its own modality only, as in a run."""
    return {
        "image": MicroBatchDataset(source, [square_images(24)], seed=7),
        "text": MicroBatchDataset(source, [TextModality(tokenizer, 32)], seed=7),
    }


ORDER = GlobalOrder(N, G, seed=7)
SUBSET = np.sort(np.random.default_rng(0).choice(3900, N, replace=False))


def values(branch: str, batch) -> Iterator[tuple[int, int, str]]:
    """(position, index, a hash of what the tower gets) of each sample; padding, which is company's
    affair, left aside."""
    rows = (
        batch["pixel_values"]
        if branch == "image"
        else [ids[keep.bool()] for ids, keep in zip(batch["input_ids"], batch["attention_mask"])]
    )
    for position, index, row in zip(
        batch[f"{branch}_position"].tolist(), batch[f"{branch}_index"].tolist(), rows
    ):
        content = row.contiguous().numpy().tobytes()
        yield position, index, hashlib.blake2b(content, digest_size=16).hexdigest()


def load(
    dataset, branch, replicas, num_micro_batches, start, killed, stop=STEPS, workers=0
) -> Iterator[tuple[int, int, int, str]]:
    """(step, position, index, hash) of all replicas until the kill. Loaders are asked for
    everything up to `stop`, and left in the middle."""
    for replica in range(replicas):
        requests = plain_requests(ORDER, SUBSET, replica, replicas, num_micro_batches, start, stop)
        batches = micro_batches(dataset, requests, workers)
        for step in range(start, killed):
            for _ in range(num_micro_batches):
                yield from ((step, *value) for value in values(branch, next(batches)))
        batches.close()


@pytest.mark.parametrize("branch", ["image", "text"])
def test_killed_fifty_times_every_sample_comes_once_per_epoch_and_looks_the_same(datasets, branch):
    undisturbed = {
        (step, at): (index, what)
        for step, at, index, what in load(datasets[branch], branch, 1, 1, 0, STEPS)
    }
    trained = []
    for a in attempts(seed=1):
        workers = a.workers if branch == "image" else 0
        counts = a.replicas[branch], a.num_micro_batches[branch]
        loaded = load(datasets[branch], branch, *counts, a.start, a.killed, workers=workers)
        for step, position, index, what in loaded:
            assert undisturbed[step, position] == (index, what), (a, step, position)
            if step < a.saved:  # later ones were trained on in vain, and are again
                trained.append((step, position, index, what))
    assert len(trained) == len(undisturbed) == EPOCHS * N
    for epoch in range(EPOCHS):
        seen = Counter(index for step, _, index, _ in trained if ORDER.epoch(step) == epoch)
        assert set(seen.values()) == {1} and sorted(seen) == SUBSET.tolist()
    versions = {}
    for _, _, index, what in trained:
        versions.setdefault(index, set()).add(what)
    # a draw each epoch
    assert np.mean([len(different) for different in versions.values()]) > (
        EPOCHS - 0.5 if branch == "image" else 2
    )


def test_weights_keep_their_promise_over_kills():
    """A part of weight 2 comes twice in each epoch, one of weight 1/2 once in two, however often
    the run is broken off."""
    order = GlobalOrder(96, 24, seed=3, parts=((60, 1.0), (12, 2.0), (24, 0.5)))
    subset = np.arange(1000, 1096)
    assert order.epoch_samples == 96 and order.steps_per_epoch == 4
    rng, steps = np.random.default_rng(3), 24 * 4
    saved = [0, *np.sort(rng.choice(np.arange(1, steps), KILLS, replace=False)).tolist(), steps]
    counts = np.zeros((24, 96), int)
    for start, stop in zip(saved, saved[1:]):
        replicas, number = int(rng.choice(REPLICAS)), int(rng.choice(NUM_MICRO_BATCHES))
        for replica in range(replicas):
            for request in plain_requests(order, subset, replica, replicas, number, start, stop):
                np.add.at(counts[request.epoch], request.index - 1000, 1)
    assert (counts[:, :60] == 1).all() and (counts[:, 60:72] == 2).all()
    assert (counts[:, 72:].sum(1) == 12).all() and (
        counts[0::2, 72:] + counts[1::2, 72:] == 1
    ).all()
