"""How fast samples of a data set can be fetched, read and decoded, and what that feeds.

python -m data.inspect 'stream:s3://bucket/{00000..01242}.tar' --speed --gpus 8
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from PIL import Image
from rich.table import Table

from common.output import plain
from data.bad_samples import Absent, BadSample
from data.clips import Clip
from data.decoding.films import FilmReader, even_times
from data.formats.specs import is_remote
from data.index.building import load_index
from data.index.sources import IndexedSource
from data.stored.kinds import files_of, stored
from data.streams.cache import Held
from data.streams.prefetch import AT_ONCE
from data.streams.source import StreamSource

NEEDED = 6_900  # samples/s of ViT-B-32 on one H200 in bf16: bench/README.md
SIDE, TOKENS = 224, 77  # as --image-size and --max-text-tokens are by default
CLIP = 10 * 48_000  # samples that CLAP reads
TEXTS_AT_ONCE = 64
MOST_SHARDS = 16  # that samples are read of
FETCHING, LISTING, READING, TOKENS_OF = "fetching shards", "listing shards", "reading", "tokenizing"
FRAMES = 8  # of a clip, as --video-frames is by default


@dataclass
class Speed:
    """Part of the way -> samples that went it, their bytes, and seconds. `store`: where the shards
    or files are."""

    store: str = "local, or copied when they were indexed"
    parts: dict[str, tuple[int, int, float]] = field(default_factory=dict)

    def add(self, part: str, samples: int, size: int, seconds: float) -> None:
        own = zip(self.parts.get(part, (0, 0, 0.0)), (samples, size, seconds))
        self.parts[part] = tuple(a + b for a, b in own)  # type: ignore[assignment]

    def rate(self, part: str) -> float:
        """Samples/s; inf where nothing was measured."""
        samples, _, seconds = self.parts.get(part, (0, 0, 0.0))
        return samples / max(seconds, 1e-9) if samples else math.inf

    def of_worker(self) -> float:
        """Samples/s of one process that reads, decodes and tokenizes."""
        own = self.parts.keys() - {FETCHING, LISTING}
        return 1 / max(sum(1 / self.rate(part) for part in own), 1e-12)

    def table(self, title: str) -> Table:
        table = Table(title=plain(title), title_justify="left")
        for name in ("", "samples/s", "MB/s", "bytes a sample"):
            table.add_column(name, justify="right" if name else "left", no_wrap=True)
        if FETCHING not in self.parts:
            table.add_row(f"shards and files are {self.store}")
        for part, (samples, size, seconds) in self.parts.items():
            moved = (f"{size / seconds / 1e6:,.1f}", f"{size / samples:,.0f}") if size else ()
            what = (
                f"{part}, up to {AT_ONCE} at once" if part == FETCHING else f"{part}, one process"
            )
            table.add_row(what, f"{self.rate(part):,.0f}", *moved)
        return table

    def verdict(self, needed: float, gpus: int, cores: int) -> str:
        """What limits a machine with these cores, whose GPUs need so many samples/s each."""
        each, total = self.of_worker(), needed * gpus
        local = ("the CPU", "use smaller images, more cores, or a cache that is full (--cache)")
        if self.rate(READING) < 2 * each:  # more than half of a worker's time
            local = ("reading", "use a faster disk, or files that hold many samples")
        most, name, advice = min(
            (self.rate(FETCHING), "the store", "bring the data nearer"),
            (self.rate(LISTING) * gpus, "listing", "prepare the data as webdataset: or parquet:"),
            (each * cores, *local),
        )
        enough = "is enough" if most >= total else f"is too little; {advice}"
        return (
            f"{gpus} GPU{'s' * (gpus > 1)} with {needed:,.0f} samples/s each need {total:,.0f}. The "
            f"limit is {name}: {most:,.0f} samples/s, which {enough}. A worker loads {each:,.0f} "
            f"samples/s: --workers {math.ceil(needed / each):,}. Cores of this machine: {cores}."
        )


def measured(source: IndexedSource | StreamSource, seconds: float, seed: int = 0) -> Speed:
    """About so long, of random samples, those of a stream of few random shards, which are fetched
    into its cache; a shard that was begun is fetched to its end. Errors: OSError."""
    speed, random = Speed(), np.random.default_rng(seed)
    if isinstance(source, IndexedSource):
        _read(speed, ((source, int(i)) for i in random.permutation(source.usable())), seconds)
        return speed
    order = random.permutation(np.flatnonzero(source.table.counts)).tolist()
    if any(is_remote(name) for name in source.table.names):
        speed.store = "in the cache by now"
        order = _fetch(speed, source, order, seconds / 3)
    until = time.monotonic() + seconds / 6
    samples: list[tuple[IndexedSource, int]] = []
    for shard in order[:MOST_SHARDS]:
        if samples and time.monotonic() > until:
            break
        of = source.shard(shard)
        samples += [(of, int(i)) for i in of.usable()]
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            load_index(of.format, Path(folder), workers=1, check="header")
            speed.add(LISTING, len(of), 0, time.perf_counter() - began)
    _read(speed, (samples[n] for n in random.permutation(len(samples))), seconds / 2)
    source.keep(())
    return speed


def _fetch(speed: Speed, source: StreamSource, order: list[int], seconds: float) -> list[int]:
    """The shards that are there now: one is fetched alone, then as many at once as time is left
    for. Those that were there already do not count."""

    def fetch(until: float, shard: int) -> bool | None:
        if time.monotonic() > until:
            return None
        held, came = cast("tuple[Held, bool]", source.held(shard))
        held.close()
        return came

    there: list[int] = []
    at_once, until = 1, time.monotonic() + seconds
    for shards in (order[:1], order[1:]):
        source.taken_counts()
        began = time.monotonic()
        with ThreadPoolExecutor(at_once) as pool:
            came = list(pool.map(partial(fetch, until), shards))
        took = time.monotonic() - began
        there += [shard for shard, found in zip(shards, came) if found is not None]
        if new := [shard for shard, found in zip(shards, came) if found]:
            speed.parts.pop(FETCHING, None)  # what comes at once says more than one alone
            size = int(source.taken_counts()["stream_bytes"])
            speed.add(FETCHING, int(source.table.counts[new].sum()), size, took)
        at_once = max(1, min(AT_ONCE, int((until - time.monotonic()) / max(took, 1e-3))))
    return there


def _read(speed: Speed, samples: Iterable[tuple[IndexedSource, int]], seconds: float) -> None:
    """Read and decode as a worker does, then tokenize what was read."""
    import torch

    from data.modalities.tokenizer import batch_tokens, train_tokenizer

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    texts: list[str] = []
    random = np.random.default_rng(0)
    until, decode = time.monotonic() + seconds, dict[str, Callable[..., object]]()
    for source, i in samples:
        if time.monotonic() > until:
            break
        began = time.perf_counter()
        own, found = source.captions(i)[:1], dict[str, Any]()
        for name in (kind.name for kind in files_of()):
            with contextlib.suppress(Absent, BadSample):
                found[name] = source.value(name, i)
        took = time.perf_counter() - began
        # of a film in a file of its own nothing is read until it is decoded
        contents = [value.film if isinstance(value, Clip) else value for value in found.values()]
        size = sum(len(content) for content in contents if isinstance(content, bytes)) + len(
            "".join(own).encode(errors="replace")
        )
        speed.add(READING, 1, size, took)
        texts += own
        for name, value in found.items():
            if name not in decode:
                decode[name] = _decoder(name)
            began = time.perf_counter()
            with contextlib.suppress(BadSample):
                decode[name](value, random)
            speed.add(_decoding(name), 1, 0, time.perf_counter() - began)
    if any(texts):
        tokenizer = train_tokenizer(texts)
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            some = texts[start : start + TEXTS_AT_ONCE]
            began = time.perf_counter()
            batch_tokens(tokenizer, some, TOKENS)
            speed.add(TOKENS_OF, len(some), 0, time.perf_counter() - began)
    torch.set_num_threads(threads)


def _decoding(modality: str) -> str:
    return f"decoding {stored(modality).several or modality}"


def _decoder(modality: str) -> Callable[..., object]:
    if modality in DECODERS:
        return DECODERS[modality]()
    (kind,) = files_of([modality])  # one of a user's own
    return lambda value, random: kind.measure(value, True)


def _of_images() -> Callable[..., object]:
    from data.modalities.transforms import TrainTransform

    transform = TrainTransform((SIDE, SIDE))
    return lambda value, random: transform(transform.stored(value), random)


def _of_films() -> Callable[..., object]:
    from data.modalities.transforms import TrainTransform

    transform, reader = TrainTransform((SIDE, SIDE)), FilmReader()

    def decode(clip: Clip, random: np.random.Generator) -> list[np.ndarray]:
        times = even_times(clip.start_s, clip.end_s, FRAMES)
        frames = reader.frames(clip.film, times).transpose(0, 2, 3, 1)
        return [transform(transform.stored.of(Image.fromarray(f)), random) for f in frames]

    return decode


def _of_sounds() -> Callable[..., object]:
    from data.modalities.audio.features import AudioFeatures
    from data.modalities.audio.modality import AudioModality

    values = {"truncation": "rand_trunc"}
    return AudioModality(AudioFeatures("ClapFeatureExtractor", values, CLIP, ("crop",))).encode


DECODERS = {"image": _of_images, "audio": _of_sounds, "video": _of_films}
