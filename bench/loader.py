"""How fast images and sounds are loaded: the usual PyTorch code, webdataset, and this project's
loader, decoding and from its cache.

    python bench/loader.py --samples 256 --rounds 5      images; a table to bench/out/loader.md
    python bench/loader.py --audio --samples 192         sounds

The files are the same for all: 640×480 JPEGs of emoji on smooth backgrounds with noise, about 85 KB
each, in a folder with a jsonl file, and again in tar shards; or stereo FLAC of 16 bits at 44.1 kHz,
2 to 12 seconds of harmonics with noise. All give float32 tensors in the same number of worker
processes: images [b, 3, 224, 224], cropped at random and normalised, which ours leave to the
process that asked, as a rank does on its device; sounds [b, 1, 1001, 64], the spectrogram that CLAP
reads of 10 seconds at 48 kHz, cut at random where a sound is longer.

    plain         DataLoader over PIL and torchvision; over soundfile, SciPy, ClapFeatureExtractor
    webdataset    the webdataset library on the tar shards, with the same transforms
    decoding      ours on the folder; decoding_tar: on the tar shards
    cached        ours on the folder, from a cache that is full
    cached_bytes  the same, but nothing is normalised: what the host does for a GPU

Each loader runs in a fresh process. Time to the first micro-batch counts from the request, with the
workers' start; speed from the end of the first epoch, so that neither the start nor what was
prefetched until then is in it. The process that asks reads one value per page of each micro-batch.
"""

from __future__ import annotations

import atexit
import io
import json
import math
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import Column, Seen, Study, Way, alone, main

IMAGE_SIZE, BATCH_SIZE, EPOCHS = 224, 32, 4  # the first epoch is not counted
WIDTH, HEIGHT, SHARDS = 640, 480, 4
RATE, SECONDS, FILE_RATE = 48_000, 10, 44_100
LOADERS = {
    "image": ("plain", "webdataset", "decoding", "decoding_tar", "cached", "cached_bytes"),
    "audio": ("plain", "decoding", "cached"),
}
USUAL = ("plain", "webdataset")
SHAPES = {"image": (BATCH_SIZE, 3, IMAGE_SIZE, IMAGE_SIZE), "audio": (BATCH_SIZE, 1, 1001, 64)}


# -- files


def make_images(folder: Path, samples: int) -> Iterator[tuple[str, bytes, str]]:
    """(Name, JPEG, text) of each; they are in `SHARDS` tar files, too."""
    import numpy as np
    from PIL import Image

    from data.decoding.images import decode_bytes, upright_8bit
    from data.index.sources import open_source

    demo, generator = open_source("demo"), np.random.default_rng(0)
    shards = [tarfile.open(folder / f"shard-{n}.tar", "w") for n in range(SHARDS)]
    for i in range(samples):
        corners = generator.integers(0, 256, (6, 8, 3)).astype(np.uint8)
        image = Image.fromarray(corners).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
        emoji = generator.integers(len(demo), size=3).tolist()
        for each in emoji:
            side, *place = generator.integers(
                (120, 0, 0), (360, WIDTH - 120, HEIGHT - 120)
            ).tolist()
            drawn = upright_8bit(decode_bytes(demo.value("image", each))).convert("RGBA")
            drawn = drawn.resize((side, side), Image.Resampling.LANCZOS)
            image.paste(drawn, tuple(place), drawn)
        noisy = np.asarray(image) + generator.normal(0, 8, (HEIGHT, WIDTH, 1))
        encoded = io.BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(encoded, "JPEG", quality=85)
        text = " and ".join(demo.captions(each)[0] for each in emoji)
        for suffix, content in (("jpg", encoded.getvalue()), ("txt", text.encode())):
            member = tarfile.TarInfo(f"{i:06d}.{suffix}")
            member.size = len(content)
            shards[i * SHARDS // samples].addfile(member, io.BytesIO(content))
        yield f"{i:06d}.jpg", encoded.getvalue(), text
    for shard in shards:
        shard.close()


def make_sounds(folder: Path, samples: int) -> Iterator[tuple[str, bytes, str]]:
    """(Name, FLAC, text) of each."""
    import numpy as np
    import soundfile

    generator = np.random.default_rng(0)
    for i in range(samples):
        time_s = np.arange(round(float(generator.uniform(2, 12)) * FILE_RATE)) / FILE_RATE
        pitch = generator.uniform(80, 800)
        waves = sum(np.sin(2 * np.pi * pitch * k * time_s) / k for k in range(1, 6))
        noise = generator.normal(0, 0.02, (len(time_s), 2))
        encoded = io.BytesIO()
        soundfile.write(encoded, 0.2 * waves[:, None] + noise, FILE_RATE, format="FLAC")
        yield f"{i:06d}.flac", encoded.getvalue(), f"tone {i}"


def prepare(medium: str, folder: str, samples: int) -> tuple[float, float]:
    """The files as set.jsonl, and a full cache. Returns bytes of a file, and of it in the cache."""
    import numpy as np

    from data.batching.requests import MicroBatchRequest
    from data.cache import SampleCache

    place, total = Path(folder), 0
    make, key = {"image": (make_images, "image_path"), "audio": (make_sounds, "audio")}[medium]
    with (place / "set.jsonl").open("w", encoding="utf-8") as rows:
        for name, content, text in make(place, samples):
            (place / name).write_bytes(content)
            total += len(content)
            rows.write(json.dumps({key: name, "text": text, "id": name}) + "\n")
    cache = SampleCache(place / "cache")
    source, dataset = opened(medium, f"jsonl:{place / 'set.jsonl'}", cache)
    for start in range(0, len(source), BATCH_SIZE):
        few = np.arange(start, min(start + BATCH_SIZE, len(source)))
        dataset[MicroBatchRequest(0, 0, few, few, training=True)]
        cache.close(60)  # all of it is written
    return total / samples, cache.used_bytes() / samples


# -- the usual code


def image_transforms() -> Any:
    from torchvision import transforms

    bicubic = transforms.InterpolationMode.BICUBIC
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(IMAGE_SIZE, scale=(0.8, 1.0), interpolation=bicubic),
            transforms.ToTensor(),
            transforms.Normalize(mean, std),
        ]
    )


