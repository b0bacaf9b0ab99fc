"""The command line of train.py, and the defaults that depend on what is trained."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from data.options import DataOptions
from launch.exported import options_of_export
from launch.loss_weights import MODES

if TYPE_CHECKING:
    from engine.config import BranchesBlock

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Options:
    """Everything the command line decides. Field names are the flags' names."""

    deepspeed_config: Path | None
    data: tuple[str, ...]
    data_weights: tuple[float, ...] | None
    data_temperature: float
    data_floors: tuple[float, ...] | None
    data_adapt: float
    val_data: str | None
    val_fraction: float
    limit_samples: int | None
    max_bad_fraction: float
    on_leak: str
    leak_bits: int | None
    index_check: str
    augmentation: tuple[str, ...]
    cache: str
    cache_limit: float
    image_tower: str
    text_tower: str
    image_weights: str | None
    text_weights: str | None
    imported: str | None
    tokenizer: str | None
    embed_dim: int
    image_size: int
    image_buckets: int
    max_text_tokens: int
    loss: str
    label_smoothing: float
    fusion: int
    fusion_width: int
    fusion_heads: int
    fusion_scales: int | None
    matching_weight: float
    loss_weights: str
    loss_weights_every: int
    epochs: int | None
    steps: int | None
    seed: int
    workers: str
    run_dir: Path | None
    save_every: int | None
    keep_checkpoints: int
    keep_every: int | None
    max_hours: float | None
    stall_limit: float
    eval_every: int | None
    eval_ema: bool
    trace_every: int
    explain_balance: int
    resume: str
    wandb: str
    wandb_project: str

    def data_options(self) -> DataOptions:
        return DataOptions.from_record(vars(self))

    def num_workers(self) -> str | int:
        return self.workers if self.workers == "auto" else int(self.workers)

    def tokenizer_source(self) -> str | None:
        """Where the tokenizer comes from: asked for, or beside the text tower's weights or configuration; None: train one."""
        if self.tokenizer is not None:
            return self.tokenizer
        for where in (self.text_weights, self.text_tower):
            if where is not None and any((Path(where) / name).is_file() for name in ("tokenizer.json", "vocab.txt")):
                return where
        weights = self.text_weights
        return weights if weights is not None and "/" in weights and not Path(weights).exists() else None

    def refuse_without(self, block: BranchesBlock) -> None:
        """Raise ValueError for a flag that needs what the `branches` block does not say."""
        if self.eval_ema and block.averaging() is None:
            raise ValueError(
                '--eval-ema: the weights are not averaged; add "ema": {"decay": 0.9999, "warmup": true} to "branches", or leave it out'
            )

    def record(self) -> dict[str, Any]:
        plain = {Path: str, tuple: list}
        return {
            key: next((to(value) for kind, to in plain.items() if isinstance(value, kind)), value) for key, value in asdict(self).items()
        }


