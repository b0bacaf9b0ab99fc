"""The progress bar of a run: loss, samples/s, what is left, and the stage that is waited for."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

from data.progress import Bar, interval_s

SMOOTHING = 0.9  # of the idle shares: the weight of the steps before
EQUAL = 0.05  # of a step: shares that differ by less are equal, and nobody waits
DATA_SHARE = 0.1  # of a step: a stage that waits longer for its micro-batches is held up by them


class Progress(Bar):
    """Of a run of which `step` of `total_steps` steps are done. Warnings come above it."""

    def __init__(self, step: int, total_steps: int, first_rank: bool):
        self._idle: dict[str, float] = {}
        self._data: dict[str, float] = {}
        super().__init__(
            desc="training",
            total=total_steps,
            initial=step,
            unit="step",
            disable=not first_rank,
            dynamic_ncols=True,
            mininterval=interval_s(),
        )

    def __enter__(self) -> Progress:
        self._catching = warnings.catch_warnings()  # puts showwarning back at the end
        self._catching.__enter__()
        if not self.disable:
            warnings.showwarning = self._show_warning
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._catching.__exit__(*error)

    def step(self, line: Mapping[str, float]) -> None:
        """One more is done; `line`: as in metrics.jsonl."""
        shown = {"loss": f"{line['loss']:.3f}", "samples_per_s": f"{line['samples_per_s']:.0f}"}
        waits_for = self._waits_for(line)
        if waits_for:
            shown["waits_for"] = waits_for
        self.set_postfix(shown, refresh=False)
        self.update()

    def _waits_for(self, line: Mapping[str, float]) -> str:
        """The stage whose ranks are idle least, or its data; empty where all are equally busy."""
        self._smooth(self._idle, line, "idle/", 1.0)
        self._smooth(self._data, line, "data_wait_s/", line["step_s"])
        held_up = max(self._data, key=self._data.__getitem__, default=None)
        if held_up is not None and self._data[held_up] > DATA_SHARE:
            return f"data of {held_up}"
        if len(self._idle) < 2:
            return ""
        busiest = min(self._idle, key=self._idle.__getitem__)
        waits = max(self._idle.values()) - self._idle[busiest] > EQUAL
        return busiest if waits else ""

    def _smooth(
        self, shares: dict[str, float], line: Mapping[str, float], prefix: str, whole: float
    ) -> None:
        for key, value in line.items():
            if key.startswith(prefix):
                name, share = key.removeprefix(prefix), value / whole
                shares[name] = SMOOTHING * shares.get(name, share) + (1 - SMOOTHING) * share

    @staticmethod
    def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
        text = warnings.formatwarning(message, category, filename, lineno, line)
        Bar.write(text.rstrip("\n"), file=file or sys.stderr)
