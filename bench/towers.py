"""Two towers to train, a synthetic data set for them, and an engine."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from engine.config.reading import BranchesBlock
    from engine.executor import ForkEngine
    from engine.planning.costs import CostModel, LayerCost
    from engine.planning.planner import RunPlan
    from models.towers.layers import LayerSpec, Tower

BRANCHES = ("image", "text")
# only ratios matter: stages and replicas are given, the costs say where a tower is cut
SECONDS_PER_FLOP = 1e-11
TIMEOUT = timedelta(seconds=300)
NOTHING: Mapping[str, Any] = MappingProxyType({})


def laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `below` with what `above` says in its place, object by object."""
    both = {
        key: laid_over(below[key], above[key])
        for key in below.keys() & above.keys()
        if isinstance(below[key], Mapping)
    }
    return copy.deepcopy({**below, **above, **both})


@dataclass(frozen=True)
class Setup:
    """What is trained, whatever the strategy."""

    image_tower: str = ""
    image_size: int = 0
    text_tower: str = ""
    num_tokens: int = 0
    vocab_size: int = 0
    embed_dim: int = 128
    global_batch_size: int = 64
    micro_batch_size: int = 16
    lr: float = 1e-4
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0  # of each group: image, text, head
    num_batches: int = 4  # in the data set; then from the first one again
    seed: int = 0

    @property
    def towers(self) -> dict[str, Tower]:
        from models.towers.building import build_towers

        towers = build_towers(
            self.image_tower,
            self.text_tower,
            self.embed_dim,
            image_size=self.image_size,
            vocab_size=self.vocab_size,
            max_text_tokens=self.num_tokens,
            pad_token_id=0,
            eos_token_id=2,
        )
        return {tower.branch: tower for tower in towers}

    @property
    def costs(self) -> CostModel:
        """Time in proportion to counted FLOPs, nothing else costs anything: enough to cut towers
        for a layout that is given."""
        from engine.planning.costs import CostModel, Curve, LayerCost, Machine, StateBytes
        from models.towers.building import count_flops, meta_inputs

        def cost(spec: LayerSpec, flops: float) -> LayerCost:
            forward_s = SECONDS_PER_FLOP * flops / 2
            seconds = (forward_s, 2 * forward_s, 0.0, 0.0)  # of a sample: forward, backward
            curves = (Curve((1, 2), (each, 2 * each)) for each in seconds)
            return LayerCost(spec.name, spec.num_parameters, *curves)

        layers = {
            branch: list(map(cost, tower.specs, count_flops(tower, meta_inputs(tower, 2))))
            for branch, tower in self.towers.items()
        }
        machine = Machine("bench", 1e15, 1e15, 0.0, 1 / SECONDS_PER_FLOP, 0.0, 0.0, 0.0)
        return CostModel(layers, machine, StateBytes(8, 12, 4), self.embed_dim)

    def inputs(self, branch: str, indices: Sequence[int]) -> dict[str, Tensor]:
        """What the first layer of a branch reads of these samples of the data set."""
        import torch

        drawn = []
        for index in indices:
            generator = torch.Generator().manual_seed(2 * index + (branch == "text"))
            if branch == "image":
                size = (3, self.image_size, self.image_size)
                drawn.append(torch.randn(size, generator=generator))
            else:
                tokens = torch.randint(5, self.vocab_size, (self.num_tokens,), generator=generator)
                tokens[-1] = 2  # the token that ends a text
                drawn.append(tokens)
        stacked = torch.stack(drawn)
        if branch == "image":
            return {"pixel_values": stacked}
        return {"input_ids": stacked, "attention_mask": torch.ones_like(stacked)}

    def describe(self) -> str:
        millions = ", ".join(
            f"{b} {t.num_parameters / 1e6:.1f} M parameters" for b, t in self.towers.items()
        )
        return (
            f"`{self.image_tower}` at {self.image_size} pixels and `{self.text_tower}` at "
            f"{self.num_tokens} tokens of {self.vocab_size:,} ({millions}), embeddings of "
            f"{self.embed_dim}, global batch {self.global_batch_size}, micro-batches of "
            f"{self.micro_batch_size}, AdamW, fp32, one thread per rank."
        )


