"""Out of memory, in one message: where it happened, what was held, what the planner had predicted,
and what to change for this run.

`explained` turns an allocator's error into an `OutOfMemory`; what the error says is read in
`engine/processes/shortage.py`, what to change is found in `engine/planning/memory_advice.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from engine.planning.memory_advice import RankSetup, Remedy, Work, advice, smaller_size
from engine.planning.simulator import StageResult
from engine.processes.shortage import Shortage, shortage_of, size_in_words, with_what_is_held


class OutOfMemory(RuntimeError):
    """An allocation failed. `repeats`: another start of the same run would meet it again."""

    def __init__(self, message: str, repeats: bool):
        super().__init__(message)
        self.repeats = repeats


@contextlib.contextmanager
def explained(
    device: torch.device, words: Callable[[Shortage], str], num_steps_done: int = 0
) -> Iterator[None]:
    """An allocation that fails in here becomes an OutOfMemory that says `words(shortage)`; any
    other error passes.

    What fails before this process has done a step (`num_steps_done`) fails again at another start,
    which does the same: unless other processes held the memory that it lacked. Later, another start
    may help: its allocator begins with whole blocks. It need not: a longer micro-batch comes again.
    """
    try:
        yield
    except OutOfMemory:
        raise
    except (RuntimeError, MemoryError) as error:
        shortage = shortage_of(error)
        if shortage is None:
            raise
        shortage = with_what_is_held(shortage, device)
        raise OutOfMemory(
            words(shortage), num_steps_done == 0 and not shortage.would_fit_alone
        ) from error


def in_words(error: BaseException, who: str) -> BaseException:
    """An allocation that failed where nothing `explained` it, while data are prepared for example;
    any other error as it is."""
    shortage = None if isinstance(error, OutOfMemory) else shortage_of(error)
    if shortage is None:
        return error
    lines = [
        f"{who} ran out of memory",
        *held_in_words(with_what_is_held(shortage, torch.device("cpu"))),
    ]
    return OutOfMemory("\n".join(lines), repeats=False)


def message(who: str, setup: RankSetup, work: Work, shortage: Shortage) -> str:
    """The whole message, in several lines. `who`: such as `rank 1 (text 0, replica 0)`."""
    lines = [f"{who} ran out of memory {work.describe()}", *held_in_words(shortage)]
    if shortage.on_gpu == setup.on_gpu:
        predicted = setup.plan.predicted[setup.stage.stage_id]
        lines.append(prediction_in_words(predicted, setup.plan.costs.machine.measured))
    try:
        lines += _listed(advice(setup, work, shortage))
    except (
        Exception
    ) as error:  # the report comes first: the machine's memory may be the one that ran out
        lines.append(f"What to change could not be worked out ({type(error).__name__}: {error})")
    return "\n".join(lines)


def message_of_profile(who: str, layer: str, size: int, shortage: Shortage) -> str:
    """Where the layers are measured, before there is a plan. `size`: of the micro-batch."""
    lines = [
        f'{who} ran out of memory while measuring the layer {layer} with a micro-batch of {size}, for "layout": "auto"'
    ]
    smaller = smaller_size(size, size)
    remedies = (
        [
            Remedy(
                "or another size, which alone is measured then",
                {"branches": {"micro_batch_size": smaller}},
            )
        ]
        if smaller
        else []
    )
    remedies.append(Remedy('a "layout" other than "auto": nothing is measured then'))
    return "\n".join([*lines, *held_in_words(shortage), *_listed(remedies)])


def held_in_words(shortage: Shortage) -> list[str]:
    """What was asked for, and what was held."""
    s, size = shortage, size_in_words
    place = (
        s.device
        if s.on_gpu
        else "this process's address space (ulimit -v)"
        if s.limited
        else "this machine"
    )
    asked = (
        f"asked for: {size(s.asked)}" if s.asked is not None else f"the allocator says: {s.text}"
    )
    has = f"; {place} has {size(s.total)}" if s.total is not None else ""
    free = f", of which {size(s.free)} were free" if has and s.free is not None else ""
    tensors = f"{size(s.allocated)} in tensors" if s.allocated is not None else None
    cached = (
        f"{size(s.cached)} that torch had reserved and did not use"
        if s.cached is not None
        else None
    )
    own = f"{size(s.own)} by this process in all" if s.own is not None else None
    others = f"{size(s.others)} by other processes" if s.others else None
    held = ", ".join(filter(None, (tensors, cached, own, others)))
    return [f"{asked}{has}{free}", *([f"held: {held}"] if held else [])]


def prediction_in_words(stage: StageResult, measured: bool) -> str:
    size = size_in_words
    how = (
        "from measured costs"
        if measured
        else "an estimate, since the layout was given and nothing was measured"
    )
    return (
        f"predicted for a training step of {stage.name}: at most {size(stage.peak_bytes)} in "
        f"tensors ({size(stage.state_bytes)} weights, gradients and optimizer state, "
        f"{size(stage.activation_bytes)} activations); {how}"
    )


def _listed(remedies: Sequence[Remedy]) -> list[str]:
    if not remedies:
        return []
    return [
        "What to change, each beside the lines above it; keys are of the JSON file "
        "(ds_configs/README.md):",
        *(f"  {remedy.describe()}" for remedy in remedies),
    ]
