"""The cache answers with the very pixels or not at all, whatever happens to its file and to those
that write it."""

import os
import re
import signal
import sqlite3
import time
import warnings

import numpy as np
import pytest
from cache_writers import LIMIT_S, items, sample_image, write, write_for_ever, write_items

from data.cache import BATCH_BYTES, FILE, WAITING_BYTES, SampleCache, fill, open_cache
from data.cache.__main__ import main
from data.index.sources import open_source
from data.modalities.transforms import Stored, TrainTransform
from data.options import LoadingOptions
from data.processes import start_method
from launch.feeding import sample_cache

STORED = Stored((48, 48))


@pytest.fixture
def cache(tmp_path):
    cache = SampleCache(tmp_path / "images")
    yield cache
    cache.close()


def test_an_array_comes_back_to_the_last_bit(cache):
    for number, value in enumerate(
        (
            sample_image(3),
            sample_image(3)[::2, ::2],
            np.random.default_rng(0).normal(-20, 9, (1, 7, 5)).astype(np.float32),
            np.array([np.nan, np.inf, -0.0, -1.0], np.float32),
        )
    ):
        key = b"key %d" % number
        assert cache.get(key) is None and not cache.has(key)
        cache.put(key, value)
        cache.close(LIMIT_S)
        found = cache.get(key)
        assert (found.dtype, found.shape) == (value.dtype, value.shape) and cache.has(key)
        assert found.tobytes() == value.tobytes()


def test_the_key_has_content_size_and_version(demo, monkeypatch):
    keys = {
        s.key(demo.content_hash("image", i)) for i in (5, 6) for s in (STORED, Stored((24, 24)))
    }
    monkeypatch.setattr("data.modalities.transforms.VERSION", "next")
    assert len({*keys, STORED.key(demo.content_hash("image", 5))}) == 5


def test_what_is_stored_is_made_once(cache):
    made = []

    def make():
        made.append(1)
        return sample_image(1)

    for _ in range(2):
        assert np.array_equal(cache.fetch(b"key", make), sample_image(1))
        cache.close(LIMIT_S)
    assert len(made) == 1


