"""The index: made once, by one process of several, anew for what changed only; and opening a large
one costs next to nothing."""

import errno
import json
import os
import pickle
import subprocess
import sys
import tarfile
from collections import deque
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data.bad_samples import CODES
from data.batching.mixture import open_sources
from data.batching.requests import MicroBatchRequest
from data.decoding.images import decode_bytes
from data.index.building import load_index
from data.index.mapped import index_folder, numbers_of, texts_of
from data.index.sources import open_format, open_source
from data.loader import MicroBatchDataset
from data.modalities.image import ImageModality
from data.modalities.transforms import EvalTransform, TrainTransform, Views
from data.stored.image import perceptual_hash

sys.path.insert(0, str(Path(__file__).parent))
from bad_sets import BAD_IMAGES, add, encoded_image, png_of_palette  # noqa: E402
from large_index import CAPTIONS, write_large_index  # noqa: E402
from test_formats import write_shard  # noqa: E402
from test_regions import turned_image  # noqa: E402

OPENED: deque[str] = deque(maxlen=1000)  # files that this process opened last
sys.addaudithook(lambda event, given: OPENED.append(str(given[0])) if event == "open" else None)
# Waits for the file argv[2], so that several start together; prints what it then has.
TOGETHER = """
import os, sys, time
import data.index.building
from data.index.sources import open_source
build = data.index.building._build
data.index.building._build = lambda *given, **named: (print("built"), build(*given, **named))
while not os.path.exists(sys.argv[2]):
    time.sleep(0.001)
source = open_source(sys.argv[1], workers=1)
print(source.index.folder, len(source), source.captions(5))
"""


def write_set(folder: Path, count: int) -> str:
    (folder / "images").mkdir(parents=True, exist_ok=True)
    lines = []
    for n in range(count):
        path = folder / "images" / f"{n}.png"
        if not path.exists():
            path.write_bytes(encoded_image(n))
        line = {"id": f"id {n}", "image_path": f"images/{n}.png", "text": f"number {n}"}
        lines.append(json.dumps(line) + "\n")
    (folder / "set.jsonl").write_text("".join(lines))
    return f"jsonl:{folder / 'set.jsonl'}"


def opened(spec: str, folder: Path) -> tuple[int, list[str]]:
    """Samples, and the files of the set that were opened, in parts of four rows."""
    OPENED.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data.formats.rows.ROWS_OF_A_PART", 4)
        count = len(open_source(spec, workers=1))
    found = {os.path.relpath(file, folder) for file in OPENED if file.startswith(str(folder))}
    return count, sorted(found)


