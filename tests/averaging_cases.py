"""What each rank does in the tests of averaged weights; a module of its own, because ranks import
it by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from split_training import Case, make_engine, micro_batches_of_rank, whole

from engine.checkpoint.layout import step_folder
from engine.checkpoint.reading import CheckpointReader, load_layer
from engine.checkpoint.retention import Keep
from engine.checkpoint.together import CheckpointWriter, load_checkpoint

DECAY = 0.5


def weights_of(engine) -> dict[str, torch.Tensor]:
    return {
        name: whole(p).float().clone() for name, p in engine.module.canonical_parameters.items()
    }


def state_of(engine) -> dict[str, Any]:
    return {
        "num_updates": engine.average.num_updates,
        "averages": [average.clone() for average in engine.average.averages],
    }


def train_and_average(case: Case, folder: str) -> dict[str, Any]:
    """Train, save, and train one step more; the weights before and after each step, their average
    as it was in its place and as the checkpoint has it, and its state behind the last step."""
    engine, _, image_size = make_engine(case)
    history = [weights_of(engine)]
    for step in range(case.steps):
        engine.train_batch(micro_batches_of_rank(case, engine, step, image_size))
        history.append(weights_of(engine))
    stepped = [
        p.detach().clone()
        for group in engine.backend.optimizer.param_groups
        for p in group["params"]
    ]
    averages = state_of(engine)["averages"]
    with engine.averaged_weights():
        averaged = weights_of(engine)
    writer = CheckpointWriter(Path(folder), {}, Keep())
    writer.save(engine, {})
    writer.finish()
    dist.barrier()  # the first rank has named it
    now = [p for group in engine.backend.optimizer.param_groups for p in group["params"]]
    untouched = [
        all(map(torch.equal, stepped, now)),
        all(map(torch.equal, averages, engine.average.averages)),
        all(torch.equal(weight, history[-1][name]) for name, weight in weights_of(engine).items()),
    ]
    with CheckpointReader(Path(folder) / step_folder(case.steps)) as reader:
        layers = [
            load_layer(reader, copy.deepcopy(layer).to_empty(device="cpu"), averaged=True)
            for layer in engine.module.templates
        ]
    saved = {
        layer.canonical_names[name]: p.detach().float()
        for layer in layers
        for name, p in layer.named_parameters()
    }
    return {
        "history": {name: [weights[name] for weights in history] for name in averaged},
        "averaged": averaged,
        "saved": saved,
        "untouched": all(untouched),
        "later": _one_step_more(case, engine, image_size),
    }


def go_on(case: Case, folder: str) -> dict[str, Any]:
    """The same last state, of a run that goes on from the checkpoint."""
    engine, _, image_size = make_engine(case)
    load_checkpoint(engine, max(Path(folder).glob("step-*")))
    return _one_step_more(case, engine, image_size)


def _one_step_more(case: Case, engine, image_size: int) -> dict[str, Any]:
    engine.train_batch(micro_batches_of_rank(case, engine, case.steps, image_size))
    return state_of(engine)
