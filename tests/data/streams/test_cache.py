"""The folder of fetched shards: its limit, its order, and processes that end at any moment."""

import errno
import fcntl
import json
import math
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest
from disks import small_disk

from data.streams.cache import ABOUT, ShardCache

FORK = multiprocessing.get_context("fork")
PART = 10  # bytes


def writes(size, name="shard.tar"):
    """A filler of `size` bytes, which goes on where there is a beginning."""

    def fill(folder):
        with open(folder / name, "ab") as file:
            file.write(b"x" * (size - file.tell()))

    return fill


def never(folder):
    raise AssertionError("is filled a second time")


def add(cache, *names, size=PART, **how):
    for name in names:
        cache.hold(name, size, writes(size), **how).close()


def there(cache):
    """The names of whole entries."""
    folders = [each for each in cache.folder.iterdir() if not each.suffix]
    return {json.loads((each / ABOUT).read_text())["name"] for each in folders}


def on_disk(folder):
    return sum(
        os.lstat(Path(parent, name)).st_size
        for parent, _, names in os.walk(folder)
        for name in names
        if ABOUT not in name
    )


def started(*act):
    process = FORK.Process(target=act[0], args=act[1:])
    process.start()
    return process


def ended(*processes, code=0):
    for each in processes:
        each.join(60)
        assert each.exitcode == code, each


@pytest.fixture(params=["cache"])
def folder(tmp_path, request):
    return tmp_path / request.param


@pytest.fixture
def cache(folder):
    return ShardCache(folder, 3 * PART)


@pytest.mark.parametrize("folder", ["two words/缓存"], indirect=True)
def test_an_entry_is_filled_once(cache):
    name = "https://me:pass@host/分片1.tar?signature=tell-nobody"
    copy = pickle.loads(pickle.dumps(cache))
    assert copy == cache and copy.usage() == 0
    with cache.hold(name, PART, writes(PART)) as held:
        assert (held.folder / "shard.tar").read_bytes() == b"x" * PART
        with copy.hold(name, PART, never) as again:
            assert again.folder == held.folder
    assert cache.usage() == PART
    text = "".join(
        str(file) + file.read_text() for file in cache.folder.rglob("*") if file.is_file()
    )
    assert "pass" not in text and "tell-nobody" not in text and "分片1.tar" in text


def test_what_is_needed_last_goes_first(cache):
    uses = {"a": 5.0, "b": 7.0, "c": 6.0, "d": 1.0, "e": 2.0}
    add(cache, "a", "b", "c")
    add(cache, "d", next_use=uses.__getitem__)
    assert there(cache) == {"a", "c", "d"}
    add(cache, "e", next_use=lambda name: uses[name] if name != "a" else math.inf)
    assert there(cache) == {"c", "d", "e"}
    add(cache, "f", next_use={"d": 1.0, "c": 9.0}.__getitem__)  # e is unknown
    assert there(cache) == {"c", "d", "f"}


def test_without_an_order_the_longest_unused_goes(cache):
    add(cache, "a", "b", "c")
    for each, when in zip("abc", (300, 100, 200)):
        os.utime(cache.hold(each, PART, never).folder, (when, when))
    held = cache.hold("b", PART, never)
    os.utime(held.folder, (1, 1))
    held.close()  # is now
    for name in "ac":
        with cache.hold(name, PART, never) as held:
            pass
        os.utime(held.folder, (100 + (name == "a"),) * 2)
    add(cache, "d")
    assert there(cache) == {"a", "b", "d"}
    add(cache, "e")
    assert there(cache) == {"b", "d", "e"}


def test_what_readers_are_done_with_goes_before_what_was_fetched_ahead(cache):
    reads = cache.hold("first", PART, writes(PART))
    add(cache, "ahead", "too")
    reads.close(done=True)
    add(cache, "new")
    assert there(cache) == {"ahead", "too", "new"}


