"""What a person who is not looking should be told of a run. Plain Python over the lines of
metrics.jsonl; W&B sends what is found here by mail or to a chat."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any, NamedTuple

WINDOW = 20  # steps that a judgement is over: one slow step is no news
SKIPPED = 3  # first steps of a process, in which kernels are chosen and memory is claimed
MORE_IDLE = 0.2  # of the step, above what the stage began with
DRY = 0.2  # of the step, waited for data
UNREADABLE = ("unreadable_pictures", "left_out_samples")


class Alert(NamedTuple):
    """`level`: INFO, WARN or ERROR, as W&B has them."""

    title: str
    text: str
    level: str


class Alarms:
    """Each condition is told once when it begins, and again only when it had ended."""

    def __init__(self) -> None:
        self._seen = 0
        self._lines: deque[Mapping[str, Any]] = deque(maxlen=WINDOW)
        self._first_idle: dict[str, float] = {}
        self._ringing: set[str] = set()

    def after_step(self, line: Mapping[str, Any], not_finite: bool = False) -> list[Alert]:
        """`line`: of metrics.jsonl; `not_finite`: the step was skipped for its loss or its
        gradients. Returns what has begun."""
        self._seen += 1
        if self._seen > SKIPPED:
            self._lines.append(line)
        begun = [*self._of_loss(line, not_finite), *self._of_samples(line)]
        if len(self._lines) == WINDOW:
            begun += [*self._of_stages(), *self._of_data()]
        return begun

    def _rings(self, condition: str, is_so: bool) -> bool:
        """Does the condition begin now?"""
        begins = is_so and condition not in self._ringing
        (self._ringing.add if is_so else self._ringing.discard)(condition)
        return begins

    def _of_loss(self, line: Mapping[str, Any], not_finite: bool) -> Iterator[Alert]:
        is_so = not_finite or line["loss"] is None or not math.isfinite(line["loss"])
        if self._rings("loss", is_so):
            yield Alert(
                "Loss or gradients not finite",
                f"Step {line['step']} was skipped; bad_steps.jsonl lists its samples. "
                "The run ends after max_bad_steps such steps in a row.",
                "ERROR",
            )

    def _of_samples(self, line: Mapping[str, Any]) -> Iterator[Alert]:
        number = sum(line.get(key, 0) for key in UNREADABLE)
        # once in a run: a broken sample comes again in every epoch
        if number and self._rings("samples", True):
            yield Alert(
                "Samples that cannot be used",
                f"{number:g} in step {line['step']}; bad_samples.jsonl lists them with the reason.",
                "WARN",
            )

    def _of_stages(self) -> Iterator[Alert]:
        for stage, idle in self._means("idle/").items():
            before = self._first_idle.setdefault(stage, idle)
            if self._rings(f"idle/{stage}", idle > before + MORE_IDLE):
                yield Alert(
                    f"Stage {stage} waits",
                    f"{idle:.0%} of the last {WINDOW} steps, after {before:.0%} at the beginning; "
                    "the timeline of a sampled step shows for whom.",
                    "WARN",
                )

    def _of_data(self) -> Iterator[Alert]:
        step_s = mean(line["step_s"] for line in self._lines)
        for stage, wait_s in self._means("data_wait_s/").items():
            if self._rings(f"data/{stage}", step_s > 0 and wait_s > DRY * step_s):
                yield Alert(
                    f"Data for stage {stage} runs dry",
                    f"It waited for micro-batches for {wait_s / step_s:.0%} of the last {WINDOW} "
                    "steps; more --workers, --cache auto or a faster disk feed it.",
                    "WARN",
                )

    def _means(self, prefix: str) -> dict[str, float]:
        """Over the window, by what follows the prefix."""
        keys: Sequence[str] = [key for key in self._lines[-1] if key.startswith(prefix)]
        return {
            key.removeprefix(prefix): mean(line.get(key, 0.0) for line in self._lines)
            for key in keys
        }
