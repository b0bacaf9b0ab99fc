"""`subtitles:DIR`: films with SubRip or WebVTT beside them."""

import os
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from bad_films import film  # noqa: E402

from data.formats import tables
from data.formats.subtitles import cues
from data.formats.tables import with_near_texts
from data.index.sources import open_source

pytest.importorskip("av", reason="pip install -r requirements-audio.txt")

PAIRS = (("video", "text"),)
SRT = """\ufeff1\r
00:00:00,100 --> 00:00:00,500\r
<i>Bread</i> & butter\r
{\\an8}on a plate\r
\r
2
00:00:00,400 --> 00:00:00,900 X1:0 Y1:2
it overlaps

3
00:00:00,700 --> 00:00:00,600
ends before

4
100:00:05,000 --> 100:00:06,000
far behind

5
00:00:00,300 --> 00:00:00,800

6
00:00:00,300 -> 00:00:00,800
no arrow

7
00:00:00 --> 00:00:01
I <3 you
8
soon --> later
no times"""
VTT = """WEBVTT

NOTE 00:01.000 is no cue

STYLE
::cue { color: red }

name
00:00.200 --> 00:00.600 align:start
<v Ann>Salz <00:00:00.300><c.red>&amp; Brot</c>
00:00.600 --> 00:00.900
nothing between them
"""


def test_subtitles_are_clips_of_the_film_beside_them(tmp_path):
    root = tmp_path / "my films"
    (root / "more").mkdir(parents=True)
    files = {
        "a.mp4": film(),
        "a.srt": SRT.encode(),
        "a.de.vtt": VTT.encode(),
        "more/b [x].1.webm": film(kind="webm", codec="libvpx-vp9"),
        "more/b [x].1.en-US.vtt": VTT.encode(),
        "more/b [x].1.en-US.srt": SRT.encode("utf-16"),
        "silent.mp4": film(),
        "latin.mp4": film(),
        "latin.srt": b"1\n00:00:00,100 --> 00:00:00,500\nB\xe4r\n",
        "empty.mp4": film(),
        "empty.srt": b"",
        "alone.srt": SRT.encode(),
        "a.jpg": b"a picture",
    }
    for name, content in files.items():
        (root / name).write_bytes(content)
    (root / "out").symlink_to(tmp_path)
    (root / "gone.jpg").symlink_to(tmp_path / "nowhere")
    (root / "gone.srt").symlink_to(tmp_path / "nowhere")
    source = open_source(f"subtitles:{root}", PAIRS)
    found, languages = {}, {}
    for i in source.usable().tolist():
        clip, identity = source.value("video", i), source.identity(i)
        found[identity] = clip.start_s, clip.end_s, *source.captions(i)
        languages[identity] = source.language(i)
        of = "a.mp4" if identity.startswith("a.") else "more/b [x].1.webm"
        assert clip.film == str(root / of)
    assert [languages[f"{name}#0"] for name in ("a.srt", "a.de.vtt")] == [None, "de"]
    assert languages["more/b [x].1.en-US.srt#0"] == "en-US"
    salt = (0.2, 0.6, "Salz & Brot")
    between = (0.6, 0.9, "nothing between them")
    heart = (0.0, 1.0, "I <3 you")
    bread, overlap = (0.1, 0.5, "Bread & butter on a plate"), (0.4, 0.9, "it overlaps")
    assert found == {
        "a.de.vtt#0": salt,
        "a.de.vtt#1": between,
        "a.srt#0": bread,
        "a.srt#1": overlap,
        "a.srt#5": heart,
        "more/b [x].1.en-US.srt#0": bread,
        "more/b [x].1.en-US.srt#1": overlap,
        "more/b [x].1.en-US.srt#5": heart,
    }
    reasons = {identity: reason for identity, _, reason, _ in source.bad_samples()}
    of_cues = {2: "empty-segment", 3: "outside-film", 4: "empty-caption", 6: "invalid-row"}
    expected = {
        f"{name}#{k}": reason
        for name in ("a.srt", "more/b [x].1.en-US.srt")
        for k, reason in of_cues.items()
    }
    alone = ("alone.srt", "silent.mp4", "more/b [x].1.en-US.vtt")
    expected |= dict.fromkeys((*alone, "gone.srt"), "orphan-member")
    expected |= {"latin.srt": "invalid-utf8", "empty.srt": "no-caption", "out": "outside-root"}
    assert reasons == expected
    assert {what: number for what, (number, _) in source.unused().items()} == {"files .jpg": 2}


