"""A training step of synthetic towers under a block `branches`: its seconds, memory, messages and
loss.

    python bench/steps.py STUDY --rounds 5        writes bench/out/steps-STUDY.md and prints it

The studies are tables of such blocks. Each way is measured in turn in fresh processes of one thread
each. Tensor bytes come from a run of their own (`bench/memory_probe.py`), because recording them
slows a step down.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import MIB, Column, Figures, Study, Way, main, on_ranks
from bench.memory_probe import ProcessGrowth, TensorBytes
from bench.towers import Setup, make_engine, micro_batches, samples

WARMUP_STEPS = 1
# Where the time of a step goes, by instruction; the rest is messages and waiting for them.
PARTS = {
    "tower": ("ForwardPass", "EmbedPass", "ReplayPass", "BackwardPass"),
    "loss_and_wait": ("ComputeLoss",),
    "optimizer": ("ReduceGrads", "OptimizerStep"),
}


@dataclass(frozen=True)
class Run:
    """`branches`: the engine's block; None: plain PyTorch (`bench/baselines.py`), with gradients
    `cached` or not."""

    setup: Setup
    branches: Mapping[str, Any] | None
    ranks: int = 2
    cached: bool = False


# -- on each rank


class Training:
    """The training of a run on this rank, ready to step."""

    def __init__(self, run: Run):
        self.run, self.number, self.idle = run, 0, []
        self.engine = self.baseline = None
        if run.branches is not None:
            self.engine = make_engine(run.setup, run.branches)
            self.stage = self.engine.stage.name
        else:
            self.baseline, self.stage = self._make_baseline(), "ddp"

    def _make_baseline(self) -> Any:
        from bench.baselines import Baseline, TwoTowers

        setup, towers = self.run.setup, self.run.setup.towers
        return Baseline(
            TwoTowers(towers["image"].specs, towers["text"].specs, setup.seed),
            setup.lr,
            setup.weight_decay,
            setup.max_grad_norm,
            setup.micro_batch_size if self.run.cached else None,
        )

    def batch(self) -> Any:
        """What is loaded for the next step: of the engine, micro-batches that are made when they
        are asked for, or None."""
        import torch
        import torch.distributed as dist

        if self.engine is not None:
            return micro_batches(self.run.setup, self.engine, self.number)
        places = torch.arange(self.run.setup.global_batch_size).view(dist.get_world_size(), -1)
        return {
            name: tensor
            for branch in ("image", "text")
            for name, tensor in samples(
                self.run.setup, branch, self.number, places[dist.get_rank()]
            ).items()
        }

    def step(self, batch: Any) -> None:
        import torch.distributed as dist

        self.number += 1
        if self.engine is None:
            setup = self.run.setup
            self.sent_bytes = self.baseline.sent_bytes(setup.global_batch_size, setup.embed_dim)
            self.loss = self.baseline.train_batch(batch)
            return
        metrics = self.engine.train_batch(batch)
        self.loss, self.sent_bytes = metrics.loss, metrics.sent_bytes / dist.get_world_size()
        self.idle.append(dict(metrics.idle))


def measure(run: Run, steps: int) -> dict[str, Any]:
    import torch.distributed as dist

    growth, seconds, loaded = ProcessGrowth(), [], []
    training = Training(run)
    for number in range(WARMUP_STEPS + steps):
        if number == WARMUP_STEPS and training.engine is not None:
            training.idle.clear()
            training.engine.instruction_seconds.clear()
        batch = training.batch()
        if training.engine is not None and batch is not None:
            loaded = list(batch)
            batch = iter(loaded)
        dist.barrier()
        start = time.perf_counter()
        training.step(batch)
        seconds.append(time.perf_counter() - start)
    spent = {} if training.engine is None else training.engine.instruction_seconds
    return {
        "stage": training.stage,
        "seconds": seconds[WARMUP_STEPS:],
        "spent": {name: value / steps for name, value in spent.items()},
        "idle": training.idle,
        "loss": training.loss,
        "sent_bytes": training.sent_bytes,
        "process_bytes": growth.peak_bytes(),
        "loaded_bytes": sum(tensor.nbytes for each in loaded for tensor in each.values()),
    }


def peak_tensor_bytes(run: Run) -> tuple[str, int]:
    """The most bytes of tensors held in a step after the first."""
    with TensorBytes() as probe:
        training = Training(run)
        training.step(training.batch())
        probe.mark()
        training.step(training.batch())
    return training.stage, probe.peak_bytes


# -- figures of a run


def figures_of(run: Run, steps: int) -> Figures:
    """Of the slowest rank; what differs by stage as a list."""
    ranks = on_ranks(run.ranks, measure, run, steps)
    step_s = statistics.median(max(each) for each in zip(*(rank["seconds"] for rank in ranks)))
    found = {
        "step_s": step_s,
        "samples_per_s": run.setup.global_batch_size / step_s,
        "loss": ranks[0]["loss"],
        "sent_bytes": statistics.mean(rank["sent_bytes"] for rank in ranks),
        "process_bytes": _by_stage(ranks, lambda rank: rank["process_bytes"]),
        "loaded_bytes": _by_stage(ranks, lambda rank: rank["loaded_bytes"]),
    }
    if run.branches is not None:
        found["bubble"] = statistics.mean(one[r["stage"]] for r in ranks for one in r["idle"])
        for part, names in PARTS.items():
            found[part] = _by_stage(
                ranks, lambda rank, own=names: sum(rank["spent"].get(n, 0) for n in own) / step_s
            )
    return found


def _by_stage(ranks: Sequence[Any], of: Callable[[Any], float]) -> list[float]:
    """Of the ranks of each stage the most."""
    stage_of = [rank["stage"] if isinstance(rank, dict) else rank[0] for rank in ranks]
    return [
        max(of(rank) for rank, own in zip(ranks, stage_of) if own == stage)
        for stage in dict.fromkeys(stage_of)
    ]


def tensors(run: Run) -> Figures:
    ranks = on_ranks(run.ranks, peak_tensor_bytes, run)
    return {"tensor_bytes": _by_stage(ranks, lambda rank: rank[1])}


# -- the studies


def fork(image: int = 1, text: int = 1, replicas: tuple[int, int] = (1, 1)) -> dict[str, Any]:
    """The block of a fork with as many stages."""
    return {
        "layout": "fork",
        "stages": {"image": image, "text": text},
        "replicas": dict(zip(("image", "text"), replicas)),
    }


def merged(stages: int, replicas: int) -> dict[str, Any]:
    return {"layout": "merged", "stages": {"merged": stages}, "replicas": replicas}


NO_DROPOUT = ",hidden_dropout_prob=0,attention_probs_dropout_prob=0"
# Both towers are transformers of width 384 and depth 6 and take about as many tokens of a sample
# (37 patches, 32 words), so that neither branch of a fork waits for the other. The text tower has a
# real vocabulary besides (BERT's, 11.7 M parameters), because that is what text towers have. With
# the 2,000 tokens of a rank and step, averaging gradients weighs more than it would on a GPU, which
# is kind to the fork.
STRATEGIES = Setup(
    image_tower="vit_b_16:hidden_dim=384,num_layers=6,num_heads=6,mlp_dim=1536,patch_size=8",
    image_size=48,
    text_tower="bert-mini:hidden_size=384,num_attention_heads=6,intermediate_size=1536,"
    f"num_hidden_layers=6{NO_DROPOUT}",
    num_tokens=32,
    vocab_size=30522,
    embed_dim=256,
)
VIT = Setup(
    image_tower="vit_b_16:hidden_dim=192,num_layers=6,num_heads=3,mlp_dim=768,patch_size=8",
    image_size=64,
    text_tower="bert-mini:hidden_size=192,num_attention_heads=3,intermediate_size=768,"
    "num_hidden_layers=6",
    num_tokens=60,
    vocab_size=2048,
    num_batches=1,
)
MEMORY = Setup(
    image_tower="vit_b_16:hidden_dim=256,num_layers=8,num_heads=4,mlp_dim=1024,patch_size=8",
    image_size=32,
    text_tower="bert-mini:hidden_size=256,num_attention_heads=4,intermediate_size=1024,"
    f"num_hidden_layers=6{NO_DROPOUT}",
    num_tokens=17,
    vocab_size=8192,
    global_batch_size=16,
    micro_batch_size=8,
    num_batches=1,
)


def strategies(
    steps: int = 6, ranks: int = 2, global_batch: int = 64, micro_batch: int = 16
) -> Study:
    """DDP and every layout and schedule: a fork with batch_sync is a little faster than DDP, since
    it averages no gradients and steps one tower a rank, at about two thirds of its memory. The aim
    is 1.1 × the samples/s at 0.65 of the tensor bytes."""
    if ranks < 2 or global_batch % (ranks * micro_batch):
        raise ValueError(
            f"--ranks {ranks} must be at least 2, and --global-batch {global_batch} a multiple of "
            f"--ranks × --micro-batch, {ranks * micro_batch}"
        )
    setup = replace(STRATEGIES, global_batch_size=global_batch, micro_batch_size=micro_batch)
    half = ranks // 2
    blocks = {
        "fork-unequal": fork(replicas=(ranks - 1, 1)),
        "fork-equal": fork(replicas=(half, half)),
        "merged-replicas": merged(1, ranks),
        "merged-stages": merged(ranks, 1),
    }
    if ranks % 2:
        del blocks["fork-equal"]
    if ranks == 2 or global_batch % ((ranks - 1) * micro_batch):
        del blocks["fork-unequal"]
    runs = {"ddp": Run(setup, None, ranks), "ddp_cached": Run(setup, None, ranks, cached=True)}
    for name, block in blocks.items():
        for schedule in ("batch_sync", "replay"):
            runs[f"{name}-{schedule}"] = Run(setup, {**block, "schedule": schedule}, ranks)
    if ranks % 2 == 0:
        number = global_batch // micro_batch // half
        for word, kept in (("half", number // 2), ("most", number - 1)):
            block = {**blocks["fork-equal"], "schedule": "replay", "kept_micro_batches": kept}
            runs[f"fork-equal-replay-{word}-kept"] = Run(setup, block, ranks)
    other = "merged-replicas-per_micro_batch"
    block = {**blocks["merged-replicas"], "schedule": "per_micro_batch"}
    runs[other] = Run(setup, block, ranks)
    return Study(
        "Every way to split the same training",
        {
            name: Way(partial(figures_of, run, steps), partial(tensors, run), exact=name != other)
            for name, run in runs.items()
        },
        (
            Column("samples_per_s", "samples/s", "{:.1f}"),
            Column("step_s", "÷ ddp", inverse=True),
            Column("bubble", "idle", "{:.1%}"),
            Column("tensor_bytes", "peak tensor MiB of a rank", "{:.0f}", 1 / MIB, pick=max),
            Column("tensor_bytes", "÷ ddp", pick=max),
            Column("process_bytes", "process growth MiB", "{:.0f}", 1 / MIB, pick=max),
            Column("process_bytes", "÷ ddp", pick=max),
            Column("sent_bytes", "sent MiB a step and rank", "{:.1f}", 1 / MIB),
            Column("loss", f"loss after {WARMUP_STEPS + steps} steps", "{:.5f}"),
        ),
        f"{setup.describe()} {ranks} ranks. Memory is that of the rank that needs most; what is "
        "sent counts collectives as rings.",
        reference="ddp",
        rounds=5,
        equal=("loss", 1e-5),
    )


def split(steps: int = 12, micro_batch: int = 32) -> Study:
    """Two ranks with a tower each against one rank with both: 1.8 × as fast. 2.0 is perfect; the
    branches wait for each other at the loss, and the cores share a memory bus."""
    image, text = (
        tower.replace("layers=6", "layers=4") for tower in (VIT.image_tower, VIT.text_tower)
    )
    setup = replace(
        VIT,
        image_tower=image,
        text_tower=text,
        micro_batch_size=micro_batch,
        max_grad_norm=0.0,
    )
    runs = {"single": Run(setup, merged(1, 1), ranks=1), "fork": Run(setup, fork())}
    return Study(
        "Two ranks, a tower each, against one rank with both towers",
        {name: Way(partial(figures_of, run, steps)) for name, run in runs.items()},
        (
            Column("step_s", "step, ms", "{:.0f}", 1e3),
            Column("step_s", "÷ single, speed", inverse=True),
            Column("tower", "forward + backward", "{:.1%}"),
            Column("loss_and_wait", "loss and waiting for it", "{:.1%}"),
            Column("optimizer", "optimizer", "{:.1%}"),
        ),
        f"{setup.describe()} Shares of the fork: image rank / text rank.",
        reference="single",
        rounds=5,
    )


def memory(points: Sequence[int] = (4, 8, 16, 32, 64)) -> Study:
    """Peak memory as micro-batches get more: under replay within 5 % from 8 to 64, under batch_sync
    in proportion. What is loaded waits in host memory, which on a CPU is the memory measured."""
    ways = {}
    for schedule in ("replay", "batch_sync"):
        for number in points:
            setup = replace(MEMORY, global_batch_size=MEMORY.micro_batch_size * number)
            run = Run(setup, {**fork(), "schedule": schedule})
            against = f"{schedule}, 8" if 8 in points else None
            ways[f"{schedule}, {number}"] = Way(
                partial(figures_of, run, 1), partial(tensors, run), against
            )
    return Study(
        "Peak memory against the number of micro-batches",
        ways,
        (
            Column("tensor_bytes", "peak tensor MiB", "{:.1f}", 1 / MIB),
            Column("tensor_bytes", "÷ that of 8"),
            Column("process_bytes", "process growth MiB", "{:.1f}", 1 / MIB),
            Column("process_bytes", "÷ that of 8"),
            Column("loaded_bytes", "of these loaded inputs MiB", "{:.1f}", 1 / MIB),
        ),
        MEMORY.describe().replace("global batch 16", "as many micro-batches as stand there")
        + " Image rank / text rank.",
        rounds=1,
    )


STUDIES = (strategies, split, memory)

if __name__ == "__main__":
    main("bench.steps")
