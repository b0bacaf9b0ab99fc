"""What a rank did in a step, and when: every instruction, and the waiting inside it.

On a GPU the times are those of the device, by events that are recorded without waiting for them; on
a CPU those of the host's clock, which whoever starts the run may give.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from engine.streams import runs_behind

# Instructions in which a rank computes. In all others it waits: for input, for another stage, for a
# message to leave.
PASSES = ("EmbedPass", "ForwardPass", "ReplayPass", "BackwardPass")  # through a stage
COMPUTE = (*PASSES, "ComputeLoss", "ReduceGrads", "OptimizerStep")
# Those that take long on a rank that is slow. In the others it, or whoever waits for it, may stand.
OWN = ("LoadMicroBatch", *PASSES, "ComputeLoss")
WAIT = "wait"

HostClock = Callable[[], float]  # seconds since any moment; never goes back


@dataclass(frozen=True)
class Span:
    """Seconds since the step began. `WAIT` spans lie inside instructions: the rank stands in a
    collective."""

    name: str
    micro_batch: int | None
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class Recorder:
    """Records the spans of one step at a time. Between `finish` and `start` it records nothing.
    `clock`: of the host."""

    def __init__(self, device: torch.device, clock: HostClock = time.perf_counter):
        self._on_device = runs_behind(device)
        self.clock = clock
        self._marks: list[tuple[str, int | None, Any, Any]] | None = None
        self._origin: Any = None
        self.started_at_s = 0.0  # host clock (time.time) of the start of the recorded step
        self.spans: list[Span] = []
        self.step_s = 0.0

    def start(self) -> None:
        self._marks, self.started_at_s, self._origin = [], time.time(), self._now()

    @contextmanager
    def span(self, name: str, micro_batch: int | None = None) -> Iterator[None]:
        if self._marks is None:
            yield
            return
        start = self._now()
        try:
            yield
        finally:
            self._marks.append((name, micro_batch, start, self._now()))

    def finish(self) -> None:
        """Read the times. Waits for the device to reach the end of the step, which the step's
        metrics do anyway."""
        end = self._now()
        if self._on_device:
            end.synchronize()
        self.spans = [
            Span(name, m, self._since(start), self._since(stop))
            for name, m, start, stop in self._marks or ()
        ]
        self.step_s, self._marks = self._since(end), None

    def seconds(self) -> dict[str, float]:
        """Seconds of the step by instruction, and by `WAIT`, which is part of them."""
        total: dict[str, float] = defaultdict(float)
        for span in self.spans:
            total[span.name] += span.seconds
        return dict(total)

    def start_of(self, name: str) -> float:
        """When the first instruction of that name began, in seconds of the step; 0 without one."""
        return next((span.start_s for span in self.spans if span.name == name), 0.0)

    def add_wait(self, name: str, seconds: float) -> None:
        """Waiting at the start of the instruction of that name, known only after the step; no
        longer than the instruction."""
        for span in self.spans:
            if span.name == name and seconds > 0:
                end_s = min(span.end_s, span.start_s + seconds)
                self.spans.append(Span(WAIT, None, span.start_s, end_s))
                return

    def busy_s(self, names: Collection[str] = COMPUTE) -> float:
        """Seconds in which the rank computed: of the spans of these names, without the waiting in
        them. Waiting elsewhere, such as for the statistics of other replicas, is in none of them.
        """
        computing = sorted(
            (span for span in self.spans if span.name in names), key=lambda span: span.start_s
        )
        starts = [span.start_s for span in computing]
        busy = sum(span.seconds for span in computing)
        for wait in self.spans:
            around = bisect_right(starts, wait.start_s) - 1
            if wait.name == WAIT and around >= 0 and wait.end_s <= computing[around].end_s:
                busy -= wait.seconds
        return busy

    def _now(self) -> Any:
        if not self._on_device:
            return self.clock()
        event = get_accelerator().Event(enable_timing=True)
        event.record()
        return event

    def _since(self, moment: Any) -> float:
        return self._origin.elapsed_time(moment) / 1e3 if self._on_device else moment - self._origin
