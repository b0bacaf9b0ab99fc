"""The ways to run that a `branches` block allows on so many ranks: layout, stages, replicas,
micro-batches, schedule. Plain Python, without costs.

What does not go together is refused with a ValueError. Where something is "auto" and another choice
goes, the refusal is only noted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, product
from typing import Any, NoReturn

from engine.batch import BranchBatch
from engine.config.implied import zero_stage
from engine.config.reading import AUTO, BranchesBlock
from engine.schedule import SCHEDULES, exact_schedules
from engine.topology import LAYOUTS

# per line, where "auto" chooses: deeper lines idle more than they save
MAX_STAGES = 16
# the same for three branches or more, of which all combinations would be too many
FEW_STAGES = (1, 2, 3, 4, 6, 8, 12, 16)
# per replica, where "auto" chooses: as near below as the batch allows
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
# why a merged layout has one number for all branches
ONE_LINE = "a merged stage holds a slice of every branch"
# said where what is given fits other numbers of ranks only
ANY = 'with layout, stages and replicas "auto" any number fits'

Deal = dict[str, BranchBatch]
Numbers = dict[str, int]  # by branch; of a merged line's stages {"merged": n}


@dataclass(frozen=True)
class Split:
    """Who runs what, before layers are cut into stages: stages by name, replicas by branch, and the
    (deal, schedule) that go with them."""

    layout: str
    stages: Numbers
    replicas: Numbers
    ways: tuple[tuple[Deal, str], ...]


@contextmanager
def _noted(reasons: list[str]) -> Iterator[None]:
    """A refusal in here ends this block alone, and is added to `reasons`."""
    try:
        yield
    except ValueError as error:
        reasons.append(str(error))


@dataclass(frozen=True)
class Ways:
    """What `block` and the batch of `config` allow on `world_size` ranks for towers of
    `num_layers`, by branch."""

    config: Mapping[str, Any]
    block: BranchesBlock
    world_size: int
    num_layers: Mapping[str, int]

    def splits(self) -> Iterator[Split]:
        """All of them. Raises ValueError, with the first reason, when there is none."""
        found, reasons = False, []
        for layout in self._layouts():
            of_ranks: list[str] = []
            of_batch: list[str] = []
            with _noted(of_ranks):
                if self.block.layout != AUTO:
                    self._check_kept(layout)
                for stages in self._stages(layout):
                    with _noted(of_ranks):
                        for replicas in self._replicas(layout, stages):
                            if ways := tuple(self._ways(layout, replicas, of_batch)):
                                found = True
                                yield Split(layout, stages, replicas, ways)
            reasons += of_batch or of_ranks
        if not found:
            nothing = f"nothing runs on {_ranks(self.world_size)} with branches {self.block}"
            raise ValueError(next(iter(reasons), nothing))

    def _layouts(self) -> Sequence[str]:
        if self.block.layout != AUTO:
            layouts = [self.block.layout]
        else:
            layouts = ["merged"] if self.world_size == 1 else list(LAYOUTS)
        if self.block.moves_work and "merged" in layouts:
            layouts.remove("merged")
            if not layouts:
                raise ValueError(
                    'branches.balance: "feed" moves work between branches on different ranks, and '
                    'there is one; use "deal" or more ranks'
                )
        return layouts

    # -- stages

    def _stages(self, layout: str) -> Iterator[Numbers]:
        if self.block.stages != AUTO:
            yield self._given_stages(layout)
            return
        # ZeRO-2 and ZeRO-3 take whole branches only
        most = 1 if zero_stage(self.config) > 1 else min(self.world_size, MAX_STAGES)
        if layout == "merged":
            numbers = range(1, min(most, *self.num_layers.values()) + 1)
            yield from ({"merged": number} for number in numbers)
            return
        tried: Sequence[int] = range(1, most + 1) if len(self.num_layers) <= 2 else FEW_STAGES
        fits = ([n for n in tried if n <= min(most, layers)] for layers in self.num_layers.values())
        for counts in product(*fits):
            if sum(counts) <= max(self.world_size, len(self.num_layers)):
                yield dict(zip(self.num_layers, counts))

    def _given_stages(self, layout: str) -> Numbers:
        """`branches.stages` as written, by name: of each branch, or {"merged": n}. One number is
        that of every name."""
        given, names = self.block.stages, tuple(self.num_layers)
        if layout == "merged":
            names = ("merged",)
        stages = dict.fromkeys(names, given) if isinstance(given, int) else given
        if set(stages) != set(names):
            self._refuse_names(layout, names)
        for name, count in stages.items():
            for branch in self.num_layers if name == "merged" else (name,):
                if count > (layers := self.num_layers[branch]):
                    raise ValueError(
                        f"branches.stages: {count} {name} stages, but the {branch} tower has "
                        f"{layers} layers and every stage needs one; use at most {layers}"
                    )
        return {name: stages[name] for name in names}

    def _refuse_names(self, layout: str, names: Sequence[str]) -> NoReturn:
        given = self.block.stages
        text = f"branches.stages: {json.dumps(given)} does not fit layout {layout!r}"
        if layout != "merged":
            example = json.dumps({name: 2 if name == names[0] else 1 for name in names})
            raise ValueError(
                f'{text}; write for example "stages": {example}, or one number, which every branch '
                "gets"
            )
        most = max(given.values(), default=1)
        fits = next(n for n in range(most, 0, -1) if self.world_size % n == 0)
        only = ", the only one for one rank" if self.block.layout == AUTO else ""
        raise ValueError(
            f"{text}{only if self.world_size == 1 else ''}: {ONE_LINE}, so write "
            f'"stages": {{"merged": {fits}}} (or "stages": {fits})'
        )

    # -- replicas

    def _replicas(self, layout: str, stages: Numbers) -> Iterable[Numbers]:
        """The numbers of replicas with which these stages fill the world; there is at least
        one."""
        asked, line = self.block.replicas, sum(stages.values())
        if layout == "fork":
            return self._fork_replicas(stages)
        if isinstance(asked, dict):
            raise ValueError(
                f"branches.replicas: {json.dumps(asked)} does not fit layout {layout!r}: "
                f"{ONE_LINE}, so write one number, "
                f'such as "replicas": {max(1, self.world_size // line)}'
            )
        self._refuse_too_few(layout, stages)
        replicas = self.world_size // line if asked == AUTO else asked
        if replicas * line != self.world_size:
            also = "" if asked == AUTO else f" and {asked} replicas"
            raise ValueError(
                f"{layout} of {line} stages{also} does not fill {_ranks(self.world_size)}; use "
                f"{_ranks(replicas * line)} or change branches.stages ({ANY})"
            )
        return [dict.fromkeys(self.num_layers, replicas)]

    def _fork_replicas(self, stages: Numbers) -> Iterable[Numbers]:
        asked = self.block.replicas
        if asked != AUTO and (isinstance(asked, int) or set(asked) != set(stages)):
            example = "{" + ", ".join(f'"{branch}": …' for branch in stages) + "}"
            raise ValueError(
                f"branches.replicas: {asked} for a fork; give each branch its own: {example}"
            )
        self._refuse_too_few("fork", stages)
        if asked != AUTO:
            need = sum(stages[b] * asked[b] for b in stages)
            if need != self.world_size:
                terms = " + ".join(f"{b} {stages[b]}×{asked[b]}" for b in stages)
                raise ValueError(
                    f"stages × replicas ({terms}) fill {need} ranks, but there are "
                    f"{self.world_size}; start {need} ranks or change branches.replicas ({ANY})"
                )
            return [{branch: asked[branch] for branch in stages}]
        # Of three and more branches only such numbers as divide the batch, for there are many; any,
        # where there is none of these.
        numbers, counts = range(1, self.world_size + 1), tuple(stages.values())
        divides = [n for n in numbers if self.config["train_batch_size"] % n == 0]
        fits = list(_fills(counts, self.world_size, numbers if len(stages) <= 2 else divides))
        fits = fits or list(islice(_fills(counts, self.world_size, numbers), 1))
        if not fits:
            terms = " ".join(f"{branch}={count}" for branch, count in stages.items())
            raise ValueError(
                f"stages {terms} cannot fill {self.world_size} ranks with whole replicas; use "
                f"{sum(counts)} ranks, or fewer stages"
            )
        return [dict(zip(stages, fit)) for fit in fits]

    def _refuse_too_few(self, layout: str, stages: Numbers) -> None:
        need, there = sum(stages.values()), self.world_size
        if there >= need:
            return
        terms = ", ".join(f"{name} {count}" for name, count in stages.items())
        instead = "take fewer stages"
        if layout != "merged" and (there == 1 or there < len(stages)):  # each has one at least
            instead = 'take "layout": "merged", which runs on any number'
        raise ValueError(
            f"layout {layout!r} needs a rank for each of its {need} stages ({terms}), but there "
            f"{'is' if there == 1 else 'are'} {there}; start at least {need} processes "
            f"(deepspeed --num_gpus {need}), or {instead}"
        )

    # -- the batch and the schedule

    def _ways(
        self, layout: str, replicas: Numbers, reasons: list[str]
    ) -> Iterator[tuple[Deal, str]]:
        """The deals to these replicas, with the schedules under which each runs."""
        schedules = [self.block.schedule]
        if self.block.schedule == AUTO:
            schedules = [name for name in exact_schedules() if SCHEDULES[name].chosen_by_auto]
        with _noted(reasons):
            for deal in self._deals(layout, replicas):
                for schedule in schedules:
                    with _noted(reasons):
                        self._check_schedule(schedule, layout, deal)
                        yield deal, schedule

    def _deals(self, layout: str, replicas: Numbers) -> Iterator[Deal]:
        found: list[Deal] = []
        for wish in MICRO_BATCHES:
            deal = {branch: self._batch(branch, own, wish) for branch, own in replicas.items()}
            if layout != "fork" and not _alike(deal.values()):
                smallest = min(batch.micro_batch_size for batch in deal.values())
                raise ValueError(
                    f"branches.micro_batch_size: {json.dumps(self.block.micro_batch_size)} differs "
                    f"between the branches, which only a fork allows; {ONE_LINE}, so write "
                    f'one number, such as "micro_batch_size": {smallest}'
                )
            if deal not in found:
                found.append(deal)
                yield deal

    def _batch(self, branch: str, replicas: int, wish: int) -> BranchBatch:
        """That of one branch; where nothing is said, in the largest number of micro-batches up to
        `wish`."""
        batch_size = self.config["train_batch_size"]
        share, rest = divmod(batch_size, replicas)
        dealt = f"train_batch_size {batch_size} cannot be dealt to {replicas} {branch} replicas"
        if not share:
            raise ValueError(f"{dealt}: each needs a sample; use at least {replicas}")
        size: Any = self._micro_batch_size(branch)
        number: Any = AUTO
        if size == AUTO:
            number = self.config.get("gradient_accumulation_steps", AUTO)
        elif rest:
            raise ValueError(
                f"{dealt} in equal shares, which a given micro_batch_size needs; use "
                f'{batch_size - rest} or {batch_size - rest + replicas}, or "micro_batch_size": '
                '"auto"'
            )
        if rest:
            number = min(wish if number == AUTO else number, share)
            return BranchBatch(replicas, -(-(share + 1) // number), number, num_samples=batch_size)
        if size == AUTO:
            if number == AUTO:
                number = max(n for n in range(1, min(wish, share) + 1) if share % n == 0)
            if share % number:
                raise ValueError(
                    f"gradient_accumulation_steps {number} does not divide the {share} samples of "
                    f"a {branch} replica ({batch_size} over {replicas}); use a divisor of {share}"
                )
            size = share // number
        if share % size:
            divisors = (d for d in range(1, share + 1) if share % d == 0)
            raise ValueError(
                f"{branch}: micro_batch_size {size} × num_micro_batches × {replicas} replicas "
                f"cannot give train_batch_size {batch_size}: {share} samples per replica are not a "
                f"multiple of {size}; use {min(divisors, key=lambda d: (abs(d - size), d))}"
            )
        return BranchBatch(replicas, size, share // size)

    def _micro_batch_size(self, branch: str) -> Any:
        size = self.block.micro_batch_size
        if isinstance(size, dict):
            size = size.get(branch, AUTO)
        return self.config.get("train_micro_batch_size_per_gpu", AUTO) if size == AUTO else size

    def _check_kept(self, layout: str) -> None:
        if layout != "fork" and not _alike(map(self.block.num_kept, self.num_layers)):
            raise ValueError(
                f"branches.kept_micro_batches: {self.block.kept_micro_batches} differs between the "
                "branches, which only a fork allows; give one number"
            )

    def _check_schedule(self, schedule: str, layout: str, deal: Deal) -> None:
        own = SCHEDULES[schedule]
        if own.recomputes:
            self._check_kept(layout)
        if not own.loss_per_micro_batch:
            return
        compares = (
            f'branches.schedule: "{schedule}" compares the samples of one micro-batch, so all'
        )
        instead = " or ".join(exact_schedules())
        for branch, batch in deal.items():
            if not batch.is_even:
                size, replicas = batch.global_batch_size, batch.replicas
                raise ValueError(
                    f"{compares} are equally large, but train_batch_size {size} is no multiple of "
                    f"{replicas} {branch} replicas; use "
                    f"{size // replicas * replicas or replicas}, or {instead}"
                )
        if not _alike(deal.values()):
            deals = ", ".join(
                f"{b} {d.micro_batch_size} × {d.num_micro_batches} × {d.replicas}"
                for b, d in deal.items()
            )
            raise ValueError(
                f"{compares} branches need the same micro-batches, but micro × num × replicas are "
                f"{deals}; give equal replicas and micro_batch_size, or use {instead}"
            )


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


def _alike(values: Iterable[Any]) -> bool:
    first, *others = values
    return all(value == first for value in others)


def _ranks(number: int) -> str:
    return f"{number} rank" if number == 1 else f"{number} ranks"
