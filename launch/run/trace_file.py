"""`trace.json` in the run's folder: sampled steps, one track per rank, for https://ui.perfetto.dev
or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.files import OWN_LIMIT, read_json
from engine.checkpoint.layout import replace_text
from engine.trace import WAIT, Span

MAX_SAMPLES = 20  # the newest are kept
FIRST_STEP = 3  # before it, kernels are chosen and memory is claimed


def is_sampled(step: int, every: int) -> bool:
    """Is step number `step`, counted from 1, to be traced? `every` 0: none."""
    return every > 0 and (step == FIRST_STEP or step % every == 0)


class TraceFile:
    """Collects sampled steps; the file is complete after each `add`."""

    def __init__(self, path: Path):
        self.path = path
        self._samples: dict[int, list[dict[str, Any]]] = {}
        if path.is_file():  # a run that goes on
            try:
                for event in read_json(path, OWN_LIMIT)["traceEvents"]:
                    if event["ph"] == "X":
                        self._samples.setdefault(event["args"]["step"], []).append(event)
            except (ValueError, KeyError, TypeError):  # damaged: it begins anew
                self._samples = {}

    def add(
        self, step: int, started_at_s: float, ranks: Sequence[tuple[str, Sequence[Span]]]
    ) -> None:
        """`ranks[r]`: its name and its spans of the step, which began at `started_at_s` (seconds,
        any clock that goes on)."""
        self._samples[step] = [
            {
                "name": " ".join(filter(None, (span.name, _number(span.micro_batch)))),
                "cat": "wait" if span.name == WAIT else "instruction",
                "ph": "X",
                "ts": round(1e6 * (started_at_s + span.start_s), 3),
                "dur": round(1e6 * span.seconds, 3),
                "pid": 0,
                "tid": rank,
                "args": {"step": step, "instruction": span.name, "micro_batch": span.micro_batch},
            }
            for rank, (_, spans) in enumerate(ranks)
            for span in spans
        ]
        self._samples = dict(sorted(self._samples.items())[-MAX_SAMPLES:])
        tracks = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": name}}
            for rank, (name, _) in enumerate(ranks)
        ]
        events = [*tracks, *(event for own in self._samples.values() for event in own)]
        replace_text(self.path, json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))


def read_trace(path: Path) -> dict[int, dict[int, list[Span]]]:
    """step -> rank -> spans, with seconds from the beginning of the step; at least one step.
    Errors: FileNotFoundError, ValueError."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file; the run has traced no step yet, or was started with "
            "--trace-every 0"
        )
    try:
        steps = _steps_of(read_json(path, OWN_LIMIT)["traceEvents"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a trace of train.py: {error}") from error
    if not steps:
        raise ValueError(f"{path}: holds no step; train on, or with a smaller --trace-every")
    return steps


def _steps_of(events: Sequence[dict[str, Any]]) -> dict[int, dict[int, list[Span]]]:
    by_step: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            by_step.setdefault(event["args"]["step"], []).append(event)
    steps: dict[int, dict[int, list[Span]]] = {}
    for step, own in sorted(by_step.items()):
        ranks = steps[step] = {}
        origin = min(event["ts"] for event in own)
        for event in own:
            start_s, args = (event["ts"] - origin) / 1e6, event["args"]
            end_s = start_s + event["dur"] / 1e6
            span = Span(args["instruction"], args["micro_batch"], start_s, end_s)
            ranks.setdefault(event["tid"], []).append(span)
    return steps


def _number(micro_batch: int | None) -> str:
    return "" if micro_batch is None else str(micro_batch)
