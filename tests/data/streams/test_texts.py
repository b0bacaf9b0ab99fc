"""The texts of a remote shard that are fetched alone are those of the whole shard."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stores import Faults, http_server, plain_server, put, s3_server
from stream_shards import write_shards

from data.batching.mixture import Mixture
from data.batching.requests import MicroBatchRequest
from data.index.sources import open_source
from data.loader import MicroBatchDataset
from data.modalities.text import TextModality
from data.streams.lengths import StreamTokenCounts
from data.streams.listing import ShardRules
from data.streams.opening import open_stream
from data.streams.several import texts_alone
from data.streams.source import TEXTS
from data.streams.table import BadShard

ROWS, PIXELS = 60, 30_000  # of a shard; bytes of an image


def words(n):
    return f"words {n} " + "more " * (n % 7)


def table(first=0, **columns):
    images = [np.random.default_rng(first + n).bytes(PIXELS) for n in range(ROWS)]
    return {
        "id": [f"{first + n}" for n in range(ROWS)],
        "image": images,
        "caption": [words(first + n) for n in range(ROWS)],
        "width": list(range(ROWS)),
        **columns,
    }


def write(folder, *tables, **how):
    folder.mkdir(exist_ok=True)
    for number, each in enumerate(tables):
        each = each if isinstance(each, pa.Table) else pa.table(each)
        pq.write_table(each, folder / f"{number}.parquet", row_group_size=16, **how)


def bad_texts():
    texts = [words(n).encode() for n in range(ROWS)]
    texts[3:8] = [b"not \xff UTF-8", b"", b"a \0 character", b" ", b"x" * 200_000]
    offsets = np.cumsum([0, *map(len, texts)]).astype(np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(texts))]
    captions = pa.StringArray.from_buffers(ROWS, *buffers[1:])
    ids = [f"{n // 2}" for n in range(ROWS)]  # each twice
    images = [None if n % 5 == 0 else b"no image" for n in range(ROWS)]
    return table(caption=captions, id=ids, image=images)


def of_classes(number):
    features = {"class": {"_type": "ClassLabel", "names": ["sea_lion", "dog", "red fox"]}}
    known = pa.table({"image": table()["image"], "class": [n % 3 for n in range(ROWS)]})
    return known.replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": features}})}
    )


def several():
    return [[words(n), f"again {n}"][: n % 3] if n % 4 else None for n in range(ROWS)]


SETS = {
    "plain": ("", table(), table(100)),
    "filtered": ("?where=width > 20 and width != 30", table(), table(100)),
    "several captions": ("", table(caption=several())),
    "lines": ("?captions=lines", table(caption=[f"{words(n)}\nline {n}" for n in range(ROWS)])),
    "a column": ("?text=said", table(said=[f"said {n}" for n in range(ROWS)])),
    "bytes": ("", table(caption=[words(n).encode() for n in range(ROWS)])),
    "a dictionary": (
        "",
        table(caption=pa.array([words(n % 3) for n in range(ROWS)]).dictionary_encode()),
    ),
    "large and null": (
        "",
        table(
            caption=pa.array([words(n) if n % 3 else None for n in range(ROWS)], pa.large_string())
        ),
    ),
    "bad": ("", bad_texts()),
    "classes": ("", of_classes(0)),
    "named classes": ("?label=width&templates={} at sea", table()),
}


def same(whole, texts, tokenizer):
    """Whatever is asked of texts."""
    assert len(whole) == len(texts)
    every = np.arange(len(whole))
    for i in every.tolist():
        assert texts.captions(i) == whole.captions(i)
        assert texts.identity(i) == whole.identity(i) and texts.where(i) == whole.where(i)
        assert texts.language(i) == whole.language(i)
    for name in ("num_captions", "num_characters"):
        np.testing.assert_array_equal(texts.numbers(name, every), whole.numbers(name, every))
    one, other = (StreamTokenCounts(each, tokenizer, 12, 0) for each in (whole, texts))
    np.testing.assert_array_equal(one.of(every, every, 5, 1, 2), other.of(every, every, 5, 1, 2))
    np.testing.assert_array_equal(one.longest(every, every), other.longest(every, every))
    np.testing.assert_array_equal(one.typical(), other.typical())
    request = MicroBatchRequest(0, 1, every, every, training=True)
    loaded = [
        MicroBatchDataset(pickle.loads(pickle.dumps(each)), [TextModality(tokenizer, 12)])[request]
        for each in (whole, texts)
    ]
    assert loaded[0].keys() == loaded[1].keys()
    assert all((loaded[0][name] == loaded[1][name]).all() for name in loaded[0])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WYE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("what", SETS)
def test_texts_are_those_of_whole_shards(what, tmp_path, tokenizer):
    options, *tables = SETS[what]
    write(tmp_path / "shards", *tables)
    size = sum(file.stat().st_size for file in (tmp_path / "shards").iterdir())
    with http_server(tmp_path / "shards", faults := Faults()) as url:
        spec = f"stream:{url}/{{0..{len(tables) - 1}}}.parquet{options}"
        whole, _ = open_stream(spec, cache_bytes=10**9)
        texts = whole.texts_alone
        assert texts is whole.texts_alone is texts.texts_alone is not whole
        sent = faults.sent
        texts.captions(0), texts.captions(len(texts) - 1)
        assert faults.sent - sent == texts.taken_counts()["stream_bytes"] > 0
        if what not in (
            "bad",
            "classes",
        ):  # whose images are small, or next to nothing else is there
            assert faults.sent - sent < 0.1 * size
        same(whole, texts, tokenizer)
        # fetched once
        assert texts.taken_counts()["stream_bytes"] == size  # of both, which was the whole shards
        assert not whole.taken_counts()["stream_bytes"]


@pytest.mark.parametrize("how", ["s3", "no ranges"])
def test_any_store_has_texts(how, tmp_path, tokenizer, monkeypatch):
    write(tmp_path / "shards", table(), table(100))
    if how == "no ranges":
        with plain_server(tmp_path / "shards") as url:
            whole, _ = open_stream(f"stream:{url}/{{0..1}}.parquet", cache_bytes=10**9)
            same(whole, whole.texts_alone, tokenizer)
        return
    with s3_server() as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        for file in (tmp_path / "shards").iterdir():
            put(variables, f"shards/{file.name}", file.read_bytes())
        whole, _ = open_stream("stream:s3://shards/{0..1}.parquet", cache_bytes=10**9)
        same(whole, whole.texts_alone, tokenizer)


def cut(content):
    return content[: len(content) // 2]


def hurt_texts(content):
    """The second page of texts."""
    metadata = pq.read_metadata(pa.BufferReader(content))
    place = metadata.row_group(1).column(2).data_page_offset
    return content[:place] + bytes(20) + content[place + 20 :]


def joined(content):
    return content + content


@pytest.mark.parametrize("damage", [cut, hurt_texts, joined])
def test_of_a_damaged_shard_all_is_read(damage, tmp_path, tokenizer):
    write(tmp_path / "shards", table(), table(100), compression="none", use_dictionary=False)
    file = tmp_path / "shards" / "0.parquet"
    file.write_bytes(damage(file.read_bytes()))
    with http_server(tmp_path / "shards") as url:
        whole, _ = open_stream(f"stream:{url}/{{0..1}}.parquet", cache_bytes=10**9)
        texts = whole.texts_alone
        try:
            whole.captions(0)
        except ValueError as error:
            with pytest.raises(ValueError) as found:
                texts.captions(0)
            assert str(found.value) == str(error)
            return
        same(whole, texts, tokenizer)
        assert texts.taken_counts()["stream_bytes"] > file.stat().st_size


def test_a_shard_that_changed_or_is_gone_is_the_same_error(tmp_path):
    write(tmp_path / "shards", table())
    with http_server(tmp_path / "shards") as url:
        stream, _ = open_stream(f"stream:{url}/0.parquet", cache_bytes=10**9)
        texts = stream.texts_alone
        write(tmp_path / "shards", table(7))
        with pytest.raises(BadShard, match="0.parquet: the shard has changed"):
            texts.captions(0)
        (tmp_path / "shards" / "0.parquet").unlink()
        with pytest.raises(BadShard, match="0.parquet: the shard is not there any more"):
            texts.captions(0)


def test_a_shard_that_changes_while_its_texts_are_fetched_is_refused(tmp_path, monkeypatch):
    write(tmp_path / "shards", table())
    with http_server(tmp_path / "shards", faults := Faults()) as url:
        texts = open_stream(f"stream:{url}/0.parquet", cache_bytes=10**9)[0].texts_alone
        asked = faults.asked

        def changed(what):
            if what.startswith("HEAD") and faults.requests[-1].startswith("GET"):  # after the parts
                write(tmp_path / "shards", table(7))
            return asked(what)

        texts.held(0, needed=False)[0].close()  # nothing is wrong yet
        texts.cache = replace(texts.cache, folder=tmp_path / "empty")
        faults.requests.append("HEAD")
        monkeypatch.setattr(faults, "asked", changed)
        with pytest.raises(BadShard, match="0.parquet: the shard has changed"):
            texts.captions(0)


@pytest.mark.parametrize("told", [50, 70])
def test_a_miscounted_shard_is_left_out_alike(told, tmp_path, tokenizer):
    write(tmp_path / "shards", table(), table(100))
    counts = {"0.parquet": told, "1.parquet": ROWS}
    (tmp_path / "shards" / "sizes.json").write_text(json.dumps(counts))
    with http_server(tmp_path / "shards") as url:
        spec = f"stream:{url}/{{0..1}}.parquet"
        with pytest.raises(BadShard, match=f"0.parquet: has 60 samples, and {told} were told"):
            open_stream(spec)[0].texts_alone.captions(0)
        whole, _ = open_stream(spec, rules=ShardRules(drops=True))
        same(whole, whole.texts_alone, tokenizer)
        assert whole.texts_alone.captions(0) == [] != whole.texts_alone.captions(told)


def test_a_try_that_was_ended_is_begun_anew(tmp_path, tokenizer, cache):
    write(tmp_path / "shards", table())
    with http_server(tmp_path / "shards") as url:
        whole, _ = open_stream(f"stream:{url}/0.parquet", cache_bytes=10**9)
        texts = whole.texts_alone
        entry = texts.cache._whole(whole.table.entry(0) + TEXTS)
        part = entry.with_suffix(".part")
        part.mkdir(parents=True)
        (part / "shard.parquet.texts").write_bytes(b"PAR1 and half of it")
        same(whole, texts, tokenizer)
        assert {file.name for file in entry.iterdir()} >= {"shard.parquet", "index"}
        assert not (entry / "shard.parquet.texts").exists()
        assert sum(f.stat().st_size for f in entry.rglob("*") if f.is_file()) < 100_000


def test_the_limit_of_the_cache_holds(tmp_path):
    write(tmp_path / "shards", *(table(100 * n) for n in range(6)))
    with http_server(tmp_path / "shards") as url:
        texts = open_stream(f"stream:{url}/{{0..5}}.parquet?mixed=1", cache_bytes=10**8)[
            0
        ].texts_alone
        room = 3 * (ROWS * 1024 + 20_000)
        texts.cache = replace(texts.cache, limit_bytes=room)
        for shard in range(6):
            texts.keep([shard])
            assert texts.captions(ROWS * shard) == [words(100 * shard)]
            assert texts.cache.usage() <= room


def test_no_footer_is_read_again_while_there_is_no_room(tmp_path):
    write(tmp_path / "shards", table(), table(100))
    with http_server(tmp_path / "shards", faults := Faults()) as url:
        whole, _ = open_stream(f"stream:{url}/{{0..1}}.parquet?mixed=1", cache_bytes=10**9)
        texts, room = whole.texts_alone, whole.cache.limit_bytes
        texts.keep([0, 1])
        texts.captions(0)
        texts.cache = replace(texts.cache, limit_bytes=texts.cache.usage() + 10_000)
        assert not texts.prefetch(1, lambda name: 0.0)
        asked = len(faults.requests)
        assert not texts.prefetch(1, lambda name: 0.0)
        assert len(faults.requests) == asked
        texts.cache = replace(texts.cache, limit_bytes=room)
        assert texts.prefetch(1, lambda name: 0.0)
        assert texts.captions(ROWS) == [words(100)]


def test_what_is_on_a_disk_and_tars_stay_as_they_are(tmp_path):
    write(tmp_path / "shards", table())
    pattern = write_shards(tmp_path / "tars", [3, 4])
    local, _ = open_stream(f"stream:{tmp_path}/shards/0.parquet")
    assert texts_alone(local) is local
    with http_server(tmp_path) as url:
        tars, _ = open_stream(f"stream:{url}/tars/{pattern}", cache_bytes=10**9)
        assert texts_alone(tars) is tars
        remote, _ = open_stream(f"stream:{url}/shards/0.parquet", cache_bytes=10**9)
        known = open_source("demo")
        both = texts_alone(Mixture([known, remote]))
        assert both.sources == (known, remote.texts_alone)
        assert texts_alone(known) is known
        assert both.captions(len(known) + 2) == [words(2)]
        sounds, _ = open_stream(
            f"stream:{url}/shards/0.parquet", (("image", "audio"),), cache_bytes=10**9
        )
        assert texts_alone(sounds) is sounds
