"""What runs beside the computing stream of a device: copies from and to host memory, and receives.

Streams and events are DeepSpeed's accelerator's, so they are not CUDA's alone. A CPU has none: it
computes as it is called.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

LOADS_AHEAD = 2  # micro-batches on the device that no forward has finished with


def runs_behind(device: torch.device) -> bool:
    """Does the device run what the host issues later, in streams?"""
    accelerator = get_accelerator()
    is_accelerator = device.type == torch.device(accelerator.device_name()).type
    return is_accelerator and not accelerator.is_synchronized_device()


class SideStream:
    """A stream beside the one that computes; on a device without streams it does nothing."""

    def __init__(self, device: torch.device):
        self._stream: Any = get_accelerator().Stream() if runs_behind(device) else None

    def here(self) -> Any:
        """The present place in the stream that computes."""
        return None if self._stream is None else get_accelerator().current_stream().record_event()

    @contextlib.contextmanager
    def after(self, place: Any) -> Iterator[None]:
        """What is issued in here starts when the stream that computes has come to `place`, and not
        behind all that was issued to it since."""
        if self._stream is None:
            yield
            return
        self._stream.wait_event(place)
        with get_accelerator().stream(self._stream):
            yield


class DeviceCopies:
    """Moves tensors to `device` and back, on a GPU in streams of their own, one for each way.

    The host issues the kernels of a micro-batch long before the device runs them. In the stream of
    the kernels a copy would wait for all that was issued before it, and the kernels behind it for
    the copy; here it runs beside them. What is in pinned memory is copied without the host waiting.

    The host waits before a copy until the device is done with all but `LOADS_AHEAD` of those before
    it: the copies would else fill the memory as far as the host is ahead.
    """

    def __init__(self, device: torch.device):
        behind = runs_behind(device)
        self._device = device
        self._in: Any = get_accelerator().Stream() if behind else None
        self._out: Any = get_accelerator().Stream() if behind else None
        self._taken: deque[Any] = deque()  # places of the computing stream before a `take`

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors on the device: what is issued to the present stream from now on finds them
        complete."""
        if self._in is None:
            return {name: tensor.to(self._device) for name, tensor in tensors.items()}
        accelerator = get_accelerator()
        computing = accelerator.current_stream()
        self._taken.append(computing.record_event())
        if len(self._taken) == LOADS_AHEAD:
            self._taken.popleft().synchronize()
        with accelerator.stream(self._in):
            arrived = {
                name: tensor.to(self._device, non_blocking=True) for name, tensor in tensors.items()
            }
        computing.wait_stream(self._in)
        for tensor in arrived.values():
            tensor.record_stream(computing)  # its memory is given to no later copy before
        return arrived

    def keep(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors in host memory, for `take_back` and nothing else: on a GPU the copies may not
        be complete yet. On a CPU they are the same tensors. Nothing may change them in place."""
        if self._out is None:
            return dict(tensors)
        kept = {
            name: torch.empty_like(tensor, device="cpu", pin_memory=True)
            for name, tensor in tensors.items()
        }
        accelerator = get_accelerator()
        self._out.wait_stream(accelerator.current_stream())
        with accelerator.stream(self._out):
            for name, tensor in tensors.items():
                kept[name].copy_(tensor, non_blocking=True)
                tensor.record_stream(self._out)
        return kept

    def take_back(self, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As `take`, of what `keep` returned."""
        if self._in is not None:
            self._in.wait_stream(self._out)
        return self.take(kept)
