"""The command line of train.py: where each option's value comes from.

    --set NAME=VALUE  over  --NAME VALUE  over  --recipe  over  the run that goes on (what it began
    with, of options that are `kept`)  over  the model of --import  over  the default

`decide` does all of it; `--show-options` prints what came of it.
"""

from __future__ import annotations

import argparse
from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.command_line import CommandParser
from common.options import SAME, add_flags
from common.spelling import near
from data.index.roots import from_anywhere
from data.modules import import_modules
from data.options import (
    IMAGE_TEXT,
    DataOptions,
    LoadingOptions,
    branches_of,
    derived_of,
    loss_for,
    loss_names,
    read_pairs,
)
from data.stored.derived import DERIVED
from engine.processes.launchers import adopt_launcher
from launch.config.groups import (
    FLAGS,
    GROUPS,
    OF_BRANCH,
    OPEN_CLIP,
    PIXELS,
    BatchingOptions,
    ModelOptions,
    RunOptions,
    TrackingOptions,
    by_modality,
    first_weights,
    flag_of,
    tower_names,
)
from launch.config.imported import (
    as_branches,
    options_of_import,
    own_of_export,
    refuse_no_model,
)
from launch.config.recipe_files import RecipeFile, find_recipe
from launch.config.settings import split_settings
from launch.records import read_export, read_run
from launch.terminal.last_words import say_last
from models.towers.names import join_name, split_name

if TYPE_CHECKING:
    from engine.config.reading import BranchesBlock

ROOT = Path(__file__).resolve().parents[2]
EITHER = ("epochs", "steps")  # one of them ends a run


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions, BatchingOptions, LoadingOptions, ModelOptions, TrackingOptions):
    """Everything that the command line decides. `sources`: where each value comes from."""

    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def refuse_beside(self, block: BranchesBlock) -> None:
        """Raise ValueError for a flag that does not go with what the `branches` block says."""
        if self.eval_ema and block.averaging() is None:
            raise ValueError(
                '--eval-ema: the weights are not averaged; add "ema": {"decay": 0.9999, "warmup": '
                'true} to "branches", or leave it out'
            )
        if self.fusion and block.locking().head:
            raise ValueError(
                f'--fusion {self.fusion}: it would not learn; set "head" of "branches.locked" to '
                "false, or leave --fusion out"
            )


class _Parser(CommandParser):
    def say(self, message: str) -> None:
        say_last(message)


def make_parser() -> CommandParser:
    parser = _Parser(
        prog="train.py",
        description="Train an image tower and a text tower as a forked pipeline with one exact loss "
        "over the global batch. Without any flag: a small pair of towers on the embedded data.",
        epilog="Learning rate, schedule, batch sizes, precision, ZeRO and the layout of the stages "
        "are in the JSON file: ds_configs/README.md. Arguments may stand in a file, one on each line: "
        "train.py @FILE.",
    )
    add_flags(parser, GROUPS)
    # given by DeepSpeed's launcher, which also sets LOCAL_RANK
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS, default=argparse.SUPPRESS)
    return parser


def parse_options(
    arguments: Sequence[str] | None = None, environment: MutableMapping[str, str] | None = None
) -> Options:
    """Options of train.py; exits with status 2 and one message when they are wrong.

    `environment`: of this process, where it is to learn from its launcher which rank it is. The
    first one says what is wrong.
    """
    parser = make_parser()
    try:
        if environment is not None:
            adopt_launcher(environment)
        return decide(parser, parser.words(arguments))
    except ValueError as error:
        parser.error(str(error))


def decide(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> Options:
    """Every option with its value, the strongest of those given. Errors: ValueError."""
    typed = _values(parser, arguments)
    flags, off, settings = split_settings(parser, typed.get("set", ()))
    by_set = {**_values(parser, flags), **off}
    typed["set"] = settings
    layers: dict[str, Mapping[str, Any]] = {"--set": by_set, "command line": typed}
    given: ChainMap[str, Any] = ChainMap(by_set, typed)

    recipe = _recipe(given)
    if recipe is not None:
        own = _values(parser, recipe.arguments())
        own["deepspeed_config"] = recipe.file
        if given.get("dry_run") or given.get("show_options"):
            own |= {"ranks": recipe.ranks, "device": recipe.device}
        layers[f"recipe {given['recipe']}"] = own
        given.maps.append(own)

    # first: what they register are values of other flags
    import_modules(given.get("import_module"))
    began = _began(given.get("run_dir"))
    layers["the run that goes on"] = began
    strongest = next((layer for layer in given.maps if layer.get("imported")), None)
    if strongest is not None:
        strongest["imported"] = _model_folder(strongest["imported"])
    imported, held = _of_import(given)
    layers["--import"] = {
        name: value for name, value in imported.items() if name not in (*PIXELS, *began)
    }
    demo = DataOptions(data=tuple(given.get("data", ("demo",)))).demo
    defaults = {name: default_of(name, demo) for name in FLAGS}
    layers["default"] = defaults
    _refuse_two_lengths(layers)
    values = ChainMap(*map(dict, layers.values()))
    for branch, where in first_weights(given).items():
        if branch in held:
            raise ValueError(
                f"argument --import: it holds the {branch} tower; leave out "
                f"{flag_of(branch, 'weights', where)}"
            )
    # imports torchvision, which --help can do without
    from launch.config.pixels import settled_pixels

    pixels, trained = settled_pixels(given, values, held, began)
    settled = {**values, **_paths(values), **_further_towers(values, imported), **pixels}
    for branch, of_branch in OF_BRANCH.items():
        if of_branch.unset and branch not in branches_of(values["pairs"]):
            settled |= dict.fromkeys((of_branch.tower, *of_branch.others))
    sources = {
        name: next(source for source, layer in layers.items() if name in layer) for name in defaults
    }
    if trained:
        unsaid = [name for name in pixels if sources[name] == "default"]
        sources |= dict.fromkeys(unsaid, "the weights of the image tower")
    if not settings:
        sources["set"] = "default"
    as_tuples: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in settled.items()
    }
    options = Options(**as_tuples, sources=sources)
    options.check()
    options.check_objective()
    _refuse_useless(options, given)
    _refuse_unknown(options)
    return options


