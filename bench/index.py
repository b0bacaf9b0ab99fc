"""What ten million samples cost a process: to open them, to draw the first global batch, to go on
from any step; and in memory.

    python bench/index.py                          writes bench/out/index.md
    python bench/index.py --samples 1000000        a tenth

The index is made up by numpy in seconds (`tests/data/large_index.py`): the rows are of the right
size, the images do not exist. Everything else is what a rank does: open the source, drop the bad
samples, make the order, map the training subset, take the first requests, read what a loader reads
of each sample. It is measured in fresh processes, in turn.

Memory is the kernel's, of one process (/proc/PID/smaps_rollup). *Own*: anonymous pages, which each
process has for itself. *Mapped*: pages of files, the index among them; they are there once, however
many processes map them, and go when memory is short. Aims are for what is added to a process that
has imported torch and the rooms of data/, and for all of it without torch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "data")]
OUT = ROOT / "bench" / "out"

GLOBAL_BATCH, REPLICAS, NUM_MICRO_BATCHES, SEED = 4096, 8, 2, 0
RESUME_EPOCH, RESUME_FRACTION = 3, 0.6
MIB = 1 << 20
AIMS = {"resident": 300.0, "first": 5.0, "resume": 1.0}  # MB of a process, s, s


def memory() -> dict[str, float]:
    """MB (10^6 bytes) of this process: own (anonymous), mapped, and both."""
    fields = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        fields[name] = int(value.split()[0]) * 1024 / 1e6
    return {
        "resident": fields["Rss"],
        "own": fields["Anonymous"],
        "mapped": fields["Rss"] - fields["Anonymous"],
    }


def peak_mb() -> float:
    """The most this process has held at any time."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024 / 1e6


def measure(spec: str, folder: Path, with_torch: bool) -> dict[str, object]:
    """In a process of its own. `with_torch`: the loaders are imported, as in a rank or a worker;
    else only what needs no torch."""
    stages = {"python": memory()}
    import numpy as np

    stages["numpy"] = memory()
    if with_torch:
        import torch

        torch.set_num_threads(1)
        stages["torch"] = memory()
        import data.loader  # noqa: F401  transformers, torchvision
    from data.batching.batches import Batches
    from data.batching.order import GlobalOrder
    from data.batching.settings import Setting
    from data.index.sources import open_source

    settings = [Setting(0, {"image": NUM_MICRO_BATCHES})]

    stages["imported"] = memory()

    start = time.perf_counter()
    source = open_source(spec, folder=folder / "index")
    opened = time.perf_counter()
    stages["opened"] = memory()

    # A run keeps the training subset in its folder; every process maps it (data/prepare.py).
    if not (folder / "train.npy").is_file():
        np.save(folder / "train.npy", source.usable())
    subset_start = time.perf_counter()
    subset = np.load(folder / "train.npy", mmap_mode="r")
    order = GlobalOrder(len(subset), GLOBAL_BATCH, SEED)
    requests = partial(Batches(order, subset, settings).requests, "image", replicas=REPLICAS)
    request = next(requests(replica=0, start_step=0, stop_step=order.steps_per_epoch))
    read = [
        (source.captions(i), source.content_hash("image", i), source.where(i))
        for i in request.index.tolist()
    ]
    first = time.perf_counter()
    stages["first requests"] = memory()

    step = int((RESUME_EPOCH + RESUME_FRACTION) * order.steps_per_epoch)
    resume_start = time.perf_counter()
    request = next(requests(replica=3, start_step=step, stop_step=step + 1))
    read += [
        (source.captions(i), source.content_hash("image", i), source.where(i))
        for i in request.index.tolist()
    ]
    resumed = time.perf_counter()
    stages["resumed"] = memory()

    # Once more in the same epoch: what any later step costs.
    step_start = time.perf_counter()
    later = list(requests(replica=3, start_step=step + 1, stop_step=step + 101))
    step_ms = (time.perf_counter() - step_start) * 10
    return {
        "stages": stages,
        "peak": peak_mb(),
        "open_s": opened - start,
        "first_s": (opened - start) + (first - subset_start),
        "resume_s": resumed - resume_start,
        "step_ms": step_ms,
        "read": len(read) + len(later),
    }


