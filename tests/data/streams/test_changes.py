"""Shards that change, vanish, or are not what a file beside them says."""

import io
import json
import os
import pickle
import re
import tarfile
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stores import Faults, http_server, plain_server, put, s3_server
from stream_shards import write_shards, write_tar

from data.bad_samples import BadSample
from data.index.sources import open_source
from data.modalities.lengths import token_counts
from data.modalities.tokenizer import train_tokenizer
from data.options import DataOptions
from data.prepare import prepare_data
from data.streams.lengths import StreamTokenCounts
from data.streams.listing import ShardRules
from data.streams.opening import open_stream, open_stream_listed
from data.streams.table import BadShard
from launch.setup import first_screen

COUNTS = [8, 8, 8, 8]


def rows(shard, number, word="sample"):
    image = open_source("demo").value("image", 0)
    return [
        {"id": f"{shard}_{n}", "image": image, "text": f"{word} {n}", "width": n}
        for n in range(number)
    ]


def write(folder, shard, number, word="sample", ending=".parquet"):
    folder.mkdir(exist_ok=True)
    if ending == ".tar":
        write_tar(folder / f"{shard}.tar", rows(shard, number, word))
    else:
        table = pa.Table.from_pylist(rows(shard, number, word))
        pq.write_table(table, folder / f"{shard}.parquet", row_group_size=5)


def captions(source):
    return [source.captions(k)[0] for k in range(len(source))]


@pytest.mark.parametrize("how", ["fetched ahead first", "asked for first"])
def test_token_counts_of_a_filter_are_those_of_its_rows_whoever_counts_first(
    how, tmp_path, tokenizer
):
    write(tmp_path / "shards", 0, 12, "word " * 3)
    stream, _ = open_stream(f"stream:{tmp_path}/shards/*.parquet?where=width>=10")
    counts = StreamTokenCounts(stream, tokenizer, 99, 0)
    if how == "fetched ahead first":
        assert stream.prefetch(0, lambda name: 0.0, counts.count)
    expected = [len(tokenizer(text)["input_ids"]) for text in captions(stream)]
    every = np.arange(2)
    for each in (counts, StreamTokenCounts(stream, tokenizer, 99, 0)):
        assert each.longest(every, every).tolist() == expected
    with stream.opened(0) as opened:
        (file,) = opened.folder.glob("tokens-*")
        assert np.load(file)["starts"].tolist() == [0, 1, 2]


def test_token_counts_are_those_of_the_column_and_the_tokenizer(tmp_path, tokenizer):
    """Which the same shard in the cache has one after the other."""
    table = {"image": [open_source("demo").value("image", 0)] * 2}
    table |= {"text": ["a b c d e", "a"], "title": ["a", "a b c d e f g"]}
    pq.write_table(pa.table(table), tmp_path / "0.parquet")
    every, other = np.arange(2), train_tokenizer(["a b", "b a c"] * 50, vocab_size=60)
    for column in ("text", "title"):
        for each in (tokenizer, other):
            stream, _ = open_stream(f"stream:{tmp_path}/*.parquet?text={column}")
            found = StreamTokenCounts(stream, each, 99, 0).longest(every, every)
            assert found.tolist() == [len(each(text)["input_ids"]) for text in table[column]]


def test_token_counts_of_a_run_are_made_anew_for_other_captions(emoji_set, tokenizer, tmp_path):
    """As many samples, and as large a vocabulary."""
    for word in ("one", "one two three four"):
        file = emoji_set(6, texts=lambda caption: word)
        os.utime(file, ns=(1, len(word)))
        source = open_source(f"jsonl:{file}")
        every = np.arange(6)
        found = token_counts(source, every, tokenizer, 99, tmp_path / "counts")
        assert found.longest(every, every).tolist() == [len(tokenizer(word)["input_ids"])] * 6


