"""Four ways to deal texts into micro-batches: random, sorted by length, longest first (LPT),
balanced.

    python bench/balance.py            writes bench/out/balance.md, in about 10 s on one core

Balanced is `data/batching/packing.py`. The texts have 4 to 77 tokens, log-normal. For each way:
padding, and the seconds of a step against the lower bound (all work divided evenly, nothing
padded), for 2 to 8 stages and 1 to 8 replicas; then the time to deal. Steps are the instruction
lists of the engine, walked with the seconds of each micro-batch, because
`engine/planning/simulator.py` knows only one size of them.

Lengths are rounded up to a multiple of 8 before anything else, because the tokenizer pads so. What
that costs is given below the table.
"""

from __future__ import annotations

import argparse
import heapq
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
OUT = ROOT / "bench" / "out"

from bench.common import BRANCHES
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

STAGES, REPLICAS = (2, 4, 8), (1, 2, 4, 8)
NUM_MICRO_BATCHES = 32  # of each replica, whatever the way; ours may also choose
GLOBAL_BATCH_SIZE, LARGE = 4096, 65536
MAX_TEXT_TOKENS = 77
TEXT_COST = BranchCost(fixed_s=1e-3, per_sample_s=2e-5, per_token_s=1e-5, per_token_squared_s=5e-8)
MIN_SIZE = 4
ANY_NUMBER = range(1, 65)
FORWARD_SHARE = 1 / 3  # of a micro-batch's seconds; the backward has the rest
ROUNDS = 7


def num_tokens(samples: int, seed: int = 0) -> np.ndarray:
    """[samples] whole numbers 4..77, median 16."""
    return np.clip(
        np.rint(np.random.default_rng([seed, 0]).lognormal(2.8, 0.6, samples)), 4, MAX_TEXT_TOKENS
    ).astype(np.int64)


def texts(samples: int) -> np.ndarray:
    return padded_lengths(num_tokens(samples), MAX_TEXT_TOKENS, TENSOR_CORE_MULTIPLE)


def balanced(
    lengths: np.ndarray, replicas: int, num_stages: int, numbers: Sequence[int]
) -> Packing:
    return pack(lengths, TEXT_COST, replicas, numbers, num_stages, Bounds(MIN_SIZE))


# -- ways to deal


def deal_at_random(lengths: np.ndarray, replicas: int, number: int) -> Packing:
    """As the order comes: the samples of a global batch are shuffled already."""
    return _in_equal_parts(np.arange(len(lengths)), replicas, number)


def deal_sorted(lengths: np.ndarray, replicas: int, number: int) -> Packing:
    """By length, in equal parts, each replica's in a row: little padding, and the last replica has
    all the long ones."""
    return _in_equal_parts(np.argsort(lengths, kind="stable"), replicas, number)


def deal_longest_first(lengths: np.ndarray, replicas: int, number: int) -> Packing:
    """Each sample, the costliest first, to the micro-batch that has least so far (LPT, Graham
    1969): even, if padding cost nothing."""
    parts: list[list[int]] = [[] for _ in range(replicas * number)]
    heap = [(0.0, i) for i in range(len(parts))]
    seconds = TEXT_COST.of_sample(lengths)
    for position in np.argsort(-seconds, kind="stable").tolist():
        load, i = heap[0]
        parts[i].append(position)
        heapq.heapreplace(heap, (load + float(seconds[position]), i))
    arrays = [np.array(sorted(part), dtype=np.int64) for part in parts]
    return [arrays[r * number : (r + 1) * number] for r in range(replicas)]


def _in_equal_parts(order: np.ndarray, replicas: int, number: int) -> Packing:
    parts = np.array_split(order, replicas * number)
    return [parts[r * number : (r + 1) * number] for r in range(replicas)]


WAYS = {"random": deal_at_random, "sorted": deal_sorted, "longest first": deal_longest_first}


# -- a step, simulated


def simulated_s(
    seconds: np.ndarray, num_stages: int, schedule: str = "batch_sync", num_kept: int = 0
) -> float:
    """Seconds of a step of one line: its instruction lists, with `seconds` [R, M] for forward and
    backward of a micro-batch on each stage."""
    from engine.planning.ordering import COLLECTIVES, put_in_order, shape_of
    from engine.planning.planner import BranchBatch
    from engine.schedule import SCHEDULES
    from engine.topology import merged

    replicas, number = seconds.shape
    graph = merged(
        {branch: [range(s, s + 1) for s in range(num_stages)] for branch in BRANCHES}, replicas
    )
    batches = {branch: BranchBatch(replicas, 1, number, num_kept) for branch in BRANCHES}
    order = put_in_order(shape_of(graph, batches), SCHEDULES[schedule])
    shares = dict.fromkeys(("ForwardPass", "EmbedPass", "ReplayPass"), FORWARD_SHARE) | {
        "BackwardPass": 1 - FORWARD_SHARE
    }
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
            clock[stage] += shares[instruction.name] * seconds[:, instruction.buffer_id]
        if sends:
            arrivals[sends].append(clock[stage].copy())
    return float(clock.max())


