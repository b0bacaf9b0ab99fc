"""The executor: a DeepSpeed `PipelineEngine` that runs the instruction lists of
`engine/schedule.py` with real tensors.

DeepSpeed keeps what it is good at (ZeRO-1, averaging over replicas, mixed precision, optimizer,
learning-rate schedule); this class replaces the linear chain: named tensors, own buffers per
micro-batch, and one loss for the whole global batch. The contract of every scale is written where
it is applied.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe import schedule as ds_schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from engine.communication import Communicator, Signature, existing, gradients_of, signature_of
from engine.evaluation import Measure, PairTotals, compare_held_out
from engine.json_messages import to_first_rank
from engine.loss.exchange import MAX_WEIGHT
from engine.loss.matching import Scoring
from engine.loss.tail_loss import TailLoss
from engine.meter import StepMeter
from engine.module import Outline, StageModule, layer_seed
from engine.objective import Objective
from engine.optimizer.averaging import AverageBlock, WeightAverage
from engine.optimizer.classes import make_schedule
from engine.optimizer.clipping import GroupedClipping
from engine.optimizer.clipping_rules import ClippingRule
from engine.optimizer.gradient_averages import GradientAverages
from engine.optimizer.parameter_groups import GroupSchedule, OptimizerGroups, Setting
from engine.planning.costs import averages_early
from engine.planning.planner import BranchBatch
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
    ComputeLoss,
    EmbedPass,
    ForwardOnly,
    ReloadMicroBatch,
    ReplayPass,
    StageSchedule,
    exact_schedules,
    receives_to_post,
)
from engine.step_metrics import StepMetrics
from engine.streams import DeviceCopies
from engine.topology import StageGraph
from engine.trace import Span

# DeepSpeed's: of the engine, whose micro-steps stay 0 under a pipeline, and of its dynamic loss
# scale
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
OF_PAIRS = -1  # in the place of a layer, where negatives are drawn
_OF_FUSION = ("_tokens", "_mask")  # how the names end of what the heads make for it
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


FromBytes = Callable[[Tensor, torch.dtype], Tensor]
"""Makes values of a dtype of what was loaded as uint8, on the device where that is; of a tensor on
the meta device an empty one."""


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
        with contextlib.redirect_stdout(io.StringIO()):
            super().__init__(
                args=None,
                model=module,
                model_parameters=[_optimizer_group(*group) for group in module.parameter_groups],
                mpu=grid,
                config=config,
                config_class=DeepSpeedConfig(config, grid),
            )
        self.comm, self.place, self.replica = comm, comm.stage, comm.replica
        self.tail_loss = TailLoss(comm, embed_dim, equal_shares, source_starts)
        self.batches, self.schedule_type = dict(batches), SCHEDULES[schedule]
        self.clipping = GroupedClipping(module.canonical_parameters, clipping, comm, self.optimizer)
        self.basic_optimizer.register_step_pre_hook(lambda *_: self.clipping.clip())
        stepped = [p for group in self.basic_optimizer.param_groups for p in group["params"]]
        self.average = WeightAverage(stepped, average) if average else None
        # else DeepSpeed averages behind the last backward
        early = self.place.replicas > 1 and averages_early(config)
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
        self._setup, self._from_bytes = setup, dict(from_bytes or {})
        self._activity = (BUILDING, 0)  # and the step
        self._running: tuple[StageSchedule, ds_schedule.PipeInstruction] | None = None
        self._num_steps_done = 0  # by this process
        self.instructions_done = (
            0  # of training and evaluation: while it grows, this rank is not stuck
        )
        self.recorder = comm.recorder
        self._copies = DeviceCopies(self.device)
        self._num_micro_batches = batches[self._branch].num_micro_batches  # of the present step
        self.instruction_seconds: dict[str, float] = defaultdict(
            float
        )  # by instruction, over all steps so far
        self._outline = Outline(module.templates, self.get_data_types()[0])
        self._reset_buffers()
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
            self.place.replicas,
        )

    def _reset_buffers(self) -> None:
        """Buffers by micro-batch: named tensors that came in, that go out, and the gradients of
        what went out."""
        self._inputs: dict[int, dict[str, Tensor]] = defaultdict(dict)
        self._kept: dict[int, dict[str, Tensor]] = {}  # in host memory, for a second forward
        self._outputs: dict[int, dict[str, Tensor]] = {}
        self._roots: dict[int, dict[str, GradientEdge]] = {}  # of what was handed on
        self._output_grads: dict[int, dict[str, Tensor]] = {}
        # signatures of the activations along both edges, by micro-batch
        self._received: list[Signature] = []
        self._sent: list[Signature] = []
        self._ahead: deque[dict[str, Tensor]] = deque()  # loaded for their shapes
        self._data_wait_s = 0.0

    # -- what the base class asks

    def is_first_stage(self) -> bool:
        """Does input enter here? During construction always yes: there is no linear chain to warm
        up."""
        return not self._ready or bool(self.place.loads)

    def is_last_stage(self) -> bool:
        return not self._ready or self.place.is_tail

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
        stop_requested: bool = False,
        counts: Callable[[], Mapping[str, float]] = dict,
        num_micro_batches: int | None = None,
        num_kept: int | None = None,
        rows_per_sample: Mapping[str, int] | None = None,
        num_rows: Mapping[str, int] | None = None,
        loss_weights: Mapping[str, float] | None = None,
    ) -> StepMetrics:
        """One optimizer step over one global batch. Stages that load input take their micro-batches
        from `data_iter`. Where a next stage must know their shapes beforehand, it may yield at first
        a list of these micro-batches on the meta device; else all of them are loaded before the
        first is used, and wait in memory.

        A micro-batch may bring a weight for each of its rows in the loss, int64 [b], whole
        millionths, named after its branch (`text_weight`). All micro-batches of all ranks bring
        them, or none. `rows_per_sample` says how many rows each sample has in a branch in this
        batch, the same on all ranks (several texts per image); 1 where nothing is said. The row at
        place p of 0..cG−1 (`text_position`) belongs to sample p // c and carries its index. Where
        the schedule has a loss per micro-batch, the rows of a micro-batch stand sample by sample.

        Where samples lack the modality of a branch, `num_rows` says how many rows the branch has in
        this batch; no row comes for the others, and they are left out of the pairs with that
        branch. The replicas of a stage then hold different numbers of rows, so the engine must have
        been built without `equal_shares`.

        `stop_requested` travels with the metrics, so that all ranks learn in the same step that one
        of them was asked to end. So do the numbers that `counts` returns at the end of the step,
        with the same names on all ranks: they are added up. `num_micro_batches`: of each replica of
        this line in this step, where it is not the number that was planned; `num_kept`: how many of
        them keep their activations where the schedule recomputes, likewise. `loss_weights`: in
        place of those of the objective, by the names in `Objective.losses`, the same on all ranks;
        ValueError for another name. Raises OutOfMemory, with what to change, where an allocation
        fails.
        """
        if num_rows and self.schedule_type.loss_per_micro_batch:
            raise ValueError(
                f'num_rows {dict(num_rows)}: under "{self._setup.plan.schedule}" every micro-batch is a batch by itself, in which no '
                f"sample may lack a modality; use {' or '.join(exact_schedules())}"
            )
        self.module.train()
        self.set_dataiterator(data_iter)
        self._reset_buffers()
        self.tail_loss.start_step(rows_per_sample, num_rows, loss_weights)
        self._num_micro_batches = num_micro_batches or self.batches[self._branch].num_micro_batches
        self._lr = dict(self.lr_scheduler.rates)
        self.clipping.start_step()
        buffers = self.module.changing_buffers()
        before = [buffer.clone() for buffer in buffers]
        self.recorder.start()
        kept = self.batches[self._branch].num_kept if num_kept is None else num_kept
        kept = min(kept, self._num_micro_batches)
        self._exec_schedule(self.schedule_type(self.place, self._num_micro_batches, kept))
        self.comm.drain()
        if self._step_applied:
            # Replicas saw different samples; the mean of their running statistics is that of the
            # whole batch's. After every
            # step, so that what is evaluated and saved does not depend on when it is.
            self.comm.average_over_replicas(self.module.running_statistics())
            if self.average:
                self.average.update()
        else:  # the forwards have put what is not finite into them
            for buffer, value in zip(buffers, before):
                buffer.copy_(value)
        self.recorder.finish()
        for name, seconds in self.recorder.seconds().items():
            self.instruction_seconds[name] += seconds
        metrics = self.meter.read(
            step_applied=self._step_applied,
            skipped_steps=self.skipped_steps,
            num_steps=self.global_steps,
            lr=self._lr,
            loss_scale=self._loss_scale(),
            data_wait_s=self._data_wait_s,
            stop_requested=stop_requested,
            counts=counts(),
        )
        self._num_steps_done += 1
        return metrics

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
        self._activity, self._running = (activity, self.global_steps + 1), None

        def words(error: Exception) -> str:
            rank = self.graph.describe_rank(self.comm.rank)
            return message(rank, self._setup, self.work(), error)

        with explained(self.device, words, self._num_steps_done):
            yield

    def work(self) -> Work:
        """What this rank is doing, or did last. May be asked for by another thread."""
        (activity, step), running = self._activity, self._running
        if running is None:
            return Work(activity, step=step)
        of, instruction = running
        micro_batch = instruction.kwargs.get("buffer_id")
        return Work(activity, instruction.name, micro_batch, of.micro_batches, step)

    def _exec_schedule(self, pipe_schedule: StageSchedule) -> None:
        program = [instruction for instructions in pipe_schedule for instruction in instructions]
        posts = receives_to_post(program)
        backwards = [i for i in program if isinstance(i, ds_schedule.BackwardPass)]
        self._announce(pipe_schedule.micro_batches)
        for instruction, receives in zip(program, posts):
            self._running = pipe_schedule, instruction
            for receive in receives:
                self._post(receive)
            last = bool(backwards) and instruction is backwards[-1] and self._gradient_averages
            with (
                self.recorder.span(instruction.name, instruction.kwargs.get("buffer_id")),
                last.last_backward() if last else contextlib.nullcontext(),
            ):
                self._INSTRUCTION_MAP[type(instruction)](self, **instruction.kwargs)
            self.instructions_done += 1
        self._running = None

    def _announce(self, number: int) -> None:
        """Learn the signatures of all messages of the next `number` micro-batches, and tell the next
        stage what it will get."""
        nothing: list[Signature] = [()] * number
        if self.place.previous is not None:
            self._received = self.comm.announced()
        if self.place.next is not None:
            entering = self._entering(number) if self.place.loads else nothing
            self._sent = [
                self._outline.signature(received + loaded, self.module.training)
                for received, loaded in zip(self._received or nothing, entering, strict=True)
            ]
            self.comm.announce(self._sent)

    def _entering(self, number: int) -> list[Signature]:
        """Of the next `number` micro-batches that are loaded here, as they enter the layers."""
        first = self._load() if number else []
        if isinstance(first, list):
            outlines = first
        else:
            self._ahead.extend([first, *(self._load() for _ in range(number - 1))])
            outlines = list(self._ahead)
        return [
            signature_of(
                {name: self._cast(name, tensor.to("meta")) for name, tensor in outline.items()}
            )
            for outline in outlines
        ]

    def _post(self, receive: ds_schedule.PipeInstruction) -> None:
        if isinstance(receive, ds_schedule.RecvActivation):
            existing(self.comm.activations_in).expect(self._received[receive.buffer_id])
        else:
            sent = self._sent[receive.buffer_id]
            known = gradients_of(sent, self.objective, self.place.trained)
            existing(self.comm.gradients_in).expect(known)

    @property
    def _trainable(self) -> list[nn.Parameter]:
        return [p for p in self.module.canonical_parameters.values() if p.requires_grad]

    @property
    def _branch(self) -> str:
        return next(iter(self.place.layers))

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

    # -- instructions

    def _exec_load_micro_batch(self, buffer_id: int, keep: bool = False) -> None:
        loaded = self._ahead.popleft() if self._ahead else self._load()
        _check_weights(loaded, self.objective.names)
        if keep:
            self._kept[buffer_id] = loaded  # where the loader left it
        self._take_in(buffer_id, loaded)

    def _load(self) -> Any:
        asked = self.recorder.clock()
        loaded = next(self.data_iterator)
        self._data_wait_s += self.recorder.clock() - asked
        return loaded

    def _exec_reload_micro_batch(self, buffer_id: int) -> None:
        kept = self._kept.pop(buffer_id)
        if self._keeps_what_layers_made:  # in their dtypes
            self._inputs[buffer_id] |= self._copies.take_back(kept)
        else:
            self._take_in(buffer_id, kept)

    def _take_in(self, buffer_id: int, loaded: Mapping[str, Tensor]) -> None:
        for name, tensor in self._copies.take(loaded).items():
            self._inputs[buffer_id][name] = self._cast(name, tensor)

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        """An input as the layers compute with it."""
        dtype = self.get_data_types()[0]
        if tensor.dtype == torch.uint8 and name in self._from_bytes:
            return self._from_bytes[name](tensor, dtype)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def _exec_recv_activations(self, buffer_id: int) -> None:
        received = existing(self.comm.activations_in).receive()
        trained = self.graph.trained_before(self.place)
        for name, tensor in received.items():
            needs = (
                tensor.is_floating_point()
                and torch.is_grad_enabled()
                and self.objective.branch_of(name) in trained
            )
            self._inputs[buffer_id][name] = tensor.requires_grad_(needs)

    def _exec_forward_pass(self, buffer_id: int) -> None:
        outputs = self._forward(buffer_id, self._inputs.pop(buffer_id))
        if self.place.is_tail and not self.module.training:  # what is evaluated are embeddings
            outputs = {
                name: tensor for name, tensor in outputs.items() if not name.endswith(_OF_FUSION)
            }
        self._outputs[buffer_id] = outputs

    def _forward(self, buffer_id: int, inputs: dict[str, Tensor], **part: int) -> dict[str, Tensor]:
        """Run the stage's layers, or a part of them; of the inputs stay those that a gradient is
        made for."""
        number = self.replica * self._num_micro_batches + buffer_id
        self.module.seed_micro_batch(self.global_steps, number)
        received = {
            name: tensor
            for name, tensor in inputs.items()
            if tensor.requires_grad and tensor.is_leaf
        }
        if received and torch.is_grad_enabled():
            self._inputs[buffer_id] = received
        return super(PipelineEngine, self).forward(inputs, **part)

    @torch.no_grad()
    def _exec_embed_pass(self, buffer_id: int) -> None:
        inputs = self._inputs.pop(buffer_id)
        locked = self._num_skipped_again
        if locked:
            inputs = self._forward(buffer_id, inputs, stop=locked)
        if self.place.has_backward and self._keeps_what_layers_made:
            self._kept[buffer_id] = self._copies.keep(inputs)
        self._outputs[buffer_id] = self._forward(buffer_id, inputs, start=locked)

    def _exec_replay_pass(self, buffer_id: int) -> None:
        with self.module.statistics_untouched():  # the first forward has updated them
            outputs = self._forward(
                buffer_id, self._inputs.pop(buffer_id), start=self._num_skipped_again
            )
        if self.place.is_tail:  # the loss has had them
            self._keep_roots(buffer_id, outputs)
        else:
            self._outputs[buffer_id] = outputs

    @property
    def _num_skipped_again(self) -> int:
        """Locked layers at the front, which a second forward skips; none where their inputs come
        again with others that need it."""
        return (
            self.module.num_locked_first
            if self.place.previous is None or not self.place.sends_gradients
            else 0
        )

    @property
    def _keeps_what_layers_made(self) -> bool:
        """For a second forward: of locked layers, here or on the stage above, whose output does not
        come again; else what was loaded."""
        return self._num_skipped_again > 0 or not self.place.sends_gradients

    def _exec_send_activations(self, buffer_id: int) -> None:
        outputs = self._outputs.pop(buffer_id)
        existing(self.comm.activations_out).send(outputs, self._sent[buffer_id])
        self._keep_roots(buffer_id, outputs)

    def _keep_roots(self, buffer_id: int, outputs: Mapping[str, Tensor]) -> None:
        """Where a backward begins. The values themselves are freed, unless the graph needs them."""
        roots = {
            name: get_gradient_edge(tensor)
            for name, tensor in outputs.items()
            if tensor.requires_grad
        }
        if roots:  # else no backward will ask for them
            self._roots[buffer_id] = roots

    def _exec_recv_grads(self, buffer_id: int) -> None:
        self._output_grads[buffer_id] = existing(self.comm.gradients_in).receive()

    def _exec_backward_pass(self, buffer_id: int) -> None:
        self._inject(self._differentiable(buffer_id))

    def _differentiable(self, buffer_id: int) -> list[tuple[GradientEdge, Tensor]]:
        """Of what was handed on of this micro-batch and needs a gradient, where it was made, with
        the gradient that came back."""
        roots, grads = self._roots.pop(buffer_id, {}), self._output_grads.pop(buffer_id)
        if not set(roots) <= set(grads):
            raise RuntimeError(
                f"{self.place.name}: sent {sorted(roots)} and got gradients of "
                f"{sorted(grads)} for micro-batch {buffer_id}; every floating-point tensor that "
                "leaves a stage and needs a gradient must reach the loss"
            )
        return [(root, grads[name]) for name, root in roots.items()]

    def _inject(self, pairs: Sequence[tuple[Tensor | GradientEdge, Tensor]]) -> None:
        """Backward from gradients that came from elsewhere, the way the base class runs its own
        (BF16: fp32 accumulation)."""
        accumulates = (
            isinstance(self.optimizer, BF16_Optimizer) and not self.optimizer.immediate_grad_update
        )
        if isinstance(self.optimizer, BF16_Optimizer):
            self.optimizer.clear_lp_grads()
        with self._own_backward():
            roots: list[Any] = [root for root, _ in pairs]
            torch.autograd.backward(roots, [grad for _, grad in pairs])
        if accumulates:
            self.optimizer.update_hp_grads(clear_lp_grads=False)

    @contextlib.contextmanager
    def _own_backward(self) -> Iterator[None]:
        """The base class refuses any backward but its own: in here, this is its own."""
        self._running_engine_backward = True
        try:
            yield
        finally:
            self._running_engine_backward = False

    def _exec_reduce_grads(self) -> None:
        if self.module.placeholders:  # a gradient of zero, the way all others come
            held = torch.cat(list(self.module.placeholders))
            self._inject([(held, torch.zeros_like(held))])
        if self._gradient_averages:
            self._gradient_averages.finish()
        else:
            super()._exec_reduce_grads()

    def _exec_send_grads(self, buffer_id: int) -> None:
        received = self._inputs.pop(buffer_id)
        grads = {name: t.grad for name, t in received.items() if t.grad is not None}
        missing = [name for name in received if name not in grads]
        if missing:
            raise RuntimeError(
                f"{self.place.name}: received {missing} but its layers made no gradient for them; "
                "drop tensors no layer uses"
            )
        # in the order and the dtype of the activations: that is what the other side expects
        known = gradients_of(
            self._received[buffer_id],
            self.objective,
            self.graph.trained_before(self.place),
        )
        existing(self.comm.gradients_out).send({name: grads[name] for name, _, _ in known}, known)

    def _exec_compute_loss(self, buffer_id: int | None = None) -> None:
        """One loss over everything that is waiting here: the global batch, or, with `buffer_id`, a
        micro-batch of each replica."""
        number = 1 if buffer_id is None else self._num_micro_batches  # of losses in this step
        waiting = sorted(self._outputs)
        outputs = [self._outputs.pop(m) for m in waiting]
        batch = self.batches[self._branch]
        gradients = self.tail_loss.gradients(
            outputs,
            batch.global_batch_size // number,
            batch=buffer_id,
            weight=1.0 / number,
            loss_scale=self._loss_scale(),
            scoring=Scoring(
                self.module.fusion,
                batch.micro_batch_size,
                layer_seed(self.module.base_seed, self.global_steps, buffer_id or 0, OF_PAIRS),
                self._inject,
            ),
        )
        if self.place.has_backward:
            for m, made, of_made in zip(waiting, outputs, gradients):
                self._output_grads[m] = of_made
                self._keep_roots(m, made)

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
        self.set_dataiterator(data_iter)
        self._reset_buffers()
        self._exec_schedule(ForwardOnly(self.place, num_micro_batches))
        self.comm.drain()
        own = {}
        if self.place.is_tail:
            own = self.tail_loss.own_rows([self._outputs[m] for m in sorted(self._outputs)])
        totals = compare_held_out(self.comm, own, num_samples, self.tail_loss.embed_dim, measure)
        self._reset_buffers()
        return totals

    def gather_trace(self) -> list[tuple[str, list[Span]]] | None:
        """On rank 0: (who, spans of the last step) of every rank. All ranks call it together."""
        spans = [(s.name, s.micro_batch, s.start_s, s.end_s) for s in self.recorder.spans]
        told = to_first_rank([self.graph.describe_rank(self.comm.rank), spans])
        return told and [(who, [Span(*span) for span in spans]) for who, spans in told]

    _INSTRUCTION_MAP = {
        ds_schedule.LoadMicroBatch: _exec_load_micro_batch,
        ds_schedule.RecvActivation: _exec_recv_activations,
        ReloadMicroBatch: _exec_reload_micro_batch,
        EmbedPass: _exec_embed_pass,
        ds_schedule.ForwardPass: _exec_forward_pass,
        ReplayPass: _exec_replay_pass,
        ds_schedule.SendActivation: _exec_send_activations,
        ComputeLoss: _exec_compute_loss,
        ds_schedule.RecvGrad: _exec_recv_grads,
        ds_schedule.BackwardPass: _exec_backward_pass,
        ds_schedule.SendGrad: _exec_send_grads,
        ds_schedule.ReduceGrads: _exec_reduce_grads,
        ds_schedule.OptimizerStep: PipelineEngine._exec_optimizer_step,
    }


def _optimizer_group(setting: Setting, parameters: Sequence[nn.Parameter]) -> dict[str, Any]:
    """A parameter group as optimizers take it."""
    decay = {} if setting.weight_decay is None else {"weight_decay": setting.weight_decay}
    return {"params": list(parameters), **decay}


def _check_weights(loaded: Mapping[str, Tensor], branches: Sequence[str]) -> None:
    """Of a micro-batch as the loader left it: in host memory."""
    for name in loaded.keys() & {f"{branch}_weight" for branch in branches}:
        weight = loaded[name]
        if weight.dtype != torch.int64 or not bool(((weight >= 0) & (weight <= MAX_WEIGHT)).all()):
            raise ValueError(
                f"{name} has dtype {weight.dtype} and values from {weight.min()} to "
                f"{weight.max()}; weights are int64 from 0 to {MAX_WEIGHT}: millionths, so give "
                "1,000,000 for a weight of 1"
            )