def test_a_narration_may_have_the_texts_that_are_nearest_in_time(tmp_path):
    (tmp_path / "a.mp4").write_bytes(film())
    (tmp_path / "a.srt").write_text(SRT)
    source = open_source(f"subtitles:{tmp_path}?near=2", PAIRS)
    assert source.captions(0) == ["Bread & butter on a plate", "I <3 you"]
    with pytest.raises(ValueError, match="near '0': a whole number"):
        open_source(f"subtitles:{tmp_path}?near=0", PAIRS)


def test_texts_are_the_nearest_of_all():
    rng = random.Random(0)
    for number in (1, 2, 5, 30):
        starts = [rng.randrange(8) for _ in range(20)]
        rows = [
            {"start_s": s, "end_s": s + 1 + s % 2, "text": f"{n}"} for n, s in enumerate(starts)
        ]
        rows[rng.randrange(20)]["text"] = ""
        middles = {n: (r["start_s"] + r["end_s"]) / 2 for n, r in enumerate(rows) if r["text"]}
        for n, row in enumerate(with_near_texts(rows, number)):
            by_time = sorted(middles, key=lambda m: (abs(middles[m] - middles.get(n, 0)), m != n))
            expected = [f"{m}" for m in by_time][:number] if rows[n]["text"] else ""
            assert row["text"] == expected


def test_no_more_subtitles_are_looked_at_than_are_taken(monkeypatch):
    """Of 16,000 that are shown at two times, each looks at its 2 nearest, not at all."""
    looked = 0

    def counting(*arguments):
        nonlocal looked
        for each in by_distance(*arguments):
            looked += 1
            yield each

    by_distance = tables._by_distance
    monkeypatch.setattr(tables, "_by_distance", counting)
    rows = [{"start_s": n % 2, "end_s": n % 2 + 1, "text": f"{n}"} for n in range(16_000)]
    assert with_near_texts(rows, 2)[7]["text"] == ["7", "1"]
    assert looked <= 3 * len(rows)


def test_cues_of_a_million_lines_and_numbers_of_thousands_of_digits_are_read():
    lines = b"a\n" * 200_000
    content = b"00:01 --> 00:02\n" + lines + b"b\n\n00:02 --> 00:03\n" + lines
    assert [len(cue["text"]) for cue in cues(content)] == [400_001, 399_999]
    (cue,) = cues(b"00:01 --> 00:02\na&#33; &#" + b"9" * 10_000 + b"; b\n")
    assert cue["text"] == "a! ; b"


def test_changed_subtitles_are_read_again(tmp_path):
    (tmp_path / "a.mp4").write_bytes(film())
    (tmp_path / "a.srt").write_text(SRT)
    assert open_source(f"subtitles:{tmp_path}", PAIRS).captions(1) == ["it overlaps"]
    (tmp_path / "a.srt").write_text(SRT.replace("it overlaps", "it laps over"))
    os.utime(tmp_path / "a.srt", ns=(1, 1))
    assert open_source(f"subtitles:{tmp_path}", PAIRS).captions(1) == ["it laps over"]


def test_times_have_hours_minutes_and_parts_of_a_second():
    (cue,) = cues(b"101:02:03,25 --> 101:12:13.5 line:0\nlate\n")
    assert cue == {"start_s": 363723.25, "end_s": 364333.5, "text": "late"}
    (cue,) = cues(b"02:03 --> 59:59.999\nsoon\n")
    assert (cue["start_s"], cue["end_s"]) == (123.0, 3599.999)


def told(content: str) -> list[tuple]:
    """Of each cue what it says and when, or the reason why it cannot be read."""
    return [
        (each["start_s"], each["end_s"], each["text"]) if "start_s" in each else each["text"].reason
        for each in cues(content.encode())
    ]