def test_what_is_fetched_ahead_takes_nothing_from_what_is_used_before(cache):
    uses = {"a": 1.0, "b": 5.0, "c": 6.0, "d": 5.5, "e": 5.0, "f": 5.0}.__getitem__
    add(cache, "a", "b", "c")
    assert cache.hold("d", 2 * PART, never, needed=False, next_use=uses) is None
    assert there(cache) == {"a", "b", "c"}  # not even c, which would not be enough
    add(cache, "d", needed=False, next_use=uses)
    assert there(cache) == {"a", "b", "d"}
    add(cache, "e", needed=False, next_use=uses)
    add(cache, "f", needed=False, next_use=uses)
    assert len(there(cache)) == 3 and "a" in there(cache)
    held = [cache.hold(name, PART, never) for name in there(cache)]
    assert cache.hold("z", PART, never, needed=False) is None
    assert cache.hold(min(there(cache)), PART, never, needed=False) is not None
    assert len(held) == 3 and cache.usage() == 3 * PART


def test_room_is_waited_for_and_then_an_error_says_who_has_it(cache):
    held = cache.hold("reads/a", 2 * PART, writes(2 * PART))
    with pytest.raises(OSError, match="reads/a.*too small by 10.*give more"):
        cache.hold("b", 2 * PART, never, wait_s=0.1)
    timer = threading.Timer(0.2, held.close)
    timer.start()
    add(cache, "b", size=2 * PART, wait_s=60)
    timer.join()
    with pytest.raises(OSError, match="--stream-cache allows 30"):
        cache.hold("c", 3 * PART + 1, never)
    assert there(cache) == {"b"}
    with pytest.raises(ValueError, match="at least 1"):
        ShardCache(cache.folder, 0)


def test_a_filler_that_fails_leaves_its_part(cache):
    def fails(folder):
        writes(4)(folder)
        raise OSError(errno.ETIMEDOUT, "the store is gone")

    with pytest.raises(OSError, match="gone"):
        cache.hold("a", PART, fails)
    assert cache.usage() == PART and on_disk(cache.folder) == 4 and there(cache) == set()
    add(cache, "b", "c")
    os.utime(cache.hold("b", PART, never).folder, (1, 1))
    add(cache, "d", needed=False, next_use={"d": 1.0}.__getitem__)  # the part goes before others
    assert there(cache) == {"b", "c", "d"} and on_disk(cache.folder) == 3 * PART
    with pytest.raises(OSError, match="gone"):
        cache.hold("a", PART, fails)

    def goes_on(folder):
        assert on_disk(folder) == 4
        writes(PART)(folder)

    cache.hold("a", PART, goes_on).close()
    assert "a" in there(cache) and on_disk(cache.folder) == 3 * PART


def test_a_part_that_somebody_removes_is_filled_again(cache):
    tries = []

    def fill(folder):
        tries.append(folder)
        writes(PART)(folder)
        if len(tries) == 1:
            shutil.rmtree(folder)

    with cache.hold("a", PART, fill) as held:
        assert on_disk(held.folder) == PART and len(tries) == 2


def test_an_entry_that_is_replaced_while_it_is_opened_is_held(cache, monkeypatch):
    add(cache, "a", size=3 * PART)
    flock = fcntl.flock

    def slow(descriptor, how):
        monkeypatch.undo()
        add(cache, "b", size=3 * PART)
        add(cache, "a", size=3 * PART)
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", slow)
    with cache.hold("a", 3 * PART, never):
        assert cache.hold("b", PART, never, needed=False) is None


def test_what_was_announced_counts_and_more_if_it_came(cache):
    add(cache, "a", "b")
    cache.hold("c", PART, writes(4)).close()
    assert cache.usage() == 3 * PART  # an index may follow
    cache.hold("d", 6, writes(PART)).close()  # more than announced
    assert on_disk(cache.folder) <= cache.usage() == 3 * PART and "d" in there(cache)


