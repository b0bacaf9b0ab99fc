"""The cache answers with the very pixels or not at all, whatever happens to its file and to those
that write it."""

import os
import re
import signal
import threading
import time
import warnings

import numpy as np
import pytest
from cache_writers import LIMIT_S, items, sample_image, write_for_ever, write_items
from filelock import FileLock

from data.cache import SampleCache, _bytes_on_disk, fill, key_of, open_cache
from data.cache.__main__ import main
from data.cache.packing import MAGIC, packed, unpacked
from data.index.sources import open_source
from data.modalities.transforms import Stored, train_transform
from data.processes import start_method

STORED = Stored((48, 48))


@pytest.fixture
def cache(tmp_path):
    cache = SampleCache(tmp_path / "images")
    yield cache
    cache.close()


def test_what_was_put_comes_back_and_is_the_caller_s_own(cache):
    assert cache.get(b"key 3") is None
    for key, value in items(range(6)):
        cache.put(key, value)
    cache.close(LIMIT_S)  # waits for the thread that writes
    for key, value in items(range(6)):
        assert np.array_equal(cache.get(key), value)
    cache.get(b"key 3")[:] = 0
    assert np.array_equal(cache.get(b"key 3"), sample_image(3))


def test_the_key_has_content_size_and_version(cache, demo, monkeypatch):
    data = demo.image_bytes(5)
    other = Stored((24, 24))
    assert (
        len({key_of(demo.content_hash(i), stored) for i in (5, 6) for stored in (STORED, other)})
        == 4
    )
    key = key_of(demo.content_hash(5), STORED)
    monkeypatch.setattr("data.modalities.transforms.VERSION", "next")
    assert key_of(demo.content_hash(5), STORED) != key
    first = cache.image(demo.content_hash(5), STORED, lambda: data)
    assert np.array_equal(first, STORED(data))


def test_an_image_is_read_once(cache, demo):
    reads = []

    def read():
        reads.append(1)
        return demo.image_bytes(5)

    first = cache.image(demo.content_hash(5), STORED, read)
    cache.close(LIMIT_S)
    assert (
        np.array_equal(cache.image(demo.content_hash(5), STORED, read), first) and len(reads) == 1
    )


def test_a_file_that_has_changed_is_not_kept_under_its_old_hash(cache, demo):
    changed = cache.image(demo.content_hash(5), STORED, lambda: demo.image_bytes(6))
    assert np.array_equal(changed, STORED(demo.image_bytes(6)))
    cache.close(LIMIT_S)
    assert not cache.has(key_of(demo.content_hash(5), STORED))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda value: value[:-1],
        lambda value: value + b"\0",
        lambda value: b"",
        lambda value: value[:10],
        lambda value: b"????" + value[4:],
        lambda value: value[:100] + bytes([value[100] ^ 1]) + value[101:],
        lambda value: MAGIC + value[6:8] + value[4:6] + value[8:],  # height and width exchanged
        lambda value: bytes(len(value)),
    ],
)
def test_a_value_that_is_not_whole_is_a_miss(spoil):
    value = packed(sample_image(1))
    assert np.array_equal(unpacked(value), sample_image(1))
    assert unpacked(spoil(value)) is None


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
    assert (
        cache.used_bytes() < 1.2 * sum(map(_bytes_on_disk, items(range(90)))) + 100_000
    )  # written once each


def test_a_writer_that_is_killed_leaves_a_whole_cache(cache):
    for _ in range(2):
        writer = start_method().Process(target=write_for_ever, args=(cache,))
        writer.start()
        deadline = time.monotonic() + LIMIT_S
        while not cache.has(b"key 60"):
            assert time.monotonic() < deadline, "nothing is written"
            time.sleep(0.02)
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        assert cache.write(items([1000]), turn_s=LIMIT_S)  # its turn is over
        found = [n for n in range(50) if cache.has(b"key %d" % n)]
        assert len(found) >= 10 and all(
            np.array_equal(cache.get(b"key %d" % n), sample_image(n)) for n in found
        )


def test_a_writer_that_stands_still_keeps_nobody_waiting(cache, monkeypatch):
    """It has its turn until all have gone on; only the thread that writes in the background still
    waits for its own then."""
    monkeypatch.setattr("data.cache.TURN_S", LIMIT_S)
    assert cache.is_open()
    with FileLock(cache.folder / "writer.lock"):
        assert not cache.write(items([1]), turn_s=0.1)
        cache.put(*items([2])[0])
        (background,) = (thread for thread in threading.enumerate() if thread.name == "image-cache")
        assert cache.get(b"key 2") is None
        cache.close(timeout_s=0.2)
        assert background.is_alive()
    background.join(LIMIT_S)
    assert not background.is_alive()


