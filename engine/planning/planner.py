"""From a configuration, a world size and a cost model to a plan: layout, stages, replicas,
micro-batches, schedule. Plain Python.

Whatever the `branches` block leaves "auto" is searched: every way that the block and the batch
allow (`engine/planning/ways.py`) is bounded, those that do not fit the memory are put aside, those
that may be the fastest are simulated, and the fastest is taken.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from typing import Any

from common.sizes import sized
from engine.batch import BranchBatch, describe_batches, describe_schedule
from engine.compiling import compiles
from engine.config.reading import AUTO, BranchesBlock
from engine.optimizer.averaging import AverageBlock
from engine.optimizer.clipping_rules import ClippingRule
from engine.optimizer.locking import Trainable, lock_graph
from engine.optimizer.parameter_groups import OptimizerGroups
from engine.planning.costs import CostModel, LayerCost, frozen
from engine.planning.simulator import (
    Simulation,
    StageResult,
    bounds,
    most_kept,
    room_bytes,
    simulate,
)
from engine.planning.ways import Deal, Split, Ways
from engine.schedule import SCHEDULES, StageSchedule, recomputing_schedules
from engine.topology import StageGraph, balanced_cuts, fork, merged

# ways to divide the ranks of a fork in which the batch does not divide evenly, for the same numbers
# of stages: so many on at most FEW_RANKS, one on more, and only where the costliest branch has at
# most UNEVEN_PAYS of what it has in the best even one
MOST_UNEVEN, FEW_RANKS, UNEVEN_PAYS = 3, 64, 0.98
ALIKE = 1.02  # times this near the fastest are not told apart
# times this near the fastest may be given for memory, where that is nearly full: steps take up to
# 10 % less or more than predicted (bench/EVIDENCE.md)
AS_GOOD = 1.10
NEARLY_FULL = 0.9  # of the memory: predictions miss it by up to a tenth
CUT_BY = 8  # samples of the micro-batch by whose seconds layers are cut into stages

Way = tuple[StageGraph, Deal, str]  # to run, the schedule last


@dataclass(frozen=True)
class Candidate:
    """One way to run, and what the simulator says of it."""

    graph: StageGraph
    batches: Mapping[str, BranchBatch]
    schedule: str
    simulation: Simulation

    @property
    def peak_bytes(self) -> float:
        return max(stage.peak_bytes for stage in self.simulation.stages)

    def describe(self) -> str:
        return _describe(self.graph, self.batches, self.schedule)


@dataclass(frozen=True)
class Search:
    """What the search found: those candidates that fit and may be the best, fastest first; how many
    candidates there were; how many of them did not fit; and the costs by which they were timed,
    those of frozen layers."""

    ranked: tuple[Candidate, ...]
    num_candidates: int
    num_too_large: int
    costs: CostModel = field(repr=False)

    @property
    def best(self) -> Candidate:
        """The fastest graph and schedule whose memory is not near its limit; of those that are as
        fast a fork, then the one with the fewest stages, then the one that needs the least memory.
        Where all that are about as fast are near the limit, the one that is farthest from it. Each
        has the fewest micro-batches with which it is at its fastest: small ones save little memory,
        and batch normalisation wants large ones."""
        fastest_s = self.ranked[0].simulation.step_s
        groups: dict[tuple[str, str], list[Candidate]] = {}
        for candidate in self.ranked:
            groups.setdefault((candidate.graph.describe(), candidate.schedule), []).append(
                candidate
            )
        near = [
            _fewest_micro_batches(group)
            for group in groups.values()
            if group[0].simulation.step_s <= fastest_s * AS_GOOD
        ]
        roomy = [candidate for candidate in near if self._full(candidate) <= NEARLY_FULL]
        if not roomy:
            return min(near, key=lambda each: (round(self._full(each), 2), *_preference(each)))
        least_s = min(candidate.simulation.step_s for candidate in roomy)
        alike = [each for each in roomy if each.simulation.step_s <= ALIKE * least_s]
        return min(alike, key=_preference)

    def _full(self, candidate: Candidate) -> float:
        """The part of a rank's memory that it takes."""
        return candidate.peak_bytes / room_bytes(candidate.graph, self.costs)

    def why(self) -> str:
        """A few lines that a person can read: what was chosen, and what the best of each other kind
        would cost."""
        best = self.best
        lines = [
            f"auto: {best.describe()}",
            f"  predicted {_seconds(best.simulation.step_s)} a step, "
            f"{best.simulation.bubble_fraction:.0%} idle, at most {sized(best.peak_bytes)} a rank; "
            f"{self.num_candidates} ways compared"
            + (f", {self.num_too_large} too large for the memory" if self.num_too_large else ""),
        ]
        seen = {(best.graph.layout, best.schedule)}
        for other in self.ranked:
            if (other.graph.layout, other.schedule) not in seen:
                seen.add((other.graph.layout, other.schedule))
                ratio = other.simulation.step_s / best.simulation.step_s
                lines.append(
                    f"  {ratio:.2f} × the time, {other.peak_bytes / best.peak_bytes:.2f} × the "
                    f"memory: {other.describe()}"
                )
        return "\n".join(lines)


