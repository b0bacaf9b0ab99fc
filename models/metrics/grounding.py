"""Where in a film is what a sentence says? Windows of the film are ranked by their similarity to it
(Gao et al. 2017, whose baseline slides windows; Anne Hendricks et al. 2017)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

OVERLAPS = (0.3, 0.5, 0.7)
STRIDE = 0.25  # of a window's length


def windows(seconds: float, lengths: Sequence[float]) -> np.ndarray:
    """float64 [w, 2]: all windows of these lengths in a film, `STRIDE` of a length apart, and one
    of each length that ends with the film; a length that the film does not have is the whole
    film."""
    found: dict[tuple[float, float], None] = {}
    for length in lengths:
        length = min(length, seconds)
        starts = [*np.arange(0, seconds - length, STRIDE * length), seconds - length]
        found |= dict.fromkeys((float(start), float(start) + length) for start in starts)
    return np.array([*found])


def overlap(windows: np.ndarray, start_s: float, end_s: float) -> np.ndarray:
    """[w, 2] -> [w]: the intersection of each with a span over their union, in time."""
    starts, ends = windows.T
    inner = np.clip(np.minimum(ends, end_s) - np.maximum(starts, start_s), 0, None)
    return inner / (np.maximum(ends, end_s) - np.minimum(starts, start_s))


def grounding_figures(found: Sequence[tuple[float, np.ndarray]]) -> dict[str, float]:
    """`found`: of each sentence the overlap of the window that it chooses, and of all windows of
    its film [w]. -> `grounding_R@1_iou_0.5` and, drawn by chance, `grounding_chance_iou_0.5`, and
    so on for each of `OVERLAPS`; `grounding_queries`. Empty: none."""
    if not found:
        return {}
    values = {"grounding_queries": float(len(found))}
    for least in OVERLAPS:
        values[f"grounding_R@1_iou_{least}"] = float(np.mean([own >= least for own, _ in found]))
        by_chance = [(every >= least).mean() for _, every in found]
        values[f"grounding_chance_iou_{least}"] = float(np.mean(by_chance))
    return values
