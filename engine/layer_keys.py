"""Which layers are equal, so that what was found out of one holds for the others."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

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
