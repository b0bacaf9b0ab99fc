"""Parts of the JSON's `branches` block that the engine does not read: `balance` and
`sample_weights`, which concern the samples, and `train`, which concerns the towers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from common.spelling import nearest, strict_block
from engine.checks import check_bounds, check_choice, check_counts
from engine.config.reading import BranchesBlock
from models.towers.adapters.lora import LoRA

REMOVED = {
    "balance.window": "texts are packed within their global batch, which leaves next to no padding "
    "to save; remove the key",
    "sample_weights.epochs": 'it belonged to "use": "curriculum", which is no longer there; remove '
    "the key",
    "sample_weights.length": "lengths are counted in tokens; remove the key",
}
FEED_RATES = ("captions_per_image", "kept_patches", "image_size")  # of the `balance` block
DEFAULT_INTERVAL = 20  # steps


@dataclass(frozen=True)
class BalanceBlock:
    """The `balance` block inside `branches`: how global batches are packed into micro-batches, and
    how much of each modality a step takes in. Checked when made.

    "deal": by cost, sizes from `min_size` to `max_size` (None: whatever the memory of the planned
    micro-batches holds); "off": in order; "feed": packed, and feed rates within bounds [least,
    most], moved when a branch waits more than `dead_band` of a step, by a load of at most
    `max_change` times. Times are measured every `interval` steps (0: never; None:
    `measurement_interval`).
    """

    strategy: str = "deal"
    min_size: int = 1
    max_size: int | None = None
    interval: int | None = None
    captions_per_image: Any = None
    kept_patches: Any = None
    image_size: Any = None
    dead_band: float = 0.1
    max_change: float = 2.0

    def __post_init__(self):
        check_choice("balance.strategy", self.strategy, ("off", "deal", "feed"))
        check_counts("balance.min_size", self.min_size, (), least=1)
        if self.interval is not None:
            check_counts("balance.interval", self.interval, (), least=0)
        if self.max_size is not None:
            check_counts("balance.max_size", self.max_size, ())
            if self.max_size < self.min_size:
                raise ValueError(
                    f"branches.balance: min_size {self.min_size} is above max_size "
                    f"{self.max_size}; exchange them"
                )
        for name, kind, least, most in (
            ("captions_per_image", int, 1, 64),
            ("image_size", int, 8, 4096),
            ("kept_patches", float, 0.05, 1),
        ):
            check_bounds(f"balance.{name}", getattr(self, name), kind, least, most)
        for name, least, most in (("dead_band", 0.0, 1.0), ("max_change", 1.0, 16.0)):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not least < value < most
            ):
                raise ValueError(
                    f"branches.balance.{name}: got {value!r}; it takes a number between {least:g} "
                    f"and {most:g}"
                )
        moved = [name for name in FEED_RATES if getattr(self, name) is not None]
        if self.strategy == "feed" and (not moved or self.interval == 0):
            raise ValueError(
                f'branches.balance: strategy "feed" needs bounds of one of {", ".join(FEED_RATES)}, '
                'such as "captions_per_image": [1, 4], and an interval of at least 1'
            )
        if self.strategy != "feed" and moved:
            raise ValueError(
                f'branches.balance.{moved[0]}: only "strategy": "feed" moves it, this one is '
                f'"{self.strategy}"'
            )

    def measurement_interval(self, adapts: bool) -> int:
        """Steps between measurements of times. By default only where something is decided by them,
        feed rates or (`adapts`) the mix of the data sets. Without measurements the costs stay as
        planned, and equal runs are equal to the last bit."""
        if self.interval is not None:
            return self.interval
        return DEFAULT_INTERVAL if self.strategy == "feed" or adapts else 0

    @property
    def refits(self) -> bool:
        """Do costs follow measured times? Where nothing else is decided by them only if it was
        asked for."""
        return self.strategy == "feed" or bool(self.interval)


@dataclass(frozen=True)
class SampleWeightsBlock:
    """The `sample_weights` block inside `branches`: samples weighed by what there is to see and to
    read in them. Checked when made.

    `use`: "loss", each counts by its weight. `image`, `text`, `audio`: how much the complexity of
    the image, the length of the text and the seconds of the sound count.
    """

    use: str | None = None
    image: float = 0.3
    text: float = 0.7
    audio: float = 0.0

    def __post_init__(self):
        if self.use == "curriculum":
            raise ValueError(
                'branches.sample_weights.use: an order from light to heavy samples, "curriculum", '
                'is no longer there; use "loss", which weighs the samples in the loss instead'
            )
        if self.use is None:
            raise ValueError('branches.sample_weights: no "use"; it takes "loss"')
        check_choice("sample_weights.use", self.use, ("loss",))
        weights = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if isinstance(field.default, float)
        }
        for name, value in weights.items():
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not 0 <= value < float("inf")
            ):
                raise ValueError(
                    f"branches.sample_weights.{name}: got {value!r}; it takes a number of at least "
                    "0"
                )
        if not any(weights.values()):
            raise ValueError(
                f"branches.sample_weights: {', '.join(weights)} are all 0, so nothing is "
                "weighed; raise one, or remove the block"
            )


def balance_block(written: Any) -> BalanceBlock:
    """`branches.balance` as written; None: its defaults. Raises ValueError for what is wrong in
    it."""
    _refuse_removed("balance", written)
    return BalanceBlock(
        **strict_block(
            "balance", {} if written is None else written, BalanceBlock, '{"strategy": "deal"}'
        )
    )


def sample_weights_block(written: Any) -> SampleWeightsBlock | None:
    """`branches.sample_weights` as written; None: all samples count the same. Raises ValueError for
    what is wrong in it."""
    if written is None:
        return None
    _refuse_removed("sample_weights", written)
    return SampleWeightsBlock(
        **strict_block("sample_weights", written, SampleWeightsBlock, '{"use": "loss"}')
    )


def _refuse_removed(name: str, written: Any) -> None:
    for key in written if isinstance(written, Mapping) else ():
        if f"{name}.{key}" in REMOVED:
            raise ValueError(f"branches.{name}.{key}: {REMOVED[f'{name}.{key}']}")


def train_block(written: Any) -> dict[str, LoRA]:
    """`branches.train` as written: the adapters of each branch that has some; None: of none. Raises
    ValueError for what is wrong in it."""
    example = '{"image": {"lora": {"r": 16, "target": "attention"}}}'
    if not isinstance(written, Mapping | None):
        raise ValueError(f"branches.train: got {written!r}; it is an object such as {example}")
    found = {}
    for branch, how in (written or {}).items():
        where = f"branches.train.{branch}"
        if not isinstance(how, Mapping) or not how:
            raise ValueError(
                f'{where}: got {how!r}; it is an object such as {{"lora": {{"r": 16}}}}'
            )
        for key in how:
            if key != "lora":
                raise ValueError(f"unknown key '{where}.{key}'{nearest(key, ['lora'])}")
        own = strict_block(f"train.{branch}.lora", how["lora"], LoRA, '{"r": 16}')
        try:
            found[branch] = LoRA(**own)
        except ValueError as error:
            raise ValueError(f"{where}.lora: {error}") from None
    return found


READERS = {
    "balance": balance_block,
    "sample_weights": sample_weights_block,
    "train": train_block,
}


def balancing(block: BranchesBlock) -> BalanceBlock:
    return balance_block(block.balance)


def adapting(block: BranchesBlock) -> dict[str, LoRA]:
    return train_block(block.train)


def weighting(block: BranchesBlock) -> SampleWeightsBlock | None:
    return sample_weights_block(block.sample_weights)