def run_alone(spec: str, folder: Path, with_torch: bool) -> dict:
    command = [
        sys.executable,
        __file__,
        "--measure",
        spec,
        "--folder",
        str(folder),
        *(["--with-torch"] if with_torch else []),
    ]
    run = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    if run.returncode:
        sys.exit(run.stderr[-2000:])
    return json.loads(run.stdout.splitlines()[-1])


def spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} – {max(values):,.{digits}f})"


def median(results: list[dict], stage: str, kind: str) -> float:
    return statistics.median(result["stages"][stage][kind] for result in results)


def report(results: dict[str, list[dict]], samples: int, file_mb: float) -> str:
    rounds = len(results["torch"])
    lines = [
        "# Ten million samples" if samples == 10_000_000 else f"# {samples:,} samples",
        "",
        f"{samples:,} samples, an index of {file_mb:,.0f} MB, global batch {GLOBAL_BATCH:,}; "
        f"{rounds} rounds, each in fresh processes, on {os.cpu_count()} cores: median (least – "
        "most).",
        "",
        "| resident memory of one process, MB | own | mapped | all |",
        "|---|---|---|---|",
    ]
    for kind, title in (("torch", "with the loaders"), ("plain", "without torch")):
        for stage in results[kind][0]["stages"]:
            values = [
                median(results[kind], stage, memory_kind)
                for memory_kind in ("own", "mapped", "resident")
            ]
            lines.append(
                f"| {title}: {stage} | " + " | ".join(f"{value:,.0f}" for value in values) + " |"
            )
    first = {kind: [r["first_s"] for r in results[kind]] for kind in results}
    resume = {kind: [r["resume_s"] for r in results[kind]] for kind in results}
    added = median(results["torch"], "resumed", "resident") - median(
        results["torch"], "imported", "resident"
    )
    own = median(results["torch"], "resumed", "own") - median(results["torch"], "imported", "own")
    alone = median(results["plain"], "resumed", "resident")
    peak = statistics.median(r["peak"] for r in results["plain"])
    rows = [
        (
            "added to a process that has imported torch, MB",
            added,
            AIMS["resident"],
            f"{added:,.0f}, of that own {own:,.0f}",
        ),
        (
            "a whole process without torch, MB",
            alone,
            AIMS["resident"],
            f"{alone:,.0f}, at most {peak:,.0f}",
        ),
        (
            "first request batch, after the imports, s",
            statistics.median(first["torch"]),
            AIMS["first"],
            spread(first["torch"], 2),
        ),
        (
            "resume in another epoch, s",
            statistics.median(resume["torch"]),
            AIMS["resume"],
            spread(resume["torch"], 2),
        ),
    ]
    lines += ["", "| | seen | aim | |", "|---|---|---|---|"]
    lines += [
        f"| {what} | {seen} | {aim:g} | {'met' if value <= aim else '**MISSED**'} |"
        for what, value, aim, seen in rows
    ]
    lines += [
        f"| opening the index alone, s | {spread([r['open_s'] for r in results['torch']], 3)} | | "
        "|",
        "| any later step of the epoch, ms | "
        f"{spread([r['step_ms'] for r in results['torch']], 2)} | | |",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--samples", type=int, default=10_000_000, metavar="N", help="(default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--measure", metavar="SPEC", help=argparse.SUPPRESS)  # how it calls itself
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--with-torch", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.folder, arguments.with_torch)))
        return
    if arguments.samples < 100 * GLOBAL_BATCH or arguments.rounds < 1:
        parser.error(f"--samples must be at least {100 * GLOBAL_BATCH}, --rounds at least 1")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        made = f"import sys; sys.path[:0] = {sys.path[:2]!r}; from pathlib import Path; from large_index import write_large_index; "
        made += f"print(write_large_index(Path({str(folder)!r}), {arguments.samples}))"
        spec = subprocess.run(
            [sys.executable, "-c", made], capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout.strip()
        file_mb = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6
        results: dict[str, list[dict]] = {"torch": [], "plain": []}
        run_alone(spec, folder, False)  # writes the training subset, and brings the file to memory
        for _ in range(arguments.rounds):
            for kind, measured in results.items():
                measured.append(run_alone(spec, folder, kind == "torch"))
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "index.md").write_text(report(results, arguments.samples, file_mb), encoding="utf-8")
    print((OUT / "index.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
