"""Low-rank adapters (LoRA, Hu et al. 2021) in the layers of a tower, made by peft.

    y = W x + scale · B A x        A [r, in], B [out, r], B = 0 at the start

W keeps its pretrained values; A and B learn. A tower is adapted layer by layer: each layer is built
and filled as without adapters and then given its own, so that neither its weights nor the first
values of its adapters depend on where the tower is cut.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from models.towers.adapters.lora import LoRA, import_peft
from models.towers.adapters.targets import targets_of
from models.towers.building import meta_inputs
from models.towers.layers import Layer, LayerSpec, Tower, Weights, stable_seed

WRAPPED = ".base_layer."  # where peft puts the module that it adapts
NAME = "default"  # peft's, of the only adapter that a module has


# -- a layer with its adapters


@dataclass(frozen=True, kw_only=True)
class AdaptedSpec(LayerSpec):
    """The recipe of a layer of an adapted tower. `plain`: without adapters; `targets`: paths in the
    layer of the modules that have one; of none, the layer keeps its weights."""

    plain: LayerSpec
    lora: LoRA
    targets: tuple[str, ...]

    @property
    def num_learned(self) -> int:
        """Elements in the parameters that learn."""
        return sum(p.numel() for p in self.template.parameters() if p.requires_grad)

    def build(self, seed: int, weights: Weights | None = None) -> Layer:
        """As without adapters, which then draw their first values by peft's rule from a seed that
        depends on `seed` and the layer's name alone."""
        layer = self.plain.build(seed, weights)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(stable_seed(seed, f"{self.name}/lora"))
            return with_adapters(layer, self.lora, self.targets)


def with_adapters(layer: Layer, lora: LoRA, targets: Sequence[str]) -> Layer:
    """The layer, in place: its weights no longer learn, and the modules at `targets` have an
    adapter. The canonical name of `<path>.lora_A.default.weight` is that of the module with
    `.lora_A.weight`, which is how peft's files call it."""
    layer.requires_grad_(False)
    if not targets:
        return layer
    plain, shared = dict(layer.canonical_names), _other_paths(layer, targets)
    config = lora.config("|".join(map(re.escape, targets)))  # a pattern has to match a whole path
    config._register_custom_module({nn.MultiheadAttention: _attention_class()})
    import_peft().inject_adapter_in_model(config, layer, adapter_name=NAME)
    for path, first in shared.items():
        layer.set_submodule(path, layer.get_submodule(first))
    layer.canonical_names = {local: _canonical_name(local, plain) for local in layer.state_dict()}
    return layer


def _other_paths(layer: Layer, targets: Sequence[str]) -> dict[str, str]:
    """Further paths of the modules at `targets`, each with the one in `targets`."""
    first = {id(layer.get_submodule(path)): path for path in targets}
    every = layer.named_modules(remove_duplicate=False)
    return {
        path: first[id(module)]
        for path, module in every
        if id(module) in first and path != first[id(module)]
    }


def _canonical_name(local: str, plain: Mapping[str, str]) -> str:
    inside, adapter, matrix = local.partition(".lora_")
    if not adapter:
        return plain[local.replace(WRAPPED, ".")]
    last = "weight" if f"{inside}.weight" in plain else "in_proj_weight"
    module = plain[f"{inside}.{last}"].removesuffix(f".{last}")
    return f"{module}.lora_{matrix.replace(f'.{NAME}.', '.')}"


@functools.cache
def _attention_class() -> type[nn.Module]:
    """peft's adapter of an nn.MultiheadAttention, of its queries, keys and values alone.

    peft's own (0.21) changes the weights for the time of a forward and changes them back, which
    rounds them and replaces the parameters that an optimizer holds; and it adds the adapter of
    `out_proj` twice. Here the forward is a function of both, and `out_proj` has no adapter, so that
    what is trained here is what peft computes of it.
    """
    from peft.tuners.lora.layer import LoraLayer

    class InProjection(nn.Module, LoraLayer):
        def __init__(
            self,
            base_layer: nn.MultiheadAttention,
            adapter_name: str,
            config: Any,
            r: int = 0,
            lora_alpha: float = 1,
            **kwargs: Any,
        ) -> None:
            nn.Module.__init__(self)
            LoraLayer.__init__(self, base_layer, **kwargs)
            self._active_adapter = adapter_name
            self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config)

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:  # what a block asks of its attention, such as batch_first
                return getattr(super().__getattr__("base_layer"), name)

        def delta(self) -> Tensor:
            """Of `in_proj_weight`: [3 · width, width]."""
            product = self.lora_B[NAME].weight @ self.lora_A[NAME].weight
            return product * self.scaling[NAME]

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            weight = {"in_proj_weight": self.base_layer.in_proj_weight + self.delta()}
            return torch.func.functional_call(self.base_layer, weight, args, kwargs)

        def unload(self, merge: bool) -> nn.MultiheadAttention:
            if merge:
                self.base_layer.in_proj_weight.data += self.delta().detach()
            return self.base_layer

    return InProjection


# -- a tower with its adapters


