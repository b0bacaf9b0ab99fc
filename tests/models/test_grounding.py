"""Windows of films, and which of them holds what a sentence says."""

import numpy as np
import pytest

from models.metrics.grounding import (
    MOST,
    OVERLAPS,
    chosen_overlap,
    grounding_figures,
    overlap,
    overlap_shares,
    overlaps_by_text,
    windows,
)


def test_windows_cover_a_film_to_its_end():
    found = windows(10.0, [4.0, 20.0])
    assert found[0].tolist() == [0, 4] and [6, 10] in found.tolist() and [0, 10] in found.tolist()
    lengths = found[:, 1] - found[:, 0]
    assert set(lengths.round(6)) == {4.0, 10.0} and len(found) == 7 + 1
    assert (np.diff(found[:7, 0]) == 1).all()
    assert windows(3.0, [3.0]).tolist() == [[0, 3]]
    long = windows(7200.0, [2.0])
    assert MOST - 1 <= len(long) <= MOST and long[-1].tolist() == [7198, 7200]


def test_overlap_is_of_the_intersection_in_the_union():
    every = np.array([[0, 4], [2, 6], [5, 9], [4, 8], [1, 3]], float)
    assert overlap(every, 0, 4).tolist() == pytest.approx([1, 1 / 3, 0, 0, 1 / 2])


def test_what_a_film_shows_twice_is_found_in_either_place():
    every = np.array([[0, 4], [2, 6], [6, 10]], float)
    found = overlaps_by_text(every, [(7, 0.0, 4.0), (8, 2.0, 6.0), (7, 6.0, 10.0)])
    assert found[7].tolist() == pytest.approx([1, 1 / 3, 1])
    assert found[8].tolist() == pytest.approx([1 / 3, 1, 0])


def test_a_film_that_stands_still_chooses_no_window():
    places = np.array([0.9, 0.2, 0.0])
    assert chosen_overlap(np.array([0.5, 0.4, 0.1]), places) == 0.9
    assert chosen_overlap(np.array([0.5, 0.5 - 1e-7, 0.1]), places) == 0.2
    assert chosen_overlap(np.full(3, np.nan), places) == 0


def test_figures_are_of_the_chosen_window_and_of_a_random_one():
    found = [(0.6, np.array([0.6, 0.2, 0.0, 0.4])), (0.1, np.array([0.9, 0.1]))]
    figures = grounding_figures([(own, overlap_shares(every)) for own, every in found])
    assert figures["grounding_queries"] == 2
    expected = {0.3: (1 / 2, (2 / 4 + 1 / 2) / 2), 0.5: (1 / 2, (1 / 4 + 1 / 2) / 2)}
    expected[0.7] = (0, (0 + 1 / 2) / 2)
    for least in OVERLAPS:
        own = figures[f"grounding_R@1_iou_{least}"], figures[f"grounding_chance_iou_{least}"]
        assert own == pytest.approx(expected[least]), least
    assert grounding_figures([]) == {}