@contextmanager
def served(how, folder, monkeypatch):
    """The address of what `write` writes into a folder, and what brings it there."""
    if how == "s3":
        with s3_server() as variables:
            for name, value in variables.items():
                monkeypatch.setenv(name, value)
            files = folder.iterdir
            yield (
                "s3://shards",
                lambda: [put(variables, f"shards/{f.name}", f.read_bytes()) for f in files()],
            )
        return
    servers = {"http": http_server, "http without etags": plain_server}
    with servers[how](folder) if how in servers else nullcontext(str(folder)) as address:
        yield address, lambda: None


@pytest.mark.parametrize("where", ["", "?where=width>=2"])
@pytest.mark.parametrize("how", ["local", "http", "http without etags", "s3"])
def test_a_shard_written_anew_is_counted_and_read_anew(
    how, where, tmp_path, tokenizer, monkeypatch
):
    folder, least, remote = tmp_path / "shards", 2 if where else 0, how != "local"
    folder.mkdir()
    with served(how, folder, monkeypatch) as (address, bring):
        spec = f"stream:{address}/{{0..1}}.parquet{where}"
        write(folder, 1, 4)
        for number, word in ((5, "old"), (9, "new one"), (3, "third")):
            write(folder, 0, number, word)
            bring()
            stream, _ = open_stream(spec, cache_bytes=10**9)
            expected = [f"{word} {n}" for n in range(least, number)]
            assert captions(stream) == [*expected, *(f"sample {n}" for n in range(least, 4))]
            counts = StreamTokenCounts(stream, tokenizer, 99, 0)
            every = np.arange(len(stream))
            lengths = [len(tokenizer(text)["input_ids"]) for text in captions(stream)]
            assert counts.longest(every, every).tolist() == lengths
        # while a run goes on it is no other sample without a word
        stream.keep([])
        again = pickle.loads(pickle.dumps(stream))
        write(folder, 0, 3, "fourth")
        bring()
        if remote:
            assert again.captions(0) == [f"third {least}"]  # of the copy that the run began with
            again.cache = replace(again.cache, folder=tmp_path / "empty")
        with pytest.raises(
            BadShard, match="0.parquet: the shard has changed since.*--on-bad-shard"
        ):
            again.keep([])
            again.captions(0)
        if how == "s3":
            return
        (folder / "0.parquet").unlink()
        with pytest.raises(BadShard, match="0.parquet: the shard is not there any more"):
            again.captions(0)


def test_tars_of_one_size_and_second_are_told_apart(tmp_path):
    """A tar is filled up, so 5 and 9 samples may take as many bytes."""
    with plain_server(tmp_path) as url:
        for number in (5, 9):
            with tarfile.open(tmp_path / "0.tar", "w") as tar:
                for n, ending in product(range(number), ("png", "txt")):
                    member = tarfile.TarInfo(f"{n}.{ending}")
                    member.size = 9
                    tar.addfile(member, io.BytesIO(b"sample %d " % n))
            now = int(time.time())
            os.utime(tmp_path / "0.tar", (now, now))
            assert (tmp_path / "0.tar").stat().st_size == 20_480
            assert len(open_stream(f"stream:{url}/{{0..0}}.tar")[0]) == number


def test_rows_of_the_parquet_beside_a_tar_follow_its_content(tmp_path):
    write(tmp_path, 0, 6, ending=".tar")
    for widths in ([1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]):
        table = {"key": [f"0_{n}" for n in range(6)], "width": widths}
        pq.write_table(pa.table(table), tmp_path / "0.parquet")
        stream, _ = open_stream(f"stream:{tmp_path}/0.tar?where=width>4")
        assert captions(stream) == [f"sample {n}" for n in range(6) if widths[n] > 4]