def _preference(candidate: Candidate) -> tuple[bool, int, float, float]:
    """Of candidates that are as fast: the least first."""
    return (
        candidate.graph.layout != "fork",
        len(candidate.graph.stages),
        candidate.peak_bytes,
        candidate.simulation.step_s,
    )


def _fewest_micro_batches(group: Sequence[Candidate]) -> Candidate:
    """`group`: fastest first."""
    fastest = [c for c in group if c.simulation.step_s <= group[0].simulation.step_s * ALIKE]
    return min(
        fastest,
        key=lambda c: (
            sum(batch.num_micro_batches for batch in c.batches.values()),
            c.simulation.step_s,
        ),
    )


@dataclass(frozen=True)
class RunPlan:
    """What was decided for this world: the stage graph, the deal of the batch, the schedule, which
    layers learn, and how each group is clipped and learns.

    `block` and `costs`: what it was decided from. `predicted`: what the simulator says of each
    stage, by its id, `predicted_step_s` of the whole step. `reasons`: lines to show at the start.
    """

    graph: StageGraph
    batches: Mapping[str, BranchBatch]
    schedule: str
    clipping: Mapping[str, ClippingRule]
    optimizer_groups: OptimizerGroups
    # as it was written: two ways to write the same are one plan
    block: BranchesBlock = field(repr=False, compare=False)
    costs: CostModel = field(repr=False)
    predicted: tuple[StageResult, ...] = field(repr=False)
    batch_norm_locked: bool = False
    average: AverageBlock | None = None
    reasons: str = ""
    compiled: tuple[str, ...] = ()
    predicted_step_s: float = field(default=0.0, repr=False, compare=False)

    @property
    def trainable(self) -> Trainable:
        return self.costs.trainable

    @property
    def schedule_type(self) -> type[StageSchedule]:
        return SCHEDULES[self.schedule]

    def describe(self) -> str:
        """Everything that decides the numbers of a run, in one line."""
        return _describe(self.graph, self.batches, self.schedule)


def plan_run(
    config: Mapping[str, Any], block: BranchesBlock, world_size: int, costs: CostModel
) -> RunPlan:
    """Decide everything for `world_size` ranks. Raises ValueError when the block, the batch and the
    world do not go together, or when nothing fits the memory."""
    branches = tuple(costs.layers)
    search = search_plans(config, block, world_size, costs)
    best = search.best
    reasons = search.why() if search.num_candidates > 1 and block.layout == AUTO else ""
    compiled = tuple(
        b for b in branches if compiles(block.compiling(b), costs.compiled_share.get(b))
    )
    if (own := SCHEDULES[best.schedule]).loss_per_micro_batch:
        reasons = (
            f'schedule "{best.schedule}": {own.description or "a loss per micro-batch"}. '
            "This is another objective than the loss over the global batch; for ablation only"
        )
    return RunPlan(
        graph=best.graph,
        batches=best.batches,
        schedule=best.schedule,
        clipping=block.clipping(branches),
        optimizer_groups=block.learning(branches),
        block=block,
        costs=search.costs,
        predicted=best.simulation.stages,
        batch_norm_locked=block.locking().batch_norm == "locked",
        average=block.averaging(),
        reasons="\n".join(filter(None, (reasons, _of_compiling(block, costs)))),
        compiled=compiled,
        predicted_step_s=best.simulation.step_s,
    )


