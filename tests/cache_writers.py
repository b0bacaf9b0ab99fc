"""What the tests of the cache run in processes of their own."""

import numpy as np

from data.cache import SampleCache

LIMIT_S = 120  # ends what hangs


def sample_image(n: int, size: int = 40) -> np.ndarray:
    return (
        np.random.default_rng(n).integers(0, 256, (size, size + n % 7, 3 + n % 2)).astype(np.uint8)
    )


def items(numbers) -> list[tuple[bytes, np.ndarray]]:
    return [(b"key %d" % n, sample_image(n)) for n in numbers]


def write(cache: SampleCache, items: list[tuple[bytes, np.ndarray]], turn_s: float = 0.0) -> bool:
    """Whether they are there now."""
    for key, value in items:
        cache.put(key, value)
    cache.store(turn_s)
    return all(cache.has(key) for key, _ in items)


def write_items(cache: SampleCache, numbers) -> None:
    for item in items(numbers):
        assert write(cache, [item], LIMIT_S)
    cache.close()


def write_for_ever(cache: SampleCache) -> None:
    for n in range(10**9):
        write(cache, items([n]), LIMIT_S)
