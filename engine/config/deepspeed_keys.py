"""The keys inside DeepSpeed's own blocks, from DeepSpeed itself: a misspelt one is answered with
the nearest. Plain Python.

DeepSpeed refuses some of them late, on every rank, and passes others over without a word.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig
from pydantic import BaseModel, ValidationError

from engine.config.spelling import nearest

MONITORS = {
    "wandb": WandbConfig,
    "tensorboard": TensorBoardConfig,
    "csv_monitor": CSVConfig,
    "comet": CometConfig,
}
MODELS = {
    "zero_optimization": DeepSpeedZeroConfig,
    "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    "fp16": DeepSpeedFP16Config,
    "bf16": DeepSpeedBF16Config,
    **MONITORS,
}
# Of `optimizer.params`, by type in small letters: of classes that are imported only when they are
# used, because some compile at once.
COMPILED_OPTIMIZERS = {
    "lamb": (
        "lr",
        "bias_correction",
        "betas",
        "eps",
        "eps_inside_sqrt",
        "weight_decay",
        "max_coeff",
        "min_coeff",
        "amsgrad",
    ),
    "lion": ("lr", "betas", "weight_decay", "set_grad_none"),
}
ADAM = (
    "torch_adam",
    "adam_w_mode",
    "fp32_optimizer_states",
)  # DeepSpeed's own switches beside the arguments of Adam


def check_blocks(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a key that DeepSpeed does not know in one of its blocks, with the
    nearest that it does."""
    for where, model in MODELS.items():
        valid = [
            name for key, field in model.model_fields.items() for name in (key, field.alias) if name
        ]
        _refuse(where, _block(config, where), valid)
    for where, model in MONITORS.items():
        _check_types(where, model, _block(config, where))
    _refuse("data_types", _block(config, "data_types"), ["grad_accum_dtype"])
    for name, parameters in (
        ("optimizer", _optimizer_parameters),
        ("scheduler", _scheduler_parameters),
    ):
        block = _block(config, name)
        _refuse(name, block, ["type", "params"])
        if "type" in block:
            _refuse(f"{name}.params", _block(config, f"{name}.params"), parameters(block["type"]))


def _block(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    for key in where.split("."):
        config = config.get(key) or {}
        if not isinstance(config, Mapping):
            raise ValueError(
                f"{where}: got {config!r}; it is an object, as in DeepSpeed's documentation"
            )
    return config


def _refuse(where: str, given: Mapping[str, Any], valid: list[str] | None) -> None:
    for key in given:
        if valid is not None and key not in valid:
            raise ValueError(f"unknown key '{where}.{key}'{nearest(key, valid)}")


def _check_types(where: str, model: type[BaseModel], given: Mapping[str, Any]) -> None:
    """Raise ValueError for a value that DeepSpeed's own model does not take."""
    try:
        model(**given)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, (where, *first["loc"])))
        raise ValueError(f"{key}: got {first['input']!r}; {first['msg']}") from error


def _optimizer_parameters(kind: Any) -> list[str] | None:
    """None: not known before it is made."""
    if not isinstance(kind, str):
        return None
    if kind.lower() in COMPILED_OPTIMIZERS:
        return list(COMPILED_OPTIMIZERS[kind.lower()])
    if kind.lower() in ("adam", "adamw"):
        return [*_arguments(torch.optim.AdamW), "bias_correction", "set_grad_none", *ADAM]
    return _arguments(getattr(torch.optim, kind)) if hasattr(torch.optim, kind) else None


def _scheduler_parameters(kind: Any) -> list[str]:
    own = {
        name: cls
        for name, cls in vars(lr_schedules).items()
        if inspect.isclass(cls) and name in lr_schedules.VALID_LR_SCHEDULES
    }
    if kind not in own and not hasattr(torch.optim.lr_scheduler, str(kind)):
        raise ValueError(f"scheduler.type: unknown value {kind!r}{nearest(str(kind), list(own))}")
    return _arguments(own.get(kind) or getattr(torch.optim.lr_scheduler, kind))


def _arguments(cls: type) -> list[str]:
    return [
        name for name in inspect.signature(cls).parameters if name not in ("params", "optimizer")
    ]
