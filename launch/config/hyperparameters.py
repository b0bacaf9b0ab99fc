"""The numbers that neither the command line nor the JSON says: a preset for each way to train,
chosen by measurement (bench/EVIDENCE.md).

| way | when |
|---|---|
| from scratch, short | no pretrained weights, fewer than LONG steps |
| from scratch, long | no pretrained weights, LONG steps or more |
| pretrained tower | weights for one tower or several |
| fine-tuning | a whole model, heads included |
| locked | a tower that is locked |

A tower with adapters has a rate of its own in each of these, `ADAPTERS_LR`. Measured is the first;
the others are the values of their sources. A run keeps the numbers that it began with. Plain
Python.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from data.options import loss_names
from engine.config.auto import asked, filled, recorded
from engine.config.reading import AUTO

if TYPE_CHECKING:
    from engine.config.reading import BranchesBlock
    from launch.config.options import Options

LONG = 5_000  # steps
# Of adapters, where the preset's own rate is used: they start at zero and take a higher rate than
# fine-tuning all weights. Chosen, not measured.
ADAPTERS_LR = 5e-4
# samples of a step that a scaled `lr` is for; smaller ones have it times the square root of the
# ratio (Malladi et al. 2022)
BATCH = 128
# A ResNet-50 from scratch at 1e-3 with 5 steps of warm-up learns more slowly than at 5e-4; with 20
# steps it learns faster (bench/EVIDENCE.md)
LEAST_WARMUP = 20  # steps, where the run has twice as many


@dataclass(frozen=True)
class Preset:
    """`lr`: of a step of `BATCH` samples or more where `scaled`, else of any. `pretrained_lr`: in
    parts of it, for a tower that starts from weights. `warmup`: in parts of the run, `LEAST_WARMUP`
    to `most_warmup` steps, and half of the run at most. `clips_spikes`: by the adaptive rule, once
    the warm-up is over."""

    name: str
    lr: float
    scaled: bool = True
    pretrained_lr: float = 1.0
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.2
    warmup: float = 0.1
    most_warmup: int = 2_000
    clips_spikes: bool = False
    augmentation: tuple[str, ...] = ("crop", "white")
    label_smoothing: float = 0.0

    def values(
        self,
        batch_size: int,
        total_steps: int,
        pretrained: Mapping[str, bool],
        lr: float | None = None,
        warmup: int | None = None,
        adapted: Collection[str] = (),
    ) -> dict[str, Any]:
        """By place in the JSON. `pretrained[branch]`: whether its tower starts from weights. `lr`,
        `warmup`: as given; what follows from them follows from these. `adapted`: the branches that
        learn in adapters."""
        if lr is None:
            lr = (
                float(f"{self.lr * math.sqrt(min(1.0, batch_size / BATCH)):.2g}")
                if self.scaled
                else self.lr
            )
        if warmup is None:
            warmup = min(self.most_warmup, max(LEAST_WARMUP, round(self.warmup * total_steps)))
            warmup = max(1, min(warmup, total_steps // 2))
        clipping = (
            dict.fromkeys((*pretrained, "head"), {"kind": "adaptive", "warmup_steps": warmup})
            if self.clips_spikes
            else {}
        )
        own = {
            branch: {"lr": float(f"{lr * self.pretrained_lr:.2g}")}
            for branch, has in pretrained.items()
            if has and self.pretrained_lr != 1
        } | {branch: {"lr": float(f"{lr * ADAPTERS_LR / self.lr:.2g}")} for branch in adapted}
        return {
            "optimizer.params.lr": lr,
            "optimizer.params.betas": list(self.betas),
            "optimizer.params.eps": 1e-6,
            "optimizer.params.weight_decay": self.weight_decay,
            "scheduler.params.warmup_num_steps": warmup,
            "scheduler.params.warmup_type": "linear",
            "branches.gradient_clipping": clipping,
            "branches.optimizer_groups": own,
        }


PRESETS = {
    "short": Preset("from scratch, short", lr=1e-3, weight_decay=0.1),
    # Radford et al. 2021 and OpenCLIP have 5e-4 to 1e-3 for batches of 1,024 to 86,000, so the rate
    # does not follow the batch
    "long": Preset("from scratch, long", lr=5e-4, scaled=False, clips_spikes=True),
    "pretrained": Preset("pretrained tower", lr=1e-3, pretrained_lr=0.1, weight_decay=0.1),
    "fine-tuning": Preset("fine-tuning", lr=5e-5, scaled=False, weight_decay=0.1),
    "locked": Preset("locked", lr=1e-3, weight_decay=0.1),
}


def choose(options: Options, block: BranchesBlock, total_steps: int) -> Preset:
    if any(block.locking().towers.values()):
        return PRESETS["locked"]
    if options.imported:
        return PRESETS["fine-tuning"]
    if options.first_weights:
        return PRESETS["pretrained"]
    return PRESETS["long" if total_steps >= LONG else "short"]


def as_begun(
    config: Mapping[str, Any],
    block: BranchesBlock,
    previous: Mapping[str, Any] | None,
    branches: Sequence[str],
) -> tuple[dict[str, Any], BranchesBlock]:
    """What is "auto" as the run that goes on was trained with, also where presets have changed
    since. `previous`: its record; None: a new run."""
    return (
        (dict(config), block)
        if previous is None
        else filled(config, block, recorded(previous["training"]), branches)
    )


def settle(
    options: Options, config: Mapping[str, Any], block: BranchesBlock, total_steps: int
) -> tuple[Options, dict[str, Any], BranchesBlock, str]:
    """The options and the configuration with nothing left open, and a line that says what was
    decided; empty: nothing was open.

    Errors: ValueError for "auto" with an optimizer that no preset is for.
    """
    open_places = asked(config, block)
    open_options = [
        name for name in ("augmentation", "label_smoothing") if getattr(options, name) is None
    ]
    if not open_places and not open_options:
        return options, dict(config), block, ""
    kind = config["optimizer"]["type"]
    # Muon's updates are as large as AdamW's, and it learns at its rates (bench/EVIDENCE.md, "Muon")
    if kind.lower() not in ("adam", "adamw", "muon") and any(
        place.startswith("optimizer.") for place in open_places
    ):
        raise ValueError(
            f'{open_places[0]}: "auto" is measured for AdamW, and the optimizer is {kind}; give '
            "numbers"
        )
    preset = choose(options, block, total_steps)
    pretrained = {branch: branch in options.first_weights for branch in options.branches}
    lr, warmup = (
        _given(config, *place) for place in (("optimizer", "lr"), ("scheduler", "warmup_num_steps"))
    )
    adapted = tuple(block.train or ())
    values = preset.values(
        config["train_batch_size"],
        total_steps,
        pretrained,
        lr=lr,
        warmup=warmup,
        adapted=adapted,
    )
    smoothing = 0.0
    if "infonce" in loss_names(options.loss, options.pairs):
        smoothing = preset.label_smoothing
    chosen: dict[str, Any] = {"augmentation": preset.augmentation, "label_smoothing": smoothing}
    chosen = {name: chosen[name] for name in open_options}
    words = [_in_words(place.rsplit(".", 1)[1], values[place]) for place in open_places] + [
        _in_words(*item) for item in chosen.items()
    ]
    length = f"{total_steps:,} steps of {config['train_batch_size']:,} samples"
    said = f"{preset.name}, {length}: {', '.join(filter(None, words))}"
    return replace(options, **chosen), *filled(config, block, values, options.branches), said


def _given(config: Mapping[str, Any], block: str, key: str) -> Any:
    """None where it is left open, or is not there."""
    value = (config.get(block, {}).get("params") or {}).get(key)
    return None if value == AUTO else value


def _in_words(key: str, value: Any) -> str:
    match key:
        case "warmup_num_steps":
            return f"{value} steps of warm-up"
        case "warmup_type" | "eps":
            return ""
        case "betas":
            return "betas {:g} and {:g}".format(*value)
        case "gradient_clipping":
            return "adaptive clipping" if value else "no clipping"
        case "optimizer_groups":
            return "; ".join(f"{branch} lr {own['lr']:g}" for branch, own in value.items())
        case "augmentation":
            return f"augmentation {'+'.join(value) or 'none'}"
        case _:
            return f"{key.replace('_', ' ')} {value:g}"
