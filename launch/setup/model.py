"""What a run trains: towers as lists of layers, the objective between them, and the weights that
they start from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from data.batching.buckets import side_multiple
from data.prepared import PreparedData
from data.stored.derived import Derived
from data.stored.kinds import stored
from engine.config.implied import zero_stage
from engine.config.reading import BranchesBlock
from engine.objective import Objective, Term
from engine.schedule import exact_schedules
from launch.config.blocks import BalanceBlock, balancing
from launch.config.groups import InputOptions, ModelOptions, flag_of
from launch.config.imported import branches_held
from launch.inference.trained import towers_of
from launch.inputs import inputs_of_wider_images
from launch.modalities import MODALITIES, OWN
from launch.objective import joints_of, losses_of, objective_of, pairs_of, refuse_views
from models.losses import Matching, Targets
from models.towers.adapters.layers import adapted_tower, describe_adapters, num_learned
from models.towers.adapters.lora import LoRA
from models.towers.building import changing_buffers, runs_on, takes_other_sizes
from models.towers.fusion import FusionSizes, fusion_sizes
from models.towers.layers import LayerSpec, Tower, Weights
from models.towers.patches import patch_side
from models.weights.of_image import open_model_weights


@dataclass(frozen=True)
class RunModel:
    """No layer is built before `build_layer` is asked for it. `pretrained`: readers of weights by
    branch; the others start from `seed`. `fusion`: of the matching loss, None without it."""

    towers: Sequence[Tower]
    objective: Objective
    embed_dim: int
    seed: int
    fusion: FusionSizes | None = None
    pretrained: Mapping[str, Weights] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        options: ModelOptions,
        tokenizer: PreTrainedTokenizerBase | None,
        adapters: Mapping[str, LoRA] = MappingProxyType({}),
    ) -> RunModel:
        """As the options say. `adapters`: by branch, of the towers that learn in them alone.
        Errors: ValueError, FileNotFoundError."""
        towers = towers_of(vars(options), tokenizer)
        matching = Matching(targets=Targets(options.duplicates)) if options.fusion else None
        smoothing = options.label_smoothing or 0.0
        duplicates, prefixes = options.duplicates, options.prefixes
        if prefixes and prefixes[-1] >= options.embed_dim:
            raise ValueError(
                f"argument --prefixes: {prefixes[-1]} of embeddings of --embed-dim "
                f"{options.embed_dim}; give numbers below that, all of it is compared anyway"
            )
        losses = losses_of(options.pairs, options.loss, smoothing, duplicates, prefixes)
        joints = joints_of(options.terms, options.branches, duplicates, prefixes)
        terms: list[Term] = [*pairs_of(options.pairs, losses, matching), *joints]
        refuse_views(options.views_per_image, terms)
        return cls(
            towers=towers,
            objective=objective_of(towers, terms),
            embed_dim=options.embed_dim,
            seed=options.seed,
            fusion=fusion_sizes(vars(options)),
            pretrained=_pretrained(options, towers),
        )._with(adapters)

    def _with(self, adapters: Mapping[str, LoRA]) -> RunModel:
        bare = [branch for branch in adapters if branch not in self.pretrained]
        if bare:
            flag = flag_of(bare[0], "weights", "WHERE")
            raise ValueError(
                f"branches.train.{bare[0]}.lora: adapters leave the tower's weights as they are, "
                f"and this tower starts from random ones; give {flag} or --import, or remove the key"
            )
        towers = [
            adapted_tower(tower, adapters[tower.branch]) if tower.branch in adapters else tower
            for tower in self.towers
        ]
        return replace(self, towers=towers)

    @property
    def layers(self) -> dict[str, Sequence[LayerSpec]]:
        """Of each branch, in order."""
        return {tower.branch: tower.specs for tower in self.towers}

    @property
    def num_learned(self) -> dict[str, list[int | None]]:
        """Of each layer how many parameters learn; None: all."""
        return {tower.branch: num_learned(tower.specs) for tower in self.towers}

    @property
    def _image_tower(self) -> Tower | None:
        return {tower.branch: tower for tower in self.towers}.get("image")

    @cached_property
    def patch_size(self) -> int | None:
        """Of the image tower, pixels; None: it has no patches, or there is none."""
        tower = self._image_tower
        return None if tower is None else tower.config.get("patch_size")

    def describe_cuts(self) -> str:
        """A line for each tower with fewer layers than blocks; empty where there is none."""
        return "\n".join(
            f"{tower.name}: {len(tower.specs) - 1} layers; {'; '.join(tower.config['notes'])}"
            for tower in self.towers
            if tower.config.get("notes")
        )

    def describe_patches(self) -> str:
        """A line where --image-size is no multiple of a ViT's patches; empty where it is."""
        if (tower := self._image_tower) is None:
            return ""
        size, patch = tower.config.get("image_size"), patch_side(tower.specs[0].template)
        if not size or not patch or not (rest := size % patch):
            return ""
        return (
            f"{tower.name} reads patches of {patch} × {patch} pixels: of images of {size} "
            f"it leaves out {rest} {'pixel' if rest == 1 else 'pixels'} at the right and "
            f"the bottom, as its library does; --image-size {size - rest} or "
            f"{size - rest + patch} leaves out none"
        )

    def describe_adapters(self) -> str:
        """A line for each tower with adapters; empty where there is none."""
        return describe_adapters(self.towers)

    def refuse_sizes(
        self, image_buckets: int, balance: BalanceBlock, data: PreparedData, inputs: InputOptions
    ) -> None:
        """Raise ValueError where images of several sizes are asked for (--image-buckets, the bounds
        `branches.balance.image_size`) and a tower takes one: that of the images, or one of one's
        own whose tensors have the image's size."""
        several = {
            "--image-buckets": image_buckets > 1,
            "branches.balance.image_size": balance.image_size is not None,
        }
        asked = [name for name, is_asked in several.items() if is_asked]
        if not asked:
            return
        image = self._image_tower if MODALITIES["image"] is OWN["image"] else None
        if image is not None and not takes_other_sizes(image):
            raise ValueError(
                f"{asked[0]}: image tower {image.name} takes images of one size only"
                f"{', as every ViT with regions does' * ('regions' in image.config)}; leave it "
                "out, or use another tower (timm's ViTs: dynamic_img_size=true)"
            )
        more = side_multiple(self.patch_size)
        for tower, wider in inputs_of_wider_images(self.towers, data, inputs, more):
            if not runs_on(tower, wider):
                raise ValueError(
                    f"{asked[0]}: {tower.branch} tower {tower.name} takes one size only, and what "
                    "enters it has that of the image; leave it out, or use another tower"
                )

    def refuse_matching(self, config: Mapping[str, Any]) -> None:
        """Raise ValueError for a matching loss whose weights are shared out over the replicas."""
        if zero_stage(config) == 3 and any(term.matching for term in self.objective.terms):
            raise ValueError(
                "argument --fusion: it scores pairs outside of a tower's layers, whose weights "
                'ZeRO-3 shares out; use "zero_optimization": {"stage": 2}, or leave --fusion out'
            )

    def refuse_changing_buffers(self) -> None:
        """Raise ValueError where training changes a buffer that no rule says how to average."""
        for tower in self.towers:
            if changing := changing_buffers(tower):
                raise ValueError(
                    f"{tower.branch} tower {tower.name}: its forward in training changes the buffer "
                    f"{changing[0]!r}. Of such buffers only those of batch normalisation are averaged "
                    "over the replicas, kept as they were in a second forward, and put back after a "
                    "skipped step; use another tower, or one that normalises otherwise"
                )

    def refuse_annotations(self, block: BranchesBlock, kind: Derived | None) -> None:
        """Raise ValueError where annotations of this kind are compared and cannot be, as the JSON
        file has it."""
        if kind is None:
            return
        several, rest = stored(kind.name).several, f"or leave {kind.pair_name} out of --pairs"
        if block.loss_per_micro_batch:
            raise ValueError(
                f'branches.schedule "{block.schedule}": every micro-batch is a batch by itself, and '
                f"{several} are compared over the whole batch; use {' or '.join(exact_schedules())}, {rest}"
            )
        if kind.in_view and balancing(block).kept_patches is not None:
            raise ValueError(
                f"branches.balance.kept_patches: leaves patches out, and {several} are cut out of all of "
                f"them; remove the key, {rest}"
            )

    def build_layer(self, spec: LayerSpec) -> nn.Module:
        """One layer with its first values, on the CPU."""
        return spec.build(self.seed, self.pretrained.get(spec.branch))


def _pretrained(options: ModelOptions, towers: Sequence[Tower]) -> dict[str, Weights]:
    of_branch = {tower.branch: tower for tower in towers}
    found: dict[str, Weights] = {}
    if options.imported:
        held = branches_held(options.imported, of_branch)
        of_model = (of_branch[branch] for branch in held if branch in of_branch)
        found |= open_model_weights(options.imported, *of_model)
    for branch, where in options.first_weights.items():
        if branch in of_branch:
            found[branch] = MODALITIES[branch].weights(where, of_branch[branch])
    return found
