"""Pretrained weights: found, checked against the tower at opening, then read layer by layer, only
the tensors asked for.

A stage that owns three layers of a tower reads the tensors of three layers, whatever the size of
the file.
"""

import functools
import logging
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.files import read_json
from models.towers.layers import Layer, Tower
from models.towers.libraries import (
    open_clip,
    timm,
    transformers_audio,
    transformers_image,
    transformers_text,
)
from models.towers.names import HF, nearest, refuse, split_name
from models.weights.clap import clap_pairs, is_clap, note_scales
from models.weights.dual_encoder import dual_encoder_pairs, what_differs
from models.weights.libraries import (
    converted_by_timm,
    named_as_tower,
    published_open_clip,
    published_timm,
)
from models.weights.names import ANNOTATIONS, AUDIO, FUSION, OWN_TOWERS
from models.weights.of_transformers import OF_TRANSFORMERS
from models.weights.open_clip import is_open_clip, open_clip_pairs, refuse_other_architecture
from models.weights.open_clip_models import folder_of, local_model, weights_of
from models.weights.positions import TOKENS, Resize, resizers
from models.weights.translation import Source, Stored, as_ours, in_memory, plain_names
from models.weights.whole_models import whole_model_pairs

log = logging.getLogger(__name__)

SAFETENSORS, TORCH = ("model.safetensors",), ("pytorch_model.bin", "pytorch_model.pth", "model.pth")
# how a sentence encoder pools, beside its weights
POOLING = ("modules.json", "*_Pooling/config.json")
# what an export keeps beside the model: the fusion head, the audio tower, heads of annotations, and
# towers of one's own
BESIDE = (FUSION, AUDIO, *ANNOTATIONS.values(), OWN_TOWERS)
# what a whole model has beside its weights
WHOLE = ("*.json", "*.txt", "*.model", *BESIDE)
PREFIXES = {  # of wrappers, of models with a task head, and of models of images and texts
    "text": (
        *("module.", "bert.", "roberta.", "distilbert.", "electra.", "mpnet.", "model."),
        "text_model.",
    ),
    "image": (
        *("module.", "vit.", "dinov2.", "dinov2_with_registers.", "convnext.", "convnextv2."),
        *("swin.", "vision_model.", "videomae.", "timesformer."),
    ),
    "audio": ("module.", "audio_spectrogram_transformer.", "audio_model.", "model.encoder."),
}
RENAMED = {  # what older versions of the libraries wrote, and XLM's prefix, which DistilBERT has
    "text": (
        (r"LayerNorm\.gamma$", "LayerNorm.weight"),
        (r"LayerNorm\.beta$", "LayerNorm.bias"),
        (r"^transformer\.(?!layer\.)", ""),
    ),
    "image": ((r"\.mlp\.linear_1\.", ".mlp.0."), (r"\.mlp\.linear_2\.", ".mlp.3.")),
    "audio": (),
}
# absent from masked-language-model checkpoints, from those written before BatchNorm counted its
# batches, from models trained with InfoNCE, and from models without a further pair
OPTIONAL = re.compile(
    r"text\.pooler\.dense\.(weight|bias)$|text\.proj\.\d\.weight$"
    r"|(image|text|audio)\.attention_pool\.|(image|audio)\..*\.num_batches_tracked$"
    r"|head\.logit_bias$|head\.\w+_logit_(scale|bias)$"
    r"|head\.(fusion|image_tokens|text_tokens|region_projection|moment_projection)\."
)


# keys of a tower's name that its published weights go with
OF_NO_SIZE = {"pool", "zero_init_residual", "quick_gelu", "time", "time_layers", "time_heads"}


