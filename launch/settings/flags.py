"""The flags of train.py: what each is called, takes and means."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from data.index.bad_samples import SECONDS_LIMIT
from data.index.roots import add_root_flag
from data.modalities.audio.augmentations import AUGMENTATIONS
from data.modalities.preprocessing import INTERPOLATIONS, NORMALIZATIONS, RESIZE_MODES
from data.modules import add_module_flag
from data.options import read_pairs
from engine.planning.devices import DEVICES, find_device
from launch.balancing.loss_weights import MODES
from launch.settings.recipe_files import add_recipe_flag
from launch.terminal.last_words import say_last
from launch.tracking.login import MODES as MODES_OF_WANDB


class _Parser(argparse.ArgumentParser):
    """Started on many ranks at once, it speaks on the first only."""

    def error(self, message: str) -> NoReturn:
        if _is_first_rank():
            self.print_usage(sys.stderr)
            say_last(f"{self.prog}: error: {message} (see {self.prog} --help)")
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
    _how_to_run(parser.add_argument_group("how to run"))
    _dry_run(parser.add_argument_group("dry run"))
    _data(parser.add_argument_group("data"))
    _towers(parser.add_argument_group("towers"))
    _audio(parser.add_argument_group("audio, for --pairs that name it"))
    _objective(parser.add_argument_group("objective"))
    _length(parser.add_argument_group("length"))
    _tracking(parser.add_argument_group("tracking"))
    parser.add_argument(
        "--local_rank", type=int, help=argparse.SUPPRESS
    )  # given by DeepSpeed's launcher, which also sets LOCAL_RANK
    return parser


def _how_to_run(run: argparse._ArgumentGroup) -> None:
    run.add_argument(
        "--deepspeed_config",
        type=Path,
        metavar="FILE",
        help="how to run (default: the file in ds_configs/ that suits the hardware)",
    )
    add_recipe_flag(run)
    run.add_argument(
        "--set",
        nargs="+",
        action="extend",
        metavar="KEY=VALUE",
        help="a key of the JSON file, such as branches.layout=merged, or a flag, such as seed=1, in place of what is given elsewhere (default: none)",
    )
    add_module_flag(run)
    run.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="everything the run writes (default: runs/<time>-<data>)",
    )
    run.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|PATH",
        help="go on from the newest whole checkpoint in --run-dir, or from PATH (default: auto)",
    )
    run.add_argument(
        "--workers",
        default="auto",
        metavar="auto|N",
        help="data loading processes per rank (default: auto)",
    )
    run.add_argument(
        "--seed",
        type=_at_least(0),
        default=0,
        metavar="N",
        help="of weights, order, augmentation and dropout (default: 0)",
    )


def _dry_run(dry: argparse._ArgumentGroup) -> None:
    dry.add_argument(
        "--dry-run",
        action="store_true",
        help="do everything up to the first step in one process, print the first screen, and write no run (default: False)",
    )
    dry.add_argument(
        "--ranks",
        type=_at_least(1),
        metavar="N",
        help="to plan for (default: the recipe's, else what the launcher started, else the GPUs here, else 1)",
    )
    dry.add_argument(
        "--device",
        type=_device,
        metavar="NAME",
        help=f"to plan for: {', '.join(DEVICES)}, or numbers as in launch.tools.plan (default: the recipe's, else what is here)",
    )


def _data(data: argparse._ArgumentGroup) -> None:
    data.add_argument(
        "--data",
        action="append",
        metavar="SPEC",
        help="demo | demo:LANG[+LANG...] | demo:voices | jsonl:FILE | csv:FILE | tsv:FILE | parquet:FILES | coco:IMAGES:CAPTIONS.json | karpathy:FILE?split=train+restval | "
        "imagefolder:DIR | audiofolder:DIR | webdataset:SHARDS | python:MODULE:NAME; repeat it to mix several (data/README.md; "
        "default: demo)",
    )
    add_root_flag(data, "--data and --val-data")
    data.add_argument(
        "--data-weights",
        metavar="W,W,...",
        help="how often the samples of each --data come in an epoch (default: once)",
    )
    data.add_argument(
        "--data-temperature",
        type=_positive,
        default=1.0,
        metavar="T",
        help="the share of a --data in an epoch goes with (samples * weight)^(1/T); large: all the same (default: 1.0)",
    )
    data.add_argument(
        "--data-floors",
        metavar="F,F,...",
        help="smallest share of each --data in an epoch, together at most 1 (default: 0)",
    )
    data.add_argument(
        "--data-adapt",
        type=_rate,
        default=0.0,
        metavar="RATE",
        help="how fast the weights of each --data follow its loss, from epoch to epoch: where it falls more slowly they grow; 0: not at all "
        "(default: 0.0)",
    )
    data.add_argument(
        "--val-data",
        action=Once,
        metavar="SPEC",
        help="held-out samples from elsewhere, instead of a part of --data",
    )
    data.add_argument(
        "--val-fraction",
        type=_fraction,
        default=0.1,
        metavar="F",
        help="part of --data held out, never trained on (default: 0.1)",
    )
    data.add_argument(
        "--limit-samples",
        type=_at_least(2),
        metavar="N",
        help="train on N samples only, to try a pipeline",
    )
    data.add_argument(
        "--on-leak",
        choices=("refuse", "drop"),
        default="refuse",
        help="training samples that are also in --val-data (default: refuse)",
    )
    data.add_argument(
        "--leak-bits",
        type=_at_least(0),
        metavar="N",
        help="images count as equal when their perceptual hashes differ in up to N of 64 bits (default: only equal files do)",
    )
    data.add_argument(
        "--max-bad-fraction",
        type=_fraction,
        default=0.01,
        metavar="F",
        help="stop when more of the samples cannot be used (default: 0.01)",
    )
    data.add_argument(
        "--index-check",
        choices=("decode", "header"),
        default="decode",
        help="how images are checked when a data set is first opened; header: faster, truncated ones are found in training (default: decode)",
    )
    data.add_argument(
        "--augmentation",
        type=_augmentation,
        metavar="crop[+white][+flip][+colour]|none",
        help="of training images: a crop of 80 to 100 %% of the area and a light colour behind transparent parts; white behind them, as in "
        "evaluation; mirrored, where captions do not say left and right; other brightness and "
        "contrast, where they do not name colours (default: as the recipe says, "
        "ds_configs/README.md)",
    )
    data.add_argument(
        "--cache",
        default="off",
        metavar="off|auto|DIR",
        help="keep decoded images and sounds; auto: in ~/.cache/wye, or the folder that WYE_CACHE names (default: off)",
    )
    data.add_argument(
        "--cache-limit",
        type=float,
        default=50,
        metavar="GB",
        help="size limit of --cache, GiB (default: 50)",
    )


def _towers(model: argparse._ArgumentGroup) -> None:
    model.add_argument(
        "--image-tower",
        metavar="NAME",
        help="NAME[:key=value,...]: a classifier of torchvision, timm:NAME, open_clip:MODEL or hf:NAME (default: resnet50; demo: a ResNet-10)",
    )
    model.add_argument(
        "--text-tower",
        metavar="NAME",
        help="architecture, Hugging Face id, local folder or open_clip:MODEL (default: bert-base-uncased; demo: bert-mini)",
    )
    model.add_argument(
        "--image-weights",
        metavar="WHERE",
        help="pretrained: library name, Hugging Face id, folder or file (default: from scratch)",
    )
    model.add_argument(
        "--text-weights",
        metavar="WHERE",
        help="pretrained: Hugging Face id, folder or file (default: from scratch)",
    )
    model.add_argument(
        "--import",
        dest="imported",
        metavar="WHERE",
        help="a whole model to start from: a folder of export.py or of transformers' CLIPModel, SiglipModel, Siglip2Model, ChineseCLIPModel or "
        "VisionTextDualEncoderModel, or of OpenCLIP, or a Hugging Face id of one (OpenCLIP's: hf-hub:ORGANISATION/MODEL), which also say the towers, "
        "sizes, tokenizer and loss that are not given; or a file of OpenCLIP weights, with both towers open_clip:MODEL (default: from scratch)",
    )
    model.add_argument(
        "--tokenizer",
        metavar="WHERE",
        help="Hugging Face id, folder, or open_clip:MODEL for that of one of OpenCLIP's models (default: that of --import or of --text-weights, or in a folder given to --text-tower; without "
        "pretrained texts a WordPiece trained on the captions)",
    )
    model.add_argument(
        "--tower",
        action="append",
        type=named_tower,
        metavar="MODALITY=NAME",
        help="of another modality that --pairs names; NAME as its module says; repeat it for several (default: the modality's own)",
    )
    model.add_argument(
        "--embed-dim",
        type=_at_least(1),
        metavar="N",
        help="width of the common space (default: 512; demo: 256)",
    )
    model.add_argument(
        "--projection",
        metavar="linear|mlp[:hidden_act=NAME]|none",
        help="from a tower's features to the embeddings; mlp: two layers and ReLU or NAME between them, as in CLAP; none: the features are the "
        "embeddings, as in SigLIP (default: as in --import, else linear)",
    )
    model.add_argument(
        "--image-size",
        type=_at_least(1),
        metavar="N",
        help="pixels a side; the position embeddings of weights of another size are interpolated (default: 224; demo: 64; pretrained image "
        "weights: what they were trained with)",
    )
    model.add_argument(
        "--image-normalization",
        choices=tuple(NORMALIZATIONS),
        help="mean and standard deviation of the pixels (default: those of the pretrained image weights; from scratch clip)",
    )
    model.add_argument(
        "--image-mean",
        type=_channels,
        metavar="R,G,B",
        help="of channel values from 0 to 1, together with --image-std, instead of --image-normalization (default: as there)",
    )
    model.add_argument(
        "--image-std", type=_channels, metavar="R,G,B", help="see --image-mean (default: as there)"
    )
    model.add_argument(
        "--image-interpolation",
        choices=INTERPOLATIONS,
        help="how images are resized (default: as the pretrained image weights were trained; from scratch bicubic)",
    )
    model.add_argument(
        "--image-resize",
        type=_at_least(1),
        metavar="N",
        help="pixels of the shorter side before the centre is cropped in evaluation (default: in proportion to the pretrained image weights; from "
        "scratch --image-size)",
    )
    model.add_argument(
        "--image-resize-mode",
        choices=RESIZE_MODES,
        help="in evaluation: keep the shape of an image and cut its centre out, or squash both sides to --image-size (default: as OpenCLIP's "
        "weights say, else shortest)",
    )
    model.add_argument(
        "--image-buckets",
        type=_at_least(1),
        default=1,
        metavar="N",
        help="input shapes of about that area, chosen to suit the images; a micro-batch has one of them; 1: square (default: 1)",
    )
    model.add_argument(
        "--max-text-tokens",
        type=_at_least(4),
        metavar="N",
        help="longer texts are cut (default: 77; demo: 32)",
    )


def _audio(audio: argparse._ArgumentGroup) -> None:
    audio.add_argument(
        "--audio-tower",
        metavar="NAME",
        help="hf:NAME of AST, CLAP or Whisper, or any image tower, over a spectrogram (default: hf:clap-htsat-unfused; demo: a ResNet-10)",
    )
    audio.add_argument(
        "--audio-weights",
        metavar="WHERE",
        help="pretrained, as --image-weights (default: from scratch)",
    )
    audio.add_argument(
        "--audio-seconds",
        type=_positive,
        metavar="S",
        help="length of a clip: longer sounds are cut at random, in evaluation to their middle; shorter ones are repeated or padded (default: as the "
        "tower of transformers was made for; an image tower 4.0; demo: 2.5)",
    )
    audio.add_argument(
        "--max-audio-seconds",
        type=_sound_limit,
        metavar="S",
        help=f"longer sounds are bad samples, which --max-bad-fraction counts (default: {SECONDS_LIMIT:,}; more is never read)",
    )
    audio.add_argument(
        "--audio-size",
        type=_at_least(8),
        metavar="N",
        help="mel bins and frames of the spectrogram that an image tower sees as --audio-tower (default: 128; demo: 96)",
    )
    audio.add_argument(
        "--audio-augmentation",
        type=_audio_augmentation,
        metavar="crop[+spec][+noise]|none",
        help="of training sounds: a clip from anywhere in a longer sound; stripes of time and of frequency masked (SpecAugment); Gaussian noise, 5 "
        "to 30 dB quieter (default: crop+spec)",
    )


def _objective(objective: argparse._ArgumentGroup) -> None:
    objective.add_argument(
        "--pairs",
        type=pairs_given,
        metavar="A:B[:WEIGHT],...",
        help="modalities that are compared, each pair with a loss of its own and its weight in the sum; a sample takes part in the pairs of which "
        "it has both (default: as in --import, else image:text)",
    )
    objective.add_argument(
        "--loss",
        metavar="infonce|sigmoid|NAME",
        help="over all pairs of the global batch: CLIP's cross entropy, or each pair by itself, as SigLIP does; NAME: one that --import-module "
        "adds (default: that of --import, else infonce)",
    )
    objective.add_argument(
        "--label-smoothing",
        type=_fraction,
        metavar="F",
        help="part of each target that all share, in infonce (default: as the recipe says, ds_configs/README.md)",
    )
    objective.add_argument(
        "--duplicates",
        choices=("masked", "positives", "negatives"),
        help="what samples of a batch are to each other whose image, sound or caption is the same: left out of each "
        "other's loss, each other's positives, or negatives like all others (default: masked)",
    )
    objective.add_argument(
        "--fusion",
        type=_at_least(0),
        default=0,
        metavar="N",
        help="layers of cross-attention that learn to tell whether an image and a text belong together, from hard negatives of the global batch; "
        "0: none (default: 0)",
    )
    objective.add_argument(
        "--fusion-width",
        type=_at_least(1),
        default=512,
        metavar="N",
        help="of its tokens (default: 512)",
    )
    objective.add_argument(
        "--fusion-heads",
        type=_at_least(1),
        default=8,
        metavar="N",
        help="of its attention (default: 8)",
    )
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
        help="of all losses: as given, by a learned uncertainty of each, by how they fall and how far "
        "the embeddings have come, or, with several pairs, after each evaluation by the alignment "
        "and uniformity of their held-out embeddings (default: fixed)",
    )
    objective.add_argument(
        "--loss-weights-every",
        type=_at_least(1),
        default=50,
        metavar="N",
        help="steps between changes of --loss-weights uncertainty or measured (default: 50)",
    )


def _length(length: argparse._ArgumentGroup) -> None:
    exclusive = length.add_mutually_exclusive_group()
    exclusive.add_argument(
        "--epochs",
        type=_at_least(1),
        metavar="N",
        help="passes over the training samples (default: 30; demo: 12)",
    )
    exclusive.add_argument(
        "--steps", type=_at_least(1), metavar="N", help="optimizer steps, instead of epochs"
    )
    length.add_argument(
        "--save-every",
        type=_at_least(1),
        metavar="N",
        help="steps between checkpoints (default: one epoch); one is always made at the end",
    )
    length.add_argument(
        "--keep-checkpoints",
        type=_at_least(1),
        default=3,
        metavar="K",
        help="the newest ones that stay (default: 3)",
    )
    length.add_argument(
        "--keep-every",
        type=_at_least(1),
        metavar="N",
        help="also keep the first checkpoint of every N steps (default: none)",
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
        help="minutes in which no rank finishes anything; then all end, and say what they were doing (default: 10.0)",
    )
    length.add_argument(
        "--deterministic",
        action="store_true",
        help="torch's deterministic algorithms: the same bits in every run on the same GPUs, more slowly; an operation that has none ends the run (default: False)",
    )


def _tracking(tracking: argparse._ArgumentGroup) -> None:
    tracking.add_argument(
        "--wandb",
        choices=MODES_OF_WANDB,
        default="auto",
        help="Weights & Biases; auto: online where a login is found (default: auto)",
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
    tracking.add_argument(
        "--wandb-project",
        metavar="NAME",
        help="project there (default: that of the JSON's wandb block or of WANDB_PROJECT, else wye)",
    )


class Once(argparse.Action):
    """Keep the value; an option that is given twice is an error, where argparse would take the
    last."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(
                f"{option_string} is given twice, {getattr(namespace, self.dest)} and {values}; "
                "give it once"
            )
        setattr(namespace, self.dest, values)


