"""One measurement of bench/gpu.py, in a process of its own.

    python -m bench.on_gpu.measure '{"model": …}'       a `Job`

What is found is written line by line to the job's file; the parts of a measurement that were done
before a failure or a time limit are kept. Both programs are given batches that lie ready in
page-locked memory, and are timed between two waits for the device:

- Wye: `train_batch` of the engine that train.py builds, with ds_configs/zero1_bf16.json. Its
  micro-batches are as its loader makes them: images as bytes with channels last.
- OpenCLIP: `open_clip_train.main.main`, unchanged, with `--dataset-type synthetic`, of which the
  data set is exchanged for one that hands out these batches, and that ends the program when it has
  been timed. Images are fp32 as its own loader's.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own log

import torch

from bench.on_gpu.jobs import Job

OUT_OF_MEMORY = 3  # exit status
WORDS_OF_MEMORY = ("out of memory", "ALLOC_FAILED")  # also of cuBLAS and cuDNN


def is_out_of_memory(error: BaseException | None) -> bool:
    """Itself, or what it was raised from."""
    while error is not None:
        words = any(words in str(error) for words in WORDS_OF_MEMORY)
        if words or isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def measure(job: Job) -> int:
    """The exit status."""
    known: dict[str, Any] = {}
    with job.file.open("a", encoding="utf-8") as file:

        def note(**values: Any) -> None:
            known.update(values)
            file.write(json.dumps(values) + "\n")
            file.flush()

        try:
            importlib.import_module(f"bench.on_gpu.{job.of.program}").train(job, note)
        except Exception as error:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"[:500]
            if known.get("status") == "ok":  # what was to be measured is; a profile is missing
                note(reason=f"after the measurement: {reason}")
            elif is_out_of_memory(error):
                note(status="out of memory")
                return OUT_OF_MEMORY
            else:
                note(status="failed", reason=reason)
                return 1
    return 0


if __name__ == "__main__":
    status = measure(Job(**json.loads(sys.argv[1])))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # nothing is left to do, and libraries' ends may hang after a failure
