"""A trained model as its run left it: what evaluate.py and export.py read of a run's folder,
whatever topology it was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase

from common.model_sizes import refuse_sizes
from data.modalities.preprocessing import Preprocessing
from data.modalities.tokenizer import load_tokenizer, num_ids, refuse_no_vocabulary
from data.modules import import_recorded, modules_of_specs
from data.options import (
    IMAGE_TEXT,
    PairOption,
    branches_of,
    derived_of,
    read_pairs,
)
from data.stored.derived import REGIONS, Derived
from data.stored.kinds import is_text, stored, text_of
from engine.checkpoint.layout import (
    AVERAGE,
    MANIFEST,
    checkpoints_in,
    checksum_of_file,
    newest_of,
    step_of,
    verify,
)
from engine.checkpoint.reading import CheckpointReader, load_layer
from engine.objective import Term, scalars_of, without_loss
from launch.config.blocks import train_block
from launch.config.groups import AudioOptions
from launch.config.imported import (
    MODEL_OPTIONS,
    branches_held,
    describe_own_left_out,
    fusion_of_export,
    is_published,
    options_of_export,
    options_of_import,
    own_of_export,
    refuse_no_model,
)
from launch.config.pixels import PROCESSORS, trained_with
from launch.inference.adapters import ADAPTERS, FILE, read_adapters
from launch.inference.own_towers import fill_own
from launch.modalities import MODALITIES, Vocabulary, tower_of
from launch.objective import joints_of, losses_of, pairs_of
from launch.records import WEIGHTS, read_export, record_of_run
from launch.terminal.tables import show
from models.towers.adapters.layers import adapted_tower
from models.towers.fusion import fusion_sizes
from models.towers.layers import Layer, Tower, library_models_kept
from models.weights.names import OWN_TOWERS
from models.weights.open_clip_models import weights_of
from models.weights.reading import find_model, open_model, weight_files

if TYPE_CHECKING:
    from launch.config.options import Options


@dataclass(frozen=True)
class Trained:
    """The model of one checkpoint. `record`: what was decided when the run began; `layers`: those
    of all towers in order, for evaluation."""

    record: dict[str, Any]
    checkpoint: Path
    step: int
    tokenizer: PreTrainedTokenizerBase | None  # None: no pair has texts
    towers: tuple[Tower, ...]
    layers: list[Layer]
    unlearned_regions: bool = False  # compared all the same

    @property
    def options(self) -> dict[str, Any]:
        """train.py's, by name."""
        return self.record["options"]

    @property
    def pairs(self) -> tuple[PairOption, ...]:
        """Those of the run, each with a loss."""
        return read_pairs(self.options.get("pairs", IMAGE_TEXT))

    @property
    def compared(self) -> tuple[tuple[str, str], ...]:
        """The modalities that are compared, two by two: the pairs of the run, then those without a
        loss."""
        pairs = tuple(pair.branches for pair in self.pairs if not pair.made)
        branches = tuple(tower.branch for tower in self.towers)
        return (*pairs, *without_loss(branches, pairs))

    @property
    def read(self) -> tuple[tuple[str, str], ...]:
        """The modalities of which a sample must have two: those that are compared, and images with
        regions, or films with moments, where these are."""
        found = [*self.compared, *(pair.modalities for pair in self.pairs)]
        found += [(kind.of[0], kind.name) for kind in [self.derived] if kind]
        return tuple(dict.fromkeys(found))

    @property
    def derived(self) -> Derived | None:
        """The annotations that it compares with phrases."""
        learned = derived_of(self.options.get("pairs", IMAGE_TEXT))
        return REGIONS if self.unlearned_regions else learned

    def with_regions(self) -> Trained:
        """The same model, which compares regions though it may have learned none. Errors:
        ValueError where it has no images or no texts, and where it learned other annotations."""
        if self.derived not in (None, REGIONS):
            raise ValueError(
                f"{self.checkpoint}: compares {self.derived.pair_name}, and annotations of one kind at a "
                "time; leave out what asks for regions"
            )
        if missing := {"image", "text"} - self.by_branch.keys():
            raise ValueError(
                f"{self.checkpoint}: regions of images are compared with texts, and this model has "
                f"no {' and no '.join(sorted(missing))}"
            )
        return replace(self, unlearned_regions=self.derived is None)

    @property
    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, where a pair has texts; else ValueError."""
        if self.tokenizer is None:
            raise ValueError(f"{self.checkpoint}: no pair has texts, so there is no tokenizer")
        return self.tokenizer

    @property
    def by_branch(self) -> dict[str, Tower]:
        """The towers."""
        return {tower.branch: tower for tower in self.towers}

    def layers_of(self, branch: str) -> list[Layer]:
        """Those of one branch, in order."""
        branches = [tower.branch for tower in self.towers for _ in tower.specs]
        return [layer for own, layer in zip(branches, self.layers) if own == branch]

    @property
    def preprocessing(self) -> Preprocessing:
        """How the pixels of this model are prepared."""
        return Preprocessing.from_options(self.options)

    def checksum(self) -> str:
        """Of the file that tells these weights from all others; of published ones that lie in
        several, of each."""
        files = (self.checkpoint / MANIFEST, self.checkpoint / WEIGHTS, self.checkpoint)
        found = [file for file in files if file.is_file()][:1] or weight_files(self.checkpoint)
        if not found and (of_open_clip := weights_of(self.checkpoint)):
            found = [of_open_clip]
        # an export's adapters and towers of one's own
        apart = sorted(self.checkpoint.glob(f"{ADAPTERS}/*/{FILE}"))
        apart += sorted(self.checkpoint.glob(OWN_TOWERS))
        return "-".join(map(checksum_of_file, found + apart))


def open_model_folder(
    folder: Path,
    checkpoint: str | None = None,
    device: torch.device | str = "cpu",
    averaged: bool = False,
) -> Trained:
    """A run of train.py, what export.py wrote, or a published model. Errors: as `open_run`;
    ValueError for a checkpoint asked of the others, which are one."""
    export = read_export(folder)
    if export is None and not is_published(folder):
        return open_run(folder, checkpoint, device, averaged)
    if checkpoint or averaged:
        raise ValueError(f"{folder}: holds one model; --checkpoint and --ema are of a run's folder")
    folder = folder.expanduser().absolute()
    known = (
        options_of_export(folder) | fusion_of_export(folder)
        if export
        else _options_published(folder)
    )
    options = {"seed": 0, "fusion": 0, "imported": str(folder), **vars(AudioOptions()), **known}
    tokenizer = load_tokenizer(options["tokenizer"])
    # the plain towers: weights of an export are those below its adapters
    of_libraries = towers = towers_of(options, tokenizer)
    reader = open_model(str(folder), *of_libraries)
    reader.refuse_missing(of_libraries)
    own = own_of_export(folder)
    if left_out := describe_own_left_out(folder, "--import-module, or --trust-run"):
        show(left_out)
    elif own:
        import_recorded(own["modules"], folder)
        options |= {"pairs": own["pairs"], "tower": own["tower"], "loss": own["loss"]}
        towers = towers_of(options, tokenizer)
    # of its towers only: a name becomes part of a path
    held = export["adapters"] if export else {}
    adapters = {each.branch: held[each.branch] for each in towers if each.branch in held}
    towers = adapted_towers(
        towers, {branch: {"lora": own["lora"]} for branch, own in adapters.items()}
    )
    read_by = dict.fromkeys((tower.branch for tower in of_libraries), reader)
    with library_models_kept():
        specs = [spec for tower in towers for spec in tower.specs]
        layers = [spec.build(options["seed"], read_by.get(spec.branch)).eval() for spec in specs]
    if own and not left_out:
        fill_own(layers, own["branches"], folder / OWN_TOWERS)
    read_adapters(layers, folder, adapters)
    layers = [layer.to(device) for layer in layers]
    step = export["step"] if export else 0
    return Trained({"options": options}, folder, step, tokenizer, towers, layers)


def _options_published(folder: Path) -> dict[str, Any]:
    """train.py's options of a model as transformers or OpenCLIP published it, with the pixels'."""
    options = options_of_import(folder)
    if "image_tower" not in options:
        return options
    refuse_no_vocabulary(options["tokenizer"])  # first: without one there is most to mend
    prepared = trained_with(str(folder), options["image_tower"])
    if prepared is None:
        raise ValueError(
            f"{folder}: has no {' or '.join(PROCESSORS)} that says how its images are prepared; "
            "save the model's image processor there"
        )
    return options | prepared[0].options(options["image_size"])


def public_model(where: str) -> Path:
    """The folder of a public model, or its file where the configuration lies beside it, downloaded
    if it is ORGANISATION/MODEL. Errors: ValueError for another file, FileNotFoundError."""
    path = find_model(where)
    refuse_no_model(where, path, weights_alone=False)
    if not path.is_dir() and not is_published(path):
        raise ValueError(
            f"--import {where}: is a file, which does not say what towers its weights are of; give "
            "the folder of the whole model"
        )
    return path


def open_run(
    run_dir: Path,
    checkpoint: str | None = None,
    device: torch.device | str = "cpu",
    averaged: bool = False,
) -> Trained:
    """The model of `checkpoint`, the name of a folder below RUN_DIR/checkpoints; None: of the
    newest. `averaged`: with the weights' moving average.

    Errors: FileNotFoundError for a folder of no run and for a checkpoint that is not there,
    ValueError.
    """
    record = record_of_run(run_dir)
    # a tokenizer that the run trained lies in its folder
    found, options = find_checkpoint(run_dir / "checkpoints", checkpoint), record["options"]
    tokenizer = None
    if text_of(branches_of(options["pairs"])):
        tokenizer = load_tokenizer(record["tokenizer"] or str(run_dir / "tokenizer"))
    towers = adapted_towers(
        towers_of({**options, "run_dir": run_dir}, tokenizer),
        record["training"]["branches"].get("train"),
    )
    with CheckpointReader(found) as reader, library_models_kept():
        if averaged and not reader.has(AVERAGE):
            raise ValueError(
                f"--ema: {found} holds no moving average of the weights; a run keeps one where its "
                "JSON has an ema block"
            )
        specs = [spec for tower in towers for spec in tower.specs]
        built = (spec.build(options["seed"]) for spec in specs)
        layers = [load_layer(reader, layer, device, averaged).eval() for layer in built]
    return Trained(record, found, step_of(found), tokenizer, towers, layers)


def find_checkpoint(folder: Path, name: str | None) -> Path:
    """The one that is asked for, or the newest; whole in either case."""
    there = {path.name: path for path in checkpoints_in(folder)}
    if name is not None and name not in there:
        raise FileNotFoundError(
            f"{folder / name}: no such checkpoint; there are: {', '.join(sorted(there)) or 'none'}"
        )
    checkpoint, broken = newest_of(list(there.values()) if name is None else [there[name]], verify)
    if checkpoint is None:
        raise FileNotFoundError("\n".join(broken) or f"{folder}: holds no checkpoint yet")
    for reason in broken:
        show(f"passed over: {reason}")
    return checkpoint


# -- towers


def with_named_towers(options: Options, previous: Mapping[str, Any] | None) -> Options:
    """The options of a run with what the names of its towers leave open written out
    (`models/defaults.py`).

    `previous`: the record of the run that goes on, None for a new one. A model that is gone on with
    keeps the names by which it is known. Errors: those of weights that are not found.
    """
    known = options_of_import(Path(options.imported)) if options.imported else {}
    known |= (previous or {}).get("options", {})
    held, weights = branches_held(options.imported, options.branches), options.first_weights
    named: dict[str, Any] = {}
    for branch, entry in MODALITIES.items():
        name = getattr(options, entry.flags.tower) if entry.flags else None
        if entry.flags is None or name in (None, known.get(entry.flags.tower)):
            continue
        if branch in held and stored(branch).parts:
            continue  # it has the tower of its parts, as --import names it
        # how texts are pooled is said by a model's own tower alone
        where = options.imported if branch in held and not is_text(branch) else None
        named[entry.flags.tower] = entry.named(name, where or weights.get(branch))
    return replace(options, **named)


def towers_of(
    options: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None
) -> tuple[Tower, ...]:
    """Those that train.py's `options`, by name, ask for, a tower for each modality of the pairs; no
    layer is built yet. Errors: ValueError, FileNotFoundError."""
    where = options.get("run_dir") or options.get("imported") or "this model"
    import_recorded(options.get("import_module"), where, _modules_of(options))
    refuse_sizes(str(where), {name: options[name] for name in MODEL_OPTIONS if name in options})
    asked = options.get("pairs", IMAGE_TEXT)
    pairs = pairs_of(asked, losses_of(asked, options["loss"]))
    vocabulary = Vocabulary.of(tokenizer)
    if _says_its_vocabulary(options):
        vocabulary = vocabulary._replace(size=None)  # its table may have more rows than words
    fusion, towers = fusion_sizes(options), []
    branches = branches_of(asked)
    terms: list[Term] = [*pairs, *joints_of(options.get("terms") or "", branches)]
    for branch in branches:
        tower = tower_of(branch, options, vocabulary, scalars_of(terms, branch), fusion)
        if tokenizer is not None and is_text(branch):
            _refuse_other_tokenizer(tower, tokenizer)
        towers.append(tower)
    return tuple(towers)


def import_of_data(options: Mapping[str, Any], where: Path) -> None:
    """Import the modules that the recorded data specs of the run in `where` call. Errors: as
    `import_recorded`."""
    import_recorded(_modules_of_data(options), where, _modules_of(options))


def _modules_of_data(options: Mapping[str, Any]) -> list[str]:
    return modules_of_specs([*(options.get("data") or ()), options.get("val_data")])


def _modules_of(options: Mapping[str, Any]) -> list[str]:
    """All modules that recorded options name."""
    return [*(options.get("import_module") or ()), *_modules_of_data(options)]


def _refuse_other_tokenizer(tower: Tower, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError where the tokenizer makes ids that the text tower has no embedding of, or
    not the one that ends a text, where the tower pools."""
    rows, ids = tower.config.get("config", {}).get("vocab_size"), num_ids(tokenizer)
    if rows is not None and ids > rows:
        raise ValueError(
            f"text tower {tower.name}: it knows {rows} tokens and the tokenizer has {ids}; give "
            "--tokenizer, the one that belongs to it"
        )
    end = tokenizer.eos_token_id
    if tower.config.get("pool") == "eos" and end not in (None, *tokenizer("a")["input_ids"]):
        raise ValueError(
            f"text tower {tower.name}: it pools where a text ends, and the tokenizer does not put "
            f"its {tokenizer.eos_token!r} there; give it a post-processor that does, or the tower "
            "pool=last"
        )


def adapted_towers(towers: Sequence[Tower], written: Any) -> tuple[Tower, ...]:
    """The towers with the adapters that `branches.train`, as written, gives them."""
    adapters = train_block(written)
    return tuple(
        adapted_tower(tower, adapters[tower.branch]) if tower.branch in adapters else tower
        for tower in towers
    )


def _says_its_vocabulary(options: Mapping[str, Any]) -> bool:
    """Does the model of --import say how many tokens its text tower knows?"""
    imported, text = options.get("imported"), options["text_tower"]
    if not imported:
        return False
    return Path(imported).is_dir() or text.startswith("open_clip:")
