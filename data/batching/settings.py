"""What holds from which step of a run on: numbers of micro-batches, costs to pack by, feed rates.
The same on every rank.

Measured times differ from rank to rank and from run to run, so what follows from them is decided
once, by the first rank, for a step that no loader has begun with yet. All else is a pure function
of these settings: a run that goes on with them packs as one that never stopped.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from data.batching.branch_cost import BranchCost
from data.batching.load_control import FeedRates


@dataclass(frozen=True)
class Setting:
    """Holds for the steps from `from_step` on, until the next. `costs`: of the branches that are
    packed by cost."""

    from_step: int
    num_micro_batches: Mapping[str, int]  # by branch, of each replica
    costs: Mapping[str, BranchCost] = field(default_factory=dict)
    feed_rates: FeedRates = field(default_factory=FeedRates)
    reason: str = "as planned"

    def record(self) -> dict[str, Any]:
        """For a checkpoint and balance.jsonl, where `feed_rates` has the key `knobs`."""
        values = asdict(self)
        return values | {"knobs": values.pop("feed_rates")}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Setting:
        values = dict(record)
        costs = {branch: BranchCost(**cost) for branch, cost in values.pop("costs").items()}
        feed_rates = FeedRates(**values.pop("knobs"))
        return cls(**values, costs=costs, feed_rates=feed_rates)


class Settings:
    """All settings of a run so far, those to come included."""

    def __init__(self, settings: Iterable[Setting]) -> None:
        self._all: list[Setting] = []
        for setting in settings:
            self.add(setting)

    def at(self, step: int) -> Setting:
        """The setting that holds for step 0, 1, ..."""
        starts = [setting.from_step for setting in self._all]
        return self._all[bisect_right(starts, step) - 1]

    @property
    def newest(self) -> Setting:
        return self._all[-1]

    def add(self, setting: Setting) -> None:
        """Errors: ValueError for a setting that begins no later than the newest; the first begins
        with step 0."""
        if setting.from_step <= self.newest.from_step if self._all else setting.from_step != 0:
            starts = [each.from_step for each in self._all]
            raise ValueError(
                f"a setting from step {setting.from_step} on cannot follow those from "
                f"{starts or 'nothing'} on"
            )
        self._all.append(setting)

    def records(self) -> list[dict[str, Any]]:
        return [setting.record() for setting in self._all]

    @classmethod
    def from_records(cls, records: Sequence[Mapping[str, Any]]) -> Settings:
        return cls(map(Setting.from_record, records))
