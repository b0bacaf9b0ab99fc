"""The captions that img2dataset writes beside a remote tar are read in the place of its members."""

import io
import json
import tarfile
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from stores import Faults, http_server

from data.bad_samples import BadSample
from data.streams.listing import ShardRules
from data.streams.opening import open_stream
from data.streams.source import INDEX_BYTES
from data.streams.table import BadShard

ROWS, PIXELS = 40, 96


def picture(n):
    pixels = np.random.default_rng(n).integers(0, 255, (PIXELS, PIXELS, 3), np.uint8)
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "png")
    return written.getvalue()


def rows_of(shard):
    """One in seven could not be fetched, one has no caption and one has an image that is none."""
    for n in range(ROWS):
        caption = None if n == 9 else f"words {shard} {n} {'more ' * (n % 5)}"
        yield {
            "key": f"{shard:05d}{n:04d}",
            "url": f"http://images/{shard}/{n}",
            "caption": caption,
            "status": "failed_to_download" if n % 7 == 6 else "success",
            "width": n,
            "image": b"no image" if n == 11 else picture(n),
        }


def write(folder, shards=2, change=lambda row: row, beside=True):
    """As img2dataset does; `change`: of a row, in the parquet file."""
    folder.mkdir(exist_ok=True)
    sizes = {}
    for shard in range(shards):
        rows, name = [*rows_of(shard)], f"{shard:05d}"
        with tarfile.open(folder / f"{name}.tar", "w") as tar:
            for row in (row for row in rows if row["status"] == "success"):
                told = {key: value for key, value in row.items() if key != "image"}
                members = {"png": row["image"], "json": json.dumps(told).encode()}
                if row["caption"] is not None:
                    members["txt"] = row["caption"].encode()
                for ending, content in members.items():
                    member = tarfile.TarInfo(f"{row['key']}.{ending}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        told = [{key: value for key, value in row.items() if key != "image"} for row in rows]
        told = [row for row in map(change, told) if row is not None]
        if beside:
            pq.write_table(pa.Table.from_pylist(told), folder / f"{name}.parquet")
        sizes[f"{name}.tar"] = sum(row["status"] == "success" for row in rows)
    (folder / "sizes.json").write_text(json.dumps(sizes))
    return "{00000..%05d}.tar" % (shards - 1)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WYE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def read(source):
    for i in range(len(source)):
        yield source.identity(i), source.captions(i)


@pytest.mark.parametrize("options", ["", "?where=width > 12", "?captions=lines"])
def test_captions_beside_tars_are_those_of_their_members(options, tmp_path):
    pattern = write(tmp_path / "shards")
    size = sum(file.stat().st_size for file in (tmp_path / "shards").glob("*.tar"))
    with http_server(tmp_path / "shards", faults := Faults()) as url:
        whole, _ = open_stream(f"stream:{url}/{pattern}{options}", cache_bytes=10**9)
        sent = faults.sent
        texts = whole.texts_alone
        assert texts is not whole and len(texts) == len(whole)
        found = [*read(texts)]
        assert faults.sent - sent < 0.2 * size  # with the first members of a tar
        assert 0 < texts.taken_counts()["stream_bytes"] < 0.05 * size
        assert found == [*read(whole.checking_texts)] == [*read(whole)]
        assert any("more" in caption for _, captions in found for caption in captions)


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row if row["key"] != "000010003" else {**row, "caption": "of another"},
        lambda row: {**row, "key": "9" + row["key"][1:]} if row["width"] == 22 else row,
    ],
)
def test_other_captions_beside_a_tar_end_the_run_that_trained_on_them(change, tmp_path):
    """Where it is not seen in the first members of the first tar, it is in the tar itself."""
    pattern = write(tmp_path / "shards", change=change)
    with http_server(tmp_path / "shards") as url:
        whole, _ = open_stream(f"stream:{url}/{pattern}", cache_bytes=10**9)
        assert whole.texts_alone is not whole
        with pytest.raises(BadShard, match=r"0000\d.tar: sample .*texts=members"):
            list(read(whole.checking_texts))
        own, _ = open_stream(f"stream:{url}/{pattern}?texts=members", cache_bytes=10**9)
        assert own.texts_alone is own.checking_texts is own
        assert own.captions(3) == ["words 0 3 more more more "]


def write_beside(folder, shard, change=lambda row: row):
    rows = [{key: value for key, value in row.items() if key != "image"} for row in rows_of(shard)]
    pq.write_table(pa.Table.from_pylist([*map(change, rows)]), folder / f"{shard:05d}.parquet")


def test_captions_that_were_mended_beside_a_tar_are_fetched_anew(tmp_path):
    """The tar is the same, and its captions and what was found of them lie in the cache."""
    pattern = write(tmp_path / "shards")

    def wrong(row):
        return {**row, "caption": "of another"} if row["width"] == 22 else row

    with http_server(tmp_path / "shards") as url:
        for change, agrees in ((wrong, False), (lambda row: row, True), (wrong, False)):
            write_beside(tmp_path / "shards", 1, change)
            whole, _ = open_stream(f"stream:{url}/{pattern}", cache_bytes=10**9)
            assert whole.texts_alone is not whole
            assert ([*read(whole.texts_alone)] == [*read(whole)]) == agrees
            if agrees:
                assert [*read(whole.checking_texts)] == [*read(whole)]
            else:
                with pytest.raises(BadShard, match="write that file anew"):
                    list(read(whole.checking_texts))


