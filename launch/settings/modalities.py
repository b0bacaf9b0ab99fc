"""The modalities of a run: what loads each one's samples, and which tower its branch has.

Images and texts have flags of their own. Any other modality is an entry of `MODALITIES`, which a
module of one's own adds to:

    MODALITIES["tone"] = ModalityEntry(load=Tone, tower=tone_tower)

and is then asked for by `--pairs image:text,tone:text` and `--tower tone=NAME` (`data/README.md`,
"Add a modality").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from data.modalities.modality import Modality
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
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
        return cls(len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id)


MODALITIES: dict[str, ModalityEntry] = {}
OWN_FLAGS = ("image", "text")


def known_modalities() -> tuple[str, ...]:
    return (*OWN_FLAGS, *MODALITIES)


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
    elif branch not in MODALITIES:
        raise ValueError(
            f"there is no modality '{branch}'; there are {', '.join(known_modalities())}; a module "
            "that adds one is named by --import-module"
        )
    else:
        tower = MODALITIES[branch].tower(named_towers(options.get("tower") or ()).get(branch, ""))
    return with_head(tower, options["embed_dim"], scalars, fusion)


def named_towers(given: tuple[str, ...] | list[str]) -> dict[str, str]:
    """`--tower MODALITY=NAME`, as often as given -> modality -> name."""
    return dict(each.split("=", 1) for each in given)