@dataclass
class WeightReader:
    """The tensors of some groups (image, text, head) in some files. `names`: canonical name -> name
    in `files`.

    `read_names` lists the names in the file that were read so far. `resizers`: by canonical name,
    what makes a tensor of another shape fit (`models/weights/positions.py`).
    """

    groups: tuple[str, ...]
    source: str
    files: Source
    names: dict[str, str]
    read_names: list[str] = field(default_factory=list)
    resizers: Mapping[str, Resize] = field(default_factory=dict)

    def given(self, layer: Layer) -> set[str]:
        """Return the local names of the tensors that `fill` sets."""
        return {
            local
            for local, canonical in layer.canonical_names.items()
            if canonical in self.names and canonical.split(".")[0] in self.groups
        }

    def fill(self, layer: Layer) -> None:
        """Copy this layer's tensors into it, in place, in its dtype. Other groups and tensors one
        can do without stay as they are."""
        targets = layer.state_dict()
        wanted = {
            canonical: targets[local]
            for local, canonical in layer.canonical_names.items()
            if canonical.split(".")[0] in self.groups
        }
        self.check({canonical: tuple(tensor.shape) for canonical, tensor in wanted.items()})
        for canonical, target in wanted.items():
            if canonical in self.names:
                self.read_names.append(self.names[canonical])
                target.copy_(self._fitting(canonical, target))

    def check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Refuse missing tensors and other shapes, from the files' headers alone."""
        for canonical, shape in shapes.items():
            if canonical not in self.names:
                if OPTIONAL.match(canonical):
                    continue
                library_name = canonical.split(".", 1)[1]
                found = self.names.values()
                near = (
                    f"the nearest there is {nearest(library_name, found)!r}"
                    if found
                    else "it holds none"
                )
                raise ValueError(
                    f"{self.source} has no tensor for {canonical}; {near}. "
                    + (
                        "Leave --projection to what the model has"
                        if "_projection." in canonical
                        else "Give weights of the same architecture and size"
                    )
                )
            found_shape = self._shape_there(canonical)
            if found_shape != shape and not self._can_resize(canonical, found_shape, shape):
                raise ValueError(
                    f"{self.source}: {canonical} has shape {found_shape} there but {shape} in the "
                    "tower; " + _remedy(canonical)
                )

    def _absent(self, wanted: Iterable[str]) -> list[str]:
        """Those of `wanted` that are not in the files, but for counters, which start at 0."""
        lacking = [name for name in wanted if name not in self.names]
        return [name for name in lacking if not name.endswith("num_batches_tracked")]

    def refuse_missing(self, towers: Sequence[Tower]) -> None:
        """Raise ValueError for tensors that a layer would fill with random values, where a model is
        used as it is."""
        wanted = [name for tower in towers for name in _shapes(tower, self.groups)]
        if absent := self._absent(wanted):
            raise ValueError(
                f"{self.source} has no tensor for {', '.join(absent)}, which the model uses; save "
                "it again with all of its weights"
            )

    def note_changes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Warn of the tensors of `shapes` that the files lack, and of those that are made to fit.
        Every rank finds the same before a layer is filled."""
        if absent := self._absent(shapes):
            log.warning("%s has no %s: trained from scratch", self.source, ", ".join(absent))
        for canonical, shape in shapes.items():
            if canonical in self.names and (there := self._shape_there(canonical)) != shape:
                how = "interpolated between the learned ones"
                if canonical.endswith(TOKENS):
                    how = "rows of no token are left out"
                log.warning(
                    "%s: %s has shape %s there and %s in the tower: %s",
                    *(self.source, canonical, there, shape, how),
                )

    def _shape_there(self, canonical: str) -> tuple[int, ...]:
        return tuple(self.files[self.names[canonical]].shape())

    def _fitting(self, canonical: str, target: Tensor) -> Tensor:
        tensor = self.files[self.names[canonical]].tensor()
        if tensor.shape == target.shape:
            return tensor
        return self.resizers[canonical](tensor.float(), tuple(target.shape))

    def _can_resize(self, canonical: str, found: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        """Asked of the shapes alone, on the meta device."""
        if canonical not in self.resizers:
            return False
        try:
            made = self.resizers[canonical](torch.empty(found, device="meta"), shape)
        except ValueError:
            return False
        return tuple(made.shape) == shape


def _remedy(canonical: str) -> str:
    if re.search(r"position_embedding|pos_embedding", canonical):
        return (
            "position embeddings are not interpolated: use the image size, or the "
            "max_position_embeddings, that the weights were trained with"
        )
    if re.search(r"word_embeddings|token_embedding\.", canonical):
        return "the vocabularies differ: use the tokenizer that the weights were trained with"
    if canonical.startswith("head."):
        return "give the --embed-dim of the weights"
    return "give weights of the same architecture and size, or change the tower's"


def open_weights(branch: str, where: str, tower: Tower) -> WeightReader:
    """Find the weights of a branch and check them against the whole tower; nothing but headers is
    read yet.

    `where`: a local folder (model.safetensors, its sharded index, or pytorch_model.bin), a single
    file, a Hugging Face id, or a name of the library: torchvision's for the architecture
    ("IMAGENET1K_V2", "DEFAULT"), timm's and OpenCLIP's tags or "DEFAULT", for text and for images
    of transformers a preset or "DEFAULT".
    """
    if branch != tower.branch:
        raise ValueError(
            f"weights for the {branch} branch were asked for a tower of the {tower.branch} branch; "
            "pass that branch's tower"
        )
    published = _PUBLISHED.get(tower.config.get("library"))
    path = _given_path(where)
    if path is None and published is not None:
        source = published(where, tower)
    else:
        hub_id = tower.config.get("hub_id")
        source = open_tensors(path or _preset_path(branch, where, tower.name, hub_id))
    shapes = {
        name.split(".", 1)[1]: shape
        for name, shape in _shapes(tower, (branch,)).items()
        if not OPTIONAL.match(name)
    }
    source = converted_by_timm(named_as_tower(source, tower), tower, shapes, f"weights {where!r}")
    own = branch not in PREFIXES  # a modality of the user's, whose names are its module's
    plain = own or tower.config.get("library") in ("timm", "open_clip")
    names = canonical_names(branch, source, plain)
    reader = WeightReader((branch,), f"weights {where!r}", source, names, resizers=resizers(tower))
    return _checked(reader, tower)


def open_model(where: str, *towers: Tower) -> WeightReader:
    """Find the weights of a whole model, heads and scalars included, and check them against its
    towers; nothing but headers is read yet.

    `where`: a folder that export.py made, of any kind, one of transformers' models of images and
    texts or of sounds and texts, or a file with the state dict of an OpenCLIP model whose
    architecture is one of ours (`models/weights/open_clip.py`). `towers`: of images and texts, of
    sounds and texts, or of all three.
    """
    path = find_model(where)
    source = plain_names(open_tensors(path))
    of_branch = {tower.branch: tower for tower in towers}
    if is_clap(source):
        source = _of_clap(where, source, of_branch)
    else:
        source = _of_images(where, source, of_branch)
    if not any(key.startswith("head.") for key in source):
        raise ValueError(
            f"--import {where}: holds neither both towers and heads, as export.py writes them, nor "
            "OpenCLIP weights; a single tower is started from with --image-weights, --text-weights "
            "or --audio-weights"
        )
    for file in BESIDE:
        if (path / file).is_file():
            source = {**source, **_open_file(path / file)}
    reader = WeightReader(
        (*of_branch, "head"),
        f"--import {where}",
        source,
        {key: key for key in source},
        resizers={name: resize for tower in towers for name, resize in resizers(tower).items()},
    )
    return _checked(reader, *towers)


def _of_clap(where: str, source: Source, of_branch: Mapping[str, Tower]) -> Source:
    audio, text = of_branch.get("audio"), of_branch.get("text")
    if audio is None or text is None:
        raise ValueError(
            f"--import {where}: holds transformers' ClapModel, whose towers are of sounds and "
            "texts; name both in --pairs, such as audio:text"
        )
    note_scales(where, source)
    return as_ours(clap_pairs(audio, text), source)


def _of_images(where: str, source: Source, of_branch: Mapping[str, Tower]) -> Source:
    """The same under our names, where it is of another library and there are both towers."""
    image, text = of_branch.get("image"), of_branch.get("text")
    if image is None or text is None:
        return source
    if is_open_clip(source):
        refuse_other_architecture(where, source, image, text)
        return as_ours(open_clip_pairs(image, text), source)
    if all(tower.config.get("library") == OF_TRANSFORMERS for tower in (image, text)) and any(
        key.startswith("vision_model.") for key in source
    ):
        return as_ours(whole_model_pairs(image, text), source)
    if "visual_projection.weight" in source:
        differences = what_differs(image, text)
        if differences:
            raise ValueError(
                f"--import {where}: holds transformers' dual encoder, which the towers asked for "
                f"cannot be ({'; '.join(differences)}); leave --image-tower and --text-tower to "
                "what the folder says"
            )
        return as_ours(dual_encoder_pairs(image, text), source)
    return source


def _checked(reader: WeightReader, *towers: Tower) -> WeightReader:
    shapes = {
        name: shape for tower in towers for name, shape in _shapes(tower, reader.groups).items()
    }
    reader.check(shapes)
    reader.note_changes(shapes)
    unused = sorted(set(reader.names) - set(shapes))
    if unused:
        towers_said = " and ".join(tower.name for tower in towers)
        log.info(
            "%s: %d tensors are not used by tower %s, such as %s",
            reader.source,
            len(unused),
            towers_said,
            unused[0],
        )
    return reader


def canonical_names(branch: str, keys: Iterable[str], plain: bool = False) -> dict[str, str]:
    """Canonical name -> name in the file. Where two names in the file mean the same, the one
    without a prefix counts. `plain`: of a library that has renamed nothing."""
    names: dict[str, str] = {}
    prefixes = ("module.",) if plain else PREFIXES[branch]
    for key in sorted(keys, key=lambda key: key.startswith(prefixes)):
        name = key
        while prefix := next((each for each in prefixes if name.startswith(each)), ""):
            name = name.removeprefix(prefix)
        for pattern, replacement in () if plain else RENAMED[branch]:
            name = re.sub(pattern, replacement, name)
        names.setdefault(f"{branch}.{name}", key)
    return names


def _shapes(tower: Tower, groups: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for spec in tower.specs:
        tensors = spec.template.state_dict()
        shapes |= {
            canonical: tuple(tensors[local].shape)
            for local, canonical in spec.template.canonical_names.items()
            if canonical.split(".")[0] in groups
        }
    return shapes


# -- sources


def published_weights(tower: Tower) -> str | None:
    """What `open_weights` takes for the pretrained weights of a tower that is named as they are: an
    id on the hub, a folder, or "DEFAULT"; None: there are none, or a key changes the tower."""
    base, keys = split_name(tower.name)
    library, architecture = tower.config.get("library"), tower.config.get("architecture", "")
    if {*keys} - OF_NO_SIZE or library is None:
        return None
    if library == "transformers":
        folder = Path(base.removeprefix(HF)).expanduser()
        held = folder.is_dir() and weight_files(folder)
        return str(folder) if held else tower.config["hub_id"]
    if library == "open_clip":
        exist = open_clip.default_tag(tower.config["model"], tower.config["quick_gelu"]) is not None
    elif library == "timm":
        exist = bool(timm.tags(architecture))
    else:
        exist = len(torchvision.models.get_model_weights(architecture)) > 0
    return "DEFAULT" if exist else None


def find_weights(branch: str, where: str, tower_name: str, hub_id: str | None) -> Path:
    """The file or folder that `where` means, downloaded if need be.

    `where`: as in `open_weights`, for the tower of transformers called `tower_name`, whose
    published weights are `hub_id`. Errors: as there.
    """
    return _given_path(where) or _preset_path(branch, where, tower_name, hub_id)


def _given_path(where: str) -> Path | None:
    """Of a file, a folder or a Hugging Face id; None: `where` is a word, so a library's name."""
    path = Path(where).expanduser()
    if path.exists():
        return path
    if where.count("/") == 1 and not where.startswith((".", "~", "/")):
        return _download(where)
    if "/" in where:
        raise FileNotFoundError(
            f"weights {where!r}: there is no such file or folder; give an existing one, or "
            "ORGANISATION/MODEL"
        )
    return None


