"""What the balance of a run holds from which step on: costs to deal by, numbers of micro-batches,
feed rates, and how data sets are mixed. The same on every rank.

Measured times differ from rank to rank and from run to run, so what follows from them is decided
once, by the first rank, for a step that no loader has begun with yet. All else is a pure function
of these settings: a run that goes on with them deals as one that never stopped.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from data.batching.branch_cost import BranchCost
from data.batching.feed import FeedRates
from data.batching.mixture import Parts

Mixes = tuple[
    tuple[int, Parts], ...
]  # (epoch, how often samples come from it on), ascending; before the first: as asked for


@dataclass(frozen=True)
class Setting:
    """Holds for the steps from `from_step` on, until the next. `costs` by branch: of those that are
    dealt by cost."""

    from_step: int
    num_micro_batches: Mapping[str, int]  # by branch, of each replica
    costs: Mapping[str, BranchCost] = field(default_factory=dict)
    feed_rates: FeedRates = field(default_factory=FeedRates)
    reason: str = "as planned"

    def record(self) -> dict[str, Any]:
        """For a checkpoint and balance.jsonl, where `feed_rates` keeps its earlier key, knobs."""
        return {
            "knobs" if name == "feed_rates" else name: value for name, value in asdict(self).items()
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Setting:
        costs = {branch: BranchCost(**cost) for branch, cost in record["costs"].items()}
        values = {**record, "costs": costs, "feed_rates": FeedRates(**record["knobs"])}
        del values["knobs"]
        return cls(**values)


class Settings:
    """All settings of a run so far, those to come included; beside them its mixes, which follow
    each other by epochs."""

    def __init__(self, settings: Iterable[Setting], mixes: Mixes = ()) -> None:
        self.mixes = mixes
        self._all: list[Setting] = []
        for setting in settings:
            self.add(setting)

    def at(self, step: int) -> Setting:
        """The one that holds for step 0, 1, ..."""
        return self._all[bisect_right(self._starts(), step) - 1]

    @property
    def newest(self) -> Setting:
        return self._all[-1]

    def add(self, setting: Setting) -> None:
        """Errors: ValueError for one that begins no later than the newest; the first begins with
        step 0."""
        if setting.from_step != 0 if not self._all else setting.from_step <= self.newest.from_step:
            raise ValueError(
                f"a setting from step {setting.from_step} on cannot follow those from "
                f"{self._starts() or 'nothing'} on"
            )
        self._all.append(setting)

    def add_mix(self, epoch: int, parts: Parts) -> None:
        """Errors: ValueError for one that begins no later than the newest, or with a run: that is
        mixed as asked for."""
        newest = self.mixes[-1][0] if self.mixes else 0
        if epoch <= newest:
            raise ValueError(
                f"a mix from epoch {epoch} on cannot follow that from epoch {newest} on"
            )
        self.mixes = (*self.mixes, (epoch, parts))

    def records(self) -> list[dict[str, Any]]:
        return [setting.record() for setting in self._all]

    @classmethod
    def from_records(
        cls, records: Sequence[Mapping[str, Any]], mixes: Iterable[Sequence[Any]] = ()
    ) -> Settings:
        """`mixes` as JSON gives them back."""
        return cls(
            map(Setting.from_record, records),
            tuple((epoch, tuple(map(tuple, parts))) for epoch, parts in mixes),
        )

    def _starts(self) -> list[int]:
        return [setting.from_step for setting in self._all]
