"""How fast images are loaded: the usual PyTorch code, webdataset, and this project's loader,
decoding and from its cache.

    python bench/loader.py                                      writes bench/out/loader.md
    python bench/loader.py --samples 256 --workers 2 --rounds 5

The files are the same for all: 640×480 JPEGs of emoji on smooth backgrounds with noise, quality 85,
about 85 KB each, in a folder with a jsonl file, and again in tar shards. All give float32 [b, 3,
224, 224], cropped at random and normalised, in the same number of worker processes; ours hands out
uint8, which the process that asked normalises, as a rank does on its device. Each round runs
every loader once, in turn, in fresh processes; ratios to the usual code are taken within a round.
Time to the first micro-batch counts from the request, with the workers' start; speed counts from
the end of the first epoch, so that neither the start nor what was prefetched until then is in it.
All micro-batches are read by the process that asked for them, one value per page.

    plain        DataLoader over PIL.Image.open, RandomResizedCrop, ToTensor, Normalize
    webdataset   the webdataset library on the tar shards, with the same transforms
    decoding     ours on the folder; decoding_tar: on the tar shards
    cached       ours on the folder, from a cache that is full
    cached_bytes the same, but nothing is normalised: what the host does for a GPU
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
OUT = ROOT / "bench" / "out"

IMAGE_SIZE, BATCH_SIZE, EPOCHS = 224, 32, 4  # the first epoch is not counted
WIDTH, HEIGHT, QUALITY = 640, 480, 85
SHARDS = 4
AIMS = {"decoding": 1.5, "cached": 5.0}  # times plain
LOADERS = ("plain", "webdataset", "decoding", "decoding_tar", "cached", "cached_bytes")


def make_files(folder: Path, samples: int) -> int:
    """The samples as folder/set.jsonl with images, and as folder/shard-*.tar. Returns the bytes
    of all images."""
    import numpy as np
    from PIL import Image
    from tqdm import tqdm

    from data.decoding.images import decode_bytes, upright_8bit
    from data.index.sources import open_source

    demo, generator, total = open_source("demo"), np.random.default_rng(0), 0
    (folder / "images").mkdir()
    shards = [tarfile.open(folder / f"shard-{n}.tar", "w") for n in range(SHARDS)]
    with (folder / "set.jsonl").open("w", encoding="utf-8") as rows:
        for i in tqdm(range(samples), unit="image", desc="making files", leave=False):
            corners = generator.integers(0, 256, (6, 8, 3)).astype(np.uint8)
            image = Image.fromarray(corners).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
            chosen = generator.integers(len(demo), size=3)
            for emoji in chosen.tolist():
                side = int(generator.integers(120, 360))
                drawn = (
                    upright_8bit(decode_bytes(demo.value("image", emoji)))
                    .convert("RGBA")
                    .resize((side, side), Image.Resampling.LANCZOS)
                )
                image.paste(
                    drawn,
                    (int(generator.integers(WIDTH - 120)), int(generator.integers(HEIGHT - 120))),
                    drawn,
                )
            noisy = np.asarray(image) + generator.normal(0, 8, (HEIGHT, WIDTH, 1))
            encoded = io.BytesIO()
            Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(
                encoded, "JPEG", quality=QUALITY
            )
            text = " and ".join(demo.captions(emoji)[0] for emoji in chosen.tolist())
            name = f"{i:06d}"
            (folder / "images" / f"{name}.jpg").write_bytes(encoded.getvalue())
            rows.write(
                json.dumps({"image_path": f"images/{name}.jpg", "text": text, "id": name}) + "\n"
            )
            for suffix, content in (("jpg", encoded.getvalue()), ("txt", text.encode())):
                member = tarfile.TarInfo(f"{name}.{suffix}")
                member.size = len(content)
                shards[i * SHARDS // samples].addfile(member, io.BytesIO(content))
            total += len(encoded.getvalue())
    for shard in shards:
        shard.close()
    return total


# The usual code


def usual_transforms():
    from torchvision import transforms

    return transforms.Compose(
        [
            transforms.RandomResizedCrop(
                IMAGE_SIZE, scale=(0.8, 1.0), interpolation=transforms.InterpolationMode.BICUBIC
            ),
            transforms.ToTensor(),
            transforms.Normalize(
                (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
            ),
        ]
    )


class PlainDataset:
    """What is written first in every project."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted((folder / "images").glob("*.jpg"))
        self.transforms = usual_transforms()

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int):
        from PIL import Image

        return self.transforms(Image.open(self.paths[i]).convert("RGB"))


