"""What of a global batch meets in a term, decided from rows that have arrived."""

from dataclasses import replace
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cost_models import BRANCHES
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.memory_probe import TensorBytes
from engine.communication import Communicator
from engine.loss.term_batch import (
    GatheredRows,
    Numbers,
    Rows,
    _repeated,
    align,
    gather,
)
from engine.objective import Branch, Objective, Pair
from engine.optimizer.bad_steps import bad_step
from engine.topology import merged
from models.losses import InfoNCE

WHOLE = torch.arange(3)
PAIR_OF_TWO = Pair(*BRANCHES, InfoNCE())
PAIR = Pair("sound", "text", InfoNCE(), prefix="sound_text_")


def rows_of(position, index, weight, key):
    """As a micro-batch brings them; without weights where `weight` is None."""
    own = {"embeds": torch.ones(len(position), 4), "position": position, "index": index}
    own |= {"key": key} if weight is None else {"key": key, "weight": weight}
    return Rows.brought("own", {f"own_{name}": value for name, value in own.items()})


def arrived(index, weight, keys=(0, 1, 2)):
    """Three samples with a text each, all of one stage; sounds have these indices (None: no row
    came), weights and keys."""
    came = torch.tensor([i is not None for i in index])
    sound = torch.tensor([0 if i is None else i for i in index])
    sounds = rows_of(WHOLE, sound, torch.tensor(weight), torch.tensor(keys))
    rows = {
        "sound": replace(sounds, status=sounds.status * came),
        "text": rows_of(WHOLE, WHOLE, torch.ones(3, dtype=torch.int64), WHOLE),
    }
    numbers, threes = dict.fromkeys(rows, Numbers(3)), dict.fromkeys(rows, 3)
    places, counts = dict.fromkeys(rows, WHOLE), dict.fromkeys(rows, (3,))
    return GatheredRows(rows, rows, places, counts, numbers, threes)


def test_a_pair_whose_few_samples_all_have_weight_0_is_empty_beside_others():
    """One sample has a sound, and it counts nothing: nothing is lost, unless it is the only pair."""
    rows = arrived([0, -2, -3], [0, 5, 5])
    batch = align(rows, PAIR, alone=False)
    assert (batch.num_rows, batch.num_left_out, batch.num_not_loaded) == (0, 3, 2)
    assert {name: len(own.position) for name, own in batch.own.items()} == {"sound": 0, "text": 0}
    assert batch.restored("sound", torch.ones(0, 4)).tolist() == torch.zeros(3, 4).tolist()
    with pytest.raises(RuntimeError, match="all sound rows, or all text rows, .* have weight 0"):
        align(rows, PAIR)
    assert align(arrived([0, -2, -3], [1, 5, 5]), PAIR).num_rows == 1


def test_rows_that_never_came_are_not_taken_for_samples_without_the_modality():
    assert int(align(arrived([0, None, 2], [1, 0, 1]), PAIR, alone=False).num_misaligned) == 1


def test_samples_with_equal_values_are_counted_without_those_that_are_left_out():
    """A sound that could not be read is equal to none, whatever its key."""
    assert align(arrived([0, 1, 2], [1, 1, 1]), PAIR).everyone["text"].keys is None
    batch = align(arrived([0, 1, 2], [1, 1, 1], keys=(7, 3, 7)), PAIR)
    assert batch.num_duplicates == 2
    assert batch.everyone["sound"].keys.tolist() == [[7, 0], [3, 1], [7, 2]]
    assert batch.everyone["text"].keys.tolist() == [[0, 7], [1, 3], [2, 7]]
    left_out = align(arrived([0, 1, -3], [1, 1, 1], keys=(7, 3, 7)), PAIR)
    assert left_out.num_duplicates == 0 and left_out.everyone["sound"].keys is None


def test_the_samples_of_a_bad_step_are_those_of_all_branches():
    """Samples without a sound bring no row to that branch."""
    seen = [
        {"sound": [(2, 12, True)]},
        {"text": [(0, 10, True), (1, 11, False)]},
        {"text": [(2, 12, True)]},
    ]
    found = bad_step(seen, ("sound", "text"))
    assert found.samples == (12, 10, 11) and found.not_finite == {"sound": (), "text": (11,)}


