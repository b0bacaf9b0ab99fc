"""What the command line of train.py decides, and the defaults that depend on what is trained."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from data.formats.rows import near
from data.index.roots import from_anywhere, given_roots
from data.modalities.preprocessing import NORMALIZATIONS, Preprocessing
from data.modules import import_modules
from data.options import IMAGE_TEXT, branches_of, read_pairs
from launch.balancing.loss_weights import check_mode
from launch.run.records import (
    PIXELS,
    options_of_import,
    read_export,
    read_run,
    refuse_no_model,
)
from launch.settings.audio import AUDIO, audio_options
from launch.settings.flags import make_parser
from launch.settings.overrides import split_settings
from launch.settings.recipe_files import RecipeFile, with_recipe
from models.towers.names import join_name, split_name

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from engine.config.reading import BranchesBlock

ROOT = Path(__file__).resolve().parents[2]
OPEN_CLIP = "open_clip:"  # how the names of OpenCLIP's models begin
Section = TypeVar("Section", bound="DataclassInstance")


@dataclass(frozen=True)
class Options:
    """Everything the command line decides. Field names are the flags' names."""

    deepspeed_config: Path | None
    set: tuple[str, ...]
    import_module: tuple[str, ...] | None
    data: tuple[str, ...]
    data_root: tuple[str, ...] | None
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
    augmentation: tuple[str, ...] | None
    audio_augmentation: tuple[str, ...] | None
    cache: str
    cache_limit: float
    image_tower: str
    text_tower: str
    audio_tower: str | None  # this and what is of audio: None where no pair has it
    image_weights: str | None
    text_weights: str | None
    audio_weights: str | None
    imported: str | None
    tokenizer: str | None
    tower: tuple[str, ...]
    embed_dim: int
    projection: str
    image_size: int
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]
    image_interpolation: str
    image_resize: int
    image_resize_mode: str
    image_buckets: int
    audio_seconds: float | None
    max_audio_seconds: float | None
    audio_size: int | None
    max_text_tokens: int
    pairs: str
    loss: str
    label_smoothing: float | None
    duplicates: str
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
    workers: str | int
    run_dir: Path | None
    save_every: int | None
    keep_checkpoints: int
    keep_every: int | None
    max_hours: float | None
    stall_limit: float
    deterministic: bool
    eval_every: int | None
    eval_ema: bool
    trace_every: int
    explain_balance: int
    resume: str
    dry_run: bool
    ranks: int | None
    device: str | None
    wandb: str
    wandb_project: str | None

    @property
    def branches(self) -> tuple[str, ...]:
        """The modalities of the pairs, each a branch, in the order in which they are first
        named."""
        return branches_of(self.pairs)

    def section(self, kind: type[Section]) -> Section:
        """The options of one component: a dataclass of its own whose fields are named as here."""
        return kind(**{field.name: getattr(self, field.name) for field in fields(kind)})

    def tokenizer_source(self) -> str | None:
        """Where the tokenizer comes from: asked for, or that of the text tower's weights or beside
        its configuration; None: train one. Errors: ValueError for weights without one."""
        from data.modalities.tokenizer import has_vocabulary  # imports transformers
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

    def refuse_beside(self, block: BranchesBlock) -> None:
        """Raise ValueError for a flag that does not go with what the `branches` block says."""
        if self.eval_ema and block.averaging() is None:
            raise ValueError(
                '--eval-ema: the weights are not averaged; add "ema": {"decay": 0.9999, "warmup": true} to "branches", or leave it out'
            )
        if self.fusion and block.locking().head:
            raise ValueError(
                f'--fusion {self.fusion}: it would not learn; set "head" of "branches.locked" to false, or leave --fusion out'
            )

    def record(self) -> dict[str, Any]:
        plain = {Path: str, tuple: list}
        return {
            key: next((to(value) for kind, to in plain.items() if isinstance(value, kind)), value)
            for key, value in asdict(self).items()
        }


