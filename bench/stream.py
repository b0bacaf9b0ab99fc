"""How fast samples in tar shards reach a consumer from a store and from local disk: a stream,
webdataset's own pipeline, litData, and this project's indexed data set.

    python bench/stream.py                                   tables to bench/out/stream.md
    python bench/stream.py --mb-per-s 100 --only store       a faster store, without local disk
    python bench/stream.py --answer-mb-per-s 10 --mb-per-s 200 --only store     one far away
    PYTHONPATH=DIR python bench/stream.py                    DIR: of `pip install --target DIR
                                                             --no-deps litdata lightning-utilities`

JPEGs of 256×256 pixels, noise on smooth colours, 28 KB each, in tar shards, and the same in litData's
chunks. The store is an HTTP server of the tests (`tests/stores.py`) in a process of its own; it waits
before each answer, and all its answers share a line; with --answer-mb-per-s each is limited
besides. Of litData it is asked as S3.

All decode alike, and crop as this project trains, in as many worker processes: uint8
[b, 3, 224, 224]. A stream has its prefetching process besides, and room on disk for twice the shards
that it mixes; webdataset shuffles its shards and a buffer of 1,000 samples in each worker; litData
shuffles, and has as much room. Nothing is on disk when a loader starts, in a fresh process. Counted
is from a quarter of the data set on until as many samples came as it has; loaders go on, so that as
much is on its way at the end as at the beginning. *Cores*: processor time of the loader's processes
per second, without litData's workers, which begin anew with each pass.
"""

from __future__ import annotations

import atexit
import importlib.util
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.compare import ROOT, Column, Seen, Study, Way, main
from bench.runs import alone, below

SIDE, IMAGE_SIZE, QUALITY = 256, 224, 90
BATCH_SIZE, GLOBAL_BATCH, BUFFER, SEED = 64, 512, 1000, 0
IMAGES = 512  # different ones
MIXED = 8
PASSES = 8  # more than are measured
SHAPE = (BATCH_SIZE, 3, IMAGE_SIZE, IMAGE_SIZE)
SERVER = """import sys
sys.path[:0] = ["tests"]
from pathlib import Path
from stores import Faults, http_server
folder, latency, *rates = sys.argv[1:]
rate, of_answer = map(float, rates)
with http_server(Path(folder), Faults(0, float(latency), rate, of_answer)) as url:
    print(url, flush=True)
    sys.stdin.read()"""


def stream(
    samples: int = 24_576,
    shard_samples: int = 512,
    workers: int = 2,
    latency_ms: int = 20,
    mb_per_s: int = 40,
    answer_mb_per_s: int = 0,
) -> Study:
    """A stream from the store: 1.5 × the better of webdataset and litData; from disk as fast as the
    indexed data set."""
    if samples % shard_samples or samples < 4 * BUFFER * workers:
        raise ValueError(
            f"--samples: whole shards of {shard_samples}, enough for 4 buffers a worker"
        )
    temporary = tempfile.TemporaryDirectory()
    atexit.register(temporary.cleanup)
    folder = temporary.name
    with_litdata = importlib.util.find_spec("litdata") is not None
    size = alone(prepare, folder, samples, shard_samples, with_litdata)
    rates = [str(rate * 1e6) for rate in (mb_per_s, answer_mb_per_s)]
    command = [sys.executable, "-c", SERVER, folder, str(latency_ms / 1e3), *rates]
    server = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.kill)
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    setting = (folder, samples, shard_samples, workers)
    ways = {}
    for place, where in (("store", url), ("disk", folder)):
        against = "webdataset, store" if place == "store" else "indexed, disk"
        for name in LOADERS:
            if (name != "indexed" or place == "disk") and (name != "litdata" or with_litdata):
                way = Way(partial(alone, measure, name, where, *setting), against=against)
                ways[f"{name}, {place}"] = way
    return Study(
        "Samples from shards",
        ways,
        (
            Column("samples_per_s", "samples/s", "{:,.0f}"),
            Column("samples_per_s", "÷ webdataset from the store, ÷ indexed from disk"),
            Column("first_s", "first micro-batch after, s", "{:.1f}"),
            Column("cores", "cores", "{:.2f}"),
        ),
        f"{samples:,} images of {size / 1e3:.1f} KB, {shard_samples} a shard; {workers} workers; the "
        f"store waits {latency_ms} ms and sends {mb_per_s} MB/s"
        + (f", {answer_mb_per_s} in an answer" if answer_mb_per_s else "")
        + ("." if with_litdata else "; litData is not installed, so it is left out."),
        notes=notes,
    )