def test_a_sample_that_repeats_its_own_text_is_no_duplicate():
    keys = torch.tensor([5, 5, 6, 7, 7, 6, 8, 9])  # two texts of each of four samples
    left_out = torch.zeros(8, dtype=torch.bool)
    assert _repeated(keys, left_out, Numbers(4, len(keys) // 4)).tolist() == [
        False,
        True,
        True,
        False,
    ]
    left_out[2:4] = True
    assert not _repeated(keys, left_out, Numbers(4, len(keys) // 4)).any()


def test_rows_of_items_that_are_no_samples_and_rows_that_are_nobodys():
    """Three regions, one of which is not in the view, and behind their phrases two that are given
    as negatives, one of them equal to a phrase of another region."""
    of_sample = torch.tensor([5, 5, 9])
    pair = Pair("image", "text", InfoNCE(), made=("region", "phrase"))
    rows = {
        "region": rows_of(WHOLE, torch.tensor([5, -6, 9]), None, WHOLE + 100),
        "phrase": rows_of(
            torch.arange(5),
            torch.cat([of_sample, torch.tensor([5, 9])]),
            None,
            torch.tensor([7, 8, 9, 9, 11]),
        ),
    }
    numbers = {"region": Numbers(3), "phrase": Numbers(3, more=2)}
    places = {name: each.position for name, each in rows.items()}
    counts = {name: [len(each.position)] for name, each in rows.items()}
    num_rows = {name: number.places for name, number in numbers.items()}
    batch = align(GatheredRows(rows, rows, places, counts, numbers, num_rows), pair)
    assert (batch.num_left_out, batch.num_not_loaded, int(batch.num_misaligned)) == (1, 1, 0)
    assert batch.everyone["region"].label.tolist() == [0, 2]
    assert batch.everyone["phrase"].label.tolist() == [0, 2, -1, -1]
    # the second region left, and a negative of the first, have equal phrases
    assert batch.num_duplicates == 1
    assert batch.everyone["region"].keys.tolist() == [[100, 7], [102, 9]]
    assert batch.everyone["phrase"].keys.tolist() == [[7, 100], [9, 102], [9, 9], [11, 11]]
    gradient = batch.restored("phrase", torch.ones(4, 1))
    assert gradient.flatten().tolist() == [1, 0, 1, 1, 1]


@pytest.mark.parametrize("counts", [(1000, 1000, 1000), (1000, 1000, 10), (1000, 0, 990)])
def test_of_gathered_rows_one_copy_is_made_beside_those_in_order(counts):
    """The first of three replicas, each of whose others brings what it brings, as far as it goes."""
    number, width, own = sum(counts), 512, counts[0]

    def gathers(into, part, group):
        for copy in into.view(len(counts), *part.shape):
            copy.copy_(part)
        if part.dim() == 2 and part.dtype == torch.int64:  # tags: each its own places
            for replica, copy in enumerate(into.view(len(counts), *part.shape)):
                copy[: counts[replica], 0] += sum(counts[:replica])
                copy[counts[replica] :, 0] = number

    position = torch.arange(own)
    own_rows = rows_of(position, position, None, position)
    rows = {"image": replace(own_rows, embeds=torch.rand(own, width))}
    objective = Objective(tuple(map(Branch, BRANCHES)), (PAIR_OF_TWO,))
    dist.init_process_group("fake", rank=0, world_size=3, store=FakeStore())
    try:
        graph = merged({branch: [range(1)] for branch in BRANCHES}, 3)
        comm = Communicator(graph, objective, 0, torch.device("cpu"), timedelta(seconds=9))
        with mock.patch.object(dist, "all_gather_into_tensor", gathers), TensorBytes() as held:
            held.mark()
            given = {"image": counts}, {"image": Numbers(number)}, {}
            found = gather(comm, (), rows, *given)
    finally:
        dist.destroy_process_group()
    embeds = found.everyone["image"].embeds
    start = 0
    for count in counts:
        assert embeds[start : start + count].equal(rows["image"].embeds[:count])
        start += count
    assert found.places["image"].equal(torch.arange(number))
    padded = max(counts) * len(counts)
    # labels are an 128th of this width, in a few copies
    assert held.peak_bytes - held.marked_bytes < 4 * width * (number + padded) * 1.1
