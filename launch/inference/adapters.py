"""What an export does with the adapters of a run: it adds them to the weights, or writes them
beside these as peft's own files, a folder for each tower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig

from models.towers.adapters.layers import adapter_state, plain_tower, without_adapters
from models.towers.adapters.lora import LoRA
from models.towers.layers import Layer, Tower
from models.towers.libraries.configurations import saved_state
from models.towers.tracing.towers import on_meta

if TYPE_CHECKING:
    from launch.inference.trained import Trained

ADAPTERS, FILE = "adapters", "adapter_model.safetensors"
TOWER_IN = {"image": "vision_model", "text": "text_model"}  # of transformers' models of both


@dataclass(frozen=True)
class Adapters:
    """Of one tower. `tensors`: by canonical name."""

    branch: str
    lora: LoRA
    tensors: Mapping[str, Tensor]

    @property
    def modules(self) -> list[str]:
        """Their canonical names."""
        return list(dict.fromkeys(name.rpartition(".lora_")[0] for name in self.tensors))


def taken_off(trained: Trained, merge: bool) -> tuple[Trained, list[Adapters]]:
    """The model without adapters, in place: with `merge` they are added to its weights in fp32,
    else left out; and the adapters of each tower that had some."""
    found, plain = [], list[Layer]()
    for tower in trained.towers:
        own = trained.layers_of(tower.branch)
        if "lora" in tower.config:
            found.append(Adapters(tower.branch, LoRA(**tower.config["lora"]), adapter_state(own)))
        plain += [without_adapters(*pair, merge) for pair in zip(own, tower.specs)]
    towers = tuple(map(plain_tower, trained.towers))
    return replace(trained, towers=towers, layers=plain), found


def names_in_library(
    adapters: Adapters, tower: Tower, whole: PreTrainedConfig | None
) -> dict[str, str]:
    """Canonical name of an adapted module -> its name in the library's model of the tower; in
    `whole`, the configuration of transformers' model of both towers, in that model's tower."""
    own = {module: module.partition(".")[2] for module in adapters.modules}
    if tower.config["library"] != "transformers":
        return own
    if whole is None:
        kind, inside = tower.config["architecture"], ""
        config = type(getattr(transformers, kind).config_class())(**tower.config["config"])
    else:
        config, (kind,), inside = whole, whole.architectures, f"{TOWER_IN[tower.branch]}."
    live = _live_names(on_meta(lambda: getattr(transformers, kind)(config)))
    found = {}
    for module, name in own.items():
        # of an nn.MultiheadAttention
        last = "in_proj_weight" if f"{inside}{name}.in_proj_weight" in live else "weight"
        found[module] = live[f"{inside}{name}.{last}"].removeprefix(inside).removesuffix(f".{last}")
    return found


def _live_names(model: nn.Module) -> dict[str, str]:
    """The names under which a model of transformers saves its tensors -> those that they have in
    it: the library renames modules and keeps its files."""
    names = {id(tensor): name for name, tensor in reversed([*model.named_parameters()])}
    return {
        saved: names[id(tensor)]
        for saved, tensor in saved_state(model).items()
        if id(tensor) in names
    }


def write_all(
    adapters: Sequence[Adapters],
    towers: Mapping[str, Tower],
    whole: PreTrainedConfig | None,
    folder: Path,
) -> dict[str, Any]:
    """Write the adapters of each tower into an export, as peft's `PeftModel.from_pretrained` reads
    them around the library's model; returns what its record says of them, by branch. `whole`: as in
    `names_in_library`."""
    record = {}
    for own in adapters:
        tower, there = towers[own.branch], folder / ADAPTERS / own.branch
        names = names_in_library(own, tower, whole)
        own.lora.config(sorted(names.values())).save_pretrained(str(there))
        tensors = {}
        for canonical, tensor in own.tensors.items():
            module, _, matrix = canonical.rpartition(".lora_")
            tensors[f"base_model.model.{names[module]}.lora_{matrix}"] = tensor
        tensors |= _of_out_proj(own, tower, names)
        save_file(tensors, there / FILE, metadata={"format": "pt"})
        record[own.branch] = {"lora": own.lora.record(), "modules": names}
    return record


def _of_out_proj(adapters: Adapters, tower: Tower, names: Mapping[str, str]) -> dict[str, Tensor]:
    """In an nn.MultiheadAttention peft looks for an adapter of `out_proj` too; these are zero."""
    known = {name for spec in tower.specs for name in spec.template.canonical_names.values()}
    found = {}
    for module, name in names.items():
        if f"{module}.in_proj_weight" in known:
            up, down = (adapters.tensors[f"{module}.lora_{matrix}.weight"] for matrix in "BA")
            there = f"base_model.model.{name}.base_layer.out_proj"
            found[f"{there}.lora_A.weight"] = torch.zeros_like(down)
            found[f"{there}.lora_B.weight"] = up.new_zeros(down.shape[1], down.shape[0])
    return found


def read_adapters(layers: Sequence[Layer], folder: Path, record: Mapping[str, Any]) -> None:
    """Fill the adapters of an export into `layers`, in place. `record`: of the export, by
    branch."""
    for branch, own in record.items():
        tensors = load_file(folder / ADAPTERS / branch / FILE)
        for layer in layers:
            state = layer.state_dict()
            for local, canonical in layer.canonical_names.items():
                module, found, matrix = canonical.rpartition(".lora_")
                if found and module in own["modules"]:
                    there = f"base_model.model.{own['modules'][module]}.lora_{matrix}"
                    state[local].copy_(tensors[there])
