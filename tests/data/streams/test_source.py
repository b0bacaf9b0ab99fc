"""A stream gives what an index of the same shards gives."""

import json
import pickle
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stores import Faults, http_server
from stream_shards import write_shards, write_tar

from common.secrets import OF_SPECS
from data.bad_samples import BadSample
from data.batching.requests import MicroBatchRequest
from data.index.sources import open_source
from data.loader import MicroBatchDataset
from data.modalities.lengths import token_counts
from data.modalities.text import TextModality
from data.streams.lengths import StreamTokenCounts
from data.streams.opening import OPTIONS, of_shards_known, open_stream
from data.streams.table import BadShard

sys.path.insert(0, str(Path(__file__).parents[1]))
import bad_films  # noqa: E402

COUNTS = [23, 17, 1, 30, 9]


@pytest.fixture(params=[".tar", ".parquet"])
def both(request, tmp_path):
    """A stream and an index of the same shards."""
    pattern = write_shards(tmp_path / "shards", COUNTS, request.param)
    kind = {".tar": "webdataset", ".parquet": "parquet"}[request.param]
    stream, mixed = open_stream(f"stream:{tmp_path}/shards/{pattern}?mixed=3")
    assert mixed == 3
    return stream, open_source(f"{kind}:{tmp_path}/shards/{pattern}", check="header")


def test_samples_are_those_of_an_index(both):
    stream, known = both
    assert len(stream) == len(known) == sum(COUNTS)
    again = pickle.loads(pickle.dumps(stream))
    for i in np.random.default_rng(0).permutation(len(known)).tolist():
        assert stream.value("image", i) == again.value("image", i) == known.value("image", i)
        assert stream.captions(i) == known.captions(i)
        assert stream.content_hash("image", i) == known.content_hash("image", i)
        assert stream.identity(i) == known.identity(i) and stream.where(i) == known.where(i)
    index = np.array([0, 79, 22, 23, 40, 41])
    for name in ("width", "num_captions", "num_characters", "complexity"):
        np.testing.assert_array_equal(again.numbers(name, index), known.numbers(name, index))


def test_token_counts_are_those_of_an_index(both, tokenizer, tmp_path):
    stream, known = both
    every = np.arange(len(known))
    expected = token_counts(known, every, tokenizer, 9, tmp_path / "counts")
    visited = np.array([79, 3, 40, 41, 0, 22])
    for _ in range(2):  # counted, then read
        counts = StreamTokenCounts(stream, tokenizer, 9, first_shard=1)
        found = counts.of(visited, visited, 5, 1, 2)
        np.testing.assert_array_equal(found, expected.of(visited, visited, 5, 1, 2))
        longest = counts.longest(visited, visited)
        np.testing.assert_array_equal(longest, expected.longest(visited, visited))
    assert len(counts.typical()) == COUNTS[1]


def test_some_shards_with_fewer_samples_each(both):
    stream, known = both
    some = stream.of_shards(np.array([0, 3]), np.array([23, 4]))
    assert len(some) == 27 and some.fingerprint() != stream.fingerprint()
    assert some.captions(26) == known.captions(23 + 17 + 1 + 3)


def test_a_step_lets_go_of_shards_that_are_over(both):
    stream, _ = both
    for i in (0, 23, 45):
        stream.captions(i)
    assert set(stream._open) == {1, 3}  # nobody has said what is needed
    stream.keep([0, 1, 3])
    for i in (0, 23, 45):
        stream.captions(i)
    assert set(stream._open) == {0, 1, 3}
    stream.keep([1, 4])
    assert set(stream._open) == {1}
    with stream.opened(1), stream.opened(0):
        pass
    assert set(stream._open) == {1}


def test_bad_and_missing_samples_are_found_when_they_are_read(tmp_path, tokenizer):
    folder = tmp_path / "shards"
    write_shards(folder, [4, 4, 4])
    rows = [{"id": "a", "image": b"no image", "text": "one"}]
    rows += [{"id": "b", "image": b"no image", "text": ""}]
    write_tar(folder / "00001.tar", rows)
    content = (folder / "00002.tar").read_bytes()
    (folder / "00002.tar").write_bytes(content[: content.rindex(b".png") + 600])
    (folder / "sizes.json").write_text(
        json.dumps({f"{n:05d}.tar": count for n, count in enumerate([4, 2, 6])})
    )
    stream, _ = open_stream(f"stream:{folder}/{{00000..00002}}.tar")
    assert len(stream) == 12
    reasons = []
    for i in range(12):
        try:
            stream.value("image", i)
            reasons.append("")
        except BadSample as error:
            reasons.append(error.reason)
            assert stream.where(i)
    assert reasons[:6] == [""] * 4 + ["not-an-image", "empty-caption"]
    assert reasons[6:9] == [""] * 3 and reasons[-1] == "truncated-archive"
    # left out on the side of the texts, too
    dataset = MicroBatchDataset(stream, [TextModality(tokenizer, 8)])
    index = np.array([0, 5, 11])
    found = dataset[MicroBatchRequest(0, 0, index, np.arange(3), training=True)]
    assert found["text_index"].tolist() == [0, -6, -12]


