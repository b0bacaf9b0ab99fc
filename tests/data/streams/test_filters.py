"""A filtered stream is the whole data set on the rows that its metadata say are kept."""

import hashlib
import json
import pickle
import sys
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stores import Faults, http_server

from data.bad_samples import BadSample
from data.index.sources import open_source
from data.keys import content_hash
from data.options import DataOptions
from data.prepare import prepare_data
from data.streams import parquet_reading
from data.streams.bloom import MARK, key_of, open_unseen, write_unseen
from data.streams.counts import identities_of
from data.streams.filters import Kept, _hashes, kept_rows, metadata_keys
from data.streams.lengths import stream_token_counts
from data.streams.listing import ShardRules
from data.streams.opening import open_stream
from data.streams.table import BadShard
from data.streams.unseen import main

sys.path.insert(0, str(Path(__file__).parents[1]))
from bad_sets import add, encoded_image  # noqa: E402

SHARDS, ROWS = 3, 20
WHERE = "similarity>0.3 and width>=256 and language in ('en', 'de')"
COLUMNS = ("similarity", "width", "language", "url", "caption")


def row(shard: int, number: int) -> dict:
    rng = np.random.default_rng([shard, number])
    return {
        "key": f"{shard:05d}{number:04d}",
        "caption": f"picture {number} of {shard}{' more' * (number % 5)}",
        "url": f"http://a/{shard}/{number}",
        "similarity": None if number == 3 else float(rng.uniform(0.2, 0.6)),
        "width": int(rng.choice([128, 256, 512])),
        "language": str(rng.choice(["en", "de", "fr"])),
        "image": encoded_image(100 * shard + number),
    }


def is_kept(row: dict) -> bool:
    return (row["similarity"] or 0) > 0.3 and row["width"] >= 256 and row["language"] != "fr"


def write_shards(folder: Path, kind: str) -> list[str]:
    """`kind`: parquet, beside (tars with img2dataset's parquet), json (within the tars)."""
    folder.mkdir()
    for shard in range(SHARDS):
        rows = [row(shard, number) for number in range(ROWS)]
        file = folder / f"{shard:05d}.tar"
        if kind == "parquet":
            pq.write_table(
                pa.Table.from_pylist(rows), file.with_suffix(".parquet"), row_group_size=7
            )
            continue
        with tarfile.open(file, "w") as tar:
            for each in rows:
                add(tar, f"{each['key']}.png", each["image"])
                add(tar, f"{each['key']}.txt", each["caption"].encode())
                if kind == "json":
                    record = {name: each[name] for name in COLUMNS}
                    add(tar, f"{each['key']}.json", json.dumps(record).encode())
        if kind == "beside":
            table = [{**each, "status": "success"} for each in rows]
            for number in (50, 51, 52):  # which is not in the tar
                failed = {"status": "failed_to_download", "key": f"{shard:05d}{number:04d}"}
                table.insert(number % 10, {**table[number % 10], **failed, "similarity": 0.9})
                table[number % 10].update(width=999, language="en")
            order = np.random.default_rng(shard).permutation(len(table))
            for each in table:
                del each["image"]
            pq.write_table(
                pa.Table.from_pylist([table[n] for n in order]), file.with_suffix(".parquet")
            )
    return [str(folder / f"{n:05d}.{'parquet' if kind == 'parquet' else 'tar'}") for n in range(3)]


def kept_of(names, *arguments, **named):
    keys = np.array([each.key for each in identities_of(names, False)])
    return kept_rows(names, metadata_keys(names, keys, False), *arguments, **named)


def known_of(names: list[str]):
    return open_source(
        f"{'parquet' if names[0].endswith('parquet') else 'webdataset'}:{'::'.join(names)}"
    )


def option(where: str) -> str:
    return where.replace("&", "%26")


KEPT = [n for n in range(SHARDS * ROWS) if is_kept(row(*divmod(n, ROWS)))]


