"""Texts of 4 to 77 tokens dealt into micro-batches: at random, and balanced by
`data/batching/packing.py`.

    python bench/texts.py deals       a step's seconds above work divided evenly, and padding; 10 s
    python bench/texts.py speed       processor time to deal
    python bench/texts.py packing     a fork on two ranks, packed by cost against at random

Lengths are log-normal, as captions from the web are, and rounded up to a multiple of 8 before
anything else, because the tokenizer pads so. That makes 15 % of the tokens padding, which no deal
changes and no figure here counts.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import Setup
from bench.compare import Column, Figures, Seen, Study, Way, main
from bench.steps import NO_DROPOUT, Run, figures_of, fork
from data.batching.branch_cost import BranchCost
from data.batching.packing import (
    Bounds,
    Packing,
    lower_bound_s,
    micro_batch_seconds,
    pack,
    padded_lengths,
    padding_share,
)
from data.modalities.tokenizer import TENSOR_CORE_MULTIPLE

if TYPE_CHECKING:
    from torch import Tensor

    from engine.planning.batch import BranchBatch

NUMBER = 32  # of micro-batches of each replica; ours may also choose
MAX_TEXT_TOKENS = 77
TEXT_COST = BranchCost(fixed_s=1e-3, per_sample_s=2e-5, per_token_s=1e-5, per_token_squared_s=5e-8)
TOKENS_ALONE = BranchCost(fixed_s=0.0, per_sample_s=0.0, per_token_s=1.0)
ANY_NUMBER = range(1, 65)
FORWARD_SHARE = 1 / 3  # of a micro-batch's seconds; the backward has the rest


def num_tokens(samples: int, seed: int = 0) -> np.ndarray:
    """[samples] whole numbers 4..77, median 16."""
    drawn = np.random.default_rng([seed, 0]).lognormal(2.8, 0.6, samples)
    return np.clip(np.rint(drawn), 4, MAX_TEXT_TOKENS).astype(np.int64)


def padded(tokens: np.ndarray) -> np.ndarray:
    return padded_lengths(tokens, MAX_TEXT_TOKENS, TENSOR_CORE_MULTIPLE)


# -- ways to deal


def at_random(lengths: np.ndarray, replicas: int, number: int) -> Packing:
    """As the order comes: the samples of a global batch are shuffled already."""
    parts = np.array_split(np.arange(len(lengths)), replicas * number)
    return [parts[r * number : (r + 1) * number] for r in range(replicas)]


def balanced(
    lengths: np.ndarray, replicas: int, numbers: Sequence[int], num_stages: int
) -> Packing:
    return pack(lengths, TEXT_COST, replicas, numbers, num_stages, Bounds(4))


# -- a step, simulated


def simulated_s(seconds_of: np.ndarray, num_stages: int) -> float:
    """Seconds of a step of one line under `batch_sync`, with `seconds_of` [R, M] for forward and
    backward of a micro-batch on each stage. (`engine/planning/simulator.py` knows micro-batches of
    one size alone.)"""
    clock = np.zeros((num_stages, len(seconds_of)))
    lines = (range(num_stages), range(num_stages)[::-1])
    for share, line in zip((FORWARD_SHARE, 1 - FORWARD_SHARE), lines):
        for seconds in share * seconds_of.T:
            arrived = clock[line[0]]
            for stage in line:
                arrived = clock[stage] = np.maximum(clock[stage], arrived) + seconds
        clock[:] = clock.max()  # at the loss, and at the step, whoever comes last
    return float(clock.max())


def measure_deals(num_stages: int, replicas: int, samples: int) -> Figures:
    """Of each way to deal: a step above the lower bound (all work divided evenly, nothing padded),
    and the padding."""
    lengths = padded(num_tokens(samples))
    found = {}
    for way, numbers in (("random", [NUMBER]), ("balanced", [NUMBER]), ("free", ANY_NUMBER)):
        if way == "random":
            deal = at_random(lengths, replicas, NUMBER)
        else:
            deal = balanced(lengths, replicas, numbers, num_stages)
        bound_s = min(lower_bound_s(lengths, TEXT_COST, replicas, n, num_stages) for n in numbers)
        step_s = simulated_s(micro_batch_seconds(deal, lengths, TEXT_COST), num_stages)
        found |= {way: step_s / bound_s - 1, f"{way}_padding": padding_share(deal, lengths)}
    return {**found, "number": len(deal[0])}


def deals(samples: int = 4096) -> Study:
    """Ways to deal a global batch: balanced is within 5 % of the lower bound, and at most 5 % of its
    tokens are padding."""

    def notes(seen: Seen) -> list[str]:
        above = [seen.median(name, "balanced") for name in seen.rounds]
        near = sum(share <= 0.05 for share in above)
        return [f"balanced is within 5 % of the bound in {near} of {len(above)}"]

    return Study(
        "Ways to deal a global batch",
        {
            f"{stages} stages × {replicas}": Way(partial(measure_deals, stages, replicas, samples))
            for stages in (2, 4, 8)
            for replicas in (1, 2, 4, 8)
        },
        (
            Column("random", "at random: a step above the bound", "{:.1%}"),
            Column("random_padding", "padding", "{:.1%}"),
            Column("balanced", "balanced: above the bound", "{:.1%}"),
            Column("balanced_padding", "padding", "{:.1%}"),
            Column("free", "1 to 64 micro-batches: above the bound", "{:.1%}"),
            Column("number", "chosen", "{:.0f}"),
        ),
        f"{samples:,} texts, {NUMBER} micro-batches per replica.",
        rounds=1,
        notes=notes,
    )


def dealing_ms(numbers: Sequence[int], samples: int) -> Figures:
    """To 8 replicas, for 4 stages; what else the machine does is not counted."""
    lengths = padded(num_tokens(samples))
    start = time.process_time()
    balanced(lengths, 8, numbers, 4)
    return {"ms": 1e3 * (time.process_time() - start)}


def speed() -> Study:
    """Processor time to deal: 20 ms for 4,096 texts and 1 s for 65,536."""
    return Study(
        "Time to deal a global batch",
        {
            f"{samples:,} texts, {word}": Way(partial(dealing_ms, numbers, samples))
            for samples in (4096, 65536)
            for word, numbers in (("32 micro-batches", [NUMBER]), ("1 to 64", ANY_NUMBER))
        },
        (Column("ms", "ms of processor time", "{:.1f}"),),
        "8 replicas, 4 stages.",
        rounds=7,
    )


# -- a step, measured


@dataclass(frozen=True)
class TextSetup(Setup):
    """Texts as long as they are, in micro-batches that are dealt by cost or at random."""

    by_cost: bool = True

    def tokens(self, step: int) -> np.ndarray:
        """[G] of the global batch's texts."""
        return num_tokens(self.global_batch_size, seed=step % self.num_batches)

    def inputs(self, branch: str, indices: Sequence[int]) -> dict[str, Tensor]:
        import torch

        found = super().inputs(branch, indices)
        if branch == "image":
            return found
        batches, places = np.divmod(np.asarray(indices), self.global_batch_size)
        own = np.array([self.tokens(batch)[place] for batch, place in zip(batches, places)])
        number = torch.from_numpy(own)[:, None]
        longest = int(padded(own).max())
        mask = (torch.arange(longest) < number).long()
        # 2 ends each text, 0 pads it
        tokens = found["input_ids"][:, :longest].scatter(1, number - 1, 2) * mask
        return {"input_ids": tokens, "attention_mask": mask}

    def packing(self, step: int, number: int) -> Packing:
        """Of one replica."""
        lengths = padded(self.tokens(step))
        if not self.by_cost:
            return at_random(lengths, 1, number)
        bounds = Bounds(max_tokens=self.micro_batch_size * MAX_TEXT_TOKENS)
        return pack(lengths, TOKENS_ALONE, 1, [number], bounds=bounds)

    def dealt(self, branch: str, step: int, batch: BranchBatch) -> Sequence[Sequence[Tensor]]:
        import torch

        if branch == "image":
            return super().dealt(branch, step, batch)
        parts = self.packing(step, batch.num_micro_batches)
        return [[torch.from_numpy(np.asarray(part)) for part in parts[0]]]


