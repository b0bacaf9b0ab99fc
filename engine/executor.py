"""The engine of a rank, which trains one stage of a stage graph.

What DeepSpeed is good at (ZeRO, averaging over replicas, mixed precision, optimizer, learning-rate
schedule) is its backend (`engine/backend/`). Its linear chain of stages is replaced: instructions
run in `engine/stage_runner.py`, and one loss goes over the whole global batch (`engine/loss/`).
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.backend.protocol import Backend, stepped_tensors
from engine.batch import BranchBatch
from engine.communication import Communicator
from engine.evaluation import Measure, PairTotals, compare_held_out
from engine.json_messages import to_first_rank
from engine.loss.last_stage import LastStageLoss
from engine.loss.matching import Scoring
from engine.meter import StepMeter
from engine.module import StageModule, layer_seed
from engine.objective import Objective
from engine.optimizer.averaging import AverageBlock, WeightAverage
from engine.optimizer.clipping import GroupedClipping
from engine.optimizer.clipping_rules import ClippingRule
from engine.optimizer.parameter_groups import OptimizerGroups
from engine.optimizer.scalars import LearnedScalars
from engine.optimizer.standing_still import StandingStill
from engine.processes.out_of_memory import (
    AVERAGING,
    BUILDING,
    EVALUATION,
    TRAINING,
    RankSetup,
    Work,
    explained,
    message,
)
from engine.schedule import (
    SCHEDULES,
    ForwardOnly,
    StageSchedule,
    exact_schedules,
)
from engine.stage_runner import FromBytes, StageCalls, StageRunner
from engine.step_metrics import StepMetrics
from engine.topology import StageGraph
from engine.trace import Span

OF_PAIRS = -1  # in the place of a layer, where negatives are drawn


def _explains_memory(activity: str) -> Callable[[Callable], Callable]:
    """Of a method of the engine: see `memory_explained`."""

    def decorate(method: Callable) -> Callable:
        @functools.wraps(method)
        def explaining(self: ForkEngine, *args: Any, **kwargs: Any) -> Any:
            with self.memory_explained(activity):
                return method(self, *args, **kwargs)

        return explaining

    return decorate


@dataclass(frozen=True)
class StepSpec:
    """What the global batch of one step is, where it is not as planned.

    `num_micro_batches`: of each replica of this line; `num_kept`: how many of them keep their
    activations where the schedule recomputes. `rows_per_sample`: how many rows each sample has in a
    branch, the same on all ranks (several texts per image); 1 where nothing is said. `loss_weights`:
    in place of those of the objective, by the names in `Objective.losses`, the same on all ranks.

    Where samples lack the modality of a branch, `num_rows` says how many rows the branch has; no
    row comes for the others, and they are left out of the pairs with that branch. The replicas of a
    stage then hold different numbers of rows, so the engine must have been built without
    `equal_shares`.

    `shares`: how many rows each replica brings, of every name of rows that is made where this
    rank's line ends; `num_made`: how many all of them bring, of each name of rows that are not those
    of samples. All ranks know both beforehand, or none, and then last stages tell each other.
    """

    num_micro_batches: int | None = None
    num_kept: int | None = None
    rows_per_sample: Mapping[str, int] = field(default_factory=dict)
    num_rows: Mapping[str, int] = field(default_factory=dict)
    loss_weights: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, Sequence[int]] = field(default_factory=dict)
    num_made: Mapping[str, int] = field(default_factory=dict)


class ForkEngine:
    """Trains one stage of a stage graph. `train_batch` runs one global batch, `evaluate` a held-out
    set.

    `module` has the stage's layers, `backend` computes with them and steps their parameters, `comm`
    is what ranks say to each other.
    """

    def __init__(
        self,
        module: StageModule,
        comm: Communicator,
        backend: Backend,
        *,
        batches: Mapping[str, BranchBatch],
        schedule: str,
        clipping: Mapping[str, ClippingRule],
        optimizer_groups: OptimizerGroups,
        base_lr: float | None,
        first_scalars: Mapping[str, Tensor],
        average: AverageBlock | None,
        embed_dim: int,
        setup: RankSetup,
        equal_shares: bool = True,
        source_starts: Sequence[int] | None = None,
        from_bytes: Mapping[str, FromBytes] | None = None,
    ):
        """`base_lr`: of the JSON's optimizer; `first_scalars`: as in `LearnedScalars`; others: as
        in `build_engine`."""
        self.module, self.comm, self.backend, self.stage = module, comm, backend, comm.stage
        self.batches, self.schedule_type = dict(batches), SCHEDULES[schedule]
        self.last_stage_loss = LastStageLoss(comm, embed_dim, equal_shares, source_starts)
        self.clipping = GroupedClipping(module.canonical_parameters, clipping, comm, backend)
        backend.optimizer.register_step_pre_hook(lambda *_: self.clipping.clip())
        self.learned_scalars = LearnedScalars(module.scalars, first_scalars, backend, comm)
        self.standing_still = StandingStill(
            self.clipping,
            backend.optimizer,
            [setting for setting, _ in module.parameter_groups],
            comm.objective.names if comm.objective.may_lack_rows else (),
        )
        stepped = list(stepped_tensors(backend.optimizer))
        self.average = WeightAverage(stepped, average) if average else None
        self.meter = StepMeter(
            comm, self.last_stage_loss, self.clipping, backend, optimizer_groups, base_lr
        )
        self._setup = setup
        self._activity = (BUILDING, 0)  # and the step
        self._num_steps_done = 0  # by this process
        self._step_applied = False
        self.recorder = comm.recorder
        # by instruction, over all steps so far
        self.instruction_seconds: dict[str, float] = defaultdict(float)
        calls = StageCalls(self._loss_gradients, self._step_optimizer)
        self.runner = StageRunner(module, comm, backend, calls, from_bytes or {})

    @property
    def instructions_done(self) -> int:
        """Of training and evaluation: while it grows, this rank is not stuck."""
        return self.runner.instructions_done

    @property
    def global_steps(self) -> int:
        """Of the run so far, with those that were skipped."""
        return self.backend.num_steps

    @property
    def graph(self) -> StageGraph:
        return self.comm.graph

    @property
    def objective(self) -> Objective:
        return self.comm.objective

    # -- one step

    @_explains_memory(TRAINING)
    def train_batch(
        self,
        data_iter: Iterator[dict[str, Tensor] | list[dict[str, Tensor]]] | None,
        spec: StepSpec = StepSpec(),
        stop_requested: bool = False,
        counts: Callable[[], Mapping[str, float]] = dict,
    ) -> StepMetrics:
        """One optimizer step over one global batch. Stages that load input take their micro-batches
        from `data_iter`. Where a next stage must know their shapes beforehand, it may yield at first
        a list of these micro-batches on the meta device; else all of them are loaded before the
        first is used, and wait in memory.

        A micro-batch may bring a weight for each of its rows in the loss, int64 [b], whole
        millionths, named after its branch (`text_weight`). All micro-batches of all ranks bring
        them, or none. With c rows per sample, the row at place p of 0..cG−1 (`text_position`)
        belongs to sample p // c and carries its index. Where the schedule has a loss per
        micro-batch, the rows of a micro-batch stand sample by sample.

        `stop_requested` travels with the metrics, so that all ranks learn in the same step that one
        of them was asked to end. So do the numbers that `counts` returns at the end of the step,
        with the same names on all ranks: they are added up. Raises OutOfMemory, with what to
        change, where an allocation fails; ValueError for a `spec` that this run cannot have.
        """
        self._refuse_missing_rows(spec)
        self.module.train()
        self.last_stage_loss.start_step(
            spec.rows_per_sample,
            spec.num_rows,
            spec.loss_weights,
            shares=spec.shares,
            num_made=spec.num_made,
        )
        self.module.exact_scalars = self.learned_scalars.values()
        lr = dict(self.backend.rates)
        self.standing_still.start_step(self.last_stage_loss.sums.learning)
        before = [(buffer, buffer.clone()) for buffer in self.module.changing_buffers()]
        self.recorder.start()
        self.runner.run(self._schedule(spec), data_iter, self.global_steps)
        if self._step_applied:
            # Replicas saw different samples; the mean of their running statistics is that of the
            # whole batch's. After every step, so that what is evaluated and saved does not depend
            # on when it is.
            self.comm.average_over_replicas(self.module.running_statistics())
            if self.average:
                self.average.update(self.standing_still.moved)
        # Buffers of a skipped step, in which the forwards have put what is not finite, and of
        # branches that stand still, whose rows were stand-ins, are as they were.
        still = (self.standing_still.branches or ()) if self._step_applied else None
        unmoved = set(map(id, self.module.changing_buffers(still)))
        for buffer, value in before:
            if id(buffer) in unmoved:
                buffer.copy_(value)
        self.recorder.finish()
        for name, seconds in self.recorder.seconds().items():
            self.instruction_seconds[name] += seconds
        metrics = self.meter.read(
            step_applied=self._step_applied,
            lr=lr,
            data_wait_s=self.runner.data_wait_s,
            stop_requested=stop_requested,
            counts=counts(),
        )
        self._num_steps_done += 1
        return metrics

    def _refuse_missing_rows(self, spec: StepSpec) -> None:
        if spec.num_rows and self.schedule_type.loss_per_micro_batch:
            raise ValueError(
                f'num_rows {dict(spec.num_rows)}: under "{self._setup.plan.schedule}" every '
                "micro-batch is a batch by itself, in which no sample may lack a modality; use "
                f"{' or '.join(exact_schedules())}"
            )

    def _schedule(self, spec: StepSpec) -> StageSchedule:
        planned = self.batches[self._branch]
        number = spec.num_micro_batches or planned.num_micro_batches
        kept = planned.num_kept if spec.num_kept is None else spec.num_kept
        return self.schedule_type(self.stage, number, min(kept, number))

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """In here the weights are their average (the `ema` block); running statistics are the
        run's. All ranks enter and leave together.

        After an error in here they stay the average: to put the weights back takes a collective, in
        which this rank would wait for others that go on, instead of saying what went wrong.
        """
        if self.average is None:
            raise ValueError(
                'the weights are not averaged: add "ema": {"decay": 0.9999, "warmup": true} to "branches"'
            )
        self._exchange_average(self.average)
        yield
        self._exchange_average(self.average)

    def _exchange_average(self, average: WeightAverage) -> None:
        with self.memory_explained(AVERAGING):
            average.exchange()
            self.backend.weights_replaced()

    @contextlib.contextmanager
    def memory_explained(self, activity: str) -> Iterator[None]:
        """An allocation that fails in here is an OutOfMemory that says where, and what to change
        (`engine/processes/out_of_memory.py`)."""
        self._activity, self.runner.running = (activity, self.global_steps + 1), None

        def words(error: Exception) -> str:
            rank = self.graph.describe_rank(self.comm.rank)
            return message(rank, self._setup, self.work(), error)

        with explained(self.comm.device, words, self._num_steps_done):
            yield

    def work(self) -> Work:
        """What this rank is doing, or did last. May be asked for by another thread."""
        (activity, step), running = self._activity, self.runner.running
        if running is None:
            return Work(activity, step=step)
        of, instruction = running
        micro_batch = instruction.kwargs.get("buffer_id")
        return Work(activity, instruction.name, micro_batch, of.micro_batches, step)

    @property
    def _branch(self) -> str:
        return next(iter(self.stage.layers))

    # -- state

    def progress(self) -> dict[str, Any]:
        """What a run needs to go on besides tensors, small, as JSON: a rank tells what is equal on
        all, and of its own."""
        return {
            **self.backend.progress(),
            "bad_steps_in_a_row": self.meter.bad_steps_in_a_row,
            "clipping": self.clipping.state_dict(),
            "num_averaged": self.average.num_updates if self.average else 0,
        }

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        """Go on from what `progress` holds, of all ranks put together."""
        self.backend.load_progress(progress)
        self.meter.begin(progress["bad_steps_in_a_row"])
        self.clipping.load_state_dict(progress["clipping"])
        if self.average:
            self.average.num_updates = progress["num_averaged"]

    # -- what the runner of the stage asks for

    def _loss_gradients(
        self, outputs: Sequence[Mapping[str, Tensor]], buffer_id: int | None, num_losses: int
    ) -> list[dict[str, Tensor]]:
        batch = self.batches[self._branch]
        return self.last_stage_loss.gradients(
            outputs,
            batch.global_batch_size // num_losses,
            batch=buffer_id,
            weight=1.0 / num_losses,
            loss_scale=self.backend.loss_scale,
            scoring=Scoring(
                self.module.fusion,
                batch.micro_batch_size,
                layer_seed(self.module.base_seed, self.global_steps, buffer_id or 0, OF_PAIRS),
                self.backend.backward_alone,
            ),
        )

    def _step_optimizer(self) -> None:
        self._step_applied = self.backend.step(self.clipping.finite_everywhere)

    # -- held-out sets

    @_explains_memory(EVALUATION)
    @torch.inference_mode()
    def evaluate(
        self,
        data_iter: Iterator[dict[str, Tensor]] | None,
        num_micro_batches: int,
        num_samples: int,
        measure: Measure,
    ) -> dict[str, PairTotals]:
        """Run a held-out set of `num_samples` through the stages and measure both directions of
        every two branches, also of those without a loss, on every rank: by the names of
        `Objective.comparisons`.

        `num_micro_batches` is the number on this replica (it may differ between replicas, and be
        0); `measure(sides, branch, mine)` returns a vector that is summed over the ranks: of the
        rows `mine` [b] of one of the two sides, as a loss sees them. Row i of one side belongs to
        row i of the other. Every branch brings a row for every sample; where it is a stand-in, with the index −1 − i, the
        sample is left out of what the branch is compared with. Raises RuntimeError for rows that
        are missing or are of other samples, OutOfMemory where an allocation fails.
        """
        self.module.eval()
        with self.backend.forwards_only(num_micro_batches):
            schedule = ForwardOnly(self.stage, num_micro_batches)
            self.runner.run(schedule, data_iter, self.global_steps)
        own = {}
        if self.stage.is_last:
            outputs = self.runner.outputs
            own = self.last_stage_loss.own_rows([outputs[m] for m in sorted(outputs)])
        totals = compare_held_out(
            self.comm, own, num_samples, self.last_stage_loss.embed_dim, measure
        )
        self.runner.reset()
        return totals

    def gather_trace(self) -> list[tuple[str, list[Span]]] | None:
        """On rank 0: (who, spans of the last step) of every rank. All ranks call it together."""
        spans = [(s.name, s.micro_batch, s.start_s, s.end_s) for s in self.recorder.spans]
        told = to_first_rank([self.graph.describe_rank(self.comm.rank), spans])
        return told and [(who, [Span(*span) for span in spans]) for who, spans in told]
