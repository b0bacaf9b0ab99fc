"""The training samples of several data sets in a row, without a number for each where all samples
of one are used."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Rows:
    """`rows[k]`: the index in the source of training sample k, for k an array or a slice.

    `pieces`: of each data set its first index in the source, and its training samples: their
    number where these are all, else their indices [n], counted from its first. `starts` [D + 1]:
    the first training sample of each.
    """

    def __init__(self, pieces: Sequence[tuple[int, np.ndarray | int]]) -> None:
        self.pieces = tuple(pieces)
        sizes = [rows if isinstance(rows, int) else len(rows) for _, rows in pieces]
        self.starts = np.cumsum([0, *sizes])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, numbers: np.ndarray | slice) -> np.ndarray:
        if isinstance(numbers, slice):
            numbers = np.arange(*numbers.indices(len(self)), dtype=np.int64)
        of = np.searchsorted(self.starts, numbers, side="right") - 1
        found = np.empty(len(numbers), np.int64)
        for piece in np.unique(of).tolist():
            first, rows = self.pieces[piece]
            own = numbers[of == piece] - self.starts[piece]
            found[of == piece] = first + (own if isinstance(rows, int) else rows[own])
        return found
