"""Disks that are small, and caches that are watched."""

import os
import subprocess
import threading
from contextlib import contextmanager, suppress

import pytest


@contextmanager
def small_disk(folder, pages):
    folder.mkdir()
    options = f"size={pages * 4096}"
    mount = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no program mount")
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def a_cache(folder, limit, monkeypatch):
    """A cache that fails the test where it is larger than its limit. Gives the sizes that were
    seen, in bytes."""
    monkeypatch.setenv("WYE_CACHE", str(folder))
    done, seen = threading.Event(), [0]

    def watch():
        while not done.wait(0.05):
            held = 0
            for parent, _, names in os.walk(folder / "streams" / "shards"):
                for name in names:
                    with suppress(FileNotFoundError):
                        held += os.lstat(os.path.join(parent, name)).st_size
            seen.append(held)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()
    assert max(seen) <= limit