def test_only_what_changed_is_read_again(tmp_path):
    spec = write_set(tmp_path, 8)
    os.utime(tmp_path / "images/3.png", ns=(0, 0))  # a time as others, of archives without times

    def images(*numbers):
        return [*(f"images/{n}.png" for n in numbers), "set.jsonl"]

    assert opened(spec, tmp_path) == (8, images(*range(8)))
    assert opened(spec, tmp_path) == (8, [])  # all there
    write_set(tmp_path, 10)
    assert opened(spec, tmp_path) == (10, images(8, 9))
    (tmp_path / "images/3.png").write_bytes(encoded_image(99))
    assert opened(spec, tmp_path) == (10, images(3))
    (tmp_path / "images/5.png").unlink()
    assert opened(spec, tmp_path) == (10, images())
    assert [row[0] for row in open_source(spec).bad_samples()] == ["id 5"]
    # back: what was missing is looked for
    (tmp_path / "images/5.png").write_bytes(encoded_image(5))
    assert opened(spec, tmp_path) == (10, images(5))
    assert len(open_source(spec).usable()) == 10
    # no image is another because its row is, or stands elsewhere
    first, *others = (tmp_path / "set.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "set.jsonl").write_text("".join([*others, first.replace("number 0", "words")]))
    assert opened(spec, tmp_path) == (10, images())
    assert [open_source(spec).captions(i)[0] for i in (0, 9)] == ["number 1", "words"]


def test_an_index_made_step_by_step_equals_one_made_at_once(tmp_path):
    spec = write_set(tmp_path, 6)
    open_source(spec)
    (tmp_path / "images/2.png").write_bytes(b"hello")
    spec = write_set(tmp_path, 12)
    step_by_step, at_once = open_source(spec), open_source(spec, folder=tmp_path / "other index")
    assert step_by_step.index.folder != at_once.index.folder
    assert rows_of(step_by_step) == rows_of(at_once)


@pytest.mark.parametrize("check", ("decode", "header"))
def test_what_is_known_of_files_is_what_would_be_read(tmp_path, check):
    """Of every kind, where all of the rows that name them is another."""
    pytest.importorskip("av", reason="pip install -r requirements-audio.txt")
    from bad_audio import tone, wav
    from bad_films import film

    kinds = [("JPEG", 6, False), ("WEBP", 3, False), ("PNG", 6, True)]
    contents = {f"{n}": turned_image(*kind) for n, kind in enumerate(kinds)}
    contents |= {"sound": wav(tone(0.2)), "film": film()}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "broken").write_bytes(b"hello")
    spec = f"jsonl:{tmp_path}/set.jsonl"
    pairs = tuple((name, "text") for name in ("image", "audio", "video", "region"))
    files = [("0", "sound", "film"), ("1", "sound", "film"), ("2", None, None)]
    files += [("broken", "sound", None)]

    def write(text: str, start_s: float, box: list[int], bare: str) -> None:
        lines = []
        for image, sound, clip in sorted(files, key=lambda of: (of[0] == bare, of)):
            line = {"image_path": image, "audio_path": sound, "video_path": clip, "id": image}
            line |= {"start_s": start_s} if clip else {}
            regions = [{"box": box, "text": text}] if image != bare else None
            lines.append(json.dumps(line | {"text": text, "regions": regions}))
        (tmp_path / "set.jsonl").write_text("\n".join(lines))

    write("red", 0.2, [4, 2, 8, 8], bare="2")
    before = open_source(spec, pairs, check=check, workers=1)
    assert before.lacking("region").tolist() == [False, False, True, True]
    write("blue", 0.4, [5, 3, 6, 6], bare="1")
    OPENED.clear()
    known = open_source(spec, pairs, check=check, workers=1)
    found = {os.path.relpath(file, tmp_path) for file in OPENED if file.startswith(str(tmp_path))}
    # what turns an image may stand behind its pixels, which are read where there are boxes
    assert found == {"set.jsonl", "broken", *(("1", "2") if check == "header" else ())}
    assert known.lacking("region").tolist() == [False, False, True, True]
    at_once = open_source(spec, pairs, check=check, workers=1, folder=tmp_path / "other index")
    assert rows_of(known) == rows_of(at_once)


def test_encoded_bytes_that_are_known_are_not_decoded_again(tmp_path, monkeypatch):
    """Where a shard is written anew, with other captions."""
    images = [encoded_image(n) for n in range(4)]

    def write(text: str, images: list[bytes]) -> None:
        texts = [f"{text} {n}" for n in range(len(images))]
        pq.write_table(pa.table({"image": images, "text": texts}), tmp_path / "a.parquet")

    write("before", images[:3])
    spec, decoded = f"parquet:{tmp_path}/a.parquet", []
    open_source(spec)
    monkeypatch.setattr(
        "data.stored.image.decode_bytes",
        lambda content, **named: decoded.append(content) or decode_bytes(content, **named),
    )
    write("after", images[1:])
    known = open_source(spec, workers=1)
    assert decoded == images[3:] and known.captions(0) == ["after 0"]
    at_once = open_source(spec, workers=1, folder=tmp_path / "other index")
    assert rows_of(known) == rows_of(at_once)


def rows_of(source) -> list:
    """All that an index says."""
    names = numbers_of(source.index.modalities).names
    numbers = [source.column(name).tolist() for name in names]
    texts = texts_of(source.index.modalities).names
    return numbers + [[source.index.text(name, i) for name in texts] for i in range(len(source))]


