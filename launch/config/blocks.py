"""Parts of the JSON's `branches` block that the engine does not read: `balance` and
`sample_weights`, which concern the samples, and `train`, which concerns the towers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from common.blocks import Count, NotNegative, block, one_of, read_block
from common.spelling import nearest
from data.stored.kinds import is_text
from engine.config.reading import BranchesBlock
from models.towers.adapters.lora import LoRA

REMOVED = {
    "balance.window": "texts are packed within their global batch, which leaves next to no padding "
    "to save; remove the key",
    "sample_weights.use=curriculum": "an order from light to heavy samples is no longer there; use "
    '"loss", which weighs the samples in the loss instead',
    "sample_weights.epochs": 'it belonged to "use": "curriculum", which is no longer there; remove '
    "the key",
    "sample_weights.length": "lengths are counted in tokens; remove the key",
}
OF_SAMPLES = ("image", "text", "audio")  # what the `sample_weights` block weighs them by
FEED_RATES = ("captions_per_image", "kept_patches", "image_size")  # of the `balance` block
DEFAULT_INTERVAL = 20  # steps


def bounds(kind: type, least: float, most: float) -> BeforeValidator:
    """For a value that is [low, high] with least <= low <= high <= most; `kind` int: whole
    numbers."""
    kinds = (int,) if kind is int else (int, float)

    def check(value: Any) -> Any:
        pair = (
            isinstance(value, (list, tuple))
            and len(value) == 2
            and all(isinstance(v, kinds) and not isinstance(v, bool) for v in value)
        )
        if value is not None and not (pair and least <= value[0] <= value[1] <= most):
            words = "whole numbers" if kind is int else "numbers"
            raise ValueError(
                f"got {value!r}; it takes [least, most], two {words} from {least:g} to {most:g}"
            )
        return value

    return BeforeValidator(check)


@block
class BalanceBlock:
    """The `balance` block inside `branches`: how global batches are packed into micro-batches, and
    how much of each modality a step takes in.

    "deal": by cost, sizes from `min_size` to `max_size` (None: whatever the memory of the planned
    micro-batches holds); "off": in order; "feed": packed, and feed rates within bounds [least,
    most], moved when a branch waits more than `dead_band` of a step, by a load of at most
    `max_change` times. Times are measured every `interval` steps (0: never; None:
    `measurement_interval`). `ranks`: "measured", shares of replicas follow their speeds.
    """

    strategy: Annotated[str, one_of("off", "deal", "feed")] = "deal"
    min_size: Count = 1
    max_size: Annotated[int | None, Field(ge=1, description="a whole number of at least 1")] = None
    interval: Annotated[int | None, Field(ge=0, description="a whole number of at least 0")] = None
    ranks: Annotated[str, one_of("equal", "measured")] = "equal"
    captions_per_image: Annotated[Any, bounds(int, 1, 64)] = None
    kept_patches: Annotated[Any, bounds(float, 0.05, 1)] = None
    image_size: Annotated[Any, bounds(int, 8, 4096)] = None
    dead_band: Annotated[float, Field(gt=0, lt=1, description="a number between 0 and 1")] = 0.1
    max_change: Annotated[float, Field(gt=1, lt=16, description="a number between 1 and 16")] = 2.0

    def __post_init__(self) -> None:
        if self.max_size is not None and self.max_size < self.min_size:
            raise ValueError(
                f"min_size {self.min_size} is above max_size {self.max_size}; exchange them"
            )
        moved = [name for name in FEED_RATES if getattr(self, name) is not None]
        if self.ranks == "measured" and self.interval == 0:
            raise ValueError('"ranks": "measured" needs an interval of at least 1')
        if self.strategy == "feed" and (not moved or self.interval == 0):
            raise ValueError(
                f'strategy "feed" needs bounds of one of {", ".join(FEED_RATES)}, '
                'such as "captions_per_image": [1, 4], and an interval of at least 1'
            )
        if self.strategy != "feed" and moved:
            raise ValueError(
                f'{moved[0]}: only "strategy": "feed" moves it, this one is "{self.strategy}"'
            )

    def measurement_interval(self, adapts: bool) -> int:
        """Steps between measurements of times. By default only where something is decided by them,
        feed rates or (`adapts`) the mix of the data sets. Without measurements the costs stay as
        planned, and equal runs are equal to the last bit."""
        if self.interval is not None:
            return self.interval
        decides = self.strategy == "feed" or self.ranks == "measured" or adapts
        return DEFAULT_INTERVAL if decides else 0

    @property
    def refits(self) -> bool:
        """Do costs follow measured times? Where nothing else is decided by them only if it was
        asked for."""
        return self.strategy == "feed" or bool(self.interval)


@block
class SampleWeightsBlock:
    """The `sample_weights` block inside `branches`: samples weighed by what there is to see and to
    read in them.

    `use`: "loss", each counts by its weight. `image`, `text`, `audio`: how much the complexity of
    the image, the length of the text and the seconds of the sound count.
    """

    use: Annotated[str, one_of("loss"), Field(description='"loss"')]
    image: NotNegative = 0.3
    text: NotNegative = 0.7
    audio: NotNegative = 0.0

    def __post_init__(self) -> None:
        if not (self.image or self.text or self.audio):
            raise ValueError(
                "image, text, audio are all 0, so nothing is weighed; raise one, or remove the block"
            )


def balance_block(written: Any) -> BalanceBlock:
    """`branches.balance` as written; None: its defaults. Raises ValueError for what is wrong in
    it."""
    _refuse_removed("balance", written)
    written = {} if written is None else written
    return read_block(BalanceBlock, written, "branches.balance", '{"strategy": "deal"}')


def sample_weights_block(written: Any) -> SampleWeightsBlock | None:
    """`branches.sample_weights` as written; None: all samples count the same. Raises ValueError for
    what is wrong in it."""
    if written is None:
        return None
    _refuse_removed("sample_weights", written)
    return read_block(SampleWeightsBlock, written, "branches.sample_weights", '{"use": "loss"}')


def refuse_missing_weights(block: BranchesBlock, branches: Sequence[str]) -> None:
    """Raise ValueError where `sample_weights` weighs what this run has no branch for: the key would
    do nothing."""
    if (weights := weighting(block)) is None:
        return
    there = f"this run has the branches {', '.join(branches)}"
    # one key for texts, whatever their modality is called
    weighed = {"text" if is_text(branch) else branch for branch in branches}
    for key in OF_SAMPLES:
        if key not in weighed and block.sample_weights.get(key):
            raise ValueError(
                f"branches.sample_weights.{key}: it weighs samples by their {key}, and {there}; remove "
                "the key"
            )
    if not any(getattr(weights, key) for key in OF_SAMPLES if key in weighed):
        raise ValueError(
            f"branches.sample_weights: {there}, of which it weighs none; raise one of "
            f"{', '.join(OF_SAMPLES)}, or remove the block"
        )


def _refuse_removed(name: str, written: Any) -> None:
    for key, value in written.items() if isinstance(written, Mapping) else ():
        for removed in (f"{name}.{key}", f"{name}.{key}={value}"):
            if removed in REMOVED:
                raise ValueError(f"branches.{name}.{key}: {REMOVED[removed]}")


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
        found[branch] = read_block(LoRA, how["lora"], f"{where}.lora", '{"r": 16}')
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