def adapted_tower(tower: Tower, lora: LoRA) -> Tower:
    """The tower, head included, with adapters in its layers; the head learns as without them.

    Errors: ValueError, with the key, for a target that matches nothing or what cannot be adapted.
    """
    meant = targets_of(tower, lora)
    specs = [
        _adapted_spec(spec, lora, tuple(module.path for module in modules))
        for spec, modules in zip(tower.specs, meant)
    ]
    tower = replace(
        tower,
        specs=(*specs, tower.specs[-1]),
        config={**tower.config, "lora": lora.record()},
    )
    _refuse_unused(tower)
    return tower


def _adapted_spec(spec: LayerSpec, lora: LoRA, targets: tuple[str, ...]) -> AdaptedSpec:
    with torch.random.fork_rng(devices=[]):  # peft's first values, on the meta device
        template = with_adapters(copy.deepcopy(spec.template), lora, targets)
    return AdaptedSpec(
        spec.name,
        spec.branch,
        template,
        spec.initialise,
        spec.original,
        plain=spec,
        lora=lora,
        targets=targets,
    )


def _refuse_unused(tower: Tower) -> None:
    """Some libraries read the weight of a linear layer without calling it (torchvision's Swin), and
    then its adapter would be nowhere. Seen on the meta device."""
    tensors, called = meta_inputs(tower, 2), set()
    for spec in tower.specs[:-1]:
        layer = copy.deepcopy(spec.template)
        for path in getattr(spec, "targets", ()):
            layer.get_submodule(path).register_forward_hook(
                lambda *_, key=(spec.name, path): called.add(key)
            )
        with torch.no_grad():
            tensors = layer(tensors)
    unused = [
        canonical.partition(".")[2].removesuffix(".lora_A.weight")
        for spec in tower.specs[:-1]
        for path in getattr(spec, "targets", ())
        if (spec.name, path) not in called
        for canonical in [spec.template.canonical_names[f"{path}.lora_A.{NAME}.weight"]]
    ]
    if unused:
        raise ValueError(
            f"branches.train.{tower.branch}.lora.target: {tower.branch} tower {tower.name} uses "
            f"the weight of {unused[0]!r} without calling the module, so an adapter would not be "
            f"seen ({len(unused)} such modules); name others, or use another library's tower"
        )


def plain_tower(tower: Tower) -> Tower:
    """The tower without adapters."""
    specs = tuple(getattr(spec, "plain", spec) for spec in tower.specs)
    config = {key: value for key, value in tower.config.items() if key != "lora"}
    return replace(tower, specs=specs, config=config)


def num_learned(specs: Iterable[LayerSpec]) -> list[int | None]:
    """Of each layer the elements that learn; None: all, or as the layer is locked."""
    return [getattr(spec, "num_learned", None) for spec in specs]


def describe_adapters(towers: Iterable[Tower]) -> str:
    """A line for each adapted tower; empty where there is none."""
    lines = []
    for tower in towers:
        if "lora" not in tower.config:
            continue
        lora, specs = tower.config["lora"], tower.specs[:-1]
        learned = sum(filter(None, num_learned(specs)))
        number = sum(len(spec.targets) for spec in specs if isinstance(spec, AdaptedSpec))
        total = sum(spec.num_parameters for spec in specs)
        target = lora["target"] if isinstance(lora["target"], str) else ", ".join(lora["target"])
        lines.append(
            f"adapters: {tower.branch} tower, {learned:,} trainable of {total:,} parameters "
            f"({learned / total:.2%}), rank {lora['r']} in {number} modules ({target})"
        )
    return "\n".join(lines)


# -- adapters taken off again


def _adapted_modules(layer: Layer) -> Iterator[tuple[str, Any]]:
    """Paths of the modules that have an adapter (peft's `LoraLayer`), every path of a shared
    one."""
    from peft.tuners.lora.layer import LoraLayer

    for path, module in list(layer.named_modules(remove_duplicate=False)):
        if isinstance(module, LoraLayer):
            yield path, module


def without_adapters(layer: Layer, spec: LayerSpec, merge: bool) -> Layer:
    """The layer of `spec`, in place, with its plain modules: with `merge` each weight is
    W + scale · B A, added in fp32; else W."""
    if not isinstance(spec, AdaptedSpec) or not spec.targets:
        return layer
    done: dict[int, nn.Module] = {}
    for path, module in _adapted_modules(layer):
        if id(module) not in done:
            module.float()
            if isinstance(module.get_base_layer(), nn.MultiheadAttention):
                done[id(module)] = module.unload(merge)
            else:
                if merge:
                    module.merge(safe_merge=True)
                done[id(module)] = module.get_base_layer()
        layer.set_submodule(path, done[id(module)])
    layer.canonical_names = dict(spec.plain.template.canonical_names)
    return layer


def adapter_state(layers: Iterable[Layer]) -> dict[str, Tensor]:
    """The tensors of the adapters in fp32 by canonical name, on the CPU."""
    return {
        name: tensor.detach().float().cpu().contiguous()
        for layer in layers
        for local, tensor in layer.state_dict().items()
        if ".lora_" in (name := layer.canonical_names[local])
    }