@pytest.mark.parametrize("told", [3, 9])
def test_an_intact_shard_of_another_number_than_is_told_is_named_or_left_out(
    told, tmp_path, tokenizer
):
    write(tmp_path, 0, 5, ending=".tar")
    write(tmp_path, 1, 4, ending=".tar")
    (tmp_path / "sizes.json").write_text(json.dumps({"0.tar": told, "1.tar": 4}))
    spec = f"stream:{tmp_path}/{{0..1}}.tar"
    stream, _ = open_stream(spec)
    assert captions_of(stream, 1) == [f"sample {n}" for n in range(4)]
    with pytest.raises(BadShard, match=f"0.tar: has 5 samples, and {told} were told.*sizes.json"):
        stream.captions(0)
    stream, _ = open_stream(spec, rules=ShardRules(drops=True))
    for k in range(told):
        with pytest.raises(BadSample, match="miscounted-shard: it has 5 samples"):
            stream.value("image", k)
    assert captions_of(stream, 1) == [f"sample {n}" for n in range(4)]
    every = np.arange(told + 4)
    lengths = StreamTokenCounts(stream, tokenizer, 99, 0).longest(every, every)
    assert len(set(lengths[:told].tolist())) == 1 and lengths[told] > lengths[0]
    # what it says is to be done helps
    (tmp_path / "sizes.json").unlink()
    assert len(captions(open_stream(spec)[0])) == 9


def captions_of(stream, shard):
    start, stop = stream.samples.starts[shard : shard + 2]
    return [stream.captions(k)[0] for k in range(start, stop)]


@pytest.fixture
def run(tmp_path):
    """Options of a run of four shards, which has begun."""
    for shard in range(4):
        write(tmp_path / "shards", shard, 8, f"of {shard},")
    options = DataOptions(data=(f"stream:{tmp_path}/shards/*.parquet",), val_fraction=0.0)
    data = prepare_data(options, None, tmp_path / "run")
    return options, data, tmp_path


@pytest.mark.parametrize("what", ["gone", "changed"])
@pytest.mark.parametrize("pattern", ["*", "{0..3}"])
def test_a_run_goes_on_without_a_shard_by_the_same_order(run, what, pattern, tokenizer):
    options, data, folder = run
    options = replace(options, data=(options.data[0].replace("*", pattern),))
    own = folder / "another run"
    order = [data.stream_order.batch(step) for step in range(32)]
    prepare_data(options, None, own)
    if what == "gone":
        (folder / "shards" / "2.parquet").unlink()
    else:
        write(folder / "shards", 2, 8, "anew")
    words = "is not there any more" if what == "gone" else "has changed since the run began"
    with pytest.raises(
        (ValueError, OSError), match=f"2.parquet: the shard {words}.*--on-bad-shard"
    ):
        prepare_data(options, None, own)
    dropping = replace(options, on_bad_shard="drop", max_bad_fraction=0.2)
    with pytest.raises((ValueError, OSError), match="25.0% of the samples.*20.0%"):
        prepare_data(dropping, None, own)
    dropping = replace(dropping, max_bad_fraction=0.3)
    found = prepare_data(dropping, None, own)
    assert [found.stream_order.batch(step).tolist() for step in range(32)] == [
        each.tolist() for each in order
    ]
    said = first_screen._streams(found, 8, ())
    assert re.search("1 shards are left out, 8 samples of this run's order.*2.parquet", said)
    for other in (found, prepare_data(dropping, None, own, looks=False)):  # another rank
        source = other.source
        assert source.captions(0) == ["of 0, 0"] and source.captions(31) == ["of 3, 7"]
        for k in range(16, 24):
            reason = "missing-shard" if what == "gone" else "changed-shard"
            with pytest.raises(BadSample, match=reason):
                source.value("image", k)
            assert source.captions(k) == [] and source.where(k).endswith(f"#row {k - 16}")
        assert source.numbers("width", np.arange(14, 18)).tolist()[2:] == [0, 0]
        every = np.arange(32)
        lengths = StreamTokenCounts(source, tokenizer, 99, 0).longest(every, every)
        assert lengths[15] > lengths[16] == lengths[23] < lengths[24]