def _device(text: str) -> str:
    try:
        find_device(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{value:g} is not above 0")
    return value


_positive.__name__ = "number"


def _sound_limit(text: str) -> float:
    value = _positive(text)
    if value > SECONDS_LIMIT:
        raise argparse.ArgumentTypeError(
            f"{value:g} is above {SECONDS_LIMIT:,}, the longest sound that is read; cut longer "
            "ones into clips"
        )
    return value


_sound_limit.__name__ = "number"


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not in 0 <= F < 1")
    return value


_fraction.__name__ = "number"


def _audio_augmentation(text: str) -> tuple[str, ...]:
    words = () if text == "none" else tuple(text.split("+"))
    if len(set(words)) < len(words) or not set(words) <= set(AUGMENTATIONS):
        raise argparse.ArgumentTypeError(
            f"{text!r}: none, or some of {', '.join(AUGMENTATIONS)}, joined by +, each once"
        )
    return words


def _augmentation(text: str) -> tuple[str, ...]:
    words = () if text == "none" else tuple(text.split("+"))
    if words and (
        words[0] != "crop"
        or len(set(words)) != len(words)
        or not set(words) <= {"crop", "white", "flip", "colour"}
    ):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither none nor crop, with +white, +flip and +colour behind it as wanted"
        )
    return words


def _channels(text: str) -> tuple[float, ...]:
    values = tuple(float(word) for word in text.split(","))
    if len(values) != 3 or not all(map(math.isfinite, values)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not three numbers, for red, green and blue, such as 0.485,0.456,0.406"
        )
    return values


_channels.__name__ = "list of three numbers"


def pairs_given(text: str) -> str:
    try:
        return ",".join(
            f"{p.first}:{p.second}" + ("" if p.weight == 1 else f":{p.weight:g}")
            for p in read_pairs(text)
        )
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def named_tower(text: str) -> str:
    modality, equals, name = text.partition("=")
    if not modality or not equals or not name:
        raise argparse.ArgumentTypeError(f"'{text}' is not written MODALITY=NAME")
    return text


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