def one_thread(worker: int) -> None:
    import torch

    torch.set_num_threads(1)


def plain(folder: Path, samples: int, workers: int, pin: bool) -> Iterator:
    from torch.utils.data import DataLoader

    loader = DataLoader(
        PlainDataset(folder),
        BATCH_SIZE,
        shuffle=True,
        num_workers=workers,
        drop_last=True,
        pin_memory=pin,
        persistent_workers=workers > 0,
        worker_init_fn=one_thread,
    )
    for _ in range(EPOCHS):
        yield from loader


def webdataset(folder: Path, samples: int, workers: int, pin: bool) -> Iterator:
    import webdataset as wds
    from torch.utils.data import DataLoader

    shards = [str(folder / f"shard-{n}.tar") for n in range(SHARDS)]
    dataset = wds.WebDataset(shards, shardshuffle=SHARDS, empty_check=False, seed=0)
    dataset = (
        dataset.shuffle(100)
        .decode("pil")
        .to_tuple("jpg")
        .map_tuple(usual_transforms())
        .batched(BATCH_SIZE, partial=False)
    )
    loader = DataLoader(
        dataset.repeat(EPOCHS + 1),
        batch_size=None,
        num_workers=workers,
        pin_memory=pin,
        persistent_workers=workers > 0,
        worker_init_fn=one_thread,
    )
    for number, (pixels,) in enumerate(loader, start=1):
        yield pixels
        if number == EPOCHS * (samples // BATCH_SIZE):
            return


# Ours


def ours(spec: str, workers: int, pin: bool, cache=None, on_host: bool = True) -> Iterator:
    import numpy as np

    from data.batching.batches import Batches
    from data.batching.order import GlobalOrder
    from data.batching.settings import Setting
    from data.index.sources import open_source
    from data.loader import MicroBatchDataset, micro_batches
    from data.modalities.image import ImageModality
    from data.modalities.transforms import EvalTransform, TrainTransform, normalise

    source = open_source(spec)
    order = GlobalOrder(len(source), BATCH_SIZE, seed=0)
    dataset = MicroBatchDataset(
        source,
        [
            ImageModality(
                TrainTransform((IMAGE_SIZE, IMAGE_SIZE)),
                EvalTransform((IMAGE_SIZE, IMAGE_SIZE)),
                cache,
            )
        ],
    )
    if cache is not None:
        for i in range(len(source)):
            source.content_hash("image", i)  # what the index of a data set holds, made beforehand
    batches = Batches(order, np.arange(len(source)), [Setting(0, {"image": 1})])
    requests = batches.requests("image", 0, 1, 0, EPOCHS * order.steps_per_epoch)
    for micro_batch in micro_batches(dataset, requests, workers, pin):
        pixels = micro_batch["pixel_values"]
        yield normalise(pixels) if on_host else pixels


def decoding(folder: Path, samples: int, workers: int, pin: bool) -> Iterator:
    return ours(f"jsonl:{folder / 'set.jsonl'}", workers, pin)


def decoding_tar(folder: Path, samples: int, workers: int, pin: bool) -> Iterator:
    return ours(f"webdataset:{folder}/shard-{{0..{SHARDS - 1}}}.tar", workers, pin)


def cached(folder: Path, samples: int, workers: int, pin: bool) -> Iterator:
    from data.cache import SampleCache

    return ours(f"jsonl:{folder / 'set.jsonl'}", workers, pin, SampleCache(folder / "cache"))


def cached_bytes(folder: Path, samples: int, workers: int, pin: bool) -> Iterator:
    from data.cache import SampleCache

    cache = SampleCache(folder / "cache")
    return ours(f"jsonl:{folder / 'set.jsonl'}", workers, pin, cache, on_host=False)


# Measuring


def measure(loader: str, folder: Path, samples: int, workers: int, pin: bool) -> dict[str, float]:
    """In a process of its own: samples/s after the first epoch, and seconds to the first
    micro-batch."""
    import torch
    import torchvision.transforms  # noqa: F401  nobody's start-up pays for these imports

    import data.loader  # noqa: F401

    if loader == "webdataset":
        import webdataset  # noqa: F401
    torch.set_num_threads(1)
    seen, checksum, per_epoch = 0, 0.0, samples // BATCH_SIZE * BATCH_SIZE
    asked = time.perf_counter()
    for pixels in globals()[loader](folder, samples, workers, pin):
        if tuple(pixels.shape) != (BATCH_SIZE, 3, IMAGE_SIZE, IMAGE_SIZE) or pixels.dtype != (
            torch.uint8 if loader == "cached_bytes" else torch.float32
        ):
            raise ValueError(f"{loader} gave {pixels.dtype} {tuple(pixels.shape)}")
        checksum += float(
            pixels.as_strided((pixels.numel() // 1024,), (1024,)).sum()
        )  # 4 bytes of each page, however they lie
        if not seen:
            first = time.perf_counter()
        seen += len(pixels)
        if seen == per_epoch:
            counted = time.perf_counter()
    last = time.perf_counter()
    if seen != EPOCHS * per_epoch:
        raise ValueError(f"{loader} gave {seen} samples")
    return {
        "samples_per_s": (EPOCHS - 1) * per_epoch / (last - counted),
        "first_s": first - asked,
        "checksum": checksum,
    }


def available(folder: Path) -> tuple[str, ...]:
    from data.index.sources import KINDS

    return tuple(loader for loader in LOADERS if loader != "decoding_tar" or "webdataset" in KINDS)


def spread(values: list[float], digits: int = 2) -> str:
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} – {max(values):,.{digits}f})"


def report(
    rounds: list[dict[str, dict[str, float]]], samples: int, workers: int, mean_kb: float
) -> str:
    lines = [
        "# Loading images",
        "",
        f"{samples} JPEGs of {WIDTH}×{HEIGHT} ({mean_kb:.0f} KB each) to "
        f"{IMAGE_SIZE}×{IMAGE_SIZE}, micro-batches of {BATCH_SIZE}, {EPOCHS - 1} epochs after a "
        f"first one, {workers} workers, {len(rounds)} rounds in turn on {os.cpu_count()} cores: "
        "median (least – most).",
        "",
        "| loader | samples/s | ÷ plain | ÷ webdataset | first micro-batch after, s |",
        "|---|---|---|---|---|",
    ]
    for loader in rounds[0]:
        speed = [r[loader]["samples_per_s"] for r in rounds]
        ratios = {
            other: [r[loader]["samples_per_s"] / r[other]["samples_per_s"] for r in rounds]
            for other in ("plain", "webdataset")
        }
        first = [r[loader]["first_s"] for r in rounds]
        lines.append(
            f"| {loader} | {spread(speed, 0)} | {spread(ratios['plain'])} | "
            f"{spread(ratios['webdataset'])} | {spread(first)} |"
        )
    lines.append("")
    for loader, aim in AIMS.items():
        if loader not in rounds[0]:
            continue
        ratio = statistics.median(
            r[loader]["samples_per_s"] / r["plain"]["samples_per_s"] for r in rounds
        )
        lines.append(
            f"- {loader}: {ratio:.2f} × plain, the aim is {aim:g} ×: "
            f"{'met' if ratio >= aim else 'MISSED'}"
        )
    if "decoding_tar" in rounds[0]:
        ratio = statistics.median(
            r["decoding_tar"]["samples_per_s"] / r["webdataset"]["samples_per_s"] for r in rounds
        )
        lines.append(
            f"- decoding_tar: {ratio:.2f} × webdataset, the aim is 1 ×: "
            f"{'met' if ratio >= 1 else 'MISSED'}"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--samples", type=int, default=384, metavar="N", help="images (default: %(default)s)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=2,
        metavar="N",
        help="processes that load (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--pin-memory", action="store_true", help="needs a GPU")
    parser.add_argument(
        "--only",
        metavar="NAME[,NAME]",
        help=f"of {', '.join(LOADERS)}; plain and webdataset are always run",
    )
    parser.add_argument(
        "--measure", metavar="LOADER:FOLDER", help=argparse.SUPPRESS
    )  # how it calls itself
    parser.add_argument(
        "--audio", action="store_true", help="sounds instead of images (bench/loader_audio.py)"
    )
    arguments = parser.parse_args()
    if arguments.samples < 2 * BATCH_SIZE or arguments.rounds < 1:
        parser.error(f"--samples must be at least {2 * BATCH_SIZE}, --rounds at least 1")
    whole = BATCH_SIZE * max(1, arguments.workers)  # webdataset's workers have equal shares
    if arguments.samples % whole and not arguments.audio:
        parser.error(
            f"--samples {arguments.samples} with {arguments.workers} workers: give a multiple of "
            f"{whole}, so that every batch is full"
        )
    unknown = set((arguments.only or "plain").split(",")) - set(LOADERS)
    if unknown:
        parser.error(f"--only {min(unknown)}: give some of {', '.join(LOADERS)}")
    if arguments.audio:
        import loader_audio

        loader_audio.main(arguments)
        return
    if arguments.measure:
        loader, _, folder = arguments.measure.partition(":")
        print(
            json.dumps(
                measure(
                    loader, Path(folder), arguments.samples, arguments.workers, arguments.pin_memory
                )
            )
        )
        return
    from tqdm import tqdm

    from data.cache import SampleCache, fill
    from data.index.sources import open_source
    from data.modalities.transforms import TrainTransform

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        mean_kb = make_files(folder, arguments.samples) / arguments.samples / 1000
        cache = SampleCache(folder / "cache")
        fill(
            open_source(f"jsonl:{folder / 'set.jsonl'}"),
            TrainTransform((IMAGE_SIZE, IMAGE_SIZE)).stored,
            cache,
        )
        cache.close(60)
        chosen = [
            n
            for n in available(folder)
            if not arguments.only or n in ("plain", "webdataset", *arguments.only.split(","))
        ]
        rounds: list[dict[str, dict[str, float]]] = []
        with tqdm(total=arguments.rounds * len(chosen), unit="run") as bar:
            for number in range(arguments.rounds):
                result = {}
                for loader in chosen if number % 2 == 0 else chosen[::-1]:
                    result[loader] = run_alone(loader, folder, arguments)
                    bar.update()
                rounds.append({loader: result[loader] for loader in chosen})
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "loader.md").write_text(
        report(rounds, arguments.samples, arguments.workers, mean_kb), encoding="utf-8"
    )
    print((OUT / "loader.md").read_text(encoding="utf-8"))


def run_alone(loader: str, folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    options = [
        "--samples",
        str(arguments.samples),
        "--workers",
        str(arguments.workers),
        *(["--pin-memory"] if arguments.pin_memory else []),
        *(["--audio"] if arguments.audio else []),
    ]
    command = [sys.executable, __file__, "--measure", f"{loader}:{folder}", *options]
    run = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    if run.returncode:
        sys.exit(f"{loader}: {run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