def test_a_full_cache_says_so_once_and_goes_on_answering(tmp_path):
    cache = SampleCache(tmp_path / "images", limit_bytes=200_000)
    with pytest.warns(RuntimeWarning, match="would pass its limit.*decoded each time") as warned:
        kept = [cache.write([item]) for item in items(range(60))]
    assert len(warned) == 1 and 10 < sum(kept) < 60 and kept == sorted(kept, reverse=True)
    assert (tmp_path / "images" / "data.mdb").stat().st_size <= 250_000
    for n, (key, value) in enumerate(items(range(60))):
        found = cache.get(key)
        assert np.array_equal(found, value) if kept[n] else found is None
    cache.close()


def spoil_head(file):
    file.write_bytes(b"no database" * 1000)


def spoil_tail(file):
    os.truncate(file, file.stat().st_size // 2)


def spoil_inside(file):
    """What is left when power fails before the pages were written."""
    file.write_bytes(file.read_bytes()[:8192] + bytes(file.stat().st_size - 8192))


@pytest.mark.parametrize("spoil", [spoil_head, spoil_tail, spoil_inside])
def test_a_broken_file_costs_one_warning_and_images_are_decoded(cache, demo, spoil):
    write_items(cache, range(50))
    spoil(cache.folder / "data.mdb")
    with pytest.warns(RuntimeWarning, match="are decoded instead") as warned:
        for i in range(20):
            found = cache.image(demo.content_hash(i), STORED, lambda i=i: demo.image_bytes(i))
            assert np.array_equal(found, STORED(demo.image_bytes(i)))
        cache.close(LIMIT_S)
    assert len(warned) == 1


def test_a_folder_that_cannot_be_made_costs_one_warning(tmp_path, demo):
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(RuntimeWarning, match="cannot be used") as warned:
        assert open_cache(tmp_path / "file" / "images") is None
        cache = SampleCache(tmp_path / "file" / "images")
        assert cache.get(b"key") is None
        cache.put(b"key", sample_image(1))
    assert len(warned) == 1
    with pytest.raises(ValueError, match="at least 1"):
        SampleCache(tmp_path, 0)


def test_closing_and_opening_again_finds_nothing_wrong_with_a_file_that_was_written_over(cache):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(12):
            cache.write(
                [
                    (b"key %d" % (n % 3), sample_image(n, size=20 + 9 * n)),
                    *items(range(100 + n, 103 + n)),
                ]
            )
            cache.close()
            assert np.array_equal(cache.get(b"key %d" % (n % 3)), sample_image(n, size=20 + 9 * n))


@pytest.mark.parametrize("workers", [0, 2])
def test_filling_can_be_done_again_and_skips_what_cannot_be_read(emoji_set, cache, workers):
    file = emoji_set(70)
    source = open_source(f"jsonl:{file}")
    (file.parent / "images of emoji" / "9.png").write_bytes(b"broken")
    done = fill(source, STORED, cache, workers)
    assert (done.stored, done.present, done.refused, dict(done.bad)) == (
        69,
        0,
        0,
        {"unreadable": 1},
    )
    assert f"{file}:10" in done.examples[0]
    again = fill(source, STORED, cache, workers)
    assert (again.stored, again.present) == (0, 69)
    for i in (0, 30, 69):
        assert np.array_equal(
            cache.get(key_of(source.content_hash(i), STORED)), STORED(source.image_bytes(i))
        )


def test_the_command_says_what_it_did(emoji_set, tmp_path, capsys):
    words = [
        f"jsonl:{emoji_set(40)}",
        "--image-size",
        "64",
        "--workers",
        "0",
        "--cache",
        str(tmp_path / "c"),
        "--limit",
        "1",
    ]
    assert main(words) == 0
    assert "40 images stored, 0 were there, 0 unreadable, 0 not stored" in capsys.readouterr().out
    assert main(words) == 0
    assert "0 images stored, 40 were there" in capsys.readouterr().out
    source = open_source(words[0])
    cache = SampleCache(tmp_path / "c")
    assert cache.has(
        key_of(source.content_hash(3), train_transform(64).stored)
    )  # what training asks for
    cache.close()
    with pytest.warns(RuntimeWarning, match="would pass its limit"):
        assert main([*words[:-2], "--image-size", "32", "--limit", "0.0001"]) == 1
    assert re.search(r" 0 images stored, .* 40 not stored", capsys.readouterr().out)
