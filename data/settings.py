"""What the balance of a run holds from which step on: costs to deal by, numbers of micro-batches, feed rates. The same on every rank.

Measured times differ from rank to rank and from run to run, so what follows from them is decided once, by the first rank, for a step that no
loader has begun with yet. All else is a pure function of these settings: a run that goes on with them deals as one that never stopped.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from data.branch_cost import BranchCost
from data.feed import Knobs


@dataclass(frozen=True)
class Setting:
    """Holds for the steps from `from_step` on, until the next. `costs` by branch: of those that are dealt by cost."""

    from_step: int
    num_micro_batches: Mapping[str, int]  # by branch, of each replica
    costs: Mapping[str, BranchCost] = field(default_factory=dict)
    knobs: Knobs = field(default_factory=Knobs)
    reason: str = "as planned"

    def record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Setting:
        costs = {branch: BranchCost(**cost) for branch, cost in record["costs"].items()}
        return cls(**{**record, "costs": costs, "knobs": Knobs(**record["knobs"])})


class Settings:
    """All settings of a run so far, those to come included."""

    def __init__(self, settings: Iterable[Setting]) -> None:
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
        """Errors: ValueError for one that begins no later than the newest; the first begins with step 0."""
        if setting.from_step != 0 if not self._all else setting.from_step <= self.newest.from_step:
            raise ValueError(f"a setting from step {setting.from_step} on cannot follow those from {self._starts() or 'nothing'} on")
        self._all.append(setting)

    def records(self) -> list[dict[str, Any]]:
        return [setting.record() for setting in self._all]

    @classmethod
    def from_records(cls, records: Sequence[Mapping[str, Any]]) -> Settings:
        return cls(map(Setting.from_record, records))

    def _starts(self) -> list[int]:
        return [setting.from_step for setting in self._all]
