"""How often the host waits for the device: once for a pair in a step, at its loss; once more where
pairs are matched."""

import itertools
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cost_models import BRANCHES
from device_waits import DeviceWaits, ValuesGiven, waits_of_steps
from ranks import run_all
from split_training import Case
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from engine import topology
from engine.communication import Communicator
from engine.loss.last_stage import LastStageLoss
from engine.loss.matching import Scoring
from engine.objective import Branch, Objective, Pair
from models.losses import InfoNCE, Matching, Sigmoid
from models.towers.fusion import Fusion, FusionSizes


def merged(replicas, micro_batch_size, **more):
    return Case("merged", {"merged": 1}, replicas, micro_batch_size, **more)


def fork(image, text, **more):
    """Replicas of either branch."""
    replicas = {"image": image, "text": text}
    return Case("fork", {"image": 1, "text": 1}, replicas, {"image": 4, "text": 6}, **more)


def dealt(*ends):
    return tuple(tuple(range(a, b)) for a, b in zip(ends, ends[1:]))


UNEQUAL = (dealt(0, 5, 10), dealt(10, 17, 24))  # of two replicas
OURS = ("engine/loss", "engine/optimizer/clipping", "models")


def of_loss(found):
    """By file, of the loss, the clipping and the models."""
    files = Counter()
    for line, number in found.items():
        if line.startswith(OURS):
            files[line.partition(":")[0]] += number
    return files


def test_the_host_waits_once_for_a_pair_and_twice_where_it_is_matched():
    """Whatever is left out, however the rows are dealt and many micro-batches there are.

    Behind the backward the host asks whether to skip the step: here, where DeepSpeed does not.
    """
    cases = [
        merged(1, 6),
        merged(2, 4, loss="sigmoid", deals={"image": UNEQUAL, "text": UNEQUAL}),
        fork(1, 1, loss="sigmoid"),
        fork(1, 2, not_loaded={"image": (3,), "text": (9,)}, deals={"text": UNEQUAL}),
        merged(1, 6, fusion=1),
        merged(1, 3, fusion=1),
        merged(2, 4, fusion=1, not_loaded={"image": (3,)}),
        fork(1, 2, fusion=1, not_loaded={"text": (9,)}, deals={"text": UNEQUAL}),
    ]
    for case, of_ranks in run_all(waits_of_steps, cases):
        replicas = case.replicas.values() if case.layout == "fork" else [case.replicas]
        for rank, found in enumerate(of_ranks):
            expected = {"engine/loss/term_batch.py": 1}
            if case.fusion and (case.layout == "merged" or rank > 0):  # where the texts are
                expected["engine/loss/matching.py"] = 1
            if max(replicas) == 1:
                expected["engine/optimizer/clipping.py"] = 1  # `finite_everywhere`
            assert of_loss(found) == expected, (case, found)


def test_what_waits_is_counted():
    """So that the counts above can be believed."""
    given = torch.arange(4.0)  # as if on the device
    waiting = [
        lambda: given.tolist(),
        lambda: given.sum().item(),
        lambda: bool((given > 1).any()),
        lambda: int(given[0]),
        lambda: given.cpu(),
        lambda: given[given > 1],
        lambda: given.nonzero(),
        lambda: given.unique(),
        lambda: given.repeat_interleave(given.long()),
        lambda: torch.equal(given, given),
        lambda: torch.tensor(1.0, device=given.device),
    ]
    free = [
        lambda: given[1:] + given.sum(),
        lambda: given[given.long()],
        lambda: given.argsort(stable=True)[:2],
        lambda: torch.full((), 1.0, device=given.device),
        lambda: given.new_zeros(4).masked_scatter_(given > 1, given),
        lambda: given.repeat_interleave(2),
        lambda: float(torch.tensor([1.0, 2.0], device="cpu").sum()),
    ]
    for number, calls in ((1, waiting), (0, free)):
        for call in calls:
            with DeviceWaits() as waits:
                call()
            assert sum(waits.found.values()) == number, call.__code__.co_firstlineno
    with DeviceWaits() as waits:
        on_host = given.cpu()
        assert on_host.tolist() == [0, 1, 2, 3]
    assert sum(waits.found.values()) == 1


# -- on a GPU that is made up: whatever waits raises, and so do tensors of two devices together

GPU, CUT = torch.device("cuda", 0), [range(1)]
ONE = dict.fromkeys(BRANCHES, CUT)
GRAPHS = [
    *(topology.merged(ONE, replicas) for replicas in (1, 2)),
    *(topology.fork(ONE, {"image": 1, "text": replicas}) for replicas in (1, 2)),
]
LOSSES = {
    "infonce": (InfoNCE(), None),
    "sigmoid": (Sigmoid(), None),
    "matching": (InfoNCE(), Matching()),
}
ROWS, MICRO_BATCHES, TOKENS, WIDTH = 24, 2, 5, 8


