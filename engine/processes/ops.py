"""The C++ ops that DeepSpeed compiles when it first needs them: each once per environment, under a
lock that dies with its holder."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator
from filelock import FileLock, Timeout

COMPILE_LIMIT_S = 600


def compile_shared_memory_op(notice: Callable[[str], object] | None = None) -> None:
    """Build DeepSpeed's collectives through shared memory. See `compile_op`."""
    compile_op("ShareMemCommBuilder", notice)


def compile_optimizer_op(
    optimizer: type[torch.optim.Optimizer], notice: Callable[[str], object] | None = None
) -> None:
    """Build the op of an optimizer of DeepSpeed's own, such as that of DeepSpeedCPUAdam. See
    `compile_op`."""
    if optimizer.__module__.startswith("deepspeed."):
        compile_op(f"{optimizer.__name__.removeprefix('DeepSpeed')}Builder", notice)


def compile_op(builder_name: str, notice: Callable[[str], object] | None = None) -> None:
    """Build and load an op, named by its builder, if it can be built here. `notice` is told when it
    is not built yet. Errors: ValueError for a path of torch that holds a space; TimeoutError when
    another process compiles for over ten minutes.

    Before version 2.14, torch guards its build folder with a plain file: a process killed while it
    compiles leaves that file behind and every later run waits for it for ever. Under our lock
    nobody else of ours is compiling, so such a file is a leftover.
    """
    cache = _folder()
    builder = get_accelerator().create_op_builder(builder_name)
    if builder is None or not builder.is_compatible():
        return
    _check_path(Path(torch.__file__).parent)
    if notice is not None and not any(cache.rglob(f"{builder.name}*.so")):
        notice(
            f"compiling DeepSpeed's {builder.name}: once per environment, about a minute, at most "
            f"{COMPILE_LIMIT_S // 60} minutes"
        )
    try:
        with FileLock(cache / "wye.lock", timeout=COMPILE_LIMIT_S):
            for leftover in cache.rglob(f"*{builder.name}*/lock"):
                leftover.unlink(missing_ok=True)
            with contextlib.redirect_stdout(io.StringIO()):
                builder.load(verbose=False)
    except Timeout as error:
        raise TimeoutError(
            f"waited {COMPILE_LIMIT_S} s for another process to compile DeepSpeed's {builder.name} "
            f"in {cache}; end that process, or set TORCH_EXTENSIONS_DIR to another folder"
        ) from error


def _folder() -> Path:
    """Where ops are built, which torch is told, too.

    By environment, and with its own ninja rather than the system's: a folder that two of them share
    is compiled anew each time they take turns.
    """
    programs, path = str(Path(sys.executable).parent), os.environ.get("PATH", "")
    if Path(programs, "ninja").is_file() and not path.startswith(f"{programs}{os.pathsep}"):
        os.environ["PATH"] = f"{programs}{os.pathsep}{path}"
    environment = hashlib.blake2b(sys.prefix.encode(), digest_size=4).hexdigest()
    name = f"torch_extensions-{torch.__version__}-{environment}"
    cache = Path(
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path.home() / ".cache" / "wye" / name))
    )
    cache.mkdir(parents=True, exist_ok=True)
    return cache


def _check_path(torch_folder: Path) -> None:
    """torch links extensions with its own folder unquoted. Errors: ValueError."""
    if any(letter.isspace() for letter in str(torch_folder)):
        raise ValueError(
            f"torch is installed in {torch_folder}: the path holds a space, and torch cannot link "
            "extensions there, of which DeepSpeed needs one without a GPU; use an environment "
            "whose path has none (launch/quickstart.sh makes one)"
        )
