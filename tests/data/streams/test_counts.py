"""Counts of shards equal the rows that the formats give, whatever they are taken from."""

import json
import shutil
import sys
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stores import Faults, http_server, put, s3_server

from data.formats.rows import Row
from data.formats.webdataset import WebdatasetFormat
from data.identity import Identity
from data.stored.kinds import STORED
from data.stored.record import StoredFile
from data.streams import counts as streams_counts
from data.streams.counts import counts_of, identities_of
from data.streams.opening import open_stream

sys.path.insert(0, str(Path(__file__).parents[1]))
from bad_sets import add, encoded_image  # noqa: E402

IMAGE = encoded_image()
# names of members -> samples
SHARDS = (
    ([], 0),
    (["a.jpg", "a.txt", "b.jpg", "b.txt"], 2),
    (["a.jpg", "a.seg.png", "a.txt", ".hidden.jpg", "__x__/a.jpg", "b.txt"], 2),
    (["v_1.20.jpg", "v_1.20.txt", "v_1.21.jpg", "v_1.21.txt", "v_1.22.xyz"], 2),
    (["a.jpg", "a.txt", "a.jpg", "a.txt", "a.1.jpg", "a.1.txt"], 3),
    ([f"{n}{end}" for n in range(70) for end in (".jpg", ".txt", ".json")], 70),
)


@pytest.fixture
def served(tmp_path):
    folder = tmp_path / "served"
    folder.mkdir()
    return folder


def write_tar(file: Path, names: list[str]) -> None:
    with tarfile.open(file, "w") as tar:
        for name in names:
            content = {".jpg": IMAGE, ".json": b"{}"}.get(Path(name).suffix, b"some words")
            add(tar, name, content)


def write_joined(file: Path, *parts: Path) -> None:
    """As `cat` does it."""
    file.write_bytes(b"".join(part.read_bytes() for part in parts))


def counted(names: list[str], kept: Path | None = None) -> list[int]:
    return counts_and_sizes(names, kept)[0].tolist()


def counts_and_sizes(names, kept=None):
    found = identities_of(names, shown=False, limit_s=60)
    sizes, keys = (
        np.array([getattr(each, n) for each in found], np.int64) for n in ("size", "key")
    )
    keys = np.maximum(keys, 1)  # also of those that are not there
    return counts_of(names, sizes, keys, kept, shown=False, limit_s=60), sizes


