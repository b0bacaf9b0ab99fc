"""The numbers of lines of JSON by key, as charts draw them."""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

Columns = Mapping[str, np.ndarray]


def columns_of(lines: Iterable[Mapping[str, Any]]) -> Columns:
    """The numbers of the lines by key, [number of lines], nan where a line lacks the key."""
    # float32 halves the memory of long runs; step numbers stay exact
    columns: dict[str, array] = defaultdict(lambda: array("f"), step=array("d"))
    length = 0
    for length, line in enumerate(lines, 1):
        for key, value in line.items():
            if value is None or isinstance(value, (int, float)):
                column = columns[key]
                column.extend([math.nan] * (length - 1 - len(column)))
                column.append(math.nan if value is None else value)
    for column in columns.values():
        column.extend([math.nan] * (length - len(column)))
    return {key: np.array(column) for key, column in columns.items() if length}