def test_a_shard_takes_one_question_and_its_name(tmp_path):
    """Of ten thousand shards; what is told of them is asked for once, and other ranks ask nothing."""
    sizes = {}
    write_shards(tmp_path / "shards", [3])
    for number in range(240):
        sizes[name := f"{number:05d}.tar"] = 3
        if number:
            os.link(tmp_path / "shards" / "00000.tar", tmp_path / "shards" / name)
    (tmp_path / "shards" / "sizes.json").write_text(json.dumps(sizes))
    pickled = []
    for shards in (40, 240):
        looks = [f"HEAD /{number:05d}.tar" for number in range(shards)]
        record = tmp_path / f"{shards}.json"
        with http_server(tmp_path / "shards", faults := Faults()) as url:
            found = []
            for rules, expected in (
                (ShardRules(record=record), [*looks, "GET /sizes.json"]),
                (ShardRules(record=record), looks),
                (ShardRules(record=record, looks=False), []),
            ):
                faults.requests.clear()
                spec = f"stream:{url}/{{00000..{shards - 1:05d}}}.tar"
                source, _, listing = open_stream_listed(spec, cache_bytes=10**9, rules=rules)
                assert sorted(faults.requests) == sorted(expected)
                listing.write(record)
                found.append(source.table)
            pickled.append(len(pickle.dumps(source)))
        for each in found[1:]:
            assert each.names == found[0].names and (each.keys == found[0].keys).all()
            assert (each.counts == found[0].counts).all() and (each.sizes == found[0].sizes).all()
    # beside its name at most six numbers: columns of the table, and where its samples begin
    assert pickled[1] - pickled[0] < 200 * (len(f"{url}/00000.tar") + 7 * 8)


def test_a_run_does_not_go_on_with_more_shards(run):
    options, _, folder = run
    write(folder / "shards", 4, 8)
    with pytest.raises(ValueError, match="names 1 shards that were not there.*4.parquet"):
        prepare_data(options, None, folder / "run")


def test_shards_that_are_not_there_at_the_start(tmp_path):
    pattern = write_shards(tmp_path / "shards", COUNTS, sizes=False)
    (tmp_path / "shards" / "00001.tar").unlink()
    with http_server(tmp_path / "shards", Faults(page="<html><title>None</title></html>")) as url:
        for where in (url, f"{tmp_path}/shards"):
            options = DataOptions(data=(f"stream:{where}/{pattern}",), val_fraction=0.0)
            with pytest.raises(
                FileNotFoundError, match="of its 4 shards .*00001.tar: the shard is"
            ):
                prepare_data(options, None, tmp_path / "run")
            options = replace(options, on_bad_shard="drop", max_bad_fraction=0.25)
            own = tmp_path / where[:4].strip("/")
            for looks in (True, False, True):
                found = prepare_data(options, None, own, looks=looks)
                assert len(found.train) == 24 and len(captions(found.source)) == 24
                assert found.source.table.gone == (f"{where}/00001.tar",)


def test_a_held_out_shard_that_is_gone_is_refused(tmp_path):
    pattern = write_shards(tmp_path / "shards", COUNTS)
    options = DataOptions(data=(f"stream:{tmp_path}/shards/{pattern}",), val_fraction=0.25)
    data = prepare_data(options, None, tmp_path / "run")
    trained = {name.rpartition("/")[2] for name in data.source.shown}
    (held,) = {f"{n:05d}.tar" for n in range(4)} - trained
    (tmp_path / "shards" / held).unlink()
    options = replace(options, on_bad_shard="drop", max_bad_fraction=0.5)
    with pytest.raises(OSError, match=f"{held}: .*its samples are held out"):
        prepare_data(options, None, tmp_path / "run")


def test_copies_of_remote_files_follow_them(tmp_path, caplog):
    write(tmp_path / "shards", 0, 3, "old", ".tar")
    with http_server(tmp_path / "shards", faults := Faults()) as url:
        spec = f"webdataset:{url}/0.tar"
        assert captions(open_source(spec)) == ["old 0", "old 1", "old 2"]
        fetched = sum(each.startswith("GET") for each in faults.requests)
        assert len(captions(open_source(spec))) == 3
        assert sum(each.startswith("GET") for each in faults.requests) == fetched
        write(tmp_path / "shards", 0, 2, "new", ".tar")
        assert captions(open_source(spec)) == ["new 0", "new 1"]
        (tmp_path / "shards" / "0.tar").unlink()
        assert captions(open_source(spec)) == ["new 0", "new 1"]
        assert "the copy of before is used" in caplog.text