def test_only_shards_that_changed_are_read_again(tmp_path):
    for n in range(3):
        write_shard(tmp_path / f"{n}.tar", ["a", "b"])
    spec = f"webdataset:{tmp_path}/*.tar"
    assert opened(spec, tmp_path) == (6, ["0.tar", "1.tar", "2.tar"])
    assert opened(spec, tmp_path) == (6, [])
    write_shard(tmp_path / "1.tar", ["a", "b", "c"])
    assert opened(spec, tmp_path) == (7, ["1.tar"])
    write_shard(tmp_path / "00.tar", ["z"])
    assert opened(spec, tmp_path) == (8, ["00.tar"])
    source = open_source(spec)
    keys = [("0", "a"), ("0", "b"), ("00", "z"), *(("1", k) for k in "abc"), ("2", "a"), ("2", "b")]
    assert [source.identity(i) for i in range(8)] == [f"{shard}.tar/{key}" for shard, key in keys]
    assert source.value("image", 7) == encoded_image(1)
    assert source.where(7) == f"{tmp_path}/2.tar#b.png"


def test_what_is_unused_is_counted_also_in_shards_that_are_not_read_again(tmp_path, monkeypatch):
    for n in range(3):
        with tarfile.open(tmp_path / f"{n}.tar", "w") as tar:
            for name in ("a.png", "a.txt", "a.cls", f"a.{n}.npy"):
                add(tar, name, encoded_image(n) if name == "a.png" else b"words")
    spec, of_class = f"webdataset:{tmp_path}/*.tar", (3, f"{tmp_path}/0.tar#a.cls")
    alone = {f"members .{n}.npy": (1, f"{tmp_path}/{n}.tar#a.{n}.npy") for n in range(3)}
    assert open_source(spec).unused() == {"members .cls": of_class} | alone
    monkeypatch.setattr("data.index.mapped.UNUSED_KINDS", 2)
    write_shard(tmp_path / "3.tar", ["a"])
    unused = open_source(spec).unused()
    assert unused["members .cls"] == of_class and unused["others"][0] == 2
    assert opened(spec, tmp_path)[1] == []
    mixture = open_sources([spec, f"webdataset:{tmp_path}/1.tar"])
    assert mixture.unused()["members .cls"] == (4, of_class[1])


def test_a_row_whose_twin_went_with_its_file_is_usable_again(tmp_path):
    """And what was noted of it is not forgotten."""
    for n in range(3):
        texts = [["words"], ["words", "x" * 20_000] if n == 1 else ["words"]]
        images = [encoded_image(n), encoded_image(n + 3)]
        table = pa.table({"id": [f"of {n}", "common"], "image": images, "text": texts})
        pq.write_table(table, tmp_path / f"{n}.parquet")
    spec = f"parquet:{tmp_path}/*.parquet"
    first = f"id 'common' is already that of {tmp_path}/0.parquet#row 1; ids must differ"
    assert [*open_source(spec).bad_samples()] == [
        ("common", f"{tmp_path}/{n}.parquet#row 1", "duplicate-id", first) for n in (1, 2)
    ]
    (tmp_path / "0.parquet").unlink()
    source = open_source(spec)
    assert [row[1] for row in source.bad_samples()] == [f"{tmp_path}/2.parquet#row 1"]
    assert source.usable().tolist() == [0, 1, 2]
    noted = [row[1:3] for row in source.broken_values()]
    assert noted == [(f"{tmp_path}/1.parquet#row 1", "huge-caption")]


def test_what_the_system_could_not_read_is_tried_again(tmp_path, monkeypatch):
    """Its size and time stay when a disk or a right is mended; a broken image stays broken."""
    spec = write_set(tmp_path, 2)
    (tmp_path / "images/1.png").write_bytes(BAD_IMAGES["unreadable"])

    def failing(file, *arguments, **named):
        if str(file).endswith("0.png"):
            raise OSError(errno.EIO, "Input/output error")
        return open(file, *arguments, **named)

    table = pa.table({"image": [encoded_image(0), b"no image"], "text": ["a", "b"]})
    pq.write_table(table, tmp_path / "a.parquet")
    tables = f"parquet:{tmp_path}/a.parquet"
    with monkeypatch.context() as patch:
        patch.setattr("data.stored.roots.open", failing, raising=False)
        patch.setattr(pq.ParquetFile, "iter_batches", lambda *given, **named: failing("0.png"))
        for each in (spec, tables):
            with pytest.raises(ValueError, match="unreadable 2.*(?s:.)*Input/output error"):
                open_source(each)
    assert [row[0] for row in open_source(spec, refresh=True).bad_samples()] == ["id 1"]
    assert open_source(tables, refresh=True).usable().tolist() == [0]


