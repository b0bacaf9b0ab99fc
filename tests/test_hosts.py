"""Two hosts that read the same shards of one store, each with a cache of its own: whatever the
store does, and whichever of them is killed, they load what they would have loaded.

Hosts have no model (`data_hosts.py`): a digest of each step stands for its samples."""

import time
from dataclasses import replace

import psutil
import pytest
from data_hosts import Bytes, Host, opened, read_lines, requests_of
from disks import a_cache, small_disk
from launched import finish, ranks_of, start, wait_for
from stores import Faults, http_server
from stream_shards import write_shards

from data.index.sources import open_source
from data.modalities.tokenizer import train_tokenizer
from data.streams.source import INDEX_BYTES

SHARDS, OF_A_SHARD, MIXED = 24, 20, 3
BATCH = 12  # 40 steps an epoch
STEPS = 60
KEPT = 8  # shards that a cache has room for
LIMIT_S = 120  # ends a host that hangs
HOSTS = {
    "image": {"branch": "image", "replica": 0, "replicas": 2},
    "text": {"branch": "text", "replica": 0, "replicas": 1, "num_micro_batches": 2},
}


@pytest.fixture(scope="module")
def store(module_folder):
    """The folder of the shards, and their hosts but for the address of the store."""
    folder = module_folder("store")
    pattern = write_shards(folder / "shards", [OF_A_SHARD] * SHARDS, ".parquet")
    demo = open_source("demo")
    train_tokenizer([demo.captions(i)[0] for i in range(500)], folder / "tokenizer", 500)
    size = max(file.stat().st_size for file in (folder / "shards").iterdir())
    host = Host(
        f"stream:STORE/{pattern}?mixed={MIXED}",
        BATCH,
        KEPT * (size + OF_A_SHARD * INDEX_BYTES),
        out="",
        stop=STEPS,
        tokenizer=str(folder / "tokenizer"),
        limit_s=LIMIT_S,
    )
    return folder / "shards", {name: replace(host, **own) for name, own in HOSTS.items()}


class Pair:
    """The two hosts on a store at `url`, with their files in `folder`."""

    def __init__(self, hosts, url, folder, monkeypatch):
        self.hosts = {
            name: replace(host, spec=host.spec.replace("STORE", url), out=str(folder / name))
            for name, host in hosts.items()
        }
        self.folder, self.monkeypatch = folder, monkeypatch

    def start(self, name, cache=None, **more):
        """With a cache of its own, as it was left, unless one is given."""
        self.monkeypatch.setenv("WYE_CACHE", str(cache or self.folder / f"{name} cache"))
        return start("tests/data_hosts.py", replace(self.hosts[name], **more).words())

    def lines(self, name):
        return read_lines(self.hosts[name].out)

    def digests(self, name):
        """Of each step; where steps came again they were the same."""
        found = {(line["step"], line["digest"]) for line in self.lines(name)}
        assert sorted(step for step, _ in found) == [*range(STEPS)]
        return dict(found)


def well(*runs):
    for run in runs:
        status, output = finish(run)
        assert status == 0, output[-3000:]


@pytest.fixture(scope="module")
def expected(store, module_folder):
    """Of each host and step the digest, from the files themselves, without other processes."""
    shards, hosts = store
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WYE_CACHE", str(module_folder("expected")))
        for name, host in hosts.items():
            source, batches = opened(replace(host, spec=host.spec.replace("STORE", str(shards))))
            loads, found[name] = Bytes(source, name), dict.fromkeys(range(STEPS), "")
            for request in requests_of(host, batches):
                found[name][request.step] += bytes(loads.load(request)[0]["digest"].tolist()).hex()
    return found


def test_a_store_that_fails_changes_no_sample(store, expected, tmp_path, monkeypatch):
    """Slow, with resets, cut answers and 503s, and gone for some seconds."""
    shards, hosts = store
    faults = Faults(1, latency_s=0.01, bytes_per_s=800_000, resets=0.05, cuts=0.05, refusals=0.05)
    with http_server(shards, faults) as url:
        pair = Pair(hosts, url, tmp_path, monkeypatch)
        runs = {name: pair.start(name) for name in hosts}
        for name, run in runs.items():
            wait_for(lambda: len(pair.lines(name)) > 4, run)
        with faults.gone():
            time.sleep(1)
            done = [len(pair.lines(name)) for name in hosts]
            assert max(done) < STEPS  # so both wait for what comes after
        well(*runs.values())
    assert {name: pair.digests(name) for name in hosts} == expected and faults.done > 5


def test_a_host_that_is_killed_loads_the_same_again(store, expected, tmp_path, monkeypatch):
    """From an earlier step, with the cache that it left; the other host goes on meanwhile, and no
    process is left."""
    shards, hosts = store
    faults = Faults(2, latency_s=0.01, bytes_per_s=800_000, cuts=0.1)
    with http_server(shards, faults) as url:
        pair = Pair(hosts, url, tmp_path, monkeypatch)
        runs = {"text": pair.start("text", workers=2), "image": pair.start("image")}
        wait_for(lambda: len(pair.lines("text")) > 8, runs["text"])
        (killed,) = ranks_of(runs["text"])
        below = killed.children(recursive=True)
        assert len(below) >= 3 + 1  # two loaders, the prefetcher, and the server that forks them
        killed.kill()
        status, _ = finish(runs["text"])
        _, left = psutil.wait_procs(below, timeout=60)
        assert status != 0 and not left
        reached = len(pair.lines("text"))
        assert 8 < reached < STEPS
        well(pair.start("text", start=reached - 3), runs["image"])
    assert {name: pair.digests(name) for name in hosts} == expected
    assert len(pair.lines("text")) == STEPS + 3


def test_a_host_whose_disk_is_full_loads_the_same(store, expected, tmp_path, monkeypatch):
    """It has less room than its limit says."""
    shards, hosts = store
    with small_disk(tmp_path / "text cache", hosts["text"].cache_bytes // 4096):
        with http_server(shards) as url:
            pair = Pair(hosts, url, tmp_path, monkeypatch)
            well(pair.start("text", cache_bytes=1 << 30))
    assert pair.digests("text") == expected["text"]


def test_the_bound_of_a_machine_holds_for_all_its_processes(store, expected, tmp_path, monkeypatch):
    """Both hosts as ranks of one machine: loaders of both, what packs texts, and two prefetchers
    fill one cache."""
    shards, hosts = store
    # without a model nothing keeps two ranks in step, and each holds what it reads
    limit = 2 * hosts["image"].cache_bytes
    how = {"cache": tmp_path / "cache", "cache_bytes": limit, "workers": 2}
    with http_server(shards) as url, a_cache(how["cache"], limit, monkeypatch) as seen:
        pair = Pair(hosts, url, tmp_path, monkeypatch)
        well(*(pair.start(name, **how) for name in hosts))
    assert {name: pair.digests(name) for name in hosts} == expected
    assert max(seen) > limit // 4
    usage = [line["usage"] for name in hosts for line in pair.lines(name)]  # as it is announced
    assert limit // 2 < max(usage) <= limit