def check_world(
    config: Mapping[str, Any], block: BranchesBlock, world_size: int, branches: Sequence[str]
) -> None:
    """Refuse what does not go together on `world_size` ranks, whatever the towers of the `branches`
    are and cost: before anything is prepared.

    What needs the towers (a stage for each layer at most, the memory) `plan_run` refuses. Errors:
    ValueError.
    """
    num_layers = dict.fromkeys(branches, sys.maxsize)  # never too few
    next(Ways(config, block, world_size, num_layers).splits())


def search_plans(
    config: Mapping[str, Any], block: BranchesBlock, world_size: int, costs: CostModel
) -> Search:
    """Time the candidates, best first.

    Each is looked at in two steps: `bounds` of its seconds, with the exact memory, and, from the
    least bound on, `simulate`. The first never says more than the second. None is simulated that
    cannot be as good as the best of its layout and schedule, so of thousands only a few dozen are.
    """
    costs = frozen(costs, block.locking())
    graph_of = _graphs_of(costs)
    # (seconds at least, bytes, way)
    fits: list[tuple[float, float, Way]] = []
    too_large: list[tuple[float, float, Way]] = []
    for split in candidate_splits(config, block, world_size, costs):
        graph = graph_of(split)
        for deal, schedule in split.ways:
            if SCHEDULES[schedule].recomputes:
                deal = _keeping(block, graph, deal, costs)
            bound_s, peak_bytes = bounds(graph, deal, schedule, costs)
            group = fits if peak_bytes <= room_bytes(graph, costs) else too_large
            group.append((bound_s, peak_bytes, (graph, deal, schedule)))
    if not fits:
        _, _, smallest = min(too_large, key=lambda each: each[1])
        raise ValueError(_nothing_fits(block, costs, _candidate(smallest, costs)))
    best: dict[tuple[str, str], float] = {}
    simulated: list[Candidate] = []
    for bound_s, _, way in sorted(fits, key=lambda each: each[0]):
        graph, _, schedule = way
        known_s = best.get((graph.layout, schedule), inf)
        if bound_s <= AS_GOOD * ALIKE * known_s:
            simulated.append(_candidate(way, costs))
            best[graph.layout, schedule] = min(known_s, simulated[-1].simulation.step_s)
    ranked = sorted(simulated, key=lambda candidate: candidate.simulation.step_s)
    return Search(tuple(ranked), len(fits) + len(too_large), len(too_large), costs)


def _candidate(way: Way, costs: CostModel) -> Candidate:
    return Candidate(*way, simulate(*way, costs))


# -- candidates


def candidate_splits(
    config: Mapping[str, Any], block: BranchesBlock, world_size: int, costs: CostModel
) -> Iterator[Split]:
    """All in which the batch divides evenly, and of the others, of which there are many more, for
    the same numbers of stages the few whose costliest branch has least to do on a rank, where that
    is less than with any even one."""
    seconds = {branch: sum(_layer_seconds(layers)) for branch, layers in costs.layers.items()}

    def of_a_rank(split: Split) -> float:
        return max(seconds[b] / (split.stages[b] * split.replicas[b]) for b in seconds)

    least: dict[tuple, float] = {}  # of the even ones, by stages
    uneven: dict[tuple, list[Split]] = {}
    num_layers = {branch: len(layers) for branch, layers in costs.layers.items()}
    for split in Ways(config, block, world_size, num_layers).splits():
        stages = tuple(split.stages.values())
        if split.layout != "fork":
            yield split
        elif all(own.is_even for own in split.ways[0][0].values()):
            least[stages] = min(of_a_rank(split), least.get(stages, inf))
            yield split
        else:
            uneven.setdefault(stages, []).append(split)
    # of many ranks a few more or less make little difference
    most = MOST_UNEVEN if world_size <= FEW_RANKS else 1
    for stages, alike in uneven.items():
        better = [s for s in alike if of_a_rank(s) < UNEVEN_PAYS * least.get(stages, inf)]
        yield from sorted(better, key=of_a_rank)[:most]


def _layer_seconds(layers: Iterable[LayerCost]) -> list[float]:
    """Of a sample."""
    return [layer.training_s(CUT_BY) / CUT_BY for layer in layers]


