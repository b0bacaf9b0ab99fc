"""Feed rates: how much of each modality a step takes in, moved until no branch waits for another.
Pure Python decides.

With a and b the seconds that the fastest and the slowest branch compute in a step, the fastest one
idles for 1 − a / b of it. Where that is more than `dead_band` in three measurements in a row, one
feed rate is changed: first the branch that waits is given more to do, as long as it does not become
the slower one; failing that, the slower one is relieved. A feed rate never leaves its ladder, whose
ends are the bounds in the JSON.

Seconds are taken to follow the load: captions of an image, patches kept, pixels. What a move really
did is measured before the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

SMOOTHING = 0.5  # weight of a new measurement in the mean of all since the last move
CONFIRMATIONS = 3  # measurements in a row that must ask for a move
PATCH_STEPS = 16  # kept_patches moves in sixteenths


@dataclass(frozen=True)
class FeedRates:
    """What a step takes in. `image_size`: pixels a side (a bucket is scaled with it);
    `kept_patches`: the share that a ViT sees."""

    captions_per_image: int = 1
    kept_patches: float = 1.0
    image_size: int = 0  # 0: as --image-size says

    def load(self, branch: str) -> float:
        """In proportion to the seconds of a branch; only quotients mean something."""
        return (
            float(self.captions_per_image)
            if branch == "text"
            else self.kept_patches * max(1, self.image_size) ** 2
        )


BRANCH_OF = {"captions_per_image": "text", "kept_patches": "image", "image_size": "image"}


@dataclass(frozen=True)
class Ladders:
    """The values that each feed rate may take, ascending: its bounds are the first and the last.
    One with a single value does not change."""

    captions_per_image: tuple[int, ...] = (1,)
    kept_patches: tuple[float, ...] = (1.0,)
    image_size: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        for name, ladder in self.items():
            if not ladder or list(ladder) != sorted(set(ladder)):
                raise ValueError(f"{name} {ladder}: ascending values, each once, are needed")

    def items(self) -> Iterator[tuple[str, tuple]]:
        return ((name, getattr(self, name)) for name in BRANCH_OF)

    def start(self) -> FeedRates:
        """One caption and whole images, or what the bounds have nearest to it."""
        return FeedRates(self.captions_per_image[0], self.kept_patches[-1], self.image_size[-1])


@dataclass(frozen=True)
class LoadRules:
    """`dead_band`: part of a step that a branch may wait without a move; `max_change`: most that a
    move changes the load of a branch."""

    dead_band: float = 0.1
    max_change: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.dead_band < 1 or not self.max_change > 1:
            raise ValueError(f"{self}: 0 < dead_band < 1 and max_change > 1 are needed")


@dataclass(frozen=True)
class Observations:
    """What was measured since the last move. `busy_s`: smoothed, by branch; `from_step`:
    measurements of steps before it are of no use."""

    busy_s: Mapping[str, float] = field(default_factory=dict)
    asking: int = 0  # measurements in a row that asked for a move
    from_step: int = 0
    at_bound: bool = False  # it was said that no move helps


def typical(seconds: Sequence[float]) -> float:
    """The mean without the lowest and the highest tenth: steps in which something else happened do
    not count."""
    kept = sorted(seconds)[len(seconds) // 10 : len(seconds) - len(seconds) // 10]
    return sum(kept) / len(kept)


def patch_ladder(least: float, most: float = 1.0) -> tuple[float, ...]:
    inside = (n / PATCH_STEPS for n in range(1, PATCH_STEPS + 1) if least < n / PATCH_STEPS < most)
    return tuple(sorted({least, *inside, most}))


def size_ladder(least: int, most: int, multiple: int) -> tuple[int, ...]:
    """`most` as it is; below it multiples of what the tower asks for."""
    return (*(size for size in range(-(-least // multiple) * multiple, most, multiple)), most)


def control_load(
    observations: Observations,
    feed_rates: FeedRates,
    ladders: Ladders,
    rules: LoadRules,
    busy_s: Mapping[str, float],
    first_step: int,
) -> tuple[Observations, FeedRates, str | None]:
    """The feed rates after the measurement `busy_s`, seconds by branch that a step from
    `first_step` on took; a reason where there is something to say.

    The caller that applies new feed rates sets `Observations.from_step` to the step from which
    they hold.
    """
    if first_step < observations.from_step:
        return observations, feed_rates, None
    smoothed = {
        b: busy_s[b]
        if b not in observations.busy_s
        else observations.busy_s[b] + SMOOTHING * (busy_s[b] - observations.busy_s[b])
        for b in busy_s
    }
    observations = replace(observations, busy_s=smoothed)
    if _waiting(smoothed) <= rules.dead_band:
        return replace(observations, asking=0, at_bound=False), feed_rates, None
    observations = replace(observations, asking=observations.asking + 1)
    if observations.asking < CONFIRMATIONS:
        return observations, feed_rates, None
    busy, *_, idle = sorted(smoothed, key=smoothed.__getitem__, reverse=True)
    seen = f"the {idle} branch waits {_waiting(smoothed):.0%} of a step ({idle} {smoothed[idle]:.3g} s, {busy} {smoothed[busy]:.3g} s)"
    moved = _move(feed_rates, ladders, rules, busy_s=smoothed, busy=busy, idle=idle)
    if moved is not None:
        name, value = moved
        reason = f"{name} {_said(getattr(feed_rates, name))} -> {_said(value)}: {seen}"
        changed: dict[str, Any] = {name: value}
        return Observations(), replace(feed_rates, **changed), reason
    bound = (
        None
        if observations.at_bound
        else f"bound reached: {seen}, and no feed rate improves it within "
        f"{_ranges(feed_rates, ladders)}"
    )
    return replace(observations, at_bound=True), feed_rates, bound


def _waiting(busy_s: Mapping[str, float]) -> float:
    """Part of a step that the faster branch waits for the slower one."""
    return 1 - min(busy_s.values()) / max(busy_s.values())


def _move(
    feed_rates: FeedRates,
    ladders: Ladders,
    rules: LoadRules,
    busy_s: Mapping[str, float],
    busy: str,
    idle: str,
) -> tuple[str, int | float] | None:
    """(feed rate, value) of the best move: more for who waits, else less for whom all wait for.
    None: no move makes a difference worth it."""
    worth = _waiting(busy_s) - rules.dead_band / 2
    for branch, more in ((idle, True), (busy, False)):
        best = None
        for name, ladder in ladders.items():
            for value in ladder if BRANCH_OF[name] == branch else ():
                change = replace(feed_rates, **{name: value}).load(branch) / feed_rates.load(branch)
                if (
                    change == 1
                    or (change > 1) != more
                    or not 1 / rules.max_change <= change <= rules.max_change
                ):
                    continue
                after = {**busy_s, branch: busy_s[branch] * change}
                overshoots = after[idle] > after[busy] and _waiting(after) > rules.dead_band
                if not overshoots and _waiting(after) < (worth if best is None else best[0]):
                    best = _waiting(after), name, value
        if best is not None:
            return best[1:]
    return None


def _ranges(feed_rates: FeedRates, ladders: Ladders) -> str:
    return ", ".join(
        f"{name} {_said(ladder[0])} .. {_said(ladder[-1])} (now {_said(getattr(feed_rates, name))})"
        for name, ladder in ladders.items()
        if len(ladder) > 1
    )


def _said(value: int | float) -> str:
    return f"{value:g}"


def kept_number(num_patches: int, kept_patches: float) -> int:
    """How many of an image's patches a share comes to: at least one."""
    return max(1, round(kept_patches * num_patches))


def scaled_size(
    size: tuple[int, int], image_size: int, full_size: int, multiple: int
) -> tuple[int, int]:
    """(H, W) of a bucket made for `full_size`, at `image_size`: both sides scaled alike, to
    multiples of what the tower asks for."""
    height, width = (
        max(multiple, round(side * image_size / full_size / multiple) * multiple) for side in size
    )
    return height, width
