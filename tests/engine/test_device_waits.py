"""How often the host waits for the device: once for a pair in a step, at its loss; once more where
pairs are matched."""

from collections import Counter

import pytest
import torch
from device_waits import DeviceWaits, waits_of_steps
from ranks import run_ranks
from split_training import Case


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


@pytest.mark.parametrize(
    "case",
    [
        merged(1, 6),
        merged(2, 4, loss="sigmoid", deals={"image": UNEQUAL, "text": UNEQUAL}),
        fork(1, 1, loss="sigmoid"),
        fork(1, 2, not_loaded={"image": (3,), "text": (9,)}, deals={"text": UNEQUAL}),
        merged(1, 6, fusion=1),
        merged(1, 3, fusion=1),
        merged(2, 4, fusion=1, not_loaded={"image": (3,)}),
        fork(1, 2, fusion=1, not_loaded={"text": (9,)}, deals={"text": UNEQUAL}),
    ],
    ids=str,
)
def test_the_host_waits_once_for_a_pair_and_twice_where_it_is_matched(case):
    """Whatever is left out, however the rows are dealt and many micro-batches there are.

    Behind the backward the host asks whether to skip the step: here, where DeepSpeed does not.
    """
    replicas = case.replicas.values() if case.layout == "fork" else [case.replicas]
    for rank, found in enumerate(run_ranks(case.world_size, waits_of_steps, case)):
        expected = {"engine/loss/exchange.py": 1}
        if case.fusion and (case.layout == "merged" or rank > 0):  # where the texts are
            expected["engine/loss/matching.py"] = 1
        if max(replicas) == 1:
            expected["engine/optimizer/clipping.py"] = 1  # `finite_everywhere`
        assert of_loss(found) == expected, found


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
