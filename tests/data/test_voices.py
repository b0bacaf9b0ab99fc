"""`demo:voices`: names spoken, and speakers held out."""

import sys
from pathlib import Path

import numpy as np
import pytest

from data.formats import demo, speech
from data.index.sources import open_format, open_source
from data.index.splits import split_source

PAIRS = (("image", "text"), ("audio", "text"))


def test_a_missing_package_and_a_mute_language_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    with pytest.raises(FileNotFoundError, match="pip install espeakng-loader"):
        open_format("demo:voices")
    with pytest.raises(ValueError, match="unknown language 'ja'; known: .*en es"):
        open_format("demo:voices:ja")


@pytest.fixture(scope="module")
def source():
    """Of the first emoji only: a name takes 15 ms to say, and there are thousands."""
    pytest.importorskip("espeakng_loader", reason="pip install espeakng-loader")
    pytest.importorskip("soundfile", reason="pip install -r requirements-audio.txt")
    with pytest.MonkeyPatch.context() as patch:
        entries = demo.DemoFormat._entries
        patch.setattr(
            demo.DemoFormat,
            "_entries",
            lambda self: [entry for n, entry in enumerate(entries(self)) if n % 20 == 0],
        )
        yield open_source("demo:voices:en+de", PAIRS, workers=0)


def test_every_name_is_spoken(source):
    usable = source.usable()
    assert len(usable) == len(source) > 197
    assert (source.column("audio_rate") == 22_050).all()
    seconds = source.column("audio_seconds")
    assert seconds.min() > 0.2 and seconds.max() < 10
    # different voices and texts: no two sounds are the same
    assert len(np.unique(source.keys("audio"))) > 0.97 * len(source)
    longest, shortest = int(seconds.argmax()), int(seconds.argmin())
    assert len(source.captions(longest)[0]) > 2 * len(source.captions(shortest)[0])
    assert len(source.captions(0)) == 2  # in both languages
    assert source.where(0).endswith(".png") and Path(source.where(0)).is_file()
    assert source.where(0, "audio").endswith(".wav") and Path(source.where(0, "audio")).is_file()


def test_speakers_are_held_out_apart_from_concepts(source):
    splits = split_source(source, 0.1)
    assert list(splits.held_out) == ["family", "composition", "voices"]
    new = {source.identity(int(i)).split("/")[1] for i in splits.held_out["voices"]}
    heard = {
        source.identity(int(i)).split("/")[1]
        for side in (splits.train, splits.held_out["family"], splits.held_out["composition"])
        for i in side
    }
    assert new and new <= {s.name for s in speech.NEW_SPEAKERS} and not new & heard
    concepts = {source.identity(int(i)).split("/")[0] for i in splits.train}
    trained = {text for i in splits.train for text in source.captions(int(i))}
    assert concepts and all(
        trained & set(source.captions(int(i))) for i in splits.held_out["voices"]
    )
    families = {source.concept(int(i)).family for i in splits.train}
    assert not families & {source.concept(int(i)).family for i in splits.held_out["family"]}
    # the same files are found again, not made anew
    assert open_source("demo:voices:en+de", PAIRS).index.folder == source.index.folder
