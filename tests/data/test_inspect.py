"""What `python -m data.inspect` prints and draws."""

import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from data.index.sources import open_source
from data.inspect import GAP, TILE, contact_sheet, histogram, main
from data.modalities.fonts import fonts_for, installed_fonts


def test_histogram_counts_everything_once():
    values = np.concatenate([np.arange(1000), [-50, 9000]]).astype(np.int32)
    classes = histogram(values, 5)
    assert (
        sum(count for *_, count in classes) == 1002
        and classes[0][0] == -50
        and classes[-1][1] == 9000
    )
    assert all(a[1] == b[0] for a, b in zip(classes, classes[1:])) and all(
        150 < count < 250 for *_, count in classes
    )
    assert histogram(np.full(7, 3, np.int16)) == [(3.0, 3.0, 7)]
    assert [count for *_, count in histogram(np.array([1, 1, 2, 2, 2], np.int16), 8)] == [2, 3]


def test_command(emoji_set, tmp_path):
    file = emoji_set(9, {"image_path": "gone.png", "text": "gone"})
    command = [
        sys.executable,
        "-m",
        "data.inspect",
        f"jsonl:{file}",
        "--count",
        "5",
        "--sheet",
        str(tmp_path / "a sheet.png"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    for words in (
        "samples",
        "10",
        "usable",
        "9",
        "missing-file",
        "width, pixels",
        "complexity",
        ":10",
    ):
        assert words in result.stdout
    assert result.stdout.splitlines()[-1] == str(tmp_path / "a sheet.png")
    sheet = np.asarray(Image.open(tmp_path / "a sheet.png"))
    assert (sheet != 255).any(axis=2).sum() > 5000  # five images, not a white page


@pytest.mark.parametrize(
    "given, words", [("nope:x", "unknown kind 'nope'"), ("jsonl:nowhere.jsonl", "nowhere.jsonl")]
)
def test_wrong_specs_get_one_line(given, words):
    result = subprocess.run(
        [sys.executable, "-m", "data.inspect", given], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 2 and words in result.stderr and "Traceback" not in result.stderr


def sheet_of(caption: str, emoji_set) -> tuple[np.ndarray, str | None]:
    file = emoji_set(1, texts=lambda _: caption)
    sheet, notice = contact_sheet(open_source(f"jsonl:{file}", refresh=True), 1)
    return np.asarray(sheet), notice


def test_pieces_of_several_fonts_stand_side_by_side(emoji_set):
    """DejaVu Sans has no letters in circles, STIXGeneral has."""
    assert len(fonts_for(["ⒶⒷ a"]).fonts) == 2
    ends = []
    for caption in ("ⒶⒷⒸ", "ⒶⒷⒸ a", "ⒶⒷⒸ aⒶ"):
        below = sheet_of(caption, emoji_set)[0][TILE + 2 * GAP :]
        ends.append(np.flatnonzero((below != 255).any(axis=(0, 2))).max())
    assert ends[0] < ends[1] < ends[2]


def test_captions_that_no_font_has_are_reported_in_one_line(
    emoji_set, tmp_path, monkeypatch, capsys
):
    shipped = tuple(
        font for font in installed_fonts() if font.family.startswith(("DejaVu", "STIX"))
    )  # matplotlib's have no Chinese
    monkeypatch.setattr("data.modalities.fonts.installed_fonts", lambda: shipped)
    (dog, notice), (cat, _), (none, _) = (
        sheet_of(caption, emoji_set) for caption in ("a 犬", "a 猫", "a")
    )
    assert "fonts-noto-cjk" in notice and np.array_equal(dog, cat) and not np.array_equal(dog, none)
    file = emoji_set(1, texts=lambda _: "a 犬")
    assert main([f"jsonl:{file}", "--sheet", str(tmp_path / "sheet.png")]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines().count(notice) == 1 and "Glyph" not in err


@pytest.mark.skipif(
    bool(fonts_for(["犬猫"]).missing), reason="no font of this machine has Chinese characters"
)
def test_chinese_beside_latin_is_drawn(emoji_set):
    """Boxes, or the block of Unicode, would be the same for both."""
    (dog, notice), (cat, _) = (sheet_of(caption, emoji_set) for caption in ("a 犬", "a 猫"))
    assert notice is None and dog.shape == cat.shape and not np.array_equal(dog, cat)


def test_the_sheet_is_drawn_by_the_seed(demo, emoji_set):
    first, again, other = (np.asarray(contact_sheet(demo, 12, seed)[0]) for seed in (1, 1, 2))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert (
        contact_sheet(open_source(f"jsonl:{emoji_set(2)}"), 24)[0].height < 300
    )  # no more rows than samples