@pytest.mark.parametrize("kind", ["parquet", "beside", "json"])
def test_a_filtered_stream_is_the_data_set_on_the_kept_rows(kind, tmp_path):
    names = write_shards(tmp_path / "shards", kind)
    known = known_of(names)
    faults = Faults()
    with http_server(tmp_path / "shards", faults) as url:
        ending = names[0].rpartition(".")[2]
        spec = f"stream:{url}/{{00000..00002}}.{ending}?where={WHERE}&mixed=2"
        stream, mixed = open_stream(spec, cache_bytes=10**9)
        assert mixed == 2 and len(stream) == len(KEPT) and 5 < len(KEPT) < 40
        again = pickle.loads(pickle.dumps(stream))
        assert len(pickle.dumps(stream)) < 4000
        for source in (stream, again):
            for k, n in enumerate(KEPT):
                assert source.captions(k) == known.captions(n) == [row(*divmod(n, ROWS))["caption"]]
                assert source.value("image", k) == known.value("image", n)
                assert source.identity(k) == known.identity(n)
                assert source.content_hash("image", k) == known.content_hash("image", n)
        index = np.random.default_rng(0).permutation(len(KEPT))
        for name in ("bad", "num_characters", "width"):
            found = stream.numbers(name, index)
            assert found.tolist() == known.numbers(name, np.array(KEPT)[index]).tolist()
        # of some shards, of each some samples
        chosen, limits = np.array([2, 0]), np.array([2, 3])
        part = pickle.loads(pickle.dumps(stream.of_shards(chosen, limits)))
        starts = np.searchsorted(KEPT, [0, ROWS, 2 * ROWS])
        samples = [*range(starts[2], starts[2] + 2), *range(3)]
        assert [part.captions(k) for k in range(5)] == [stream.captions(k) for k in samples]
        # another run finds the same without asking for metadata
        faults.requests.clear()
        same, _ = open_stream(spec, cache_bytes=10**9)
        assert same.fingerprint() == stream.fingerprint() and not any(
            each.startswith("GET") for each in faults.requests
        )
        whole, _ = open_stream(spec.replace(WHERE, "width>0"), cache_bytes=10**9)
    assert whole.fingerprint() != stream.fingerprint() != part.fingerprint()
    assert len(whole) == SHARDS * ROWS


def test_shards_without_a_kept_row_are_never_read(tmp_path):
    write_shards(tmp_path / "shards", "parquet")
    url = f"url=='{row(1, 4)['url']}'"
    stream, _ = open_stream(f"stream:{tmp_path}/shards/*.parquet?where={url}")
    assert stream.shown == [f"{tmp_path}/shards/00001.parquet"] and len(stream) == 1
    assert pickle.loads(pickle.dumps(stream)).captions(0) == [row(1, 4)["caption"]]


@pytest.mark.parametrize("kind", ["parquet", "beside"])
def test_training_and_held_out_samples_are_kept_ones(kind, tmp_path):
    names = write_shards(tmp_path / "shards", kind)
    ending = names[0].rpartition(".")[2]
    spec = f"stream:{tmp_path}/shards/*.{ending}?where={option(WHERE)}"
    options = DataOptions(data=(spec,), val_fraction=0.1)
    data = prepare_data(options, None, tmp_path / "run", workers=1)
    held = data.held_out["validation"]
    texts = [data.source.captions(int(n)) for n in data.train[:]]
    texts += [held.source.captions(int(n)) for n in held.subset]
    assert sorted(texts) == sorted([row(*divmod(n, ROWS))["caption"]] for n in KEPT)
    assert 0 < len(held.subset) < len(KEPT)
    # token counts, of the samples in order
    known = (data.source, data.train, data.stream_order, data.text_tokenizer)
    counts = stream_token_counts(*known, 16, tmp_path / "counts")
    numbers = np.arange(len(data.train))
    expected = [len(data.tokenizer(text[0])["input_ids"]) for text in texts[: len(numbers)]]
    for _ in range(2):
        assert counts.longest(numbers, data.train[:]).tolist() == expected
        counts = stream_token_counts(*known, 16, tmp_path / "counts")
    # resumed it is the same
    again = prepare_data(options, None, tmp_path / "run", workers=1)
    assert again.source.fingerprint() == data.source.fingerprint()


def test_a_run_does_not_go_on_with_other_kept_rows(tmp_path):
    write_shards(tmp_path / "shards", "parquet")
    spec = f"stream:{tmp_path}/shards/*.parquet?unseen={tmp_path}/seen"
    options = DataOptions(data=(spec,), val_fraction=0)
    for number in range(2):
        words = row(0, number)["caption"]  # as many rows are kept
        write_unseen(tmp_path / "seen", "caption", [content_hash(words.encode())], 1e-9)
        if number == 0:
            assert len(prepare_data(options, None, tmp_path / "run").train) == SHARDS * ROWS - 1
    with pytest.raises(ValueError, match="changed"):
        prepare_data(options, None, tmp_path / "run")


