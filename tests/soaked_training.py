"""Training on each rank for the long tests: texts whose shapes vary, and lives that end early."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bench.towers import Setup, make_engine, micro_batches


@dataclass(frozen=True)
class VaryingSetup(Setup):
    """Texts are cut to a length that changes with step and micro-batch."""

    def inputs(self, branch: str, indices: Sequence[int]) -> dict[str, Tensor]:
        length = 9 + indices[0] * 5 % 24
        found = super().inputs(branch, indices)
        return found if branch == "image" else {n: t[:, :length] for n, t in found.items()}


VARYING = VaryingSetup(
    image_tower="vit_b_16:hidden_dim=48,num_heads=4,num_layers=4,mlp_dim=64,patch_size=8",
    image_size=32,
    text_tower="bert-tiny:hidden_size=48,intermediate_size=64,num_hidden_layers=4",
    num_tokens=32,
    vocab_size=128,
    embed_dim=24,
    global_batch_size=96,
    micro_batch_size=3,
    num_batches=2,
)
SMALL = Setup(
    image_tower="vit_b_16:hidden_dim=96,num_heads=4,num_layers=3,mlp_dim=192,patch_size=8,"
    "dropout=0.1",
    image_size=32,
    text_tower="bert-tiny:hidden_size=96,intermediate_size=192,num_hidden_layers=3",
    num_tokens=16,
    vocab_size=1000,
    embed_dim=32,
    global_batch_size=8,
    micro_batch_size=2,
)
THREE_RANKS = {
    "layout": "fork",
    "stages": {"image": 1, "text": 1},
    "replicas": {"image": 1, "text": 2},
}


def train(branches: Mapping[str, Any], steps: int) -> list[float]:
    """The losses."""
    engine = make_engine(VARYING, {**branches, "schedule": "replay"})
    return [engine.train_batch(micro_batches(VARYING, engine, step)).loss for step in range(steps)]


def live(folder: Path, num_steps: int, save_every: int, victim: int | None, after_s: float) -> str:
    """Go on from the newest checkpoint to step `num_steps`, unless the rank `victim` dies `after_s`
    seconds after its first step; the parameters' digest. Each rank logs its steps beside
    `folder`."""
    from engine.checkpoint.retention import Keep
    from engine.checkpoint.together import CheckpointWriter, load_checkpoint
    from launch.run.resuming import find_checkpoint

    engine = make_engine(SMALL, THREE_RANKS)
    checkpoint, _ = find_checkpoint("auto", folder)
    step = load_checkpoint(engine, checkpoint)[0]["step"] if checkpoint else 0
    writer = CheckpointWriter(folder, {}, Keep(2))
    log = (folder.parent / f"steps-{engine.comm.rank}").open("a", encoding="utf-8", buffering=1)
    log.write(f"from {step}\n")
    if victim == engine.comm.rank:
        threading.Thread(target=_die, args=(after_s,), daemon=True).start()
    while step < num_steps:
        engine.train_batch(micro_batches(SMALL, engine, step))
        step = engine.global_steps
        log.write(f"{step}\n")
        if step % save_every == 0 or step == num_steps:
            writer.save(engine, {"step": step})
    writer.finish()
    digest = hashlib.blake2b()
    for name, parameter in sorted(engine.module.canonical_parameters.items()):
        digest.update(name.encode() + parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def _die(after_s: float) -> None:
    time.sleep(after_s)
    os.kill(os.getpid(), signal.SIGKILL)


def lost_steps(log: Path) -> list[int]:
    """Of each life but the last: how many steps that it had done were not in what the next one went
    on from."""
    lost, reached = [], 0
    for line in log.read_text(encoding="utf-8").splitlines():
        if line.startswith("from "):
            lost.append(reached - int(line.removeprefix("from ")))
        else:
            reached = int(line)
    return lost[1:]
