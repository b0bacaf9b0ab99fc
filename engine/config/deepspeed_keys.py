"""DeepSpeed's keys as typed models: what is misspelt, of another type or out of range is refused in
one line with key, value and rule. Plain Python.

DeepSpeed refuses some of it late, on every rank, and passes the rest over without a word. The params
of an optimizer or a schedule are those of its class's signature; `RULES` says what that does not.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig
from pydantic import BaseModel, Field, ValidationError, create_model

from common.blocks import (
    STRICT,
    Count,
    Fraction,
    NotNegative,
    Positive,
    Share,
    Switch,
    Whole,
    first_fault,
    refuse_unknown,
)
from engine.checks import AUTO
from engine.config.implied import steps_matrices
from engine.optimizer.classes import (
    ADAM_SWITCHES,
    MOMENTA,
    RATES,
    optimizer_class,
    schedule_class,
)
from engine.optimizer.parameter_groups import MUON_RATES

CountOrAuto = Annotated[
    Count | Literal["auto"], Field(description='"auto" or a whole number of at least 1')
]
Dtype = Annotated[Literal["fp32", "fp16", "bf16"], Field(description="fp32, fp16 or bf16")]
Object = Annotated[dict[str, Any], Field(description="an object, as in DeepSpeed's documentation")]


def _pair(of: Any) -> Any:
    words = f"a list of two: each {of.__metadata__[0].description}"
    return Annotated[list[of], Field(min_length=2, max_length=2, description=words)]


class Keys(BaseModel):
    """Those of the first level that mean something under this engine."""

    model_config = STRICT

    train_batch_size: int = Field(
        ge=2, description="the global batch of a contrastive loss, a whole number of at least 2"
    )
    train_micro_batch_size_per_gpu: CountOrAuto = "auto"
    gradient_accumulation_steps: CountOrAuto = "auto"
    optimizer: Object = {}
    scheduler: Object = {}
    fp16: Object = {}
    bf16: Object = {}
    data_types: Object = {}
    zero_optimization: Object = {}
    zero_allow_untested_optimizer: Switch = False
    zero_force_ds_cpu_optimizer: Switch = True
    gradient_clipping: NotNegative = 0
    steps_per_print: Count | None = None
    pipeline: Object = {}
    communication_data_type: Dtype | None = None
    prescale_gradients: Switch = False
    gradient_predivide_factor: Positive = 1.0
    memory_breakdown: Switch = False
    comms_logger: Object = {}
    wandb: Object = {}
    tensorboard: Object = {}
    csv_monitor: Object = {}
    comet: Object = {}


class Pipeline(BaseModel):
    model_config = STRICT

    activation_checkpoint_interval: int = Field(
        0, ge=0, description="a number of layers, and 0 means no activation checkpoints"
    )


class DataTypes(BaseModel):
    model_config = STRICT

    grad_accum_dtype: Dtype | None = None


class Fp16(DeepSpeedFP16Config):
    """With the ranges that DeepSpeed does not check. What is stepped is fp32, as checkpoints hold it."""

    initial_scale_power: int = Field(16, ge=0, le=127)  # 2^127 is the largest of fp32
    hysteresis: int = Field(2, ge=1)
    fp16_master_weights_and_grads: Literal[False] = False


class Bf16(DeepSpeedBF16Config):
    bf16_master_weights_and_grads: Literal[False] = False
    bf16_optimizer_states: Literal[False] = False


class Named(BaseModel):
    """The blocks `optimizer` and `scheduler`; `params` are checked by the class of `type`."""

    model_config = STRICT

    type: str = Field(description="the name of a class")
    params: dict[str, Any] = Field({}, description="an object of its arguments")


DEEPSPEED_KEYS = list(Keys.model_fields)
MODELS: dict[str, type[BaseModel]] = {
    "pipeline": Pipeline,
    "data_types": DataTypes,
    "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    "zero_optimization": DeepSpeedZeroConfig,
    "fp16": Fp16,
    "bf16": Bf16,
    "comms_logger": CommsLoggerConfig,
    "wandb": WandbConfig,
    "tensorboard": TensorBoardConfig,
    "csv_monitor": CSVConfig,
    "comet": CometConfig,
}
# Of params, what a signature does not say. Others are a number of at least 0, a whole number of at
# least 1, or true or false.
RULES: dict[str, Any] = {
    "lr": Positive,
    "eps": Positive,
    "weight_decay": NotNegative,
    "betas": _pair(Fraction),
    "total_num_steps": Annotated[
        Count, Field(description='"auto" or a whole number of at least 1')
    ],
    "warmup_type": Annotated[Literal["log", "linear"], Field(description="log or linear")],
    **dict.fromkeys(("momentum", *MOMENTA), Fraction),
    **dict.fromkeys(("dampening", "warmup_min_ratio", "cos_min_ratio"), Share),
    **dict.fromkeys(RATES.values(), Positive),
    "cycle_min_lr": NotNegative,
    **dict.fromkeys(("warmup_num_steps", "decay_step_size", "cycle_second_step_size"), Whole),
    **dict.fromkeys(("cycle_first_stair_count", "cycle_second_stair_count"), Whole),
}
# What a run fills in, and what no run has: CUDA graphs, gradients through a step.
NOT_WRITTEN = {"params", "model_params", "optimizer", "adamw_mode", "max_grad_norm"}
NOT_WRITTEN |= {"last_batch_iteration", "capturable", "differentiable"}


def check_keys(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a key that is unknown, with the nearest that is known, and for a value
    that is not of its type or out of range."""
    _check(Keys, config, "")
    for where, model in MODELS.items():
        _check(model, _block(config, where), where)
    for where in ("optimizer", "scheduler"):
        if where in config:
            _check(Named, config[where], where)
            params = _block(config, f"{where}.params")
            # "auto" stands where `engine/config/auto.py` fills it in
            written = {key: value for key, value in params.items() if value != AUTO}
            _check(params_model(config, where), written, f"{where}.params", set(params))


