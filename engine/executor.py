"""The engine of a rank: a DeepSpeed `PipelineEngine` that trains one stage of a stage graph.

DeepSpeed keeps what it is good at (ZeRO-1, averaging over replicas, mixed precision, optimizer,
learning-rate schedule). Its linear chain of stages is replaced: instructions run in
`engine/stage_runner.py`, and one loss goes over the whole global batch (`engine/loss/`). The
contract of every scale is written where it is applied.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn

from engine.communication import Communicator
from engine.evaluation import Measure, PairTotals, compare_held_out
from engine.json_messages import to_first_rank
from engine.loss.matching import Scoring
from engine.loss.tail_loss import TailLoss
from engine.meter import StepMeter
from engine.module import StageModule, layer_seed
from engine.objective import Objective
from engine.optimizer.averaging import AverageBlock, WeightAverage
from engine.optimizer.classes import make_schedule
from engine.optimizer.clipping import GroupedClipping
from engine.optimizer.clipping_rules import ClippingRule
from engine.optimizer.gradient_averages import GradientAverages
from engine.optimizer.parameter_groups import GroupSchedule, OptimizerGroups, Setting
from engine.optimizer.scalars import LearnedScalars
from engine.optimizer.standing_still import StandingStill
from engine.planning.batch import BranchBatch
from engine.planning.costs import averages_early
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
from engine.stage_runner import FromBytes, Roots, StageRunner
from engine.step_metrics import StepMetrics
from engine.topology import StageGraph
from engine.trace import Span

# DeepSpeed's: of the engine, whose micro-steps stay 0 under a pipeline, and of its dynamic loss
# scale
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
OF_PAIRS = -1  # in the place of a layer, where negatives are drawn
_LOSS_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


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


class ForkEngine(PipelineEngine):
    """Trains one stage of a stage graph. `train_batch` runs one global batch, `evaluate` a held-out
    set."""

    _ready = False

    def __init__(
        self,
        module: StageModule,
        comm: Communicator,
        *,
        batches: Mapping[str, BranchBatch],
        config: dict[str, Any],
        schedule: str,
        clipping: Mapping[str, ClippingRule],
        optimizer_groups: OptimizerGroups,
        average: AverageBlock | None,
        embed_dim: int,
        setup: RankSetup,
        equal_shares: bool = True,
        source_starts: Sequence[int] | None = None,
        from_bytes: Mapping[str, FromBytes] | None = None,
    ):
        grid = module.mpu()
        self.optimizer_groups = optimizer_groups
        first = {name: scalar.detach().clone() for name, scalar in module.scalars.items()}
        with contextlib.redirect_stdout(io.StringIO()):
            super().__init__(
                args=None,
                model=module,
                model_parameters=[_optimizer_group(*group) for group in module.parameter_groups],
                mpu=grid,
                config=config,
                config_class=DeepSpeedConfig(config, grid),
            )
        self.comm, self.stage = comm, comm.stage
        self.tail_loss = TailLoss(comm, embed_dim, equal_shares, source_starts)
        self.batches, self.schedule_type = dict(batches), SCHEDULES[schedule]
        self.clipping = GroupedClipping(module.canonical_parameters, clipping, comm, self.optimizer)
        self.basic_optimizer.register_step_pre_hook(lambda *_: self.clipping.clip())
        self.learned_scalars = LearnedScalars(module.scalars, first, self.clipping, comm)
        self.standing_still = StandingStill(
            self.clipping,
            self.basic_optimizer,
            [setting for setting, _ in module.parameter_groups],
            comm.objective.names if comm.objective.may_lack_rows else (),
        )
        stepped = [p for group in self.basic_optimizer.param_groups for p in group["params"]]
        self.average = WeightAverage(stepped, average) if average else None
        # else DeepSpeed averages behind the last backward
        early = self.stage.replicas > 1 and averages_early(config)
        self._gradient_averages = self._make_gradient_averages() if early else None
        self.meter = StepMeter(
            comm,
            module,
            self.tail_loss,
            self.clipping,
            self.optimizer,
            optimizer_groups,
            base_lr=(self.optimizer_params() or {}).get("lr"),
        )
        self._setup = setup
        self._activity = (BUILDING, 0)  # and the step
        self._num_steps_done = 0  # by this process
        self.recorder = comm.recorder
        # by instruction, over all steps so far
        self.instruction_seconds: dict[str, float] = defaultdict(float)
        dtype = self.get_data_types()[0]
        self.runner = StageRunner(module, comm, self, dtype, from_bytes or {})
        self._ready = True

    def _make_gradient_averages(self) -> GradientAverages:
        """Those of this stage, in what holds its sums over the micro-batches."""
        if isinstance(self.optimizer, BF16_Optimizer):
            sums = {
                id(parameter): gradient
                for group, gradients in zip(
                    self.optimizer.bf16_groups, self.optimizer.fp32_groups_gradients
                )
                for parameter, gradient in zip(group, gradients)
            }

            def gradient_of(parameter: nn.Parameter) -> Tensor:
                return sums[id(parameter)]
        else:

            def gradient_of(parameter: nn.Parameter) -> Tensor:
                if parameter.grad is None:  # no micro-batch has reached it
                    parameter.grad = torch.zeros_like(parameter)
                return parameter.grad

        fusion = self.module.fusion
        return GradientAverages(
            [*self._trainable, *self.module.placeholders],
            [*self.module.placeholders, *(fusion.parameters() if fusion else ())],
            gradient_of,
            self.comm.start_sum_over_replicas,
            self.stage.replicas,
        )

    # -- what the base class asks

    def is_first_stage(self) -> bool:
        """Does input enter here? During construction always yes: there is no linear chain to warm
        up."""
        return not self._ready or bool(self.stage.loads)

    def is_last_stage(self) -> bool:
        return not self._ready or self.stage.is_tail

    def _configure_lr_scheduler(self) -> None:
        """DeepSpeed's schedule, scaled by group (`engine/optimizer/parameter_groups.py`)."""
        settings = [setting for setting, _ in self.module.parameter_groups]
        warmups = [rule.warmup_steps for rule in self.optimizer_groups.rules.values()]
        make = functools.partial(
            make_schedule, self.basic_optimizer, self.scheduler_name(), self.scheduler_params()
        )
        self.lr_scheduler = GroupSchedule(self.basic_optimizer, make, settings, warmups)

    def _backward_prologue_per_tensor(self, grad: Tensor) -> Tensor:
        # the base class divides by the number of micro-batches; our loss is already the mean over
        # the batch
        return grad

    def _reduce_non_expert_gradients(
        self, grads: Sequence[Tensor], elements_per_buffer: int
    ) -> None:
        """Average gradients over the replicas. One has its averages already, and the base class
        would copy all of them twice."""
        if self.stage.replicas > 1:
            super()._reduce_non_expert_gradients(grads, elements_per_buffer)

    @property
    def instructions_done(self) -> int:
        """Of training and evaluation: while it grows, this rank is not stuck."""
        return self.runner.instructions_done

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
        self.tail_loss.start_step(
            spec.rows_per_sample,
            spec.num_rows,
            spec.loss_weights,
            shares=spec.shares,
            num_made=spec.num_made,
        )
        self.module.exact_scalars = self.learned_scalars.values()
        lr = dict(self.lr_scheduler.rates)
        self.standing_still.start_step(self.tail_loss.sums.learning)
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
            skipped_steps=self.skipped_steps,
            num_steps=self.global_steps,
            lr=lr,
            loss_scale=self._loss_scale(),
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

    def _take_model_step(self, lr_kwargs: Mapping[str, Any] | None) -> None:
        """The optimizer's step, or none where a gradient of any rank is not finite.

        DeepSpeed's own optimizers check for themselves (`engine/optimizer/bad_steps.py`); fp32
        without ZeRO has none of them. There the step is skipped here, as they do it: counted,
        gradients dropped, and no step of the learning-rate schedule.
        """
        if self.clipping.partitioned or self.clipping.finite_everywhere():
            super()._take_model_step(lr_kwargs)
            return
        self.zero_grad()
        self._step_applied = False
        self.skipped_steps += 1
        self.global_steps += 1
        self.global_samples += self.train_batch_size()

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
            if self.clipping.partitioned:
                # DeepSpeed: from each rank's slice to all weights of the stage
                self.optimizer.update_lp_params()

    @contextlib.contextmanager
    def memory_explained(self, activity: str) -> Iterator[None]:
        """An allocation that fails in here is an OutOfMemory that says where, and what to change
        (`engine/processes/out_of_memory.py`)."""
        self._activity, self.runner.running = (activity, self.global_steps + 1), None

        def words(error: Exception) -> str:
            rank = self.graph.describe_rank(self.comm.rank)
            return message(rank, self._setup, self.work(), error)

        with explained(self.device, words, self._num_steps_done):
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
    def _trainable(self) -> list[nn.Parameter]:
        return [p for p in self.module.canonical_parameters.values() if p.requires_grad]

    @property
    def _branch(self) -> str:
        return next(iter(self.stage.layers))

    # -- state

    def progress(self) -> dict[str, Any]:
        """What a run needs to go on besides tensors, small, as JSON: a rank tells what is equal on
        all, and of its own."""
        scaler = getattr(self.optimizer, "loss_scaler", None)
        return {
            "counters": {name: getattr(self, name) for name in _COUNTERS},
            "bad_steps_in_a_row": self.meter.bad_steps_in_a_row,
            "clipping": self.clipping.state_dict(),
            "num_averaged": self.average.num_updates if self.average else 0,
            "lr_scheduler": self.lr_scheduler.state_dict() if self.lr_scheduler is not None else {},
            "loss_scaler": {name: getattr(scaler, name) for name in _LOSS_SCALER}
            if getattr(scaler, "dynamic", False)
            else {},
        }

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        """Go on from what `progress` holds, of all ranks put together. A loss scale that only one
        of the two precisions has is left as it is."""
        for name in _COUNTERS:
            setattr(self, name, progress["counters"][name])
        self.meter.begin(self.global_steps, progress["bad_steps_in_a_row"])
        self.clipping.load_state_dict(progress["clipping"])
        if self.average:
            self.average.num_updates = progress["num_averaged"]
        if self.lr_scheduler is not None and progress["lr_scheduler"]:
            self.lr_scheduler.load_state_dict(progress["lr_scheduler"])
        if progress["loss_scaler"] and getattr(
            getattr(self.optimizer, "loss_scaler", None), "dynamic", False
        ):
            for name in _LOSS_SCALER:
                setattr(self.optimizer.loss_scaler, name, progress["loss_scaler"][name])

    # -- what the runner of the stage asks for

    def forward_layers(self, inputs: dict[str, Tensor], **part: int) -> dict[str, Tensor]:
        return super(PipelineEngine, self).forward(inputs, **part)

    def inject(self, roots: Roots, last: bool = False) -> None:
        """The way the base class runs its own backward (BF16: fp32 accumulation)."""
        averages = self._gradient_averages if last else None
        in_bf16 = isinstance(self.optimizer, BF16_Optimizer)
        if in_bf16:
            self.optimizer.clear_lp_grads()
        with averages.last_backward() if averages else contextlib.nullcontext():
            with self._own_backward():
                starts: list[Any] = [root for root, _ in roots]
                torch.autograd.backward(starts, [gradient for _, gradient in roots])
            if in_bf16 and not self.optimizer.immediate_grad_update:
                self.optimizer.update_hp_grads(clear_lp_grads=False)

    @contextlib.contextmanager
    def _own_backward(self) -> Iterator[None]:
        """The base class refuses any backward but its own: in here, this is its own."""
        self._running_engine_backward = True
        try:
            yield
        finally:
            self._running_engine_backward = False

    def loss_gradients(
        self, outputs: Sequence[Mapping[str, Tensor]], buffer_id: int | None, num_losses: int
    ) -> list[dict[str, Tensor]]:
        batch = self.batches[self._branch]
        return self.tail_loss.gradients(
            outputs,
            batch.global_batch_size // num_losses,
            batch=buffer_id,
            weight=1.0 / num_losses,
            loss_scale=self._loss_scale(),
            scoring=Scoring(
                self.module.fusion,
                batch.micro_batch_size,
                layer_seed(self.module.base_seed, self.global_steps, buffer_id or 0, OF_PAIRS),
                self.inject,
            ),
        )

    def reduce_gradients(self) -> None:
        if self.module.placeholders:  # a gradient of zero, the way all others come
            held = torch.cat(list(self.module.placeholders))
            self.inject([(held, torch.zeros_like(held))])
        if self._gradient_averages:
            self._gradient_averages.finish()
        else:
            self._exec_reduce_grads()

    def step_optimizer(self) -> None:
        self._exec_optimizer_step()

    def _loss_scale(self) -> float:
        return (
            float(self.optimizer.loss_scale)
            if self.fp16_enabled() and hasattr(self.optimizer, "loss_scale")
            else 1.0
        )

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
        self.runner.run(ForwardOnly(self.stage, num_micro_batches), data_iter, self.global_steps)
        own = {}
        if self.stage.is_tail:
            outputs = self.runner.outputs
            own = self.tail_loss.own_rows([outputs[m] for m in sorted(outputs)])
        totals = compare_held_out(self.comm, own, num_samples, self.tail_loss.embed_dim, measure)
        self.runner.reset()
        return totals

    def gather_trace(self) -> list[tuple[str, list[Span]]] | None:
        """On rank 0: (who, spans of the last step) of every rank. All ranks call it together."""
        spans = [(s.name, s.micro_batch, s.start_s, s.end_s) for s in self.recorder.spans]
        told = to_first_rank([self.graph.describe_rank(self.comm.rank), spans])
        return told and [(who, [Span(*span) for span in spans]) for who, spans in told]


def _optimizer_group(setting: Setting, parameters: Sequence[nn.Parameter]) -> dict[str, Any]:
    """A parameter group as optimizers take it."""
    decay = {} if setting.weight_decay is None else {"weight_decay": setting.weight_decay}
    return {"params": list(parameters), **decay}
