"""Boxes of an image, seen through a view of it."""

from typing import NamedTuple

import numpy as np

KEPT_AREA = 0.5  # a box of which a view shows less than this part is not of the view


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
