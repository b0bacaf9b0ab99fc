"""What is drawn for a sample: pure functions of seed, epoch and sample, so that it does not matter who loads it, or when."""

import numpy as np

# Last word of the seeds: the streams of the draws differ, and differ from that of GlobalOrder, which ends in 0
# (numpy reads [seed, epoch] as [seed, epoch, 0, 0]).
AUGMENTATION, CAPTION, PARTS, LIMIT = 1, 2, 3, 4


def caption_number(seed: int, epoch: int, i: int, captions: int) -> int:
    """Which of its captions 0..captions-1 sample `i` of the source shows in an epoch."""
    return int(np.random.default_rng([seed, epoch, i, CAPTION]).integers(captions)) if captions > 1 else 0