def _preset_path(branch: str, where: str, tower_name: str, hub_id: str | None) -> Path:
    libraries = {
        "image": transformers_image,
        "text": transformers_text,
        "audio": transformers_audio,
    }
    if branch not in libraries:
        raise FileNotFoundError(
            f"weights {where!r}: there is no such file or folder, and no library has weights of "
            f"the modality {branch}; give an existing one"
        )
    catalogue = libraries[branch].CATALOGUE
    found = hub_id if where == "DEFAULT" else catalogue.hub_id_of(where)
    if found is None:
        known = [*catalogue.presets, *(["DEFAULT"] if hub_id else [])]
        raise refuse(f"{branch} weights for tower {tower_name!r}:", where, known)
    return _download(found)


def find_model(where: str) -> Path:
    """The folder or file of a whole model, downloaded where `where` is ORGANISATION/MODEL or
    hf-hub:ORGANISATION/MODEL. Errors: FileNotFoundError."""
    path = Path(local_model(where)).expanduser()
    if path.exists():
        return path
    if where.count("/") == 1 and not where.startswith((".", "~", "/")):
        return _download(where, WHOLE)
    raise FileNotFoundError(
        f"--import {where}: there is no such file or folder; give a folder of export.py, of "
        "transformers or of OpenCLIP, a file of OpenCLIP weights, or ORGANISATION/MODEL"
    )