@pytest.mark.parametrize(
    "how",
    [
        {"beside": False},
        {"change": lambda row: {**row, "caption": "anew"}},  # seen in the first members
        {"change": lambda row: {**row, "key": f"a.{row['key']}"}},
        {"change": lambda row: {"key": row["key"], "status": row["status"]}},
        {"change": lambda row: row if row["width"] else None},
    ],
)
def test_tars_are_read_as_a_whole_where_nothing_else_is_sure(how, tmp_path):
    pattern = write(tmp_path / "shards", **how)
    with http_server(tmp_path / "shards") as url:
        whole, _ = open_stream(f"stream:{url}/{pattern}", cache_bytes=10**9)
        assert whole.texts_alone is whole.checking_texts is whole


def test_a_tar_with_nothing_beside_it_is_read_among_others(tmp_path):
    """Also a damaged one: what it lacks is left out where its images are, and has captions."""
    pattern = write(tmp_path / "shards", shards=3)
    (tmp_path / "shards/00001.parquet").unlink()
    cut = tmp_path / "shards/00002.tar"
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    with http_server(tmp_path / "shards") as url:
        whole, _ = open_stream(f"stream:{url}/{pattern}", cache_bytes=10**9)
        texts, checked = whole.texts_alone, whole.checking_texts
        found = [[*read(each)] for each in (texts, checked)]
        count = int(whole.table.counts[0])
        assert found[0][: 2 * count] == found[1][: 2 * count]
        cut_off = [n for n in range(len(whole)) if found[1][n][1] != found[0][n][1]]
        assert cut_off and min(cut_off) > 2 * count
        for n in cut_off:
            with pytest.raises(BadSample, match="damaged|announced|cut off"):
                checked.value("image", n)


def test_captions_of_classes_are_those_of_members(tmp_path):
    folder = tmp_path / "store" / "shards"
    folder.mkdir(parents=True)
    with tarfile.open(folder / "0.tar", "w") as tar:
        for n in range(4):
            for ending, content in (("png", picture(n)), ("cls", b"1")):
                member = tarfile.TarInfo(f"{n}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    beside = {"key": [f"{n}" for n in range(4)], "caption": pa.nulls(4, pa.string())}
    pq.write_table(pa.table(beside), folder / "0.parquet")
    (folder / "classnames.txt").write_text("cat\ndog\n")
    with http_server(tmp_path / "store") as url:
        whole, _ = open_stream(f"stream:{url}/shards/0.tar", cache_bytes=10**9)
        assert whole.texts_alone is whole.checking_texts is whole
        assert "a photo of a dog" in whole.captions(0)


def test_a_shard_that_is_left_out_is_not_compared(tmp_path):
    """It has a sample more than was told, and others' captions from there on."""
    pattern = write(tmp_path / "shards")
    with tarfile.open(tmp_path / "shards/00001.tar") as tar:
        members = [(m.name, tar.extractfile(m).read()) for m in tar.getmembers()]
    members[15:15] = [("extra.png", picture(3)), ("extra.txt", b"extra")]
    with tarfile.open(tmp_path / "shards/00001.tar", "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    with http_server(tmp_path / "shards") as url:
        spec = f"stream:{url}/{pattern}"
        whole, _ = open_stream(spec, cache_bytes=10**9, rules=ShardRules(drops=True))
        checked = whole.checking_texts
        assert checked is not whole and [*read(checked)] == [*read(whole)]
        with pytest.raises(BadSample, match="samples were announced"):
            checked.value("image", len(whole) - 1)


def test_nothing_is_fetched_again_while_there_is_no_room(tmp_path):
    pattern = write(tmp_path / "shards")
    with http_server(tmp_path / "shards", faults := Faults()) as url:
        whole, _ = open_stream(f"stream:{url}/{pattern}?mixed=1", cache_bytes=10**9)
        texts, room = whole.texts_alone, whole.cache.limit_bytes
        texts.keep([0, 1])
        texts.captions(0)
        texts.cache = replace(texts.cache, limit_bytes=texts.cache.usage() + 10_000)
        last = len(texts) - 1
        first = int(texts.table.counts[0])
        assert not texts.prefetch(1, lambda name: 0.0)
        sent, asked = faults.sent, len(faults.requests)
        assert not texts.prefetch(1, lambda name: 0.0)
        assert (faults.sent, len(faults.requests)) == (sent, asked)
        texts.cache = replace(texts.cache, limit_bytes=room)
        assert texts.prefetch(1, lambda name: 0.0)
        for i in (first, last):
            assert texts.captions(i) == whole.captions(i)


def test_a_tar_that_must_be_read_whole_is_asked_for_no_captions_again(tmp_path):
    pattern = write(tmp_path / "shards")
    (tmp_path / "shards/00001.parquet").write_bytes(b"no parquet file")
    with http_server(tmp_path / "shards", faults := Faults()) as url:
        whole, _ = open_stream(f"stream:{url}/{pattern}?mixed=1", cache_bytes=10**9)
        texts = whole.texts_alone
        texts.keep([0, 1])
        texts.captions(0)
        size = int(whole.table.sizes[1]) + int(whole.table.counts[1]) * INDEX_BYTES
        texts.cache = replace(texts.cache, limit_bytes=size)
        assert not texts.prefetch(1, lambda name: 0.0)
        asked = len(faults.requests)
        assert not texts.prefetch(1, lambda name: 0.0)
        assert len(faults.requests) == asked
