"""What the tests of the picture cache run in processes of their own."""

import numpy as np

from data.cache import PictureCache

LIMIT_S = 120  # ends what hangs


def picture(n: int, size: int = 40) -> np.ndarray:
    return (
        np.random.default_rng(n).integers(0, 256, (size, size + n % 7, 3 + n % 2)).astype(np.uint8)
    )


def items(numbers) -> list[tuple[bytes, np.ndarray]]:
    return [(b"key %d" % n, picture(n)) for n in numbers]


def write_items(cache: PictureCache, numbers) -> None:
    for item in items(numbers):
        assert cache.write([item], turn_s=LIMIT_S)
    cache.close()


def write_for_ever(cache: PictureCache) -> None:
    for n in range(10**9):
        cache.write(items([n % 50]), turn_s=LIMIT_S)
        cache.write(items([50 + n]), turn_s=LIMIT_S)