DEMO_DEFAULTS = {
    "image_tower": "resnet18:layers=1-1-1-1",
    "text_tower": "bert-mini",
    "embed_dim": 256,
    "image_size": 64,
    "max_text_tokens": 32,
    "epochs": 12,
    "loss": "infonce",
    "duplicates": "masked",
    "projection": "linear",
}
DEFAULTS = {
    "image_tower": "resnet50",
    "text_tower": "bert-base-uncased",
    "embed_dim": 512,
    "image_size": 224,
    "max_text_tokens": 77,
    "epochs": 30,
    "loss": "infonce",
    "duplicates": "masked",
    "projection": "linear",
}


def parse_options(arguments: list[str] | None = None) -> Options:
    """Options of train.py; exits with status 2 and one message when they are wrong."""
    parser = make_parser()
    words, file, recipe = with_recipe(parser, sys.argv[1:] if arguments is None else arguments)
    values = _parsed(parser, words)
    values.pop("local_rank")
    values.pop("recipe")
    _check_dry_run(parser, values, recipe)
    if recipe and values["deepspeed_config"]:
        parser.error(
            f"argument --deepspeed_config: --recipe {file} is one too; give one of them, or copy "
            "the recipe and change it"
        )
    values["deepspeed_config"] = file or values["deepspeed_config"]
    if values["workers"].isdigit():
        values["workers"] = int(values["workers"])
    elif values["workers"] != "auto":
        parser.error(
            f"argument --workers: {values['workers']!r} is neither 'auto' nor a whole number"
        )
    values["import_module"] = values["import_module"] and tuple(values["import_module"])
    try:
        import_modules(
            values["import_module"]
        )  # first: what they register are values of other flags
    except ValueError as error:
        parser.error(str(error))
    held = _take_import(parser, values)
    _check_fusion(parser, values)
    _check_pairs(parser, values)
    pixels = _given_pixels(parser, values)
    values["data"] = tuple(map(from_anywhere, values["data"] or ["demo"]))
    values["val_data"] = values["val_data"] and from_anywhere(values["val_data"])
    values["data_root"] = given_roots(
        parser, values["data_root"], [*values["data"], *filter(None, [values["val_data"]])]
    )
    values["data_weights"] = _weights(parser, values["data_weights"], values["data"])
    values["data_floors"] = _floors(parser, values["data_floors"], values["data"])
    for key, neutral in {"data_temperature": 1, "data_adapt": 0}.items():
        if len(values["data"]) == 1 and values[key] != neutral:
            parser.error(
                f"argument --{key.replace('_', '-')}: {values[key]:g}; one --data has nothing to "
                "share, give several"
            )
    for key in ("tokenizer", "imported"):
        values[key] = values[key] and _from_anywhere(values[key])
    for key in (
        "image_weights",
        "text_weights",
        "audio_weights",
    ):  # NAME is also one that a library knows; ./NAME is not
        values[key] = _from_anywhere(values[key]) if "/" in (values[key] or "") else values[key]
    if "/" in (values["text_tower"] or ""):
        base, overrides = split_name(values["text_tower"])
        values["text_tower"] = join_name(_from_anywhere(base), overrides)
    sized = values["image_size"] is not None
    # What the command of a run that goes on leaves out stays what it was, also where defaults have
    # changed since.
    recorded = (values["run_dir"] and read_run(values["run_dir"]) or {}).get("options", {})
    if recorded:  # a run that began before there was a choice
        recorded = {"duplicates": "negatives", **recorded}
    defaults = (
        DEMO_DEFAULTS if all(spec.split(":")[0] == "demo" for spec in values["data"]) else DEFAULTS
    )
    for key, default in defaults.items():
        if values[key] is None and not (key == "epochs" and values["steps"] is not None):
            values[key] = recorded.get(key) or default
    values |= audio_options(values, recorded, defaults is DEMO_DEFAULTS)
    _check_loss(parser, values)
    _check_projection(parser, values["projection"])
    for key in (
        "augmentation",
        "label_smoothing",
    ):  # not given and not recorded: the recipe says (launch/settings/recipe.py)
        values[key] = recorded.get(key) if values[key] is None else values[key]
    values["augmentation"] = (
        None if values["augmentation"] is None else tuple(values["augmentation"])
    )
    weights = values["imported"] if "image" in held else values["image_weights"]
    values |= _pixels(parser, pixels, values, weights=weights, sized=sized, recorded=recorded)
    options = Options(**values)
    _check_tokenizer(parser, options)
    return options


