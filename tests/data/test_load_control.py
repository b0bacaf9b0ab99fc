"""Feed rates: moved when a branch waits, by measured seconds, slowly, within bounds; left alone by
noise."""

from dataclasses import replace

import numpy as np
import pytest

from data.batching.load_control import (
    FeedRates,
    LoadControl,
    Observations,
    patch_ladder,
    scaled_size,
    size_ladder,
    typical,
)

INTERVAL, AHEAD = 20, 10  # steps between measurements; steps until a move holds
BRANCHES = ("image", "text")
CONTROL = LoadControl((1, 2, 3, 4, 5), patch_ladder(0.25), (160, 192, 224))


def run(seconds, control=CONTROL, steps=200, noise=0.0, seed=0):
    """`seconds(step)`: of each branch with the first feed rates. Returns (step, feed rates,
    reason) of all that was said, and how much each step waited."""
    rng, observations, seen, said, waited = np.random.default_rng(seed), Observations(), [], [], []
    start = control.start()
    in_force = [(0, start)]
    for step in range(steps):
        feed_rates = next(feed_rates for begin, feed_rates in reversed(in_force) if begin <= step)
        measured = {
            b: s * feed_rates.load(b) / start.load(b) * rng.uniform(1 - noise, 1 + noise)
            for b, s in seconds(step).items()
        }
        seen.append(measured)
        waited.append(1 - min(measured.values()) / max(measured.values()))
        if (step + 1) % INTERVAL == 0:
            busy_s = {b: typical([one[b] for one in seen]) for b in BRANCHES}
            before, seen = in_force[-1][1], []
            observations, feed_rates, reason = control.after(
                observations, before, busy_s, step + 1 - INTERVAL
            )
            if feed_rates != before:
                in_force.append((step + 1 + AHEAD, feed_rates))
                observations = replace(observations, from_step=step + 1 + AHEAD)
            if reason:
                said.append((step + 1, feed_rates, reason))
    return said, waited


def steady(image, text):
    return lambda step: {"image": image, "text": text}


def test_the_first_move():
    for image, text, expected in (
        (1.0, 0.5, FeedRates(2, 1.0, 224)),  # who waits gets more to do
        (1.0, 0.33, FeedRates(2, 1.0, 224)),  # at most twice as much at once
        # twice as much would be too much: the other one is relieved
        (1.0, 0.7, FeedRates(1, 0.6875, 224)),
        (1.0, 0.96, None),
    ):
        said, _ = run(steady(image, text), steps=100)
        assert (said[0][1] if said else None) == expected, (image, text)


def test_a_reason_says_what_was_seen_and_done():
    (step, _, reason), *_ = run(steady(1.0, 0.5))[0]
    assert step == 60  # three measurements in a row have asked for it
    assert (
        reason
        == "captions_per_image 1 -> 2: the text branch waits 50% of a step (text 0.5 s, image 1 s)"
    )


@pytest.mark.parametrize("slow", BRANCHES)
def test_a_branch_that_becomes_twice_as_slow_is_answered_within_100_steps(slow):
    for control in (
        CONTROL,
        LoadControl((1, 2, 3)),
        LoadControl(kept_patches=patch_ladder(0.25)),
        LoadControl((2, 3, 4), patch_ladder(0.25)),
    ):
        for changed in (100, 110, 119):
            said, waited = run(
                lambda step: {b: 2.0 if b == slow and step >= changed else 1.0 for b in BRANCHES},
                control,
                steps=500,
                noise=0.05,
            )
            step, _, reason = said[0]
            assert changed < step and step + AHEAD <= changed + 100
            assert np.mean(waited[-100:]) < 0.1 or said[-1][2].startswith("bound reached: the")


def test_noise_moves_no_feed_rate_more_than_once_in_200_steps():
    moves = [
        sum(
            not reason.startswith("bound")
            for _, _, reason in run(steady(1.0, 1.0), noise=0.2, seed=seed)[0]
        )
        for seed in range(300)
    ]
    assert max(moves) <= 1 and np.mean(moves) < 0.02


def test_bounds_hold_whatever_is_measured():
    for seed in range(1000):
        rng = np.random.default_rng(seed)
        captions = tuple(range(int(rng.integers(1, 4)), int(rng.integers(4, 9))))
        control = LoadControl(
            captions,
            patch_ladder(float(rng.uniform(0.1, 0.9))),
            size_ladder(int(rng.integers(64, 160)), 224, 32),
        )
        level = rng.lognormal(0, 1, (2, 8))
        said, _ = run(
            lambda step: dict(zip(BRANCHES, level[:, step // 50])),
            control,
            steps=400,
            noise=0.2,
            seed=seed,
        )
        before = control.start()
        moves = [(step, rates) for step, rates, reason in said if not reason.startswith("bound")]
        for (step, feed_rates), earlier in zip(moves, [0, *(step for step, _ in moves)]):
            for name, ladder in control.ladders():
                assert getattr(feed_rates, name) in ladder
            changes = [feed_rates.load(b) / before.load(b) for b in BRANCHES]
            assert all(0.5 - 1e-9 <= change <= 2 + 1e-9 for change in changes)
            assert sum(change != 1 for change in changes) <= 1
            assert step - earlier >= 3 * INTERVAL
            before = feed_rates


def test_a_bound_is_named_once():
    said, _ = run(steady(1.0, 5.0), LoadControl((1, 2), (1.0,), (224,)), steps=400)
    assert len(said) == 1
    assert said[0][2] == (
        "bound reached: the image branch waits 80% of a step (image 1 s, text 5 s), and no feed "
        "rate improves it within captions_per_image 1 .. 2 (now 1)"
    )


def test_what_was_taken_comes_back_first():
    """Once the slow branch is fast again, its relief is what the idle one gets back."""
    said, waited = run(
        lambda step: {"image": 2.0 if step < 200 else 1.0, "text": 1.0},
        LoadControl(kept_patches=patch_ladder(0.25)),
        steps=600,
    )
    shares = [feed_rates.kept_patches for _, feed_rates, _ in said]
    assert min(shares) == 0.5 and shares[-1] > 0.9 and np.mean(waited[-100:]) < 0.1


def test_steps_in_which_something_else_happened_do_not_count():
    assert typical([1.0] * 18 + [50.0, 0.0]) == 1.0 and typical([3.0]) == 3.0


def test_ladders():
    assert patch_ladder(0.4) == (0.4, *(n / 16 for n in range(7, 16)), 1.0) and patch_ladder(
        1.0
    ) == (1.0,)
    assert size_ladder(100, 224, 32) == (128, 160, 192, 224) and size_ladder(60, 64, 8) == (64,)
    assert scaled_size((160, 320), 112, 224, 32) == (64, 160) and scaled_size(
        (32, 32), 8, 224, 32
    ) == (32, 32)
