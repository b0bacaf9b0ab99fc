"""Clipping by group against one global norm over all ranks: calls, bytes and seconds of the same
gradients in the same processes.

    python bench/clipping.py                 writes bench/out/clipping.md and prints it

In the optimizer step of a real run both clip the same gradients in turn, each behind a barrier.
Global clipping is the group {"all": {"match": ["*"]}}. Three ranks, two ways: a deeper image branch
with whole gradients (ZeRO-0), and two replicas that share the gradients out (ZeRO-1). Once all
ranks come together, once the text rank comes late, as that of a slower branch does: then it is seen
which ranks wait for it.

Expected: by group there are more collectives and, over fewer ranks each, not more bytes; some tens
of bytes are nothing beside reading the gradients, so the time is equal within the spread. When the
text rank is late, a global norm holds everybody up; by group only those that share the head with
it, the tails.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # with ranks.py
OUT = ROOT / "bench" / "out"

from bench.common import BRANCHES, TIMEOUT, Setup, make_engine, micro_batches

SETUP = Setup(
    image_tower="vit_b_16:hidden_dim=192,num_layers=4,num_heads=3,mlp_dim=768,patch_size=8",
    image_size=32,
    text_tower="bert-mini:hidden_size=192,num_attention_heads=3,intermediate_size=768,num_hidden_layers=4",
    num_tokens=16,
    vocab_size=2048,
    embed_dim=128,
    global_batch_size=8,
    micro_batch_size=4,
    num_batches=1,
)
LINES = {
    "image 0 ─ image 1, text 0; ZeRO-0": (0, {"image": 2, "text": 1}, {"image": 1, "text": 1}),
    "image 0 ×2, text 0; ZeRO-1": (1, {"image": 1, "text": 1}, {"image": 2, "text": 1}),
}
BLOCKS = {
    "by group": {"image": 1.0, "text": 1.0, "head": 1.0},
    "global": {"all": {"match": ["*"], "limit": 1.0}},
}
LATE_S = 0.05
WARMUP_ROUNDS = 2


def measure(
    zero_stage: int, stages: dict[str, int], replicas: dict[str, int], rounds: int
) -> dict[str, Any]:
    """On each rank: by kind of clipping, collectives and bytes of one clip, and its seconds by
    round, in time and with the text rank late."""
    from dataclasses import replace

    import torch
    import torch.distributed as dist

    from engine.communication import Communicator
    from engine.optimizer.clipping import GroupedClipping
    from engine.optimizer.clipping_rules import clipping_rules, group_of, rank_sets

    setup = replace(SETUP, zero_stage=zero_stage)
    engine = make_engine(setup, {"layout": "fork", "stages": stages, "replicas": replicas})
    rules = {kind: clipping_rules(block, BRANCHES) for kind, block in BLOCKS.items()}
    sets = {
        kind: rank_sets(
            engine.graph,
            {
                b: [{group_of(n, rule) for n in spec.canonical_parameters} for spec in t.specs]
                for b, t in setup.towers.items()
            },
            sharded=engine.clipping.partitioned,
        )
        for kind, rule in rules.items()
    }
    comm = Communicator(
        graph=engine.graph,
        objective=engine.objective,
        rank=engine.comm.rank,
        device=engine.device,
        timeout=TIMEOUT,
        rank_sets=[r for s in sets.values() for of_group in s.values() for r in of_group],
    )
    result: dict[str, Any] = {
        "name": engine.place.name,
        **{kind: {"together": [], "late": []} for kind in BLOCKS},
    }

    def clip_both(*_: Any) -> None:
        for number in range(WARMUP_ROUNDS + rounds):
            for kind in BLOCKS:
                for when in ("together", "late"):
                    clipping = GroupedClipping(
                        engine.module.canonical_parameters,
                        rules[kind],
                        sets[kind],
                        comm,
                        engine.optimizer,
                    )
                    calls, sent = comm.num_sums.total(), comm.sent_bytes
                    dist.barrier()
                    start = time.perf_counter()
                    if when == "late" and "text" in engine.place.tail_of:
                        time.sleep(LATE_S)
                    clipping.clip()
                    if number >= WARMUP_ROUNDS:
                        result[kind][when].append(time.perf_counter() - start)
                    result[kind]["calls"], result[kind]["bytes"] = (
                        comm.num_sums.total() - calls,
                        comm.sent_bytes - sent,
                    )

    engine.basic_optimizer.register_step_pre_hook(clip_both)
    torch.set_num_threads(1)
    engine.train_batch(micro_batches(setup, engine, 0))
    return result


def report(lines: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: a row for each line and kind, times in milliseconds as median (least – most)."""
    text = [
        "# Clipping by group against one global norm",
        "",
        f"{SETUP.describe()}; three ranks, {len(next(iter(lines.values()))[0]['global']['late'])} "
        "rounds in turn.",
        "",
        "| line | clipped | rank-calls | bytes sent | slowest rank, ms | image 0 when text 0 is "
        f"{1000 * LATE_S:.0f} ms late, ms |",
        "|---|---|---|---|---|---|",
    ]
    verdicts = []
    for line, ranks in lines.items():
        together = {
            kind: [max(times) for times in zip(*(rank[kind]["together"] for rank in ranks))]
            for kind in BLOCKS
        }
        late = {kind: ranks[0][kind]["late"] for kind in BLOCKS}
        for kind in BLOCKS:
            calls, sent = (sum(rank[kind][what] for rank in ranks) for what in ("calls", "bytes"))
            text.append(
                f"| {line} | {kind} | {calls} | {sent:.0f} | {_spread(together[kind], 1e3)} | "
                f"{_spread(late[kind], 1e3)} |"
            )
        for what, times in (("together", together), ("late, on image 0", late)):
            ratios = [g / own for own, g in zip(times["by group"], times["global"])]
            verdicts.append(f"- {line}, {what}: global ÷ by group **{_spread(ratios)}**")
    return "\n".join([*text, "", *verdicts]) + "\n"


def _spread(values: list[float], scale: float = 1.0) -> str:
    return f"{scale * statistics.median(values):.2f} ({scale * min(values):.2f} – {scale * max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds",
        type=int,
        default=30,
        metavar="N",
        help="times each kind clips, in turn (default: 30)",
    )
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    from ranks import run_ranks
    from tqdm import tqdm

    import bench.clipping as this  # so that the ranks find `measure` by name

    lines = {
        name: run_ranks(3, this.measure, *line, arguments.rounds, timeout_s=600)
        for name, line in tqdm(LINES.items(), unit="line")
    }
    text = report(lines)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "clipping.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
