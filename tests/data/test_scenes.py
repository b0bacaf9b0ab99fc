"""`demo:scenes`: pictures of several emoji, their boxes, and what training never sees."""

import itertools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

from data.decoding.images import decode_bytes
from data.formats.demo import family_key, text_of
from data.formats.drawn import COMPOSITION, CONCEPT
from data.formats.scenes import (
    CANVAS,
    COVERED,
    EMOJI,
    SIDES,
    Scene,
    covered,
    demo_format,
    listed,
)
from data.index.sources import open_source
from data.index.splits import split_source


@pytest.fixture(scope="module")
def scenes():
    return demo_format("scenes")


@pytest.fixture(scope="module")
def rows(scenes):
    """Without what would be 300 MB."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scene, "encoded", lambda scene: b"")
        return [row.values for part in scenes.parts() for row in scenes.rows(part)]


def pixels(encoded):
    return np.asarray(decode_bytes(encoded)).astype(int)


def test_a_number_of_scenes_that_is_none_is_refused():
    for where in ("scenes:", "scenes:9", "scenes:-20", "scenes:en"):
        with pytest.raises(ValueError, match="demo:scenes:N with N from 10"):
            demo_format(where)
    assert demo_format("scenes:30").total() == 30 and demo_format("scenes").total() == 2000


def test_a_box_is_where_the_pixels_of_its_emoji_are(scenes):
    for number in range(40):
        scene = scenes.scene(number)
        inside = np.zeros((CANVAS, CANVAS), bool)
        for each in scene.shown:
            changed = np.zeros((CANVAS, CANVAS), bool)
            for colour in ((0, 0, 0), (255, 255, 255)):  # an emoji may have the colour of one
                alone = pixels(Scene(colour, [each], []).encoded())
                changed |= (alone != colour).any(2)
            left, top, width, height = each.box
            rows, columns = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
            assert (columns[0], columns[-1] + 1) == (left, left + width), (number, each)
            assert (rows[0], rows[-1] + 1) == (top, top + height), (number, each)
            assert SIDES[0] - 1 <= max(width, height) <= SIDES[1]
            inside[top : top + height, left : left + width] = True
        image = pixels(scene.encoded())
        assert image.shape == (CANVAS, CANVAS, 3)
        assert (image[~inside] == scene.background).all() and min(scene.background) >= 176
        assert (image[inside] != scene.background).any(1).mean() > 0.3


def test_a_row_says_what_its_scene_shows(scenes, rows):
    counts = set()
    for number, row in enumerate(rows):
        names = [region["text"] for region in row["region"]]
        counts.add(len(names))
        assert len({*names}) == len(names) and 1 <= len(row["text"]) <= 3
        whole = len(listed(names))
        for caption in row["text"]:
            assert len(caption) == whole and all(name in caption for name in names), number
        for one, other in itertools.combinations(row["region"], 2):
            assert covered(one["box"], other["box"]) <= COVERED, number
    assert counts == {*range(EMOJI[0], EMOJI[1] + 1)}
    assert covered((0, 0, 4, 4), (2, 2, 8, 8)) == 4 / 16
    assert listed(["ant", "bus", "cherries"]) == "an ant, a bus and cherries"


def test_the_same_bytes_each_time_and_in_another_process(scenes, rows):
    numbers = range(0, 2000, 200)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
        there = [other.submit(scenes.read, "image", "", n, None) for n in numbers]
        for number, found in zip(numbers, there):
            row = scenes.values(number)
            assert row["image"] == scenes.read("image", "", number, None) == found.result()
            assert row | {"image": b""} == rows[number]
    # a scene does not depend on how many there are
    assert demo_format("scenes:10").values(7) == scenes.values(7)


def test_concepts_and_pairs_are_held_out(scenes, rows):
    kinds = {None: [], CONCEPT: [], COMPOSITION: []}
    for row in rows:
        kind = scenes.concept(row["id"]).held_out
        kinds[kind].append([region["text"] for region in row["region"]])
    assert [*map(len, kinds.values())] == [1600, 200, 200]
    trained, new, composed = ({*itertools.chain(*of)} for of in kinds.values())
    assert not trained & new and composed <= trained
    assert 0.15 < len(new) / len(trained | new) < 0.25 and len(trained | new) > 300
    pairs = {frozenset(pair) for names in kinds[None] for pair in itertools.combinations(names, 2)}
    assert len(pairs) > 0.3 * len(trained) * (len(trained) - 1) / 2
    for names in kinds[COMPOSITION]:
        for n, name in enumerate(names[1:], 1):
            assert any(frozenset((name, other)) not in pairs for other in names[:n])


def test_names_tell_the_emoji_apart(scenes):
    known = scenes._emoji
    assert len({emoji.name for emoji in known}) == len(known)
    assert len({family_key(text_of(emoji.points)) for emoji in known}) == len(known)
    assert not [e.name for e in known if "skin tone" in e.name or "flag" in e.name]


def test_a_source_holds_out_what_scenes_say():
    source = open_source("demo:scenes:60", workers=0)
    assert len(source.usable()) == 60 and source.identity(18) == "scenes/concept/00018"
    assert source.where(3).endswith("demo:scenes#3")
    splits = split_source(source, 0.1)
    for name, last in ((CONCEPT, 8), (COMPOSITION, 9)):
        held_out = splits.held_out[name]
        assert (held_out % 10 == last).all() and len(held_out) == 5  # a tenth of 48
    assert splits.held_out.keys() == {CONCEPT, COMPOSITION}
    assert splits.train.tolist() == [n for n in range(60) if n % 10 < 8]
    assert np.array_equal(split_source(source, 0).train, splits.train)
    other = split_source(source, 0.1, seed=3).held_out
    assert any(not np.array_equal(other[name], splits.held_out[name]) for name in other)
