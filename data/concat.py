"""Parts in a row: which of them a number of the whole lies in, and which number it has there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np


class Concat:
    """Of parts with so many each, some of them with none. `starts` [P + 1] int64: the first number
    of each part, and behind them the number of all."""

    def __init__(self, counts: Iterable[int] | np.ndarray) -> None:
        each = counts if isinstance(counts, np.ndarray) else np.fromiter(counts, np.int64)
        self.starts = np.concatenate([[0], np.cumsum(each, dtype=np.int64)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def part(self, i: int) -> tuple[int, int]:
        """The part of a number, and its number there. Errors: IndexError."""
        if not 0 <= i < len(self):
            raise IndexError(f"number {i}: there are 0..{len(self) - 1}")
        part = int(np.searchsorted(self.starts, i, side="right")) - 1
        return part, i - int(self.starts[part])

    def parts(self, numbers: np.ndarray) -> np.ndarray:
        """[n] int64: the part of each of `numbers` [n]."""
        return np.searchsorted(self.starts, numbers, side="right") - 1

    def split(self, numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Of each part that some of `numbers` [n] lie in: (the part, where these stand among the
        numbers, their numbers in the part)."""
        of = self.parts(numbers)
        for part in np.unique(of).tolist():
            own = np.flatnonzero(of == part)
            yield part, own, numbers[own] - self.starts[part]
