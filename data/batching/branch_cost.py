"""What a micro-batch costs a branch: four numbers, fitted to measured seconds. numpy only.

n: texts of the micro-batch, L: tokens that each of them is padded to.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

HUBER = 1.5  # residuals beyond this many standard deviations pull no harder than at it
MAD_TO_SIGMA = 1.4826  # standard deviation ÷ median absolute deviation, of a normal distribution
AS_GOOD = 1 + 1e-9  # a fit must be better than this to deserve another coefficient


@dataclass(frozen=True)
class BranchCost:
    """Seconds = fixed_s + n · (per_sample_s + per_token_s · L + per_token_squared_s · L²), of the
    branch's slowest stage.

    `version` counts the refits, so that a record can say which costs a step was dealt by. All
    replicas must have the very same numbers.
    """

    fixed_s: float
    per_sample_s: float
    per_token_s: float = 0.0
    per_token_squared_s: float = 0.0
    version: int = 0

    def __post_init__(self) -> None:
        if not all(np.isfinite(c) and c >= 0 for c in self.coefficients) or not any(
            self.coefficients
        ):
            raise ValueError(
                f"branch cost {self.coefficients}: finite numbers >= 0 are needed, and not all of "
                "them 0"
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
    version: int = 0,
) -> BranchCost:
    """The cost that measured micro-batches speak for: coefficients >= 0, errors relative to what is
    predicted, outliers held off.

    Huber's loss (Huber 1964) by iteratively reweighted least squares. What the points cannot tell
    apart (one length only, one size only) is given to as few coefficients as explain them, to those
    of the samples before `fixed_s`. Errors: ValueError for no points, or points that are not
    positive.
    """
    n, length, measured = (
        np.asarray(values, dtype=np.float64) for values in (num_samples, lengths, seconds)
    )
    if not (n.ndim == 1 and 0 < n.size == length.size == measured.size) or not all(
        (v > 0).all() for v in (n, length, measured)
    ):
        raise ValueError(
            f"{n.size} sizes, {length.size} lengths, {measured.size} seconds: as many of each as "
            "there were micro-batches, all > 0, are needed"
        )
    columns = (
        np.stack([n, n * length, n * length**2, np.ones_like(n)], axis=1) / measured[:, None]
    )  # relative: aim at 1 everywhere
    scale = columns.max(axis=0)
    weights = np.ones_like(n)
    for _ in range(30):
        coefficients = _non_negative_least_squares(columns / scale, weights)
        residuals = np.abs(columns / scale @ coefficients - 1)
        sigma = max(MAD_TO_SIGMA * float(np.median(residuals)), 1e-9)
        weights = np.minimum(1.0, HUBER * sigma / np.maximum(residuals, 1e-12))
    per_sample, per_token, per_token_squared, fixed = (coefficients / scale).tolist()
    return BranchCost(fixed, per_sample, per_token, per_token_squared, version)


def smoothed(old: BranchCost, new: BranchCost, weight: float = 0.3) -> BranchCost:
    """`old` moved towards `new` by `weight`: exponential smoothing of everything predicted, since
    that is linear in the coefficients."""
    if not 0 < weight <= 1:
        raise ValueError(
            f"weight {weight}: more than 0 (nothing would be learned) and at most 1 is needed"
        )
    fixed, per_sample, per_token, per_token_squared = (
        float((1 - weight) * a + weight * b) for a, b in zip(old.coefficients, new.coefficients)
    )
    return BranchCost(fixed, per_sample, per_token, per_token_squared, old.version + 1)


def _non_negative_least_squares(columns: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Exactly: the solution is the plain one on the columns it uses, so all 15 choices of columns
    are tried, the fewest first."""
    rows, aim = columns * np.sqrt(weights)[:, None], np.sqrt(weights)
    best, best_error = np.zeros(columns.shape[1]), float("inf")
    for number in range(1, columns.shape[1] + 1):
        for chosen in map(list, combinations(range(columns.shape[1]), number)):
            solution = np.linalg.lstsq(rows[:, chosen], aim, rcond=None)[0]
            error = float(((rows[:, chosen] @ solution - aim) ** 2).sum()) + 1e-15 * aim.size
            if (solution >= 0).all() and error * AS_GOOD < best_error:
                best, best_error = np.zeros(columns.shape[1]), error
                best[chosen] = solution
    return best