class _Parser(argparse.ArgumentParser):
    """Started on many ranks at once, it speaks on the first only."""

    def error(self, message: str) -> NoReturn:
        if _is_first_rank():
            self.print_usage(sys.stderr)
            print(f"{self.prog}: error: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)

    def print_help(self, file: Any = None) -> None:
        if _is_first_rank():
            super().print_help(file)


def _is_first_rank() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="train.py",
        description="Train an image tower and a text tower as a forked pipeline with one exact loss over the global batch. Without any flag: "
        "a small pair of towers on the embedded data.",
        epilog="Learning rate, schedule, batch sizes, precision, ZeRO and the layout of the stages are in the JSON file: ds_configs/README.md.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=120),
    )
    run = parser.add_argument_group("how to run")
    run.add_argument(
        "--deepspeed_config", type=Path, metavar="FILE", help="how to run (default: the file in ds_configs/ that suits the hardware)"
    )
    run.add_argument("--run-dir", type=Path, metavar="DIR", help="everything the run writes (default: runs/<time>-<data>)")
    run.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|PATH",
        help="go on from the newest whole checkpoint in --run-dir, or from PATH (default: auto)",
    )
    run.add_argument("--workers", default="auto", metavar="auto|N", help="data loading processes per rank (default: auto)")
    run.add_argument("--seed", type=_at_least(0), default=0, metavar="N", help="of weights, order, augmentation and dropout (default: 0)")
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data",
        action="append",
        metavar="SPEC",
        help="demo | demo:LANG[+LANG...] | jsonl:FILE | csv:FILE | tsv:FILE | parquet:FILES | coco:IMAGES:CAPTIONS.json | imagefolder:DIR | "
        "webdataset:SHARDS; repeat it to mix several (data/README.md; default: demo)",
    )
    data.add_argument("--data-weights", metavar="W,W,...", help="how often the samples of each --data come in an epoch (default: once)")
    data.add_argument(
        "--data-temperature",
        type=_positive,
        default=1.0,
        metavar="T",
        help="the share of a --data in an epoch goes with (samples * weight)^(1/T); large: all the same (default: 1.0)",
    )
    data.add_argument("--data-floors", metavar="F,F,...", help="smallest share of each --data in an epoch, together at most 1 (default: 0)")
    data.add_argument(
        "--data-adapt",
        type=_rate,
        default=0.0,
        metavar="RATE",
        help="how fast the weights of each --data follow its loss, from epoch to epoch: where it falls more slowly they grow; 0: not at all "
        "(default: 0.0)",
    )
    data.add_argument("--val-data", metavar="SPEC", help="held-out samples from elsewhere, instead of a part of --data")
    data.add_argument(
        "--val-fraction", type=_fraction, default=0.1, metavar="F", help="part of --data held out, never trained on (default: 0.1)"
    )
    data.add_argument("--limit-samples", type=_at_least(2), metavar="N", help="train on N samples only, to try a pipeline")
    data.add_argument(
        "--on-leak", choices=("refuse", "drop"), default="refuse", help="training samples that are also in --val-data (default: refuse)"
    )
    data.add_argument(
        "--leak-bits",
        type=_at_least(0),
        metavar="N",
        help="pictures count as equal when their perceptual hashes differ in up to N of 64 bits (default: only equal files do)",
    )
    data.add_argument(
        "--max-bad-fraction", type=_fraction, default=0.01, metavar="F", help="stop when more of the samples cannot be used (default: 0.01)"
    )
    data.add_argument(
        "--index-check",
        choices=("decode", "header"),
        default="decode",
        help="how pictures are looked at when a data set is first opened; header: faster, truncated ones are found in training (default: decode)",
    )
    data.add_argument(
        "--augmentation",
        type=_augmentation,
        default="crop",
        metavar="crop[+flip][+colour]|none",
        help="of training pictures: a crop of 80 to 100 %% of the area and a light background behind transparent parts; mirrored, where captions do "
        "not say left and right; other brightness and contrast, where they do not name colours (default: crop)",
    )
    data.add_argument(
        "--cache", default="off", metavar="off|auto|DIR", help="keep decoded and resized pictures; auto: in WYE_CACHE (default: off)"
    )
    data.add_argument("--cache-limit", type=float, default=50, metavar="GB", help="size limit of --cache (default: 50)")
    model = parser.add_argument_group("towers")
    model.add_argument(
        "--image-tower", metavar="NAME", help="torchvision architecture, NAME[:key=value,...] (default: resnet50; demo: a ResNet-10)"
    )
    model.add_argument(
        "--text-tower", metavar="NAME", help="architecture, Hugging Face id or local folder (default: bert-base-uncased; demo: bert-mini)"
    )
    model.add_argument(
        "--image-weights", metavar="WHERE", help="pretrained: library name, Hugging Face id, folder or file (default: from scratch)"
    )
    model.add_argument("--text-weights", metavar="WHERE", help="pretrained: Hugging Face id, folder or file (default: from scratch)")
    model.add_argument(
        "--import",
        dest="imported",
        metavar="WHERE",
        help="a whole model to start from: a folder of export.py, which also says the towers, sizes and tokenizer that are not given, or a file "
        "of OpenCLIP weights (default: from scratch)",
    )
    model.add_argument(
        "--tokenizer",
        metavar="WHERE",
        help="Hugging Face id or folder (default: that of --text-weights or --import, else WordPiece trained on the captions)",
    )
    model.add_argument("--embed-dim", type=_at_least(1), metavar="N", help="width of the common space (default: 512; demo: 256)")
    model.add_argument("--image-size", type=_at_least(1), metavar="N", help="pixels a side (default: 224; demo: 64)")
    model.add_argument(
        "--image-buckets",
        type=_at_least(1),
        default=1,
        metavar="N",
        help="input shapes of about that area, chosen to suit the pictures; a micro-batch has one of them; 1: square (default: 1)",
    )
    model.add_argument("--max-text-tokens", type=_at_least(4), metavar="N", help="longer texts are cut (default: 77; demo: 32)")
    objective = parser.add_argument_group("objective")
    objective.add_argument(
        "--loss",
        choices=("infonce", "sigmoid"),
        default="infonce",
        help="over all pairs of the global batch: CLIP's cross entropy, or each pair by itself, as SigLIP does (default: infonce)",
    )
    objective.add_argument(
        "--label-smoothing", type=_fraction, default=0.0, metavar="F", help="part of each target that all share, in infonce (default: 0.0)"
    )
    objective.add_argument(
        "--fusion",
        type=_at_least(0),
        default=0,
        metavar="N",
        help="layers of cross-attention that learn to tell whether an image and a text belong together, from hard negatives of the global batch; "
        "0: none (default: 0)",
    )
    objective.add_argument("--fusion-width", type=_at_least(1), default=512, metavar="N", help="of its tokens (default: 512)")
    objective.add_argument("--fusion-heads", type=_at_least(1), default=8, metavar="N", help="of its attention (default: 8)")
    objective.add_argument(
        "--fusion-scales",
        type=_at_least(1),
        metavar="N",
        help="sizes of the image tower's maps that it sees, the smallest ones (default: 2, or 1 where there is one)",
    )
    objective.add_argument(
        "--matching-weight",
        type=_positive,
        default=1.0,
        metavar="W",
        help="of its loss, that of the contrastive one being 1 (default: 1.0)",
    )
    objective.add_argument(
        "--loss-weights",
        choices=MODES,
        default="fixed",
        help="of both losses: as given, by a learned uncertainty of each, or by how they fall and how far the embeddings have come (default: fixed)",
    )
    objective.add_argument(
        "--loss-weights-every", type=_at_least(1), default=50, metavar="N", help="steps between changes of --loss-weights (default: 50)"
    )
    length = parser.add_argument_group("length")
    exclusive = length.add_mutually_exclusive_group()
    exclusive.add_argument("--epochs", type=_at_least(1), metavar="N", help="passes over the training samples (default: 30; demo: 8)")
    exclusive.add_argument("--steps", type=_at_least(1), metavar="N", help="optimizer steps, instead of epochs")
    length.add_argument(
        "--save-every", type=_at_least(1), metavar="N", help="steps between checkpoints (default: one epoch); one is always made at the end"
    )
    length.add_argument("--keep-checkpoints", type=_at_least(1), default=3, metavar="K", help="the newest ones that stay (default: 3)")
    length.add_argument(
        "--keep-every", type=_at_least(1), metavar="N", help="also keep the first checkpoint of every N steps (default: none)"
    )
    length.add_argument(
        "--eval-every",
        type=_at_least(1),
        metavar="N",
        help="steps between held-out evaluations (default: one epoch); one is always made at the end",
    )
    length.add_argument(
        "--eval-ema",
        action="store_true",
        help="evaluate the moving average of the weights too; needs the JSON's ema block (default: False)",
    )
    length.add_argument(
        "--max-hours",
        type=_positive,
        metavar="H",
        help="stop after the step in which so many hours are over, with a checkpoint (default: no limit)",
    )
    length.add_argument(
        "--stall-limit",
        type=_positive,
        default=10.0,
        metavar="MIN",
        help="minutes in which a rank may finish nothing; then all end, and say what they were doing (default: 10.0)",
    )
    tracking = parser.add_argument_group("tracking")
    tracking.add_argument(
        "--wandb", choices=("online", "offline", "disabled"), default="disabled", help="Weights & Biases (default: disabled)"
    )
    tracking.add_argument(
        "--trace-every",
        type=_at_least(0),
        default=100,
        metavar="N",
        help="steps between those written to trace.json; 0: none (default: 100)",
    )
    tracking.add_argument(
        "--explain-balance",
        type=_at_least(0),
        default=0,
        metavar="N",
        help="print how N global batches are dealt before training starts (default: 0)",
    )
    tracking.add_argument("--wandb-project", default="wye", metavar="NAME", help="(default: wye)")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # given by DeepSpeed's launcher, which also sets LOCAL_RANK
    return parser


