"""Moments of films: every format gives the same, every fault has its reason, and what a tower is
shown of them is where they lie in the film."""

import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from plain_requests import request_of, square_images

sys.path.insert(0, str(Path(__file__).parent))
from bad_films import film  # noqa: E402

from data.annotations import Annotation
from data.bad_samples import Absent
from data.batching.shown import ShownAnnotations
from data.index.sources import open_source
from data.inspect import main
from data.modalities.transforms import EvalTransform
from data.modalities.video import FrameTimes, VideoModality
from data.stored.derived import MOMENTS
from data.streams.opening import open_stream

pytest.importorskip("av", reason="pip install -r requirements-audio.txt")

PAIRS = (("video", "text"), ("video", "moment"))
GOOD = {"start_s": 0.25, "end_s": 0.5, "text": "it runs"}
FOUND = Annotation((0.25, 0.5), ("it runs",))
FAULTS = [  # a moment, its reason, a word of what is said
    ({"start_s": 0.5, "end_s": 0.5}, "invalid-span", "start_s < end_s"),
    ({"start_s": 0.5, "end_s": 0.25}, "invalid-span", "start_s < end_s"),
    ({"start_s": -0.1}, "invalid-span", "start_s < end_s"),
    ({"end_s": None}, "invalid-span", "no end_s"),
    ({"start_s": "soon"}, "invalid-span", "seconds"),
    ({"end_s": float("inf")}, "invalid-span", "seconds"),
    ({"start_s": 0.9, "end_s": 1.2}, "outside-clip", "from 0 to 1"),
    ({"start_s": 7, "end_s": 8}, "outside-clip", "from 7 to 8"),
    ({"text": " "}, "no-phrase", "a text"),
    ({"text": None}, "no-phrase", "a text"),
    ("it runs", "invalid-row", "{start_s, end_s, text}"),
]
ROWS = [
    [GOOD, {"start_s": 0.4, "end_s": 0.9, "text": ["a", "b"], "negatives": ["c"]}],
    [],
    None,
    # a candidate stands behind those with phrases, and an end behind the film is cut to it
    [{"start_s": 0, "end_s": 0.1, "candidate": True}, {"start_s": 0.5, "end_s": 1.4, "text": "d"}],
]
EXPECTED = [
    [FOUND, Annotation((0.4, 0.9), ("a", "b"), ("c",))],
    None,
    None,
    [Annotation((0.5, 1.0), ("d",)), Annotation((0.0, 0.1), ())],
]


def rows_of(path):
    """One for each of `ROWS`; `path`: of a film of a second."""
    return [
        {"id": str(n), "video_path": path, "text": f"words {n}", "moments": moments}
        for n, moments in enumerate(ROWS)
    ]


def jsonl(folder, *rows):
    (folder / "a.mp4").write_bytes(film())
    lines = [json.dumps({"id": str(n), "video_path": "a.mp4", **row}) for n, row in enumerate(rows)]
    (folder / "set.jsonl").write_text("\n".join(lines))
    return f"jsonl:{folder}/set.jsonl"


def of_jsonl(folder):
    return jsonl(folder, *rows_of("a.mp4"))


def of_parquet(folder):
    rows = [{**row, "video": film()} for row in rows_of("")]
    kind = {"start_s": pa.float64(), "end_s": pa.float64(), "candidate": pa.bool_()}
    kind |= dict.fromkeys(("text", "negatives"), pa.list_(pa.string()))
    columns = {key: [row[key] for row in rows] for key in ("id", "video", "text")}
    moments = [
        None
        if row["moments"] is None
        else [
            {
                **each,
                "text": [each["text"]] if isinstance(each.get("text"), str) else each.get("text"),
            }
            for each in row["moments"]
        ]
        for row in rows
    ]
    columns["moments"] = pa.array(moments, pa.list_(pa.struct(kind)))
    pq.write_table(pa.table(columns), folder / "set.parquet")
    return f"parquet:{folder}/set.parquet"


