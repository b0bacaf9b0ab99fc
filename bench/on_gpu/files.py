"""The measurements of bench/gpu.py that read files: both programs decode the same JPEG images
through their own loaders, and are timed by their own logs."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bench.on_gpu.jobs import CONFIG, NUM_TOKENS, Job
from bench.open_clip import Record, read_open_clip, read_own

STEPS, SKIPPED = 14, 4  # loaders start in the first steps, and work ahead
IMAGES, SIZE = 2048, (400, 300)  # about as large as those of CC12M and of LAION's smaller sets
TINY_IMAGES = 32
WORDS = (
    *["a", "photo", "of", "the", "small", "red", "old", "wooden", "house"],
    *["by", "a", "river", "with", "two", "dogs"],
)
MOST_WORKERS = 15
NEVER = "1000000000"


def workers(job: Job) -> int:
    """Of either program: the cores beside its own."""
    return 0 if job.tiny else min(MOST_WORKERS, len(os.sched_getaffinity(0)) - 1)


def image_text_table(folder: Path, rows: int, images: int) -> Path:
    """A csv file, separated by tabs, of `rows` rows over so many JPEG images; both are made where
    they are not there."""
    place = folder / "files"
    place.mkdir(parents=True, exist_ok=True)

    def path(number: int) -> Path:
        return place / f"{number}.jpg"

    def write(number: int) -> None:
        generator = np.random.default_rng(number)
        # coarse noise, enlarged: as smooth as photographs are, so the file is as small
        coarse = generator.integers(0, 256, (SIZE[1] // 10, SIZE[0] // 10, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize(SIZE, Image.Resampling.BICUBIC)
        image.save(path(number), quality=85)

    with ThreadPoolExecutor() as pool:  # PIL lets go of Python's lock while it encodes
        list(pool.map(write, [n for n in range(images) if not path(n).is_file()]))
    generator = np.random.default_rng(0)
    table = place / f"{rows}.csv"
    with table.open("w", encoding="utf-8") as file:
        file.write("filepath\ttitle\n")
        for row in range(rows):
            words = generator.choice(WORDS, generator.integers(5, 25))
            file.write(f"{path(row % images)}\t{' '.join(words)}\n")
    return table


def table_of(job: Job) -> tuple[Path, int]:
    """The file of a job, and how many samples a step takes of it."""
    batch = job.batch or 4 * job.probes[1]
    return (
        image_text_table(Path(job.folder), STEPS * batch, TINY_IMAGES if job.tiny else IMAGES),
        batch,
    )


def found(record: Record, batch: int) -> dict[str, Any]:
    step_s = statistics.median(record.step_s[SKIPPED:])
    return {
        "batch": batch,
        "micro_batch": batch,
        "step_s": step_s,
        "samples_per_s": record.samples_per_s(batch, SKIPPED),
        "data_wait_s": statistics.mean(record.data_wait_s[SKIPPED:]),
    }


def open_clip_from_files(
    job: Job, flags: Sequence[str], folder: Path, main: Callable[[list[str]], Any]
) -> dict[str, Any]:
    """`flags`: of OpenCLIP, as for batches in memory; its logs are in `folder`/run."""
    table, batch = table_of(job)
    main(
        [
            *flags,
            "--dataset-type",
            "csv",
            "--train-data",
            str(table),
            "--workers",
            str(workers(job)),
            "--log-every-n-steps",
            "1",
        ]
    )
    return found(read_open_clip(folder / "run", batch, ()), batch)


def wye_from_files(job: Job) -> dict[str, Any]:
    """train.py itself, in this process. Texts are as long as they are, where OpenCLIP's tokenizer
    pads them all to 77 tokens."""
    import train
    from launch.config.options import parse_options
    from launch.run.failures import Run

    table, batch = table_of(job)
    written = json.loads(CONFIG.read_text(encoding="utf-8"))
    written["train_batch_size"] = batch
    written["branches"] |= {
        "layout": "merged",
        "stages": {"merged": 1},
        "replicas": 1,
        "micro_batch_size": batch,
        "schedule": "batch_sync",
    }
    config = Path(job.folder) / f"{job.model}-files.json"
    config.write_text(json.dumps(written, indent=2), encoding="utf-8")
    run_dir = Path(job.folder) / "runs" / f"{job.model}-{os.getpid()}"
    options = {
        "deepspeed_config": config,
        "run-dir": run_dir,
        "data": f"csv:{table}?separator=%09",
        "val-fraction": 0,
        "image-tower": f"open_clip:{job.tower}",
        "text-tower": f"open_clip:{job.tower}",
        "tokenizer": f"open_clip:{job.model}",
        "embed-dim": job.spec.embed_dim,
        "image-size": 32 if job.tiny else 224,
        "max-text-tokens": NUM_TOKENS,
        "epochs": 1,
        "workers": workers(job),
        "cache": "off",
        "save-every": NEVER,
        "trace-every": 0,
    }
    train.main(parse_options([w for k, v in options.items() for w in (f"--{k}", str(v))]), Run())
    return found(read_own(run_dir, batch, ()), batch)
