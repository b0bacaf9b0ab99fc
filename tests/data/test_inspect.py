"""What `python -m data.inspect` prints and draws."""

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))
from bad_audio import tone, wav  # noqa: E402
from bad_sets import encoded_image  # noqa: E402

from data.index.sources import open_source
from data.inspect import TILE, _tile, contact_sheet, histogram, main, report
from data.modalities.fonts import fonts_for, installed_families


def test_histogram_counts_everything_once():
    values = np.concatenate([np.arange(1000), [-50, 9000]]).astype(np.int32)
    classes = histogram(values, 5)
    counts = [count for *_, count in classes]
    assert sum(counts) == 1002 and all(150 < count < 250 for count in counts)
    assert classes[0][0] == -50 and classes[-1][1] == 9000
    assert all(a[1] == b[0] for a, b in zip(classes, classes[1:]))
    assert histogram(np.full(7, 3, np.int16)) == [(3.0, 3.0, 7)]
    assert [count for *_, count in histogram(np.array([1, 1, 2, 2, 2], np.int16), 8)] == [2, 3]


def test_command(emoji_set, tmp_path):
    more = {"image_path": "images of emoji/0.png", "text": ["again", None]}
    # rich would take the name for its markup
    file, sheet = (
        emoji_set(8, more, {"image_path": "gone[/red].png", "text": "gone"}),
        "a sheet.png",
    )
    command = [sys.executable, "-m", "data.inspect", f"jsonl:{file}", "--count", "5"]
    command += ["--sheet", str(tmp_path / sheet)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    for words in ("samples", "10", "usable", "9", "missing-file", "width, pixels", "complexity"):
        assert words in result.stdout
    for words in (":10", "unused: captions without text", "for example", f"{tmp_path}/{sheet}\n"):
        assert words in result.stdout
    drawn = np.asarray(Image.open(tmp_path / sheet))
    assert (drawn != 255).any(axis=2).sum() > 5000  # five images, not a white page


def test_sounds_have_their_lengths_and_their_spectrograms(tmp_path, capsys):
    """An image above the spectrogram, a spectrogram alone, an image whose sound is broken."""
    pytest.importorskip("soundfile", reason="pip install -r requirements-audio.txt")
    (tmp_path / "a.png").write_bytes(encoded_image(1))
    for name, sound in (("low", tone(0.5, 300)), ("high", np.stack([tone(2)] * 2, 1))):
        (tmp_path / f"{name}.wav").write_bytes(wav(sound))
    (tmp_path / "page.wav").write_bytes(b"<html>")
    rows = [
        {"audio_path": "low.wav", "image_path": "a.png", "text": "both"},
        {"audio_path": "high.wav", "text": "a sound"},
        {"audio_path": "page.wav", "image_path": "a.png", "text": "an image"},
    ]
    (tmp_path / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec, sheet = f"jsonl:{tmp_path}/set.jsonl", tmp_path / "sheet.png"
    assert main([spec, "--pairs", "image:text,audio:text", "--sheet", str(sheet)]) == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for words in (
        *("different images 1", "different sounds 2", "usable, without audio 1"),
        *("seconds of the sound 0.50", "rate of the sound, Hz 8,000 8,000 2"),
        *("channels of the sound 1", "not-audio 1", "the sample is used without its audio"),
    ):
        assert words.replace(" ", "") in printed.replace(" ", ""), words
    assert sheet.stat().st_size > 5_000
    source = open_source(spec, (("image", "text"), ("audio", "text")))
    tiles = [np.asarray(_tile(source, i).convert("RGB")).astype(int) for i in range(3)]
    # magma has no green that is brighter than its red; the image fills its own half
    below = [tile[TILE // 2 + 5 :].reshape(-1, 3) for tile in tiles]
    assert all((half[:, 1] <= half[:, 0] + 16).all() and half.std() > 20 for half in below[:2])
    # alone: all of the tile
    assert (tiles[1][:, :, 1] <= tiles[1][:, :, 0] + 16).all() and len(tiles[1]) == TILE
    assert not (tiles[0][: TILE // 2] == tiles[1][: TILE // 2]).all()


def test_wrong_specs_get_one_line(capsys):
    for given, words in (("nope:x", "unknown kind 'nope'"), ("jsonl:none.jsonl", "none.jsonl")):
        assert main([given]) == 2
        said = capsys.readouterr().err
        assert words in said and "Traceback" not in said


def pixels_of(sheet) -> np.ndarray:
    drawn = io.BytesIO()
    sheet.savefig(drawn, format="png")
    return np.asarray(Image.open(drawn))


def sheet_of(caption: str, emoji_set) -> tuple[np.ndarray, str | None]:
    file = emoji_set(1, texts=lambda _: caption)
    sheet, notice = contact_sheet(open_source(f"jsonl:{file}", refresh=True), 1)
    return pixels_of(sheet), notice


def test_captions_that_no_font_has_are_reported_in_one_line(
    emoji_set, tmp_path, monkeypatch, capsys
):
    # matplotlib's have no Chinese
    shipped = [name for name in installed_families() if name.startswith(("DejaVu", "STIX"))]
    monkeypatch.setattr("data.modalities.fonts.installed_families", lambda: shipped)
    (dog, notice), (cat, _), (none, _) = (
        sheet_of(caption, emoji_set) for caption in ("a 犬", "a 猫", "a")
    )
    assert "fonts-noto-cjk" in notice and np.array_equal(dog, cat) and not np.array_equal(dog, none)
    file = emoji_set(1, texts=lambda _: "a 犬")
    assert main([f"jsonl:{file}", "--sheet", str(tmp_path / "sheet.png")]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines().count(notice) == 1 and "Glyph" not in err


def test_a_character_of_another_font_is_drawn(emoji_set):
    """DejaVu Sans has no letters in circles, STIXGeneral has."""
    assert len(fonts_for(["ⒶⒷ a"]).families) == 2
    first, second = (sheet_of(caption, emoji_set)[0] for caption in ("Ⓐ a", "Ⓑ a"))
    assert not np.array_equal(first, second)


def test_the_sheet_is_drawn_by_the_seed(demo, emoji_set):
    first, again, other = (pixels_of(contact_sheet(demo, 7, seed)[0]) for seed in (1, 1, 2))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    few = contact_sheet(open_source(f"jsonl:{emoji_set(2)}"), 24)[0]
    assert len(pixels_of(few)) < 300  # no more rows than samples


def test_regions_are_counted_and_their_boxes_are_drawn(tmp_path):
    """Where the pairs have them: an image with a box is the image without but for its edges."""
    Image.new("RGB", (60, 40), (200, 200, 200)).save(tmp_path / "0.png")
    region = {"box": [15, 10, 30, 20], "text": "a dot"}
    row = {"image_path": "0.png", "text": "a picture", "regions": [region, region]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    spec = f"jsonl:{tmp_path / 'rows.jsonl'}"
    bare, boxed = (
        open_source(spec, [("image", other) for other in others])
        for others in (["text"], ["text", "region"])
    )
    counted, *_ = report(boxed)
    assert ("regions", "2 in 1 images") in list(zip(*(column._cells for column in counted.columns)))
    without, drawn = (np.asarray(_tile(source, 0).convert("RGB")) for source in (bare, boxed))
    rows, columns = np.nonzero((without != drawn).any(2))
    found = np.array([columns.min(), rows.min(), columns.max(), rows.max()])
    expected = np.array([0.25, 0.25, 0.75, 0.75]) * np.tile(drawn.shape[1::-1], 2)
    assert np.abs(found - expected).max() <= 1
    middle = drawn[drawn.shape[0] // 2, drawn.shape[1] // 2]
    assert middle.tolist() == [200, 200, 200]
