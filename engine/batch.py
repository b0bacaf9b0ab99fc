"""How the global batch is dealt to the branches. Plain Python.

train_batch_size = micro_batch_size × num_micro_batches × replicas, per branch
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class BranchBatch:
    """How the global batch is dealt to one branch: every replica runs `num_micro_batches` of
    `micro_batch_size` samples.

    Under a schedule that recomputes the first `num_kept` of them keep their activations.
    `num_samples`: of a global batch that does not divide evenly. The shares of the replicas then
    differ by at most one sample, and so do the micro-batches of each; `micro_batch_size` is that of
    the largest.
    """

    replicas: int
    micro_batch_size: int
    num_micro_batches: int
    num_kept: int = 0
    num_samples: int | None = None

    @property
    def places(self) -> int:
        """Samples of a global batch if all micro-batches were as large as the largest."""
        return self.replicas * self.micro_batch_size * self.num_micro_batches

    @property
    def global_batch_size(self) -> int:
        return self.places if self.num_samples is None else self.num_samples

    @property
    def is_even(self) -> bool:
        """Are all micro-batches equally large?"""
        return self.num_samples is None

    def describe(self) -> str:
        """`32×5` (samples × number), or `≤33×5` where micro-batches are not equally large."""
        return f"{'' if self.is_even else '≤'}{self.micro_batch_size}×{self.num_micro_batches}"

    def record(self) -> dict[str, int]:
        """As config.json and checkpoints keep it."""
        return {name: value for name, value in asdict(self).items() if value is not None}


Batches = Mapping[str, BranchBatch]  # by branch


def describe_batches(batches: Batches) -> str:
    """Such as `image 32×5, text 480×1`, or one of them where the branches agree."""
    return _by_branch({branch: batch.describe() for branch, batch in batches.items()})


def describe_schedule(schedule: str, batches: Batches) -> str:
    """Such as `replay keeping image 3, text 2`: of how many micro-batches the activations stay."""
    kept = {branch: batch.num_kept for branch, batch in batches.items()}
    return f"{schedule} keeping {_by_branch(kept)}" if any(kept.values()) else schedule


def _by_branch(values: Mapping[str, Any]) -> str:
    if len(set(values.values())) == 1:
        return str(next(iter(values.values())))
    return ", ".join(f"{branch} {value}" for branch, value in values.items())
