"""From a sample to the tensors that enter the towers: one `Modality` per branch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from data.index.sources import Source
from data.loader import MicroBatchDataset
from data.modalities.preprocessing import Preprocessing
from data.modalities.text import Languages
from engine.stage_runner import FromBytes
from launch.modalities import MODALITIES, Inputs
from models.towers.layers import Tower


def micro_batch_dataset(
    source: Source, inputs: Inputs, branches: Collection[str]
) -> MicroBatchDataset:
    """Micro-batches of `source` with the tensors of `branches` and no others."""
    modalities = [MODALITIES[name].load(inputs) for name in sorted(branches)]
    return MicroBatchDataset(source, modalities, inputs.options.seed)


def from_bytes(preprocessing: Preprocessing) -> dict[str, FromBytes]:
    """What makes values of the bytes that modalities load, by the name of the tensor."""
    made = {name: make for each in MODALITIES.values() for name, make in each.from_bytes.items()}
    return {name: partial(make, preprocessing=preprocessing) for name, make in made.items()}


def as_values(tensors: dict[str, Tensor], preprocessing: Preprocessing) -> dict[str, Tensor]:
    """A micro-batch as float32 towers read it, for those who call them without an engine."""
    made = from_bytes(preprocessing)
    return {
        name: made[name](tensor, torch.float32) if name in made else tensor
        for name, tensor in tensors.items()
    }


def languages_of(towers: Sequence[Tower]) -> Languages | None:
    """Those that the text tower tells apart; None: it does not."""
    known = next((t.config["languages"] for t in towers if "languages" in t.config), None)
    return Languages(**known) if known else None
