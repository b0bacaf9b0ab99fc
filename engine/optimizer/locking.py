"""Which layers are locked: the `locked` block, read and checked. Plain Python.

A locked tower keeps its pretrained weights while the other tower learns to read it (Zhai et al.
2022, LiT). Layers are locked from the input on, so what is locked needs no backward: no gradient
leaves the first layer that learns, and a stage of locked layers alone runs forwards and nothing
else. The head, a layer of its own behind each tower, learns unless it is locked too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from common.spelling import nearest
from engine.topology import Stage, StageGraph

Trainable = Mapping[str, Sequence[bool]]  # branch -> of each of its layers, the head last


@dataclass(frozen=True)
class LockedBlock:
    """The `locked` block inside `branches`. Checked when made.

    `towers`, by branch: is it locked; {"all_but_last": k}: but for its last k layers with
    parameters; a branch that is not there is not. `head`: the projections and what the losses
    learn. `batch_norm`: "locked", the locked layers normalise by their running statistics and leave
    them; "free": by the micro-batch, as in training.
    """

    towers: Mapping[str, Any] = field(default_factory=dict)
    head: bool = False
    batch_norm: str = "free"

    def __post_init__(self):
        for branch, value in self.towers.items():
            last = (
                value.get("all_but_last")
                if isinstance(value, dict) and set(value) == {"all_but_last"}
                else None
            )
            if not isinstance(value, bool) and (type(last) is not int or last < 1):
                raise ValueError(
                    f'branches.locked.{branch}: got {value!r}; it is true, false or {{"all_but_last": k}} with a whole number k of at least 1'
                )
        if not isinstance(self.head, bool):
            raise ValueError(f"branches.locked.head: got {self.head!r}; it is true or false")
        if self.batch_norm not in ("locked", "free"):
            raise ValueError(
                "branches.locked.batch_norm: unknown value "
                f"{self.batch_norm!r}{nearest(str(self.batch_norm), ('locked', 'free'))}"
            )

    def __bool__(self) -> bool:
        return any(self.towers.values()) or self.head

    def trainable(self, num_parameters: Mapping[str, Sequence[int]]) -> dict[str, tuple[bool, ...]]:
        """From the parameters of each branch's layers. Raises ValueError where a tower has no more
        than `all_but_last` layers."""
        found = {}
        for branch, counts in num_parameters.items():
            tower, value = counts[:-1], self.towers.get(branch, False)
            held = [i for i, count in enumerate(tower) if count]
            last = len(held) if value is False else 0 if value is True else value["all_but_last"]
            if value and last >= len(held):
                raise ValueError(
                    f"branches.locked.{branch}: {value} would lock nothing: the tower has "
                    f"{len(held)} layers with parameters; use at most "
                    f'{len(held) - 1}, or "{branch}": false'
                )
            first = held[len(held) - last] if last else len(tower)
            found[branch] = (*(i >= first or not value for i in range(len(tower))), not self.head)
        return found


def locked_block(written: Any, branches: Sequence[str] | None = None) -> LockedBlock:
    """`branches.locked` as written; None: nothing is locked. `branches`: the names that it may
    have; None: any. Errors: ValueError with the key."""
    if written is None:
        return LockedBlock()
    if not isinstance(written, Mapping):
        example = f'{{"{(branches or ["head"])[0]}": true, "batch_norm": "locked"}}'
        raise ValueError(f"branches.locked: got {written!r}; it is an object such as {example}")
    own = {key: value for key, value in written.items() if key in ("head", "batch_norm")}
    towers = {key: value for key, value in written.items() if key not in own}
    for branch in towers:
        if branches is not None and branch not in branches:
            valid = (*branches, "head", "batch_norm")
            raise ValueError(f"unknown key 'branches.locked.{branch}'{nearest(branch, valid)}")
    locked = LockedBlock(towers, **own)
    if locked.head and branches and all(towers.get(branch) is True for branch in branches):
        raise ValueError(
            f"branches.locked: {', '.join(branches)} and head are all locked, so nothing would "
            "learn; leave one of them out"
        )
    return locked


def lock_graph(graph: StageGraph, trainable: Trainable) -> StageGraph:
    """The graph with what is known of gradients: of which branches' tensors they are needed, and
    whether the stage above wants any."""
    stages: list[Stage] = []
    for stage in graph.stages:
        above = () if stage.previous is None else stages[stage.previous].trained
        own = [
            branch
            for branch, layers in stage.layers.items()
            if any(trainable[branch][i] for i in layers)
        ]
        trained = tuple(branch for branch in graph.branches if branch in above or branch in own)
        stages.append(
            replace(stage, trained=trained, sends_gradients=stage.previous is None or bool(above))
        )
    return replace(graph, stages=tuple(stages))