def free_options() -> list[str]:
    """Those that may differ when a run goes on, because they do not change what is trained."""
    return [name for name, flag in FLAGS.items() if flag.free]


def default_of(name: str, demo: str | None = None) -> Any:
    """Of an option; `demo`: where all data are embedded ones, as `DataOptions.demo` names them."""
    flag = FLAGS[name]
    if demo is None:
        return flag.default
    return flag.demos.get(demo, flag.default if flag.demo is SAME else flag.demo)


def _refuse_two_lengths(layers: dict[str, Mapping[str, Any]]) -> None:
    """Epochs and steps are two words for one choice: the strongest layer that says one decides."""
    for name, layer in layers.items():
        said = [word for word in EITHER if layer.get(word) is not None]
        if len(said) > 1:
            raise ValueError("argument --steps: not allowed with argument --epochs")
        if said:
            layers[name] = {**layer, **{word: layer.get(word) for word in EITHER}}
            return


def _values(parser: argparse.ArgumentParser, words: Sequence[str]) -> dict[str, Any]:
    """What the words give; nothing for what they do not."""
    values = vars(parser.parse_args(list(words)))
    values.pop("local_rank", None)
    return values


def _recipe(given: Mapping[str, Any]) -> RecipeFile | None:
    if given.get("recipe") is None:
        return None
    try:
        recipe = RecipeFile.read(find_recipe(given["recipe"]))
    except ValueError as error:
        raise ValueError(f"argument --recipe: {error}") from error
    if given.get("deepspeed_config"):
        raise ValueError(
            f"argument --deepspeed_config: --recipe {recipe.file} is one too; give one of them, or "
            "copy the recipe and change it"
        )
    return recipe


def _began(run_dir: Path | None) -> dict[str, Any]:
    """What the command of a run that goes on may leave out: it stays what it was, also where
    defaults have changed since."""
    recorded = (run_dir and read_run(run_dir) or {}).get("options", {})
    kept = [name for name, flag in FLAGS.items() if flag.kept]
    return {name: v for name, v in recorded.items() if name in kept and v is not None}


