"""Clips from data sets to frames: every format, everything that can be wrong, segments of films."""

import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from plain_requests import request_of

sys.path.insert(0, str(Path(__file__).parent))
from bad_films import (  # noqa: E402
    HEIGHT,
    WIDTH,
    bad_films,
    film,
    numbers_in,
    with_bad_frame,
)

from data.bad_samples import BadSample
from data.cache import SampleCache
from data.clips import checked_span, is_cut, placed_span
from data.decoding import films as films_of_files
from data.index.leaks import find_leaks
from data.index.sources import open_source
from data.index.splits import split_source
from data.inspect import TILE, _tile, main
from data.modalities.transforms import EvalTransform
from data.modalities.video import CANDIDATES, FrameTimes, VideoModality
from data.speed import measured

pytest.importorskip("av", reason="pip install -r requirements-audio.txt")

PAIRS = (("video", "text"),)
BAD_SPANS = {
    "after": ((5.0, None), "outside-film"),
    "none": ((0.5, 0.5), "empty-segment"),
    "turned": ((0.6, 0.2), "empty-segment"),
    "negative": ((-1.0, 0.5), "empty-segment"),
    "words": (("soon", 0.5), "invalid-row"),
}


@pytest.fixture(scope="module")
def films(module_folder):
    """Name -> (reason or None, content, start, end): all that can be wrong, and two good ones."""
    good = film()
    found = {"good": (None, good, None, None), "part": (None, good, 0.4, 0.8)}
    for name, (reason, content) in bad_films(module_folder("films")).items():
        found[name.replace(" ", "-")] = reason, content, None, None
    for name, (span, reason) in BAD_SPANS.items():
        found[name] = reason, good, *span
    return found


def written(folder, films):
    """A file for each, and some outside of the folder that is allowed."""
    (folder / "outside").mkdir()
    (folder / "outside/secret.mp4").write_bytes(film())
    root = folder / "set"
    root.mkdir()
    for name, (_, content, *_) in films.items():
        (root / f"{name}.mp4").write_bytes(content)
    (root / "link.mp4").symlink_to(folder / "outside/secret.mp4")
    rows = [(name, f"{name}.mp4", *span) for name, (_, _, *span) in films.items()]
    rows += [(n, p, None, None) for n, p in (("link", "link.mp4"), ("absent", "no.mp4"))]
    rows += [("dots", "../outside/secret.mp4", None, None)]
    more = {"link": "outside-root", "dots": "outside-root", "absent": "missing-file"}
    return root, rows, more


def jsonl(folder, films):
    root, rows, more = written(folder, films)
    keys = ("id", "video_path", "start_s", "end_s")
    lines = [json.dumps(dict(zip(keys, row)) | {"text": f"words {row[0]}"}) for row in rows]
    (root / "set.jsonl").write_text("\n".join(lines))
    return f"jsonl:{root}/set.jsonl", more


def csv(folder, films):
    """As the tables of MSR-VTT are: films without an ending."""
    root, rows, more = written(folder, films)
    lines = ["id,video_id,start_s,end_s,title"]
    for name, path, start, end in rows:
        span = ("" if at is None else str(at) for at in (start, end))
        lines.append(",".join([name, path.removesuffix(".mp4"), *span, f"words {name}"]))
    (root / "set.csv").write_text("\n".join(lines))
    return f"csv:{root}/set.csv", more


def parquet(folder, films):
    names = [name for name in films if name != "words"]  # a column of numbers has no word
    spans = {key: [films[n][at] for n in names] for at, key in ((2, "start_s"), (3, "end_s"))}
    columns = {"id": names, "video": [films[n][1] for n in names], **spans}
    columns["text"] = [f"words {name}" for name in names]
    pq.write_table(pa.table(columns), folder / "set.parquet", row_group_size=4)
    return f"parquet:{folder}/set.parquet", {"words": None}


