"""A data set class of one's own: what its items may be, what a sample may lack, and what is
refused."""

import importlib
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from data.bad_samples import BadSample
from data.batching.mixture import open_sources
from data.batching.requests import MicroBatchRequest
from data.decoding.images import decode_bytes
from data.index.sources import open_source
from data.index.splits import split_source
from data.inspect import main as inspect
from data.loader import MicroBatchDataset
from data.modalities.image import ImageModality
from data.modalities.lengths import token_counts
from data.modalities.modality import ValueModality
from data.modalities.text import Languages, TextModality
from data.modalities.transforms import EvalTransform, Views
from data.options import DataOptions
from data.prepare import prepare_data
from data.stored.audio import encoded_audio
from data.stored.image import encoded

PAIRS = (("image", "text"), ("tone", "text"))

MODULE = """
import numpy as np
from PIL import Image

def sample_image(i):
    return np.full((20, 30, 3), 7 * i, np.uint8)

class Own:
    def __len__(self):
        return 24

    def __getitem__(self, i):
        item = {"id": f"own{i}", "text": f"the number {i}", "image": sample_image(i), "tone": [float(i), 1.0]}
        if i % 3 == 1:
            del item["image"]
        if i % 3 == 2:
            item["tone"] = None
        if i == 9:
            del item["text"], item["image"]  # a tone alone is in no pair
        if i == 12:
            item["text"] = ["twelve", "a dozen"]
        if i == 15:
            item["image"] = b"no image"
        if i < 6:
            item["language"] = ("de", np.int64(2), float("nan"))[i % 3]
        return item

class Tuples:
    items = [(Image.fromarray(sample_image(i)), f"the number {i}") for i in range(6)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]

made = Tuples()

class Undecoded(Tuples):
    from data.stored.image import encoded
    items = [{"image": {"bytes": None, "path": "own.png"}, "text": np.array(["a", None], object)},
             {"image": {"bytes": encoded(Tuples.items[1][0]), "path": "gone"}, "text": ("b", "c")}]

class Broken(Tuples):
    def __getitem__(self, i):
        broken = {1: [1, 2, 3], 2: {"image": 5, "text": "five"}, 4: {"language": ["de"]}}
        return {}[i] if i == 3 else broken.get(i, self.items[i])

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


def test_pairs_of_images_and_texts(module):
    for name in ("Tuples", "made"):
        source = open_source(f"python:{module}:{name}")
        assert len(source) == 6 and source.usable().tolist() == list(range(6))
        assert source.captions(4) == ["the number 4"] and source.identity(4) == "4"
        assert source.column("width").tolist() == [30] * 6 and source.where(4).endswith(f"{name}#4")
        shown = EvalTransform((16, 16))
        assert (shown(shown.stored(source.value("image", 4)), None) == 28).all()
        assert pickle.loads(pickle.dumps(source)).value("image", 3) == source.value("image", 3)


def test_items_as_hugging_face_and_pandas_give_them(module, tmp_path):
    """{bytes, path}, and captions in arrays and tuples."""
    own = encoded(np.zeros((5, 6, 3), np.uint8))
    (tmp_path / "own.png").write_bytes(own)
    source = open_source(f"python:{module}:Undecoded")
    assert source.value("image", 0) == own and source.captions(0) == ["a"]
    assert source.column("width")[1] == 30 and source.captions(1) == ["b", "c"]


def test_an_item_without_an_image_is_bad_where_only_images_and_texts_are_compared(module):
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
    # an index of its own for other pairs
    assert open_source(f"python:{module}:Own").usable().size < source.usable().size


def test_languages_of_texts(module, tokenizer):
    """By name or by number; a text of which nothing is said is of the tower's default."""
    languages = Languages(number=4, default=1, names={"en": 0, "de": 3})
    source = open_sources([f"python:{module}:Own", "demo"])
    texts = MicroBatchDataset(source, [TextModality(tokenizer, 16, languages=languages)])
    batch = texts[request(0, 1, 2, 3, 7, len(open_source(f"python:{module}:Own")) + 1)]
    assert batch["language_ids"].tolist() == [3, 2, 1, 3, 1, 1]
    assert batch["language_ids"].dtype == torch.int64
    plain = MicroBatchDataset(source, [TextModality(tokenizer, 16)])[request(0, 1)]
    assert "language_ids" not in plain
    for wrong in ("fr", 4, -1, True, 1.5):
        with pytest.raises(
            ValueError, match="none that the text tower knows.*0 to 3 or a name: en"
        ):
            languages.ids([wrong])


def test_what_a_sample_lacks_has_a_stand_in_that_is_marked(module, tokenizer):
    source = open_source(f"python:{module}:Own", PAIRS)
    transform = EvalTransform((16, 16))
    modalities = [ImageModality(Views(transform, transform)), TextModality(tokenizer, 16), Tone()]
    dataset = MicroBatchDataset(source, modalities)
    batch = dataset[request(3, 4, 5, 9, 15)]
    assert batch["image_index"].tolist() == [3, -5, 5, -10, -16]
    assert batch["tone_index"].tolist() == [3, 4, -6, 9, 15]
    assert batch["text_index"].tolist() == [3, 4, 5, -10, 15]
    # the next that has one
    assert batch["tone_values"].tolist() == [[float(i), 1] for i in (3, 4, 9, 9, 15)]
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
    assert len(splits.held_out["validation"]) in (4, 5)  # without an image they are not all equal
    counts = token_counts(source, np.arange(24), tokenizer, 16, tmp_path / "counts")
    every = np.arange(24)
    assert counts.longest(every, every)[9] == 2 and len(counts.starts) == 25


