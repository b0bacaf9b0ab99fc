"""Every way to split the same training, side by side: samples/s, memory, bytes sent, loss; each as
a ratio to plain DDP.

    python bench/strategies.py                  writes bench/out/strategies.md and bench/out/strategies.png
    python bench/strategies.py --ranks 3 --global-batch 96 --only ddp,fork-unequal-batch_sync

The aim that it examines: on two ranks of one thread, a fork trains at least 1.1 × as many samples/s
as DDP, with at most 0.65 of its peak memory per rank, at the same global batch.

The towers. Both are transformers of width 384 and depth 6, each about 10.7 M parameters, and about
as many tokens per sample (37 patches, 32 words): one core takes about as long for an image as for a
text, so that no branch of the fork waits for the other. The text tower has a real vocabulary
besides, 30,522 words (BERT's), 11.7 M parameters more, because that is what text towers have: it
makes the text rank the one with the most memory and the longest optimizer step. DDP averages the
gradients of all 33 M parameters and steps all of them on every rank; a rank of the fork has one
tower and averages nothing. How much that matters depends on the tokens per rank and step: here some
2,000, few beside what a GPU is given, and that is kind to the fork. `--global-batch` changes it.

Strategies are measured in turn, each time in fresh processes, so that what else the machine does
hits all alike. Ratios are taken within a round. Tensor bytes come from a run of their own
(`bench/memory_probe.py`), since recording them slows a step down.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # with ranks.py
OUT = ROOT / "bench" / "out"

from bench.common import Setup, make_engine, micro_batches, samples
from bench.memory_probe import ProcessGrowth, TensorBytes

SETUP = Setup(
    image_tower="vit_b_16:hidden_dim=384,num_layers=6,num_heads=6,mlp_dim=1536,patch_size=8",
    image_size=48,
    text_tower="bert-mini:hidden_size=384,num_attention_heads=6,intermediate_size=1536,num_hidden_layers=6,"
    # without dropout all exact strategies have the same loss
    "hidden_dropout_prob=0,attention_probs_dropout_prob=0",
    num_tokens=32,
    vocab_size=30522,
    embed_dim=256,
    global_batch_size=64,
    micro_batch_size=16,
)
WARMUP_STEPS = 1
MIB = 2**20


@dataclass(frozen=True)
class Strategy:
    """`branches`: the engine's block; None: a baseline. `skip`: why it cannot run on this many
    ranks."""

    name: str
    branches: Mapping[str, Any] | None = None
    skip: str = ""

    @property
    def note(self) -> str:
        return " (another objective)" if "per_micro_batch" in self.name else ""


def strategies(setup: Setup, ranks: int) -> list[Strategy]:
    """All of them, in the order of the table."""
    num_micro_batches = (
        setup.global_batch_size // setup.micro_batch_size // (ranks // 2)
    )  # of the fork with equal replicas
    half, uneven = ranks // 2, {"image": ranks - ranks // 2, "text": ranks // 2}
    layouts = {
        "chain": {"layout": "chain", "stages": uneven, "replicas": 1},
        "fork-equal": {
            "layout": "fork",
            "stages": {"image": 1, "text": 1},
            "replicas": {"image": half, "text": half},
        },
        "fork-unequal": {
            "layout": "fork",
            "stages": {"image": 1, "text": 1},
            "replicas": {"image": ranks - 1, "text": 1},
        },
        "merged-replicas": {"layout": "merged", "stages": {"merged": 1}, "replicas": ranks},
        "merged-stages": {"layout": "merged", "stages": {"merged": ranks}, "replicas": 1},
    }
    skips = {
        "fork-equal": "needs an even number of ranks" if ranks % 2 else "",
        "fork-unequal": "needs three ranks: --ranks 3" if ranks < 3 else "",
    }
    return [
        Strategy("ddp"),
        Strategy("ddp_cached"),
        *(
            Strategy(f"{name}-{schedule}", {**block, "schedule": schedule}, skips.get(name, ""))
            for name, block in layouts.items()
            for schedule in ("batch_sync", "replay")
        ),
        *(
            Strategy(
                f"fork-equal-replay-{word}",
                {**layouts["fork-equal"], "schedule": "replay", "kept_micro_batches": kept},
                skips["fork-equal"],
            )
            for word, kept in (
                ("half-kept", num_micro_batches // 2),
                ("most-kept", num_micro_batches - 1),
            )
        ),
        Strategy(
            "merged-replicas-per_micro_batch",
            {**layouts["merged-replicas"], "schedule": "per_micro_batch"},
        ),
    ]


# -- on each rank


class Run:
    """One strategy, ready to step."""

    def __init__(self, setup: Setup, strategy: Strategy):
        import torch
        import torch.distributed as dist

        from bench.baselines import Baseline, TwoTowers

        self.setup, self.world_size, self.num_steps = setup, dist.get_world_size(), 0
        self.bubbles: list[float] = []
        self.engine = self.baseline = None
        if strategy.branches is not None:
            self.engine = make_engine(setup, strategy.branches)
            return
        towers = setup.towers
        self.positions = torch.arange(setup.global_batch_size).view(self.world_size, -1)[
            dist.get_rank()
        ]
        self.baseline = Baseline(
            TwoTowers(towers["image"].specs, towers["text"].specs, setup.seed),
            setup.lr,
            setup.weight_decay,
            setup.max_grad_norm,
            setup.micro_batch_size if strategy.name == "ddp_cached" else None,
        )

    def step(self) -> float:
        """One optimizer step. Returns the loss over the global batch."""
        setup, number = self.setup, self.num_steps
        self.num_steps += 1
        if self.baseline is not None:
            self.sent_bytes = self.baseline.sent_bytes(setup.global_batch_size, setup.embed_dim)
            return self.baseline.train_batch(
                samples(setup, "image", number, self.positions)
                | samples(setup, "text", number, self.positions)
            )
        metrics = self.engine.train_batch(micro_batches(setup, self.engine, number))
        graph = self.engine.graph
        self.bubbles.append(
            sum(metrics.idle[s.name] * s.replicas for s in graph.stages) / graph.world_size
        )
        self.sent_bytes = metrics.sent_bytes / self.world_size
        return metrics.loss


def measure(setup: Setup, strategy: Strategy, steps: int) -> dict[str, Any]:
    """On each rank: time of a step, and what else a step tells."""
    import torch.distributed as dist

    growth = ProcessGrowth()
    run = Run(setup, strategy)
    for _ in range(WARMUP_STEPS):
        run.step()
    run.bubbles.clear()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        loss = run.step()
    step_s = (time.perf_counter() - start) / steps
    return {
        "step_s": step_s,
        "loss": loss,
        "bubble": statistics.mean(run.bubbles) if run.bubbles else None,
        "sent_bytes": run.sent_bytes,
        "process_bytes": growth.peak_bytes(),
    }


def measure_tensors(setup: Setup, strategy: Strategy) -> int:
    """On each rank: the most bytes of tensors held in a step after the first."""
    with TensorBytes() as probe:
        run = Run(setup, strategy)
        run.step()
        probe.mark()
        run.step()
    return probe.peak_bytes


# -- the report


@dataclass(frozen=True)
class Result:
    """One strategy over all rounds: `ratios` to DDP's samples/s, round by round; memory of the rank
    that needs most."""

    strategy: Strategy
    samples_per_s: float
    ratios: Sequence[float]
    step_s: float
    bubble: float | None
    process_bytes: int
    tensor_bytes: int
    sent_bytes: float
    loss: float


def summarise(
    setup: Setup, strategy: Strategy, rounds: Sequence[Mapping[str, list[dict]]], tensor_bytes: int
) -> Result:
    """`rounds[i][name]` is what the ranks returned."""
    steps = [max(rank["step_s"] for rank in one[strategy.name]) for one in rounds]
    ddp = (
        [max(rank["step_s"] for rank in one["ddp"]) for one in rounds] if "ddp" in rounds[0] else []
    )
    ranks = [rank for one in rounds for rank in one[strategy.name]]
    bubbles = [rank["bubble"] for rank in ranks if rank["bubble"] is not None]
    step_s = statistics.median(steps)
    return Result(
        strategy=strategy,
        samples_per_s=setup.global_batch_size / step_s,
        ratios=[theirs / ours for theirs, ours in zip(ddp, steps)],
        step_s=step_s,
        bubble=statistics.median(bubbles) if bubbles else None,
        process_bytes=max(rank["process_bytes"] for rank in ranks),
        tensor_bytes=tensor_bytes,
        sent_bytes=statistics.mean(rank["sent_bytes"] for rank in rounds[-1][strategy.name]),
        loss=ranks[-1]["loss"],
    )


def report(
    setup: Setup,
    ranks: int,
    num_rounds: int,
    steps: int,
    results: Sequence[Result],
    skipped: Sequence[Strategy],
) -> str:
    """Markdown."""
    ddp = next((r for r in results if r.strategy.name == "ddp"), None)
    lines = [
        "# Every way to split the same training",
        "",
        f"{setup.describe()}; {ranks} ranks, {num_rounds} rounds in turn of {WARMUP_STEPS} + "
        f"{steps} steps; ZeRO-{setup.zero_stage} in the engine where a stage has replicas; "
        f"gradients clipped at {setup.max_grad_norm} by group in all.",
        "",
        "| strategy | samples/s | ÷ ddp: median (least – most) | step, ms | bubble | peak tensor "
        "MiB per rank | ÷ ddp | process growth MiB per rank | ÷ ddp | sent MiB per step and rank "
        f"| loss after {WARMUP_STEPS + steps} steps |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(_row(result, ddp) for result in results),
        *(f"| {s.name} | skipped: {s.skip} |" + " |" * 9 for s in skipped),
        "",
        "Bubble: mean over steps and ranks of the part of a step in which a rank does not "
        "compute. Memory: the rank that needs most; process growth is the most over the rounds. "
        "Sent bytes count collectives as rings; for the baselines by formula "
        "(`Baseline.sent_bytes`).",
        *_aim(results, ddp),
    ]
    return "\n".join(lines) + "\n"


def _row(r: Result, ddp: Result | None) -> str:
    spread = (
        f"{statistics.median(r.ratios):.2f} ({min(r.ratios):.2f} – {max(r.ratios):.2f})"
        if r.ratios
        else "–"
    )
    cells = [
        r.strategy.name + r.strategy.note,
        f"{r.samples_per_s:.1f}",
        spread,
        f"{1000 * r.step_s:.0f}",
        "–" if r.bubble is None else f"{r.bubble:.1%}",
        f"{r.tensor_bytes / MIB:.0f}",
        f"{r.tensor_bytes / ddp.tensor_bytes:.2f}" if ddp else "–",
        f"{r.process_bytes / MIB:.0f}",
        f"{r.process_bytes / ddp.process_bytes:.2f}" if ddp else "–",
        f"{r.sent_bytes / MIB:.1f}",
        f"{r.loss:.5f}",
    ]
    return f"| {' | '.join(cells)} |"


def _aim(results: Sequence[Result], ddp: Result | None) -> list[str]:
    """Each fork against the aim."""
    if ddp is None:
        return []
    lines = ["", "The aim, at least 1.1 × the samples/s at most 0.65 of the tensor bytes:", ""]
    for r in results:
        if r.strategy.name.startswith("fork"):
            speed, memory = statistics.median(r.ratios), r.tensor_bytes / ddp.tensor_bytes
            verdicts = (
                f"{'met' if speed >= 1.1 else 'missed'} at {speed:.2f}",
                f"{'met' if memory <= 0.65 else 'missed'} at {memory:.2f}",
            )
            lines.append(f"- {r.strategy.name}: samples/s {verdicts[0]}, memory {verdicts[1]}")
    return lines if len(lines) > 3 else []


def plot(results: Sequence[Result], path: Path) -> None:
    """Two panels: samples/s against DDP with the spread, tensor bytes per rank."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [r.strategy.name + r.strategy.note for r in results]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(13, 0.42 * len(names) + 1.6), sharey=True, layout="constrained"
    )
    colours = [
        "tab:grey"
        if r.strategy.branches is None
        else "tab:blue"
        if "fork" in r.strategy.name
        else "tab:olive"
        for r in results
    ]
    if all(r.ratios for r in results):
        medians = [statistics.median(r.ratios) for r in results]
        spread = [
            [m - min(r.ratios) for m, r in zip(medians, results)],
            [max(r.ratios) - m for m, r in zip(medians, results)],
        ]
        left.barh(names, medians, xerr=spread, color=colours, capsize=3)
        left.axvline(1, color="black", linewidth=0.8)
    left.set_xlabel("samples/s ÷ samples/s of ddp: median, least, most")
    right.barh(names, [r.tensor_bytes / MIB for r in results], color=colours)
    right.set_xlabel("peak tensor bytes of the rank that needs most, MiB")
    left.invert_yaxis()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def save_plot(draw, *arguments: Any) -> None:
    """The table is there without matplotlib; the plot is not."""
    try:
        draw(*arguments)
    except ImportError:
        print("no plot: pip install matplotlib", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        metavar="N",
        help="times every strategy is measured, in turn (default: 5)",
    )
    parser.add_argument(
        "--steps", type=int, default=6, metavar="N", help="steps per measurement (default: 6)"
    )
    parser.add_argument(
        "--micro-batch-size",
        type=int,
        default=SETUP.micro_batch_size,
        metavar="N",
        help="samples (default: %(default)s)",
    )
    parser.add_argument(
        "--global-batch",
        type=int,
        default=SETUP.global_batch_size,
        metavar="N",
        help="samples (default: %(default)s)",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=2,
        metavar="N",
        help="processes of one thread each, at least 2 (default: 2)",
    )
    parser.add_argument(
        "--only", metavar="NAME[,NAME]", help="these strategies only; ratios need ddp among them"
    )
    arguments = parser.parse_args()
    setup = replace(
        SETUP, micro_batch_size=arguments.micro_batch_size, global_batch_size=arguments.global_batch
    )
    asked = strategies(setup, max(2, arguments.ranks))
    known = [s.name for s in asked]
    if arguments.ranks < 2 or arguments.rounds < 1 or arguments.steps < 1:
        parser.error("--ranks must be at least 2, --rounds and --steps at least 1")
    if setup.global_batch_size % (arguments.ranks * setup.micro_batch_size):
        parser.error(
            f"--global-batch {setup.global_batch_size} is not a multiple of {arguments.ranks} "
            f"ranks × micro-batches of {setup.micro_batch_size}; use "
            f"{arguments.ranks * setup.micro_batch_size * max(1, round(setup.global_batch_size / arguments.ranks / setup.micro_batch_size))}"
        )
    if arguments.only:
        wanted = arguments.only.split(",")
        unknown = [name for name in wanted if name not in known]
        if unknown:
            parser.error(f"--only {','.join(unknown)}: not among {', '.join(known)}")
        asked = [s for s in asked if s.name in wanted]
    runnable, skipped = [s for s in asked if not s.skip], [s for s in asked if s.skip]
    if not runnable:
        parser.error("; ".join(f"{s.name} {s.skip}" for s in skipped))
    run_all(
        setup,
        arguments.ranks,
        arguments.rounds,
        steps=arguments.steps,
        runnable=runnable,
        skipped=skipped,
    )


