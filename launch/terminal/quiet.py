"""Messages of libraries that tell the user of a run nothing. WYE_VERBOSE=1 shows them.

Each is named here, with why it says nothing; errors and all other warnings are shown. DeepSpeed's
own messages below errors are left out by `engine/processes/start.py`, under the same variable.
"""

from __future__ import annotations

import logging
import os
import warnings

VERBOSE = "WYE_VERBOSE"
# of each process on a machine without a GPU; which device a run uses is on its first screen
UNNEEDED = "No CUDA runtime is found"


def quiet_libraries() -> None:
    """Call it before torch and DeepSpeed are imported: some speak when they are."""
    if os.environ.get(VERBOSE):
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost connection is reported once
    extensions = logging.getLogger("torch.utils.cpp_extension")
    extensions.addFilter(lambda record: not str(record.msg).startswith(UNNEEDED))
    # what DeepSpeed calls, and no user can change
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)


def quiet_ranks(rank: int) -> None:
    """Leave to the first rank what all find, such as tensors that pretrained weights lack."""
    if rank > 0 and not os.environ.get(VERBOSE):
        logging.getLogger("models").setLevel(logging.ERROR)