def measure_packing(setup: TextSetup, steps: int) -> Figures:
    found = figures_of(Run(setup, fork()), steps)
    number = setup.global_batch_size // setup.micro_batch_size
    shares = [
        padding_share(setup.packing(step, number), padded(setup.tokens(step)))
        for step in range(setup.num_batches)
    ]
    return {**found, "padding": statistics.mean(shares)}


def packing(steps: int = 4) -> Study:
    """Texts packed by cost in a fork of two ranks: more than twice as fast on the text rank, for
    which a step waits, until the image rank becomes the slower one; at least 1.25 × altogether,
    with the same losses."""
    setup = TextSetup(
        image_tower="vit_b_16:hidden_dim=192,num_layers=4,num_heads=3,mlp_dim=768,patch_size=8",
        image_size=48,
        text_tower="bert-mini:hidden_size=256,num_attention_heads=4,intermediate_size=1024,"
        f"num_hidden_layers=6{NO_DROPOUT}",
        num_tokens=MAX_TEXT_TOKENS,
        vocab_size=8192,
        global_batch_size=256,
    )
    return Study(
        "Texts packed by cost",
        {
            way: Way(partial(measure_packing, replace(setup, by_cost=way == "by cost"), steps))
            for way in ("at random", "by cost")
        },
        (
            Column("samples_per_s", "samples/s", "{:.1f}"),
            Column("step_s", "÷ at random", inverse=True),
            Column("padding", "padding", "{:.1%}"),
            Column("idle", "idle, image / text rank", "{:.0%}"),
            Column("loss", "loss after the last step", "{:.5f}"),
        ),
        f"{setup.describe()} Texts of 4 to {MAX_TEXT_TOKENS} tokens, fork of two ranks.",
        reference="at random",
        rounds=5,
        equal=("loss", 1e-4),
    )


STUDIES = (deals, speed, packing)

if __name__ == "__main__":
    main("bench.texts")
