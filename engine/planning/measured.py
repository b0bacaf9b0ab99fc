"""What earlier starts measured: the device's identity, a folder of measurements."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from common.cpus import usable_cpus
from common.files import make_folder, read_json, write_text

if TYPE_CHECKING:
    from engine.planning.fit import Fit

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Measurement:
    """One layer at one micro-batch size. `outputs`: (name, dtype, shape, wants gradient) of all
    named tensors behind the layer."""

    forward_s: float
    backward_s: float
    activation_bytes: int
    outputs: tuple[tuple[str, str, tuple[int, ...], bool], ...]

    @property
    def output_bytes(self) -> int:
        return sum(
            torch.Size(shape).numel() * getattr(torch, dtype).itemsize
            for _, dtype, shape, _ in self.outputs
        )


_MEASUREMENT = TypeAdapter(Measurement)


def signature(tensors: Tensors) -> list:
    return [
        [name, str(t.dtype), list(t.shape), t.requires_grad] for name, t in sorted(tensors.items())
    ]


def device_identity(device: torch.device) -> dict[str, Any]:
    """What a measured time depends on beside the layer."""
    name = (
        f"{_processor()}, {usable_cpus()} cores"
        if device.type == "cpu"
        else torch.get_device_module(device).get_device_name(device)
    )
    return {"device": name, "threads": torch.get_num_threads(), "torch": torch.__version__}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# -- the cache


class Cache:
    """A JSON file per measurement. It never fails: what cannot be read was not there, what cannot
    be written is not kept."""

    def __init__(self, folder: Path | None = None):
        self.folder = (
            folder
            or Path(os.environ.get("WYE_CACHE") or Path.home() / ".cache" / "wye") / "profiles"
        )

    def read(self, name: str) -> Measurement | None:
        try:
            found = _MEASUREMENT.validate_python(self.read_values(name))
            seconds, whole = found.forward_s + found.backward_s, found.output_bytes >= 0
        except (ValueError, AttributeError):
            return None
        return found if whole and 0 < seconds < float("inf") else None

    def read_values(self, name: str) -> Any:
        """As `write` was given them; None where there are none."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return read_json(self.folder / f"{name}.json")["measured"]

    def write(self, name: str, key: Mapping[str, Any], measured: Measurement | Fit) -> None:
        """In one rename: other processes read all of it or nothing. Where nothing can be written
        (a full disk, a home that is read-only), nothing is kept, and the next start measures
        again."""
        text = json.dumps({"of": key, "measured": asdict(measured)}, indent=1)
        with contextlib.suppress(OSError):
            write_text(make_folder(self.folder) / f"{name}.json", text)


def digest(key: object) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