class FakeRanks(Communicator):
    """Of one rank, whose messages torch's fake process groups do not send. What the last stages
    tell each other is what this one would tell in their place."""

    def _new_group(self, ranks, *_, **__):
        return dist.new_group(list(ranks), backend="fake")

    def gather_last_stages(self, value):
        return {
            rank: {
                branch: [[ROWS // MICRO_BATCHES // stage.replicas, TOKENS]] * MICRO_BATCHES
                for branch in stage.last_of
            }
            for stage in self.graph.last_stages
            for rank in stage.ranks
        }


@contextmanager
def rank_of(graph, rank):
    dist.init_process_group("fake", rank=rank, world_size=graph.world_size, store=FakeStore())
    try:
        # which torch asks for before it broadcasts, and a loss before it cuts blocks
        capability = mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0))
        memory = SimpleNamespace(total_memory=80 << 30)
        properties = mock.patch.object(torch.cuda, "get_device_properties", return_value=memory)
        with FakeTensorMode(), capability, properties:
            yield
    finally:
        dist.destroy_process_group()


def outputs_of(stage):
    """What a last stage made of its micro-batches."""
    rows = ROWS // MICRO_BATCHES // stage.replicas
    micro_batch = {
        "logit_scale": torch.ones(1, device=GPU),
        "logit_bias": torch.ones(1, device=GPU),
    }
    if "image" not in stage.last_of:
        micro_batch = {}
    for branch in stage.last_of:
        micro_batch |= {
            f"{branch}_embeds": torch.ones(rows, WIDTH, device=GPU),
            f"{branch}_position": torch.zeros(rows, dtype=torch.int64, device=GPU),
            f"{branch}_index": torch.zeros(rows, dtype=torch.int64, device=GPU),
            f"{branch}_tokens": torch.ones(rows, TOKENS, WIDTH, device=GPU),
            f"{branch}_mask": torch.ones(rows, TOKENS, device=GPU),
        }
    return [micro_batch] * MICRO_BATCHES


def run_loss(graph, rank, loss, matching, given):
    """The loss of a step on a rank; what is read of the device is what is `given`, by function."""
    objective = Objective(tuple(map(Branch, BRANCHES)), (Pair(*BRANCHES, loss, matching=matching),))
    with rank_of(graph, rank), ValuesGiven(given) as values:
        comm = FakeRanks(graph, objective, rank, GPU, timedelta(seconds=60))
        last_stage = LastStageLoss(comm, WIDTH, equal_shares=False, source_starts=[0, 9])
        with GPU:
            fusion = Fusion(FusionSizes(layers=1, width=WIDTH, heads=2))
        gradients = last_stage.gradients(
            outputs_of(comm.stage),
            ROWS,
            batch=None,
            weight=1.0,
            loss_scale=1.0,
            # no backward: it would need a driver
            scoring=Scoring(fusion, most_pairs=4, seed=1, inject=lambda pairs: None),
        )
        assert {t.device for made in gradients for t in made.values()} == {GPU}
    return values.read


@pytest.mark.parametrize("loss", LOSSES)
def test_on_a_gpu_that_is_made_up_only_the_named_points_are_read(loss):
    for left_out, graph in itertools.product((0, 3), GRAPHS):
        for stage in graph.stages:
            numbers = [left_out, 0, 0, 2 * ROWS, 2 * ROWS, -ROWS, -ROWS]
            own = [(ROWS - left_out) // stage.replicas for _ in stage.last_of]
            blocks = MICRO_BATCHES * graph.last_stage("image").replicas
            num_pairs = 2 * ((ROWS - left_out) // stage.replicas) + ROWS
            of_blocks = [*(i for i in range(blocks) for _ in range(2)), *[blocks] * num_pairs]
            pairs = [*of_blocks[:num_pairs], *[TOKENS] * num_pairs]
            given = {"_counted": [*numbers, *own], "_pairs": pairs}
            read = run_loss(graph, stage.ranks[-1], *LOSSES[loss], given)
            if loss != "matching" or "text" not in stage.last_of:
                del given["_pairs"]
            expected = {name: len(values) for name, values in given.items()}
            assert read == expected, (graph.describe(), left_out)
            with pytest.raises(DataDependentOutputException):
                run_loss(graph, stage.ranks[-1], *LOSSES[loss], {})
