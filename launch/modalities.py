"""The modalities of a run: what loads each one's samples, and which tower its branch has.

Images, texts and audio have flags of their own. Any other modality is an entry of `MODALITIES`,
which a module of one's own adds to:

    MODALITIES["tone"] = ModalityEntry(load=Tone, tower=tone_tower)

and is then asked for by `--pairs image:text,tone:text` and `--tower tone=NAME` (`data/README.md`,
"Add a modality").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from data.formats.rows import near
from data.modalities.audio.features import AudioFeatures
from data.modalities.modality import Modality
from data.modalities.tokenizer import num_ids
from data.options import IMAGE_TEXT, branches_of, read_pairs
from models.towers.audio import audio_tower
from models.towers.building import with_head
from models.towers.fusion import FusionSizes
from models.towers.image import image_tower
from models.towers.layers import Tower
from models.towers.text import text_tower


@dataclass(frozen=True)
class ModalityEntry:
    """`load`: makes what turns samples into the tensors of the branch. `tower`: from the name in
    --tower, "" where none is given, to the branch's tower without a head; its `example` says what
    enters it."""

    load: Callable[[], Modality]
    tower: Callable[[str], Tower]


class Vocabulary(NamedTuple):
    """What a text tower must know of the tokenizer. None: as the tower's own configuration says."""

    size: int | None = None
    pad_id: int | None = None
    end_id: int | None = None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase | None) -> Vocabulary:
        return (
            cls()
            if tokenizer is None
            else cls(num_ids(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id)
        )


MODALITIES: dict[str, ModalityEntry] = {}
OWN_FLAGS = ("image", "text", "audio")


def known_modalities() -> tuple[str, ...]:
    return tuple(dict.fromkeys((*OWN_FLAGS, *MODALITIES)))


def refuse_pairs(given: str, towers: Sequence[str], fusion: bool) -> None:
    """Raise ValueError, in the words of a command line, for --pairs, --tower and --fusion that do
    not go together."""
    pairs, named, known = read_pairs(given), branches_of(given), known_modalities()
    for name in named:
        if name not in known:
            raise ValueError(
                f"argument --pairs: there is no modality '{name}'; there are "
                f"{', '.join(known)}{near(name, known)}; a module that adds one is named by "
                "--import-module"
            )
    different = {frozenset(pair.modalities) for pair in pairs}
    if any(len(pair) == 1 for pair in different) or len(different) < len(pairs):
        raise ValueError(
            f"argument --pairs: {given}: a pair is of two different modalities, and is named once"
        )
    if fusion and given != IMAGE_TEXT:
        raise ValueError(
            f"argument --fusion: it scores images with texts, and --pairs is {given}; leave one of "
            "them out"
        )
    names = [each.partition("=")[0] for each in towers]
    for name in names:
        if name in OWN_FLAGS and name not in MODALITIES:
            raise ValueError(f"argument --tower: {name} has a flag of its own, --{name}-tower")
        if name not in named:
            raise ValueError(
                f"argument --tower: no pair of --pairs {given} has '{name}'{near(name, named)}"
            )
        if names.count(name) > 1:
            raise ValueError(f"argument --tower: '{name}' is given twice; give it once")


def tower_of(
    branch: str,
    options: Mapping[str, Any],
    vocabulary: Vocabulary,
    scalars: Mapping[str, float],
    fusion: FusionSizes | None = None,
) -> Tower:
    """The tower of a branch with its head, from train.py's options by name; no layer is built yet.
    `scalars`: what its head owns of the losses' learned scalars, with first values. Errors:
    ValueError, FileNotFoundError."""
    if branch == "image":
        tower = image_tower(options["image_tower"], options["image_size"])
    elif branch == "text":
        tower = text_tower(
            options["text_tower"],
            vocabulary.size,
            options["max_text_tokens"],
            vocabulary.pad_id,
            vocabulary.end_id,
        )
    elif branch in MODALITIES:  # first, so that one's own module may register audio too
        tower = MODALITIES[branch].tower(named_towers(options.get("tower") or ()).get(branch, ""))
    elif branch == "audio":
        tower = audio_tower(options["audio_tower"], options["audio_seconds"], options["audio_size"])
    else:
        raise ValueError(
            f"there is no modality '{branch}'; there are {', '.join(known_modalities())}; a module "
            "that adds one is named by --import-module"
        )
    projection = options.get("projection", "linear")
    return with_head(tower, options["embed_dim"], scalars, fusion, projection)


def audio_features(
    tower: str, seconds: float | None, size: int, augmentation: tuple[str, ...]
) -> AudioFeatures:
    """What turns sounds into the input of the audio tower of that name; the rest as in the flags of
    train.py. Errors: ValueError, FileNotFoundError."""
    reads = _audio_input(tower, seconds, size)
    return AudioFeatures(reads["extractor"], reads["values"], reads["num_samples"], augmentation)


@lru_cache  # a loader is made for every evaluation
def _audio_input(tower: str, seconds: float | None, size: int) -> Mapping[str, Any]:
    return audio_tower(tower, seconds, size).config["audio_input"]


def named_towers(given: tuple[str, ...] | list[str]) -> dict[str, str]:
    """`--tower MODALITY=NAME`, as often as given -> modality -> name."""
    return dict(each.split("=", 1) for each in given)
