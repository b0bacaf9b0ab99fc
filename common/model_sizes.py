"""What a configuration says of a model's sizes, compared with what models have and with the files of
weights beside it, before anything is built of it.

A model is built from numbers in a file that may come from somebody else: 10^8 layers take memory
and hours, also on the meta device, and some configurations of transformers make a list of as many
entries as soon as they are read. So each number is bounded (`RULES`), and where weights lie beside
the configuration, their headers bound the model: it has a tensor for each layer, and no more
features than the longest side of a tensor. Ordinary numbers are not compared: a configuration may
say more than the weights beside it have, as that of a whole model does beside its encoder. That
every shape is the same is checked when the weights are opened (`models/weights/reading.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.files import read_json, refuse_longer
from common.output import brief


@dataclass(frozen=True)
class Rule:
    """Of the keys that `names` matches as a whole: the least and the most that each number is."""

    names: str
    least: int
    most: int


# The largest published towers have 64 layers of 6,144 features, and vocabularies of 901,629 tokens
LAYERS = Rule(r"(\w+_)?(layers|depths?|stages|repeats)", 0, 1000)
HEADS = Rule(r"(\w+_)?heads", 1, 1 << 12)
WIDTHS = Rule(r"hidden_sizes?|width|d_model|(emb_|embed_)?dims?|embedding_size", 1, 1 << 16)
ROWS = Rule(r"(\w+_)?vocab_size", 1, 1 << 20)
POSITIONS = Rule(r"(\w+_)?(positions?(_embeddings)?|patches|labels|classes)|max_length", 0, 1 << 20)
RULES = (
    *(LAYERS, HEADS, WIDTHS, ROWS, POSITIONS),
    Rule(r"patch_size|head_width|d_kv|intermediate_size|ffn_dim|d_ff", 1, 1 << 16),
    Rule(r"(\w+_)?(image|audio|spec)_size|image_(train_)?resize", 1, 1 << 14),
    Rule(r"context_length", 1, 1 << 13),  # OpenCLIP keeps a mask of its square
    Rule(r"audio_seconds|chunk_length|max_length_s", 0, 3600),
    Rule(r"sampling_rate", 1, 1 << 18),
    Rule(r"feature_size|\w*mel_bins|n_mels", 1, 1 << 10),
    Rule(r"(\w+_)?ratios?|expand\w*", 0, 1 << 6),
    Rule(  # -1: none
        r"(\w+_)?(sizes?|widths?|dims?|strides?|frames|langs|buckets|distance|channels|queries"
        r"|tokens|stride|n_fft|attention|groups|blocks)",
        -1,
        1 << 16,
    ),
)
PARTS = re.compile(r"(config|cfg)(_dict)?$")  # keys of a model's towers
ORDINARY_LAYERS, ORDINARY_WIDTH = 100, 8192  # what a configuration may say beside smaller weights
MOST_VALUES = 1 << 36  # layers by squared width, and tokens by width; some billions are published
# how many heads there are -> what they share
DIVIDED = {
    "num_attention_heads": ("hidden_size",),
    "encoder_attention_heads": ("d_model",),
    "n_heads": ("dim", "emb_dim"),
    "heads": ("width",),
}
ELSEWHERE = ("head_dim", "hf_model_name", "timm_model_name")  # keys with which heads share nothing
WEIGHTS = re.compile(r"((open_clip_)?(pytorch_)?model|audio)(-\d+-of-\d+)?\.safetensors")
MOST_HEADER = 32 << 20  # bytes of what a safetensors file says of its tensors, some 100 of each
OF_EXPORT = "wye.json"  # in the folder above those of an export's towers, where their weights are


@dataclass(frozen=True)
class Weights:
    """What the headers of some files say: how many tensors they have, and the longest side of
    one."""

    files: tuple[Path, ...]
    num_tensors: int
    longest: int

    def __str__(self) -> str:
        more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        return f"{self.files[0].name}{more}"


def read_model_config(file: Path) -> Any:
    """The JSON of a model's configuration. Errors: OSError; ValueError for what is no JSON, and as
    `refuse_sizes`, with the weights beside the file."""
    try:
        config = read_json(file)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: is no JSON ({error}); copy the model's folder again") from error
    refuse_sizes(str(file), config, weights_beside(file.parent))
    return config


def refuse_sizes(what: str, config: Any, weights: Weights | None = None) -> None:
    """Raise ValueError for sizes that no model has, or none with these `weights`. `what` said so:
    a file, or the name of a tower. `config`: names with values, and parts of the same kind."""
    parts = [config]
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            parts += [value for key, value in part.items() if PARTS.search(str(key))]
            _refuse_part(what, part, weights)


def _refuse_part(what: str, part: Mapping[str, Any], weights: Weights | None) -> None:
    found: dict[Rule, dict[str, list[float]]] = {rule: {} for rule in RULES}
    for key, value in part.items():
        if (rule := rule_of(key)) and (numbers := _numbers(value)):
            found[rule][key] = numbers
            if bad := [n for n in numbers if not rule.least <= n <= rule.most]:
                raise _refusal(what, key, bad[0], f"must be from {rule.least} to {rule.most}")
    layers = {key: sum(max(n, 1) for n in each) for key, each in found[LAYERS].items()}
    for key, number in layers.items():
        if number > LAYERS.most:
            raise _refusal(what, key, number, f"must be at most {LAYERS.most} in all")
    _refuse_unfit(what, part)
    width = min((n for each in found[WIDTHS].values() for n in each), default=0)
    values = {f"{key} by width²": number * width**2 for key, number in layers.items()}
    values |= {f"{key} by width": max(each) * width for key, each in found[ROWS].items()}
    for key, number in values.items():
        if number > MOST_VALUES:
            raise _refusal(what, key, number, f"must be at most {MOST_VALUES}")
    if weights is None:
        return
    widths = {key: max(each) for key, each in found[WIDTHS].items()}
    for said, ordinary, most, why in (
        (layers, ORDINARY_LAYERS, weights.num_tensors, "has {} tensors, one a layer"),
        (widths, ORDINARY_WIDTH, weights.longest, "has no side of a tensor above {}"),
    ):
        for key, number in said.items():
            if number > max(ordinary, most):
                beside = f"{weights} {why.format(most)}"
                raise _refusal(what, key, number, f"is more than its weights have: {beside}")


def _refuse_unfit(what: str, part: Mapping[str, Any]) -> None:
    """Raise ValueError where heads do not share what they divide, and for too many patches."""
    image, patch = (part.get(key) for key in ("image_size", "patch_size"))
    if isinstance(image, int) and isinstance(patch, int) and (image // patch) ** 2 > POSITIONS.most:
        why = f"in patches of {patch} are more than {POSITIONS.most} positions"
        raise _refusal(what, "image_size", image, why)
    if any(part.get(key) for key in ELSEWHERE):
        return
    for key, others in DIVIDED.items():
        for other in others:
            heads, width = part.get(key), part.get(other)
            if isinstance(heads, int) and isinstance(width, int) and width % heads:
                raise _refusal(what, key, heads, f"must divide {other} {width}")


def _refusal(what: str, key: str, number: Any, rule: str) -> ValueError:
    shown = f"{what}: {key} {brief(number, 30)} {rule}"
    return ValueError(f"{shown}; give another number, or the model's own files")


def rule_of(key: str) -> Rule | None:
    """The rule of a key; None: it is no size."""
    return next((rule for rule in RULES if re.fullmatch(rule.names, str(key))), None)


def _numbers(value: Any) -> list[float]:
    """Those that a value is or lists; none of what is no number."""
    several = value if isinstance(value, (list, tuple)) else [value]
    return [n for n in several if isinstance(n, (int, float)) and not isinstance(n, bool)]


# -- weights


def weights_beside(folder: Path) -> Weights | None:
    """What the weights in a model's folder say, or those of the export that it is the folder of a
    tower of; None: there are none, or not all of their shards. Errors: OSError; ValueError for a
    file without a header."""
    files = _weight_files(folder)
    if not files and (folder.parent / OF_EXPORT).is_file():
        files = _weight_files(folder.parent)
    if not files or _lacks_shards(files):
        return None
    shapes = [shape for file in files for shape in _shapes(file)]
    longest = max((side for shape in shapes for side in shape), default=0)
    return Weights(files, len(shapes), longest)


def _weight_files(folder: Path) -> tuple[Path, ...]:
    """Of the folder, by name, those that have headers."""
    return tuple(sorted(f for f in folder.iterdir() if WEIGHTS.fullmatch(f.name) and f.is_file()))


def _lacks_shards(files: tuple[Path, ...]) -> bool:
    """While a download goes on, or one was given up."""
    numbers = [re.search(r"-\d+-of-(\d+)\.", file.name) for file in files]
    return any(found and int(found[1]) > len(files) for found in numbers)


def _shapes(file: Path) -> list[list[int]]:
    """Of the tensors that the header of a safetensors file names: 8 bytes that say how long it is,
    and JSON."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        refuse_longer(length, MOST_HEADER, f"{file}: its header")
        text = opened.read(length)
    try:
        said = json.loads(text)
        return [said[name]["shape"] for name in said if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"{file}: is no whole safetensors file ({error}); copy it again"
        ) from error
