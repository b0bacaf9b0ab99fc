"""From a configuration, a world size and a cost model to a plan: layout, stages, replicas,
micro-batches, schedule. Plain Python.

The arithmetic of a batch, per branch:

    train_batch_size = micro_batch_size × num_micro_batches × replicas

Whatever the `branches` block leaves "auto" is searched: every candidate that the block and the
batch allow is timed by the simulator, those that do not fit the memory are put aside, and the
fastest is taken.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache, lru_cache
from heapq import heapify, heappop, heappush
from itertools import islice, product
from math import inf
from typing import Any

from engine.compiling import compiles
from engine.config.reading import AUTO, BranchesBlock
from engine.optimizer.averaging import AverageBlock
from engine.optimizer.classes import with_length
from engine.optimizer.clipping_rules import ClippingRule
from engine.optimizer.locking import Trainable, lock_costs, lock_graph, trainable_layers
from engine.optimizer.parameter_groups import OptimizerGroups
from engine.planning.costs import CostModel, precision_of
from engine.planning.simulator import (
    Simulation,
    StageResult,
    bounds,
    most_kept,
    room_bytes,
    simulate,
)
from engine.schedule import SCHEDULES, StageSchedule, exact_schedules, recomputing_schedules
from engine.topology import LAYOUTS, StageGraph, balanced_cuts, chain, fork, merged

MAX_STAGES = 16  # per line, where "auto" chooses: deeper lines idle more than they save
# ways to divide the ranks of a fork in which the batch does not divide evenly, for the same numbers
# of stages: so many on at most FEW_RANKS, one on more, and only where the costliest branch has at
# most UNEVEN_PAYS of what it has in the best even one
MOST_UNEVEN, FEW_RANKS, UNEVEN_PAYS = 3, 64, 0.98
FEW_STAGES = (
    1,
    2,
    3,
    4,
    6,
    8,
    12,
    16,
)  # per line, where "auto" chooses for three branches or more: all combinations would be too many
ALIKE = 1.02  # of one graph: numbers of micro-batches this near the fastest are not told apart
MICRO_BATCHES = (
    1,
    2,
    4,
    8,
    16,
    32,
    64,
)  # per replica, where "auto" chooses: as near below as the batch allows
# predictions this near the best are taken as equal: steps take up to 10 % less or more than
# predicted (bench/README.md)
AS_GOOD = 1.10
GIB = 2**30


@dataclass(frozen=True)
class BranchBatch:
    """How the global batch is dealt to one branch: every replica runs `num_micro_batches` of
    `micro_batch_size` samples.

    Under a schedule that recomputes the first `num_kept` of them keep their activations.
    `num_samples`: of a global batch that does not divide evenly. The shares of the replicas then
    differ by at most one sample, and so do the micro-batches of each; `micro_batch_size` is that of
    the largest.
    """

    replicas: int
    micro_batch_size: int
    num_micro_batches: int
    num_kept: int = 0
    num_samples: int | None = None

    @property
    def places(self) -> int:
        """Samples of a global batch if all micro-batches were as large as the largest."""
        return self.replicas * self.micro_batch_size * self.num_micro_batches

    @property
    def global_batch_size(self) -> int:
        return self.places if self.num_samples is None else self.num_samples

    @property
    def is_even(self) -> bool:
        """Are all micro-batches equally large?"""
        return self.num_samples is None

    def record(self) -> dict[str, int]:
        """As config.json and checkpoints keep it; an even one as earlier versions wrote it."""
        return {name: value for name, value in asdict(self).items() if value is not None}


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
    candidates there were; and how many of those that were looked at did not fit."""

    ranked: tuple[Candidate, ...]
    num_candidates: int
    num_too_large: int

    @property
    def best(self) -> Candidate:
        """Of the graphs and schedules that are as fast as the fastest the one that needs the least
        memory per rank; of equal ones a fork, then the one with the fewest stages, then the
        fastest. Each has the fewest micro-batches with which it is at its fastest: small ones save
        little memory, and batch normalisation wants large ones."""
        fastest_s = self.ranked[0].simulation.step_s
        groups: dict[tuple[str, str], list[Candidate]] = {}
        for candidate in self.ranked:
            groups.setdefault((candidate.graph.describe(), candidate.schedule), []).append(
                candidate
            )
        near = [
            group for group in groups.values() if group[0].simulation.step_s <= fastest_s * AS_GOOD
        ]
        return min(map(_fewest_micro_batches, near), key=self._preference)

    def _preference(self, candidate: Candidate) -> tuple[float, bool, int, float]:
        memory = round(
            candidate.peak_bytes / self.ranked[0].peak_bytes, 2
        )  # to a percent: it is predicted no better than that
        return (
            memory,
            candidate.graph.layout != "fork",
            len(candidate.graph.stages),
            candidate.simulation.step_s,
        )

    def why(self) -> str:
        """A few lines that a person can read: what was chosen, and what the best of each other kind
        would cost."""
        best = self.best
        lines = [
            f"auto: {best.describe()}",
            f"  predicted {_seconds(best.simulation.step_s)} a step, "
            f"{best.simulation.bubble_fraction:.0%} idle, at most {best.peak_bytes / GIB:.2f} GiB "
            f"a rank; {self.num_candidates} ways compared"
            + (
                f", at least {self.num_too_large} too large for the memory"
                if self.num_too_large
                else ""
            ),
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
    trainable: Trainable
    block: BranchesBlock = field(
        repr=False, compare=False
    )  # as it was written: two ways to write the same are one plan
    costs: CostModel = field(repr=False)
    predicted: tuple[StageResult, ...] = field(repr=False)
    batch_norm_locked: bool = False
    average: AverageBlock | None = None
    reasons: str = ""
    compiled: tuple[str, ...] = ()
    predicted_step_s: float = field(default=0.0, repr=False, compare=False)

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
    locked, branches = block.locking(), tuple(costs.layers)
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
        trainable=trainable_layers(locked, costs),
        block=block,
        costs=costs,
        predicted=best.simulation.stages,
        batch_norm_locked=locked.batch_norm == "locked",
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
    next(_splits(config, block, world_size, num_layers))


def search_plans(
    config: Mapping[str, Any], block: BranchesBlock, world_size: int, costs: CostModel
) -> Search:
    """Time the candidates, best first.

    Each is looked at in three steps, every one dearer and nearer the truth than the one before:
    what its branches have to compute, `bounds` of its stages (with the exact memory), and
    `simulate`. The first two never say more than the third. The candidate with the least seconds so
    far takes its next step, and none does that cannot be as good as the best of its layout and
    schedule, so that of thousands a few dozen are simulated.
    """
    costs = lock_costs(costs, trainable_layers(block.locking(), costs))
    graph_of, computes_s = _graphs_of(block, costs), _computing_of(costs)
    num_layers = {branch: len(layers) for branch, layers in costs.layers.items()}
    splits = _worth_timing(_splits(config, block, world_size, num_layers), world_size, costs)
    ways = [(split, deal, schedule) for split in splits for deal, schedule in split.ways]
    queue: list[tuple[float, int, tuple[StageGraph, Deal] | None]] = [
        (computes_s(split, deal), i, None) for i, (split, deal, _) in enumerate(ways)
    ]
    heapify(queue)
    best: dict[tuple[str, str], float] = {}
    simulated: list[Candidate] = []
    num_too_large, smallest_bytes = 0, inf
    smallest: tuple[StageGraph, Deal, str] | None = None
    while queue:
        seconds, i, bounded = heappop(queue)
        split, deal, schedule = ways[i]
        known = best.get((split.layout, schedule), inf)
        if seconds > AS_GOOD * ALIKE * known:
            continue
        if bounded is not None:
            graph, deal = bounded
            simulated.append(
                Candidate(graph, deal, schedule, simulate(graph, deal, schedule, costs))
            )
            best[split.layout, schedule] = min(known, simulated[-1].simulation.step_s)
            continue
        graph = graph_of(split)
        if SCHEDULES[schedule].recomputes:
            deal = _keeping(block, graph, deal, costs)
        bound_s, peak_bytes = bounds(graph, deal, schedule, costs)
        if peak_bytes <= room_bytes(graph, costs):
            heappush(queue, (bound_s, i, (graph, deal)))
            continue
        num_too_large += 1
        if smallest is None or peak_bytes < smallest_bytes:
            smallest_bytes, smallest = peak_bytes, (graph, deal, schedule)
    if smallest is not None and not simulated:
        raise ValueError(_nothing_fits(config, block, world_size, costs, *smallest))
    return Search(
        tuple(sorted(simulated, key=lambda c: c.simulation.step_s)), len(ways), num_too_large
    )


def deepspeed_config(
    config: Mapping[str, Any], batch: BranchBatch, total_num_steps: int, most_replicas: int = 2
) -> dict[str, Any]:
    """The dictionary DeepSpeed reads on a rank of this branch: the file's keys with the branch's
    batch filled in.

    `most_replicas`: of any stage. Where no stage has two, ZeRO-1 has nothing to shard, and under
    fp32 it would only add copies of the weights and gradients; fp16 and bf16 need its wrapper, and
    so does an offloaded optimizer. torch's own Adam runs fused unless the file says how.
    """
    resolved = copy.deepcopy(dict(config))
    zero = resolved.get("zero_optimization", {})
    if (
        most_replicas == 1
        and precision_of(config) == "fp32"
        and zero
        and "offload_optimizer" not in zero
    ):
        resolved["zero_optimization"]["stage"] = 0
    # DeepSpeed knows equal shares only; what it computes with these numbers is not used for rows
    resolved["train_batch_size"] = batch.places
    resolved["train_micro_batch_size_per_gpu"] = batch.micro_batch_size
    resolved["gradient_accumulation_steps"] = batch.num_micro_batches
    resolved["gradient_clipping"] = (
        # DeepSpeed's default is 1.0, over all parameters of a stage; engine/optimizer/clipping.py
        # clips by group
        0.0
    )
    if precision_of(config) == "bf16":
        # DeepSpeed would round the fp32 sums to bf16 on their way to the other replicas
        resolved.setdefault("communication_data_type", "fp32")
        # gradients reach their fp32 sums during the backward, so that averages can start in it
        resolved["bf16"].setdefault("immediate_grad_update", True)
    resolved.setdefault("steps_per_print", None)
    if "pipeline" in resolved:
        resolved["pipeline"]["use_reentrant"] = False
    optimizer = resolved.get("optimizer", {})
    params = optimizer.get("params") or {}
    if (
        str(optimizer.get("type", "")).lower() in ("adam", "adamw")
        and params.get("torch_adam")
        and not {"fused", "foreach", "capturable", "differentiable"} & set(params)
    ):
        # one pass over the parameters instead of a dozen, on a CPU as on a GPU, and nothing to
        # compile
        params["fused"] = True
    if scheduler := resolved.get("scheduler"):
        scheduler["params"] = with_length(scheduler.get("params", {}), total_num_steps)
    return resolved


# -- candidates


Deal = dict[str, BranchBatch]
Counts = tuple[tuple[str, int], ...]  # by name


@dataclass(frozen=True)
class Split:
    """Who runs what, before layers are cut into stages: stages by name, replicas by branch, and the
    (deal, schedule) that go with them."""

    layout: str
    stages: Mapping[str, int]
    replicas: Mapping[str, int]
    ways: tuple[tuple[Deal, str], ...]


def _worth_timing(splits: Iterable[Split], world_size: int, costs: CostModel) -> Iterator[Split]:
    """All in which the batch divides evenly, and of the others, of which there are many more, for
    the same numbers of stages the few whose costliest branch has least to do on a rank, where that
    is less than with any even one."""
    seconds = {
        branch: sum(map(_seconds_per_sample, layers)) for branch, layers in costs.layers.items()
    }

    def of_a_rank(split: Split) -> float:
        return max(seconds[b] / (split.stages[b] * split.replicas[b]) for b in seconds)

    least: dict[tuple, float] = {}  # of the even ones, by stages
    uneven: dict[tuple, list[Split]] = {}
    for split in splits:
        stages = tuple(split.stages.values())
        if split.layout != "fork":
            yield split
        elif all(own.is_even for own in split.ways[0][0].values()):
            least[stages] = min(of_a_rank(split), least.get(stages, inf))
            yield split
        else:
            uneven.setdefault(stages, []).append(split)
    for stages, alike in uneven.items():
        better = [s for s in alike if of_a_rank(s) < UNEVEN_PAYS * least.get(stages, inf)]
        # of many ranks a few more or less make little difference
        most = MOST_UNEVEN if world_size <= FEW_RANKS else 1
        yield from sorted(better, key=of_a_rank)[:most]


def _splits(
    config: Mapping[str, Any],
    block: BranchesBlock,
    world_size: int,
    num_layers: Mapping[str, int],
) -> Iterator[Split]:
    """Every split that the block allows. Raises ValueError, with the reason, when there is none."""
    layouts = [block.layout] if block.layout != AUTO else ["merged"] if world_size == 1 else LAYOUTS
    if block.moves_work:
        layouts = [layout for layout in layouts if layout != "merged"]
        if not layouts:
            raise ValueError(
                'branches.balance: "feed" moves work between branches on different ranks, and there is one; use "deal" or more ranks'
            )
    schedules = (
        [block.schedule]
        if block.schedule != AUTO
        else [name for name in exact_schedules() if SCHEDULES[name].chosen_by_auto]
    )
    found = False
    reasons: list[str] = []
    for layout in layouts:
        try:
            if block.layout != AUTO and (reason := _refuse_kept(block, layout, num_layers)):
                raise ValueError(reason)
            for stages, replicas in _stages_and_replicas(
                config, block, layout, world_size, num_layers
            ):
                ways = []
                for deal in _deals(config, block, layout, replicas, reasons):
                    for schedule in schedules:
                        kept = (
                            _refuse_kept(block, layout, num_layers)
                            if SCHEDULES[schedule].recomputes
                            else None
                        )
                        if reason := kept or _refuse_schedule(schedule, deal):
                            reasons.append(reason)
                        else:
                            ways.append((deal, schedule))
                if ways:
                    found = True
                    yield Split(layout, stages, replicas, tuple(ways))
        except ValueError as error:
            if block.layout != AUTO:
                raise
            reasons.append(str(error))
    if not found:
        raise ValueError(
            reasons[0] if reasons else f"nothing runs on {_ranks(world_size)} with branches {block}"
        )


def _stages_and_replicas(
    config: Mapping[str, Any],
    block: BranchesBlock,
    layout: str,
    world_size: int,
    num_layers: Mapping[str, int],
) -> Iterator[tuple[dict[str, int], dict[str, int]]]:
    """Every (stages, replicas) of a layout that fills the world. Raises ValueError where none
    does."""
    filled, reason = False, None
    for stages in _stage_counts(block, layout, world_size, num_layers):
        try:
            choices = _replicas(
                config["train_batch_size"],
                block,
                layout,
                stages=stages,
                world_size=world_size,
                branches=tuple(num_layers),
            )
        except ValueError as error:
            reason = reason or error
            continue
        filled = True
        for replicas in choices:
            yield stages, replicas
    if not filled:
        raise reason or ValueError(f"{layout}: no number of stages fills {_ranks(world_size)}")


def _graphs_of(block: BranchesBlock, costs: CostModel) -> Callable[[Split], StageGraph]:
    """What makes the stage graph of a split: layers cut so that the costliest stage is as cheap as
    possible."""
    seconds = {
        branch: tuple(map(_seconds_per_sample, layers)) for branch, layers in costs.layers.items()
    }
    locked = block.locking()
    trainable = trainable_layers(locked, costs) if locked else None

    @cache
    def cut(layout: str, stages: Counts, replicas: Counts) -> StageGraph:
        parts = dict.fromkeys(seconds, stages[0][1]) if layout == "merged" else dict(stages)
        cuts = {branch: _cut(own, parts[branch]) for branch, own in seconds.items()}
        line = merged if layout == "merged" else chain
        graph = fork(cuts, dict(replicas)) if layout == "fork" else line(cuts, replicas[0][1])
        return graph if trainable is None else lock_graph(graph, trainable)

    def graph_of(split: Split) -> StageGraph:
        return cut(split.layout, tuple(split.stages.items()), tuple(split.replicas.items()))

    return graph_of


def _computing_of(costs: CostModel) -> Callable[[Split, Deal], float]:
    """What tells the seconds that the ranks of a split compute in a step at least: the branches'
    layers divided evenly over their stages, without waiting, sending or stepping."""

    @cache
    def micro_batch_s(branch: str, size: int) -> float:
        return sum(layer.training_s(size) for layer in costs.layers[branch])

    def computes_s(split: Split, deal: Deal) -> float:
        every = {
            branch: (own.num_micro_batches * micro_batch_s(branch, own.micro_batch_size))
            for branch, own in deal.items()
        }
        if split.layout == "merged":
            return sum(every.values()) / split.stages["merged"]
        return max(seconds / split.stages[branch] for branch, seconds in every.items())

    return computes_s


def _seconds_per_sample(layer: Any, size: int = 8) -> float:
    return layer.training_s(size) / size


@lru_cache(maxsize=4096)
def _cut(seconds: tuple[float, ...], parts: int) -> list[range]:
    return balanced_cuts(seconds, parts)


def _stage_counts(
    block: BranchesBlock, layout: str, world_size: int, num_layers: Mapping[str, int]
) -> Iterator[dict[str, int]]:
    if block.stages == AUTO:
        most = min(world_size, MAX_STAGES)
        if layout == "merged":
            yield from ({"merged": s} for s in range(1, min(most, *num_layers.values()) + 1))
        else:
            numbers = range(1, most + 1) if len(num_layers) <= 2 else FEW_STAGES
            counts = product(
                *([n for n in numbers if n <= min(most, number)] for number in num_layers.values())
            )
            yield from (
                dict(zip(num_layers, each))
                for each in counts
                if sum(each) <= max(world_size, len(num_layers))
            )
        return
    stages = _given_stages(block, layout, world_size, tuple(num_layers))
    for name, count in stages.items():
        for branch in num_layers if name == "merged" else (name,):
            if count > num_layers[branch]:
                raise ValueError(
                    f"branches.stages: {count} {name} stages, but the {branch} tower has "
                    f"{num_layers[branch]} layers and every stage needs one; use at most "
                    f"{num_layers[branch]}"
                )
    yield stages


def _given_stages(
    block: BranchesBlock, layout: str, world_size: int, branches: Sequence[str]
) -> dict[str, int]:
    """`branches.stages` as written, by name: of each branch, or {"merged": n}. One number is that
    of every name."""
    names = ("merged",) if layout == "merged" else branches
    if isinstance(block.stages, int):
        return dict.fromkeys(names, block.stages)
    if set(block.stages) == set(names):
        return {name: block.stages[name] for name in names}
    given = f"branches.stages: {json.dumps(block.stages)} does not fit layout {layout!r}"
    if layout != "merged":
        example = json.dumps({name: 2 if name == names[0] else 1 for name in names})
        raise ValueError(
            f'{given}; write for example "stages": {example}, or one number, which every branch gets'
        )
    fits = next(
        n for n in range(max(block.stages.values(), default=1), 0, -1) if world_size % n == 0
    )
    only = ", the only one for one rank" if block.layout == AUTO and world_size == 1 else ""
    raise ValueError(
        f'{given}{only}: a merged stage holds a slice of every branch, so write "stages": {{"merged": {fits}}} (or "stages": {fits})'
    )


def _replicas(
    batch_size: int,
    block: BranchesBlock,
    layout: str,
    stages: Mapping[str, int],
    world_size: int,
    branches: Sequence[str],
) -> list[dict[str, int]]:
    """The numbers of replicas, by branch, with which these stages fill the world; there is at least
    one."""
    if layout == "fork":
        return _fork_replicas(batch_size, block, stages, world_size)
    line = sum(stages.values())
    if isinstance(block.replicas, dict):
        why = (
            "a merged stage holds a slice of every branch"
            if layout == "merged"
            else "all stages of a chain have equally many"
        )
        raise ValueError(
            f"branches.replicas: {json.dumps(block.replicas)} does not fit layout {layout!r}: "
            f"{why}, so write one number, "
            f'such as "replicas": {max(1, world_size // line)}'
        )
    _refuse_too_few(layout, stages, world_size)
    replicas = world_size // line if block.replicas == AUTO else block.replicas
    if replicas * line != world_size:
        asked = "" if block.replicas == AUTO else f" and {block.replicas} replicas"
        raise ValueError(
            f"{layout} of {line} stages{asked} does not fill {_ranks(world_size)}; use "
            f"{_ranks(replicas * line)} or change branches.stages"
        )
    return [dict.fromkeys(branches, replicas)]


def _fork_replicas(
    batch_size: int, block: BranchesBlock, stages: Mapping[str, int], world_size: int
) -> list[dict[str, int]]:
    example = "{" + ", ".join(f'"{branch}": …' for branch in stages) + "}"
    if isinstance(block.replicas, int):
        raise ValueError(
            f"branches.replicas: {block.replicas} for a fork; give each branch its own: {example}"
        )
    if block.replicas != AUTO:
        if set(block.replicas) != set(stages):
            raise ValueError(
                f"branches.replicas: {block.replicas}; give each branch its own: {example}"
            )
        replicas = {branch: block.replicas[branch] for branch in stages}
        _refuse_too_few("fork", stages, world_size)
        need = sum(stages[b] * replicas[b] for b in stages)
        if need != world_size:
            terms = " + ".join(f"{b} {stages[b]}×{replicas[b]}" for b in stages)
            raise ValueError(
                f"stages × replicas ({terms}) fill {need} ranks, but there are {world_size}; start "
                f"{need} ranks or change branches.replicas"
            )
        return [replicas]
    _refuse_too_few("fork", stages, world_size)
    # Of three and more branches only such numbers as divide the batch, for there are many; any,
    # where there is none of these.
    numbers = range(1, world_size + 1)
    even = [n for n in numbers if len(stages) <= 2 or batch_size % n == 0]
    fits = list(_fills(tuple(stages.values()), world_size, even))
    fits = fits or list(islice(_fills(tuple(stages.values()), world_size, numbers), 1))
    if not fits:
        terms = " ".join(f"{branch}={count}" for branch, count in stages.items())
        raise ValueError(
            f"stages {terms} cannot fill {world_size} ranks with whole replicas; use "
            f"{sum(stages.values())} ranks, or fewer stages"
        )
    return [dict(zip(stages, fit)) for fit in fits]


def _fills(
    stages: Sequence[int], world_size: int, numbers: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """Numbers of replicas, each one of `numbers` (ascending), with which so many stages of each
    branch fill the world exactly."""
    first, *others = stages
    if not others:
        replicas, rest = divmod(world_size, first)
        if not rest and replicas in numbers:
            yield (replicas,)
        return
    for replicas in numbers:
        left = world_size - first * replicas
        if left < sum(others):
            return
        yield from ((replicas, *further) for further in _fills(others, left, numbers))


def _refuse_too_few(layout: str, stages: Mapping[str, int], world_size: int) -> None:
    need = sum(stages.values())
    if world_size < need:
        terms = ", ".join(f"{name} {count}" for name, count in stages.items())
        instead = (
            'take "layout": "merged", which runs on one'
            if world_size == 1 and layout != "merged"
            else "take fewer stages"
        )
        raise ValueError(
            f"layout {layout!r} needs a rank for each of its {need} stages ({terms}), but there "
            f"{'is' if world_size == 1 else 'are'} {world_size}; start at least {need} processes "
            f"(deepspeed --num_gpus {need}), or {instead}"
        )


def _ranks(number: int) -> str:
    return f"{number} rank" if number == 1 else f"{number} ranks"


def _deals(
    config: Mapping[str, Any],
    block: BranchesBlock,
    layout: str,
    replicas: Mapping[str, int],
    reasons: list[str],
) -> list[Deal]:
    """The ways to deal the batch to these replicas; why there are none is added to `reasons`."""
    found: list[Deal] = []
    for wish in MICRO_BATCHES:
        try:
            deal = {
                branch: _deal(config, block, branch, own, wish) for branch, own in replicas.items()
            }
            if layout != "fork" and not _alike(deal.values()):
                why = (
                    "a merged stage holds a slice of every branch"
                    if layout == "merged"
                    else "a chain runs all of them in one line"
                )
                raise ValueError(
                    f"branches.micro_batch_size: {json.dumps(block.micro_batch_size)} differs "
                    "between the branches, which only a fork allows; "
                    f'{why}, so write one number, such as "micro_batch_size": {min(d.micro_batch_size for d in deal.values())}'
                )
        except ValueError as error:
            reasons.append(str(error))
            break
        if deal not in found:
            found.append(deal)
    return found


def _deal(
    config: Mapping[str, Any], block: BranchesBlock, branch: str, replicas: int, wish: int
) -> BranchBatch:
    """The batch of one branch; where nothing is said, in the largest number of micro-batches up to
    `wish`."""
    global_batch_size = config["train_batch_size"]
    share, rest = divmod(global_batch_size, replicas)
    if not share:
        raise ValueError(
            f"train_batch_size {global_batch_size} cannot be dealt to {replicas} {branch} replicas: "
            f"each needs a sample; use at least {replicas}"
        )
    size = block.micro_batch_size
    if isinstance(size, dict):
        size = size.get(branch, AUTO)
    if size == AUTO:
        size = config.get("train_micro_batch_size_per_gpu", AUTO)
    if rest and size != AUTO:
        near = global_batch_size - rest
        raise ValueError(
            f"train_batch_size {global_batch_size} cannot be dealt to {replicas} {branch} replicas "
            f"in equal shares, which a given micro_batch_size needs; use {near} or "
            f'{near + replicas}, or "micro_batch_size": "auto"'
        )
    if size == AUTO:
        number = config.get("gradient_accumulation_steps", AUTO)
        if rest:
            number = min(wish if number == AUTO else number, share)
            return BranchBatch(
                replicas, -(-(share + 1) // number), number, num_samples=global_batch_size
            )
        if number == AUTO:
            number = max(n for n in range(1, min(wish, share) + 1) if share % n == 0)
        size, rest = divmod(share, number)
        if rest or size == 0:
            raise ValueError(
                f"gradient_accumulation_steps {number} does not divide the {share} samples of a "
                f"{branch} replica ({global_batch_size} over {replicas}); use a divisor of {share}"
            )
    if share % size:
        raise ValueError(
            f"{branch}: micro_batch_size {size} × num_micro_batches × {replicas} replicas cannot "
            f"give train_batch_size {global_batch_size}: {share} samples per replica are not a "
            f"multiple of {size}; use {_near_divisor(share, size)}"
        )
    return BranchBatch(replicas, size, share // size)


def _keeping(block: BranchesBlock, graph: StageGraph, deal: Deal, costs: CostModel) -> Deal:
    """The deal with the number of micro-batches that keep their activations: as asked for, or,
    where that is "auto", as many as fit."""
    asked = {branch: block.num_kept(branch) for branch in deal}
    fits = most_kept(graph, deal, costs) if AUTO in asked.values() else {}
    found = {}
    for branch, batch in deal.items():
        number, wish = batch.num_micro_batches, asked[branch]
        if isinstance(wish, int):
            kept = min(wish, number)
        elif fits[branch] >= number:
            kept = number
        else:  # in eighths: many graphs then share one order of instructions, which is what a search spends its time on
            kept = fits[branch] - fits[branch] % max(1, number // 8)
        found[branch] = replace(batch, num_kept=kept)
    if block.schedule == AUTO and all(
        batch.num_kept == batch.num_micro_batches for batch in found.values()
    ):
        # everything fits: that is a schedule that keeps all, beside which stands what this one
        # would save
        return deal
    return found


def _near_divisor(share: int, size: int) -> int:
    return min((d for d in range(1, share + 1) if share % d == 0), key=lambda d: (abs(d - size), d))


def _alike(values: Iterable[Any]) -> bool:
    first, *others = values
    return all(value == first for value in others)


def _refuse_kept(block: BranchesBlock, layout: str, branches: Iterable[str]) -> str | None:
    """Why this layout cannot keep the activations that `kept_micro_batches` names, if it cannot."""
    if layout == "fork" or _alike(map(block.num_kept, branches)):
        return None
    return f"branches.kept_micro_batches: {block.kept_micro_batches} differs between the branches, which only a fork allows; give one number"


def _of_compiling(block: BranchesBlock, costs: CostModel) -> str:
    """A line for the branches whose layers are compiled where that is faster."""
    said = []
    for branch in (b for b in costs.layers if block.compiling(b) == AUTO):
        share = costs.compiled_share.get(branch)
        found = "not measured" if share is None else f"{share:.2f} of the time of its layers"
        said.append(f"{branch} {found}: {'on' if compiles(AUTO, share) else 'off'}")
    return f"torch.compile: {', '.join(said)}" if said else ""


def _refuse_schedule(schedule: str, deal: Deal) -> str | None:
    """Why this deal cannot run under the schedule, if it cannot."""
    if not SCHEDULES[schedule].loss_per_micro_batch:
        return None
    uneven = [branch for branch, own in deal.items() if not own.is_even]
    if uneven:
        own = deal[uneven[0]]
        return (
            f'branches.schedule: "{schedule}" compares the samples of one micro-batch, so all are '
            f"equally large, but train_batch_size {own.global_batch_size} is no multiple of "
            f"{own.replicas} {uneven[0]} replicas; use {own.global_batch_size // own.replicas * own.replicas or own.replicas}, "
            f"or {' or '.join(exact_schedules())}"
        )
    if _alike(deal.values()):
        return None
    deals = ", ".join(
        f"{b} {d.micro_batch_size} × {d.num_micro_batches} × {d.replicas}" for b, d in deal.items()
    )
    return (
        f'branches.schedule: "{schedule}" compares the samples of one micro-batch, so all branches need the same micro-batches, '
        f"but micro × num × replicas are {deals}; give equal replicas and micro_batch_size, or use "
        f"{' or '.join(exact_schedules())}"
    )


# -- when nothing fits


def _nothing_fits(
    config: Mapping[str, Any],
    block: BranchesBlock,
    world_size: int,
    costs: CostModel,
    graph: StageGraph,
    batches: Deal,
    schedule: str,
) -> str:
    """By how much the smallest candidate does not fit, and what would."""
    smallest = Candidate(graph, batches, schedule, simulate(graph, batches, schedule, costs))
    limit = room_bytes(graph, costs)
    memory_bytes = costs.machine.memory_bytes
    taken = f", {(memory_bytes - limit) / GIB:.1f} GiB of it NCCL's" if limit < memory_bytes else ""
    stage = max(smallest.simulation.stages, key=lambda s: s.peak_bytes)
    text = (
        f"nothing fits {world_size} ranks of {memory_bytes / GIB:.1f} GiB "
        f"({costs.machine.name}{taken}): what "
        f"needs least, {smallest.describe()}, needs {stage.peak_bytes / GIB:.1f} GiB in "
        f"{stage.name}, {(stage.peak_bytes - limit) / GIB:.1f} GiB too much "
        f"({stage.state_bytes / GIB:.1f} GiB of it weights, gradients and optimizer state, "
        f"{stage.activation_bytes / GIB:.1f} GiB activations)"
    )
    if not SCHEDULES[schedule].loss_per_micro_batch:
        schedule = recomputing_schedules()[0]
    free = replace(block, schedule=schedule, kept_micro_batches=None, micro_batch_size=AUTO)
    checkpointed = replace(costs, checkpoint_interval=1)
    remedies = [
        (f'"schedule": "{schedule}" and "micro_batch_size": "auto"', free, world_size, costs),
        (
            'these and "pipeline": {"activation_checkpoint_interval": 1}',
            free,
            world_size,
            checkpointed,
        ),
    ]
    remedies += [
        (
            f"{n * world_size} ranks with {schedule}, small micro-batches and activation "
            "checkpoints",
            free,
            n * world_size,
            checkpointed,
        )
        for n in (2, 4, 8, 16)
    ]
    for words, changed, ranks, model in remedies:
        peak = _least_peak(config, changed, ranks, model)
        if peak <= limit:
            return f"{text}. This would fit: {words} ({peak / GIB:.1f} GiB)"
    return f"{text}. No number of ranks up to {16 * world_size} would fit: use smaller towers, or ranks with more memory"


def _least_peak(
    config: Mapping[str, Any], block: BranchesBlock, world_size: int, costs: CostModel
) -> float:
    """The bytes of the fullest rank in the smallest candidate, found among the smallest
    micro-batches of each graph."""
    graph_of, peaks = _graphs_of(block, costs), [inf]
    num_layers = {branch: len(layers) for branch, layers in costs.layers.items()}
    with suppress(ValueError):  # this block does not go with that many ranks
        splits = _splits(config, block, world_size, num_layers)
        for split in _worth_timing(splits, world_size, costs):
            deal, schedule = split.ways[-1]
            peaks.append(bounds(graph_of(split), deal, schedule, costs)[1])
    return min(peaks)


def _describe(graph: StageGraph, batches: Mapping[str, BranchBatch], schedule: str) -> str:
    """Such as `fork: image 0 ×6 | text 0 ×2, replay, micro-batches image 32×5, text 480×1` (samples
    × number of them)."""
    deals = {b: describe_batch(d) for b, d in batches.items()}
    return f"{graph.describe()}, {describe_schedule(schedule, batches)}, micro-batches {_by_branch(deals)}"


def describe_batch(batch: BranchBatch) -> str:
    """`32×5`, or `≤33×5` where micro-batches are not equally large."""
    return f"{'' if batch.is_even else '≤'}{batch.micro_batch_size}×{batch.num_micro_batches}"


def describe_schedule(schedule: str, batches: Mapping[str, BranchBatch]) -> str:
    """Such as `replay keeping image 3, text 2`: of how many micro-batches the activations stay."""
    kept = {b: d.num_kept for b, d in batches.items()}
    return f"{schedule} keeping {_by_branch(kept)}" if any(kept.values()) else schedule


def _by_branch(values: Mapping[str, Any]) -> str:
    """One value where the branches agree, else each with its name."""
    return (
        str(next(iter(values.values())))
        if _alike(values.values())
        else ", ".join(f"{b} {value}" for b, value in values.items())
    )


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.3g} ms"
