"""The same bits in every run on the same devices.

A GPU adds some gradients up in the order in which its blocks come, and cuDNN chooses its algorithms
by their times: two runs differ in their last bits. torch's deterministic algorithms do not, and are
slower.
"""

from __future__ import annotations

import os
import re

import torch

# RuntimeError of torch, see torch.use_deterministic_algorithms
REFUSED = re.compile(r"^(\S+) does not have a deterministic implementation")


def compute_deterministically() -> None:
    """From now on. Called before the first product on the device."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def refused_in_words(error: BaseException) -> BaseException:
    """A ValueError that says what to do where torch refused an operation; else the error itself."""
    refused = REFUSED.match(str(error)) if isinstance(error, RuntimeError) else None
    if refused is None:
        return error
    explained = ValueError(
        f"--deterministic: {refused[1]} has no deterministic implementation on this device; train "
        "without the flag, or with a tower that does not need it (the traceback shows the layer)"
    )
    explained.__cause__ = error
    return explained
