"""Decimals, dates and other types of tables, wherever a number or a text is needed."""

import datetime
import uuid
from decimal import Decimal

import pytest

from data.bad_samples import BadSample
from data.clips import Span, checked_span
from data.formats.rows import checked_name
from data.regions import checked_region
from data.streams.bloom import key_of
from data.values import EXACT, plain, whole


def test_plain_values():
    for given, expected in (
        (Decimal("5.00"), 5),
        (Decimal("0.31"), 0.31),
        (Decimal(10**38 - 1), 10**38 - 1),
        (datetime.date(2024, 1, 2), "2024-01-02"),
        (datetime.datetime(2024, 1, 2, 3, 4, 5, 6000), "2024-01-02T03:04:05.006000"),
        (datetime.time(3, 4), "03:04:00"),
        (datetime.timedelta(seconds=2.5), 2.5),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        ({"xyxy": [Decimal("1.5"), (Decimal(2),)]}, {"xyxy": [1.5, [2]]}),
        (7.0, 7.0),
        ("a", "a"),
        (None, None),
    ):
        found = plain(given)
        assert found == expected and type(found) is type(expected), given
    assert type(whole(7.0)) is int and whole(7.5) == 7.5 and whole("7") == "7"
    assert type(whole(2.0 * EXACT)) is float  # its last digits are not known


def test_all_checks_take_them():
    assert checked_span(Decimal("2.5"), datetime.timedelta(seconds=4)) == Span(2.5, 4.0)
    assert checked_name(Decimal(7), "the id") == checked_name(7.0, "the id") == 7
    assert checked_name(datetime.date(2024, 1, 2), "the id") == "2024-01-02"
    box = [Decimal("4.00"), Decimal(2), Decimal("8.5"), 8]
    region = checked_region({"box": box, "text": "red"}, [])
    assert region.box == (4.0, 2.0, 12.5, 10.0)
    assert key_of("id", Decimal(7)) == key_of("id", 7) == key_of("id", 7.0)
    with pytest.raises(BadSample, match="start_s is '03:04:00'; seconds as a number"):
        checked_span(datetime.time(3, 4), None)
    with pytest.raises(BadSample, match="the id is 1e"):
        checked_name(1e20, "the id")
