"""How a tower is adapted: the settings of its adapters, as the JSON has them. Imports peft when
it is asked for its configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from common.spelling import near

TARGETS = ("attention", "mlp", "all")


@dataclass(frozen=True)
class LoRA:
    """The adapters of a tower. `r`, `alpha`, `dropout`, `use_rslora` as in peft's `LoraConfig`, with
    its defaults: scale = alpha / r, with `use_rslora` alpha / sqrt(r) (Kalajdzievski 2023).

    `target`: which of the tower's linear layers have one: "attention", "mlp", "all", or the ends of
    their names in the library, such as ("q_proj", "v_proj"). Checked when made: ValueError.
    """

    r: int = 8
    alpha: float = 8.0
    dropout: float = 0.0
    target: str | tuple[str, ...] = "attention"
    use_rslora: bool = False

    def __post_init__(self) -> None:
        if type(self.r) is not int or self.r < 1:
            raise ValueError(f"r: got {self.r!r}; the rank is a whole number of at least 1")
        if not _is_number(self.alpha) or self.alpha <= 0:
            raise ValueError(f"alpha: got {self.alpha!r}; it is a number above 0")
        if not _is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: got {self.dropout!r}; it is a number from 0 to below 1")
        if type(self.use_rslora) is not bool:
            raise ValueError(f"use_rslora: got {self.use_rslora!r}; it is true or false")
        names = [self.target] if isinstance(self.target, str) else self.target
        if not (isinstance(names, (list, tuple)) and names and all(map(_is_name, names))):
            raise ValueError(f"target: got {self.target!r}; it is {_CHOICES}")
        if isinstance(self.target, str) and self.target not in TARGETS:
            raise ValueError(
                f"target: got {self.target!r}; it is {_CHOICES}{near(self.target, TARGETS)}"
            )
        if not isinstance(self.target, str):
            object.__setattr__(self, "target", tuple(self.target))

    def record(self) -> dict[str, Any]:
        """JSON-able, the values by their names."""
        target = self.target if isinstance(self.target, str) else list(self.target)
        return {**asdict(self), "target": target}

    def config(self, modules: str | Sequence[str]) -> Any:
        """peft's `LoraConfig`. `modules`: names, or a pattern that whole names match."""
        whole = int(self.alpha) if float(self.alpha).is_integer() else self.alpha
        return import_peft().LoraConfig(
            r=self.r,
            lora_alpha=whole,
            lora_dropout=self.dropout,
            use_rslora=self.use_rslora,
            target_modules=modules if isinstance(modules, str) else list(modules),
        )


_CHOICES = (
    '"attention", "mlp", "all", or a list of the ends of module names, such as ["q_proj", "v_proj"]'
)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip("."))


def import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ValueError(
            "branches.train: lora: adapters are made by peft, which is not installed; "
            "pip install 'peft>=0.21'"
        ) from error
    return peft
