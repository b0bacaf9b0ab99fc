"""Which layers are locked: the `locked` block, read and checked. Plain Python.

A locked tower keeps its pretrained weights while the other tower learns to read it (Zhai et al. 2022, LiT). Layers are locked from the
input on, so what is locked needs no backward: no gradient leaves the first layer that learns, and a stage of locked layers alone runs
forwards and nothing else. The head, a layer of its own behind each tower, learns unless it is locked too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.costs import CostModel
from engine.spelling import nearest, strict_block
from engine.topology import BRANCHES, StageGraph

Trainable = Mapping[str, Sequence[bool]]  # branch -> of each of its layers, the head last


@dataclass(frozen=True)
class LockedBlock:
    """The `locked` block inside `branches`. Checked when made.

    `image`, `text`: is the tower locked; {"all_but_last": k}: but for its last k layers with parameters. `head`: both projections and what
    the loss learns. `batch_norm`: "locked", the locked layers normalise by their running statistics and leave them; "free": by the
    micro-batch, as in training.
    """

    image: Any = False
    text: Any = False
    head: bool = False
    batch_norm: str = "free"

    def __post_init__(self):
        for branch in BRANCHES:
            value = getattr(self, branch)
            last = value.get("all_but_last") if isinstance(value, dict) and set(value) == {"all_but_last"} else None
            if not isinstance(value, bool) and (type(last) is not int or last < 1):
                raise ValueError(
                    f'branches.locked.{branch}: got {value!r}; it is true, false or {{"all_but_last": k}} with a whole number k of at least 1'
                )
        if not isinstance(self.head, bool):
            raise ValueError(f"branches.locked.head: got {self.head!r}; it is true or false")
        if self.batch_norm not in ("locked", "free"):
            raise ValueError(
                f"branches.locked.batch_norm: unknown value {self.batch_norm!r}{nearest(str(self.batch_norm), ('locked', 'free'))}"
            )
        if self.head and self.image is True and self.text is True:
            raise ValueError("branches.locked: image, text and head are all locked, so nothing would learn; leave one of them out")

    def __bool__(self) -> bool:
        return bool(self.image or self.text or self.head)

    def trainable(self, num_parameters: Mapping[str, Sequence[int]]) -> dict[str, tuple[bool, ...]]:
        """From the parameters of each branch's layers. Raises ValueError where a tower has no more than `all_but_last` layers."""
        found = {}
        for branch, counts in num_parameters.items():
            tower, value = counts[:-1], getattr(self, branch)
            held = [i for i, count in enumerate(tower) if count]
            last = len(held) if value is False else 0 if value is True else value["all_but_last"]
            if value and last >= len(held):
                raise ValueError(
                    f"branches.locked.{branch}: {value} would lock nothing: the tower has {len(held)} layers with parameters; use at most "
                    f'{len(held) - 1}, or "{branch}": false'
                )
            first = held[len(held) - last] if last else len(tower)
            found[branch] = (*(i >= first or not value for i in range(len(tower))), not self.head)
        return found


def locked_block(written: Any) -> LockedBlock:
    """`branches.locked` as written; None: nothing is locked. Errors: ValueError with the key."""
    return LockedBlock(**strict_block("locked", {} if written is None else written, LockedBlock, '{"image": true, "batch_norm": "locked"}'))


def trainable_layers(locked: LockedBlock, costs: CostModel) -> dict[str, tuple[bool, ...]]:
    """Which layers learn, of the towers that were priced."""
    return locked.trainable({branch: [layer.num_parameters for layer in line] for branch, line in costs.layers.items()})


def lock_graph(graph: StageGraph, trainable: Trainable) -> StageGraph:
    """The graph with what is known of gradients: of which branches' tensors they are needed, and whether the stage above wants any."""
    stages = []
    for stage in graph.stages:
        above = () if stage.previous is None else stages[stage.previous].trained
        own = [branch for branch, layers in stage.layers.items() if any(trainable[branch][i] for i in layers)]
        trained = tuple(branch for branch in BRANCHES if branch in above or branch in own)
        stages.append(replace(stage, trained=trained, sends_gradients=stage.previous is None or bool(above)))
    return replace(graph, stages=tuple(stages))


def lock_costs(costs: CostModel, trainable: Trainable) -> CostModel:
    """The cost model in which locked layers have no gradients, and layers before the first that learns no backward."""
    layers = {
        branch: [
            replace(layer, trainable=trainable[branch][i], differentiated=any(trainable[branch][: i + 1])) for i, layer in enumerate(line)
        ]
        for branch, line in costs.layers.items()
    }
    return replace(costs, layers=layers)