def test_only_the_columns_of_an_expression_are_fetched(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    rng = np.random.default_rng(0)
    table = {"similarity": rng.random(4000), "image": [rng.bytes(2000) for _ in range(4000)]}
    pq.write_table(pa.table({**table, "caption": ["words"] * 4000}), folder / "0.parquet")
    faults = Faults()
    with http_server(folder, faults) as url:
        kept = kept_of([f"{url}/0.parquet"], tmp_path / "kept", "similarity<=0.25")
    assert kept.rows(0).tolist() == np.flatnonzero(table["similarity"] <= 0.25).tolist()
    assert kept.totals.tolist() == [4000]
    assert faults.sent < 300_000 < 8_000_000 < (folder / "0.parquet").stat().st_size
    on_disk = sum(file.stat().st_size for file in kept.folder.iterdir())
    assert on_disk <= 4 * kept.counts.sum() + 200
    # a file that is not what was written is made anew
    names, where = [str(folder / "0.parquet")], "similarity<=0.25"
    again = kept_of(names, tmp_path / "kept", where)
    (again.folder / "rows").write_bytes(b"1234")
    assert kept_of(names, tmp_path / "kept", where).rows(0).tolist() == kept.rows(0).tolist()


@pytest.mark.parametrize("kind", ["parquet", "beside", "json"])
def test_rows_of_a_bloom_file_are_left_out(kind, tmp_path, capsys):
    names = write_shards(tmp_path / "shards", kind)
    spec = f"stream:{tmp_path}/shards/*.{names[0].rpartition('.')[2]}"
    rows = [row(*divmod(n, ROWS)) for n in range(SHARDS * ROWS)]
    # captions of a known data set, written otherwise
    table = [{"image": rows[n]["image"], "text": rows[n]["caption"].upper()} for n in (3, 25)]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "known.parquet")
    seen = tmp_path / "new" / "seen"
    assert main([f"parquet:{tmp_path}/known.parquet", "--out", str(seen)]) == 0
    stream, _ = open_stream(f"{spec}?unseen={seen}")
    captions = [stream.captions(k)[0] for k in range(len(stream))]
    assert captions == [each["caption"] for n, each in enumerate(rows) if n not in (3, 25)]
    # a column of what a filter keeps of a stream, beside another filter
    chosen = f"{spec}?where=language=='en'"
    assert main([chosen, "--by", "url", "--out", str(seen), "--rate", "1e-9"]) == 0
    of_english = sum(each["language"] == "en" for each in rows)
    assert f"{of_english} keys" in capsys.readouterr().out
    stream, _ = open_stream(f"{spec}?where=width>=256&unseen={seen}&unseen_by=url")
    captions = [stream.captions(k)[0] for k in range(len(stream))]
    kept = [each for each in rows if each["width"] >= 256 and each["language"] != "en"]
    assert captions == [each["caption"] for each in kept]


def test_a_bloom_file_finds_all_of_its_keys_and_at_most_its_rate_of_others(tmp_path):
    texts = [f"words {n}" for n in range(20_000)]
    pq.write_table(pa.table({"title": texts, "n": range(20_000)}), tmp_path / "0.parquet")
    keys = [content_hash(text.encode()) for text in texts[:5000]]
    before = None
    for rate in (0.01, 0.0001):
        write_unseen(tmp_path / "seen", "title", keys, rate)
        unseen = open_unseen(tmp_path / "seen", "title")
        kept = kept_of([f"{tmp_path}/0.parquet"], tmp_path / "kept", unseen=unseen)
        rows = kept.rows(0)
        assert rows.min() >= 5000 and 15_000 * (1 - 2 * rate) - 3 <= len(rows)
        assert kept.folder != before  # another file, another result
        before = kept.folder


