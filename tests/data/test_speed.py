"""What `data.inspect --speed` measures, and what it says of it."""

import io
import math
import re
import tarfile

import pytest
from stores import Faults, http_server

from data.index.sources import open_source
from data.inspect import main
from data.speed import FETCHING, LISTING, READING, TOKENS_OF, Speed, measured
from data.streams.opening import open_stream

WORKERS = [READING, "decoding images", TOKENS_OF]


@pytest.fixture
def shards(demo, tmp_path):
    """Four tars of 12 emoji, and the bytes of an image and its caption."""
    size = 0
    for shard in range(4):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            for i in range(12 * shard, 12 * shard + 12):
                content = {"png": demo.value("image", i), "txt": demo.captions(i)[0].encode()}
                for ending, data in content.items():
                    member = tarfile.TarInfo(f"{i:03d}.{ending}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
                    size += len(data)
    return tmp_path, size


def check(speed, parts, samples=None):
    assert sorted(speed.parts) == sorted(parts)
    for part, (number, size, seconds) in speed.parts.items():
        assert number > 0 and seconds > 0 and (size > 0) == (part in (READING, FETCHING)), part
        assert samples is None or number == samples, part
    # a worker does one thing after the other
    assert 0 < speed.of_worker() < min(map(speed.rate, WORKERS))


def test_sources(demo, emoji_set, shards, tmp_path):
    check(measured(demo, 1), WORKERS)
    check(measured(open_source(f"jsonl:{emoji_set(8)}"), 30), WORKERS, 8)
    folder, size = shards
    stream, _ = open_stream(f"stream:{folder}/{{0..3}}.tar")
    speed = measured(stream, 60)
    check(speed, [LISTING, *WORKERS], 48)
    assert speed.parts[READING][1] == size and not stream._open


def test_a_store_is_measured_until_its_shards_are_at_hand(shards):
    folder, size = shards
    with http_server(folder, faults := Faults(latency_s=0.01)) as url:
        stream, _ = open_stream(f"stream:{url}/{{0..3}}.tar")
        faults.requests.clear()
        speed = measured(stream, 60)
        assert sum(asked.startswith("GET") for asked in faults.requests) == 4
        check(speed, [FETCHING, LISTING, *WORKERS])
        # all but the one that was fetched alone
        number, came, _ = speed.parts[FETCHING]
        sizes = [tar.stat().st_size for tar in folder.glob("*.tar")]
        assert number == 36 and sum(sizes) - came in sizes
        assert speed.parts[READING][0] == 48 and speed.parts[READING][1] == size
        faults.requests.clear()
        check(measured(stream, 60), [LISTING, *WORKERS], 48)
        assert not any(asked.startswith("GET") for asked in faults.requests)


def test_the_limit_is_what_gives_least():
    speed = Speed()
    for part, rate in ((FETCHING, 900), (LISTING, 400), (READING, 1000), ("decoding images", 250)):
        speed.add(part, rate, 0, 1.0)
    assert math.isclose(speed.of_worker(), 200)

    def said(needed, gpus=1, cores=8):
        words = speed.verdict(needed, gpus, cores)
        limit, most, enough = re.search(
            r"limit is ([\w ]+): ([\d,]+) .*which is (\w+)", words
        ).groups()
        return (
            limit,
            int(most.replace(",", "")),
            enough,
            int(re.search(r"--workers (\d+)", words)[1]),
        )

    assert said(1) == ("listing", 400, "enough", 1)
    assert said(401) == ("listing", 400, "too", 3)
    assert said(300, gpus=3) == ("the store", 900, "enough", 2)
    assert said(301, gpus=3) == ("the store", 900, "too", 2)
    assert said(100, gpus=3, cores=4) == ("the CPU", 800, "enough", 1)
    speed.add(READING, 0, 0, 9.0)  # 100 samples/s
    assert said(100, cores=2)[:2] == ("reading", 143)


@pytest.mark.parametrize("needs, words", [("1", "is enough"), ("1e9", "is too little")])
def test_the_command(needs, words, emoji_set, shards, capsys):
    for spec in (f"jsonl:{emoji_set(8)}", f"stream:{shards[0]}/{{0..3}}.tar?mixed=2"):
        assert main([spec, "--speed", "--seconds", "1", "--needs", needs, "--gpus", "2"]) == 0
        out = capsys.readouterr().out
        assert "decoding images" in out and words in out and "2 GPUs" in out
    if needs == "1":
        assert main([spec]) == 2 and "webdataset:" in capsys.readouterr().err
