"""How a decoded picture of a film is shown: with square pixels, turned and mirrored."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from PIL import Image

# by how many quarter turns, counterclockwise
TURNED = {
    0: (1, 0, 0, 0, 1, 0, 0, 0, 1),
    1: (0, -1, 0, 1, 0, 0, 0, 0, 1),
    2: (-1, 0, 0, 0, -1, 0, 0, 0, 1),
    3: (0, 1, 0, -1, 0, 0, 0, 0, 1),
}


def quarter_turns(frame: Any) -> int:
    """Counterclockwise, of a frame of PyAV's. Says nothing of a mirror."""
    return round(frame.rotation / 90) % 4


def display_matrix(frame: Any) -> tuple[int, ...]:
    """The nine numbers by which FFmpeg says how a frame of PyAV's is turned and mirrored."""
    try:
        given = frame.side_data.get("DISPLAYMATRIX")
        matrix = None if given is None else tuple(np.frombuffer(bytes(given), np.int32).tolist())
        # else the frame and its side data keep each other alive until Python looks for circles
        frame.side_data.__init__(type(frame)())
    except ValueError:  # it also has side data of a kind that PyAV has no name for
        matrix = None
    return matrix or TURNED[quarter_turns(frame)]


def shown_width(width: int, pixel_aspect: Fraction | None) -> int:
    """Of a picture as stored, with pixels that are `pixel_aspect` times as wide as high; None or 0:
    square, or not known."""
    return max(1, round(width * pixel_aspect)) if pixel_aspect else width


def as_shown(
    image: np.ndarray, pixel_aspect: Fraction | None, matrix: tuple[int, ...]
) -> np.ndarray:
    """uint8 [h, w, 3] as stored -> [H, W, 3] as players show it."""
    height, width = image.shape[:2]
    if (wanted := shown_width(width, pixel_aspect)) != width:
        image = np.asarray(
            Image.fromarray(image).resize((wanted, height), Image.Resampling.BICUBIC)
        )
    # x and y of a picture go to (a x + c y, b x + d y); players turn by whole quarters
    a, b, _, c, d = matrix[:5]
    flip_x, flip_y = a < 0, d < 0
    if abs(b) + abs(c) > abs(a) + abs(d):
        image = image.swapaxes(0, 1)
        flip_x, flip_y = c < 0, b < 0
    return image[:: -1 if flip_y else 1, :: -1 if flip_x else 1]
