"""What ten million samples cost a process: to open them, to draw the first global batch, to go on
from any step; and in memory.

    python bench/index.py --samples 1000000        a tenth; tables to bench/out/index.md
    python bench/index.py --modality audio         an index of sounds, not images

The index is made up by numpy in seconds (`tests/data/large_index.py`): the rows are of the right
size, the images do not exist. Everything else is what a rank does: open the source, drop the bad
samples, make the order, map the training subset, take the first requests, read what a loader reads
of each sample.

Memory is the kernel's, of one process (/proc/PID/smaps_rollup), in MB after each stage. *Own*:
anonymous pages, which each process has for itself. *Mapped*: pages of files, the index among them;
they are there once, however many processes map them, and go when memory is short.
"""

from __future__ import annotations

import atexit
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.compare import Column, Study, Way, main
from bench.runs import alone, resident_bytes

GLOBAL_BATCH, REPLICAS, NUM_MICRO_BATCHES, SEED = 4096, 8, 2, 0
RESUME_EPOCH, RESUME_FRACTION = 3, 0.6
STAGES = ("imported", "opened", "first requests", "resumed")


def index(samples: int = 10_000_000, modality: str = "image") -> Study:
    """Under 300 MB added to a process that has imported torch, and in a whole one without it; the
    first batch within 5 s, going on within 1 s."""
    if samples < 100 * GLOBAL_BATCH:
        sys.exit(f"--samples must be at least {100 * GLOBAL_BATCH}")
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    spec, size = alone(write, folder.name, samples, modality)
    ways = {"without torch": False, "with the loaders": True}
    return Study(
        f"{samples:,} samples, an index of {size / samples:.0f} bytes a row",
        {
            name: Way(partial(alone, measure, spec, folder.name, modality, torch))
            for name, torch in ways.items()
        },
        (
            *(Column(stage, f"{stage}: own / mapped / all", "{:.0f}") for stage in STAGES),
            Column("peak", "peak", "{:.0f}", 1e-6),
            Column("open_s", "opening, s", "{:.2f}"),
            Column("first_s", "first request batch, s", "{:.2f}"),
            Column("resume_s", "resume in another epoch, s", "{:.2f}"),
            Column("step_s", "any later step, ms", "{:.2f}", 1e3),
        ),
        f"Global batch {GLOBAL_BATCH:,}. Memory in MB.",
    )


STUDIES = (index,)


def pairs(modality: str) -> tuple[tuple[str, str]]:
    return ((modality, "text"),)


def write(folder: str, samples: int, modality: str) -> tuple[str, int]:
    """The spec of the index, and the bytes of its files. The training subset is there beside it, as
    a run keeps it, and the files are in memory."""
    import numpy as np
    from large_index import write_large_index

    from data.index.sources import open_source

    place = Path(folder)
    spec = write_large_index(place, samples, pairs(modality))
    size = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
    source = open_source(spec, pairs(modality), folder=place / "index")
    np.save(place / "train.npy", source.usable())
    return spec, size


def memory() -> list[float]:
    """MB (10^6 bytes) of this process: own (anonymous), mapped, and both."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    found = {
        name: int(rest.split()[0]) * 1024 / 1e6 for name, rest in (s.split(":") for s in lines)
    }
    return [found["Anonymous"], found["Rss"] - found["Anonymous"], found["Rss"]]


def measure(spec: str, folder: str, modality: str, with_torch: bool) -> dict[str, object]:
    """`with_torch`: the loaders are imported, as in a rank or a worker; else only what needs no
    torch."""
    import numpy as np

    if with_torch:
        import torch

        import data.loader  # noqa: F401  transformers, torchvision

        torch.set_num_threads(1)
    from data.batching.batches import Batches
    from data.batching.order import GlobalOrder
    from data.batching.settings import Setting
    from data.index.sources import open_source

    def drawn(replica: int, start: int, stop: int) -> list:
        """What a loader reads of the requested samples."""
        numbers = [
            request.index.tolist()
            for request in requests(replica=replica, start_step=start, stop_step=stop)
        ]
        return [
            (source.captions(i), source.content_hash(modality, i), source.where(i))
            for i in numbers[0]
        ]

    stages, seconds = {"imported": memory()}, [time.perf_counter()]
    source = open_source(spec, pairs(modality), folder=Path(folder) / "index")
    seconds.append(time.perf_counter())
    stages["opened"] = memory()
    subset = np.load(Path(folder) / "train.npy", mmap_mode="r")
    order = GlobalOrder(len(subset), GLOBAL_BATCH, SEED)
    settings = [Setting(0, {modality: NUM_MICRO_BATCHES})]
    requests = partial(Batches(order, subset, settings).requests, modality, replicas=REPLICAS)
    read = drawn(0, 0, 1)
    seconds.append(time.perf_counter())
    stages["first requests"] = memory()
    step = int((RESUME_EPOCH + RESUME_FRACTION) * order.steps_per_epoch)
    seconds.append(time.perf_counter())
    read += drawn(3, step, step + 1)
    seconds.append(time.perf_counter())
    stages["resumed"] = memory()
    later = list(requests(replica=3, start_step=step + 1, stop_step=step + 101))
    seconds.append(time.perf_counter())
    assert len(read) == 2 * GLOBAL_BATCH // (REPLICAS * NUM_MICRO_BATCHES) and later
    return {
        **stages,
        "peak": resident_bytes(),
        "open_s": seconds[1] - seconds[0],
        "first_s": seconds[2] - seconds[0],
        "resume_s": seconds[4] - seconds[3],
        "step_s": (seconds[5] - seconds[4]) / 100,
    }


if __name__ == "__main__":
    main("bench.index")