def _graphs_of(costs: CostModel) -> Callable[[Split], StageGraph]:
    """What makes the stage graph of a split: layers cut so that the costliest stage is as cheap as
    possible."""
    seconds = {branch: _layer_seconds(layers) for branch, layers in costs.layers.items()}
    all_learn = all(all(learns) for learns in costs.trainable.values())

    @cache
    def cut(branch: str, parts: int) -> list[range]:
        return balanced_cuts(seconds[branch], parts)

    def graph_of(split: Split) -> StageGraph:
        parts = split.stages
        if split.layout == "merged":
            parts = dict.fromkeys(seconds, parts["merged"])
        cuts = {branch: cut(branch, parts[branch]) for branch in seconds}
        if split.layout == "fork":
            graph = fork(cuts, split.replicas)
        else:
            graph = merged(cuts, next(iter(split.replicas.values())))
        return graph if all_learn else lock_graph(graph, costs.trainable)

    return graph_of


def _keeping(block: BranchesBlock, graph: StageGraph, deal: Deal, costs: CostModel) -> Deal:
    """The deal with the number of micro-batches that keep their activations: as asked for, or,
    where that is "auto", as many as fit."""
    asked = {branch: block.num_kept(branch) for branch in deal}
    fits = most_kept(graph, deal, costs) if AUTO in asked.values() else {}
    found = {}
    for branch, batch in deal.items():
        number, kept = batch.num_micro_batches, asked[branch]
        if not isinstance(kept, int):
            kept = fits[branch]
            if kept < number:
                # in eighths: many graphs then have the same instructions, which are remembered
                kept -= kept % max(1, number // 8)
        found[branch] = replace(batch, num_kept=min(kept, number))
    if block.schedule == AUTO and all(b.num_kept == b.num_micro_batches for b in found.values()):
        # everything fits: that is a schedule that keeps all, beside which stands what this one
        # would save
        return deal
    return found


def _of_compiling(block: BranchesBlock, costs: CostModel) -> str:
    """A line for the branches whose layers are compiled where that is faster."""
    said = []
    for branch in (b for b in costs.layers if block.compiling(b) == AUTO):
        share = costs.compiled_share.get(branch)
        found = "not measured" if share is None else f"{share:.2f} of the time of its layers"
        said.append(f"{branch} {found}: {'on' if compiles(AUTO, share) else 'off'}")
    return f"torch.compile: {', '.join(said)}" if said else ""


def _nothing_fits(block: BranchesBlock, costs: CostModel, smallest: Candidate) -> str:
    """By how much the smallest candidate does not fit, and what needs less."""
    limit, memory_bytes = room_bytes(smallest.graph, costs), costs.machine.memory_bytes
    taken = f", {sized(memory_bytes - limit)} of it NCCL's" if limit < memory_bytes else ""
    stage = max(smallest.simulation.stages, key=lambda s: s.peak_bytes)
    less = ["more ranks", "ranks with more memory", "smaller towers"]
    if not costs.checkpoint_interval:
        less.insert(0, '"pipeline": {"activation_checkpoint_interval": 1}')
    if block.micro_batch_size != AUTO:
        less.insert(0, '"micro_batch_size": "auto"')
    if block.schedule != AUTO and not SCHEDULES[block.schedule].recomputes:
        less.insert(0, f'"schedule": "{recomputing_schedules()[0]}"')
    return (
        f"nothing fits {smallest.graph.world_size} ranks of {sized(memory_bytes)} "
        f"({costs.machine.name}{taken}): what needs least, {smallest.describe()}, needs "
        f"{sized(stage.peak_bytes)} in {stage.name}, {sized(stage.peak_bytes - limit)} too much "
        f"({sized(stage.state_bytes)} of it weights, gradients and optimizer state, "
        f"{sized(stage.activation_bytes)} activations). Less is needed with "
        f"{', '.join(less[:-1])} or {less[-1]}"
    )


def _describe(graph: StageGraph, batches: Mapping[str, BranchBatch], schedule: str) -> str:
    """Such as `fork: image 0 ×6 | text 0 ×2, replay, micro-batches image 32×5, text 480×1` (samples
    × number of them)."""
    how = describe_schedule(schedule, batches)
    return f"{graph.describe()}, {how}, micro-batches {describe_batches(batches)}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.3g} ms"
