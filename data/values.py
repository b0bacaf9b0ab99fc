"""Plain Python values of what tables hold: DuckDB and Spark have types for decimals, large whole
numbers, dates and times that are neither numbers nor texts to Python."""

import datetime
from collections.abc import Mapping
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa

EXACT = 1 << 53  # up to which a double holds every whole number
INT64_DIGITS = 18


def plain(given: Any) -> Any:
    """A decimal becomes a whole number where it is one, else a float; dates and times become texts
    as ISO 8601 has them, durations seconds, UUIDs texts; the same within lists and mappings. All
    else stays as it is."""
    if isinstance(given, Decimal):
        return (
            int(given) if given.is_finite() and given == given.to_integral_value() else float(given)
        )
    if isinstance(given, datetime.timedelta):
        return given.total_seconds()
    if isinstance(given, (datetime.date, datetime.time)):  # a datetime is a date
        return given.isoformat()
    if isinstance(given, UUID):
        return str(given)
    if isinstance(given, (list, tuple)):
        return [*map(plain, given)]
    if isinstance(given, Mapping):
        return {key: plain(value) for key, value in given.items()}
    return given


def whole(given: Any) -> Any:
    """A float that is a whole number as that, since pandas makes floats of whole numbers beside a
    missing one. One that is too large to be exact stays."""
    is_whole = isinstance(given, float) and given.is_integer() and abs(given) <= EXACT
    return int(given) if is_whole else given


def plain_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column with categories as their values, decimals as int64, where they are whole numbers
    of up to 18 digits, or float64, and dates and times as texts, which can be compared with any
    number or text."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return plain_column(column.cast(kind.value_type))
    if pa.types.is_decimal(kind):
        is_int = kind.scale <= 0 and kind.precision - kind.scale <= INT64_DIGITS
        return column.cast(pa.int64() if is_int else pa.float64())
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind) or pa.types.is_time(kind):
        return column.cast(pa.string())
    return column.cast(pa.large_string()) if kind == pa.string_view() else column
