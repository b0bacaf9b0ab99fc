"""A modality of one's own whose values are files: every format reads it, and what is known of files is
known of its own."""

import csv
import io
import json
import subprocess
import sys
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launched import ROOT
from PIL import Image

from data.bad_samples import BadSample
from data.decoding.images import decode_bytes
from data.index.leaks import find_leaks
from data.index.sources import open_source
from data.index.splits import content_groups
from data.inspect import main as inspect
from data.stored.kinds import STORED
from data.stored.record import StoredFile
from data.streams.opening import open_stream
from data.streams.unseen import main as write_unseen_keys

PAIRS = (("image", "text"), ("image", "depth"))
NUMBER = 6  # samples; the last has no depth, that of the one before is broken
FORMATS = ("jsonl", "csv", "parquet", "parquet of bytes", "webdataset", "python")
OWN = """
import json, sys
from pathlib import Path
{register}
class Rows:
    def __len__(self): return {number}
    def __getitem__(self, i):
        lines = Path({file!r}).read_text().splitlines()
        row = json.loads(lines[i])
        row["image"], row["depth"] = (
            row[key] and str(Path({file!r}).parent / row[key]) for key in ("image_path", "depth_path")
        )
        return row
"""


def measured_depth(content: bytes, decode: bool) -> dict[str, float]:
    """The nearest of its 16-bit distances. Raises BadSample."""
    image = decode_bytes(content)
    if not image.mode.startswith("I;16"):
        raise BadSample("unreadable", f"a depth of mode {image.mode}; 16 bits of grey are needed")
    return {"depth_nearest": float(np.asarray(image).min())}


DEPTH = StoredFile(
    "depth",
    endings=("depth.png",),
    measured={"depth_nearest": "f4"},
    measure=measured_depth,
)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(STORED, "depth", DEPTH)


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def contents(n: int) -> tuple[bytes, bytes | None]:
    """Of image and depth; depths of 0 and 2 are equal."""
    depth = Image.fromarray(np.full((4, 6), 1000 * (n % 2 + 1 if n < 4 else n), np.uint16))
    values = [png(depth), png(Image.new("RGB", (6, 4))), None]
    return png(Image.new("RGB", (6, 4), (40 * n, 9, 9))), values[max(0, n - NUMBER + 3)]