class PlainDataset:
    """What is written first in every project."""

    def __init__(self, medium: str, folder: Path) -> None:
        from transformers import ClapFeatureExtractor

        self.paths = sorted(folder.glob("*.jpg" if medium == "image" else "*.flac"))
        self.transforms = image_transforms() if medium == "image" else None
        self.extractor = ClapFeatureExtractor(truncation="rand_trunc")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> Any:
        if self.transforms is not None:
            from PIL import Image

            return self.transforms(Image.open(self.paths[i]).convert("RGB"))
        import soundfile
        from scipy.signal import resample_poly

        samples, rate = soundfile.read(self.paths[i], dtype="float32", always_2d=True)
        common = math.gcd(rate, RATE)
        mono = resample_poly(samples.mean(1), RATE // common, rate // common)
        made = self.extractor(mono, sampling_rate=RATE, return_tensors="pt")  # cuts at random
        return made["input_features"][0]


def one_thread(worker: int) -> None:
    import torch

    torch.set_num_threads(1)


def usual(loader: str, medium: str, folder: Path, samples: int, common: dict) -> Iterator:
    """plain or webdataset."""
    from torch.utils.data import DataLoader

    common = common | {
        "persistent_workers": common["num_workers"] > 0,
        "worker_init_fn": one_thread,
    }
    if loader == "plain":
        dataset = PlainDataset(medium, folder)
        made = DataLoader(dataset, BATCH_SIZE, shuffle=True, drop_last=True, **common)
        for _ in range(EPOCHS):
            yield from made
        return
    import webdataset

    shards = [str(folder / f"shard-{n}.tar") for n in range(SHARDS)]
    dataset = webdataset.WebDataset(shards, shardshuffle=SHARDS, empty_check=False, seed=0)
    dataset = dataset.shuffle(100).decode("pil").to_tuple("jpg").map_tuple(image_transforms())
    dataset = dataset.batched(BATCH_SIZE, partial=False).repeat(EPOCHS + 1)
    for number, (pixels,) in enumerate(DataLoader(dataset, batch_size=None, **common)):
        if number == EPOCHS * (samples // BATCH_SIZE):
            return
        yield pixels


# -- ours


def opened(medium: str, spec: str, cache: Any) -> tuple[Any, Any]:
    """The source and the data set of its micro-batches."""
    from data.index.sources import open_source
    from data.loader import MicroBatchDataset

    if medium == "image":
        from data.modalities.image import ImageModality
        from data.modalities.transforms import EvalTransform, TrainTransform, Views

        side = (IMAGE_SIZE, IMAGE_SIZE)
        modality: Any = ImageModality(Views(TrainTransform(side), EvalTransform(side)), cache)
    else:
        from data.modalities.audio.features import AudioFeatures
        from data.modalities.audio.modality import AudioModality

        values = {"truncation": "rand_trunc"}
        features = AudioFeatures("ClapFeatureExtractor", values, RATE * SECONDS, ("crop",))
        modality = AudioModality(features, cache)
    source = open_source(spec, ((medium, "text"),))
    return source, MicroBatchDataset(source, [modality])


def ours(loader: str, medium: str, folder: Path, workers: int, pin: bool) -> Iterator:
    import numpy as np

    from data.batching.batches import Batches
    from data.batching.order import GlobalOrder
    from data.batching.settings import Setting
    from data.cache import SampleCache
    from data.loader import micro_batches
    from data.modalities.transforms import normalise

    tar = f"webdataset:{folder}/shard-{{0..{SHARDS - 1}}}.tar"
    spec = tar if loader == "decoding_tar" else f"jsonl:{folder / 'set.jsonl'}"
    cache = SampleCache(folder / "cache") if loader.startswith("cached") else None
    source, dataset = opened(medium, spec, cache)
    for i in range(len(source)) if cache is not None else ():
        source.content_hash(medium, i)  # what the index of a data set holds, made beforehand
    order = GlobalOrder(len(source), BATCH_SIZE, seed=0)
    batches = Batches(order, np.arange(len(source)), [Setting(0, {medium: 1})])
    requests = batches.requests(medium, 0, 1, 0, EPOCHS * order.steps_per_epoch)
    for micro_batch in micro_batches(dataset, requests, workers, pin):
        made = micro_batch["pixel_values" if medium == "image" else "input_features"]
        yield normalise(made) if medium == "image" and loader != "cached_bytes" else made


# -- measuring


def measure(
    loader: str, medium: str, folder: str, samples: int, workers: int, pin: bool
) -> dict[str, float]:
    """Samples/s after the first epoch, and seconds to the first micro-batch."""
    import soundfile  # noqa: F401  nobody's start-up pays for these imports
    import torch
    import torchvision.transforms  # noqa: F401
    import webdataset  # noqa: F401
    from transformers import ClapFeatureExtractor  # noqa: F401

    import data.loader  # noqa: F401

    torch.set_num_threads(1)
    dtype = torch.uint8 if loader == "cached_bytes" else torch.float32
    seen, per_epoch, place = 0, samples // BATCH_SIZE * BATCH_SIZE, Path(folder)
    asked = first = counted = time.perf_counter()
    if loader in USUAL:
        common = {"num_workers": workers, "pin_memory": pin}
        made = usual(loader, medium, place, samples, common)
    else:
        made = ours(loader, medium, place, workers, pin)
    for batch in made:
        if tuple(batch.shape) != SHAPES[medium] or batch.dtype != dtype:
            raise ValueError(f"{loader} gave {batch.dtype} {tuple(batch.shape)}")
        float(batch.as_strided((batch.numel() // 1024,), (1024,)).sum())  # however they lie
        first = first if seen else time.perf_counter()
        seen += len(batch)
        if seen == per_epoch:
            counted = time.perf_counter()
    if seen != EPOCHS * per_epoch:
        raise ValueError(f"{loader} gave {seen} samples")
    rate = (EPOCHS - 1) * per_epoch / (time.perf_counter() - counted)
    return {"samples_per_s": rate, "first_s": first - asked}


def notes(seen: Seen) -> Iterator[str]:
    """Against webdataset, what reads tar files or comes from a cache."""
    others = [each["samples_per_s"] for each in seen.rounds.get("webdataset", ())]
    for name in seen.rounds if others else ():
        ratios = [own / b for own, b in zip(seen.values(name, "samples_per_s"), others)]
        yield f"- {name} ÷ webdataset: {min(ratios):.2f} to {max(ratios):.2f}"


def loader(
    samples: int = 384, workers: int = 2, pin_memory: bool = False, audio: bool = False
) -> Study:
    """Images or, with --audio, sounds: decoding 1.5 × the usual code, from the cache 5 ×, from tar
    files not slower than webdataset. --pin-memory needs a GPU."""
    medium, whole = "audio" if audio else "image", BATCH_SIZE * workers
    if samples < 2 * BATCH_SIZE or samples % whole:  # webdataset's workers have equal shares
        raise ValueError(f"--samples must be a multiple of {whole}, at least {2 * BATCH_SIZE}")
    temporary = tempfile.TemporaryDirectory()
    atexit.register(temporary.cleanup)
    size, kept = alone(prepare, medium, temporary.name, samples)
    setting = (medium, temporary.name, samples, workers, pin_memory)
    return Study(
        f"Loading {medium}s",
        {name: Way(partial(alone, measure, name, *setting)) for name in LOADERS[medium]},
        (
            Column("samples_per_s", "samples/s", "{:,.1f}"),
            Column("samples_per_s", "÷ plain"),
            Column("first_s", "first micro-batch after, s", "{:.2f}"),
        ),
        f"{samples} files of {size / 1e3:.0f} KB, in the cache {kept / 1e3:,.0f} KB, {workers} "
        f"workers, {EPOCHS - 1} epochs of micro-batches of {BATCH_SIZE}.",
        reference="plain",
        rounds=5,
        notes=notes,
    )


STUDIES = (loader,)

if __name__ == "__main__":
    main("bench.loader")