def weight_files(folder: Path) -> list[Path]:
    """Those that `open_tensors` may read, with their shards, by name."""
    stems = {Path(name).stem for name in SAFETENSORS + TORCH}
    ends = {Path(name).suffix for name in SAFETENSORS + TORCH}
    return sorted(
        file
        for file in folder.iterdir()
        if file.suffix in ends and (file.stem in stems or file.stem.split("-")[0] in stems)
    )


def open_tensors(path: Path) -> Source:
    """A folder's weights, or a file's; nothing but headers is read where the format allows it."""
    if path.is_file():
        return _open_file(path)
    for name in SAFETENSORS + TORCH:
        if (path / name).is_file():
            return _open_file(path / name)
        if (path / f"{name}.index.json").is_file():
            return _open_sharded(path / f"{name}.index.json")
    if folder_of(path) and (file := weights_of(path)):
        return _open_file(file)
    raise FileNotFoundError(
        f"weights: folder {path} has none of {', '.join(SAFETENSORS + TORCH)} nor an index of "
        "shards; give a Hugging Face model folder or a single file"
    )


def _open_file(path: Path) -> Source:
    return _open_safetensors(path) if path.suffix == ".safetensors" else _open_torch(path)


def _open_safetensors(path: Path) -> Source:
    try:
        file = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(
            f"{path}: is no whole safetensors file ({error}); copy it again"
        ) from error
    return {
        name: Stored(partial(_shape_in, file, name), partial(file.get_tensor, name))
        for name in file.keys()
    }


