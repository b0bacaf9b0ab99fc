"""The device that evaluate.py computes on."""

from __future__ import annotations

import re

import torch


def chosen_device(given: str) -> torch.device:
    """The device of `cpu`, `cuda`, `cuda:N` or `auto`, the first GPU if there is one. Errors:
    ValueError for another word, and for a GPU that this machine does not have."""
    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if given == "auto":
        return torch.device("cuda" if number else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", given):
        raise ValueError(f"{given!r}; give cpu, cuda, cuda:N or auto")
    device = torch.device(given)
    if device.type == "cuda" and (device.index or 0) >= number:
        there = f"cuda:0 to cuda:{number - 1}" if number else "no GPU that torch can use"
        raise ValueError(f"{given}; this machine has {there}; give one of its devices, or auto")
    return device