def of_tar(folder):
    with tarfile.open(folder / "set.tar", "w") as tar:
        for row in rows_of(""):
            fields = {"caption": row["text"], "moments": row["moments"]}
            for ending, data in (("mp4", film()), ("json", json.dumps(fields).encode())):
                member = tarfile.TarInfo(f"{row['id']}.{ending}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return f"webdataset:{folder}/set.tar"


@pytest.mark.parametrize("make", [of_jsonl, of_parquet, of_tar], ids=lambda make: make.__name__[3:])
def test_every_format_gives_the_same(make, tmp_path):
    spec = make(tmp_path)
    for source in (open_source(spec, PAIRS), open_source(spec, PAIRS)):  # made, and read again
        for i, expected in enumerate(EXPECTED):
            if expected is None:
                with pytest.raises(Absent, match="no moment"):
                    source.value("moment", i)
            else:
                assert source.value("moment", i) == expected
        assert source.usable().tolist() == [0, 1, 2, 3] and not [*source.broken_values()]
        assert source.column("num_moments").tolist() == [2, 0, 0, 1]
        assert source.column("num_negatives_of_moments").tolist() == [1, 0, 0, 0]


def test_a_stream_and_objects_of_ones_own_have_them(tmp_path, monkeypatch):
    of_tar(tmp_path)
    stream, *_ = open_stream(f"stream:{tmp_path}/set.tar", PAIRS)
    assert stream.value("moment", 0) == EXPECTED[0]
    (tmp_path / "films_of_mine.py").write_text(
        f"content = {film()!r}\nmoments = {ROWS!r}\n"
        "rows = [dict(video=content, text='a', moments=each) for each in moments]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    source = open_source("python:films_of_mine:rows", PAIRS)
    assert source.value("moment", 3) == EXPECTED[3] and source.lacking("moment").tolist() == [
        False,
        True,
        True,
        False,
    ]


def test_every_fault_has_its_reason_and_a_bad_one_is_left_out_alone(tmp_path):
    bad = [{**GOOD, **each} if isinstance(each, dict) else each for each, *_ in FAULTS]
    rows = [{"text": "a", "moments": [each]} for each in bad]
    rows += [{"text": "a", "moments": [GOOD, each]} for each in bad]
    source = open_source(jsonl(tmp_path, *rows), PAIRS)
    said = {identity.split("#")[0]: each for identity, *each in source.broken_values()}
    for n, (_, reason, word) in enumerate(FAULTS):
        assert source.lacking("moment")[n], reason
        assert source.value("moment", n + len(FAULTS)) == [FOUND]
        for number in (n, n + len(FAULTS)):
            _, found, detail = said[str(number)]
            assert found == reason and word in detail, (detail, word)
        assert "1 of 2 moments" in said[str(n + len(FAULTS))][2]


def test_those_of_a_part_of_a_film_are_cut_to_it(tmp_path):
    """Times are of the film, not of the clip."""
    moments = [{**GOOD, "start_s": 0.1, "end_s": 0.5}, {**GOOD, "start_s": 0.0, "end_s": 0.3}]
    row = {"start_s": 0.25, "end_s": 0.75, "text": "a", "moments": moments}
    source = open_source(jsonl(tmp_path, row), PAIRS)
    assert source.value("moment", 0) == [FOUND]
    assert [each[2] for each in source.broken_values()] == ["outside-clip"]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("share", [True, False])
def test_a_tower_is_told_where_they_lie_after_the_first_frame_that_it_sees(
    tmp_path, training, share
):
    source = open_source(of_jsonl(tmp_path), PAIRS)
    transform = EvalTransform((16, 16))
    modality = VideoModality(transform, transform, FrameTimes(3), share=share)
    shown = ShownAnnotations(source, MOMENTS, most=16, most_negatives=4)
    index = np.array([3, 0, 1])
    places = shown.places(index, training)
    request = request_of(index, training=training, places=places)
    loaded = modality.load(source, request, seed=1)
    found = loaded.further["moment"]
    spans, row = found.tensors["moment_spans"], found.tensors["moment_row"].tolist()
    assert (
        row == [0, 1, 1]
        and found.index.tolist() == [3, 0, 0]
        and found.position.tolist() == [0, 1, 2]
    )
    assert len({*found.key.tolist()}) == 3
    # the frames come at times of equal parts of a second; training draws each from two of its part
    parts = np.array([1 / 12, 3 / 12]) if training else np.array([1 / 6])
    given = np.array([each.extent for i in (3, 0) for each in EXPECTED[i] if each.phrases])
    possible = np.rint(1000 * (given[:, None] - parts[:, None]))
    assert all(
        any((span == each).all() for each in of) for span, of in zip(spans.numpy(), possible)
    )
    assert len(places.phrases(index, None).texts(source, 1, 0, training)) == 3 + training
    # those of films are no rows of images
    images = square_images(16).load(open_source("demo"), request, 1)
    assert images.further == {}
    outline = modality.meta_batch(source, request, 1).further["moment"]
    assert {n: t.shape for n, t in outline.tensors.items()} == {
        n: t.shape for n, t in found.tensors.items()
    }


def test_a_clip_that_cannot_be_read_has_none_in_the_loss(tmp_path):
    source = open_source(of_jsonl(tmp_path), PAIRS)
    (tmp_path / "a.mp4").write_bytes(film(number=12))
    transform = EvalTransform((16, 16))
    places = ShownAnnotations(source, MOMENTS, 16, 0).places(np.array([0]))
    request = request_of([0], places=places)
    loaded = VideoModality(transform, transform, FrameTimes(3)).load(source, request, 1)
    assert len(loaded.bad) == 1 and loaded.further["moment"].index.tolist() == [-1, -1]


def test_a_look_into_the_set_counts_and_shows_them(tmp_path, capsys, monkeypatch):
    spec = of_jsonl(tmp_path)
    words = ["data.inspect", spec, "--pairs", "video:text,moment:text"]
    monkeypatch.setattr(sys, "argv", [*words, "--sheet", str(tmp_path / "sheet.png")])
    main()
    assert "3 in 2 films" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "sheet.png").stat().st_size > 1000
