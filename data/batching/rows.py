"""The training samples of several data sets in a row, without a number for each where all samples
of one are used."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data.concat import Concat


class Rows:
    """`rows[k]`: the index in the source of training sample k, for k an array or a slice.

    `pieces`: of each data set its first index in the source, and its training samples: their
    number where these are all, else their indices [n], counted from its first. `sets`: the training
    samples of each in a row.
    """

    def __init__(self, pieces: Sequence[tuple[int, np.ndarray | int]]) -> None:
        self.pieces = tuple(pieces)
        sizes = [rows if isinstance(rows, int) else len(rows) for _, rows in pieces]
        self.sets = Concat(sizes)

    def __len__(self) -> int:
        return len(self.sets)

    def __getitem__(self, numbers: np.ndarray | slice) -> np.ndarray:
        if isinstance(numbers, slice):
            numbers = np.arange(*numbers.indices(len(self)), dtype=np.int64)
        found = np.empty(len(numbers), np.int64)
        for piece, own, within in self.sets.split(numbers):
            first, rows = self.pieces[piece]
            found[own] = first + (within if isinstance(rows, int) else rows[within])
        return found
