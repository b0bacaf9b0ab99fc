"""OpenCLIP's trainer on one rank; bench/open_clip.py starts it through torchrun.

    torchrun --nproc-per-node 2 -m bench.open_clip_rank '{"towers": FILE, "options": […]}'

The options of OpenCLIP are one word because torchrun would take some of them for its own (`--logs`
for `--logs-specs`). `open_clip_train.main.main` stays as it is; around it the towers' file is made
known by `open_clip.add_model_config`, and DistributedDataParallel is called without `device_ids`, which
OpenCLIP gives even for a CPU, where torch refuses them.

This must run as a module from the root of the repository. Started as a file it would have bench/ at
the front of its path, where `import open_clip` finds bench/open_clip.py instead of the library.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest.mock import patch

import open_clip
import torch
from open_clip_train.main import main
from torch.nn.parallel import DistributedDataParallel


def without_device_ids(
    module: torch.nn.Module, device_ids: Any = None, **options: Any
) -> DistributedDataParallel:
    return DistributedDataParallel(module, **options)


def run(towers: str | None, options: list[str]) -> None:
    """Train. The process ends with status 1 where OpenCLIP reports an error by its return value."""
    if towers is not None:
        open_clip.add_model_config(towers)
    with patch.object(torch.nn.parallel, "DistributedDataParallel", without_device_ids):
        if main(options) is not None:
            sys.exit(1)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run(**json.loads(sys.argv[1]))