def run_all(
    setup: Setup,
    ranks: int,
    num_rounds: int,
    steps: int,
    runnable: Sequence[Strategy],
    skipped: Sequence[Strategy],
    timeout_s: float = 900,
) -> None:
    from ranks import run_ranks
    from tqdm import tqdm

    import bench.strategies as this  # so that the ranks find the functions by name

    there = {s.name: s for s in this.strategies(setup, ranks)}  # theirs, not __main__'s
    rounds, tensor_bytes = [], {}
    with tqdm(total=len(runnable) * (num_rounds + 1), unit="run") as bar:
        for number in range(num_rounds + 1):
            results = {}
            for strategy in (there[s.name] for s in runnable):
                bar.set_postfix_str(strategy.name)
                if number == num_rounds:
                    tensor_bytes[strategy.name] = max(
                        run_ranks(ranks, this.measure_tensors, setup, strategy, timeout_s=timeout_s)
                    )
                else:
                    results[strategy.name] = run_ranks(
                        ranks, this.measure, setup, strategy, steps, timeout_s=timeout_s
                    )
                bar.update()
            if results:
                rounds.append(results)
    summaries = [summarise(setup, s, rounds, tensor_bytes[s.name]) for s in runnable]
    text = report(setup, ranks, num_rounds, steps=steps, results=summaries, skipped=skipped)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "strategies.md").write_text(text, encoding="utf-8")
    print(text)
    save_plot(plot, summaries, OUT / "strategies.png")


if __name__ == "__main__":
    main()
