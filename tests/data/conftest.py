"""Real samples for the tests of data/: the emoji, and small JSON-lines sets made of their
images."""

import json
import shutil
from pathlib import Path

import pytest

from data.index.sources import open_source
from data.modalities.tokenizer import train_tokenizer


@pytest.fixture(scope="package", autouse=True)
def cache_folder(tmp_path_factory):
    """Indexes of sets that tests make go when they go."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("WYE_CACHE", str(folder))
        yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def demo():
    return open_source("demo")


@pytest.fixture(scope="session")
def tokenizer(demo):
    return train_tokenizer([demo.captions(i)[0] for i in range(len(demo))], vocab_size=2000)


@pytest.fixture
def write_jsonl(tmp_path):
    """Writes lines (dictionaries or raw text) to a file in a folder whose name has spaces; returns
    the file."""

    def write(*lines) -> Path:
        folder = tmp_path / "a set of emoji"
        folder.mkdir(exist_ok=True)
        file = folder / "train set.jsonl"
        file.write_text(
            "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines),
            encoding="utf-8",
        )
        return file

    return write


@pytest.fixture
def emoji_set(demo, tmp_path, write_jsonl):
    """A JSON-lines set of the first `count` emoji, which all look different; returns the file."""

    def make(count: int, *more, texts=lambda caption: caption) -> Path:
        lines = []
        for i in range(count):
            path = tmp_path / "a set of emoji" / "images of emoji" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(demo.value("image", i))
            lines.append(
                {"image_path": f"images of emoji/{i}.png", "text": texts(demo.captions(i)[0])}
            )
        return write_jsonl(*lines, *more)

    return make