GROWING = """
import numpy as np

class Growing:
    texts, first, fingerprint = False, 10, 0

    def __len__(self):
        return 6

    def __getitem__(self, i):
        image = np.full((20, 30, 3), self.first + i, np.uint8)
        item = {"image": b"no image" if i == 2 else image, "tone": [1.0, 2.0]}
        return item | ({"text": f"the number {i}"} if i != 4 or self.texts else {})

growing = Growing()
"""


def test_a_data_set_that_changes_is_read_again(module, tmp_path):
    """A sample lacks its text and gets one later; another has a broken image and another pair."""
    (tmp_path / f"{module}.py").write_text(GROWING)
    spec = f"python:{module}:growing"
    assert open_source(spec).usable().tolist() == [0, 1, 3, 5]
    assert np.flatnonzero(open_source(spec, PAIRS).lacking("image")).tolist() == [2]
    set_of = importlib.import_module(module).growing
    set_of.texts, set_of.fingerprint = True, 1
    source = open_source(spec)
    assert source.usable().tolist() == [0, 1, 3, 4, 5]
    assert np.flatnonzero(open_source(spec, PAIRS).lacking("image")).tolist() == [2]
    set_of.first = 100
    with pytest.raises(BadSample, match="change the attribute `fingerprint`"):
        source.value("image", 0)
    refreshed = open_source(spec, refresh=True)
    set_of.fingerprint = 2
    shown = EvalTransform((16, 16))
    for each in (refreshed, open_source(spec), open_source(spec, PAIRS)):
        assert shown(shown.stored(each.value("image", 4)), None).max() == 104


def test_pairs_without_images_or_without_texts(module, tmp_path):
    """No tokenizer is made where there are no texts, and samples are split by chance alone."""
    (tmp_path / f"{module}.py").write_text(
        MODULE
        + """
class Signals:
    def __len__(self):
        return 40

    def __getitem__(self, i):
        return {"id": f"s{i}" if i < 39 else "39", "tone": [float(i), 0.0], "beat": [0.0, float(i)]}
"""
    )
    options = DataOptions(data=(f"python:{module}:Signals",), pairs="tone:beat", val_fraction=0.2)
    prepared = prepare_data(options, None, tmp_path / "run")
    assert prepared.tokenizer is None and len(prepared.held_out["validation"].subset) == 8
    assert not (tmp_path / "run" / "tokenizer").exists()
    with pytest.raises(ValueError, match="39 training samples are also in the held-out set"):
        prepare_data(replace(options, val_data=options.data[0]), None, tmp_path / "other")


def test_what_is_in_it_is_shown_for_the_pairs_that_are_trained(module, tmp_path, capsys):
    (tmp_path / "tones.py").write_text("registered = True\n")
    sheet = ["--sheet", str(tmp_path / "sheet.png"), "--import-module", "tones"]
    assert inspect([f"python:{module}:Own", "--pairs", "image:text,tone:text", *sheet]) == 0
    said = capsys.readouterr().out
    assert "usable, without image" in said and (tmp_path / "sheet.png").is_file()
    assert inspect([f"python:{module}:Tuples", "--pairs", "tone:text", *sheet]) == 2
    assert "or give other --pairs than tone:text" in capsys.readouterr().err


def test_refusals(module):
    for where, words in (
        ("only_a_module", "write python:MODULE:NAME"),
        ("no_such_module:Own", "cannot import no_such_module"),
        (f"{module}:Tuple", "has no 'Tuple'; did you mean 'Tuples'"),
        (f"{module}:number", "is a int without __len__ and __getitem__"),
    ):
        with pytest.raises(ValueError, match=words):
            open_source(f"python:{where}")
    with pytest.raises(ValueError, match="holds image and text, and --pairs compares tone:image"):
        open_source("demo", (("tone", "image"),))


def test_what_is_wrong_with_an_item_is_said(module):
    bad = open_source(f"python:{module}:Broken").bad_samples()
    found = {where.rpartition("#")[2]: (reason, detail) for _, where, reason, detail in bad}
    for number, reason, words in (
        ("1", "invalid-row", "item 1 is a list"),
        ("2", "not-an-image", "the image is a int; bytes, a path"),
        ("3", "unreadable", "item 3: KeyError: 3"),
        ("4", "invalid-row", "the language is ['de']"),
    ):
        assert found[number][0] == reason and words in found[number][1]
    assert len(found) == 4


def test_an_image_or_a_sound_that_no_file_can_be_made_of_is_a_bad_sample():
    """CMYK, as `datasets` opens JPEGs of print, was no PNG and ended the run."""
    cmyk = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    assert decode_bytes(encoded(cmyk)).convert("RGB").getpixel((4, 4)) == (255, 0, 0)
    for image in (np.zeros((8, 8, 5), np.uint8), Image.new("L", (0, 8))):
        with pytest.raises(BadSample, match="unreadable"):
            encoded(image)
    for sound in ({"array": [[1.0], [1.0, 2.0]], "sampling_rate": 8_000}, {"array": ["a"]}):
        with pytest.raises(BadSample, match="unreadable"):
            encoded_audio(sound)
    with pytest.raises(BadSample, match="not-audio"):
        encoded_audio({"bytes": None})
