"""Samples on both sides are found: by bytes, by id, by looks."""

import json

import numpy as np
import pytest
from PIL import Image

from data.index.leaks import count_leaks, describe_leaks, find_leaks
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
    leaks = find_leaks(train, train.usable(), held_out, held_out.usable(), bits)
    return {leak.kind: dict(zip(leak.train.tolist(), leak.held_out.tolist())) for leak in leaks}


def test_equal_bytes_and_equal_ids_with_an_equal_caption(both):
    assert found(*both) == {"content": {4: 9}, "id": {9: 10}}


def test_nearly_equal_images_when_asked_for(both):
    train, held_out = both
    near = found(train, held_out, bits=2)["near"]
    hashes = [source.column("perceptual_hash").tolist() for source in both]
    expected = {
        i: min(j for j in range(12) if bin(hashes[0][i] ^ hashes[1][j]).count("1") <= 2)
        for i in range(30)
        if i not in (4, 9) and any(bin(hashes[0][i] ^ hash).count("1") <= 2 for hash in hashes[1])
    }
    assert near == expected and near[20] == 11


@pytest.mark.parametrize("bits", [0, 1, 3, 7])
def test_near_is_what_comparing_all_pairs_gives(bits):
    class Hashes:
        def __init__(self, values):
            self.values = values

        def column(self, name):
            return self.values

        def keys(self, kind):
            return np.zeros(len(self.values), np.uint64)

    rng = np.random.default_rng(bits)
    some = rng.integers(1, 1 << 63, 60, np.uint64)
    flips = np.array(
        [
            sum(1 << int(bit) for bit in rng.choice(64, rng.integers(0, 9), replace=False))
            for _ in range(200)
        ],
        np.uint64,
    )
    train, held_out = Hashes(rng.choice(some, 200) ^ flips), Hashes(some)
    expected = {}
    for i, own in enumerate(train.values.tolist()):
        close = [j for j, other in enumerate(some.tolist()) if bin(own ^ other).count("1") <= bits]
        if close:
            expected[i] = close[0]
    leaks = find_leaks(train, np.arange(200), held_out, np.arange(60), bits)
    assert {
        leak.kind: dict(zip(leak.train.tolist(), leak.held_out.tolist())) for leak in leaks
    } == {"near": expected}
    assert len(expected) > 10


def test_a_part_of_the_samples_only(both):
    train, held_out = both
    leaks = find_leaks(train, np.array([0, 4, 5]), held_out, np.array([0, 1, 9]))
    assert (
        count_leaks(leaks) == {"content": 1}
        and leaks[0].train.tolist() == [4]
        and leaks[0].held_out.tolist() == [9]
    )
    assert find_leaks(train, np.array([0, 5]), held_out, held_out.usable()) == []


def test_the_message_names_them(both):
    train, held_out = both
    text = describe_leaks(
        train, held_out, "held out", find_leaks(train, train.usable(), held_out, held_out.usable())
    )
    assert (
        text.splitlines()[0]
        == "2 training samples are also in the held-out set 'held out' (1 by content, 1 by id):"
    )
    assert "train.jsonl:5 is " in text and "held.jsonl:10 (content)" in text


def test_a_run_refuses_or_drops_them(both, tmp_path):
    train, held_out = both
    options = {"data": (train.spec,), "val_data": held_out.spec}
    for name in ("refused", "dropped"):
        (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match="(?s)2 training samples are also in .*--on-leak drop"):
        prepare_data(DataOptions(**options), None, tmp_path / "refused")
    prepared = prepare_data(DataOptions(**options, on_leak="drop"), None, tmp_path / "dropped")
    assert prepared.train.tolist() == [i for i in range(30) if i not in (4, 9)]
    assert len(prepared.held_out["validation"].subset) == 12 and prepared.summary()[
        "dropped_leaks"
    ] == {"content": 1, "id": 1}
    again = prepare_data(DataOptions(**options, on_leak="drop"), None, tmp_path / "dropped")
    assert again.train.tolist() == prepared.train.tolist() and again.summary() == prepared.summary()
