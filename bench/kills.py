"""Ranks killed at random moments, again and again: does a run lose more than it must, and does it
end where an undisturbed one ends?

    python bench/kills.py             writes bench/out/kills.md and prints it

A fork of one image stage and one text stage with two replicas, ZeRO-1, dropout on. Each life goes
on from the newest whole checkpoint, saves every few steps in the background, and ends when one of
its ranks, drawn by chance, kills itself at a moment drawn by chance: in a step, in the copy, while
files are written, while they are renamed. Only kernel and file system are left to tidy up. The last
life is not disturbed; its parameters are compared bit by bit with those of a run that never was.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # with ranks.py
OUT = ROOT / "bench" / "out"

from bench.common import Setup, make_engine, micro_batches

SETUP = Setup(
    image_tower="vit_b_16:hidden_dim=96,num_heads=4,num_layers=3,mlp_dim=192,patch_size=8,dropout=0.1",
    image_size=32,
    text_tower="bert-tiny:hidden_size=96,intermediate_size=192,num_hidden_layers=3",
    num_tokens=16,
    vocab_size=1000,
    embed_dim=32,
    global_batch_size=8,
    micro_batch_size=2,
)
BRANCHES = {
    "layout": "fork",
    "stages": {"image": 1, "text": 1},
    "replicas": {"image": 1, "text": 2},
}
WORLD_SIZE = 3


def live(folder: Path, num_steps: int, save_every: int, victim: int | None, after_s: float) -> str:
    """On each rank: go on to step `num_steps`, unless the rank `victim` dies `after_s` seconds
    after its first step; the parameters' digest."""
    from engine.checkpoint.retention import Keep
    from engine.checkpoint.together import CheckpointWriter, load_checkpoint
    from launch.run.resuming import find_checkpoint

    engine = make_engine(SETUP, BRANCHES)
    checkpoint, _ = find_checkpoint("auto", folder)
    step = load_checkpoint(engine, checkpoint)[0]["step"] if checkpoint else 0
    writer = CheckpointWriter(folder, {}, Keep(2))
    log = (folder.parent / f"steps-{engine.comm.rank}").open("a", encoding="utf-8", buffering=1)
    log.write(f"from {step}\n")
    if victim == engine.comm.rank:
        threading.Thread(target=_die, args=(after_s,), daemon=True).start()
    while step < num_steps:
        engine.train_batch(micro_batches(SETUP, engine, step))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--kills", type=int, default=100, metavar="N", help="lives that end early (default: 100)"
    )
    parser.add_argument(
        "--save-every",
        type=int,
        default=3,
        metavar="N",
        help="steps between checkpoints (default: 3)",
    )
    parser.add_argument(
        "--longest",
        type=float,
        default=3.0,
        metavar="S",
        help="seconds a life may last before it ends (default: 3.0)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of moments and victims (default: 0)"
    )
    arguments = parser.parse_args()
    from ranks import run_ranks
    from tqdm import tqdm

    from bench.kills import live  # so that the ranks find it by name
    from engine.checkpoint.layout import checkpoints_in
    from engine.processes.ops import compile_shared_memory_op

    compile_shared_memory_op()

    draw = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as temporary:
        disturbed, whole = (
            Path(temporary) / "disturbed" / "checkpoints",
            Path(temporary) / "whole" / "checkpoints",
        )
        for folder in (disturbed, whole):
            folder.mkdir(parents=True)
        endless, being_written = 10**9, 0
        for _ in tqdm(range(arguments.kills), unit="kill"):
            victim, after_s = draw.randrange(WORLD_SIZE), draw.uniform(0, arguments.longest)
            try:
                run_ranks(
                    WORLD_SIZE, live, disturbed, endless, arguments.save_every, victim, after_s
                )
            except RuntimeError as error:
                if f"rank {victim} ended without a result" not in str(
                    error
                ) and "onnection" not in str(error):
                    raise
            being_written += any(path.name.endswith(".writing") for path in disturbed.iterdir())
        lost = [
            steps
            for rank in range(WORLD_SIZE)
            for steps in lost_steps(disturbed.parent / f"steps-{rank}")
        ]
        reached = max(int(path.name.split("-")[1]) for path in checkpoints_in(disturbed))
        last = reached + arguments.save_every
        after_all = run_ranks(WORLD_SIZE, live, disturbed, last, arguments.save_every, None, 0.0)
        undisturbed = run_ranks(
            WORLD_SIZE, live, whole, last, arguments.save_every, None, 0.0, timeout_s=1800
        )
    rows = [
        f"{arguments.kills} lives of {WORLD_SIZE} ranks, each ended by SIGKILL of one of them; "
        f"{last} steps, a checkpoint every {arguments.save_every}.",
        "",
        "- lives that went on from a whole checkpoint, or from the beginning where there was none "
        f"yet: {arguments.kills} of {arguments.kills}",
        f"- steps lost by a kill: {sum(lost) / len(lost):.1f} on average, at most {max(lost)}",
        f"- kills that left a checkpoint half written: {being_written}",
        f"- parameters of all ranks at step {last}: "
        f"{'equal to the last bit' if after_all == undisturbed else 'DIFFERENT'}",
    ]
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "kills.md").write_text("\n".join(rows) + "\n", encoding="utf-8")
    print("\n".join(rows))
    if after_all != undisturbed:
        sys.exit(1)


if __name__ == "__main__":
    main()