DEMO_DEFAULTS = {
    "image_tower": "resnet18:layers=1-1-1-1",
    "text_tower": "bert-mini",
    "embed_dim": 256,
    "image_size": 64,
    "max_text_tokens": 32,
    "epochs": 8,
}
DEFAULTS = {
    "image_tower": "resnet50",
    "text_tower": "bert-base-uncased",
    "embed_dim": 512,
    "image_size": 224,
    "max_text_tokens": 77,
    "epochs": 30,
}


def parse_options(arguments: list[str] | None = None) -> Options:
    """Options of train.py; exits with status 2 and one message when they are wrong."""
    parser = make_parser()
    values = vars(parser.parse_args(arguments))
    values.pop("local_rank")
    if values["workers"] != "auto" and not values["workers"].isdigit():
        parser.error(f"argument --workers: {values['workers']!r} is neither 'auto' nor a whole number")
    if values["label_smoothing"] and values["loss"] != "infonce":
        parser.error(
            f"argument --label-smoothing: {values['label_smoothing']} is for --loss infonce; {values['loss']} judges each pair by itself, "
            "so leave it out"
        )
    _check_fusion(parser, values)
    values["data"] = tuple(values["data"] or ["demo"])
    values["data_weights"] = _weights(parser, values["data_weights"], values["data"])
    values["data_floors"] = _floors(parser, values["data_floors"], values["data"])
    if len(values["data"]) == 1 and values["data_temperature"] != 1:
        parser.error(f"argument --data-temperature: {values['data_temperature']:g}; one --data has nothing to share, give several")
    if len(values["data"]) == 1 and values["data_adapt"]:
        parser.error(f"argument --data-adapt: {values['data_adapt']:g}; one --data has nothing to share, give several")
    if values["imported"]:
        for other in ("image_weights", "text_weights"):
            if values[other]:
                parser.error(f"argument --import: it holds both towers; leave out --{other.replace('_', '-')}")
        for key, default in options_of_export(Path(values["imported"])).items():
            values[key] = default if values[key] is None else values[key]
    defaults = DEMO_DEFAULTS if all(spec.split(":")[0] == "demo" for spec in values["data"]) else DEFAULTS
    for key, default in defaults.items():
        if values[key] is None and not (key == "epochs" and values["steps"] is not None):
            values[key] = default
    return Options(**values)


