"""Parts in a row, some of them empty."""

import numpy as np
import pytest

from data.concat import Concat


def test_every_number_has_its_part_and_its_place_there():
    counts = [0, 3, 0, 0, 2, 1, 0]
    whole = Concat(counts)
    expected = [(part, row) for part, count in enumerate(counts) for row in range(count)]
    assert len(whole) == len(expected) == 6
    assert [whole.part(i) for i in range(6)] == expected
    assert whole.parts(np.arange(6)).tolist() == [part for part, _ in expected]
    numbers = np.array([5, 0, 4, 2, 0])
    found = {}
    for part, own, rows in whole.split(numbers):
        found |= {place: (part, row) for place, row in zip(own.tolist(), rows.tolist())}
    assert [found[place] for place in range(5)] == [expected[i] for i in numbers.tolist()]
    assert [*whole.split(np.empty(0, np.int64))] == []


@pytest.mark.parametrize("counts", [[], [0], [2]])
def test_what_is_not_there_is_refused(counts):
    for i in (-1, sum(counts)):
        with pytest.raises(IndexError, match="there are 0.."):
            Concat(counts).part(i)


def test_many_numbers_stay_whole():
    whole = Concat(np.full(3, 2**31 - 1, np.int32))
    assert len(whole) == 3 * (2**31 - 1) and whole.part(2**32) == (2, 2)
