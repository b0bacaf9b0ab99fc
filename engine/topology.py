"""Which layers run on which ranks, fed by whom: the stage graph, decided in plain Python.

    fork     image 0 ─ image 1 ─┐
                                ├─ loss          each branch has its own stages and its own replicas
             text 0 ────────────┘
    merged   [image+text] ─ [image+text] ─ loss  every stage holds a slice of all branches

Any number of branches, in the order in which the cuts name them.

Ranks are counted stage by stage, the replicas of one stage side by side (DeepSpeed's order of its
pipe and data axes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

LAYOUTS = ("fork", "merged")
REMOVED_LAYOUTS = {"chain": "a fork of the same stages has fewer of them wait for each other"}


@dataclass(frozen=True)
class Stage:
    """One stage of the pipeline: a slice of one branch's layers, or of all.

    `layers` maps a branch to the half-open range of its layers that this stage holds; `ranks[r]`
    runs replica r. `previous` and `next` are the stage ids it receives activations from and sends
    them to; `num_downstream` stages lie between it and the loss.
    """

    stage_id: int
    name: str
    layers: Mapping[str, range] = field(hash=False)
    ranks: tuple[int, ...]
    previous: int | None
    next: int | None
    num_downstream: int
    # branches whose tensors need gradients where they leave; none: the stage has no backward
    trained: tuple[str, ...]
    sends_gradients: bool = True  # to the stage it receives from

    @property
    def loads(self) -> tuple[str, ...]:
        """Branches whose micro-batches enter here."""
        return tuple(self.layers) if self.previous is None else ()

    @property
    def last_of(self) -> tuple[str, ...]:
        """Branches whose embeddings leave the pipeline here."""
        return tuple(self.layers) if self.is_last else ()

    @property
    def is_last(self) -> bool:
        return self.next is None

    @property
    def is_tail(self) -> bool:
        """The name of version 0.1, which schedules of one's own may ask for."""
        return self.is_last

    @property
    def has_backward(self) -> bool:
        return bool(self.trained)

    @property
    def replicas(self) -> int:
        return len(self.ranks)

    @cached_property
    def kind(self) -> Stage:
        """The stage without what its instructions do not depend on: stages alike in this have equal
        lists."""
        before, after = self.previous and 0, self.next and 0
        learns = ("any",) if self.trained else ()
        alike = replace(self, previous=before, next=after, trained=learns)
        return replace(alike, stage_id=0, name="", layers={}, ranks=(0,))


@dataclass(frozen=True)
class StageGraph:
    """All stages of a run. Made by `fork` or `merged`; checked when made."""

    layout: str
    stages: tuple[Stage, ...]

    def __post_init__(self):
        ranks = [rank for stage in self.stages for rank in stage.ranks]
        if sorted(ranks) != list(range(len(ranks))):
            raise ValueError(
                f"stage graph: ranks {ranks} do not number the world 0..{len(ranks) - 1}, each once"
            )
        for stage in self.stages:
            if stage.next is not None and self.stages[stage.next].replicas != stage.replicas:
                raise ValueError(
                    f"stage graph: {stage.name} has {stage.replicas} replicas and feeds "
                    f"{self.stages[stage.next].name}, which has "
                    f"{self.stages[stage.next].replicas}; stages along one line need equal numbers "
                    "of replicas"
                )

    @cached_property
    def branches(self) -> tuple[str, ...]:
        """In the order of their layers and ranks."""
        return tuple(dict.fromkeys(branch for stage in self.stages for branch in stage.layers))

    @property
    def world_size(self) -> int:
        return sum(stage.replicas for stage in self.stages)

    @cached_property
    def _places(self) -> dict[int, tuple[Stage, int]]:
        return {
            rank: (stage, replica)
            for stage in self.stages
            for replica, rank in enumerate(stage.ranks)
        }

    def stage_of(self, rank: int) -> Stage:
        return self._places[rank][0]

    def replica_of(self, rank: int) -> int:
        return self._places[rank][1]

    def last_stage(self, branch: str) -> Stage:
        """The stage where the embeddings of `branch` leave the pipeline."""
        return next(stage for stage in self.stages if branch in stage.last_of)

    def entry(self, branch: str) -> Stage:
        """The stage where the micro-batches of `branch` enter the pipeline."""
        return next(stage for stage in self.stages if branch in stage.loads)

    def trained_before(self, own: Stage) -> tuple[str, ...]:
        """Branches whose tensors need gradients where the stage before `own` sends them; none
        where there is no such stage."""
        return () if own.previous is None else self.stages[own.previous].trained

    @cached_property
    def last_stages(self) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.stages if stage.is_last)

    def edges(self) -> list[tuple[int, int]]:
        """(upstream rank, downstream rank) of every pair of ranks that exchange activations."""
        return [
            (source, target)
            for stage in self.stages
            if stage.next is not None
            for source, target in zip(stage.ranks, self.stages[stage.next].ranks)
        ]

    def record(self) -> list[dict[str, Any]]:
        """The graph as JSON-able data, a dictionary per stage, for the run's record."""
        return [
            {
                "layout": self.layout,
                "name": stage.name,
                "ranks": list(stage.ranks),
                "layers": {
                    branch: [layers.start, layers.stop] for branch, layers in stage.layers.items()
                },
                "previous": stage.previous,
                "next": stage.next,
                "num_downstream": stage.num_downstream,
                "trained": list(stage.trained),
                "sends_gradients": stage.sends_gradients,
            }
            for stage in self.stages
        ]

    @classmethod
    def from_record(cls, record: Sequence[Mapping[str, Any]]) -> StageGraph:
        """The graph that `record` describes. Raises ValueError when a stage lacks something."""
        try:
            stages = tuple(
                Stage(
                    stage_id,
                    own["name"],
                    {branch: range(*layers) for branch, layers in own["layers"].items()},
                    tuple(own["ranks"]),
                    previous=own["previous"],
                    next=own["next"],
                    num_downstream=own["num_downstream"],
                    trained=tuple(own["trained"]),
                    sends_gradients=own["sends_gradients"],
                )
                for stage_id, own in enumerate(record)
            )
            return cls(record[0]["layout"], stages)
        except KeyError as error:
            raise ValueError(
                f"stage graph: the record has no {error}; an older version wrote it"
            ) from error

    def describe_rank(self, rank: int) -> str:
        """Such as `rank 5 (image 1, replica 2)`."""
        return f"rank {rank} ({self.stage_of(rank).name}, replica {self.replica_of(rank)})"

    def describe(self) -> str:
        """One line a person can read, for example `fork: image 0 ×3 ─ image 1 ×3 | text 0 ×2`;
        long lines are shortened."""
        lines: list[list[str]] = []
        for stage in self.stages:
            if stage.previous is None:
                lines.append([])
            lines[-1].append(f"{stage.name} ×{stage.replicas}")
        return f"{self.layout}: " + " | ".join(
            " ─ ".join(line if len(line) <= 4 else [line[0], "…", line[-1]]) for line in lines
        )