def test_processes_that_start_together_build_once(tmp_path):
    spec, go = write_set(tmp_path, 40), tmp_path / "go"
    command = [sys.executable, "-c", TOGETHER, spec, str(go)]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    go.write_text("")
    lines = []
    for process in processes:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        lines.append(out.splitlines())
    assert sum("built" in output for output in lines) == 1
    assert lines[0][-1] == lines[1][-1] and lines[0][-1].endswith("40 ['number 5']")


def test_several_workers_make_the_same_index(tmp_path, monkeypatch):
    monkeypatch.setattr("data.index.building.POOL_AFTER_S", -1.0)
    monkeypatch.setattr("data.formats.rows.ROWS_OF_A_PART", 7)
    spec = write_set(tmp_path, 40)
    one, two = (open_source(spec, workers=n, folder=tmp_path / f"index {n}") for n in (1, 2))
    assert rows_of(one) == rows_of(two)


def test_a_damaged_index_is_made_again(tmp_path):
    spec = write_set(tmp_path, 5)
    source = open_source(spec)
    for name in ("numbers", "texts.arrow", "repeats.npy", "meta.json"):
        for harm in ("cut off", "empty", "gone", "changed"):
            file = source.index.folder / name
            content = file.read_bytes()
            at = len(content) // 2
            changed = content[:at] + bytes([content[at] ^ 255]) + content[at + 1 :]
            file.write_bytes({"cut off": content[:at], "changed": changed}.get(harm, b""))
            if harm == "gone":
                file.unlink()
            source = open_source(spec)
            assert source.index.folder != file.parent, (name, harm)
            assert [source.captions(i) for i in range(5)] == [[f"number {n}"] for n in range(5)]
            assert len(source.usable()) == 5, (name, harm)


def test_what_a_killed_build_left_is_cleared(tmp_path):
    spec = write_set(tmp_path, 3)
    folder = index_folder(open_format(spec))
    (folder / "build-1-dead").mkdir(parents=True)
    (folder / "build-1-dead" / "0.arrow").write_bytes(b"half")
    made = load_index(open_format(spec)).folder
    assert {path.name for path in folder.iterdir()} == {made.name, "index.json", "lock"}