def test_two_processes_fill_it_at_once(cache):
    writers = [
        start_method().Process(target=write_items, args=(cache, numbers))
        for numbers in (range(60), range(30, 90))
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(LIMIT_S)
    assert [writer.exitcode for writer in writers] == [0, 0]
    for key, value in items(range(90)):
        assert np.array_equal(cache.get(key), value)
    connection = sqlite3.connect(cache.folder / FILE)
    assert connection.execute("SELECT count(*) FROM samples").fetchone() == (90,)  # once each


def test_a_writer_that_is_killed_leaves_a_whole_cache(cache):
    for start in (0, 1000):
        writer = start_method().Process(target=write_for_ever, args=(cache,))
        writer.start()
        deadline = time.monotonic() + LIMIT_S
        while not cache.has(b"key 60"):
            assert time.monotonic() < deadline, "nothing is written"
            time.sleep(0.02)
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        assert write(cache, items([10**9 + start]), LIMIT_S)  # its turn is over
        for key, value in items(range(50)):
            assert np.array_equal(cache.get(key), value)


def test_a_writer_that_stands_still_keeps_nobody_waiting(cache):
    """It has its turn until all have gone on; what waits is kept, up to a limit."""
    assert cache.is_open()
    other = sqlite3.connect(cache.folder / FILE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert not write(cache, items([1]), 0.1)
    large = np.zeros(BATCH_BYTES, np.uint8)
    cache.put(b"large", large)
    assert cache.get(b"large") is None
    other.execute("COMMIT")
    cache.put(b"next", large)
    assert cache.has(b"large") and cache.has(b"next")
    other.execute("BEGIN IMMEDIATE")
    for n in range(2 + WAITING_BYTES // BATCH_BYTES):
        cache.put(b"large %d" % n, large)
    assert cache._waiting_bytes <= WAITING_BYTES + BATCH_BYTES
    other.execute("COMMIT")


def test_a_full_cache_says_so_once_and_goes_on_answering(tmp_path):
    cache = SampleCache(tmp_path / "images", limit_bytes=400_000)
    with pytest.warns(RuntimeWarning, match="would pass its limit.*decoded each time") as warned:
        kept = [write(cache, [item]) for item in items(range(100))]
    assert len(warned) == 1 and 10 < sum(kept) < 100 and kept == sorted(kept, reverse=True)
    for n, (key, value) in enumerate(items(range(100))):
        found = cache.get(key)
        assert np.array_equal(found, value) if kept[n] else found is None
    cache.close()
    assert (tmp_path / "images" / FILE).stat().st_size <= 420_000


def spoil_head(file):
    file.write_bytes(b"no database" * 1000)


def spoil_tail(file):
    os.truncate(file, file.stat().st_size // 2)


def spoil_inside(file):
    file.write_bytes(file.read_bytes()[:20_000] + bytes(file.stat().st_size - 20_000))


@pytest.mark.parametrize("spoil", [spoil_head, spoil_tail, spoil_inside])
def test_a_broken_file_costs_one_warning_and_images_are_decoded(cache, demo, spoil):
    for i in range(50):
        cache.put(STORED.key(demo.content_hash("image", i)), STORED(demo.value("image", i)))
    cache.close(LIMIT_S)
    spoil(cache.folder / FILE)
    with pytest.warns(RuntimeWarning, match="are decoded instead") as warned:
        for i in range(50):
            key = STORED.key(demo.content_hash("image", i))
            found = cache.fetch(key, lambda i=i: STORED(demo.value("image", i)))
            assert np.array_equal(found, STORED(demo.value("image", i)))
        cache.close(LIMIT_S)
    assert len(warned) == 1


def test_a_value_that_the_disk_has_changed_is_made_anew(cache):
    value = sample_image(3)  # 40 x 43 x 4
    assert value[0, 0, 0]
    for change in (
        "content = CAST(x'00' || substr(content, 2) AS BLOB)",  # a bit is another one
        "content = substr(content, 2)",
        "content = NULL",
        "form = CAST('|u1 43 40 4' AS BLOB)",  # as many bytes
        "form = 7",
        "checksum = NULL",
    ):
        write(cache, [(b"key", value), (b"other", value)])
        other = sqlite3.connect(cache.folder / FILE)
        other.execute(f"UPDATE samples SET {change} WHERE key = ?", [b"key"])
        other.commit()
        assert cache.get(b"key") is None and np.array_equal(cache.get(b"other"), value), change
        assert np.array_equal(cache.fetch(b"key", lambda: value), value)
        cache.close(LIMIT_S)
        assert np.array_equal(cache.get(b"key"), value)


def test_a_folder_that_cannot_be_used_costs_one_warning(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(RuntimeWarning, match="cannot be used") as warned:
        assert open_cache(tmp_path / "file" / "images") is None
        cache = SampleCache(tmp_path / "file" / "images")
        assert cache.get(b"key") is None
        cache.put(b"key", sample_image(1))
        cache.close()
    assert len(warned) == 2  # one each
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / FILE).symlink_to(tmp_path / "file")
    with pytest.warns(RuntimeWarning, match="is a link"):
        assert open_cache(tmp_path / "linked") is None
    assert (tmp_path / "file").read_text() == "in the way"
    with pytest.raises(ValueError, match="at least 1"):
        SampleCache(tmp_path, 0)


def test_closing_and_opening_again_finds_nothing_wrong(cache):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(12):
            write(cache, [(b"key %d" % n, sample_image(n, size=20 + 9 * n)), *items([100, 101])])
            cache.close()
            assert np.array_equal(cache.get(b"key %d" % n), sample_image(n, size=20 + 9 * n))


@pytest.mark.parametrize("workers", [0, 2])
def test_filling_can_be_done_again_and_skips_what_cannot_be_read(emoji_set, cache, workers):
    file = emoji_set(70)
    source = open_source(f"jsonl:{file}")
    (file.parent / "images of emoji" / "9.png").write_bytes(b"broken")
    done, examples = fill(source, STORED, cache, workers)
    assert done == {"stored": 69, "unreadable": 1} and f"{file}:10" in examples[0]
    again, _ = fill(source, STORED, cache, workers)
    assert again == {"present": 69, "unreadable": 1}
    for i in (0, 30, 69):
        found = cache.get(STORED.key(source.content_hash("image", i)))
        assert np.array_equal(found, STORED(source.value("image", i)))


class Between:
    """`STORED`; while it makes the images from `first` to `last`, another process writes."""

    key = STORED.key

    def __init__(self, file, first, last):
        self.other = sqlite3.connect(file, isolation_level=None)
        self.number, self.at = 0, {first: "BEGIN IMMEDIATE", last: "COMMIT"}

    def __call__(self, data):
        self.number += 1
        self.other.execute(self.at.get(self.number, "SELECT 1"))
        return STORED(data)


@pytest.mark.parametrize("limit", [10**9, 200_000])
def test_filling_counts_as_stored_what_is_there(emoji_set, tmp_path, monkeypatch, limit):
    """Where others write for too long in the middle of a chunk, and where the cache is full."""
    monkeypatch.setattr("data.cache.FILL_S", 0.01)
    monkeypatch.setattr("data.cache.BATCH_BYTES", 20_000)
    source, cache = open_source(f"jsonl:{emoji_set(70)}"), SampleCache(tmp_path / "c", limit)
    assert cache.is_open()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is full
        done, _ = fill(source, Between(cache.folder / FILE, 20, 40), cache)
        cache.close()
    count = sqlite3.connect(cache.folder / FILE).execute("SELECT count(*) FROM samples")
    assert (done["stored"],) == count.fetchone()
    assert 0 < done["stored"] < 70 == done["stored"] + done["refused"]


def test_the_command_says_what_it_did(emoji_set, tmp_path, capsys):
    folder, spec = tmp_path / "c", f"jsonl:{emoji_set(40)}"
    words = [spec, "--image-size", "64", "--workers", "0", "--cache", str(folder), "--limit", "1"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "40 images stored, 0 were there, 0 unreadable, 0 not stored" in said
    assert "KiB of 1.0 GiB, " in said  # as every flag that takes a size
    assert main(words) == 0
    assert "0 images stored, 40 were there" in capsys.readouterr().out
    cache = SampleCache(folder)
    # what training asks for
    assert cache.has(
        TrainTransform((64, 64)).stored.key(open_source(spec).content_hash("image", 3))
    )
    cache.close()
    with pytest.warns(RuntimeWarning, match="would pass its limit"):
        assert main([*words[:-2], "--image-size", "32", "--limit", "0.0001"]) == 1
    assert re.search(r" 0 images stored, .* 40 not stored", capsys.readouterr().out)


@pytest.mark.parametrize("given", [50.0, 0.25])
def test_a_limit_counts_in_gib(tmp_path, given):
    """As `--limit` of the command does, and every other flag that takes a size."""
    cache = sample_cache(LoadingOptions(cache=str(tmp_path / "c"), cache_limit=given))
    assert cache is not None and cache.limit_bytes == given * 1024**3
    cache.close()