def test_remote_shards_are_fetched_once_and_evicted(tmp_path, monkeypatch):
    monkeypatch.setenv("WYE_CACHE", str(tmp_path / "cache"))
    pattern = write_shards(tmp_path / "shards", [40] * 8)
    size = (tmp_path / "shards" / "00000.tar").stat().st_size
    faults = Faults()
    with http_server(tmp_path / "shards", faults) as url:
        spec = f"stream:{url}/{pattern}?mixed=2"
        with pytest.raises(ValueError, match="mixed=1"):
            open_stream(spec, cache_bytes=int(3.4 * size))
        stream, _ = open_stream(spec, cache_bytes=int(4.9 * (size + 40 * 1024)))
        known = open_source(f"webdataset:{tmp_path}/shards/{pattern}", check="header")
        for shard in range(8):
            stream.keep([shard - 1, shard])
            for i in range(40 * shard, 40 * shard + 40):
                assert stream.value("image", i) == known.value("image", i)
            assert stream.cache.usage() <= stream.cache.limit_bytes
        counted = stream.taken_counts()
        assert counted["stream_misses"] == 8 and counted["stream_bytes"] >= 8 * size * 0.8
        whole = [r for r in faults.requests if r.startswith("GET") and ".tar" in r]
        assert len(whole) == 8
        asked = len(faults.requests)
        pickle.loads(pickle.dumps(stream)).value("image", 40 * 7)  # a reader beside
        assert len(faults.requests) == asked
        stream.keep([])
        stream.value("image", 0)  # long gone
        assert stream.taken_counts()["stream_misses"] == 1


def test_a_shard_that_is_longer_than_announced_fills_no_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WYE_CACHE", str(tmp_path / "cache"))
    pattern = write_shards(tmp_path / "shards", COUNTS[:2], ".tar")
    with http_server(tmp_path / "shards", faults := Faults()) as url:
        stream, _ = open_stream(f"stream:{url}/{pattern}", cache_bytes=2_000_000)
        faults.more = 256 << 20
        with pytest.raises(BadShard, match="0.tar: the shard has changed"):
            stream.captions(0)
    there = (file for file in (tmp_path / "cache" / "streams").rglob("*") if file.is_file())
    assert sum(file.stat().st_size for file in there) < 100_000


def test_specs_that_break_a_rule(tmp_path):
    folder = tmp_path / "shards"
    write_shards(folder, [2, 2])
    (folder / "a.txt").touch()
    for spec, word in [
        (f"stream:{folder}/*", "all end"),
        (f"stream:{folder}/00000.tar?mixed=0", "mixed=0"),
        (f"stream:{folder}/00000.tar?image=jpg", "columns"),
        (f"stream:{folder}/00000.tar?mixd=2", "mixed"),
        ("stream:https://***@host/{0..9}.tar", "credentials"),
        ("stream:", "names no file"),
    ]:
        with pytest.raises(ValueError, match=word):
            open_stream(spec)
    with pytest.raises(FileNotFoundError):
        open_stream(f"stream:{folder}/00007.tar")
    with pytest.raises(ValueError, match="webdataset:SHARDS"):
        open_source(f"stream:{folder}/00000.tar")


def test_films_of_parquet_are_read_and_options_are_recorded(tmp_path):
    film = bad_films.film()
    for column in ("video", "clip"):
        table = {column: [film] * 2, "start_s": [0.0, 0.2], "end_s": [0.4, 0.8], "text": ["a", "b"]}
        pq.write_table(pa.table(table), tmp_path / f"{column}.parquet")
        named = "?video=clip&mixed=2" if column == "clip" else ""
        spec = f"stream:{tmp_path}/{column}.parquet{named}"
        stream, _ = open_stream(spec, (("video", "text"),))
        assert stream.value("video", 1).end_s == 0.8 and stream.captions(1) == ["b"]
    assert {
        *OPTIONS,
        *of_shards_known(),
    } <= OF_SPECS  # else a record of a remote address would lack them
