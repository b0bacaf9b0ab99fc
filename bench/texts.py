"""Texts of 4 to 77 tokens dealt into micro-batches: at random, sorted by length, longest first
(LPT), balanced by `data/batching/packing.py`.

    python bench/texts.py deals       a step's seconds above work divided evenly, and padding; 10 s
    python bench/texts.py speed       processor time to deal
    python bench/texts.py packing     a fork on two ranks, packed by cost against at random

Lengths are log-normal, as captions from the web are, and rounded up to a multiple of 8 before
anything else, because the tokenizer pads so. That makes 15 % of the tokens padding, which no deal
changes and no figure here counts.
"""

from __future__ import annotations

import heapq
import statistics
import sys
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import BRANCHES, Setup
from bench.compare import Column, Figures, Seen, Study, Way, main
from bench.steps import NO_DROPOUT, Run, fork, seconds
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

    from engine.planning.planner import BranchBatch

NUM_MICRO_BATCHES = 32  # of each replica, whatever the way; ours may also choose
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
    return _in_equal_parts(np.arange(len(lengths)), replicas, number)


def by_length(lengths: np.ndarray, replicas: int, number: int) -> Packing:
    """In equal parts, each replica's in a row: little padding, and the last replica has all the
    long ones."""
    return _in_equal_parts(np.argsort(lengths, kind="stable"), replicas, number)


def longest_first(lengths: np.ndarray, replicas: int, number: int) -> Packing:
    """Each sample, the costliest first, to the micro-batch that has least so far (LPT, Graham
    1969): even, if padding cost nothing."""
    parts: list[list[int]] = [[] for _ in range(replicas * number)]
    heap = [(0.0, i) for i in range(len(parts))]
    costs = TEXT_COST.of_sample(lengths)
    for position in np.argsort(-costs, kind="stable").tolist():
        load, i = heap[0]
        parts[i].append(position)
        heapq.heapreplace(heap, (load + float(costs[position]), i))
    arrays = [np.array(sorted(part), dtype=np.int64) for part in parts]
    return [arrays[r * number : (r + 1) * number] for r in range(replicas)]


def _in_equal_parts(order: np.ndarray, replicas: int, number: int) -> Packing:
    parts = np.array_split(order, replicas * number)
    return [parts[r * number : (r + 1) * number] for r in range(replicas)]


def balanced(
    lengths: np.ndarray, replicas: int, number: int, num_stages: int = 1, free: bool = False
) -> Packing:
    numbers = ANY_NUMBER if free else [number]
    return pack(lengths, TEXT_COST, replicas, numbers, num_stages, Bounds(4))


DEALS = {"random": at_random, "sorted": by_length, "longest first": longest_first}


# -- a step, simulated


def simulated_s(seconds_of: np.ndarray, num_stages: int) -> float:
    """Seconds of a step of one line: the engine's instruction lists, with `seconds_of` [R, M] for
    forward and backward of a micro-batch on each stage. (`engine/planning/simulator.py` knows
    micro-batches of one size alone.)"""
    from engine.planning.ordering import COLLECTIVES, put_in_order, shape_of
    from engine.planning.planner import BranchBatch
    from engine.schedule import SCHEDULES
    from engine.topology import merged

    replicas, number = seconds_of.shape
    cuts = [range(stage, stage + 1) for stage in range(num_stages)]
    graph = merged(dict.fromkeys(BRANCHES, cuts), replicas)
    batches = dict.fromkeys(BRANCHES, BranchBatch(replicas, 1, number, 0))
    order = put_in_order(shape_of(graph, batches), SCHEDULES["batch_sync"])
    shares = {"ForwardPass": FORWARD_SHARE, "BackwardPass": 1 - FORWARD_SHARE}
    clock = np.zeros((num_stages, replicas))
    arrivals = defaultdict(deque)
    for stages, instruction, receives, sends in order.events:
        if isinstance(instruction, COLLECTIVES):  # whoever comes last, of all replicas
            clock[list(stages)] = clock[list(stages)].max()
            continue
        (stage,) = stages
        if receives:
            clock[stage] = np.maximum(clock[stage], arrivals[receives].popleft())
        if instruction.name in shares:
            clock[stage] += shares[instruction.name] * seconds_of[:, instruction.buffer_id]
        if sends:
            arrivals[sends].append(clock[stage].copy())
    return float(clock.max())


def measure_deals(num_stages: int, replicas: int, samples: int) -> Figures:
    """Of each way to deal: a step above the lower bound (all work divided evenly, nothing padded),
    and the padding."""
    lengths = padded(num_tokens(samples))
    dealt = [way(lengths, replicas, NUM_MICRO_BATCHES) for way in DEALS.values()]
    dealt.append(balanced(lengths, replicas, NUM_MICRO_BATCHES, num_stages))
    free = balanced(lengths, replicas, NUM_MICRO_BATCHES, num_stages, free=True)

    def above(deal: Packing, numbers: Sequence[int]) -> float:
        bound_s = min(lower_bound_s(lengths, TEXT_COST, replicas, n, num_stages) for n in numbers)
        return simulated_s(micro_batch_seconds(deal, lengths, TEXT_COST), num_stages) / bound_s - 1

    return {
        "above": [*(above(deal, [NUM_MICRO_BATCHES]) for deal in dealt), above(free, ANY_NUMBER)],
        "padding": [padding_share(deal, lengths) for deal in dealt],
        "number": len(free[0]),
    }


def deals(samples: int = 4096) -> Study:
    """Balanced within 5 % of the lower bound, and at most 5 % of the tokens padding."""
    names = " / ".join((*DEALS, "balanced"))

    def notes(seen: Seen) -> list[str]:
        above = [figures["above"][len(DEALS)] for (figures,) in seen.rounds.values()]
        near = sum(share <= 0.05 for share in above)
        return [
            f"balanced within 5 % of the bound in {near} of {len(above)}: {max(above):.1%} at most"
        ]

    return Study(
        "Ways to deal a global batch",
        {
            f"{stages} stages × {replicas}": Way(partial(measure_deals, stages, replicas, samples))
            for stages in (2, 4, 8)
            for replicas in (1, 2, 4, 8)
        },
        (
            Column(
                "above",
                f"a step above the bound: {names} / balanced, 1 to 64 micro-batches",
                "{:.1%}",
            ),
            Column("padding", f"padding: {names}", "{:.1%}"),
            Column("number", "micro-batches that balanced chose", "{:.0f}"),
        ),
        f"{samples:,} texts, {NUM_MICRO_BATCHES} micro-batches per replica.",
        rounds=1,
        notes=notes,
    )


def dealing_ms(way: str, samples: int) -> Figures:
    """To 8 replicas, for 4 stages; what else the machine does is not counted."""
    lengths = padded(num_tokens(samples))
    deal = DEALS.get(way) or partial(balanced, num_stages=4, free=way != "balanced")
    start = time.process_time()
    deal(lengths, 8, NUM_MICRO_BATCHES)
    return {"ms": 1e3 * (time.process_time() - start)}


def speed() -> Study:
    """Processor time to deal: 20 ms for 4,096 texts and 1 s for 65,536."""
    return Study(
        "Time to deal a global batch",
        {
            f"{samples:,} texts, {way}": Way(partial(dealing_ms, way, samples))
            for samples in (4096, 65536)
            for way in (*DEALS, "balanced", "balanced, any number")
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
    found = seconds(Run(setup, fork()), steps)
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