def test_what_is_written_later_counts_where_it_is_more_than_announced(cache):
    add(cache, "a", "b")
    with cache.hold("c", 4, writes(4)) as held:
        (held.folder / "index").write_bytes(b"x" * 4)
        assert cache.usage() == 2 * PART + 4
        cache.count_anew(held)
        assert cache.usage() == 2 * PART + 8
        (held.folder / "index").write_bytes(b"x" * (PART - 1))
        cache.count_anew(held)
    assert cache.usage() <= 3 * PART and "c" in there(cache) and len(there(cache)) == 2


def test_entries_are_looked_at_once_for_a_shard(cache):
    """Which may be thousands, while all other processes of the machine wait."""
    seen = []

    def note(event, given):
        if event in ("os.scandir", "os.listdir") and str(given[0]) == str(cache.folder):
            seen.append(event)

    add(cache, "a", "b", "c")
    sys.addaudithook(note)  # for good, as hooks are
    for name in ("d", "e"):
        seen.clear()
        add(cache, name, next_use={"b": 9.0}.__getitem__)
        assert len(seen) == 1 and len(there(cache)) == 3
    assert there(cache) >= {"d", "e"}


def test_where_a_filler_is_killed_one_that_waits_goes_on(cache):
    reached, go = FORK.Event(), FORK.Event()

    def killed(folder):
        writes(4)(folder)
        reached.set()
        go.wait(60)
        os.kill(os.getpid(), signal.SIGKILL)

    fills = FORK.Value("i", 0)

    def goes_on(folder):
        assert on_disk(folder) == 4
        writes(PART)(folder)
        with fills.get_lock():
            fills.value += 1

    def waits():
        with cache.hold("a", PART, goes_on) as held:
            assert on_disk(held.folder) == PART

    first = started(cache.hold, "a", PART, killed)
    assert reached.wait(60)
    waiting = [started(waits) for _ in range(3)]
    assert cache.usage() == PART  # as announced
    assert cache.hold("b", 3 * PART, never, needed=False) is None  # it is worked on
    go.set()
    ended(first, code=-signal.SIGKILL)
    ended(*waiting)
    assert fills.value == 1


def test_a_killed_holder_holds_nothing(cache):
    reading, go = FORK.Event(), FORK.Event()

    def reads():
        held = cache.hold("a", 3 * PART, writes(3 * PART))
        child = FORK.Process(target=go.wait, args=(60,))  # outlives it, and holds nothing
        child.start()
        reading.set()
        held.folder.stat()
        signal.pause()

    process = started(reads)
    assert reading.wait(60)
    assert cache.hold("b", PART, never, needed=False) is None
    os.kill(process.pid, signal.SIGKILL)
    os.waitpid(process.pid, 0)
    add(cache, "b", wait_s=30)
    assert there(cache) == {"b"}
    go.set()


def test_a_child_lets_nothing_of_its_parent_go(cache):
    held = cache.hold("a", 3 * PART, writes(3 * PART))
    ended(started(held.close))
    assert cache.hold("b", PART, never, needed=False) is None
    held.close()
    held.close()
    add(cache, "b", needed=False)


def test_two_readers_evict_at_once(cache):
    for turn in range(10):
        add(cache, *(f"{turn}/{each}" for each in range(3)))
        barrier = FORK.Barrier(2)

        def reads(name, barrier=barrier):
            barrier.wait(60)
            with cache.hold(name, PART, writes(PART)) as held:
                assert on_disk(held.folder) == PART

        ended(started(reads, f"{turn}/x"), started(reads, f"{turn}/y"))
        assert {f"{turn}/x", f"{turn}/y"} < there(cache) and on_disk(cache.folder) == 3 * PART


