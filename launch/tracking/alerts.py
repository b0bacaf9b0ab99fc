"""Conditions of a run that a person should know of. Plain Python over the lines of metrics.jsonl;
W&B sends what is found here by mail or to a chat."""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from statistics import mean
from typing import Any, NamedTuple

WINDOW = 20  # steps that a judgement is over: one slow step is no news
SKIPPED = 3  # first steps of a process, in which kernels are chosen and memory is claimed
MORE_IDLE = 0.2  # of the step, above what the stage began with
DRY = 0.2  # of the step, waited for data
SLOW = 1.5  # times as long as the other replicas of its stage
# titles of alerts that ring once in a run: a broken sample comes again in every epoch
UNUSABLE, LEFT_OUT = "Samples that cannot be used", "Samples left out of a pair"
# What a step counts, by the word or the metric that its key begins with -> the alert it rings; None:
# it rings none. A test holds that every count is here (tests/launch/test_alerts.py).
COUNTS = {
    "unreadable": UNUSABLE,
    "left_out_samples": LEFT_OUT,
    **dict.fromkeys(("duplicate_samples", "truncated", "stream"), None),
    **dict.fromkeys(("text_tokens", "audio_seconds", "padded"), None),
}


def count_of(key: str) -> str | None:
    """The entry of `COUNTS` that a key of a step's line is under; None: it is no count."""
    return next((name for name in COUNTS if re.match(rf"{name}([_/]|$)", key)), None)


class Alert(NamedTuple):
    """`level`: INFO, WARN or ERROR, as W&B has them."""

    title: str
    text: str
    level: str


class Alarms:
    """Each condition is reported once when it begins, and again only when it had ended."""

    def __init__(self, describe: Callable[[int], str] = "rank {}".format) -> None:
        """`describe`: what a rank is, and where."""
        self._describe, self._seen = describe, 0
        self._lines: deque[Mapping[str, Any]] = deque(maxlen=WINDOW)
        self._first_idle: dict[str, float] = {}
        self._ringing: set[str] = set()  # titles of alerts
        self._counted = Counter[str]()  # by key, over all steps of this process

    def after_step(self, line: Mapping[str, Any], not_finite: bool = False) -> list[Alert]:
        """`line`: of metrics.jsonl; `not_finite`: the step was skipped for its loss or its
        gradients. Returns what has begun."""
        self._seen += 1
        if self._seen > SKIPPED:
            self._lines.append(line)
        holding = list(self._holding(line, not_finite))
        begun = [alert for alert in holding if alert.title not in self._ringing]
        self._ringing = {alert.title for alert in holding}
        return begun

    def _holding(self, line: Mapping[str, Any], not_finite: bool) -> Iterator[Alert]:
        """Each condition that holds now."""
        step = line["step"]
        if not_finite or line["loss"] is None or not math.isfinite(line["loss"]):
            text = (
                f"Step {step} was skipped; bad_steps.jsonl lists its samples. "
                "The run ends after max_bad_steps such steps in a row."
            )
            yield Alert("Loss or gradients not finite", text, "ERROR")
        yield from self._unused_samples(line)
        if len(self._lines) < WINDOW:
            return
        for stage, idle in self._means("idle/").items():
            before = self._first_idle.setdefault(stage, idle)
            if idle > before + MORE_IDLE:
                text = (
                    f"{idle:.0%} of the last {WINDOW} steps, after {before:.0%} at the beginning; "
                    "the timeline of a sampled step shows for whom."
                )
                yield Alert(f"Stage {stage} waits", text, "WARN")
        step_s = mean(each["step_s"] for each in self._lines)
        yield from self._slow_ranks()
        shards_s = mean(each.get("stream_wait_s", 0.0) for each in self._lines)
        for stage, wait_s in self._means("data_wait_s/").items():
            if wait_s > DRY * step_s:
                # workers wait for shards side by side, so their seconds are no part of the step's
                advice = "more --workers, --cache auto or a faster disk feed it."
                if shards_s > wait_s / 2:
                    advice = (
                        f"loaders waited {shards_s:.1f} s a step for shards that the store had not "
                        "delivered: it was away or is too slow, which more --workers do not change. "
                        "A nearer store, or a larger --stream-cache, feeds it."
                    )
                text = (
                    f"It waited for micro-batches for {wait_s / step_s:.0%} of the last {WINDOW} "
                    f"steps; {advice}"
                )
                yield Alert(f"Data for stage {stage} runs dry", text, "WARN")

    def _unused_samples(self, line: Mapping[str, Any]) -> Iterator[Alert]:
        """A value that cannot be read is counted when it is loaded, and its sample again by each pair
        in the step that it is of, which may come later. So over all steps so far, a pair that has
        left out more than there were unreadable values lacks others, too."""
        step, by_alert = line["step"], {UNUSABLE: Counter[str](), LEFT_OUT: Counter[str]()}
        for key, number in line.items():
            title = COUNTS.get(count_of(key) or "")
            if title and number:
                self._counted[key] += number
                by_alert[title][key] = number
        so_far = [(COUNTS[str(count_of(key))], n) for key, n in self._counted.items()]
        unreadable = sum(n for title, n in so_far if title == UNUSABLE)
        left_out = max((n for title, n in so_far if title == LEFT_OUT), default=0)
        if unreadable or UNUSABLE in self._ringing:
            text = (
                f"{_listed(by_alert[UNUSABLE])} in step {step}; bad_samples.jsonl has the reasons."
            )
            yield Alert(UNUSABLE, text, "WARN")
        if left_out > unreadable or LEFT_OUT in self._ringing:
            text = (
                f"{_listed(by_alert[LEFT_OUT])} in step {step}: they lack a half of the pair, or less "
                "than half of it is in view. The loss is the mean over the others."
            )
            yield Alert(LEFT_OUT, text, "INFO")

    def _slow_ranks(self) -> Iterator[Alert]:
        """A rank that was the slowest of its stage in most steps of the window, and by how much."""
        idle = self._means("idle/")
        for stage, ratio in self._means("slowest_ratio/").items():
            ranks = [int(each[f"slowest_rank/{stage}"]) for each in self._lines]
            rank = max(set(ranks), key=ranks.count)
            if ratio > SLOW and ranks.count(rank) > WINDOW / 2:
                waits = max(idle, key=lambda other: idle[other])
                text = (
                    f"It takes {ratio:.1f} times as long as the other replicas of {stage}, mean "
                    f"of the last {WINDOW} steps. {waits} waits most, {idle[waits]:.0%} of a step."
                )
                words = self._describe(rank)
                yield Alert(f"{words[0].upper()}{words[1:]} is slow", text, "WARN")

    def _means(self, prefix: str) -> dict[str, float]:
        """Over the window, by what follows the prefix."""
        keys = [key for key in self._lines[-1] if key.startswith(prefix)]
        return {
            key.removeprefix(prefix): mean(line.get(key, 0.0) for line in self._lines)
            for key in keys
        }


def _listed(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{key} {number:g}" for key, number in counts.items())
