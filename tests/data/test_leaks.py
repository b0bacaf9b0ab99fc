"""Samples on both sides are found: by bytes, by id, by looks."""

import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from data.index import leaks
from data.index.leaks import find_leaks
from data.index.sources import open_source
from data.options import DataOptions
from data.prepare import prepare_data


@pytest.fixture
def both(emoji_set):
    """A training set of 30 and a held-out set of 12, of which three are training samples: 4 under
    another name, 9 under its id but recompressed, 20 slightly changed. And one that only has the
    number of a training sample."""
    file = emoji_set(42)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    folder = file.parent
    for i, line in enumerate(lines):
        line["id"] = f"emoji-{i}"
    train, held = lines[:30], lines[33:]
    (folder / "four.png").write_bytes((folder / lines[4]["image_path"]).read_bytes())
    Image.open(folder / lines[9]["image_path"]).convert("RGB").save(folder / "nine.jpg", quality=60)
    changed = Image.open(folder / lines[20]["image_path"])
    changed.putpixel((3, 3), (250, 250, 250, 255))
    changed.save(folder / "twenty.png")
    held += [
        {"image_path": "four.png", "text": "four", "id": "x"},
        {"image_path": "nine.jpg", "text": lines[9]["text"], "id": "emoji-9"},
        {"image_path": "twenty.png", "text": "twenty", "id": "emoji-21"},
    ]
    for name, part in (("train.jsonl", train), ("held.jsonl", held)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in part))
    return open_source(f"jsonl:{folder / 'train.jsonl'}"), open_source(
        f"jsonl:{folder / 'held.jsonl'}"
    )


def found(train, held_out, bits=None):
    every = find_leaks(train, train.usable(), held_out, held_out.usable(), bits)
    return {leak.kind: dict(zip(leak.train.tolist(), leak.held_out.tolist())) for leak in every}


def test_equal_bytes_and_equal_ids_with_an_equal_caption(both):
    assert found(*both) == {"content": {4: 9}, "id": {9: 10}}


def test_nearly_equal_images_when_asked_for(both):
    """Each once, as the strongest kind."""
    kinds = found(*both, bits=2)
    assert kinds["content"] == {4: 9} and kinds["id"] == {9: 10} and kinds["near"][20] == 11
    assert not {4, 9} & {*kinds["near"]}


def test_near_is_what_comparing_all_pairs_gives():
    rng = np.random.default_rng(0)
    some = rng.integers(1, 1 << 63, 60, np.uint64)
    # up to eight bits apart
    flips = [sum(1 << int(bit) for bit in rng.choice(64, n % 9, replace=False)) for n in range(200)]
    own = rng.choice(some, 200) ^ np.array(flips, np.uint64)
    for bits in (0, 1, 3, 7):
        expected = {}
        for i, hash in enumerate(own.tolist()):
            close = [j for j, o in enumerate(some.tolist()) if (hash ^ o).bit_count() <= bits]
            expected |= {i: close[0]} if close else {}
        places, partners = leaks._near(own, some, bits)
        assert dict(zip(places.tolist(), partners.tolist())) == expected
        assert len(expected) > 10


def test_a_part_of_the_samples_only(both):
    train, held_out = both
    (leak,) = find_leaks(train, np.array([0, 4, 5]), held_out, np.array([0, 1, 9]))
    assert (leak.kind, leak.train.tolist(), leak.held_out.tolist()) == ("content", [4], [9])
    assert find_leaks(train, np.array([0, 5]), held_out, held_out.usable()) == []


def test_a_run_refuses_or_drops_them(both, tmp_path):
    train, held_out = both
    for name in ("refused", "dropped"):
        (tmp_path / name).mkdir()
    options = DataOptions(data=(train.spec,), val_data=held_out.spec)
    words = r"(?s)2 training samples are also in .*\(1 by content, 1 by id\).*train.jsonl:5 is "
    with pytest.raises(ValueError, match=words + r".*held.jsonl:10 \(content\).*--on-leak drop"):
        prepare_data(options, None, tmp_path / "refused")
    for _ in range(2):
        prepared = prepare_data(replace(options, on_leak="drop"), None, tmp_path / "dropped")
        assert prepared.train.tolist() == [i for i in range(30) if i not in (4, 9)]
        assert len(prepared.held_out["validation"].subset) == 12
        assert prepared.summary()["dropped_leaks"] == {"content": 1, "id": 1}
