"""What a micro-batch costs a branch: four numbers, fitted to measured seconds.

n: texts of the micro-batch, L: tokens that each of them is padded to.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

HUBER = 1.5  # residuals beyond this many standard deviations pull no harder than at it
MAD_TO_SIGMA = 1.4826  # standard deviation ÷ median absolute deviation, of a normal distribution


@dataclass(frozen=True)
class BranchCost:
    """Seconds = fixed_s + n · (per_sample_s + per_token_s · L + per_token_squared_s · L²), of the
    branch's slowest stage.

    `version` counts the refits, so that a record can say which costs a step was packed by. All
    replicas must have the very same numbers.
    """

    fixed_s: float
    per_sample_s: float
    per_token_s: float = 0.0
    per_token_squared_s: float = 0.0
    version: int = 0

    def __post_init__(self) -> None:
        given = self.coefficients
        if not all(np.isfinite(c) and c >= 0 for c in given) or not any(given):
            raise ValueError(
                f"branch cost {given}: finite numbers >= 0 are needed, and not all of them 0"
            )

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        return self.fixed_s, self.per_sample_s, self.per_token_s, self.per_token_squared_s

    def of_sample(self, lengths: np.ndarray | int) -> np.ndarray:
        """Seconds that a sample adds to a micro-batch padded to its length."""
        lengths = np.asarray(lengths, dtype=np.float64)
        return self.per_sample_s + lengths * (self.per_token_s + lengths * self.per_token_squared_s)

    def at(self, num_samples: np.ndarray | int, lengths: np.ndarray | int) -> np.ndarray:
        """Seconds of a micro-batch of `num_samples` padded to `lengths`."""
        return self.fixed_s + num_samples * self.of_sample(lengths)


def fit_branch_cost(
    num_samples: Sequence[int] | np.ndarray,
    lengths: Sequence[int] | np.ndarray,
    seconds: Sequence[float] | np.ndarray,
) -> BranchCost:
    """The cost that fits measured micro-batches, all values > 0: coefficients >= 0, errors relative
    to what is predicted, outliers held off.

    Huber's loss (Huber 1964) by iteratively reweighted least squares. Where the points cannot tell
    coefficients apart (one length only, one size only), as few as explain them are above 0.
    """
    from scipy.optimize import nnls  # half a second, which only a run that measures waits for

    n, length, measured = (np.asarray(v, np.float64) for v in (num_samples, lengths, seconds))
    # relative to what was measured: aim at 1 everywhere
    columns = np.stack([n, n * length, n * length**2, np.ones_like(n)], axis=1) / measured[:, None]
    scale = columns.max(axis=0)
    weights = np.ones_like(n)
    for _ in range(30):
        rows, aim = columns / scale * np.sqrt(weights)[:, None], np.sqrt(weights)
        coefficients, _ = nnls(rows, aim)
        residuals = np.abs(columns / scale @ coefficients - 1)
        sigma = max(MAD_TO_SIGMA * float(np.median(residuals)), 1e-9)
        weights = np.minimum(1.0, HUBER * sigma / np.maximum(residuals, 1e-12))
    per_sample, per_token, per_token_squared, fixed = (coefficients / scale).tolist()
    return BranchCost(fixed, per_sample, per_token, per_token_squared)


def smoothed(old: BranchCost, new: BranchCost, weight: float) -> BranchCost:
    """`old` moved towards `new` by `weight`, above 0 and at most 1: exponential smoothing of
    everything predicted, since that is linear in the coefficients."""
    pairs = zip(old.coefficients, new.coefficients)
    fixed, per_sample, per_token, squared = ((1 - weight) * a + weight * b for a, b in pairs)
    return BranchCost(fixed, per_sample, per_token, squared, old.version + 1)
