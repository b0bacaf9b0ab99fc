"""Copies between host memory and the device that run while the device computes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class DeviceCopies:
    """Moves tensors to `device` and back, on a GPU in streams of their own, one for each way.

    The host issues the kernels of a micro-batch long before the device runs them. In the stream of
    the kernels a copy would wait for all that was issued before it, and the kernels behind it for
    the copy; here it runs beside them. What is in pinned memory is copied without the host waiting.
    """

    def __init__(self, device: torch.device):
        on_gpu = device.type == "cuda"
        self._device = device
        self._in = torch.cuda.Stream(device) if on_gpu else None
        self._out = torch.cuda.Stream(device) if on_gpu else None

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors on the device: what is issued to the present stream from now on finds them
        complete."""
        if self._in is None:
            return {name: tensor.to(self._device) for name, tensor in tensors.items()}
        with torch.cuda.stream(self._in):
            arrived = {
                name: tensor.to(self._device, non_blocking=True) for name, tensor in tensors.items()
            }
        computing = torch.cuda.current_stream(self._device)
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
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            for name, tensor in tensors.items():
                kept[name].copy_(tensor, non_blocking=True)
                tensor.record_stream(self._out)
        return kept

    def take_back(self, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As `take`, of what `keep` returned."""
        if self._in is not None and self._out is not None:
            self._in.wait_stream(self._out)
        return self.take(kept)
