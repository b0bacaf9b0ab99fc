"""Which layers cost the same, and what earlier starts measured: keys of layers, the device's
identity, a folder of measurements."""

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
from torch import Tensor, nn

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


# -- which layers are equal

# says where a layer stands, not what it does
_WHICH_ONE = ("layer_idx", "layer_id", "layer_index", "layer_number")


def layer_key(layer: nn.Module) -> str:
    """What decides a layer's cost: classes, parameters, and settings of all its modules. Equal
    layers of a tower have equal keys.

    Numbers that are no counts (a dropout probability, an epsilon) matter only in being zero or not.
    """
    lines = [
        f"{name}: {type(module).__module__}.{type(module).__qualname__} {_settings(module)}"
        for name, module in layer.named_modules()
    ]
    tensors = [
        f"{name} {tuple(t.shape)} {getattr(t, 'requires_grad', False)}"
        for name, t in (*layer.named_parameters(), *layer.named_buffers())
    ]
    return "\n".join(lines + tensors)


def _settings(module: nn.Module) -> str:
    values = {
        name: _setting(value)
        for name, value in vars(module).items()
        if not name.startswith("__") and name not in _WHICH_ONE
    }
    return json.dumps({name: value for name, value in sorted(values.items()) if value is not None})


def _setting(value: Any) -> Any:
    """A value that JSON has, None for what says nothing."""
    if isinstance(value, float):
        return value != 0.0
    if isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (tuple, list)):
        return [_setting(part) for part in value]
    if callable(getattr(value, "to_dict", None)):  # a library's configuration
        whole = {**value.to_dict(), "attention": getattr(value, "_attn_implementation", None)}
        return {
            str(name): _setting(part)
            for name, part in sorted(whole.items(), key=lambda item: str(item[0]))
        }
    return (
        getattr(value, "__qualname__", None)
        if callable(value) and not isinstance(value, nn.Module)
        else None
    )


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
