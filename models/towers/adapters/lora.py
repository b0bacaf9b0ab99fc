"""How a tower is adapted: the settings of its adapters, as the JSON has them. Imports peft when
it is asked for its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from common.blocks import Fraction, Positive, Switch, block
from common.spelling import near

TARGETS = ("attention", "mlp", "all")


_CHOICES = (
    '"attention", "mlp", "all", or a list of the ends of module names, such as ["q_proj", "v_proj"]'
)


def _target(target: Any) -> Any:
    names = [target] if isinstance(target, str) else target
    if not (isinstance(names, (list, tuple)) and names and all(map(_is_name, names))):
        raise ValueError(f"got {target!r}; it is {_CHOICES}")
    if isinstance(target, str) and target not in TARGETS:
        raise ValueError(f"got {target!r}; it is {_CHOICES}{near(target, TARGETS)}")
    return target if isinstance(target, str) else tuple(target)


@block
class LoRA:
    """The adapters of a tower. `r`, `alpha`, `dropout`, `use_rslora` as in peft's `LoraConfig`,
    with its defaults: scale = alpha / r, with `use_rslora` alpha / sqrt(r) (Kalajdzievski 2023).

    `target`: which of the tower's linear layers have one: "attention", "mlp", "all", or the ends of
    their names in the library, such as ("q_proj", "v_proj").
    """

    r: Annotated[int, Field(ge=1, description="the rank, a whole number of at least 1")] = 8
    alpha: Positive = 8.0
    dropout: Fraction = 0.0
    target: Annotated[str | tuple[str, ...], BeforeValidator(_target)] = "attention"
    use_rslora: Switch = False

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
