"""From a sample to the tensors that enter the towers: one `Modality` per branch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from common.output import brief
from data.batching.requests import MicroBatchRequest
from data.index.sources import Source
from data.loader import MicroBatchDataset
from data.modalities.modality import Modality
from data.modalities.preprocessing import Preprocessing
from data.modalities.text import Languages
from data.modules import own_code
from data.prepared import PreparedData
from engine.stage_runner import FromBytes
from launch.config.groups import InputOptions
from launch.modalities import MODALITIES, OWN, Inputs, entry_of
from models.towers.building import meta_inputs
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


def refuse_unfit_loaders(
    towers: Sequence[Tower], data: PreparedData, options: InputOptions
) -> None:
    """Raise ValueError where what loads a modality of one's own cannot load the first training
    sample that has it, as its tower reads it."""
    for tower, dataset, request in _own_loaders(towers, data, options):
        of = _loader_of(tower)
        read = f"{of}: reading {data.source.where(int(request.index[0]), tower.branch)}"
        with own_code(read, but=(OSError,)):
            loaded, report = dataset.load(request)
            meta = dataset.meta_batch(request)
        if not report.bad:
            _refuse_other_tensors(of, tower, loaded, meta)


def inputs_of_wider_images(
    towers: Sequence[Tower], data: PreparedData, options: InputOptions, more: int
) -> Iterator[tuple[Tower, dict[str, Tensor]]]:
    """Each tower of one's own whose tensors follow the size of the image, with those of two samples
    whose image is `more` pixels wider, on the meta device. Only the loader knows whether they
    do."""
    wider = (options.image_size, options.image_size + more)
    for tower, dataset, request in _own_loaders(towers, data, options):
        with own_code(f"{_loader_of(tower)}: its meta_batch", but=(OSError,)):
            square = dataset.meta_batch(request)
            wide = dataset.meta_batch(replace(request, size=wider))
        # what enters towers has their dtypes, also where bytes are loaded
        read = {name: each for name, each in meta_inputs(tower, 2).items() if name in wide}
        if any(square[name].shape != wide[name].shape for name in read):
            yield tower, {n: each.new_empty(wide[n].shape) for n, each in read.items()}


def _own_loaders(
    towers: Sequence[Tower], data: PreparedData, options: InputOptions
) -> Iterator[tuple[Tower, MicroBatchDataset, MicroBatchRequest]]:
    """Of each tower of a modality of one's own: what loads it, and a request for its first training
    sample, twice. Raises ValueError where the loader is no `Modality` of that name."""
    inputs = Inputs(options, data.tokenizer, data.length_multiple, languages=languages_of(towers))
    for tower in towers:
        branch, entry = tower.branch, entry_of(tower.branch)
        if entry is OWN.get(branch) or (i := data.first_with(branch)) is None:
            continue
        of = _loader_of(tower)
        with own_code(f"{of}: its function"):
            modality = entry.load(inputs)
        if not isinstance(modality, Modality) or getattr(modality, "name", None) != branch:
            raise ValueError(
                f"{of}: its function returned {brief(modality)}; a Modality of "
                f"data/modalities/modality.py with the name '{branch}' is needed"
            )
        request = MicroBatchRequest(0, 0, np.array([i, i]), np.arange(2), training=True)
        yield tower, MicroBatchDataset(data.source, [modality], options.seed), request


def _loader_of(tower: Tower) -> str:
    return f"the loader of '{tower.branch}'"


def _refuse_other_tensors(
    of: str, tower: Tower, loaded: Mapping[str, Tensor], meta: Mapping[str, Tensor]
) -> None:
    """Raise ValueError where tensors are not those that the tower reads, or not shaped as those
    that stages are told of beforehand."""
    if missing := sorted(meta_inputs(tower, 2).keys() - loaded.keys()):
        raise ValueError(
            f"{of}: it makes {', '.join(loaded)}, and its tower reads {missing[0]}; give both the "
            "same names"
        )
    for name in loaded.keys() | meta.keys():
        shapes = [
            f"{each[name].dtype} {[*each[name].shape]}" if name in each else "nothing"
            for each in (loaded, meta)
        ]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"{of}: of two samples {name} is {shapes[0]}, and by its meta_batch, which is blank "
                f"where there is none of its own, {shapes[1]}; make both alike"
            )
