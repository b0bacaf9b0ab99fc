"""What the measurements share: towers to train, a synthetic data set, and an engine for them."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from engine.config.reading import BranchesBlock
    from engine.executor import ForkEngine
    from engine.planning.costs import CostModel, Machine
    from models.towers.layers import Tower

BRANCHES = ("image", "text")
SECONDS_PER_FLOP = (
    1e-11  # only ratios matter: stages and replicas are given, the costs say where a tower is cut
)
TIMEOUT = timedelta(seconds=300)


def laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`below` with what `above` says in its place, object by object; neither is changed by changing
    it."""
    both = {
        key: laid_over(below[key], above[key])
        for key in below.keys() & above.keys()
        if isinstance(below[key], Mapping)
    }
    return copy.deepcopy({**below, **above, **both})


def free_machine(name: str, flops_per_s: float) -> Machine:
    """Where nothing but computing takes time."""
    from engine.planning.costs import Machine

    return Machine(
        name=name,
        memory_bytes=1e15,
        link_bytes_per_s=1e15,
        link_latency_s=0.0,
        flops_per_s=flops_per_s,
        optimizer_s_per_parameter=0.0,
        gradient_s_per_parameter=0.0,
        instruction_s=0.0,
    )


def spread(values: Sequence[float], form: str) -> str:
    """mean (least – most)"""
    return f"{statistics.mean(values):{form}} ({min(values):{form}} – {max(values):{form}})"


@dataclass(frozen=True)
class Setup:
    """What is trained, whatever the strategy."""

    image_tower: str
    image_size: int
    text_tower: str
    num_tokens: int
    vocab_size: int
    embed_dim: int
    global_batch_size: int
    micro_batch_size: int
    lr: float = 1e-4
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0  # of each group: image, text, head
    zero_stage: int = 1  # of the engine; plain DDP has none
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

    def describe(self) -> str:
        millions = ", ".join(
            f"{b} {t.num_parameters / 1e6:.1f} M parameters" for b, t in self.towers.items()
        )
        return (
            f"`{self.image_tower}` at {self.image_size} pixels and `{self.text_tower}` at "
            f"{self.num_tokens} tokens of {self.vocab_size:,} ({millions}), embeddings of "
            f"{self.embed_dim}, global batch {self.global_batch_size}, micro-batches of "
            f"{self.micro_batch_size}, AdamW, fp32, one thread per rank"
        )


def samples(setup: Setup, branch: str, step: int, positions: Tensor) -> dict[str, Tensor]:
    """The samples at `positions` of the global batch of `step`, with the labels that the engine
    wants. The same on every rank."""
    import torch

    batch = step % setup.num_batches
    drawn = [_sample(setup, branch, batch * setup.global_batch_size + int(p)) for p in positions]
    labels = {
        f"{branch}_position": positions,
        f"{branch}_index": positions + batch * setup.global_batch_size,
    }
    if branch == "image":
        return {"pixel_values": torch.stack(drawn), **labels}
    tokens = torch.stack(drawn)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **labels}


def _sample(setup: Setup, branch: str, index: int) -> Tensor:
    import torch

    generator = torch.Generator().manual_seed(2 * index + (branch == "text"))
    if branch == "image":
        return torch.randn(3, setup.image_size, setup.image_size, generator=generator)
    tokens = torch.randint(5, setup.vocab_size, (setup.num_tokens,), generator=generator)
    tokens[-1] = 2  # the token that ends a text
    return tokens


def cost_model(towers: Mapping[str, Tower], embed_dim: int) -> CostModel:
    """Time in proportion to counted FLOPs, nothing else costs anything: enough to cut towers for a
    layout that is given."""
    from engine.planning.costs import CostModel, Curve, LayerCost, StateBytes
    from models.towers.building import count_flops, meta_inputs

    def costs(tower: Tower) -> list[LayerCost]:
        seconds = [
            SECONDS_PER_FLOP * flops / 2 for flops in count_flops(tower, meta_inputs(tower, 2))
        ]
        return [
            LayerCost(
                spec.name,
                spec.num_parameters,
                *(Curve((1,), (value,)) for value in (s, 2 * s, 0.0, 0.0)),
            )
            for spec, s in zip(tower.specs, seconds)
        ]

    machine = free_machine("bench", 1 / SECONDS_PER_FLOP)
    return CostModel(
        {b: costs(t) for b, t in towers.items()}, machine, StateBytes(8, 12, 4), embed_dim
    )


def configuration(
    setup: Setup, branches: Mapping[str, Any], deepspeed: Mapping[str, Any] = MappingProxyType({})
) -> tuple[dict[str, Any], BranchesBlock]:
    """What a JSON file would say. `branches` gives layout, stages, replicas and, if it is not
    batch_sync, the schedule; `deepspeed`: top-level keys in place of those here, or beside them."""
    from engine.config.reading import check_config

    return check_config(
        {
            "train_batch_size": setup.global_batch_size,
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": setup.lr, "weight_decay": setup.weight_decay, "torch_adam": True},
            },
            # as in ds_configs/cpu_fp32.json
            "zero_optimization": {
                "stage": setup.zero_stage,
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
            **deepspeed,
        },
        BRANCHES,
    )


def make_engine(
    setup: Setup,
    branches: Mapping[str, Any],
    costs: CostModel | None = None,
    deepspeed: Mapping[str, Any] = MappingProxyType({}),
) -> ForkEngine:
    """This rank's engine. The towers are cut by `costs`, or by counted operations."""
    import torch.distributed as dist

    from engine.build import build_engine
    from engine.planning.planner import plan_run
    from launch.objective import objective_of, pairs_of
    from models.losses import InfoNCE

    config, block = configuration(setup, branches, deepspeed)
    towers = setup.towers
    return build_engine(
        plan_run(
            config, block, dist.get_world_size(), costs or cost_model(towers, setup.embed_dim)
        ),
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

    branches = engine.place.loads
    if not branches:
        return None
    deal = engine.batches[branches[0]]
    places = torch.arange(setup.global_batch_size).view(
        deal.replicas, deal.num_micro_batches, deal.micro_batch_size
    )[engine.replica]
    return (
        {name: t for b in branches for name, t in samples(setup, b, step, p).items()}
        for p in places
    )
