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
        self._shares: dict[str, float] = {}  # of a step, smoothed, by key of a line
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
        for prefix, whole in (("idle/", 1.0), ("data_wait_s/", line["step_s"])):
            for key in (key for key in line if key.startswith(prefix)):
                share = line[key] / whole
                before = self._shares.get(key, share)
                self._shares[key] = SMOOTHING * before + (1 - SMOOTHING) * share
        waits, idle = self._of("data_wait_s/"), self._of("idle/")
        held_up = max(waits, key=waits.__getitem__, default="")
        if held_up and waits[held_up] > DATA_SHARE:
            return f"data of {held_up}"
        busiest = min(idle, key=idle.__getitem__, default="")
        return busiest if busiest and max(idle.values()) - idle[busiest] > EQUAL else ""

    def _of(self, prefix: str) -> dict[str, float]:
        """The shares of each stage."""
        own = self._shares.items()
        return {key.removeprefix(prefix): share for key, share in own if key.startswith(prefix)}

    @staticmethod
    def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
        text = warnings.formatwarning(message, category, filename, lineno, line)
        Bar.write(text.rstrip("\n"), file=file or sys.stderr)