def test_values_are_compared_whatever_a_file_writes_them_as(tmp_path):
    words = pa.array([b"a \xff", b"b", None, b"c"], pa.binary()).view(pa.string())
    table = {
        "words": words,
        "kind": pa.array(["x", "y", "x", None]).dictionary_encode(),
        "nothing": pa.nulls(4),
        "number": [1.0, 2.0, None, 2.5],
        "caption": [["One", "two"], ["Three"], None, []],
    }
    pq.write_table(pa.table(table), tmp_path / "0.parquet")

    def kept(by=None, key=None, where=None):
        unseen = None
        if by:
            write_unseen(tmp_path / "seen", by, [key_of(by, key)], 1e-9)
            unseen = open_unseen(tmp_path / "seen", by)
        names = [f"{tmp_path}/0.parquet"]
        return kept_of(names, tmp_path / "kept", where, unseen).rows(0).tolist()

    assert kept("words", "b") == [0, 2, 3] and kept("words", "a \\xff") == [1, 2, 3]
    assert kept("kind", "x") == [1, 3] and kept(where="kind=='x'") == [0, 2]
    assert kept("number", 2) == [0, 2, 3] and kept("nothing", "None") == [0, 1, 2, 3]
    assert kept("caption", " TWO") == [1, 2, 3]
    assert kept(where="nothing > 3 or number > 1") == [1, 3]


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rbloom", None)
    with pytest.raises(ValueError, match="pip install -r requirements-filters.txt"):
        open_unseen(tmp_path / "seen")


@pytest.mark.parametrize("hurt", ["cut", "flip", "other", "column", "missing"])
def test_bloom_files_that_do_not_serve_are_refused(hurt, tmp_path):
    file = tmp_path / "seen"
    write_unseen(file, "caption", [content_hash(b"words")], 0.01)
    content = file.read_bytes()
    if hurt == "missing":
        file.unlink()
    elif hurt != "column":
        flipped = content[:-1] + bytes([content[-1] ^ 1])
        file.write_bytes({"cut": content[:-1], "flip": flipped, "other": b"words\n"}[hurt])
    word = {"other": "no file of keys", "column": "&unseen_by=caption", "missing": "no such file"}
    with pytest.raises((ValueError, FileNotFoundError), match=word.get(hurt, "damaged")):
        open_unseen(file, "url" if hurt == "column" else "caption")


def test_a_bloom_file_says_no_more_hashes_than_there_can_be(tmp_path):
    """One with 2^60 of them, or without bits, and the digest of that."""
    file = tmp_path / "seen"
    write_unseen(file, "caption", [content_hash(b"words")], 0.01)
    line, content = file.read_bytes().split(b"\n", 1)
    head = json.loads(line.removeprefix(MARK))
    for hashes, bits, found in (
        (1 << 60, content[8:], "has 1,152,921,504,606,846,976 hashes of a key"),
        (0, content[8:], "has 0 hashes of a key"),
        (7, b"", "has no bits"),
    ):
        hostile = hashes.to_bytes(8, "little") + bits
        head["digest"] = hashlib.blake2b(hostile).hexdigest()
        file.write_bytes(MARK + json.dumps(head).encode() + b"\n" + hostile)
        with pytest.raises(ValueError, match=f"unseen={file}: {found}; 1 to 1,100 hashes"):
            open_unseen(file)
    with pytest.raises(ValueError, match="--rate 0.999: 1 keys are too few"):
        write_unseen(file, "caption", [content_hash(b"words")], 0.999)


def test_filters_that_do_not_fit_the_data_are_refused(tmp_path):
    for kind in ("parquet", "beside", "json"):
        names = write_shards(tmp_path / kind, kind)
        for where, word in (
            ("similarty>0.3", "has no column 'similarty'.*'similarity'"),
            ("similarity>3", "none of 60 rows"),
            ("similarity>'a'", "00000.*similarity: double"),
            ("True", "names no column"),
        ):
            with pytest.raises(ValueError, match=word):
                kept_of(names, tmp_path / "kept", where)
    with pytest.raises(ValueError, match="column 'image' is binary"):
        kept_of([str(tmp_path / "parquet" / "00000.parquet")], tmp_path / "kept", "image is None")
    # no metadata at all
    bare = tmp_path / "bare.tar"
    with tarfile.open(bare, "w") as tar:
        add(tar, "a.png", encoded_image())
        add(tar, "a.txt", b"words")
    with pytest.raises(ValueError, match="bare.tar: has no metadata"):
        kept_of([str(bare)], tmp_path / "kept", "width>3")
    # not joined by keys
    beside = tmp_path / "beside" / "00000.parquet"
    table = pq.read_table(beside)
    twice = pa.concat_tables([table, table])
    for other, word in ((table.drop_columns("key"), "no column 'key'"), (twice, "two are equal")):
        pq.write_table(other, beside)
        with pytest.raises(ValueError, match=word):
            kept_of([str(tmp_path / "beside" / "00000.tar")], tmp_path / "kept", "width>3")
    for content in (b"no parquet file", b"PAR1" + b"\xff" * 300 + b"\x10\0\0\0PAR1"):
        beside.write_bytes(content)
        with pytest.raises(ValueError, match="00000.parquet.*damaged"):
            kept_of([str(tmp_path / "beside" / "00000.tar")], tmp_path / "kept", "width>3")
    assert not list((tmp_path / "kept").glob(".*"))  # nothing half written
    with pytest.raises(ValueError, match="unseen_by needs"):
        open_stream(f"stream:{tmp_path}/parquet/*.parquet?unseen_by=url")