def _take_import(parser: argparse.ArgumentParser, values: dict[str, Any]) -> tuple[str, ...]:
    """Fill in what is not given as the model of --import says it, the pairs also without one;
    returns the branches that the model has towers of."""
    given, found = values["pairs"], {}
    if values["imported"]:
        values["imported"] = _model_folder(parser, values["imported"])
        found = _of_import(parser, values)
    held = branches_of(found.get("pairs", IMAGE_TEXT)) if values["imported"] else ()
    values["pairs"] = given or found.get("pairs", IMAGE_TEXT)
    lacking = [branch for branch in held if branch not in branches_of(values["pairs"])]
    # what export.py wrote of three towers goes on with two of them too
    if lacking and not (lacking == ["audio"] and read_export(Path(values["imported"]))):
        parser.error(
            f"argument --import: it is of the {lacking[0]} branch, and no pair of --pairs "
            f"{values['pairs']} has '{lacking[0]}'; leave it out"
        )
    for branch in held:
        if values.get(f"{branch}_weights"):
            parser.error(
                f"argument --import: it holds the {branch} tower; leave out --{branch}-weights"
            )
    for key, default in found.items():
        is_used = key.partition("_")[0] not in lacking
        if key not in PIXELS and values[key] is None and is_used:
            values[key] = default
    return held


def _parsed(parser: argparse.ArgumentParser, words: list[str]) -> dict[str, Any]:
    """By name, with the flags that --set gives in place of their own; `set` keeps what is for the
    JSON file."""
    values = vars(parser.parse_args(words))
    flags, settings = split_settings(parser, values["set"] or ())
    if flags:
        values = vars(parser.parse_args([*words, *flags]))
    return {**values, "set": settings}


def _check_dry_run(
    parser: argparse.ArgumentParser, values: dict[str, Any], recipe: RecipeFile | None
) -> None:
    """Refuse --ranks and --device without --dry-run; with it fill in what the recipe says."""
    for key in ("ranks", "device"):
        if not values["dry_run"] and values[key] is not None:
            parser.error(
                f"argument --{key}: {values[key]} is for --dry-run; a run has what it is started on"
            )
        if values["dry_run"] and recipe and values[key] is None:
            values[key] = getattr(recipe, key)


def _given_pixels(parser: argparse.ArgumentParser, values: dict[str, Any]) -> dict[str, Any]:
    """What the command line says of mean, standard deviation, interpolation and resize, taken out
    of `values`; None: nothing."""
    normalization = values.pop("image_normalization")
    given = {key: values.pop(key) for key in PIXELS}
    if (given["image_mean"] is None) != (given["image_std"] is None):
        parser.error(
            "argument --image-mean: it goes together with --image-std; give both, or "
            "--image-normalization"
        )
    if normalization and given["image_mean"]:
        parser.error(
            "argument --image-normalization: --image-mean and --image-std say the same; give one "
            "of them"
        )
    if normalization:
        given["image_mean"], given["image_std"] = NORMALIZATIONS[normalization]
    return given


