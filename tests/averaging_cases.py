"""What each rank does in the tests of averaged weights; a module of its own, because ranks import it by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from split_training import Case, make_engine, micro_batches_of_rank

from engine.averaging import AVERAGE
from engine.checkpoint import load_checkpoint, save_checkpoint
from engine.module import layer_file

DECAY = 0.5


def weights_of(engine) -> dict[str, torch.Tensor]:
    return {name: p.detach().float().clone() for name, p in engine.module.canonical_parameters.items()}


def train_and_average(case: Case, folder: str) -> dict[str, Any]:
    """Train, save, and train one step more; the weights before and after each step, their average as it was in its place and as the
    checkpoint has it, and its state behind the last step."""
    engine, _, image_size = make_engine(case)
    history = [weights_of(engine)]
    for step in range(case.steps):
        engine.train_batch(micro_batches_of_rank(case, engine, step, image_size))
        history.append(weights_of(engine))
    stepped = [p.detach().clone() for group in engine.basic_optimizer.param_groups for p in group["params"]]
    state = engine.average.state_dict()
    with engine.averaged_weights():
        averaged = weights_of(engine)
    checkpoint = save_checkpoint(engine, Path(folder), {})
    now = [p for group in engine.basic_optimizer.param_groups for p in group["params"]]
    untouched = [
        all(map(torch.equal, stepped, now)),
        all(map(torch.equal, state["averages"], engine.average.averages)),
        all(torch.equal(weight, history[-1][name]) for name, weight in weights_of(engine).items()),
    ]
    saved = {}
    for layer, name in zip(engine.module.forward_funcs, engine.module.layer_names):
        tensors = torch.load(layer_file(str(checkpoint / AVERAGE), name), weights_only=True)
        saved |= {layer.canonical_names[local]: tensors[local].float() for local, _ in layer.named_parameters()}
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
    return engine.average.state_dict()