def test_the_limit_holds_whatever_processes_do(cache):
    """Also where they are killed while they fill, hold or remove."""
    limit = 100 * PART
    cache = ShardCache(cache.folder, limit)

    def works(seed):
        draw = random.Random(seed)
        for turn in range(300):
            number = draw.randrange(40)
            size = PART * (3 + number % 10)

            def fill(folder, size=size, draw=draw):
                for end in range(0, size + 1, PART):
                    writes(max(end, on_disk(folder)))(folder)
                if draw.random() < 0.004:
                    os.kill(os.getpid(), signal.SIGKILL)

            order = (lambda name: -float(len(name))) if turn % 2 else None
            held = cache.hold(f"{number}", size, fill, turn % 3 > 0, order)
            if held is not None:
                with held:
                    assert on_disk(held.folder) == size
                    if draw.random() < 0.001:
                        os.kill(os.getpid(), signal.SIGKILL)

    def watches(done, most):
        while not done.is_set():
            cache.folder.mkdir(exist_ok=True)
            lock = os.open(cache.folder, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)  # so that nothing moves from one place to another
            most.value = max(most.value, on_disk(cache.folder))
            os.close(lock)

    done, most = FORK.Event(), FORK.Value("i", 0)
    watcher = started(watches, done, most)
    workers = [started(works, seed) for seed in range(6)]
    for each in workers:
        each.join(120)
        assert each.exitcode in (0, -signal.SIGKILL)
    done.set()
    ended(watcher)
    assert limit // 2 < most.value <= limit
    add(cache, "all", size=limit)
    assert there(cache) == {"all"} and len(list(cache.folder.iterdir())) == 1


def test_what_is_damaged_is_filled_anew(cache):
    entry = cache.hold("a", PART, writes(PART)).folder

    def loses_bytes():
        os.truncate(entry / "shard.tar", 3)

    def half():
        (entry / ABOUT).write_text('{"name": "a", "byt')

    def other():
        (entry / ABOUT).write_text('[{"bytes": Infinity}]')

    def infinite():
        (entry / ABOUT).write_text('{"name": "a", "bytes": Infinity}')

    def none():
        (entry / ABOUT).unlink()

    def broken_eviction():
        (entry / "shard.tar").unlink()
        entry.rename(entry.with_suffix(".gone"))

    for damage in (loses_bytes, half, other, infinite, none, broken_eviction):
        damage()
        assert cache.usage() <= PART
        with cache.hold("a", PART, writes(PART)) as held:
            assert on_disk(held.folder) == PART
        assert there(cache) == {"a"}, damage.__name__
    half()
    add(cache, "b", size=3 * PART, next_use=lambda name: {"b": 1.0}[name])
    assert there(cache) == {"b"} and on_disk(cache.folder) == 3 * PART


def test_a_link_in_the_folder_leads_nowhere(cache, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    entry = cache.hold("a", PART, writes(PART)).folder
    shutil.rmtree(entry)
    entry.with_suffix(".part").symlink_to(own)
    with pytest.raises(OSError, match="leads out"):
        cache.hold("a", PART, never)
    add(cache, "b", size=3 * PART)
    assert own.is_dir() and list(own.iterdir()) == []


def test_a_file_system_without_locks_is_named(cache, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="locks no folders.*WYE_CACHE"):
        cache.hold("a", PART, never)


def test_a_full_disk_is_made_room_on(tmp_path):
    page = 4096
    disk = tmp_path / "disk"
    with small_disk(disk, 40):
        cache = ShardCache(disk / "cache", 1000 * page)
        add(cache, "a", "b", "c", size=10 * page)
        held = cache.hold("a", 10 * page, never)
        add(cache, "d", size=20 * page)
        assert there(cache) == {"a", "d"}
        uses = {"a": 1.0, "d": 2.0, "e": 3.0}.__getitem__
        ahead = cache.hold("e", 20 * page, writes(20 * page), needed=False, next_use=uses)
        assert ahead is None and there(cache) == {"a", "d"}
        with pytest.raises(OSError, match="bytes are free.*smaller --stream-cache") as caught:
            cache.hold("e", 35 * page, writes(35 * page))
        assert caught.value.errno == errno.ENOSPC
        assert there(cache) == {"a"} and cache.usage() == on_disk(cache.folder) == 10 * page
        held.close()
        add(cache, "e", size=35 * page)
        assert there(cache) == {"e"}
