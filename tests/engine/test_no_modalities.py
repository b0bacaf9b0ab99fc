"""The engine knows branches as records: no word for a modality stands in its code."""

from pathlib import Path

import pytest
from sources import strings_in

ENGINE = Path(__file__).parents[2] / "engine"
MODALITIES = ("image", "text", "audio", "video")


def words_of(source: str) -> list[str]:
    """The strings in it that are not docstrings, as far as they are a modality or begin with
    one."""
    return [
        word
        for word in strings_in(source)
        if any(word == name or word.startswith(f"{name}_") for name in MODALITIES)
    ]


@pytest.mark.parametrize(
    "file", sorted(ENGINE.rglob("*.py")), ids=lambda file: str(file.relative_to(ENGINE))
)
def test_no_modality_is_named(file):
    assert words_of(file.read_text(encoding="utf-8")) == []


def test_a_modality_that_is_named_is_found():
    assert words_of('"""image"""\nx = f"{y}" "text"\nz = {"image_embeds": 1, "images": 2}') == [
        "text",
        "image_embeds",
    ]
