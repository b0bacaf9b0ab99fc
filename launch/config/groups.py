"""The options of train.py, a dataclass per component. A function takes the group that it needs, so
its signature says which options it depends on. Imports neither torch nor DeepSpeed, so that
`--help` answers at once.
"""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from common.options import (
    OptionGroup,
    at_least,
    flags_of,
    fraction,
    numbers,
    option,
    positive,
    rising,
    words,
)
from data.modalities.preprocessing import (
    INTERPOLATIONS,
    NORMALIZATIONS,
    RESIZE_MODES,
    Preprocessing,
)
from data.modules import module_names
from data.options import (
    BadSampleOptions,
    DataOptions,
    LoadingOptions,
    PairsOptions,
    SeedOptions,
    read_pairs,
    terms,
)
from engine.planning.devices import DEVICES, find_device
from launch.loss_weights import MODES, check_mode

# how pixels are prepared
PIXELS = (
    "image_mean",
    "image_std",
    "image_interpolation",
    "image_resize",
    "image_resize_mode",
    "image_train_resize_mode",
)
OPEN_CLIP = "open_clip:"  # how the names of OpenCLIP's models begin
WANDB_MODES = ("auto", "online", "offline", "disabled")


def device(text: str) -> str:
    """`--device`."""
    try:
        find_device(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error
    return text


def named_value(text: str) -> str:
    """`--tower MODALITY=NAME`, `--weights MODALITY=WHERE`."""
    modality, equals, value = text.partition("=")
    if not modality or not equals or not value:
        raise ArgumentTypeError(f"'{text}' is not written MODALITY=VALUE")
    return text


def by_modality(given: Sequence[str] | None) -> dict[str, str]:
    """`MODALITY=VALUE`, as often as given -> modality -> value."""
    return dict(each.split("=", 1) for each in given or ())


@dataclass(frozen=True, kw_only=True)
class ModuleOptions(OptionGroup):
    title = "how to run"
    free = True
    # What a module registers is chosen by name elsewhere, and that name is compared.
    import_module: tuple[str, ...] | None = option(
        None,
        "Python modules to import first, which register what is yours, such as a schedule "
        "(engine/README.md); they are found as in an import statement, and in the current folder; "
        "may be repeated",
        "MODULE[,MODULE]",
        module_names,
        action="extend",
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions(ModuleOptions):
    title = "how to run"
    free = True
    deepspeed_config: Path | None = option(
        None,
        "how to run",
        "FILE",
        Path,
        name="deepspeed_config",
        shown="the file in ds_configs/ that suits the hardware",
    )
    recipe: str | None = option(
        None,
        "a file of ds_configs/recipes/, such as clip_vit_b32: flags and the JSON file in one",
        "NAME|FILE",
        recorded=False,
    )
    # what it changes is compared where it stands
    set: tuple[str, ...] = option(
        (),
        "a key of the JSON file, such as branches.layout=merged, or a flag, such as seed=1, in "
        "place of what is given elsewhere",
        "KEY=VALUE",
        action="extend",
        nargs="+",
        shown="none",
    )
    run_dir: Path | None = option(
        None, "everything the run writes", "DIR", Path, shown="runs/<time>-<data>"
    )
    resume: str = option(
        "auto",
        "go on from the newest whole checkpoint in --run-dir, or from PATH",
        "auto|never|PATH",
    )
    max_hours: float | None = option(
        None,
        "stop after the step in which so many hours are over, with a checkpoint",
        "H",
        positive,
        shown="no limit",
    )
    stall_limit: float = option(
        10.0,
        "minutes in which no rank finishes anything; then all end, and say what they were doing",
        "MIN",
        positive,
    )
    deterministic: bool = option(
        False,
        "torch's deterministic algorithms: the same bits in every run on the same GPUs, more "
        "slowly; an operation that has none ends the run",
    )
    dry_run: bool = option(
        False,
        "do everything up to the first step in one process, print the first screen, and write no "
        "run",
    )
    ranks: int | None = option(
        None,
        "that --dry-run and --show-options plan for",
        "N",
        at_least(1),
        shown="the recipe's, else what the launcher started, else the GPUs here, else 1",
    )
    device: str | None = option(
        None,
        f"that they plan for: {', '.join(DEVICES)}, or numbers as in launch.tools.plan",
        "NAME",
        device,
        shown="the recipe's, else what is here",
    )
    show_options: bool = option(
        False,
        "print each option and key with its value and where it comes from, and end; as --dry-run "
        "does, it prepares the data and the plan",
        recorded=False,
    )


@dataclass(frozen=True, kw_only=True)
class ImageOptions(OptionGroup):
    """What an image tower sees."""

    title = "images"
    in_recipe = True
    augmentation: tuple[str, ...] | None = option(
        None,
        "of training images: a crop of 80 to 100 % of the area and a light colour behind "
        "transparent parts; white behind them, as in evaluation; mirrored, where captions do not "
        "say left and right; other brightness and contrast, where they do not name colours",
        "crop[+white][+flip][+colour]|none",
        words(("crop", "white", "flip", "colour"), first="crop"),
        shown="as the preset says, ds_configs/README.md",
        kept=True,
    )
    image_size: int = option(
        224,
        "pixels a side; the position embeddings of weights of another size are interpolated",
        "N",
        at_least(1),
        demo=64,
        demos={"scenes": 112, "clips": 32},
        shown="224; demo: 64, of scenes 112, of clips 32; pretrained image weights: what they were "
        "trained with",
        kept=True,
    )
    image_normalization: str | None = option(
        None,
        "mean and standard deviation of the pixels",
        choices=tuple(NORMALIZATIONS),
        shown="those of the pretrained image weights; from scratch clip",
        recorded=False,
    )
    image_mean: tuple[float, ...] | None = option(
        None,
        "of channel values from 0 to 1, together with --image-std, instead of "
        "--image-normalization",
        "R,G,B",
        numbers,
        shown="as there",
        kept=True,
        in_recipe=False,
    )
    image_std: tuple[float, ...] | None = option(
        None, "see --image-mean", "R,G,B", numbers, shown="as there", kept=True, in_recipe=False
    )
    image_interpolation: str | None = option(
        None,
        "how images are resized",
        choices=INTERPOLATIONS,
        shown="as the pretrained image weights were trained; from scratch bicubic",
        kept=True,
    )
    image_resize: int | None = option(
        None,
        "pixels of the shorter side before the centre is cropped in evaluation",
        "N",
        at_least(1),
        shown="in proportion to the pretrained image weights; from scratch --image-size",
        kept=True,
    )
    image_resize_mode: str | None = option(
        None,
        "keep the shape of an image and cut off what is too long, or fill what is too short with "
        "black, or squash both sides to --image-size",
        choices=RESIZE_MODES,
        shown="squash where a pair has regions, else as OpenCLIP's weights say, else shortest",
        kept=True,
    )
    image_train_resize_mode: str | None = option(
        None,
        "the same of training images alone, of which --augmentation crop then cuts 80 to 100 %",
        choices=RESIZE_MODES,
        shown="as --image-resize-mode; a run of version 0.1 that goes on: shortest",
        kept=True,
    )
    image_buckets: int = option(
        1,
        "input shapes of about that area, chosen to suit the images; a micro-batch has one of "
        "them; 1: square",
        "N",
        at_least(1),
    )
    views_per_image: int = option(
        1,
        "of each image in a step, each cropped by itself; all of them are compared with its texts, "
        "and with each other by --terms image=infonce",
        "N",
        at_least(1),
    )

    @property
    def preprocessing(self) -> Preprocessing:
        return Preprocessing.from_options(vars(self))

    def check_pixels(self) -> None:
        for name in ("image_mean", "image_std"):
            values = getattr(self, name)
            if values is not None and not (len(values) == 3 and all(map(math.isfinite, values))):
                raise ValueError(
                    f"argument --{name.replace('_', '-')}: {values} is not three numbers, for red, "
                    "green and blue, such as 0.485,0.456,0.406"
                )
        if (self.image_mean is None) != (self.image_std is None):
            raise ValueError(
                "argument --image-mean: it goes together with --image-std; give both, or "
                "--image-normalization"
            )
        if self.image_normalization and self.image_mean:
            raise ValueError(
                "argument --image-normalization: --image-mean and --image-std say the same; give "
                "one of them"
            )


@dataclass(frozen=True, kw_only=True)
class TextOptions(OptionGroup):
    """What a text tower reads."""

    title = "texts"
    in_recipe = True
    max_text_tokens: int = option(
        *(77, "longer texts are cut", "N", at_least(4)),
        demo=32,
        demos={"scenes": 64, "clips": 64},
        kept=True,
    )
    tokenizer: str | None = option(
        None,
        "Hugging Face id, folder, or open_clip:MODEL for that of one of OpenCLIP's models",
        "WHERE",
        shown="that of --import or of --text-weights, or in a folder given to --text-tower; "
        "without pretrained texts a WordPiece trained on the captions",
        in_recipe=False,
    )


@dataclass(frozen=True, kw_only=True)
class AudioOptions(OptionGroup):
    """What an audio tower hears; all None where no pair has sounds."""

    title = "sounds, for --pairs that name audio"
    in_recipe = True
    audio_tower: str | None = option(
        "hf:clap-htsat-unfused",
        "hf:NAME of AST, CLAP or Whisper, or any image tower, over a spectrogram",
        "NAME",
        demo="resnet18:layers=1-1-1-1",
        shown="hf:clap-htsat-unfused; demo: a ResNet-10",
        kept=True,
    )
    audio_seconds: float | None = option(
        None,
        "length of a clip: longer sounds are cut at random, in evaluation to their middle; shorter "
        "ones are repeated or padded",
        "S",
        positive,
        demo=2.5,
        shown="as the tower of transformers was made for; an image tower 4.0; demo: 2.5",
        kept=True,
    )
    audio_size: int | None = option(
        128,
        "mel bins and frames of the spectrogram that an image tower sees as --audio-tower",
        "N",
        at_least(8),
        demo=96,
        kept=True,
    )
    audio_augmentation: tuple[str, ...] | None = option(
        ("crop", "spec"),
        "of training sounds: a clip from anywhere in a longer sound; stripes of time and of "
        "frequency masked (SpecAugment); Gaussian noise, 5 to 30 dB quieter",
        "crop[+spec][+noise]|none",
        words(("crop", "spec", "noise")),
        shown="crop+spec",
        kept=True,
    )


@dataclass(frozen=True, kw_only=True)
class VideoOptions(OptionGroup):
    """What a video tower sees; all None where no pair has films. Frames are prepared as images
    are."""

    title = "films, for --pairs that name video"
    in_recipe = True
    video_tower: str | None = option(
        "resnet50",
        "any image tower, of each frame, and time=mean or time=transformer behind it; or a video "
        "classifier of torchvision, or hf:NAME of VideoMAE, TimeSformer or X-CLIP",
        "NAME",
        demo="resnet18:layers=1-1-1-1,time=transformer,time_layers=1",
        shown="resnet50; demo: a ResNet-10 and a transformer over time",
        kept=True,
    )
    video_frames: int | None = option(
        8,
        "of each clip at most, from the middles of equal parts of it",
        "N",
        at_least(1),
        kept=True,
    )
    video_rate: float | None = option(
        None,
        "frames a second: a clip that is shorter than --video-frames of them has fewer",
        "HZ",
        positive,
        shown="all clips have --video-frames",
        kept=True,
    )
    film_clips: int | None = option(
        1,
        "of one film in a global batch together, as each other's negatives, where it has as many; "
        "1: by chance",
        "N",
        at_least(1),
        demos={"clips": 4},
    )


@dataclass(frozen=True, kw_only=True)
class AnnotationOptions(OptionGroup):
    """Which regions of an image, or moments of a film, are compared with their phrases, where a
    pair has them."""

    title = "annotations, for --pairs with region:text or moment:text"
    in_recipe = True
    max_regions: int = option(
        16,
        "of each image, drawn anew in each epoch; an evaluation during training has the first, and "
        "evaluate.py all",
        "N",
        at_least(1),
    )
    max_moments: int = option(
        16,
        "of each film, as --max-regions",
        "N",
        at_least(1),
    )
    max_negatives: int = option(
        16,
        "given with the regions of each image, or the moments of each film, drawn anew in each epoch: "
        "phrases that every region, or moment, of the global batch is compared with",
        "N",
        at_least(0),
    )


@dataclass(frozen=True, kw_only=True)
class InputOptions(
    SeedOptions,
    PairsOptions,
    ImageOptions,
    TextOptions,
    AudioOptions,
    VideoOptions,
    AnnotationOptions,
):
    """What the towers see of a sample."""


@dataclass(frozen=True, kw_only=True)
class TowerOptions(InputOptions, ModuleOptions):
    """The towers, and the weights that they start from."""

    title = "towers"
    in_recipe = True
    image_tower: str = option(
        "resnet50",
        "NAME[:key=value,...]: a classifier of torchvision, timm:NAME, open_clip:MODEL or hf:NAME",
        "NAME",
        demo="resnet18:layers=1-1-1-1",
        shown="resnet50; demo: a ResNet-10",
        kept=True,
    )
    text_tower: str = option(
        "bert-base-uncased",
        "architecture, Hugging Face id, local folder or open_clip:MODEL",
        "NAME",
        demo="bert-mini",
        kept=True,
    )
    image_weights: str | None = option(
        None,
        "pretrained: library name, Hugging Face id, folder or file",
        "WHERE",
        shown="from scratch",
    )
    text_weights: str | None = option(
        None,
        "pretrained: Hugging Face id, folder or file",
        "WHERE",
        shown="from scratch",
    )
    audio_weights: str | None = option(
        None, "pretrained, as --image-weights", "WHERE", shown="from scratch"
    )
    video_weights: str | None = option(
        None,
        "pretrained, as --image-weights: of the tower of the frames, or of a video classifier",
        "WHERE",
        shown="from scratch",
    )
    imported: str | None = option(
        None,
        "a whole model to start from: a folder of export.py or of transformers' CLIPModel, "
        "SiglipModel, Siglip2Model, ChineseCLIPModel or VisionTextDualEncoderModel, or of OpenCLIP, "
        "or a Hugging Face id of one (OpenCLIP's: hf-hub:ORGANISATION/MODEL), which also say the "
        "towers, sizes, tokenizer and loss that are not given, and whose tower of images sees the "
        "frames where --pairs names films and no images; or a file of OpenCLIP weights, with "
        "both towers open_clip:MODEL",
        "WHERE",
        name="import",
        shown="from scratch",
    )
    tower: tuple[str, ...] = option(
        (),
        "of another modality that --pairs names; NAME as its module says; repeat it for several",
        "MODALITY=NAME",
        named_value,
        action="append",
        shown="the modality's own",
        in_recipe=False,
    )
    weights: tuple[str, ...] = option(
        (),
        "pretrained, of another modality that --pairs names: a folder or file with the tensors of "
        "its tower; repeat it for several",
        "MODALITY=WHERE",
        named_value,
        action="append",
        shown="from scratch",
        in_recipe=False,
    )
    embed_dim: int = option(512, "width of the common space", "N", at_least(1), demo=256, kept=True)
    projection: str = option(
        "linear",
        "from a tower's features to the embeddings; mlp: two layers and ReLU or NAME between them, "
        "as in CLAP; none: the features are the embeddings, as in SigLIP",
        "linear|mlp[:hidden_act=NAME]|none",
        shown="as in --import, else linear",
        kept=True,
    )

    @property
    def first_weights(self) -> dict[str, str]:
        """Where the tower of each branch starts from, without --import; none of towers from
        scratch."""
        return first_weights(vars(self))

    def tokenizer_source(self) -> str | None:
        """Where the tokenizer comes from: asked for, or that of the text tower's weights or beside
        its configuration; None: train one. Errors: ValueError for weights without one."""
        from data.modalities.tokenizer import has_vocabulary  # imports transformers
        from models.towers.names import split_name
        from models.towers.text import full_name, hub_id_of

        if self.tokenizer is not None:
            return self.tokenizer
        base, weights = split_name(full_name(self.text_tower))[0], self.text_weights
        folders = [base]
        if weights is not None and Path(weights).exists():
            folders.insert(0, weights if Path(weights).is_dir() else str(Path(weights).parent))
        elif weights is not None and "/" in weights:
            return weights
        elif weights is not None and base.startswith(OPEN_CLIP):
            return base
        elif weights and (hub_id := hub_id_of(base if weights == "DEFAULT" else weights)):
            return hub_id
        for folder in folders:
            if has_vocabulary(Path(folder)):
                return folder
        if weights or self.imported:
            flag, given = ("text-weights", weights) if weights else ("import", self.imported)
            raise ValueError(
                f"--{flag} {given}: there is no tokenizer beside these weights, and one trained on "
                "the captions would number its words otherwise. Give --tokenizer, the folder or "
                "Hugging Face id of the one that they were trained with"
            )
        return None


@dataclass(frozen=True)
class BranchOptions:
    """The options of train.py that are of one branch alone, by name: those of its tower and of the
    weights that this starts from, and `others`. `unset`: they are None where no pair has the
    branch."""

    tower: str
    weights: str
    others: tuple[str, ...] = ()
    unset: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (self.weights, self.tower, *self.others)


def _others(group: type[OptionGroup], tower: str) -> tuple[str, ...]:
    return tuple(each.name for each in fields(group) if each.name != tower)


OF_BRANCH = {
    "image": BranchOptions("image_tower", "image_weights", ("image_buckets", "views_per_image")),
    "text": BranchOptions("text_tower", "text_weights", ("tokenizer",)),
    "audio": BranchOptions(
        "audio_tower", "audio_weights", _others(AudioOptions, "audio_tower"), unset=True
    ),
    "video": BranchOptions(
        "video_tower", "video_weights", _others(VideoOptions, "video_tower"), unset=True
    ),
}
"""By modality. Others are named by --tower and --weights."""


def flag_of(branch: str, what: str, value: str) -> str:
    """How a command line gives a branch its tower or its weights: `--image-weights DEFAULT`,
    `--weights depth=DIR`. `what`: "tower" or "weights"."""
    if branch not in OF_BRANCH:
        return f"--{what} {branch}={value}"
    return f"--{getattr(OF_BRANCH[branch], what).replace('_', '-')} {value}"


def tower_names(options: Mapping[str, Any]) -> dict[str, str]:
    """By branch the name of its tower, of options by name; none where none is given."""
    return _by_branch(options, "tower")


def first_weights(options: Mapping[str, Any]) -> dict[str, str]:
    """As `TowerOptions.first_weights`, of options by name."""
    return _by_branch(options, "weights")


def _by_branch(options: Mapping[str, Any], what: str) -> dict[str, str]:
    given = {branch: options.get(getattr(own, what)) for branch, own in OF_BRANCH.items()}
    given |= by_modality(options.get(what))
    return {branch: value for branch, value in given.items() if value}


@dataclass(frozen=True, kw_only=True)
class TermOptions(OptionGroup):
    """What is trained beside the pairs."""

    title = "objective"
    in_recipe = True
    terms: str = option(
        "",
        "further terms of the loss: of one branch, whose rows of a sample are compared with each "
        "other (image=infonce), or of more than two (image+text+audio=NAME, of --import-module), "
        "each with its weight in the sum",
        "A[+B+C]=LOSS[:WEIGHT],...",
        terms,
        shown="none",
    )


@dataclass(frozen=True, kw_only=True)
class ModelOptions(TowerOptions, TermOptions):
    """What is trained, and from which weights."""

    title = "objective"
    in_recipe = True
    loss: str = option(
        "infonce",
        "over all pairs of the global batch: CLIP's cross entropy, or each pair by itself, as "
        "SigLIP does; NAME: one that --import-module adds; or one for each of several --pairs",
        "infonce|sigmoid|NAME|A:B=NAME,...",
        shown="that of --import, else infonce",
        kept=True,
    )
    label_smoothing: float | None = option(
        None,
        "part of each target that all share, in infonce",
        "F",
        fraction,
        shown="as the preset says, ds_configs/README.md",
        kept=True,
    )
    prefixes: tuple[int, ...] = option(
        (),
        "lengths below --embed-dim to which embeddings may be cut: the loss is the mean over these "
        "prefixes and the whole (Matryoshka); evaluate.py --prefix N measures one",
        "N,N",
        rising,
        shown="none",
    )
    duplicates: str = option(
        "masked",
        "what samples of a batch are to each other whose image, sound or caption is the same: left "
        "out of each other's loss, each other's positives, or negatives like all others; regions "
        "with equal phrases are each other's positives, with milnce left out of each other's loss",
        choices=("masked", "positives", "negatives"),
        kept=True,
    )
    fusion: int = option(
        0,
        "layers of cross-attention that learn to tell whether an image and a text belong together, "
        "from hard negatives of the global batch; 0: none",
        "N",
        at_least(0),
    )
    fusion_width: int = option(512, "of its tokens", "N", at_least(1))
    fusion_heads: int = option(8, "of its attention", "N", at_least(1))
    fusion_scales: int | None = option(
        None,
        "sizes of the image tower's maps that it sees, the smallest ones",
        "N",
        at_least(1),
        shown="2, or 1 where there is one",
    )
    matching_weight: float = option(
        1.0, "of its loss, that of the contrastive one being 1", "W", positive
    )
    loss_weights: str = option(
        "fixed",
        "of all losses: as given, by a learned uncertainty of each, by how they fall and how far "
        "the embeddings have come, or, with several pairs, after each evaluation by the alignment "
        "and uniformity of their held-out embeddings",
        choices=MODES,
    )
    loss_weights_every: int = option(
        50,
        "steps between changes of --loss-weights uncertainty or measured",
        "N",
        at_least(1),
    )

    def check_objective(self) -> None:
        """Raise ValueError for options that do not go together, or would do nothing."""
        pairs = [f"contrastive/{pair.name}" for pair in read_pairs(self.pairs)]
        if self.fusion and self.fusion_width % self.fusion_heads:
            raise ValueError(
                f"argument --fusion-width: {self.fusion_width} is no multiple of --fusion-heads "
                f"{self.fusion_heads}"
            )
        if self.loss_weights == "alignment" and self.terms:
            raise ValueError(
                "argument --loss-weights: alignment is measured of pairs, and of no term of --terms "
                f"{self.terms}; give another one, or leave --terms out"
            )
        try:
            check_mode(self.loss_weights, [*pairs, *(["matching"] if self.fusion else [])])
        except ValueError as error:
            raise ValueError(f"argument --loss-weights: {error}") from None


@dataclass(frozen=True, kw_only=True)
class LengthOptions(OptionGroup):
    """How long a run is, and what it does on the way."""

    title = "length"
    free = True
    in_recipe = True
    epochs: int | None = option(
        *(30, "passes over the training samples", "N", at_least(1)),
        demo=12,
        demos={"clips": 6},
        kept=True,
        free=False,
    )
    steps: int | None = option(
        None,
        "optimizer steps, instead of epochs",
        "N",
        at_least(1),
        shown="as --epochs says",
        kept=True,
        free=False,
    )
    save_every: int | None = option(
        None,
        "steps between checkpoints; one is always made at the end",
        "N",
        at_least(1),
        shown="whole epochs of at least 20 steps",
    )
    keep_checkpoints: int = option(3, "the newest ones that stay", "K", at_least(1))
    keep_every: int | None = option(
        None,
        "also keep the first checkpoint of every N steps",
        "N",
        at_least(1),
    )
    eval_every: int | None = option(
        None,
        "steps between held-out evaluations; one is always made at the end",
        "N",
        at_least(1),
        shown="whole epochs of at least 20 steps",
    )
    eval_ema: bool = option(
        False,
        "evaluate the moving average of the weights too; needs the JSON's ema block",
    )


@dataclass(frozen=True, kw_only=True)
class BatchingOptions(DataOptions, TowerOptions, LengthOptions, TermOptions):
    """Which samples make which micro-batch."""

    title = "tracking"
    explain_balance: int = option(
        0,
        "print how N global batches are packed before training starts",
        "N",
        at_least(0),
        free=True,
    )


@dataclass(frozen=True, kw_only=True)
class TrackingOptions(OptionGroup):
    title = "tracking"
    free = True
    wandb: str = option(
        "auto",
        "Weights & Biases; auto: online where a login is found",
        choices=WANDB_MODES,
    )
    wandb_project: str | None = option(
        None,
        "project there",
        "NAME",
        shown="that of the JSON's wandb block or of WANDB_PROJECT, else wye",
    )
    trace_every: int = option(
        100, "steps between those written to trace.json; 0: none", "N", at_least(0)
    )


GROUPS: Sequence[type[OptionGroup]] = (
    RunOptions,
    ModuleOptions,
    SeedOptions,
    DataOptions,
    BadSampleOptions,
    LoadingOptions,
    TowerOptions,
    ImageOptions,
    TextOptions,
    AudioOptions,
    VideoOptions,
    AnnotationOptions,
    PairsOptions,
    TermOptions,
    ModelOptions,
    LengthOptions,
    TrackingOptions,
    BatchingOptions,
)
"""In the order of the help."""
FLAGS = {name: flag for kind in GROUPS for name, flag in flags_of(kind)}