def default_config(on_gpu: bool, bf16_supported: bool) -> Path:
    """The JSON file that suits the hardware found."""
    name = "cpu_fp32.json" if not on_gpu else "zero1_bf16.json" if bf16_supported else "zero1_fp16.json"
    return ROOT / "ds_configs" / name


def _check_fusion(parser: argparse.ArgumentParser, values: Mapping[str, Any]) -> None:
    if values["fusion"] and values["fusion_width"] % values["fusion_heads"]:
        parser.error(f"argument --fusion-width: {values['fusion_width']} is no multiple of --fusion-heads {values['fusion_heads']}")
    for key in ("fusion_width", "fusion_heads", "fusion_scales", "matching_weight", "loss_weights", "loss_weights_every"):
        if not values["fusion"] and values[key] != parser.get_default(key):
            parser.error(f"argument --{key.replace('_', '-')}: {values[key]} is for a run with --fusion; add --fusion N, or leave it out")


def _weights(parser: argparse.ArgumentParser, given: str | None, data: tuple[str, ...]) -> tuple[float, ...] | None:
    if given is None:
        return None
    weights = _numbers(given)
    if len(weights) != len(data) or not all(0 <= weight < math.inf for weight in weights) or not any(weights):
        parser.error(f"argument --data-weights: {given!r}; {len(data)} --data need {len(data)} numbers >= 0, not all 0, such as 1,0.5")
    return weights


def _floors(parser: argparse.ArgumentParser, given: str | None, data: tuple[str, ...]) -> tuple[float, ...] | None:
    if given is None:
        return None
    if len(data) == 1:
        parser.error(f"argument --data-floors: {given!r}; one --data has nothing to share, give several")
    floors = _numbers(given)
    if len(floors) != len(data) or not all(0 <= floor <= 1 for floor in floors) or math.fsum(floors) > 1 + 1e-9:
        parser.error(
            f"argument --data-floors: {given!r}; {len(data)} --data need {len(data)} numbers from 0 to 1, together at most 1, such as 0.2,0"
        )
    return floors


def _numbers(given: str) -> tuple[float, ...]:
    """Nothing where one of them is no number."""
    try:
        return tuple(float(number) for number in given.split(","))
    except ValueError:
        return ()


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{value:g} is not above 0")
    return value


_positive.__name__ = "number"


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not in 0 <= F < 1")
    return value


_fraction.__name__ = "number"


def _augmentation(text: str) -> tuple[str, ...]:
    words = () if text == "none" else tuple(text.split("+"))
    if words and (words[0] != "crop" or len(set(words)) != len(words) or not set(words) <= {"crop", "flip", "colour"}):
        raise argparse.ArgumentTypeError(f"{text!r} is neither none nor crop, with +flip, +colour or both behind it")
    return words


def _rate(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{value:g} is not in 0 <= RATE <= 1")
    return value


_rate.__name__ = "number"


def _at_least(minimum: int):
    def number(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} is below {minimum}")
        return value

    number.__name__ = "whole number"
    return number