@pytest.mark.parametrize("is_srt", [False, True])
def test_of_captions_that_roll_each_line_is_told_once_while_it_is_spoken(is_srt):
    """As YouTube writes them, and as programs make SubRip of them (`yt-dlp#1734`)."""
    rolling = [
        (
            "00:00:00.160",
            "00:00:02.390",
            " \nred<00:00:00.480><c> square</c><00:00:00.800><c> grows</c>",
        ),
        ("00:00:02.390", "00:00:02.400", "red square grows\n "),
        ("00:00:02.400", "00:00:04.790", "red square grows\nthen<00:00:02.720><c> it</c>"),
        ("00:00:04.790", "00:00:04.800", "then it\n "),
        ("00:00:04.800", "00:00:05.000", "then it\n "),
        ("00:00:07.000", "00:00:09.000", " \nthen it"),
    ]
    cues_of = [f"{a} --> {b} align:start\n{text}\n" for a, b, text in rolling]
    text = "\n".join(["WEBVTT\nKind: captions\n", *cues_of])
    if is_srt:
        text = "\n".join(f"{k}\n{cue}" for k, cue in enumerate(cues_of, 1)).replace(".", ",")
        text = text.replace(
            "<00:00:00,480><c> square</c><00:00:00,800><c> grows</c>", " square grows"
        )
        text = text.replace("<00:00:02,720><c> it</c>", " it")
    expected = [
        (0.16, 2.39, "red square grows"),
        (2.4, 4.79, "then it"),
        (7.0, 9.0, "then it"),  # it is said again
    ]
    assert told(text) == expected


def test_subtitles_that_somebody_wrote_keep_what_they_say_twice():
    text = "00:01 --> 00:02\nNo.\n\n00:02 --> 00:03\nNo.\n\n00:02 --> 00:04\nNo.\nOh.\n\n"
    text += "\n".join(f"00:{k} --> 00:{k + 1}\nword {k}\n" for k in range(10, 16))
    found = [words for *_, words in told(text)]
    assert found == ["No.", "No.", "No. Oh.", *(f"word {k}" for k in range(10, 16))]


def test_only_tags_are_markup_and_entities_are_characters():
    lines = {
        "a < b > c": "a < b > c",
        "x<y> and <z>": "x<y> and <z>",
        "<v.loud Ann>Hi <lang en-GB><i.a.b>you</i></lang></v>": "Hi you",
        "<ruby>W<rt>w</rt></ruby> <00:01.500><c.red>on</c> <u>and</u> <b>on</b>": "Ww on and on",
        '<font color="#fff">white</font> {\\an8}<s>top</s>': "white top",
        "R&amp;B &lt;b&gt; a&nbsp;b &lrm;c&rlm;": "R&B <b> a b \u200ec\u200f",
    }
    for line, plain in lines.items():
        assert told(f"WEBVTT\n\n00:01.000 --> 00:02.000\n{line}\n") == [(1.0, 2.0, plain)]


def test_blocks_that_are_not_shown_are_no_cues_and_a_map_of_times_moves_what_follows():
    text = """WEBVTT
X-TIMESTAMP-MAP=LOCAL:00:00:01.000,MPEGTS:900000

NOTE as it was
00:01.000 --> 00:02.000
is no cue

STYLE
::cue(b) { content: "-->" }

00:01.000 --> 00:02.500
NOTE is said

WEBVTT
X-TIMESTAMP-MAP=MPEGTS:180000,LOCAL:00:00.000

00:01.000 --> 00:02.000
the next part

X-TIMESTAMP-MAP=MPEGTS:soon
"""
    expected = [(10.0, 11.5, "NOTE is said"), (3.0, 4.0, "the next part"), "invalid-row"]
    assert told(text) == expected


def test_a_hostile_file_takes_no_time():
    assert list(cues(b"1\n" * 200_000)) == []
    assert len(list(cues(b"00:01.0 --> 00:02.0\n" + b"<" * 400_000 + b"\n"))) == 1
    assert list(cues(b" " * 400_000)) == [] == list(cues(b"0:" * 200_000))
    (far,) = cues(b"9" * 5000 + b":00:00,1 --> 00:00:02,5\n")
    assert far["text"].reason == "invalid-row"
    assert len(list(cues(b"1\n" * 100_000 + b"-->\n" * 1000))) == 1000
