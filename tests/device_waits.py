"""Counts where the host would wait for a GPU, on a machine without one.

Two modes of torch look at what real code does with real tensors on a CPU, and take each of them for
one on a GPU, but for those that were made in host memory (`torch.tensor(3)`) or read into it
(`.cpu()`). What is inside a kernel or a library of C++ cannot be seen.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

REPOSITORY = str(Path(__file__).parents[1])
LIBRARIES = {str(Path(deepspeed.__file__).parent): "deepspeed"}
# they tell each other numbers of the host, in a group of gloo
IN_HOST_MEMORY = ("announce", "announced", "gather_last_stages")
# by these torch marks what FakeTensorMode refuses: sizes or Python numbers that depend on values
TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
HOST = (None, "cpu")  # as it is written; the engine's device is an object
READS = (Tensor.tolist, Tensor.cpu, Tensor.numpy)  # without an operator of ATen, on a CPU
MAKES = (torch.tensor, torch.as_tensor)  # with a device: a copy from memory that is not pinned


class DeviceWaits:
    """As a context: `found` counts the waits in it, by the line of this repository, or of
    DeepSpeed, that waits."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._on_host = WeakIdKeyDictionary()
        self._modes = (_Operators(self), _Functions(self))

    def __enter__(self) -> DeviceWaits:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in self._modes[::-1]:
            mode.__exit__(*error)

    def note(self) -> None:
        frame = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            # the environment may lie in the repository
            ours = {REPOSITORY: ""} if "site-packages" not in file else {}
            for folder, name in (LIBRARIES | ours).items():
                if file.startswith(f"{folder}/") and file != __file__:
                    path = f"{name}{file.removeprefix(folder)}".lstrip("/")
                    if path == "engine/json_messages.py":  # name who asked for it
                        break
                    if frame.f_code.co_name not in IN_HOST_MEMORY:
                        self.found[f"{path}:{frame.f_lineno}"] += 1
                    return
            frame = frame.f_back

    def on_host(self, *tensors: Tensor) -> bool:
        return bool(tensors) and all(tensor in self._on_host for tensor in tensors)

    def put_on_host(self, made: Any) -> None:
        for tensor in _tensors(made):
            self._on_host[tensor] = True


class _Operators(TorchDispatchMode):
    def __init__(self, waits: DeviceWaits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if TAGS & set(func.tags) and self._waits(func, args):
            self.waits.note()
        return func(*args, **(kwargs or {}))

    def _waits(self, func, args) -> bool:
        if func is torch.ops.aten.index.Tensor:
            return any(
                self.waits.on_host(index) or index.dtype in (torch.bool, torch.uint8)
                for index in _tensors(args[1])
            )
        if func is torch.ops.aten.repeat_interleave.Tensor and len(args) > 1:
            return False
        return not self.waits.on_host(*_tensors(args))


class _Functions(TorchFunctionMode):
    def __init__(self, waits: DeviceWaits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = list(_tensors((args, kwargs)))
        made = func(*args, **kwargs)
        if func in READS and not self.waits.on_host(*given):
            self.waits.note()
        if func in MAKES and kwargs.get("device") not in HOST and not given:
            self.waits.note()
        if self._is_of_host(func, given, kwargs):
            self.waits.put_on_host(made)
        return made

    def _is_of_host(self, func, given, kwargs) -> bool:
        if given:
            return func in READS or self.waits.on_host(*given)
        return kwargs.get("device") in HOST


class ValuesGiven(TorchFunctionMode):
    """Under FakeTensorMode, where it raises: what `tolist` returns in some functions, by their
    names. `read`: how many numbers each of them has read."""

    def __init__(self, given: Mapping[str, list[int]]) -> None:
        super().__init__()
        self._given = {name: iter(values) for name, values in given.items()}
        self.read: Counter[str] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.item:
            frame = sys._getframe(1)
            while frame.f_code.co_name in ("<listcomp>", "tolist"):
                frame = frame.f_back
            if frame.f_code.co_name in self._given:
                self.read[frame.f_code.co_name] += 1
                return next(self._given[frame.f_code.co_name])
        return func(*args, **(kwargs or {}))


def _tensors(values: Any):
    return (value for value in tree_iter(values) if isinstance(value, Tensor))


def waits_of_steps(case: Any, num_steps: int = 2) -> Counter[str]:
    """On each rank: the waits of the last of some steps; the first makes what later ones have."""
    from split_training import make_engine, micro_batches_of_rank, num_micro_batches

    from engine.executor import StepSpec

    engine, _, image_size = make_engine(case)
    for step in range(num_steps):
        batches = micro_batches_of_rank(case, engine, step, image_size)
        with DeviceWaits() as waits:
            engine.train_batch(
                batches,
                StepSpec(
                    num_micro_batches=num_micro_batches(case, engine),
                    rows_per_sample={"text": case.texts_of(step)},
                ),
            )
    return waits.found