def _shape_in(file: Any, name: str) -> Sequence[int]:
    return file.get_slice(name).get_shape()


def _open_torch(path: Path) -> Source:
    """Mapped into memory where the format allows: pages are read when their tensors are. Nothing in
    the file is run: torch refuses whatever is more than tensors and plain containers."""
    mapped = zipfile.is_zipfile(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{path}: cannot be read as weights alone, and code in a file is never run ({reason}); "
            "give a .safetensors file, or save the state dict alone with torch.save"
        ) from error
    if not isinstance(state, dict):
        raise ValueError(
            f"{path}: holds a {type(state).__name__}; a state dict is needed, names with tensors"
        )
    return in_memory(state)


def _open_sharded(index: Path) -> Source:
    """Shards are opened when the first of their tensors is asked for."""
    shard_of: dict[str, str] = read_json(index)["weight_map"]
    absent = [
        shard for shard in sorted(set(shard_of.values())) if not (index.parent / shard).is_file()
    ]
    if absent:
        raise FileNotFoundError(
            f"weights: {index} names {absent[0]}, which is not beside it; complete the download"
        )
    open_once = functools.cache(_open_file)

    def stored(name: str, shard: Path) -> Stored:
        return Stored(
            lambda: open_once(shard)[name].shape(), lambda: open_once(shard)[name].tensor()
        )

    return {name: stored(name, index.parent / shard) for name, shard in shard_of.items()}


def _open_open_clip(where: str, tower: Tower) -> Source:
    return open_tensors(Path(published_open_clip(where, tower)))


def _open_torchvision(where: str, tower: Tower) -> Source:
    known = torchvision.models.get_model_weights(tower.config["architecture"])
    if where not in known.__members__:
        raise refuse(f"image weights for tower {tower.name!r}:", where, known.__members__)
    try:
        return in_memory(
            known[where].get_state_dict(progress=True, check_hash=True, weights_only=True)
        )
    except OSError as error:  # URLError is one
        raise FileNotFoundError(
            f"weights {where!r} of {tower.config['architecture']} could not be downloaded; check "
            "the network, or download the file and give its path"
        ) from error


_PUBLISHED: dict[str | None, Callable[[str, Tower], Source]] = {
    "torchvision": _open_torchvision,
    "timm": published_timm,
    "open_clip": _open_open_clip,
}


def _download(hub_id: str, others: Sequence[str] = POOLING) -> Path:
    """The folder of a Hugging Face model: safetensors if it has them, else torch files; cached by
    the hub's own client."""
    try:
        for names in (SAFETENSORS, TORCH):
            patterns = [
                pattern for name in names for pattern in (name, f"{name}.index.json", _shards(name))
            ]
            folder = Path(snapshot_download(hub_id, allow_patterns=[*patterns, *others]))
            if any(
                file.name.startswith(names) or file.name.endswith(".index.json")
                for file in folder.iterdir()
            ):
                return folder
    # LocalEntryNotFoundError, offline, bad id
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise FileNotFoundError(
            f"weights {hub_id!r} could not be had from the Hugging Face hub; check the id and the "
            "network, or download the model and give its folder"
        ) from error
    raise FileNotFoundError(
        f"weights {hub_id!r}: the model on the hub has none of {', '.join(SAFETENSORS + TORCH)}; "
        "give a local file"
    )


def _shards(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    return f"{stem}-*-of-*.{suffix}"