STUDIES = (stream,)


def notes(seen: Seen) -> Iterator[str]:
    def rates(name: str) -> list[Any]:
        return seen.values(name, "samples_per_s")

    others = list(zip(*(rates(n) for n in ("webdataset, store", "litdata, store") if rates(n))))
    if others and rates("stream, store"):
        ratios = [own / max(b) for own, b in zip(rates("stream, store"), others)]
        yield f"stream ÷ the better other, store: {min(ratios):.2f} to {max(ratios):.2f}"
    yield f"load average at the end: {os.getloadavg()[0]:.1f}"


# -- files


def prepare(folder: str, samples: int, shard_samples: int, with_litdata: bool) -> float:
    """The shards, the index of the indexed data set, litData's chunks; bytes of an image."""
    from data.index.sources import open_source

    place, images = Path(folder), made_images()
    sizes = {}
    for first in range(0, samples, shard_samples):
        name = f"{first // shard_samples:05d}.tar"
        with tarfile.open(place / name, "w", format=tarfile.USTAR_FORMAT) as tar:
            for i in range(first, first + shard_samples):
                for ending, content in (("jpg", images[i % IMAGES]), ("txt", b"noise %d" % i)):
                    member = tarfile.TarInfo(f"{i:08d}.{ending}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        sizes[name] = shard_samples
    (place / "sizes.json").write_text(json.dumps(sizes))
    open_source(spec_of(folder, samples // shard_samples), folder=place / "index", check="header")
    if with_litdata:
        from litdata.streaming.writer import BinaryWriter

        writer = BinaryWriter(str(place / "litdata"), chunk_size=shard_samples)
        for i in range(samples):
            writer[i] = {"jpg": images[i % IMAGES], "txt": f"noise {i}"}
        writer.done()
        writer.merge()
    return sum(map(len, images)) / len(images)


def made_images() -> list[bytes]:
    import numpy as np
    from PIL import Image

    random, images = np.random.default_rng(0), []
    for _ in range(IMAGES):
        corners = Image.fromarray(random.integers(0, 256, (8, 8, 3)).astype(np.uint8))
        smooth = np.asarray(corners.resize((SIDE, SIDE), Image.Resampling.BICUBIC))
        noisy = smooth + random.normal(0, 10, (SIDE, SIDE, 1))
        encoded = io.BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(encoded, "JPEG", quality=QUALITY)
        images.append(encoded.getvalue())
    return images


def spec_of(where: str, shards: int, kind: str = "webdataset") -> str:
    return f"{kind}:{where}/{{00000..{shards - 1:05d}}}.tar"


# -- loaders: each gives uint8 [b, 3, 224, 224], without end


class Decoded:
    """What this project's loader makes of an image, in the workers of others."""

    def __init__(self) -> None:
        from data.modalities.transforms import TrainTransform

        self.transform, self.random = TrainTransform((IMAGE_SIZE, IMAGE_SIZE)), None

    def __call__(self, sample: dict[str, bytes]) -> Any:
        import numpy as np

        if self.random is None:  # each worker has its own
            self.random = np.random.default_rng()
        return self.transform(self.transform.stored(sample["jpg"]), self.random)


def stacked(images: Any) -> Any:
    from data.modalities.transforms import stacked

    return stacked(images)


def one_thread(worker: int) -> None:
    import torch

    torch.set_num_threads(1)


def of_webdataset(where: str, folder: Path, shards: int, workers: int) -> Iterator:
    import webdataset
    from torch.utils.data import DataLoader

    names = [f"{where}/{n:05d}.tar" for n in range(shards)] * PASSES
    dataset = webdataset.WebDataset(names, shardshuffle=len(names), empty_check=False, seed=SEED)
    dataset = dataset.shuffle(BUFFER).map(Decoded()).batched(BATCH_SIZE, collation_fn=stacked)
    yield from DataLoader(dataset, None, num_workers=workers, worker_init_fn=one_thread)


def of_litdata(where: str, folder: Path, shards: int, workers: int) -> Iterator:
    import torch
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader
    from litdata.streaming.resolver import Dir

    torch.set_num_threads(1)  # what its workers, which are forked, begin with

    class Images(StreamingDataset):
        decoded = Decoded()

        def __getitem__(self, index: Any) -> Any:
            return self.decoded(super().__getitem__(index))

    given: dict[str, Any] = {"input_dir": f"{where}/litdata"}
    if where.startswith("http"):
        # it asks through obstore, and knows stores with TLS alone
        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
        keys = {"aws_access_key_id": "of-tests", "aws_secret_access_key": "of-tests"}
        given = {
            "input_dir": Dir(os.environ["WYE_CACHE"], "s3://litdata"),
            "storage_options": {"endpoint_url": where, "region_name": "us-east-1", **keys},
        }
    dataset = Images(shuffle=True, seed=SEED, max_cache_size=cache_bytes(folder), **given)
    loader = StreamingDataLoader(
        dataset, batch_size=BATCH_SIZE, num_workers=workers, collate_fn=stacked
    )
    for _ in range(PASSES):
        yield from loader


def of_stream(where: str, folder: Path, shards: int, workers: int) -> Iterator:
    from data.batching.stream_order import Shards, StreamOrder
    from data.streams.opening import open_stream
    from data.streams.prefetch import Prefetcher

    spec = f"{spec_of(where, shards, 'stream')}?mixed={MIXED}"
    source, mixed = open_stream(spec, cache_bytes=cache_bytes(folder))
    counts = source.table.counts
    order = StreamOrder(len(source), GLOBAL_BATCH, SEED, shards=(Shards(counts, mixed),))
    with Prefetcher(source, order, None, 0) as prefetcher:
        yield from ours(source, order, workers, lambda step: prefetcher.at(step, order))


def of_indexed(where: str, folder: Path, shards: int, workers: int) -> Iterator:
    from data.batching.order import GlobalOrder
    from data.index.sources import open_source

    source = open_source(spec_of(where, shards), folder=folder / "index", check="header")
    yield from ours(source, GlobalOrder(len(source), GLOBAL_BATCH, SEED), workers)


def ours(source: Any, order: Any, workers: int, at: Callable = lambda step: None) -> Iterator:
    """As `launch/feeding.py` loads; `at` is told the step of each request."""
    import numpy as np

    from data.batching.batches import Batches
    from data.batching.settings import Setting
    from data.loader import MicroBatchDataset, micro_batches
    from data.modalities.image import ImageModality
    from data.modalities.transforms import EvalTransform, TrainTransform

    side = (IMAGE_SIZE, IMAGE_SIZE)
    dataset = MicroBatchDataset(source, [ImageModality(TrainTransform(side), EvalTransform(side))])
    settings = [Setting(0, {"image": GLOBAL_BATCH // BATCH_SIZE})]
    batches = Batches(order, np.arange(len(source)), settings)
    requests = batches.requests("image", 0, 1, 0, PASSES * order.steps_per_epoch)
    told = ((at(request.step), request)[1] for request in requests)
    for micro_batch in micro_batches(dataset, told, workers):
        yield micro_batch["pixel_values"]


def cache_bytes(folder: Path) -> int:
    return 2 * MIXED * (folder / "00000.tar").stat().st_size


LOADERS = {
    "indexed": of_indexed,
    "stream": of_stream,
    "webdataset": of_webdataset,
    "litdata": of_litdata,
}


# -- measuring


def measure(
    loader: str, where: str, folder: str, samples: int, shard_samples: int, workers: int
) -> dict[str, float]:
    import torch
    import webdataset  # noqa: F401  nobody's start-up pays for these imports

    import data.loader  # noqa: F401

    torch.set_num_threads(1)
    seen, before, began_s, busy_s, first_s = 0, samples, 0.0, 0.0, 0.0
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        os.environ["WYE_CACHE"] = cache
        asked = time.perf_counter()
        made = LOADERS[loader](where, Path(folder), samples // shard_samples, workers)
        for batch in made:
            if tuple(batch.shape) != SHAPE or batch.dtype != torch.uint8:
                raise ValueError(f"{loader} gave {batch.dtype} {tuple(batch.shape)}")
            float(batch.as_strided((batch.numel() // 4096,), (4096,)).sum())
            first_s = first_s or time.perf_counter() - asked
            seen += len(batch)
            if not began_s and seen >= samples // 4:
                began_s, busy_s, before = time.perf_counter(), processor_s(), seen
            if seen >= before + samples:
                break
        took_s, busy_s = time.perf_counter() - began_s, processor_s() - busy_s
        made.close()
    return {
        "samples_per_s": (seen - before) / took_s,
        "first_s": first_s,
        "cores": busy_s / took_s,
    }


def processor_s() -> float:
    """Of this process and all that it started and that run."""
    import psutil

    times = [each.cpu_times() for each in (psutil.Process(), *below(os.getpid()))]
    return sum(each.user + each.system for each in times)


if __name__ == "__main__":
    main("bench.stream")
