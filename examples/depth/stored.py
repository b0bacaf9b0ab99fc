"""What data sets hold: a 16-bit PNG beside an image, `depth_path` or `depth` of a row, or
`000.depth.png` beside `000.jpg` in a tar. 0 is what has no depth."""

import numpy as np

from data.bad_samples import BadSample
from data.decoding.images import decode_bytes
from data.stored.kinds import STORED
from data.stored.record import StoredFile


def depth_of(content: bytes) -> np.ndarray:
    """[h, w] uint16. Raises BadSample."""
    image = decode_bytes(content)
    if not image.mode.startswith("I"):
        raise BadSample("unreadable", f"a depth of mode {image.mode}; 16 bits of grey are needed")
    return np.asarray(image).astype(np.uint16)


def measured(content: bytes, decode: bool) -> dict[str, float]:
    """Columns of the index. Raises BadSample."""
    return {"depth_nearest": float(depth_of(content).min())} if decode else {}


DEPTH = StoredFile(
    "depth",
    several="depths",
    endings=("depth.png",),
    measured={"depth_nearest": "f4"},
    measure=measured,
)
STORED["depth"] = DEPTH