# -- measuring


@dataclass(frozen=True)
class Row:
    num_stages: int
    replicas: int
    padding: dict[str, float]  # by way
    over: dict[str, float]  # a step, above the lower bound
    free_number: int  # of micro-batches, where ours may choose
    free_over: float  # above the lower bound of the best number


def measure(num_stages: int, replicas: int) -> Row:
    lengths = texts(GLOBAL_BATCH_SIZE)
    deals = {name: way(lengths, replicas, NUM_MICRO_BATCHES) for name, way in WAYS.items()}
    deals["balanced"] = balanced(lengths, replicas, num_stages, [NUM_MICRO_BATCHES])
    free = balanced(lengths, replicas, num_stages, ANY_NUMBER)
    bound_s = lower_bound_s(lengths, TEXT_COST, replicas, NUM_MICRO_BATCHES, num_stages)
    best_s = min(
        lower_bound_s(lengths, TEXT_COST, replicas, number, num_stages) for number in ANY_NUMBER
    )
    return Row(
        num_stages=num_stages,
        replicas=replicas,
        padding={name: padding_share(deal, lengths) for name, deal in deals.items()},
        over={
            name: _step_s(deal, lengths, num_stages) / bound_s - 1 for name, deal in deals.items()
        },
        free_number=len(free[0]),
        free_over=_step_s(free, lengths, num_stages) / best_s - 1,
    )


def _step_s(deal: Packing, lengths: np.ndarray, num_stages: int) -> float:
    return simulated_s(micro_batch_seconds(deal, lengths, TEXT_COST), num_stages)


def times(samples: int) -> dict[str, list[float]]:
    """Milliseconds of processor time to deal to 8 replicas for 4 stages, each way in turn."""
    lengths = texts(samples)
    ways: dict[str, Callable[[], Packing]] = {
        **{
            name: (lambda way=way: way(lengths, 8, NUM_MICRO_BATCHES)) for name, way in WAYS.items()
        },
        "balanced": lambda: balanced(lengths, 8, 4, [NUM_MICRO_BATCHES]),
        "balanced, any number": lambda: balanced(lengths, 8, 4, ANY_NUMBER),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            start = time.process_time()  # what else the machine does is not counted
            way()
            found[name].append(1e3 * (time.process_time() - start))
    return found


def report(rows: Sequence[Row], spent: dict[int, dict[str, list[float]]]) -> Iterator[str]:
    names = [*WAYS, "balanced"]
    yield "# Ways to deal a global batch\n"
    yield (
        f"{GLOBAL_BATCH_SIZE:,} texts, {NUM_MICRO_BATCHES} micro-batches per replica, none below "
        f"{MIN_SIZE} texts where balanced. A cell: a step above the lower bound, and the padding. "
        "The last column: where the number of micro-batches is free (1 to 64), above the lower "
        "bound of the best number.\n"
    )
    yield "| stages | replicas | " + " | ".join(names) + " | balanced, any number |"
    yield "|---" * (len(names) + 3) + "|"
    for row in rows:
        cells = [f"+{row.over[name]:.1%}, {row.padding[name]:.1%}" for name in names]
        yield (
            f"| {row.num_stages} | {row.replicas} | "
            + " | ".join(cells)
            + f" | +{row.free_over:.1%} ({row.free_number}) |"
        )
    tokens = num_tokens(GLOBAL_BATCH_SIZE)
    rounding = (
        1 - tokens.sum() / padded_lengths(tokens, MAX_TEXT_TOKENS, TENSOR_CORE_MULTIPLE).sum()
    )
    yield f"\nNot in these figures, since no deal changes it: rounding up to a multiple of 8 makes {rounding:.1%} of the texts' tokens padding.\n"
    within = sum(row.over["balanced"] <= 0.05 for row in rows)
    yield f"Balanced is within 5 % of the lower bound in {within} of {len(rows)} cases, at most {max(r.over['balanced'] for r in rows):.1%} above it.\n"
    yield f"Milliseconds of processor time to deal to 8 replicas for 4 stages, median of {ROUNDS} (least – most):\n"
    yield "| texts | " + " | ".join(next(iter(spent.values()))) + " |"
    yield "|---" * (len(next(iter(spent.values()))) + 1) + "|"
    for samples, ways in spent.items():
        cells = [f"{median(ms):.1f} ({min(ms):.1f} – {max(ms):.1f})" for ms in ways.values()]
        yield f"| {samples:,} | " + " | ".join(cells) + " |"


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    from tqdm import tqdm

    cases = [(stages, replicas) for stages in STAGES for replicas in REPLICAS]
    rows = [measure(*case) for case in tqdm(cases, unit="case")]
    spent = {samples: times(samples) for samples in (GLOBAL_BATCH_SIZE, LARGE)}
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "balance.md").write_text("\n".join(report(rows, spent)) + "\n", encoding="utf-8")
    print((OUT / "balance.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
