"""A data set class of one's own: what its items may be, what a sample may lack, and what is
refused."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from data.batching.mixture import open_sources
from data.batching.sampler import MicroBatchRequest
from data.index.sources import open_source
from data.index.splits import split_source
from data.loader import MicroBatchDataset
from data.modalities.image import ImageModality
from data.modalities.lengths import token_counts
from data.modalities.modality import ValueModality
from data.modalities.text import TextModality
from data.modalities.transforms import eval_transform

PAIRS = (("image", "text"), ("tone", "text"))

MODULE = """
import numpy as np
from PIL import Image

def picture(i):
    return np.full((20, 30, 3), 7 * i, np.uint8)

class Own:
    def __len__(self):
        return 24

    def __getitem__(self, i):
        item = {"id": f"own{i}", "text": f"the number {i}", "image": picture(i), "tone": [float(i), 1.0]}
        if i % 3 == 1:
            del item["image"]
        if i % 3 == 2:
            item["tone"] = None
        if i == 9:
            del item["text"], item["image"]  # a tone alone is in no pair
        if i == 12:
            item["text"] = ["twelve", "a dozen"]
        if i == 15:
            item["image"] = b"no picture"
        return item

class Tuples:
    items = [(Image.fromarray(picture(i)), f"the number {i}") for i in range(6)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]

made = Tuples()

class Broken(Tuples):
    def __getitem__(self, i):
        return [1, 2, 3] if i == 1 else {"image": 5, "text": "five"} if i == 2 else {}[i] if i == 3 else self.items[i]

number = 5
"""


class Tone(ValueModality):
    name = "tone"

    def encode(self, value, generator):
        return {"tone_values": torch.tensor(value)}

    def blank(self):
        return {"tone_values": torch.zeros(2)}


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A new module's name for each test: Python keeps those that it has imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"own_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODULE)
    return name


def request(*indices):
    return MicroBatchRequest(0, 0, np.array(indices), np.arange(len(indices)), training=False)


@pytest.mark.parametrize("name", ["Tuples", "made"])
def test_pairs_of_pictures_and_texts(module, name):
    source = open_source(f"python:{module}:{name}")
    assert len(source) == 6 and source.usable().tolist() == list(range(6))
    assert source.captions(4) == ["the number 4"] and source.identity(4) == "4"
    assert source.column("width").tolist() == [30] * 6 and source.where(4).endswith(f"{name}#4")
    shown = eval_transform(16)
    assert (shown(shown.stored(source.image_bytes(4)), None) == 28).all()
    assert pickle.loads(pickle.dumps(source)).image_bytes(3) == source.image_bytes(3)
    assert source.format.spec not in open_source(f"python:{module}:Broken").index.file.as_posix()


def test_an_item_without_a_picture_is_bad_where_only_pictures_and_texts_are_compared(module):
    source = open_source(f"python:{module}:Own")
    assert source.usable().tolist() == [i for i in range(24) if i % 3 != 1 and i not in (9, 15)]
    assert source.identity(4) == "own4" and source.captions(12) == ["twelve", "a dozen"]
    reasons = {where.rpartition("#")[2]: reason for _, where, reason, _ in source.bad_samples()}
    assert reasons["1"] == "no-value" and reasons["15"] == "not-an-image"


def test_a_sample_is_usable_where_it_has_both_of_some_pair(module):
    source = open_source(f"python:{module}:Own", PAIRS)
    assert source.usable().tolist() == [i for i in range(24) if i != 9]
    assert np.flatnonzero(source.lacking("image")).tolist() == sorted([*range(1, 24, 3), 9, 15])
    assert np.flatnonzero(source.lacking("tone")).tolist() == list(range(2, 24, 3))
    assert np.flatnonzero(source.lacking("text")).tolist() == [9]
    assert (
        open_source(f"python:{module}:Own").usable().size < source.usable().size
    )  # an index of its own for other pairs


def test_what_a_sample_lacks_has_a_stand_in_that_is_marked(module, tokenizer):
    source = open_source(f"python:{module}:Own", PAIRS)
    transform = eval_transform(16)
    dataset = MicroBatchDataset(
        source, [ImageModality(transform, transform), TextModality(tokenizer, 16), Tone()]
    )
    batch = dataset[request(3, 4, 5, 9, 15)]
    assert batch["image_index"].tolist() == [3, -5, 5, -10, -16] and batch[
        "tone_index"
    ].tolist() == [3, 4, -6, 9, 15]
    assert batch["text_index"].tolist() == [3, 4, 5, -10, 15]
    assert batch["tone_values"].tolist() == [
        [3, 1],
        [4, 1],
        [9, 1],
        [9, 1],
        [15, 1],
    ]  # the next that has one
    assert torch.equal(batch["pixel_values"][1], batch["pixel_values"][2])
    assert dataset[request(5, 2)]["tone_values"].tolist() == [[0, 0], [0, 0]]  # none to show


def test_sets_that_hold_different_modalities_are_mixed(module, tmp_path):
    Image.new("RGB", (8, 8), (200, 0, 0)).save(tmp_path / "a.png")
    (tmp_path / "pairs.jsonl").write_text('{"image_path": "a.png", "text": "red"}\n')
    source = open_sources(
        [f"python:{module}:Own", f"jsonl:{tmp_path / 'pairs.jsonl'}"], pairs=PAIRS
    )
    assert len(source) == 25 and source.lacking("tone")[24] and not source.lacking("image")[24]
    dataset = MicroBatchDataset(source, [Tone()])
    assert dataset[request(0, 24)]["tone_index"].tolist() == [0, -25]


def test_splits_and_token_counts_of_samples_that_lack_something(module, tokenizer, tmp_path):
    source = open_source(f"python:{module}:Own", PAIRS)
    splits = split_source(source, val_fraction=0.2)
    assert len(splits.held_out["validation"]) in (4, 5)  # without a picture they are not all equal
    counts = token_counts(source, np.arange(24), tokenizer, 16, tmp_path / "counts")
    assert counts.longest()[9] == 2 and len(counts.starts) == 25


@pytest.mark.parametrize(
    "where, words",
    [
        ("only_a_module", "write python:MODULE:NAME"),
        ("no_such_module:Own", "cannot import no_such_module"),
        ("{module}:Tuple", "has no 'Tuple'; did you mean 'Tuples'"),
        ("{module}:number", "is a int without __len__ and __getitem__"),
    ],
)
def test_refusals(module, where, words):
    with pytest.raises(ValueError, match=words):
        open_source("python:" + where.format(module=module))


def test_what_is_wrong_with_an_item_is_said(module):
    found = {
        where.rpartition("#")[2]: (reason, detail)
        for _, where, reason, detail in open_source(f"python:{module}:Broken").bad_samples()
    }
    assert {number: reason for number, (reason, _) in found.items()} == {
        "1": "invalid-row",
        "2": "not-an-image",
        "3": "unreadable",
    }
    assert (
        "item 3: KeyError: 3" in found["3"][1]
        and "the image is a int; bytes, a path" in found["2"][1]
    )


def test_data_without_the_modalities_of_any_pair_is_refused(demo):
    with pytest.raises(
        ValueError, match="it holds image and text, and --pairs compares tone:image"
    ):
        open_source("demo", (("tone", "image"),))