def _of_import(given: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The options that the model of --import says, and the branches that it has towers of. A file
    of weights says none, unless both towers are the two sides of a model of OpenCLIP."""
    if not given.get("imported"):
        return {}, ()
    where = Path(given["imported"])
    try:
        refuse_no_model(given["imported"], where, weights_alone=True)
        said = options_of_import(where)
        towers = tower_names(given)
        two = towers.get("image", towers.get("video", "")), towers.get("text", "")
        if not said and all(tower.startswith(OPEN_CLIP) for tower in two):
            from models.weights.open_clip_models import model_of_towers, options_of_open_clip

            model = model_of_towers(*two)
            said = options_of_open_clip(model) if model else {}
    except (ValueError, OSError) as error:
        raise ValueError(f"argument --import: {error}") from error
    from data.stored.kinds import stored  # imports numpy, which --help can do without

    pairs = given.get("pairs") or said.get("pairs", IMAGE_TEXT)
    named = branches_of(pairs)
    held = as_branches(branches_of(said.get("pairs", IMAGE_TEXT)), named)
    lacking = [branch for branch in held if branch not in named]
    for branch in held:
        part = OF_BRANCH.get(stored(branch).parts)
        if part and part.tower in said:  # the tower of images is for the frames of films
            said[OF_BRANCH[branch].tower] = said.pop(part.tower)
    # what export.py wrote of more towers goes on with two of them too
    own = own_of_export(where)
    if lacking and not (read_export(where) and {*lacking} <= {"audio", *own.get("branches", ())}):
        raise ValueError(
            f"argument --import: it is of the {lacking[0]} branch, and no pair of --pairs {pairs} "
            f"has '{lacking[0]}'; leave it out"
        )
    if "loss" in said:
        said["loss"] = loss_for(said["loss"], pairs)
    if "tower" in said:
        towers = by_modality(said["tower"])
        said["tower"] = tuple(f"{b}={name}" for b, name in towers.items() if b in named)
    unused = [name for branch in lacking if branch in OF_BRANCH for name in OF_BRANCH[branch].names]
    return {name: value for name, value in said.items() if name not in unused}, held


def _further_towers(values: Mapping[str, Any], imported: Mapping[str, Any]) -> dict[str, Any]:
    """--tower, with what the model of --import says of branches that it does not name."""
    named = by_modality(values["tower"])
    said = by_modality(imported.get("tower"))
    further = [f"{branch}={name}" for branch, name in said.items() if branch not in named]
    return {"tower": (*values["tower"], *further)}


def _model_folder(where: str) -> str:
    """The folder or file of --import; a model on the Hugging Face hub is downloaded."""
    if Path(where).expanduser().exists():
        return where
    from models.weights.reading import find_model  # imports torch, which --help can do without

    try:
        return str(find_model(where))
    except OSError as error:
        raise ValueError(f"argument --import: {error}") from error


def _useless(options: Options) -> Iterator[tuple[Sequence[str], str]]:
    """Options that would do nothing beside the others, with what they are for."""
    if not (options.dry_run or options.show_options):
        yield ("ranks", "device"), "--dry-run and --show-options; a run has what it is started on"
    if not options.fusion:
        of_fusion = ("fusion_width", "fusion_heads", "fusion_scales", "matching_weight")
        yield of_fusion, "a run with --fusion"
        if len(read_pairs(options.pairs)) == 1 and not options.terms:
            yield ("loss_weights", "loss_weights_every"), "--fusion or several --pairs"
    if options.loss_weights not in ("uncertainty", "measured"):
        yield ("loss_weights_every",), "--loss-weights uncertainty or measured"
    if "infonce" not in loss_names(options.loss, options.pairs):
        yield ("label_smoothing",), f"--loss infonce; {options.loss} has no targets to smooth"
    derived, every = derived_of(options.pairs), " or ".join(k.pair_name for k in DERIVED.values())
    for kind in DERIVED.values():
        if kind is not derived:
            yield (kind.most,), f"--pairs with {kind.pair_name}"
    if derived is None:
        yield ("max_negatives",), f"--pairs with {every}"
    for branch, own in OF_BRANCH.items():
        if branch not in options.branches:
            lacks = f"no pair of --pairs {options.pairs} has '{branch}'"
            yield own.names, f"the {branch} branch, and {lacks}"


def _refuse_useless(options: Options, given: Mapping[str, Any]) -> None:
    for names, purpose in _useless(options):
        for name in names:
            value = given.get(name)
            if value and value != FLAGS[name].default:
                raise ValueError(
                    f"argument --{name.replace('_', '-')}: {value} is for {purpose}; leave it out"
                )


def _paths(values: Mapping[str, Any]) -> dict[str, Any]:
    """What is named by a path, by its absolute one, so that evaluate.py and export.py find it from
    elsewhere."""
    found: dict[str, Any] = {
        "data": tuple(map(from_anywhere, values["data"])),
        "val_data": values["val_data"] and from_anywhere(values["val_data"]),
        "data_root": values["data_root"] and tuple(dict.fromkeys(values["data_root"])),
        "tokenizer": values["tokenizer"] and _absolute(values["tokenizer"]),
    }
    own = by_modality(values["weights"])
    found["weights"] = tuple(f"{branch}={_absolute(where)}" for branch, where in own.items())
    for name in (*(own.weights for own in OF_BRANCH.values()), "imported", "text_tower"):
        value = values[name]
        # NAME is also one that a library knows; ./NAME is not
        if value and ("/" in value or name == "imported"):
            base, overrides = split_name(value) if name == "text_tower" else (value, None)
            found[name] = (
                _absolute(base) if overrides is None else join_name(_absolute(base), overrides)
            )
    return found


def _absolute(where: str) -> str:
    return str(Path(where).expanduser().absolute()) if Path(where).expanduser().exists() else where


def _refuse_unknown(options: Options) -> None:
    """Raise ValueError for names that no library, module or file knows. Imports what --help can do
    without."""
    from data.modalities.tokenizer import refuse_no_vocabulary
    from launch.modalities import refuse_pairs
    from models.losses import LOSSES
    from models.towers.head import read_projection

    refuse_pairs(options.pairs, options.tower, bool(options.fusion), options.weights)
    for loss in loss_names(options.loss, options.pairs):
        if loss not in LOSSES:
            raise ValueError(
                f"argument --loss: there is no loss '{loss}'; there are "
                f"{', '.join(LOSSES)}{near(loss, list(LOSSES))}"
            )
    try:
        read_projection(options.projection)
    except ValueError as error:
        raise ValueError(f"argument --projection: {error}") from error
    if source := options.tokenizer_source():
        refuse_no_vocabulary(source)