def test_tars_are_counted_as_their_format_reads_them(served):
    for number, (names, _) in enumerate(SHARDS):
        write_tar(served / f"{number}.tar", names)
    damaged = (served / "5.tar").read_bytes()
    (served / "6.tar").write_bytes(damaged[: len(damaged) // 2])
    (served / "7.tar").write_bytes(b"")
    (served / "8.tar").write_bytes(bytes(range(256)) * 100)
    write_joined(served / "9.tar", served / "1.tar", served / "5.tar")
    local = [str(served / f"{number}.tar") for number in range(10)]
    with http_server(served, Faults(seed=1, cuts=0.2, refusals=0.2)) as url:
        counts, sizes = counts_and_sizes([f"{url}/{number}.tar" for number in range(10)])
    assert counts[9] == 2 + 70
    assert counts.dtype == sizes.dtype == np.int64
    assert sizes.tolist() == [Path(file).stat().st_size for file in local]
    assert counts[: len(SHARDS)].tolist() == [count for _, count in SHARDS]
    assert counted(local) == counts.tolist()
    # also of damaged ones, and of the one without a byte
    format = WebdatasetFormat("::".join(local))
    rows = [sum(isinstance(row, Row) for row in format.rows(part)) for part in format.parts()]
    assert counts.tolist() == rows
    (served / "6.tar").write_bytes(b"\x1f\x8b and so on")
    with pytest.raises(ValueError, match="6.tar is compressed"):
        counted(local)
    (served / "6.tar").unlink()
    with pytest.raises(FileNotFoundError, match="6.tar"):
        counted(local)


def test_parquet_is_counted_by_its_footers(served):
    for number in range(3):
        table = pa.table({"text": ["words"] * 100 * number})
        # the last footer is larger than what is read first
        pq.write_table(table, served / f"{number}.parquet", row_group_size=max(number % 2, 1))
    (served / "3.parquet").write_bytes(b"damaged")
    pq.write_table(pa.table({"text": ["words"] * 5000}), served / "4.parquet", row_group_size=1)
    assert (served / "4.parquet").stat().st_size > 1 << 17
    wanted = [0, 100, 200, 1, 5000]
    with http_server(served, faults := Faults()) as url:
        assert counted([f"{url}/{number}.parquet" for number in range(5)]) == wanted
    assert faults.sent < sum(file.stat().st_size for file in served.iterdir())
    assert counted([str(served / f"{number}.parquet") for number in range(5)]) == wanted


def test_ten_thousand_shards_of_a_sizes_json_ask_for_it_alone(served, tmp_path):
    names = [f"{number:05}.tar" for number in range(10_000)]
    (served / "sizes.json").write_text(json.dumps({name: n for n, name in enumerate(names)}))
    with http_server(served, faults := Faults(cuts=1, most=2)) as url:
        for signature in ("one", "another"):
            signed = [f"{url}/{name}?Signature={signature}" for name in names]
            keys = np.full(10_000, Identity(1).key)
            counts = counts_of(signed, keys, keys, tmp_path, shown=False)
            assert counts.tolist() == list(range(10_000))
        asked = [each.rpartition("=")[2] for each in faults.requests]
        assert asked == ["one"] * 3 + ["another"]


def test_what_was_counted_is_of_the_modalities_that_were_registered(tmp_path, monkeypatch):
    """Members without a text and an image of that name are one sample if one of them is read."""
    monkeypatch.setenv("WYE_CACHE", str(tmp_path / "cache"))
    pairs, names = (
        (("near", "far"),),
        [f"{n}.{end}.png" for n in range(4) for end in ("near", "far")],
    )
    write_tar(tmp_path / "a.tar", names)
    spec = f"stream:{tmp_path}/a.tar"
    assert len(open_stream(spec)[0]) == len(names)
    for name in pairs[0]:
        monkeypatch.setitem(STORED, name, StoredFile(name, endings=(f"{name}.png",)))
    stream, _ = open_stream(spec, pairs)
    assert len(stream) == 4 and stream.value("far", 3) == stream.value("near", 3) == b"some words"
    monkeypatch.delitem(STORED, "near")
    monkeypatch.delitem(STORED, "far")
    assert len(open_stream(spec)[0]) == len(names)


def test_what_was_counted_is_kept_until_a_shard_changes(served, tmp_path):
    names = ["0.tar", "1.tar", "2.parquet", "3.parquet"]

    def write(number, samples):
        file = served / names[number]
        if file.suffix == ".tar":
            write_tar(file, [f"{n}{end}" for n in range(samples) for end in (".jpg", ".txt")])
        else:
            pq.write_table(pa.table({"text": ["words"] * samples}), file)

    for number in range(4):
        write(number, 5)
    with http_server(served, faults := Faults()) as url:
        for where in (url, str(served)):
            of = [f"{where}/{name}" for name in names]
            for number, samples in ((0, 9), (2, 3), (1, 2)):
                before = counted(of, tmp_path)
                faults.requests.clear()
                assert counted(of, tmp_path) == before
                assert not any(
                    each.startswith("GET") and "." in each
                    for each in faults.requests
                    if "json" not in each
                )
                write(number, samples)
                before[number] = samples
                assert counted(of, tmp_path) == before
                read = {each.split()[1] for each in faults.requests if each.startswith("GET")}
                assert {f"/{names[number]}"} >= {each for each in read if "json" not in each}
            write(0, 5), write(2, 5), write(1, 5)
            (kept,) = (file for file in tmp_path.glob("*.npy") if np.load(file).shape == (2, 4))
            kept.write_bytes(kept.read_bytes()[:100])  # of a full disk, say
            assert counted(of, tmp_path) == [5] * 4
            kept.unlink()


def test_statistics_of_img2dataset(served):
    """One shard without them is counted itself; a folder with a sizes.json needs none."""
    (served / "more").mkdir()
    for number in range(3):
        write_tar(served / f"{number}.tar", ["a.jpg", "a.txt"])
        with (served / f"{number}.tar").open("ab") as file:  # as large as one of 91 samples
            file.write(bytes(1 << 16))
        shutil.copy(served / f"{number}.tar", served / "more")
    for number in range(2):
        stats = {"count": 100, "successes": 90 + number}
        (served / f"{number}_stats.json").write_text(json.dumps(stats))
    (served / "more" / "sizes.json").write_text('{"0.tar": 7, "1.tar": 0}')
    with http_server(served) as url:
        shards = ["more/1.tar", "0.tar", "1.tar", "more/0.tar", "2.tar"]
        assert counted([f"{url}/{shard}?Signature=x" for shard in shards]) == [0, 90, 91, 7, 1]


def test_stores_without_files_of_counts(served):
    """S3 forbids to read what is not there to those who may not list."""
    for number in range(3):
        write_tar(served / f"{number}.tar", ["a.jpg", "a.txt"])
    with http_server(served, Faults(missing=403)) as url:
        assert counted([f"{url}/{number}.tar" for number in range(3)]) == [1, 1, 1]
        with pytest.raises(PermissionError, match="/3.tar"):
            counted([f"{url}/{number}.tar" for number in range(4)])
    with s3_server() as variables, pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        for number in range(3):
            content = (served / f"{number}.tar").read_bytes()
            put(variables, f"bucket/of shards/{number}.tar", content)
        names = [f"s3://bucket/of shards/{number}.tar" for number in range(3)]
        assert counted(names) == [1, 1, 1]
        put(variables, "bucket/of shards/sizes.json", b'{"0.tar": 1, "1.tar": 2, "2.tar": 3}')
        assert counted(names) == [1, 2, 3]


@pytest.mark.parametrize("name", ["sizes.json", "0_stats.json"])
def test_a_file_of_counts_is_read_as_far_as_it_can_be_one(served, name, monkeypatch):
    """Of a hole of gigabytes, and of a body without an end, no more."""
    monkeypatch.setattr(streams_counts, "SIZES_LIMIT", 1 << 20)
    write_tar(served / "0.tar", ["a.jpg", "a.txt"])
    with (served / name).open("wb") as file:
        file.truncate(6 << 30)
    faults = Faults()
    with http_server(served, faults) as url:
        for where in (str(served), url):
            with pytest.raises(ValueError, match=f"{name}: has over 1.0 MiB, and no more is read"):
                counted([f"{where}/0.tar"])
    assert faults.sent < 64 << 20  # what was on its way


@pytest.mark.parametrize("name", ["sizes.json", "0_stats.json"])
def test_a_file_of_counts_tells_no_more_than_its_shard_can_hold(served, name):
    write_tar(served / "0.tar", ["a.jpg", "a.txt"])
    most = (served / "0.tar").stat().st_size // 512
    key = {"sizes.json": "0.tar", "0_stats.json": "successes"}[name]
    for given in (most + 1, 2_000_000_000, -5):
        (served / name).write_text(json.dumps({key: given}))
        with pytest.raises(
            ValueError, match=f"{name}: '{key}' is {given}; .* of 0 to {most},.*remove"
        ):
            counted([str(served / "0.tar")])
    (served / name).write_text(json.dumps({key: most}))
    assert counted([str(served / "0.tar")]) == [most]


@pytest.mark.parametrize("name", ["sizes.json", "0_stats.json"])
def test_what_is_wrong_with_a_file_of_counts(served, name):
    key = {"sizes.json": "0.tar", "0_stats.json": "successes"}[name]
    for content in (
        *(f'{{"{key}": {given}}}' for given in ("-1", "1.5", "true", "null", '"3"', "1e3", "[]")),
        "{}",
        "[]",
        "{",
        "[" * 100_000,
        "NaN",
        '{"other": 3}',
    ):
        (served / name).write_text(content)
        with pytest.raises(ValueError, match=f"{name}.*remove it"):
            counted([str(served / "0.tar")])
