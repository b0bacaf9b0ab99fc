"""What each rank does in the test that runs every file of ds_configs/; a module of its own, because
ranks import it by name."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from cost_models import BRANCHES, proportional
from deepspeed.accelerator import get_accelerator
from small_towers import EMBED_DIM
from split_training import Case, micro_batches_of_rank, towers_of

BATCH = 24
# Files for eight GPUs: as many stages and the same schedule, on one replica of each.
ONE_OF_EACH = {"replicas": {"image": 1, "text": 1}, "micro_batch_size": {"image": 4, "text": 12}}
SMALLER = {"fork_bf16.json": ONE_OF_EACH, "pipeline_bf16.json": ONE_OF_EACH}


def train_by_file(file: str, steps: int) -> dict[str, Any]:
    """Some steps of small towers on random data as a file says, but for sizes (replicas, batch,
    buffers, first loss scale) and whose Adam it is."""
    from engine.build import build_engine
    from engine.config.auto import filled
    from engine.config.reading import check_config
    from engine.optimizer.preview import preview
    from engine.planning.costs import with_learned
    from engine.planning.planner import plan_run
    from launch.config.hyperparameters import PRESETS
    from launch.objective import objective_of, pairs_of
    from models.losses import build_loss
    from models.towers.adapters.layers import num_learned
    from models.towers.building import count_flops, meta_inputs

    written = json.loads(Path(file).read_text()) | {"train_batch_size": BATCH}
    written["branches"] |= SMALLER.get(Path(file).name, {})
    pretrained = dict.fromkeys(("image", "text"), False)
    adapters = {b: own["lora"] for b, own in written["branches"].get("train", {}).items()}
    config, block = filled(
        *check_config(written, BRANCHES),
        PRESETS["short"].values(BATCH, steps, pretrained, adapted=adapters),
        BRANCHES,
    )
    config["zero_optimization"] |= {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}
    if "fp16" in config:
        config["fp16"]["initial_scale_power"] = 10  # else the first steps search for it
    config["optimizer"]["params"]["torch_adam"] = (
        True  # DeepSpeed's own for an offloaded state would be compiled first
    )
    case = Case("fork", {"image": 1, "text": 1}, {"image": 1, "text": 1}, global_batch_size=BATCH)
    if adapters:
        case = replace(case, towers="vit+clip", lora=adapters)
    towers, image_size = towers_of(case)
    costs = proportional(
        {branch: count_flops(tower, meta_inputs(tower, 2)) for branch, tower in towers.items()}
    )
    costs = with_learned(costs, {b: num_learned(tower.specs) for b, tower in towers.items()})
    plan = plan_run(config, block, dist.get_world_size(), costs)
    # slow on most CPUs, but right
    with mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda self: True):
        engine = build_engine(
            plan,
            config,
            layers={branch: tower.specs for branch, tower in towers.items()},
            build_layer=lambda spec: spec.build(case.seed),
            objective=objective_of(towers.values(), pairs_of("image:text", build_loss("infonce"))),
            embed_dim=EMBED_DIM,
            total_num_steps=steps,
            seed=case.seed,
            timeout=timedelta(seconds=300),
        )
    # one batch, again and again
    metrics = [
        engine.train_batch(micro_batches_of_rank(case, engine, 0, image_size)) for _ in range(steps)
    ]
    group = engine.backend.optimizer.param_groups[0]
    return {
        "previewed": preview(config, plan.optimizer_groups, steps),
        "settings": [*group["betas"], group["eps"]],
        "losses": [m.loss for m in metrics],
        "rates": [m.lr for m in metrics],
        "optimizer": engine.backend.wrapper,
        "dtype": str(engine.backend.dtype),
        "plan": plan.describe(),
    }