def written(folder, form: str) -> str:
    """The same samples in each format."""
    rows, lines = [], []
    with tarfile.open(folder / "a.tar", "w") as tar:
        for n in range(NUMBER):
            image, depth = contents(n)
            members = {"png": image, "txt": f"number {n}".encode(), "depth.png": depth}
            for ending, content in members.items():
                if content is not None:
                    (folder / f"{n}.{ending}").write_bytes(content)
                    entry = tarfile.TarInfo(f"{n}.{ending}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
            paths = (f"{n}.png", f"{n}.depth.png" if depth else None)
            lines.append(
                dict(zip(("image_path", "depth_path"), paths), text=f"number {n}", id=str(n))
            )
            rows.append({"image": image, "text": f"number {n}", "depth": depth, "id": str(n)})
    (folder / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with (folder / "a.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["filepath", "title", "depth_path", "id"])
        table.writerows(
            [*map(line.get, ("image_path", "text", "depth_path", "id"))] for line in lines
        )
    paths = {
        key: [line[key] for line in lines] for key in ("image_path", "depth_path", "text", "id")
    }
    pq.write_table(pa.table(paths), folder / "a.parquet")
    held = {key: [row[key] for row in rows] for key in rows[0]}
    pq.write_table(pa.table(held), folder / "b.parquet")
    module = OWN.format(number=NUMBER, file=str(folder / "a.jsonl"), register="")
    (folder / "own_depths.py").write_text(module)
    return {
        "jsonl": f"jsonl:{folder}/a.jsonl",
        "csv": f"csv:{folder}/a.csv",
        "parquet": f"parquet:{folder}/a.parquet",
        "parquet of bytes": f"parquet:{folder}/b.parquet",
        "webdataset": f"webdataset:{folder}/a.tar",
        "python": "python:own_depths:Rows",
    }[form]


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_reads_it(form, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_depths", raising=False)
    source = open_source(written(tmp_path, form), PAIRS, folder=tmp_path / "index", workers=1)
    assert source.usable().tolist() == [*range(NUMBER)]
    assert source.lacking("depth").tolist() == [n >= NUMBER - 2 for n in range(NUMBER)]
    for n in range(NUMBER - 2):
        assert (source.value("image", n), source.value("depth", n)) == contents(n)
    ((broken, _, reason, detail),) = source.broken_values()
    assert (source.captions(4), reason) == (["number 4"], "unreadable") and "mode RGB" in detail
    assert broken == source.identity(4) and "used without its depth" in detail
    assert source.column("depth_nearest").tolist() == [1000, 2000, 1000, 2000, 0, 0]
    groups = content_groups(source, source.usable())
    assert groups[0] == groups[2] != groups[1] == groups[3] and len({*groups.tolist()}) == 4
    whole, own = source.usable(), source.usable()[:1]
    leaks = find_leaks(source, whole[2:3], source, own)
    assert [(leak.kind, leak.train.tolist()) for leak in leaks] == [("depth", [2])]


def test_it_is_inspected_and_its_speed_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WYE_CACHE", str(tmp_path / "cache"))
    spec = written(tmp_path, "jsonl")
    pairs = ["--pairs", ",".join(map(":".join, PAIRS))]
    assert inspect([spec, *pairs, "--sheet", str(tmp_path / "sheet.png")]) == 0
    said = capsys.readouterr().out
    assert "different values of depth" in said and "without depth" in said, said
    rows = [line.replace("│", " ").split() for line in said.splitlines() if "│" in line]
    begin = next(n for n, row in enumerate(rows) if row[:2] == ["depth", "nearest"])
    assert sum(int(row[-2]) for row in rows[begin:][:8] if row[-1][0] == "█") == NUMBER - 2
    for each in (spec, f"stream:{tmp_path}/a.tar", f"stream:{tmp_path}/b.parquet"):
        assert inspect([each, *pairs, "--speed", "--seconds", "1"]) == 0
        assert "decoding depth, one process" in capsys.readouterr().out, each


@pytest.mark.parametrize(("kind", "value"), [("f4", np.nan), ("?", True)])
def test_a_measure_of_any_numbers_is_inspected(kind, value, tmp_path, monkeypatch, capsys):
    own = {"measured": {"depth_found": kind}, "measure": lambda *_: {"depth_found": value}}
    monkeypatch.setitem(STORED, "depth", StoredFile("depth", endings=("depth.png",), **own))
    monkeypatch.setenv("WYE_CACHE", str(tmp_path / "cache"))
    spec = written(tmp_path, "webdataset")
    assert inspect([spec, "--pairs", "image:text,image:depth", "--count", "0"]) == 0
    assert ("depth found" in capsys.readouterr().out) == (kind == "?")


def test_captions_of_samples_without_an_image_are_left_out_of_a_stream(tmp_path, monkeypatch):
    pytest.importorskip("rbloom", reason="pip install -r requirements-filters.txt")
    monkeypatch.setenv("WYE_CACHE", str(tmp_path / "cache"))
    written(tmp_path, "jsonl")
    rows = [{"depth": f"{n}.depth.png", "text": f"Number {n}"} for n in (1, 3)]
    (tmp_path / "seen.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--pairs", "depth:text", "--out", str(tmp_path / "seen")]
    assert write_unseen_keys([f"jsonl:{tmp_path}/seen.jsonl", *flags]) == 0
    stream, _ = open_stream(f"stream:{tmp_path}/b.parquet?unseen={tmp_path}/seen", PAIRS)
    assert [stream.captions(i) for i in range(len(stream))] == [
        [f"number {n}"] for n in (0, 2, 4, 5)
    ]


def test_it_is_no_file_where_nothing_registers_it(tmp_path, monkeypatch):
    spec = written(tmp_path, "jsonl")
    monkeypatch.delitem(STORED, "depth")
    with pytest.raises(ValueError, match="it holds image and text and .*, and --pairs compares"):
        open_source(spec, (("text", "depth"),), folder=tmp_path / "index")


def test_a_column_of_another_name_is_given(tmp_path):
    written(tmp_path, "csv")
    text = (tmp_path / "a.csv").read_text().replace("depth_path", "zmap", 1)
    (tmp_path / "a.csv").write_text(text)
    source = open_source(f"csv:{tmp_path}/a.csv?depth=zmap", PAIRS, folder=tmp_path / "index")
    assert source.value("depth", 0) == contents(0)[1]


def test_processes_that_read_for_the_index_know_it(tmp_path):
    """They import nothing of the command's; the module that registers it comes with its entry."""
    spec = written(tmp_path, "jsonl")
    program = "from test_stored import DEPTH; from data.stored.kinds import STORED; import pathlib;"
    program += "STORED['depth'] = DEPTH; from data.index.sources import open_source;"
    program += "import data.index.building as building; building.POOL_AFTER_S = -1.0;"
    program += f"folder = pathlib.Path({str(tmp_path / 'index')!r});"
    program += f"source = open_source({spec!r}, {PAIRS!r}, workers=2, folder=folder);"
    program += "print(source.column('depth_nearest').tolist())"
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": f"{ROOT}:{ROOT}/tests:{ROOT}/tests/data", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.stdout.splitlines()[-1:] == ["[1000.0, 2000.0, 1000.0, 2000.0, 0.0, 0.0]"], (
        ran.stderr
    )


def test_a_table_of_two_kinds_of_files_needs_no_texts(tmp_path):
    written(tmp_path, "csv")
    lines = (tmp_path / "a.csv").read_text().splitlines()
    rows = [line.split(",") for line in lines]
    (tmp_path / "b.csv").write_text("".join(f"{row[0]},{row[2]}\n" for row in rows))
    source = open_source(f"csv:{tmp_path}/b.csv", PAIRS[1:], folder=tmp_path / "index")
    assert source.usable().tolist() == [*range(NUMBER - 2)]
    (tmp_path / "c.csv").write_text("".join(f"{row[2]}\n" for row in rows))
    with pytest.raises(ValueError, match="no column title; there are: depth_path"):
        open_source(f"csv:{tmp_path}/c.csv", PAIRS[1:], folder=tmp_path / "index")


def test_an_index_is_of_the_record_as_it_is_now(tmp_path, monkeypatch):
    """Another ending or key, or another type of a column, of a record whose measure stays."""
    rows = []
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for n in range(3):
            depths = {"near.png": contents(0)[1], "far.png": contents(1)[1]}
            for ending, content in {"png": contents(n)[0], **depths}.items():
                entry = tarfile.TarInfo(f"{n}.{ending}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
                (tmp_path / f"{n}.{ending}").write_bytes(content)
            keys = {"image_path": "png", "near": "near.png", "far": "far.png"}
            rows.append({key: f"{n}.{ending}" for key, ending in keys.items()})
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, kind, nearest in (("near", "f4", 1000), ("far", "f4", 2000), ("far", "f8", 2000)):
        given = {"endings": (f"{name}.png",), "names": {"json": (name,)}}
        given |= {"measured": {"depth_nearest": kind}, "measure": measured_depth}
        monkeypatch.setitem(STORED, "depth", StoredFile("depth", **given))
        for spec in (f"webdataset:{tmp_path}/a.tar", f"jsonl:{tmp_path}/b.jsonl"):
            source = open_source(spec, PAIRS[1:], folder=tmp_path / "index", workers=1)
            assert source.value("depth", 1) == depths[f"{name}.png"]
            assert source.column("depth_nearest").tolist() == [nearest] * 3


HEADER = ("image_path", "text", "depth_path", "depth")
TWICE = [
    ("0.png", "both", "0.depth.png", "1.depth.png"),
    ("1.png", "the first", "1.depth.png", None),
    ("2.png", "the second", None, "2.depth.png"),
    (None, "both, and no image", None, None),
    ("3.png", "both", "3.depth.png", "2.depth.png"),
    ("none.png", None, "none.depth.png", "3.depth.png"),
]
# of each format what is counted, how often, and where it is first
COUNTED = {
    "jsonl": ("values of a key 'depth' beside 'depth_path'", 2, ":1"),
    "list": ("values of a key 'depth' beside 'depth_path'", 2, "#[0]"),
    "csv": ("values of a column 'depth' beside 'depth_path'", 3, ":2"),
    "parquet": ("columns 'depth_path' beside 'depth'", 1, "#row 0"),
}


def written_twice(folder, form: str) -> str:
    """Samples in rows with two keys or columns of a depth; the name of their file."""
    written(folder, "csv")
    lines, file = [dict(zip(HEADER, row)) for row in TWICE], folder / f"twice.{form}"
    texts = {"jsonl": "".join(json.dumps(line) + "\n" for line in lines), "list": json.dumps(lines)}
    if form == "csv":
        with file.open("w", newline="") as opened:
            csv.writer(opened).writerows([("filepath", "title", *HEADER[2:]), *TWICE])
    elif form == "parquet":
        table = pa.Table.from_pylist(lines)
        pq.write_table(table, file, row_group_size=2)
        nothing = table.set_column(2, "depth_path", pa.nulls(len(lines), pa.string()))
        pq.write_table(nothing, folder / "without.parquet")
    else:
        file.write_text(texts[form])
    return str(file)


@pytest.mark.parametrize("form", COUNTED)
def test_a_second_value_of_it_in_a_row_is_counted(form, tmp_path, capsys, monkeypatch):
    """Where it is compared, no key or column is named, and the sample is used. Of parquet those files
    are counted that have another column with values."""
    file, (what, number, place) = written_twice(tmp_path, form), COUNTED[form]
    spec = {"csv": f"csv:{file}", "parquet": f"parquet:{tmp_path}/*t*.parquet"}
    spec = spec.get(form, f"jsonl:{file}")
    known = {"folder": tmp_path / "index", "workers": 1}
    for _ in range(2):  # the second time as the index has it
        assert open_source(spec, PAIRS, **known).unused() == {what: (number, f"{file}{place}")}
    assert open_source(spec, **known).unused() == {}
    assert open_source(f"{spec}?depth=depth", PAIRS, **known).unused() == {}
    pairs = ["--pairs", ",".join(map(":".join, PAIRS))]
    monkeypatch.setenv("COLUMNS", "300")
    assert inspect([spec, *pairs, "--count", "0"]) == 0
    assert f"unused: {what}" in capsys.readouterr().out
