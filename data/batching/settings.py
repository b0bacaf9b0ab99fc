"""What holds from which step of a run on: numbers of micro-batches, costs to pack by, feed rates.
The same on every rank.

Measured times differ from rank to rank and from run to run, so what follows from them is decided
once, by the first rank, for a step that no loader has begun with yet. All else is a pure function
of these settings: a run that goes on with them packs as one that never stopped.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from data.batching.branch_cost import BranchCost
from data.batching.load_control import FeedRates


@dataclass(frozen=True)
class Setting:
    """Holds for the steps from `from_step` on, until the next. `text_cost`: by which texts are
    packed; None: they are not. `shares`: by branch, of each replica, the part of a global batch
    that it gets; of a branch that is not there all replicas get equally much."""

    from_step: int
    num_micro_batches: Mapping[str, int]  # by branch, of each replica
    text_cost: BranchCost | None = None
    feed_rates: FeedRates = field(default_factory=FeedRates)
    reason: str = "as planned"
    shares: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """For a checkpoint and balance.jsonl, by the names that these have."""
        values = asdict(self)
        cost, feed_rates = values.pop("text_cost"), values.pop("feed_rates")
        return values | {"costs": {"text": cost} if cost else {}, "knobs": feed_rates}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Setting:
        values = dict(record)
        cost, feed_rates = values.pop("costs").get("text"), FeedRates(**values.pop("knobs"))
        shares = {branch: tuple(own) for branch, own in values.pop("shares", {}).items()}
        return cls(
            **values,
            text_cost=cost and BranchCost(**cost),
            feed_rates=feed_rates,
            shares=shares,
        )


def setting_at(settings: Sequence[Setting], step: int) -> Setting:
    """The one of a run's settings, in their order and the first from step 0 on, that holds for a
    step."""
    return settings[bisect_right(settings, step, key=lambda setting: setting.from_step) - 1]