def test_samples_that_a_tar_lacks_are_named_and_keys_with_folders_are_found(tmp_path):
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for n in (3, 1, 4):
            add(tar, f"./{n}.png", encoded_image(n))
            add(tar, f"./{n}.txt", f"words {n}".encode())
    spec = f"stream:{tmp_path}/0.tar?where=width>9"
    for lacking, width in ((0, 1), (2, 300)):  # 2 and 5 are not in the tar
        table = {"key": [str(n) for n in range(6)], "width": [1, 300, width, 300, 1, width]}
        pq.write_table(pa.table(table), tmp_path / "0.parquet")
        stream, _ = open_stream(spec)
        assert len(stream) == 2 + lacking and isinstance(stream.table.kept, Kept)
        if not lacking:
            assert [stream.captions(k) for k in range(2)] == [["words 3"], ["words 1"]]
            assert stream.numbers("num_captions", np.arange(2)).tolist() == [1, 1]
    with pytest.raises(BadShard, match="0.tar: has 2 samples, and 4 were told.*NAME.parquet"):
        stream.captions(0)
    stream, _ = open_stream(spec, rules=ShardRules(drops=True))
    with pytest.raises(BadSample, match="miscounted-shard.*4 samples were announced"):
        stream.value("image", 3)


def test_keys_whose_hashes_are_equal_are_told_apart(tmp_path):
    keys = np.array([str(n) for n in range(300_000)])
    _, of, counts = np.unique(_hashes(keys.tolist(), 0), return_inverse=True, return_counts=True)
    first, second = keys[counts[of] > 1][np.argsort(of[counts[of] > 1], kind="stable")][:2]
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for key in (first, second):
            add(tar, f"{key}.png", encoded_image())
            add(tar, f"{key}.txt", f"words {key}".encode())
    pq.write_table(pa.table({"key": [first, second], "width": [1, 2]}), tmp_path / "0.parquet")
    stream, _ = open_stream(f"stream:{tmp_path}/0.tar?where=width==2")
    assert [stream.captions(k) for k in range(len(stream))] == [[f"words {second}"]]


@pytest.mark.parametrize("kind", ["parquet", "beside"])
def test_rows_that_are_decoded_in_pieces_are_the_same(kind, tmp_path, monkeypatch):
    names = write_shards(tmp_path / "shards", kind)
    for name in names:  # a list of captions, and texts that are parts of the ones before
        file = Path(name).with_suffix(".parquet")
        table = pq.read_table(file)
        texts = pa.array([[text, f"{text} more"] for text in table["caption"].to_pylist()])
        table = table.set_column(table.column_names.index("caption"), "caption", texts)
        delta = {"use_dictionary": False, "column_encoding": {"url": "DELTA_BYTE_ARRAY"}}
        pq.write_table(table, file, **delta if name == names[0] else {}, row_group_size=9)
    seen = [key_of("caption", row(shard, 5)["caption"]) for shard in range(SHARDS)]
    write_unseen(tmp_path / "seen", "caption", seen, 1e-9)
    asked = {"where": f"{WHERE} or url=='no'", "unseen": open_unseen(tmp_path / "seen")}
    whole = kept_of(names, tmp_path / "whole", **asked)
    monkeypatch.setattr(parquet_reading, "PIECE_ROWS", 4)
    monkeypatch.setattr(parquet_reading, "ROWS_AT_ONCE", 3)
    pieces = kept_of(names, tmp_path / "pieces", **asked)
    assert 5 < whole.counts.sum() < 40
    for shard in range(SHARDS):
        assert pieces.rows(shard).tolist() == whole.rows(shard).tolist()
    assert (pieces.totals == whole.totals).all() and (pieces.marks == whole.marks).all()