def _pixels(
    parser: argparse.ArgumentParser,
    given: Mapping[str, Any],
    values: Mapping[str, Any],
    weights: str | None,
    sized: bool,
    recorded: Mapping[str, Any],
) -> dict[str, Any]:
    """The image size and the four options of PIXELS: as given, else as the image tower's `weights`
    were trained, else CLIP's; of a run that goes on as `recorded`, which without any of them was
    trained with CLIP's. `sized`: the size was given."""
    from launch.settings.preprocessing import (
        trained_with,
    )  # imports torchvision, which --help can do without

    found = None if weights is None or recorded else trained_with(weights, values["image_tower"])
    trained, size = found or (Preprocessing.from_options(recorded), values["image_size"])
    size = values["image_size"] if sized else size
    pixels = {
        key: default if given[key] is None else given[key]
        for key, default in trained.options(size).items()
    }
    if pixels["image_resize"] < size:
        parser.error(
            f"argument --image-resize: {pixels['image_resize']} is below --image-size {size}; the "
            "centre is cropped from it"
        )
    try:
        Preprocessing.from_options({**pixels, "image_size": size})
    except ValueError as error:
        parser.error(str(error))
    return {"image_size": size, **pixels}


def _check_tokenizer(parser: argparse.ArgumentParser, options: Options) -> None:
    """Refuse one that lacks, before anything is written."""
    # imports transformers, which --help can do without
    from data.modalities.tokenizer import refuse_no_vocabulary

    try:
        if source := options.tokenizer_source():
            refuse_no_vocabulary(source)
    except ValueError as error:
        parser.error(str(error))


def _from_anywhere(where: str) -> str:
    """A file or folder that is here by its absolute path, so that evaluate.py and export.py find it
    from elsewhere; all else as it was given."""
    return str(Path(where).expanduser().absolute()) if Path(where).expanduser().exists() else where


def _model_folder(parser: argparse.ArgumentParser, where: str) -> str:
    """The folder or file of --import; a model on the Hugging Face hub is downloaded."""
    if Path(where).expanduser().exists():
        return where
    from models.weights.reading import find_model  # imports torch, which --help can do without

    try:
        return str(find_model(where))
    except OSError as error:
        parser.error(f"argument --import: {error}")


def _of_import(parser: argparse.ArgumentParser, values: Mapping[str, Any]) -> dict[str, Any]:
    """The options that the model of --import says. A file of weights says none, unless both towers
    are the two sides of a model of OpenCLIP."""
    try:
        refuse_no_model(values["imported"], Path(values["imported"]), weights_alone=True)
        found = options_of_import(Path(values["imported"]))
        towers = values["image_tower"], values["text_tower"]
        if not found and all(tower and tower.startswith(OPEN_CLIP) for tower in towers):
            from models.weights.open_clip_models import model_of_towers, options_of_open_clip

            model = model_of_towers(*towers)
            found = options_of_open_clip(model) if model else {}
    except (ValueError, OSError) as error:
        parser.error(f"argument --import: {error}")
    return found


def default_config(on_gpu: bool, bf16_supported: bool, world_size: int) -> Path:
    """The JSON file that suits the hardware found. Without a GPU a fork where there are processes
    for one: it is planned from counted operations, so nothing is measured, and equal runs are
    equal."""
    if on_gpu:
        name = "zero1_bf16.json" if bf16_supported else "zero1_fp16.json"
    else:
        name = "cpu_fork_fp32.json" if world_size > 1 else "cpu_fp32.json"
    return ROOT / "ds_configs" / name


def _check_loss(parser: argparse.ArgumentParser, values: Mapping[str, Any]) -> None:
    from models.losses import LOSSES  # imports torch, which --help can do without

    if values["loss"] not in LOSSES:
        parser.error(
            f"argument --loss: there is no loss '{values['loss']}'; there are "
            f"{', '.join(LOSSES)}{near(values['loss'], list(LOSSES))}"
        )
    if values["label_smoothing"] and values["loss"] != "infonce":
        parser.error(
            f"argument --label-smoothing: {values['label_smoothing']} is for --loss infonce; "
            f"{values['loss']} has no targets to smooth, so leave it out"
        )


def _check_projection(parser: argparse.ArgumentParser, projection: str) -> None:
    from models.towers.head import read_projection  # imports torch, which --help can do without

    try:
        read_projection(projection)
    except ValueError as error:
        parser.error(f"argument --projection: {error}")


