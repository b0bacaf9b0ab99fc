"""An engine's state as flat fragments of named tensors, and back, whatever the optimizer's wrapper.

Where the optimizer's state is sharded a rank steps slices of the stage's parameters, in fp32;
otherwise it steps the parameters, on every replica alike. Both are shards of named parameters
(`engine/backend/protocol.py`), so both are saved in the same form: the values that the optimizer
steps (fp32 also where the model is not), and each tensor that it keeps for them (exp_avg, ...).
What all replicas hold is dealt to them evenly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.backend.protocol import Shard, stepped_tensors
from engine.checkpoint.layout import AVERAGE, BUFFER, OPTIMIZER, PARAMETER, Fragment
from engine.checkpoint.reading import CheckpointReader
from engine.checkpoint.sharing import SharedReader
from engine.executor import ForkEngine
from engine.schedule import SCHEDULES

SCALAR_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float64, torch.int32, torch.int64)
}


def fragment(kind: str, shard: Shard) -> Fragment:
    return Fragment(kind, shard.name, shard.shape, shard.offset, shard.numel)


def averages_of(engine: ForkEngine) -> dict[int, Tensor]:
    """By the id of what the optimizer steps: its average, of the same shape."""
    stepped = map(id, stepped_tensors(engine.backend.optimizer))
    return dict(zip(stepped, engine.average.averages)) if engine.average else {}


def dealt(shards: Iterable[Shard], part: int, parts: int) -> Iterator[Shard]:
    """The `part`-th of `parts` about equal shares of the elements of `shards`."""
    shards = list(shards)
    total, position = sum(shard.numel for shard in shards), 0
    first, last = total * part // parts, total * (part + 1) // parts
    for shard in shards:
        skipped, end = max(0, first - position), min(shard.numel, last - position)
        if skipped < end:
            yield replace(
                shard,
                offset=shard.offset + skipped,
                numel=end - skipped,
                start=shard.start + skipped,
            )
        position += shard.numel


# -- out of the engine


@dataclass(frozen=True)
class Snapshot:
    """This rank's part of a checkpoint. The tensors are views of what training changes: copy them
    before it goes on. `frozen`: of parameters that do not learn, the same in every checkpoint."""

    tensors: Mapping[Fragment, Tensor]
    frozen: Mapping[Fragment, Tensor]
    scalars: Mapping[str, Mapping[str, Any]]
    stateless: tuple[str, ...]
    progress: Mapping[str, Any]


def num_bytes(tensors: Mapping[Fragment, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def snapshot(engine: ForkEngine) -> Snapshot:
    """What this rank is to save."""
    optimizer = engine.backend.optimizer
    shards, stateless = engine.backend.shards(), []
    tensors: dict[Fragment, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    averages = averages_of(engine)
    parameters = engine.module.canonical_parameters
    replica, replicas = engine.comm.replica, engine.stage.replicas
    learn, still = (
        [
            *(shard for shard in part if not shard.everywhere),
            *dealt([shard for shard in part if shard.everywhere], replica, replicas),
        ]
        for part in (
            [shard for shard in shards if parameters[shard.name].requires_grad is learns]
            for learns in (True, False)
        )
    )
    group_of = {id(tensor): group for group in optimizer.param_groups for tensor in group["params"]}
    for shard in learn:
        if id(shard.held) in group_of:
            options[shard.name] = _options(group_of[id(shard.held)])
        tensors[fragment(PARAMETER, shard)] = shard.of(shard.held)
        if id(shard.held) in averages:
            tensors[fragment(AVERAGE, shard)] = shard.of(averages[id(shard.held)])
        state = optimizer.state.get(shard.held, {})
        kept = {key: value for key, value in state.items() if value is not None}
        if not kept:
            stateless.append(shard.name)
        for key, value in kept.items():
            if isinstance(value, Tensor) and value.shape == shard.held.shape:
                tensors[fragment(OPTIMIZER + key, shard)] = shard.of(value)
            else:
                scalars.setdefault(shard.name, {})[key] = _scalar_to_json(value)
    if replica == 0:  # the replicas' buffers are equal after every step
        for name, buffer in engine.module.canonical_buffers.items():
            tensors[Fragment(BUFFER, name, tuple(buffer.shape), 0, buffer.numel())] = (
                buffer.detach().reshape(-1)
            )
    progress = {
        **engine.progress(),
        "optimizer": {"type": type(optimizer).__name__, "options": options},
    }
    frozen = {fragment(PARAMETER, shard): shard.of(shard.held) for shard in still}
    stateless += [shard.name for shard in still]
    return Snapshot(tensors, frozen, scalars, tuple(stateless), progress)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a schedule may change of a parameter group: its numbers (lr, betas, ...). Switches are
    not."""
    return {key: value for key, value in group.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    """Also several."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_number, value))
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _scalar_to_json(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "value": value.item()}
    return value


def _scalar_from_json(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return torch.tensor(value["value"], dtype=SCALAR_DTYPES[value["dtype"]])


# -- into the engine


@torch.no_grad()
def restore(engine: ForkEngine, reader: CheckpointReader) -> None:
    """Fill this rank's stage, optimizer and counters. For an engine that has not trained yet; all
    replicas of a stage call it together.

    Raises ValueError when something is missing or of another shape, or when another kind of
    optimizer was trained with.
    """
    shards, buffers = engine.backend.shards(), engine.module.canonical_buffers
    shared = SharedReader(
        reader,
        {*engine.module.canonical_parameters, *buffers},
        engine.comm.replica,
        engine.stage.replicas,
        engine.comm.from_replica,
    )
    for shard in shards:
        _fill(shard.held, shard, PARAMETER, shared)
    engine.backend.weights_replaced()
    for name, buffer in buffers.items():
        shared.fill(buffer, BUFFER, name, buffer.shape)
    _restore_optimizer(engine, shared, shards)
    averages = averages_of(engine)
    for shard in shards:
        if id(shard.held) in averages:
            _fill(averages[id(shard.held)], shard, AVERAGE, shared)
    engine.load_progress(reader.manifest.progress)


def _fill(like_held: Tensor, shard: Shard, kind: str, shared: SharedReader) -> None:
    """Copy what was saved of a shard to where it lies in a tensor of the shape of `shard.held`."""
    if shard.everywhere:
        shared.fill(shard.of(like_held), kind, shard.name, shard.shape)
    else:
        values = shared.reader.read(
            kind, shard.name, shard.shape, shard.offset, shard.offset + shard.numel
        )
        shard.of(like_held).copy_(values)


def _restore_optimizer(engine: ForkEngine, shared: SharedReader, shards: list[Shard]) -> None:
    """Through the optimizer's own `load_state_dict`, which puts tensors where the optimizer wants
    them."""
    reader, optimizer = shared.reader, engine.backend.optimizer
    saved = reader.manifest.progress["optimizer"]
    if saved["type"] != type(optimizer).__name__:
        raise ValueError(
            f"checkpoint {reader.checkpoint}: was trained with the optimizer {saved['type']}, and "
            f"this run has {type(optimizer).__name__}; go on with the optimizer that it was "
            "trained with, choose another checkpoint, or export.py its model and begin another run "
            "with --import"
        )
    by_held: dict[int, list[Shard]] = {}
    for shard in shards:
        by_held.setdefault(id(shard.held), []).append(shard)
    whole = optimizer.state_dict()
    whole["state"] = {}
    for group, filled in zip(optimizer.param_groups, whole["param_groups"]):
        names = [shard.name for tensor in group["params"] for shard in by_held.get(id(tensor), [])]
        # of a group whose slice is all padding here, any: nothing is stepped
        known = [name for name in (*names, *saved["options"]) if name in saved["options"]]
        for key, value in saved["options"][known[0]].items() if known else ():
            filled[key] = tuple(value) if isinstance(value, list) else value
        for index, tensor in zip(filled["params"], group["params"]):
            if state := _state_of(tensor, by_held.get(id(tensor), []), shared):
                whole["state"][index] = state
    optimizer.load_state_dict(whole)


def _state_of(held: Tensor, shards: list[Shard], shared: SharedReader) -> dict[str, Any]:
    """What the optimizer keeps for `held`; where parameters had nothing, zeros, which is what
    optimizers begin with. A slice that is all padding has the numbers of the other parameters."""
    reader = shared.reader
    with_state = [shard for shard in shards if shard.name not in reader.stateless]
    if shards and not with_state:
        return {}
    state: dict[str, Any] = {}
    for kind in reader.optimizer_kinds:
        # an optimizer may keep other tensors for one parameter than for another
        if with_state and all(reader.shape(kind, shard.name) is None for shard in with_state):
            continue
        state[kind.removeprefix(OPTIMIZER)] = whole = torch.zeros_like(held)
        for shard in with_state:
            _fill(whole, shard, kind, shared)
    scalars = (
        [reader.scalars(shard.name) for shard in with_state] if shards else reader.all_scalars()
    )
    for key in {key for found in scalars for key in found}:
        # one number for all of a slice: the largest
        values = (_scalar_from_json(found[key]) for found in scalars if key in found)
        state[key] = max(values, key=float)
    return state


def topology_of(engine: ForkEngine) -> dict[str, Any]:
    """How this run is split and computed: what may differ when it goes on, as JSON."""
    return {
        "stages": engine.graph.describe(),
        "stage_graph": engine.graph.record(),
        "schedule": next(n for n, of in SCHEDULES.items() if of is engine.schedule_type),
        "micro_batch_size": {
            branch: batch.micro_batch_size for branch, batch in engine.batches.items()
        },
        "precision": str(engine.backend.dtype).removeprefix("torch."),
    }


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between the topology that a run had and the one it goes on with, and what that
    does to its numbers."""
    found = []
    if before["stage_graph"] != now["stage_graph"] or before["schedule"] != now["schedule"]:
        found.append(
            f"split as {now['stages']}, {now['schedule']}, and before as {before['stages']}, "
            f"{before['schedule']}: sums are taken in another order, which moves last bits; "
            "running means of BatchNorm are those of other replicas"
        )
    sizes = [
        f"{branch} micro-batches of {size} (before: {other})"
        for branch, size in now["micro_batch_size"].items()
        if (other := before["micro_batch_size"][branch]) != size
    ]
    if sizes:
        found.append(f"{', '.join(sizes)}: BatchNorm and dropout see other micro-batches")
    if before["precision"] != now["precision"]:
        found.append(
            f"computed in {now['precision']}, and before in {before['precision']}: numbers differ "
            "from those of a run that did not change"
        )
    return found
