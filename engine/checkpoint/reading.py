"""Tensors of a checkpoint by kind and name, whatever topology wrote them; and a tower's layers
filled from them."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn

from engine.checkpoint.layout import (
    AVERAGE,
    BUFFER,
    OPTIMIZER,
    PARAMETER,
    BrokenCheckpoint,
    Fragment,
    Manifest,
    read_manifest,
)

PRECISIONS = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
}


class CheckpointReader:
    """Reads what is asked for and no more. A context manager: files are opened when they are
    needed, and stay open until its end.

    `manifest`: of a checkpoint that was looked at already. Raises BrokenCheckpoint for a folder that
    is not a whole checkpoint; `layout.verify` also looks at what is in its files.
    """

    def __init__(self, checkpoint: Path, manifest: Manifest | None = None):
        self.checkpoint, self.manifest = checkpoint, manifest or read_manifest(checkpoint)
        self._fragments = self.manifest.fragments()
        self._files: dict[str, Any] = {}
        self._open = contextlib.ExitStack()
        kinds = {kind for kind, _ in self._fragments}
        self.optimizer_kinds = sorted(kind for kind in kinds if kind.startswith(OPTIMIZER))
        self.stateless = {name for record in self.manifest.ranks for name in record.stateless}

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.clear()
        self._open.close()

    def has(self, kind: str) -> bool:
        """Any tensor of this kind."""
        return any(own == kind for own, _ in self._fragments)

    def shape(self, kind: str, name: str) -> tuple[int, ...] | None:
        """None: there is no such tensor."""
        return self._fragments[kind, name][0][1].shape if (kind, name) in self._fragments else None

    def holders(self, names: Collection[str]) -> list[str]:
        """The files that hold something of these names, ascending."""
        return sorted(
            {f for (_, name), parts in self._fragments.items() if name in names for f, _ in parts}
        )

    def fragments(self, kind: str, name: str, shape: Sequence[int]) -> list[tuple[str, Fragment]]:
        """The parts of a tensor, each with the file that it is in. No file is opened.

        Raises ValueError when the checkpoint has no such tensor, or one of another shape than
        `shape`.
        """
        parts = self._fragments.get((kind, name))
        if parts is None:
            others = [other for own, other in self._fragments if own == kind]
            near = difflib.get_close_matches(name, others, 1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ValueError(
                f"checkpoint {self.checkpoint}: has no {kind} {name!r}{hint}. It was made with "
                "other towers; choose another checkpoint, or the towers that it was made with"
            )
        if parts[0][1].shape != tuple(shape):
            raise ValueError(
                f"checkpoint {self.checkpoint}: {kind} {name!r} has shape "
                f"{list(parts[0][1].shape)}, and {list(shape)} is needed. It was made with towers "
                "of other sizes; choose another checkpoint, or those sizes"
            )
        return parts

    def read(
        self, kind: str, name: str, shape: Sequence[int], start: int = 0, stop: int | None = None
    ) -> Tensor:
        """Elements start..stop of the flattened tensor, in host memory and in the dtype in which
        they were saved: [stop - start]. Errors as `fragments`.
        """
        parts = self.fragments(kind, name, shape)
        stop = sum(fragment.numel for _, fragment in parts) if stop is None else stop
        found = [self._part(file, fragment, start, stop) for file, fragment in parts]
        return torch.cat([part for part in found if part.numel()] or found[:1])

    def _part(self, file: str, fragment: Fragment, start: int, stop: int) -> Tensor:
        first, last = max(start, fragment.offset), min(stop, fragment.offset + fragment.numel)
        if first >= last:
            return torch.empty(0)
        if file not in self._files:
            self._files[file] = self._open.enter_context(
                safe_open(self.checkpoint / file, framework="pt")
            )
        whole = self._files[file].get_slice(fragment.key)
        part = whole[first - fragment.offset : last - fragment.offset]
        if part.shape != (last - first,):
            raise BrokenCheckpoint(
                f"{self.checkpoint}: {file} has other elements of {fragment.key} "
                "than its manifest says"
            )
        return part

    def scalars(self, name: str) -> dict[str, Any]:
        """The numbers that the optimizer keeps for a parameter."""
        records = [record.scalars.get(name, {}) for record in self.manifest.ranks]
        return {key: value for record in records for key, value in record.items()}

    def all_scalars(self) -> list[dict[str, Any]]:
        """Of every parameter that has some."""
        names = {name for record in self.manifest.ranks for name in record.scalars}
        return [self.scalars(name) for name in sorted(names)]


Layer = TypeVar("Layer", bound=nn.Module)


def load_layer(
    reader: CheckpointReader,
    layer: Layer,
    device: torch.device | str = "cpu",
    averaged: bool = False,
) -> Layer:
    """Fill one built layer, in the precision it was trained in; buffers stay in theirs, and what the
    losses learn (`layer.scalars`) in fp32.
    `layer.canonical_names`: local name -> name in the run. Raises ValueError where the checkpoint
    was made with other towers."""
    dtype = PRECISIONS[reader.manifest.topology["precision"]]
    names: Any = layer.canonical_names
    for local, parameter in layer.named_parameters():
        name = names[local]
        has_average = averaged and reader.shape(AVERAGE, name) is not None  # a locked one has none
        value = reader.read(AVERAGE if has_average else PARAMETER, name, parameter.shape)
        scalar = local in getattr(layer, "scalars", ())
        parameter.data = value.view(parameter.shape).to(torch.float32 if scalar else dtype)
    for local, buffer in layer.named_buffers():
        if local in names:
            buffer.copy_(reader.read(BUFFER, names[local], buffer.shape).view(buffer.shape))
    return layer.to(device)