def fork(cuts: Mapping[str, Sequence[range]], replicas: Mapping[str, int]) -> StageGraph:
    """Branches side by side. `cuts[branch]` lists the layer ranges of its stages;
    `replicas[branch]` may differ per branch."""
    stages: list[Stage] = []
    first_rank = 0
    for branch in cuts:
        count = len(cuts[branch])
        for position, layers in enumerate(cuts[branch]):
            stage_id = len(stages)
            stages.append(
                Stage(
                    stage_id,
                    f"{branch} {position}",
                    {branch: layers},
                    tuple(range(first_rank, first_rank + replicas[branch])),
                    previous=stage_id - 1 if position > 0 else None,
                    next=stage_id + 1 if position < count - 1 else None,
                    num_downstream=count - 1 - position,
                    trained=(branch,),
                )
            )
            first_rank += replicas[branch]
    return StageGraph("fork", tuple(stages))


def merged(cuts: Mapping[str, Sequence[range]], replicas: int) -> StageGraph:
    """One line in which every stage holds a slice of all branches. One stage: ordinary
    data-parallel training."""
    branches, count = tuple(cuts), len(next(iter(cuts.values())))
    return StageGraph(
        "merged",
        tuple(
            Stage(
                i,
                f"merged {i}",
                {branch: cuts[branch][i] for branch in branches},
                tuple(range(i * replicas, (i + 1) * replicas)),
                previous=i - 1 if i > 0 else None,
                next=i + 1 if i < count - 1 else None,
                num_downstream=count - 1 - i,
                trained=branches,
            )
            for i in range(count)
        ),
    )


def balanced_cuts(costs: Sequence[float], parts: int) -> list[range]:
    """Cut a line of layers into `parts` non-empty runs so that the costliest run is as cheap as
    possible.

    Exact by dynamic programming over (layers, parts). Raises ValueError when there are more parts
    than layers.
    """
    count = len(costs)
    if not 1 <= parts <= count:
        raise ValueError(
            f"{parts} stages for {count} layers: every stage needs at least one layer; use 1 to "
            f"{count} stages"
        )
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    # best[n] = (cost of the costliest of k runs over the first n layers, start of the last run)
    best: list[tuple[float, int]] = [(prefix[n], 0) for n in range(count + 1)]
    history = [best]
    for k in range(2, parts + 1):
        previous = best
        best = [(float("inf"), 0)] * (count + 1)
        for n in range(k, count + 1):
            best[n] = min((max(previous[m][0], prefix[n] - prefix[m]), m) for m in range(k - 1, n))
        history.append(best)
    cuts, stop = [], count
    for k in range(parts, 0, -1):
        start = history[k - 1][stop][1] if k > 1 else 0
        cuts.append(range(start, stop))
        stop = start
    return cuts[::-1]