def params_model(config: Mapping[str, Any], where: str) -> type[BaseModel]:
    """Of `optimizer.params` or `scheduler.params`. Errors: ValueError for an unknown type."""
    kind = config[where]["type"]
    cls: Any = schedule_class(kind) if where == "scheduler" else optimizer_class(config)
    # the subclasses of DeepSpeed's schedules take its arguments
    cls = getattr(lr_schedules, kind, cls)
    is_adam = where == "optimizer" and kind.lower() in ("adam", "adamw")
    is_muon = where == "optimizer" and steps_matrices(config[where])
    return _params_model(cls, ADAM_SWITCHES if is_adam else (), MUON_RATES if is_muon else ())


@cache
def _params_model(
    cls: Any, switches: tuple[str, ...] = (), rates: tuple[str, ...] = ()
) -> type[BaseModel]:
    """`switches`, `rates`: what is read beside the arguments of the class."""
    fields: dict[str, Any] = {name: (Switch, False) for name in switches}
    rate = RULES["lr"]
    words = rate.__metadata__[-1].description
    fields |= {name: (rate, Field(None, description=words)) for name in rates}
    for name, parameter in inspect.signature(cls).parameters.items():
        rule = RULES.get(name) or _by_type(parameter)
        if name in NOT_WRITTEN or rule is None:
            continue
        required = parameter.default is parameter.empty and name not in RATES.values()
        nullable = parameter.default is None
        words = rule.__metadata__[-1].description
        fields.setdefault(
            name,
            (
                rule | None if nullable else rule,
                Field(... if required else None, description=words),
            ),
        )
    return create_model(cls.__name__, __config__=STRICT, **fields)


def _by_type(parameter: inspect.Parameter) -> Any:
    """By its annotation, or the type of its default; None: nothing that JSON can hold."""
    written = str(parameter.annotation)
    if parameter.annotation is parameter.empty:
        written = type(parameter.default).__name__
    kinds = {"bool": Switch, "float": NotNegative, "int": Count}
    known = [rule for kind, rule in kinds.items() if re.search(rf"\b{kind}\b", written)]
    return known[0] if known else None


def _block(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    for key in where.split("."):
        config = config.get(key) or {}
        if not isinstance(config, Mapping):
            raise ValueError(
                f"{where}: got {config!r}; it is an object, as in DeepSpeed's documentation"
            )
    return config


def _check(
    model: type[BaseModel],
    given: Mapping[str, Any],
    where: str,
    present: Collection[str] = (),
) -> None:
    """Raise ValueError for the first thing that `model` does not take. `present`: keys that are
    there, also where their value is not in `given`."""
    # an alias is DeepSpeed's older name
    names = {name: key for key, f in model.model_fields.items() for name in (key, f.alias) if name}
    known = [*names, "branches"] if model is Keys else list(names)
    hint = '; stages are described in "branches"' if model is Pipeline else ""
    refuse_unknown((*present, *given), known, where, hint)
    fields = {name: model.model_fields[key] for name, key in names.items()}
    try:
        taken = model(**given)
    except ValidationError as error:
        if fault := first_fault(error, fields, given, where, present):
            raise ValueError(fault) from None
        return
    prefix = f"{where}." if where else ""
    for key, value in given.items():
        kept = getattr(taken, names[key])
        if value is not None and not _is_alike(value, kept):
            words = {bool: "true or false", int: "a whole number", float: "a number"}
            rule = words.get(type(kept), f"a {type(kept).__name__}")
            raise ValueError(f"{prefix}{key}: got {value!r}; it is {rule}")


def _is_alike(value: Any, kept: Any) -> bool:
    """Whether a model has kept the kind of a value: DeepSpeed's take strings and switches for
    numbers, and numbers for switches."""
    words = isinstance(value, str) == isinstance(kept, (str, Path))
    return words and isinstance(value, bool) == isinstance(kept, bool)
