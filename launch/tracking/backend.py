"""What a place that metrics go to has to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from launch.tracking.alerts import Alert


class Backend:
    """Receives everything that is tracked; what it has no place for does nothing. It may raise: the
    tracker then goes on without it."""

    def log(self, values: Mapping[str, float | None], step: int, samples: int | None) -> None:
        """Metrics by name; None is a gap. `samples`: that have been trained on so far; None for
        metrics that are written in any case."""
        raise NotImplementedError

    def note(self, name: str, text: str, step: int) -> None:
        """A sentence beside the charts."""

    def alert(self, alert: Alert, step: int) -> None:
        """A message to a person."""
        self.note(f"alerts/{alert.title}", alert.text, step)

    def media(self, name: str, make: Callable[[], Any], step: int) -> None:
        """What `make` returns, an object of W&B: a table or a figure."""

    def summarize(self, name: str, text: str) -> None:
        """A sentence about the run as a whole."""

    def finish(self, exit_code: int) -> None:
        """Nothing more comes."""
