"""What is drawn for a sample: pure functions of seed, epoch and sample, so that it does not matter
who loads it, or when."""

import numpy as np

# Last word of the seeds: the streams of the draws differ, and differ from that of GlobalOrder,
# which ends in 0
# (numpy reads [seed, epoch] as [seed, epoch, 0, 0]).
AUGMENTATION, CAPTION, PARTS, LIMIT, PATCHES = 1, 2, 3, 4, 5
SHARDS, SHARD, GROUP, HELD_OUT = 6, 7, 8, 9
ANNOTATIONS, PHRASE, NEGATIVES = 10, 11, 12


def generator_of(seed: int, epoch: int, i: int, what: int, view: int = 0) -> np.random.Generator:
    """What a view of sample `i` draws in an epoch. The first draws as if there was no other: a fifth
    word would change what runs draw that know no views, also where it is 0."""
    return np.random.default_rng([seed, epoch, i, what, *([view] if view else [])])


def caption_numbers(seed: int, epoch: int, i: int, captions: int, shown: int = 1) -> list[int]:
    """Which of its captions 0..captions-1 sample `i` of the source shows in an epoch: so many in a
    row from a drawn one on, round the end."""
    first = (
        int(np.random.default_rng([seed, epoch, i, CAPTION]).integers(captions))
        if captions > 1
        else 0
    )
    return [(first + k) % captions for k in range(shown)]


def annotation_numbers(
    seed: int, epoch: int, i: int, have: int, shown: int, negatives: bool = False
) -> list[int]:
    """Which of its annotations 0..have-1, or of their negatives, sample `i` of the source shows in
    an epoch, ascending."""
    generator = np.random.default_rng([seed, epoch, i, NEGATIVES if negatives else ANNOTATIONS])
    return np.sort(generator.permutation(have)[:shown]).tolist()


def phrase_number(seed: int, epoch: int, i: int, k: int, phrases: int) -> int:
    """Which of the phrases 0..phrases-1 of its k-th shown annotation sample `i` shows in an
    epoch."""
    if phrases == 1:
        return 0
    return int(np.random.default_rng([seed, epoch, i, k, PHRASE]).integers(phrases))


def patch_numbers(
    seed: int, epoch: int, i: int, patches: int, kept: int, view: int = 0
) -> np.ndarray:
    """[kept] int64, ascending: which of its patches 0..patches-1 a view of the image of sample `i`
    shows in an epoch."""
    generator = generator_of(seed, epoch, i, PATCHES, view)
    return np.sort(generator.permutation(patches)[:kept])
