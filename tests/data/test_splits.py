"""Held-out samples: sizes, and that nothing leaks."""

import json

import numpy as np
import pytest
from PIL import Image

from data.decoding.images import decode_bytes, pixel_key
from data.formats.demo import text_of, toneless_key
from data.index.sources import open_source
from data.index.splits import content_groups, split_source


@pytest.fixture(scope="module", params=[0, 7])
def splits(demo, request):
    return split_source(demo, 0.1, seed=request.param)


def sides(splits):
    return [splits.train, *splits.held_out.values()]


def assert_no_content_on_two_sides(source, splits):
    for keys in (
        lambda i: [pixel_key(decode_bytes(source.value("image", i)))],
        lambda i: [text.casefold() for text in source.captions(i)],
    ):
        found = [{key for i in side for key in keys(int(i))} for side in sides(splits)]
        assert sum(map(len, found)) == len(set.union(*found))


def test_demo_every_sample_is_on_one_side_and_sizes_are_the_wanted_ones(demo, splits):
    assert list(splits.held_out) == ["family", "composition"]
    assert sorted(np.concatenate(sides(splits)).tolist()) == list(range(len(demo)))
    assert all(side.dtype == np.int64 and (np.diff(side) > 0).all() for side in sides(splits))
    assert [len(part) for part in splits.held_out.values()] == [round(0.1 * len(demo))] * 2
    assert_no_content_on_two_sides(demo, splits)


def test_demo_family_concepts_are_unseen_and_composition_is_mostly_another_skin_tone(demo, splits):
    family, composition = splits.held_out.values()
    seen, unseen = (
        {demo.concept(int(i)).family for i in side}
        for side in (np.concatenate([splits.train, composition]), family)
    )
    assert not seen & unseen
    words = {demo.captions(int(i))[0].split(" skin tone")[0] for i in family}
    assert len(words) > 100  # many concepts, not one large family
    trained, held_out = (
        [toneless_key(text_of(demo.identity(int(i)))) for i in side]
        for side in (splits.train, composition)
    )
    assert sum(map({*trained}.__contains__, held_out)) > len(held_out) / 2


def test_pure_function_of_the_seed(demo):
    first, again, other = (split_source(demo, 0.1, seed) for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(sides(first), sides(again)))
    assert not np.array_equal(first.held_out["composition"], other.held_out["composition"])
    assert not np.array_equal(first.held_out["family"], other.held_out["family"])


def test_jsonl_keeps_equal_images_and_captions_together(emoji_set):
    """A chain: sample 20 has the image of 0 (other bytes) and the caption of 1; 21 has the caption
    of 2 in capitals."""
    file = emoji_set(20, texts=lambda caption: [caption, caption + " emoji"])
    image = Image.open(file.parent / "images of emoji/0.png")
    image.save(file.parent / "copy.webp", lossless=True, exact=True)
    source = open_source(f"jsonl:{file}")
    rows = [{"image_path": "copy.webp", "text": source.captions(1)[1]}]
    rows += [{"image_path": "images of emoji/3.png", "text": source.captions(2)[0].upper()}]
    with file.open("a") as lines:
        lines.write("\n".join(map(json.dumps, rows)))
    source = open_source(f"jsonl:{file}")
    assert source.content_hash("image", 20) != source.content_hash("image", 0)
    for seed in range(20):
        splits = split_source(source, 0.3, seed)
        side = {int(i): name for name, part in splits.held_out.items() for i in part}
        assert side.get(20) == side.get(0) == side.get(1)
        assert side.get(21) == side.get(2) == side.get(3)
        assert_no_content_on_two_sides(source, splits)
        assert list(splits.held_out) == ["validation"] and len(splits.held_out["validation"]) == 7


def test_small_sets(emoji_set):
    source = open_source(f"jsonl:{emoji_set(3)}")
    for fraction, sizes in ((0.0, [3]), (0.1, [2, 1]), (0.9, [1, 2])):
        assert [*map(len, sides(split_source(source, fraction, 0)))] == sizes


def test_bad_samples_are_on_no_side(emoji_set):
    missing = {"image_path": "missing.png", "text": "nothing"}
    source = open_source(f"jsonl:{emoji_set(10, 'no json', missing)}")
    assert len(source) == 12
    for fraction in (0.0, 0.3):
        splits = split_source(source, fraction, 0)
        assert sorted(np.concatenate(sides(splits)).tolist()) == list(range(10))


def test_long_chains_are_one_group(emoji_set, monkeypatch):
    """Sample i shares a caption with i + 1."""
    source = open_source(f"jsonl:{emoji_set(40)}")
    monkeypatch.setattr(source, "captions", lambda i: [f"link {i}", f"link {i + 1}"])
    assert len({*content_groups(source, source.usable())}) == 1
    monkeypatch.setattr(source, "captions", lambda i: [f"pair {i // 2}"])
    groups = content_groups(source, source.usable())
    assert len({*groups}) == 20 and (groups[::2] == groups[1::2]).all()


def test_refusals(demo, emoji_set):
    source = open_source(f"jsonl:{emoji_set(4, texts=lambda caption: 'an image')}")
    for each, fraction, words in (
        (demo, 0.5, "held-out sets family, composition: 0 <= val_fraction < 0.5"),
        (source, -0.1, r"val_fraction -0.1 .* < 1 is needed"),
        (source, 0.25, r"4 samples in 1 groups .* train 4, validation 0; no side"),
    ):
        with pytest.raises(ValueError, match=words):
            split_source(each, fraction)