def _check_pairs(parser: argparse.ArgumentParser, values: dict[str, Any]) -> None:
    # imports torchvision, which --help can do without
    from launch.settings.modalities import refuse_pairs

    values["tower"] = tuple(values["tower"] or ())
    try:
        refuse_pairs(values["pairs"], values["tower"], bool(values["fusion"]))
    except ValueError as error:
        parser.error(str(error))
    for branch in ("image", "text", "audio"):
        _check_used(parser, values, branch)


def _check_used(parser: argparse.ArgumentParser, values: Mapping[str, Any], branch: str) -> None:
    """Refuse flags of a branch that no pair has."""
    if branch in branches_of(values["pairs"]):
        return
    of_branch = {
        "image": ("image_tower", "image_weights", "image_buckets"),
        "text": ("text_tower", "text_weights", "tokenizer"),
        "audio": ("audio_weights", *AUDIO),
    }
    for key in of_branch[branch]:
        if values[key] not in (None, parser.get_default(key)):
            parser.error(
                f"argument --{key.replace('_', '-')}: it is of the {branch} branch, and no pair of --pairs "
                f"{values['pairs']} has '{branch}'; leave it out"
            )


def _check_fusion(parser: argparse.ArgumentParser, values: Mapping[str, Any]) -> None:
    if values["fusion"] and values["fusion_width"] % values["fusion_heads"]:
        parser.error(
            f"argument --fusion-width: {values['fusion_width']} is no multiple of --fusion-heads "
            f"{values['fusion_heads']}"
        )
    pairs = read_pairs(values["pairs"])
    try:
        check_mode(
            values["loss_weights"],
            [
                *(f"contrastive/{p.first}_{p.second}" for p in pairs),
                *(["matching"] if values["fusion"] else []),
            ],
        )
    except ValueError as error:
        parser.error(f"argument --loss-weights: {error}")
    of_several = (
        "loss_weights",
        "loss_weights_every",
    )  # losses: of pairs, or of matching beside that of the pair
    for key in ("fusion_width", "fusion_heads", "fusion_scales", "matching_weight", *of_several):
        if (
            not values["fusion"]
            and values[key] != parser.get_default(key)
            and (key not in of_several or len(pairs) == 1)
        ):
            also = " or several --pairs" if key in of_several else ""
            parser.error(
                f"argument --{key.replace('_', '-')}: {values[key]} is for a run with "
                f"--fusion{also}; add --fusion N, or leave it out"
            )
    every = values["loss_weights_every"]
    if values["loss_weights"] in ("fixed", "alignment") and every != parser.get_default(
        "loss_weights_every"
    ):
        parser.error(
            f"argument --loss-weights-every: {every} is for --loss-weights uncertainty or measured; "
            f"{values['loss_weights']} follows no losses, so leave it out"
        )


def _weights(
    parser: argparse.ArgumentParser, given: str | None, data: tuple[str, ...]
) -> tuple[float, ...] | None:
    if given is None:
        return None
    weights = _numbers(given)
    if (
        len(weights) != len(data)
        or not all(0 <= weight < math.inf for weight in weights)
        or not any(weights)
    ):
        parser.error(
            f"argument --data-weights: {given!r}; {len(data)} --data need {len(data)} numbers >= "
            "0, not all 0, such as 1,0.5"
        )
    return weights


def _floors(
    parser: argparse.ArgumentParser, given: str | None, data: tuple[str, ...]
) -> tuple[float, ...] | None:
    if given is None:
        return None
    if len(data) == 1:
        parser.error(
            f"argument --data-floors: {given!r}; one --data has nothing to share, give several"
        )
    floors = _numbers(given)
    if (
        len(floors) != len(data)
        or not all(0 <= floor <= 1 for floor in floors)
        or math.fsum(floors) > 1 + 1e-9
    ):
        parser.error(
            f"argument --data-floors: {given!r}; {len(data)} --data need {len(data)} numbers from "
            "0 to 1, together at most 1, such as 0.2,0"
        )
    return floors


def _numbers(given: str) -> tuple[float, ...]:
    """Nothing where one of them is no number."""
    try:
        return tuple(float(number) for number in given.split(","))
    except ValueError:
        return ()