def test_a_run_keeps_its_index_while_another_is_made(tmp_path):
    """Numbers of samples must not change under a run: a worker that starts later reads the same
    file."""
    running = open_source(write_set(tmp_path, 4))
    travelling = pickle.dumps(running)
    lines = (tmp_path / "set.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "set.jsonl").write_text("".join(lines[2:]))
    assert open_source(running.spec).captions(0) == ["number 2"]
    assert pickle.loads(travelling).captions(0) == ["number 0"] == running.captions(0)
    open_source(write_set(tmp_path, 6))
    with pytest.raises(FileNotFoundError, match="this index was replaced.*start the run again"):
        pickle.loads(travelling)


def test_refresh_looks_where_opening_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr("data.index.mapped.RECHECKED_FILES", 2)  # as if the set were large
    spec = write_set(tmp_path, 3)
    open_source(spec)
    (tmp_path / "images/1.png").write_bytes(b"hello")
    assert len(open_source(spec).usable()) == 3
    assert len(open_source(spec, refresh=True).usable()) == 2


def test_check_header_reads_sizes_only(tmp_path):
    spec = write_set(tmp_path, 3)
    cut = encoded_image(1)[:300]
    (tmp_path / "images/1.png").write_bytes(cut)
    (tmp_path / "images/2.png").write_bytes(b"hello")
    headers, decoded = open_source(spec, check="header"), open_source(spec)
    assert headers.column("bad").tolist() == [0, 0, CODES["not-an-image"]]
    assert decoded.column("bad").tolist() == [0, CODES["truncated-image"], CODES["not-an-image"]]
    assert not headers.column("perceptual_hash").any() and decoded.column("perceptual_hash")[0]
    assert headers.value("image", 1) == cut and headers.column("width").tolist() == [16, 16, 0]
    with pytest.raises(ValueError, match="check 'heder': one of decode, header is needed"):
        open_source(spec, check="heder")


def test_an_image_that_decodes_and_cannot_be_converted_is_a_bad_sample_of_its_file(tmp_path):
    """Pillow#6706. Found by the index, or in training where it reads headers only."""
    spec = write_set(tmp_path, 3)
    (tmp_path / "images/1.png").write_bytes(png_of_palette(transparent=1))
    assert len(open_source(spec).usable()) == 3
    (tmp_path / "images/1.png").write_bytes(png_of_palette(transparent=300))
    headers, decoded = (
        open_source(spec, check=check, refresh=True) for check in ("header", "decode")
    )
    assert headers.usable().tolist() == [0, 1, 2] and decoded.usable().tolist() == [0, 2]
    (_, where, reason, detail), *_ = decoded.bad_samples()
    assert reason == "unreadable" and detail.startswith("ValueError: ") and ":2" in where
    images = ImageModality(Views(TrainTransform((8, 8)), EvalTransform((8, 8))))
    rows = MicroBatchRequest(0, 0, np.arange(3), np.arange(3), training=True)
    _, report = MicroBatchDataset(headers, [images]).load(rows)
    assert report.bad == [(1, "unreadable", f"{where}: {detail}")]


def test_sizes_are_those_of_the_image_as_shown(tmp_path):
    spec = write_set(tmp_path, 2)
    turned = Image.Exif()
    turned[0x0112] = 6
    for n, kind in enumerate(("JPEG", "PNG")):
        Image.new("RGB", (30, 20), "red").save(tmp_path / f"images/{n}.png", kind, exif=turned)
    for check in ("decode", "header"):
        source = open_source(spec, check=check)
        assert source.column("width").tolist() == [20, 20], check
        assert source.column("height").tolist() == [30, 30], check


def test_perceptual_hash_is_near_for_what_looks_alike(demo):
    y, x = np.mgrid[:240, :320]
    grey = 127 + 60 * np.sin(x / 37) + 60 * np.cos(y / 23 + x / 90)
    waves = Image.fromarray(grey.astype(np.uint8)).convert("RGB")

    def bits(other: Image.Image) -> int:
        return (perceptual_hash(waves) ^ perceptual_hash(other)).bit_count()

    assert bits(waves.resize((100, 75))) <= 4 and bits(waves.point(lambda v: v * 0.7)) <= 4
    assert bits(waves.transpose(Image.Transpose.FLIP_LEFT_RIGHT)) > 20
    assert len(set(demo.column("perceptual_hash").tolist())) > len(demo) / 2


def test_an_index_that_cannot_be_written_says_where(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot write the index of jsonl:.* WYE_CACHE"):
        open_source(write_set(tmp_path, 1), folder=tmp_path / "file")


def resident_bytes() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {
        line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith("Rss")
    }


@pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="resident memory is read from /proc"
)
def test_a_large_index_is_read_without_being_loaded(tmp_path):
    rows = 300_000
    spec = write_large_index(tmp_path, rows)
    before = resident_bytes()
    source = open_source(spec, folder=tmp_path / "index")
    opened = resident_bytes()
    assert len(source) == rows
    # 64 MB on disk. Opening maps pages of the file and makes nothing of its own; 16 MB leave room
    # for what pyarrow sets up once.
    assert sum(opened.values()) - sum(before.values()) < 16 << 20
    for i in np.random.default_rng(0).integers(rows, size=2000).tolist():
        assert source.identity(i) == f"{i:09}"
        assert source.captions(i) == [CAPTIONS[i % len(CAPTIONS)]]
        assert all(source.column(name)[i] is not None for name in numbers_of(("image",)).names)
    # what was read is let go of; the files are 64 MB, of that 25 MB numbers
    assert all(size - before[kind] < 8 << 20 for kind, size in resident_bytes().items())
    usable = source.usable()
    assert len(usable) == rows - rows // 1000 and usable.dtype == np.int64
    bad = ("000000999", f"{tmp_path}/large.jsonl:1000", "missing-file", "made up")
    assert next(source.bad_samples()) == bad and len(pickle.dumps(source)) < 2000
