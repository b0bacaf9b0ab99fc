"""Load control: how much of each modality a step takes in, moved until no branch waits for another.
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

from data.stored.kinds import is_text

SMOOTHING = 0.5  # weight of a new measurement in the mean of all since the last move
CONFIRMATIONS = 3  # measurements in a row that must ask for a move
PATCH_STEPS = 16  # kept_patches moves in sixteenths


@dataclass(frozen=True)
class FeedRates:
    """What a step takes in. `image_size`: pixels a side (a bucket is scaled with it);
    `kept_patches`: the share that a ViT sees; `views_per_image`: does not change in a run."""

    captions_per_image: int = 1
    kept_patches: float = 1.0
    image_size: int = 0  # 0: as --image-size says
    views_per_image: int = 1

    def rows(self, branch: str) -> int:
        """That a branch has of each sample in training."""
        if is_text(branch):
            return self.captions_per_image
        return self.views_per_image if branch == BRANCH_OF["image_size"] else 1

    def load(self, branch: str) -> float:
        """In proportion to the seconds of a branch; only quotients mean something."""
        if branch == BRANCH_OF["captions_per_image"]:
            return float(self.captions_per_image)
        return self.kept_patches * max(1, self.image_size) ** 2


BRANCH_OF = {"captions_per_image": "text", "kept_patches": "image", "image_size": "image"}


@dataclass(frozen=True)
class Observations:
    """What was measured since the last move. `busy_s`: smoothed, by branch; `from_step`:
    measurements of steps before it are of no use."""

    busy_s: Mapping[str, float] = field(default_factory=dict)
    asking: int = 0  # measurements in a row that asked for a move
    from_step: int = 0
    at_bound: bool = False  # it was said that no move helps


@dataclass(frozen=True)
class LoadControl:
    """The ladders of the feed rates: the values that each may take, ascending, so that its bounds
    are the first and the last; one with a single value does not change.

    `dead_band`: part of a step that a branch may wait without a move; `max_change`: most that a
    move changes the load of a branch.
    """

    captions_per_image: tuple[int, ...] = (1,)
    kept_patches: tuple[float, ...] = (1.0,)
    image_size: tuple[int, ...] = (0,)
    dead_band: float = 0.1
    max_change: float = 2.0

    def ladders(self) -> Iterator[tuple[str, tuple]]:
        return ((name, getattr(self, name)) for name in BRANCH_OF)

    def movable(self, feed_rates: FeedRates) -> dict[str, float]:
        """The feed rates that may change, by name."""
        return {name: getattr(feed_rates, name) for name, ladder in self.ladders() if ladder[1:]}

    def start(self) -> FeedRates:
        """One caption and whole images, or what the bounds have nearest to it."""
        return FeedRates(self.captions_per_image[0], self.kept_patches[-1], self.image_size[-1])

    def after(
        self,
        observations: Observations,
        feed_rates: FeedRates,
        busy_s: Mapping[str, float],
        first_step: int,
    ) -> tuple[Observations, FeedRates, str | None]:
        """The feed rates after the measurement `busy_s`, seconds by branch of the steps from
        `first_step` on; a reason where there is something to say.

        The caller that applies new feed rates sets `Observations.from_step` to the step from which
        they hold.
        """
        if first_step < observations.from_step:
            return observations, feed_rates, None
        before = {**busy_s, **observations.busy_s}
        smoothed = {b: before[b] + SMOOTHING * (new - before[b]) for b, new in busy_s.items()}
        observations = replace(observations, busy_s=smoothed)
        if _waiting(smoothed) <= self.dead_band:
            return replace(observations, asking=0, at_bound=False), feed_rates, None
        observations = replace(observations, asking=observations.asking + 1)
        if observations.asking < CONFIRMATIONS:
            return observations, feed_rates, None
        moved = self._move(feed_rates, smoothed)
        busy, *_, idle = sorted(smoothed, key=smoothed.__getitem__, reverse=True)
        seen = (
            f"the {idle} branch waits {_waiting(smoothed):.0%} of a step "
            f"({idle} {smoothed[idle]:.3g} s, {busy} {smoothed[busy]:.3g} s)"
        )
        if moved is not None:
            name = next(n for n in BRANCH_OF if getattr(moved, n) != getattr(feed_rates, n))
            old, new = getattr(feed_rates, name), getattr(moved, name)
            return Observations(), moved, f"{name} {old:g} -> {new:g}: {seen}"
        reason = None
        if not observations.at_bound:
            ranges = ", ".join(
                f"{name} {ladder[0]:g} .. {ladder[-1]:g} (now {getattr(feed_rates, name):g})"
                for name, ladder in self.ladders()
                if ladder[1:]
            )
            reason = f"bound reached: {seen}, and no feed rate improves it within {ranges}"
        return replace(observations, at_bound=True), feed_rates, reason

    def _move(self, feed_rates: FeedRates, busy_s: Mapping[str, float]) -> FeedRates | None:
        """The best move: more for who waits, else less for whom all wait for. None: no move makes a
        difference worth it."""
        busy, *_, idle = sorted(busy_s, key=busy_s.__getitem__, reverse=True)
        for branch, more in ((idle, True), (busy, False)):
            best, least = None, _waiting(busy_s) - self.dead_band / 2
            names = [name for name, of in BRANCH_OF.items() if of == branch]
            for name, value in ((name, value) for name in names for value in getattr(self, name)):
                moved = replace(feed_rates, **{name: value})
                change = moved.load(branch) / feed_rates.load(branch)
                if (change > 1) != more or max(change, 1 / change) > self.max_change:
                    continue
                after = {**busy_s, branch: busy_s[branch] * change}
                overshoots = after[idle] > after[busy] and _waiting(after) > self.dead_band
                if not overshoots and _waiting(after) < least:
                    best, least = moved, _waiting(after)
            if best is not None:
                return best
        return None


def _waiting(busy_s: Mapping[str, float]) -> float:
    """Part of a step that the faster branch waits for the slower one."""
    return 1 - min(busy_s.values()) / max(busy_s.values())


def typical(seconds: Sequence[float]) -> float:
    """The mean without the lowest and the highest tenth: steps in which something else happened do
    not count."""
    kept = sorted(seconds)[len(seconds) // 10 : len(seconds) - len(seconds) // 10]
    return sum(kept) / len(kept)


# -- the values of a feed rate


def patch_ladder(least: float, most: float = 1.0) -> tuple[float, ...]:
    inside = (n / PATCH_STEPS for n in range(1, PATCH_STEPS + 1) if least < n / PATCH_STEPS < most)
    return tuple(sorted({least, *inside, most}))


def size_ladder(least: int, most: int, multiple: int) -> tuple[int, ...]:
    """`most` as it is; below it multiples of what the tower asks for."""
    return (*range(-(-least // multiple) * multiple, most, multiple), most)


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
