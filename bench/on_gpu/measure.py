"""One measurement of bench/gpu.py, in a process of its own.

    python -m bench.on_gpu.measure wye|open_clip       a `Job` as a line of JSON on the standard input

The libraries are imported before the line is read, so that the process can be started while another
one still measures. What is found is written line by line to the job's file; the parts of a
measurement that were done before a failure or a time limit are kept.

Both programs are given batches that lie ready in page-locked memory, and are timed between two
waits for the device:

- Wye: `train_batch` of the engine that train.py builds, with ds_configs/zero1_bf16.json. Its
  micro-batches are as its loader makes them: images in bf16 with channels last.
- OpenCLIP: `open_clip_train.main.main`, unchanged, with `--dataset-type synthetic`, of which the
  data set is exchanged for one that hands out these batches, and that ends the program when it has
  been timed. Images are fp32 as its own loader's.

With `decoded`, both train from the same files through their own loaders, and are timed by their own
logs.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own log

import torch

from bench.on_gpu.jobs import Job
from bench.on_gpu.timing import Device

OUT_OF_MEMORY = 3  # exit status
SAID_OF_MEMORY = ("out of memory", "ALLOC_FAILED")  # also by cuBLAS and cuDNN


def environment(device: Device) -> dict[str, Any]:
    return {
        "device": device.name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if device.on_gpu else None,
    }


def is_out_of_memory(error: BaseException | None) -> bool:
    """Itself, or what it was raised from."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or any(
            words in str(error) for words in SAID_OF_MEMORY
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def measure(job: Job) -> int:
    """The exit status."""
    device = Device(job.device)
    known: dict[str, Any] = {}
    with job.file.open("a", encoding="utf-8") as file:

        def note(**values: Any) -> None:
            known.update(values)
            file.write(json.dumps(values) + "\n")
            file.flush()

        note(environment=environment(device))
        try:
            importlib.import_module(f"bench.on_gpu.{job.of.program}").train(job, note)
        except Exception as error:
            traceback.print_exc()
            said = f"{type(error).__name__}: {error}"[:500]
            if known.get("status") == "ok":  # what was to be measured is; a profile is missing
                note(reason=f"behind the measurement: {said}")
            elif is_out_of_memory(error):
                note(status="out of memory")
                return OUT_OF_MEMORY
            else:
                note(status="failed", reason=said)
                return 1
    return 0


def main(arguments: Sequence[str]) -> int:
    (program,) = arguments
    importlib.import_module(f"bench.on_gpu.{program}")  # which touches no device
    gc.collect()
    line = sys.stdin.readline()
    return measure(Job(**json.loads(line))) if line.strip() else 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # nothing is left to do, and libraries' ends may hang behind a failure
