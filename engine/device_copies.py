"""Copies between host memory and the device that run while the device computes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class DeviceCopies:
    """Moves tensors to `device` and back, on a GPU in a stream of its own.

    The host issues the kernels of a micro-batch long before the device runs them. In the stream of
    the kernels a copy would wait for all that was issued before it, and the kernels behind it for
    the copy; here it runs beside them. What is in pinned memory is copied without the host waiting.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors on the device: what is issued to the present stream from now on finds them
        complete."""
        if self._stream is None:
            return {name: tensor.to(self._device) for name, tensor in tensors.items()}
        with torch.cuda.stream(self._stream):
            arrived = {
                name: tensor.to(self._device, non_blocking=True) for name, tensor in tensors.items()
            }
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        for tensor in arrived.values():
            tensor.record_stream(computing)  # its memory is given to no later copy before
        return arrived

    def keep(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors in host memory, for `take` and nothing else: on a GPU the copies may not be
        complete yet. On a CPU they are the same tensors."""
        if self._stream is None:
            return dict(tensors)
        kept = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            for name, tensor in tensors.items()
        }
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for name, tensor in tensors.items():
                kept[name].copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)
        return kept
