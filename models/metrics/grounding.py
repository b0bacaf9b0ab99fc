"""Where in a film is what a sentence says? Windows of the film are ranked by their similarity to it
(Gao et al. 2017, whose baseline slides windows; Anne Hendricks et al. 2017)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from models.metrics.retrieval import TOLERANCE

OVERLAPS = (0.3, 0.5, 0.7)
STRIDE = 0.25  # of a window's length
MOST = 1000  # windows of a length in a film; in a longer film they are farther apart


def windows(seconds: float, lengths: Sequence[float]) -> np.ndarray:
    """float64 [w, 2]: all windows of these lengths in a film, `STRIDE` of a length apart, and one
    of each length that ends with the film; a length that the film does not have is the whole
    film."""
    found: dict[tuple[float, float], None] = {}
    for length in lengths:
        length = min(length, seconds)
        last = seconds - length
        apart = max(STRIDE * length, last / (MOST - 1))
        starts = [*np.arange(0, last, apart), last]
        found |= dict.fromkeys((float(start), float(start) + length) for start in starts)
    return np.array([*found])


def overlap(windows: np.ndarray, start_s: float, end_s: float) -> np.ndarray:
    """[w, 2] -> [w]: the intersection of each with a span over their union, in time."""
    starts, ends = windows.T
    inner = np.clip(np.minimum(ends, end_s) - np.maximum(starts, start_s), 0, None)
    return inner / (np.maximum(ends, end_s) - np.minimum(starts, start_s))


def overlaps_by_text(
    windows: np.ndarray, clips: Iterable[tuple[int, float, float]]
) -> dict[int, np.ndarray]:
    """`clips` of a film: a key of the text, start and end, seconds -> by text the overlap of each
    window [w] with the nearest of its clips: what a film shows twice is found in either place."""
    found: dict[int, np.ndarray] = {}
    for text, start_s, end_s in clips:
        here = overlap(windows, start_s, end_s)
        found[text] = np.maximum(found.get(text, here), here)
    return found


def chosen_overlap(similarity: np.ndarray, overlaps: np.ndarray) -> float:
    """The overlap of the window that a sentence chooses, by its `similarity` to all windows [w]; of
    windows that tie with the most similar one the least, since a film that stands still chooses
    none."""
    return float(overlaps[~(similarity < similarity.max() - TOLERANCE)].min())


def overlap_shares(overlaps: np.ndarray) -> list[float]:
    """What part of the windows, of which these are the overlaps [w], each of `OVERLAPS` allows."""
    return [float((overlaps >= least).mean()) for least in OVERLAPS]


def grounding_figures(found: Sequence[tuple[float, Sequence[float]]]) -> dict[str, float]:
    """`found`: of each sentence the overlap of the window that it chooses, and `overlap_shares` of
    all windows of its film. -> `grounding_R@1_iou_0.5` and, drawn by chance,
    `grounding_chance_iou_0.5`, and so on for each of `OVERLAPS`; `grounding_queries`. Empty:
    none."""
    if not found:
        return {}
    values = {"grounding_queries": float(len(found))}
    for n, least in enumerate(OVERLAPS):
        values[f"grounding_R@1_iou_{least}"] = float(np.mean([own >= least for own, _ in found]))
        by_chance = np.mean([shares[n] for _, shares in found])
        values[f"grounding_chance_iou_{least}"] = float(by_chance)
    return values