def webdataset(folder, films):
    with tarfile.open(folder / "set.tar", "w") as tar:
        for name, (_, content, start, end) in films.items():
            fields = {"caption": f"words {name}", "start_s": start, "end_s": end}
            for ending, data in (("mp4", content), ("json", json.dumps(fields).encode())):
                member = tarfile.TarInfo(f"{name}.{ending}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return f"webdataset:{folder}/set.tar", {}


@pytest.mark.parametrize("make", [jsonl, csv, parquet, webdataset], ids=lambda make: make.__name__)
def test_each_bad_film_and_segment_gets_its_reason_in_every_format(make, tmp_path, films):
    spec, more = make(tmp_path, films)
    source = open_source(spec, PAIRS)
    found = {identity.split("/")[-1]: reason for identity, _, reason, _ in source.bad_samples()}
    expected = {name: reason for name, (reason, *_) in films.items() if reason} | more
    assert found == {name: reason for name, reason in expected.items() if reason}
    good, part = source.usable().tolist()
    for i, span in ((good, (0.0, 1.0)), (part, (0.4, 0.8))):
        clip = source.value("video", i)
        assert (clip.start_s, clip.end_s) == pytest.approx(span)
        assert clip.film == films["good"][1] or Path(clip.film).read_bytes() == films["good"][1]
    assert source.column("video_width")[good] == WIDTH
    assert source.column("video_height")[good] == HEIGHT
    assert source.column("video_rate")[good] == pytest.approx(30)
    assert source.index.text("video_codec", good) == "mpeg4"
    assert source.keys("video")[good] == source.keys("video")[part] > 0


def test_a_folder_per_class_has_its_films(tmp_path):
    for name in ("running", "jumping"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.webm").write_bytes(film(kind="webm", codec="libvpx-vp9"))
    source = open_source(f"videofolder:{tmp_path}", PAIRS)
    assert len(source.usable()) == 2 and {source.label(i) for i in (0, 1)} == {"running", "jumping"}


def test_a_film_with_a_list_of_segments_is_a_sample_for_each(tmp_path):
    (tmp_path / "a.mp4").write_bytes(film())
    segments = [
        {"start_s": 0.0, "end_s": 0.5, "text": "first"},
        {"start_s": 0.5, "end_s": 1.0, "text": ["second", "another"], "id": "own"},
        {"start_s": 0.9, "end_s": 7.0, "text": "behind"},
        "no segment",
    ]
    line = {"id": "film", "video_path": "a.mp4", "segments": segments}
    (tmp_path / "a.jsonl").write_text(json.dumps(line))
    source = open_source(f"jsonl:{tmp_path}/a.jsonl", PAIRS)
    assert [source.identity(i) for i in source.usable()] == ["film#0", "own", "film#2"]
    assert source.captions(1) == ["second", "another"]
    assert [reason for _, _, reason, _ in source.bad_samples()] == ["invalid-row"]
    # cut to its film, and counted
    assert source.value("video", 2).end_s == pytest.approx(1)
    assert source.unused() == {"ends of clips behind their films": (1, f"{tmp_path}/a.jsonl:1")}


def test_a_clip_before_the_first_picture_shows_nothing(tmp_path):
    (tmp_path / "a.mp4").write_bytes(film(first=60, sound_s=3.0))
    spans = {"before": (0.0, 1.9), "into": (1.0, 2.5), "whole": (None, None), "after": (2.5, 2.9)}
    lines = [
        {"id": name, "video_path": "a.mp4", "start_s": s, "end_s": e, "text": name}
        for name, (s, e) in spans.items()
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    source = open_source(f"jsonl:{tmp_path}/a.jsonl", PAIRS)
    ((name, _, reason, detail),) = source.bad_samples()
    assert (name, reason) == ("before", "outside-film") and "picture begins at 2.00" in detail
    assert source.column("video_first_s")[1:] == pytest.approx([2.0] * 3, abs=1e-3)
    found = modality(2).load(source, request_of([1, 2, 3], training=False), 0).tensors
    # at 1.375 and 2.125, 0.75 and 2.25, 2.6 and 2.8 seconds
    assert numbers_in(found["video_frames"].numpy()) == [0, 3, 0, 7, 18, 24]


def test_segments_have_the_texts_that_are_nearest_in_time(tmp_path):
    """Their own first, in evaluation the only one that is asked."""
    (tmp_path / "a.mp4").write_bytes(film())
    starts = (0.0, 0.1, 0.5, 0.7)
    segments = [{"start_s": s, "end_s": s + 0.1, "text": f"at {s}"} for s in starts]
    segments[3]["text"] = ["at 0.7", "again"]
    line = {"video_path": "a.mp4", "segments": [*segments, {"start_s": "x", "text": "no"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(line))
    source = open_source(f"jsonl:{tmp_path}/a.jsonl?near=2", PAIRS)
    assert [source.captions(i) for i in source.usable()] == [
        ["at 0.0", "at 0.1"],
        ["at 0.1", "at 0.0"],
        ["at 0.5", "at 0.7"],
        ["at 0.7", "again", "at 0.5"],
    ]


def test_a_film_that_changes_is_not_shown(tmp_path):
    (tmp_path / "a.mp4").write_bytes(film())
    (tmp_path / "a.jsonl").write_text(json.dumps({"video_path": "a.mp4", "text": "words"}))
    source = open_source(f"jsonl:{tmp_path}/a.jsonl", PAIRS)
    (tmp_path / "a.mp4").write_bytes(film(20))
    with pytest.raises(BadSample, match="changed"):
        source.value("video", 0)


def test_all_clips_of_a_film_are_on_one_side_and_equal_films_are_leaks(tmp_path):
    """The same film in another container is known by its frames."""
    lines = []
    for k in range(12):
        content = film(kind="mp4", rate=30, pts=range(k, k + 30))
        content = film(number=10 + k)
        (tmp_path / f"{k}.mp4").write_bytes(content)
        segments = [
            {"start_s": 0.1 * n, "end_s": 0.1 * n + 0.1, "text": f"{k} {n}"} for n in (0, 1)
        ]
        lines.append(json.dumps({"id": str(k), "video_path": f"{k}.mp4", "segments": segments}))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    source = open_source(f"jsonl:{tmp_path}/a.jsonl", PAIRS)
    splits = split_source(source, 0.3, seed=1)
    sides = {}
    for name, subset in (("train", splits.train), *splits.held_out.items()):
        for i in subset.tolist():
            sides.setdefault(source.identity(i).split("#")[0], set()).add(name)
    assert {len(own) for own in sides.values()} == {1} and len({*map(str, sides.values())}) > 1
    other = tmp_path / "other"
    other.mkdir()
    (other / "b.mkv").write_bytes(film(number=15, kind="matroska"))
    (other / "b.jsonl").write_text(json.dumps({"video_path": "b.mkv", "text": "different"}))
    test = open_source(f"jsonl:{other}/b.jsonl", PAIRS)
    (leak,) = find_leaks(source, source.usable(), test, test.usable())
    assert leak.kind == "video" and {source.identity(i) for i in leak.train} == {"5#0", "5#1"}


def test_where_a_clip_begins_and_ends():
    assert checked_span(None, float("nan")) == (0.0, None)
    assert checked_span("1.5", 2) == (1.5, 2.0)
    assert placed_span(checked_span(1, None), 4.0) == (1.0, 4.0)
    assert placed_span(checked_span(1, 4.4), 4.0) == (1.0, 4.0)
    assert placed_span(checked_span(1, 9), 4.0) == (1.0, 4.0)
    assert [is_cut(checked_span(1, end), 4.0) for end in (None, 4.4, 4.6)] == [False, False, True]
    for span, first_s in (((4, 5), 0.0), ((0, 1.5), 1.5)):
        with pytest.raises(BadSample, match="outside-film"):
            placed_span(checked_span(*span), 4.0, first_s)


def modality(num_frames, rate=None, cache=None, share=False):
    transform = EvalTransform((HEIGHT, WIDTH))
    return VideoModality(transform, transform, FrameTimes(num_frames, rate), cache, share)


@pytest.fixture
def source(tmp_path):
    """Films of 30 and of 12 frames, and one that is gone when it is read."""
    rows = []
    for name, number in (("long", 30), ("short", 12), ("gone", 21)):
        (tmp_path / f"{name}.mp4").write_bytes(film(number))
        rows.append(json.dumps({"video_path": f"{name}.mp4", "text": name}))
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    source = open_source(f"jsonl:{tmp_path}/a.jsonl", PAIRS)
    (tmp_path / "gone.mp4").unlink()
    return source


def test_a_micro_batch_has_the_frames_of_its_clips_one_after_another(source):
    """In evaluation from the middles of equal parts; what cannot be read shows another clip, with
    as many frames as it would have."""
    loaded = modality(6, rate=10).load(source, request_of([1, 2, 0], training=False), 0)
    tensors = loaded.tensors
    assert tensors["video_clips"].tolist() == [4, 6, 6]
    assert tensors["video_row"].tolist() == [0] * 4 + [1] * 6 + [2] * 6
    assert tensors["video_frames"].is_contiguous(memory_format=torch.channels_last)
    shown = numbers_in(tensors["video_frames"].numpy())
    assert shown[:4] == [1, 4, 7, 10] and shown[10:] == [2, 7, 12, 17, 22, 27]
    assert tensors["video_time"][10:].tolist() == [round(1000 * k / 6) for k in range(6)]
    assert [i for i, _, _ in loaded.bad] == [2] and shown[4:10] == shown[10:]
    alone = modality(6, rate=10).load(source, request_of([1, 2], training=False), 0)
    assert numbers_in(alone.tensors["video_frames"].numpy()) == [1, 4, 7, 10] * 2 + [1, 4]
    meta = modality(6, rate=10).meta_batch(source, request_of([1, 2, 0], training=False), 0)
    for name, tensor in tensors.items():
        assert meta.tensors[name].shape == tensor.shape, name
        assert meta.tensors[name].dtype == tensor.dtype, name


def test_clips_that_overlap_may_share_their_frames(source, tmp_path, monkeypatch):
    """In evaluation: of each film, of any rate, a frame that is shown at several times is there
    once and decoded once; what cannot be read shows another clip, and costs no clip beside it."""
    pts = [*range(10), 20, 21, 22, 60, 61]
    (tmp_path / "varied.mp4").write_bytes(film(len(pts), pts=pts))
    (tmp_path / "broken.mp4").write_bytes(with_bad_frame(film(40), 22))
    rows = [json.dumps({"video_path": "short.mp4", "text": "whole"})]
    for name in ("varied", "broken", "gone"):
        for start_s, end_s in ((0.0, 0.6), (0.1, 0.5), (0.3, 2.0)):
            row = {"video_path": f"{name}.mp4", "start_s": start_s, "end_s": end_s, "text": name}
            rows.append(json.dumps(row))
    (tmp_path / "gone.mp4").write_bytes(film(21))
    (tmp_path / "b.jsonl").write_text("\n".join(rows))
    source = open_source(f"jsonl:{tmp_path}/b.jsonl", PAIRS)
    (tmp_path / "gone.mp4").unlink()
    request = request_of([7, 4, 1, 2, 3, 0, 5, 6], training=False)
    alone, together = (
        modality(8, 24, share=share).load(source, request, 0) for share in (False, True)
    )
    assert {i for i, *_ in alone.bad} == {6, 7} and together.bad == alone.bad
    assert together.key.tolist() == alone.key.tolist()
    row = together.tensors.pop("video_frame_row")
    frames = together.tensors["video_frames"]
    assert frames.is_contiguous(memory_format=torch.channels_last)
    together.tensors["video_frames"] = frames[row]
    assert together.tensors.keys() == alone.tensors.keys()
    for name, tensor in alone.tensors.items():
        assert torch.equal(together.tensors[name], tensor), name
    # of a good film as many as are shown
    decoded, convert = [], films_of_files._OpenFilm._converted
    monkeypatch.setattr(
        films_of_files._OpenFilm, "_converted", lambda *a: decoded.append(1) or convert(*a)
    )
    request = request_of([2, 0, 3, 1], training=False)
    tensors = modality(8, share=True).load(source, request, 0).tensors
    frames, row = tensors["video_frames"].numpy(), tensors["video_frame_row"]
    of_varied = [n for n, clip in zip(row.tolist(), tensors["video_row"].tolist()) if clip != 1]
    assert len(decoded) == len(frames) and len(row) == 4 * 8
    assert len({*of_varied}) == len({*numbers_in(frames[of_varied])}) < len(of_varied) / 2
    # in training each clip is augmented by itself
    assert "video_frame_row" not in modality(8, share=True).load(source, request_of([1]), 0).tensors


def test_training_draws_each_frame_from_places_of_its_part(source, tmp_path):
    """Equal with a cache and without one; anew in each epoch."""
    cached = modality(5, cache=SampleCache(tmp_path / "cache", 1 << 30))
    shown = set()
    for epoch in range(6):
        request = request_of([0, 1], epoch=epoch)
        plain, kept = (each.load(source, request, 0).tensors for each in (modality(5), cached))
        assert all(torch.equal(plain[name], kept[name]) for name in plain)
        cached.cache.store(turn_s=10)
        frames = numbers_in(plain["video_frames"].numpy())
        shown.add(tuple(frames[:5]))
        # of parts of 6 frames the first or the second half's middle
        assert [n // 6 for n in frames[:5]] == [*range(5)]
    assert len(shown) > 1 and CANDIDATES == 2


def test_the_cache_keeps_parts_of_one_film_apart(tmp_path):
    (tmp_path / "a.mp4").write_bytes(film())
    row = {"video_path": "a.mp4", "text": "a part"}
    rows = [row | {"start_s": start_s, "end_s": start_s + 0.5} for start_s in (0.0, 0.5)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = open_source(f"jsonl:{tmp_path}/a.jsonl", PAIRS)
    cached = modality(4, cache=SampleCache(tmp_path / "cache", 1 << 30))
    for _ in range(2):  # as it fills the cache, and from there
        plain, kept = (
            each.load(source, request_of([0, 1], training=False), 0).tensors["video_frames"]
            for each in (modality(4), cached)
        )
        assert torch.equal(plain, kept) and not torch.equal(kept[:4], kept[4:])
        cached.cache.store(turn_s=10)


def test_clips_of_one_film_have_equal_keys_where_they_are_the_same_part(tmp_path):
    (tmp_path / "a.mp4").write_bytes(film())
    spans = ((0.0, 0.5), (0.5, 1.0), (0.0, 0.5))
    rows = [{"video_path": "a.mp4", "start_s": s, "end_s": e, "text": f"{s}"} for s, e in spans]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = open_source(f"jsonl:{tmp_path}/a.jsonl", PAIRS)
    key = modality(2).load(source, request_of([0, 1, 2]), 0).key
    assert key[0] == key[2] != key[1]


def test_what_is_in_films_is_shown_and_how_fast_they_are_read(source, tmp_path, capsys):
    """Also beside an image, and of a film whose file is gone."""
    Image.new("RGB", (40, 30), "red").save(tmp_path / "a.png")
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    lines[0] = json.dumps(json.loads(lines[0]) | {"image_path": "a.png"})
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:2]))
    words = [f"jsonl:{tmp_path}/a.jsonl", "--pairs", "video:text,image:text"]
    assert main([*words, "--sheet", str(tmp_path / "sheet.png")]) == 0
    printed = capsys.readouterr().out
    assert "different films" in printed and "seconds of the film" in printed
    both = open_source(words[0], (("video", "text"), ("image", "text")))
    pixels = [np.asarray(_tile(both, i).convert("RGB")).astype(int) for i in (0, 1)]
    assert (pixels[0][: TILE // 4, TILE // 2] == [255, 0, 0]).all(1).any()
    assert pixels[0].shape[0] > pixels[1].shape[0] and pixels[1].max() > 200 > pixels[1].min()
    speed = measured(source, 30)
    assert speed.parts["decoding films"][0] == 2


def test_how_many_frames_a_clip_has():
    assert FrameTimes(8, 2.0).numbers(np.array([0.1, 1.0, 9.0])).tolist() == [1, 2, 8]


def test_clips_without_their_pairs_are_told_which_to_give(tmp_path):
    (tmp_path / "a.mp4").write_bytes(film())
    (tmp_path / "a.srt").write_text("00:00,1 --> 00:00,5\nhi\n")
    for key in ("video_path", "image_path"):
        line = {key: "a.mp4", "text": "a clip"}
        (tmp_path / f"{key}.jsonl").write_text(json.dumps(line) + "\n")
    for spec in ("subtitles:{}", "jsonl:{}/video_path.jsonl", "jsonl:{}/image_path.jsonl"):
        with pytest.raises(ValueError, match="--pairs video:text"):
            open_source(spec.format(tmp_path))