def samples(setup: Setup, branch: str, step: int, positions: Tensor) -> dict[str, Tensor]:
    """The samples at `positions` of the global batch of `step`, with the labels that the engine
    wants. The same on every rank."""
    indices = positions + step % setup.num_batches * setup.global_batch_size
    return {
        **setup.inputs(branch, indices.tolist()),
        f"{branch}_position": positions,
        f"{branch}_index": indices,
    }


def configuration(
    setup: Setup, branches: Mapping[str, Any], deepspeed: Mapping[str, Any] = NOTHING
) -> tuple[dict[str, Any], BranchesBlock]:
    """What a JSON file would say. `branches` gives layout, stages, replicas and, if it is not
    batch_sync, the schedule; `deepspeed`: keys of DeepSpeed in place of those below."""
    from engine.config.reading import check_config

    written = laid_over(_written(setup, branches), deepspeed)
    if written["zero_optimization"]["stage"] == 3:  # which has no buckets
        written["zero_optimization"] = {"stage": 3}
    return check_config(written, BRANCHES)


def _written(setup: Setup, branches: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "train_batch_size": setup.global_batch_size,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": setup.lr, "weight_decay": setup.weight_decay, "torch_adam": True},
        },
        # as in ds_configs/cpu_fp32.json
        "zero_optimization": {
            "stage": 1,  # plain DDP has none
            "reduce_bucket_size": 4_000_000,
            "allgather_bucket_size": 4_000_000,
        },
        "branches": {
            "micro_batch_size": setup.micro_batch_size,
            "schedule": "batch_sync",
            "gradient_clipping": dict.fromkeys(("image", "text", "head"), setup.max_grad_norm),
            "optimizer_groups": {"no_decay": []},  # as the baselines: every parameter decays
            **branches,
        },
    }


def plan_of(
    setup: Setup,
    branches: Mapping[str, Any],
    ranks: int,
    deepspeed: Mapping[str, Any] = NOTHING,
    costs: CostModel | None = None,
) -> tuple[dict[str, Any], RunPlan]:
    """The configuration and its plan; `costs`: by default the setup's own."""
    from engine.planning.planner import plan_run

    config, block = configuration(setup, branches, deepspeed)
    return config, plan_run(config, block, ranks, costs or setup.costs)


def make_engine(
    setup: Setup, branches: Mapping[str, Any], deepspeed: Mapping[str, Any] = NOTHING
) -> ForkEngine:
    """This rank's engine."""
    import torch.distributed as dist

    from engine.build import build_engine
    from launch.objective import objective_of, pairs_of
    from models.losses import InfoNCE

    config, plan = plan_of(setup, branches, dist.get_world_size(), deepspeed)
    towers = setup.towers
    return build_engine(
        plan,
        config,
        layers={b: t.specs for b, t in towers.items()},
        build_layer=lambda spec: spec.build(setup.seed),
        objective=objective_of(towers.values(), pairs_of("image:text", InfoNCE())),
        embed_dim=setup.embed_dim,
        total_num_steps=1000,
        seed=setup.seed,
        timeout=TIMEOUT,
    )


def micro_batches(
    setup: Setup, engine: ForkEngine, step: int
) -> Iterator[dict[str, Tensor]] | None:
    """What the loader of this rank yields for one step: each micro-batch is made when it is asked
    for."""
    import torch

    if not (branches := engine.stage.loads):
        return None

    def places(branch: str) -> Tensor:
        """In the global batch, those of this replica by micro-batch."""
        batch, all_ = engine.batches[branch], torch.arange(setup.global_batch_size)
        sizes = (batch.replicas, batch.num_micro_batches, batch.micro_batch_size)
        return all_.view(sizes)[engine.comm.replica]

    return (
        {n: t for b, p in zip(branches, own) for n, t in samples(setup, b, step, p).items()}
        for own in zip(*map(places, branches))
    )
