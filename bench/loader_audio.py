"""How fast sounds are loaded: the usual PyTorch code and this project's loader, decoding and from
its cache; and what an index of a million sounds takes.

    python bench/loader.py --audio                   writes bench/out/loader_audio.md
    python bench/loader.py --audio --samples 256 --rounds 5

The files are the same for all: stereo FLAC of 16 bits at 44.1 kHz, 2 to 12 seconds of harmonics with
noise, in a folder with a jsonl file. All give float32 [b, 1, 1001, 64], the log-mel spectrogram that
CLAP reads of 10 seconds at 48 kHz, cut at random where a sound is longer. Rounds, epochs, workers
and what is counted are those of `bench/loader.py`. Both use SciPy's `resample_poly`, because
torchaudio, soxr and librosa are optional; where torchaudio is installed the usual code uses it.

    plain        DataLoader over soundfile.read, mean of the channels, resample, ClapFeatureExtractor
    decoding     ours
    cached       ours, from a cache that is full: of sounds up to 10 s spectrograms, of the others samples

Prediction, written before the first measurement. Of a sample of the usual code about a third is the
resampling, half the spectrogram, and the rest decoding. Ours saves the loop over frames and the
design of the filter, not the arithmetic: decoding 1.3 times plain (1.1 to 1.6), so the aim of 1.5
may be missed. From the cache four in five spectrograms are a copy of 256 KB, the fifth is computed:
7 times plain (5 to 10). An index row of a sound takes about 250 bytes, and opening a million of
them adds less than 50 MB to a process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from loader import BATCH_SIZE, EPOCHS, OUT, one_thread, run_alone, spread

RATE, SECONDS = 48_000, 10
SHAPE = (BATCH_SIZE, 1, 1001, 64)
FILE_RATE, SHORTEST_S, LONGEST_S = 44_100, 2.0, 12.0
AIMS = {"decoding": 1.5, "cached": 5.0}  # times plain
LOADERS = ("plain", *AIMS)
ROWS = 1_000_000


def make_files(folder: Path, samples: int) -> float:
    """The sounds as folder/set.jsonl with folder/*.flac. Returns their mean length in seconds."""
    import numpy as np
    import soundfile

    generator, total = np.random.default_rng(0), 0.0
    with (folder / "set.jsonl").open("w", encoding="utf-8") as rows:
        for i in range(samples):
            seconds = float(generator.uniform(SHORTEST_S, LONGEST_S))
            time_s = np.arange(round(seconds * FILE_RATE)) / FILE_RATE
            pitch = generator.uniform(80, 800)
            waves = sum(np.sin(2 * np.pi * pitch * k * time_s) / k for k in range(1, 6))
            noise = generator.normal(0, 0.02, (len(time_s), 2))
            soundfile.write(folder / f"{i}.flac", 0.2 * waves[:, None] + noise, FILE_RATE)
            rows.write(json.dumps({"id": str(i), "audio": f"{i}.flac", "text": f"tone {i}"}) + "\n")
            total += seconds
    return total / samples


class PlainDataset:
    """What is written first in every project."""

    def __init__(self, folder: Path) -> None:
        from transformers import ClapFeatureExtractor

        self.paths = sorted(folder.glob("*.flac"))
        self.extractor = ClapFeatureExtractor(truncation="rand_trunc")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int):
        import soundfile

        samples, rate = soundfile.read(self.paths[i], dtype="float32", always_2d=True)
        mono = usual_resampling(samples.mean(1), rate)
        made = self.extractor(mono, sampling_rate=RATE, return_tensors="pt")  # cuts at random
        return made["input_features"][0]


def usual_resampling(samples, rate: int):
    import math

    try:
        import torch
        from torchaudio.functional import resample

        return resample(torch.from_numpy(samples), rate, RATE).numpy()
    except ImportError:
        from scipy.signal import resample_poly

        common = math.gcd(rate, RATE)
        return resample_poly(samples, RATE // common, rate // common)


def plain(folder: Path, workers: int) -> Iterator:
    from torch.utils.data import DataLoader

    loader = DataLoader(
        PlainDataset(folder),
        BATCH_SIZE,
        shuffle=True,
        num_workers=workers,
        drop_last=True,
        persistent_workers=workers > 0,
        worker_init_fn=one_thread,
    )
    for _ in range(EPOCHS):
        yield from loader


def ours(folder: Path, workers: int, cache=None) -> Iterator:
    import numpy as np

    from data.batching.batches import Batches
    from data.batching.order import GlobalOrder
    from data.batching.settings import Setting
    from data.index.sources import open_source
    from data.loader import MicroBatchDataset, micro_batches
    from data.modalities.audio.features import AudioFeatures
    from data.modalities.audio.modality import AudioModality

    source = open_source(f"jsonl:{folder / 'set.jsonl'}", (("audio", "text"),))
    order = GlobalOrder(len(source), BATCH_SIZE, seed=0)
    values = {"truncation": "rand_trunc"}
    features = AudioFeatures("ClapFeatureExtractor", values, RATE * SECONDS, ("crop",))
    batches = Batches(order, np.arange(len(source)), [Setting(0, {"audio": 1})])
    requests = batches.requests("audio", 0, 1, 0, EPOCHS * order.steps_per_epoch)
    dataset = MicroBatchDataset(source, [AudioModality(features, cache)])
    for micro_batch in micro_batches(dataset, requests, workers):
        yield micro_batch["input_features"]


def decoding(folder: Path, workers: int) -> Iterator:
    return ours(folder, workers)


def cached(folder: Path, workers: int) -> Iterator:
    from data.cache import SampleCache

    return ours(folder, workers, SampleCache(folder / "cache"))


# Measuring


def measure(loader: str, folder: Path, samples: int, workers: int) -> dict[str, float]:
    """In a process of its own: samples/s after the first epoch, and seconds to the first
    micro-batch."""
    import soundfile  # noqa: F401  nobody's start-up pays for these imports
    import torch
    from transformers import ClapFeatureExtractor  # noqa: F401

    import data.loader  # noqa: F401

    torch.set_num_threads(1)
    seen, per_epoch = 0, samples // BATCH_SIZE * BATCH_SIZE
    asked = time.perf_counter()
    for made in globals()[loader](folder, workers):
        if tuple(made.shape) != SHAPE or made.dtype != torch.float32:
            raise ValueError(f"{loader} gave {made.dtype} {tuple(made.shape)}")
        float(made.view(-1)[::1024].sum())  # a value of each page
        if not seen:
            first = time.perf_counter()
        seen += len(made)
        if seen == per_epoch:
            counted = time.perf_counter()
    last = time.perf_counter()
    return {
        "samples_per_s": (EPOCHS - 1) * per_epoch / (last - counted),
        "first_s": first - asked,
    }


def fill_cache(folder: Path) -> float:
    """An epoch and an evaluation's worth of sounds. Returns the bytes that a sound takes."""
    import numpy as np

    from data.batching.requests import MicroBatchRequest
    from data.cache import SampleCache
    from data.index.sources import open_source
    from data.loader import MicroBatchDataset
    from data.modalities.audio.features import AudioFeatures
    from data.modalities.audio.modality import AudioModality

    source = open_source(f"jsonl:{folder / 'set.jsonl'}", (("audio", "text"),))
    cache = SampleCache(folder / "cache")
    features = AudioFeatures(
        "ClapFeatureExtractor", {"truncation": "rand_trunc"}, RATE * SECONDS, ("crop",)
    )
    dataset = MicroBatchDataset(source, [AudioModality(features, cache)])
    index = np.arange(len(source))
    for start in range(0, len(index), BATCH_SIZE):
        few = index[start : start + BATCH_SIZE]
        dataset[MicroBatchRequest(0, 0, few, few, training=True)]
        cache.close(60)  # all of it is written
    used = cache.used_bytes() / len(source)
    cache.close()
    return used


def index_of_a_million() -> dict[str, float]:
    """Bytes of a row of sounds in the index's files, and MB that a process gains by opening a
    million of them and reading a column of numbers."""
    from index import memory  # also finds tests/data
    from large_index import write_large_index

    from data.index.sources import open_source

    pairs = (("audio", "text"),)
    with tempfile.TemporaryDirectory() as folder:
        spec = write_large_index(Path(folder), ROWS, pairs)
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
        before = memory()
        source = open_source(spec, pairs, folder=Path(folder) / "index")
        float(source.column("audio_seconds").sum())
        opened = memory()
        return {
            "row_bytes": size / ROWS,
            "own_mb": opened["own"] - before["own"],
            "mapped_mb": opened["mapped"] - before["mapped"],
        }


def report(rounds: list, arguments: argparse.Namespace, length_s: float, kept: float) -> str:
    lines = [
        "# Loading sounds",
        "",
        f"{arguments.samples} FLAC of {length_s:.1f} s on average, 44.1 kHz, stereo, to "
        f"spectrograms of 1001×64 at 48 kHz, micro-batches of {BATCH_SIZE}, {EPOCHS - 1} epochs "
        f"after a first one, {arguments.workers} workers, {len(rounds)} rounds in turn on "
        f"{os.cpu_count()} cores: median (least – most). A sound takes {kept / 1e3:,.0f} KB of the "
        "cache.",
        "",
        "| loader | samples/s | ÷ plain | first micro-batch after, s |",
        "|---|---|---|---|",
    ]
    for loader in LOADERS:
        speed = [r[loader]["samples_per_s"] for r in rounds]
        ratios = [r[loader]["samples_per_s"] / r["plain"]["samples_per_s"] for r in rounds]
        first = [r[loader]["first_s"] for r in rounds]
        lines.append(f"| {loader} | {spread(speed, 1)} | {spread(ratios)} | {spread(first)} |")
    lines.append("")
    for loader, aim in AIMS.items():
        ratio = statistics.median(
            r[loader]["samples_per_s"] / r["plain"]["samples_per_s"] for r in rounds
        )
        met = "met" if ratio >= aim else "MISSED"
        lines.append(f"- {loader}: {ratio:.2f} × plain, the aim is {aim:g} ×: {met}")
    index = index_of_a_million()
    lines.append(
        f"- index of {ROWS:,} sounds: {index['row_bytes']:.0f} bytes a row; opening it and reading "
        f"the seconds adds {index['own_mb']:.1f} MB of its own and {index['mapped_mb']:.1f} MB of "
        "the file, which all processes share"
    )
    return "\n".join(lines) + "\n"


def main(arguments: argparse.Namespace) -> None:
    if arguments.measure:
        loader, _, folder = arguments.measure.partition(":")
        print(json.dumps(measure(loader, Path(folder), arguments.samples, arguments.workers)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        length_s = make_files(folder, arguments.samples)
        kept = fill_cache(folder)
        rounds = []
        for number in range(arguments.rounds):
            order = LOADERS if number % 2 == 0 else LOADERS[::-1]
            rounds.append({loader: run_alone(loader, folder, arguments) for loader in order})
            print(json.dumps(rounds[-1]), file=sys.stderr, flush=True)
    OUT.mkdir(parents=True, exist_ok=True)
    text = report(rounds, arguments, length_s, kept)
    (OUT / "loader_audio.md").write_text(text, encoding="utf-8")
    print(text)
