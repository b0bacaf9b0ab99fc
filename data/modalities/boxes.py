"""Boxes of an image, seen through a view of it."""

from typing import NamedTuple

import numpy as np


class Placed(NamedTuple):
    """What a view shows of an image: this rectangle of it, scaled to the view, then maybe mirrored.

    Left, top, right and bottom are fractions of the image's sides, so they hold for the file,
    upright, and for what phase A makes of it. (A JPEG that is decoded at a reduced scale has its
    sides rounded up, by less than a pixel of that scale.)
    """

    left: float
    top: float
    right: float
    bottom: float
    size: tuple[int, int]  # H, W of the view
    mirrored: bool = False

    @classmethod
    def of(
        cls,
        crop: tuple[float, float, float, float],
        image: tuple[int, int],
        size: tuple[int, int],
        mirrored: bool = False,
    ) -> "Placed":
        """Of a view of `size` that shows the `crop` (top, left, height, width), in pixels, of an
        image [h, w]."""
        (top, left, height, width), (h, w) = crop, image
        return cls(left / w, top / h, (left + width) / w, (top + height) / h, size, mirrored)

    def nearest(self, values: np.ndarray, beyond: float = 0) -> np.ndarray:
        """What the view shows of values that lie on the image, [h, w, ...] of any sides and type ->
        [H, W, ...]: in each pixel the value that is nearest to its centre, and `beyond` where the
        view shows more than the image."""
        rows, down = _nearest(self.top, self.bottom, values.shape[0], self.size[0])
        columns, across = _nearest(self.left, self.right, values.shape[1], self.size[1])
        found = values[rows][:, columns]
        found[~down] = beyond
        found[:, ~across] = beyond
        return np.ascontiguousarray(found[:, ::-1]) if self.mirrored else found

    def boxes(self, boxes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """x1, y1, x2, y2 as fractions of the image's sides [n, 4] -> the same in pixels of the
        view, cut off at its edges, float32 [n, 4]; and which part of each one's area the view
        shows, float32 [n]."""
        height, width = self.size
        start = np.tile([self.left, self.top], 2)
        scale = np.tile([width / (self.right - self.left), height / (self.bottom - self.top)], 2)
        whole = (np.asarray(boxes, np.float64).reshape(-1, 4) - start) * scale
        if self.mirrored:
            whole[:, [0, 2]] = width - whole[:, [2, 0]]
        shown = whole.clip(0, [width, height, width, height])
        area, part = ((each[:, 2:] - each[:, :2]).prod(1) for each in (whole, shown))
        # a box without an area is not shown
        inside = np.divide(part, area, out=np.zeros(len(whole)), where=area > 0)
        return shown.astype(np.float32), inside.astype(np.float32)


def _nearest(begin: float, end: float, side: int, pixels: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each of `pixels` between two fractions of a side: the number of the value at its centre
    [pixels] int64, and whether there is one."""
    at = np.floor((begin + (np.arange(pixels) + 0.5) / pixels * (end - begin)) * side)
    at = at.astype(np.int64)
    return at.clip(0, side - 1), (at >= 0) & (at < side)
