"""DeepSpeed below the engine: ZeRO, averages over replicas, precision, the optimizer and its
schedule. The one file that knows DeepSpeed's engines and reads their private names.

DeepSpeed's linear chain of stages is not used. Its grid is Cartesian: every stage has the same
number of replicas. Ours says that every rank is its own pipe coordinate, and answers with the
replicas of the rank's own stage when DeepSpeed asks for its data-parallel group.

DeepSpeed's constructors of a module and of a grid make 4 · world + 5 process groups between them,
of which nothing is used that it would not get here. Each group is made by all ranks, so both
subclasses set what the constructors set, and leave these out.

Two scales are not as DeepSpeed has them: it divides what enters a backward by the number of
micro-batches, where the loss is the mean over the batch already; and it averages gradients over the
replicas, of which `engine/loss/` makes the sum.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime import lr_schedules as lr_schedules
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipelineParallelGrid
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS as ZERO_SUPPORTED_OPTIMIZERS
from torch import Tensor, nn

from engine.backend.gradient_reducer import GradientReducer
from engine.backend.ordered_gradients import OrderedGradients
from engine.backend.protocol import Roots, Shard, stepped_tensors
from engine.communication import Communicator
from engine.config.implied import zero_stage
from engine.topology import StageGraph
from engine.trace import WAIT

IN_ALL_STAGES = "ds_pipe_replicated"  # of a parameter, that every stage has it
# of the engine, whose micro-steps stay 0 under a pipeline, and of its dynamic loss scale
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_LOSS_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]  # of parameter groups


class StageGrid(PipelineParallelGrid):
    """DeepSpeed's view of the world, with this rank's stage as its data-parallel group."""

    def __init__(self, graph: StageGraph, rank: int, stage_group: Any):
        stage, world = graph.stage_of(rank), list(range(graph.world_size))
        self.global_rank, self.world_size = rank, graph.world_size
        self.stage_id, self.data_parallel_id = stage.stage_id, graph.replica_of(rank)
        self.pipe_parallel_size, self.data_parallel_size = graph.world_size, stage.replicas
        self.model_parallel_size = self.slice_parallel_size = 1
        # an overflow anywhere is to be seen everywhere
        self.ds_model_proc_group = self.pp_proc_group = dist.group.WORLD
        self.ds_model_rank, self.ds_model_world_size = rank, graph.world_size
        self.dp_group, self.dp_proc_group = list(stage.ranks), stage_group
        self.dp_groups = [list(each.ranks) for each in graph.stages]
        self.pp_group, self.pipe_groups = world, [world]
        self.slice_group, self.slice_proc_group = [rank], None
        self.is_first_stage = self.is_last_stage = False
        self.p2p_groups: list[list[int]] = []
        self._topo = PipeDataParallelTopology(num_pp=graph.world_size, num_dp=1)

    def get_stage_id(self) -> int:
        return self.stage_id

    def get_data_parallel_id(self) -> int:
        return self.data_parallel_id


class StageLayers(PipelineModule):
    """A PipelineModule that has nothing but what DeepSpeed's constructor sets, for layers that are
    not tied: whoever subclasses it makes `forward_funcs` of the layers of its stage."""

    def __init__(
        self, graph: StageGraph, rank: int, specs: Sequence[Any], stage_group: Any, seed: int
    ):
        nn.Module.__init__(self)
        self.world_group, self.global_rank = dist.group.WORLD, rank
        self.world_size, self.local_rank = graph.world_size, int(os.environ["LOCAL_RANK"])
        self.num_stages, self.stage_id = graph.world_size, graph.stage_of(rank).stage_id
        self._grid = StageGrid(graph, rank, stage_group)
        self._topo = self._grid.topology()
        self._layer_specs, self._num_layers = list(specs), len(specs)
        self.micro_offset, self.loss_fn, self.dynamic_shape = 0, None, False
        self.seed_layers, self.seed_fn, self.base_seed = False, None, seed
        self.forward_funcs: list[Any] = []
        self.fwd_map: dict[str, int] = {}
        self.tied_modules = nn.ModuleDict()
        self.tied_weight_attrs: dict[str, Any] = {}
        self.tied_comms: dict[str, Any] = {}
        # of its own checkpointing, which `StageModule.forward` does not use
        self.activation_checkpoint_interval, self.activation_checkpoint_func = 0, None
        self.checkpointable_layers = self.is_checkpointable_results_interval = None
        self.is_checkpointable_results: list[bool] = []

    def add_stage_parameter(self, parameter: nn.Parameter) -> None:
        """Say of a parameter that this stage alone has it."""
        setattr(parameter, IN_ALL_STAGES, False)


class _Engine(DeepSpeedEngine):
    """DeepSpeed's engine of one stage, whose instructions others run."""

    _step_applied: bool

    def __init__(
        self,
        module: StageLayers,
        config: dict[str, Any],
        parameter_groups: Sequence[Mapping[str, Any]],
        make_schedule: Callable[[torch.optim.Optimizer], Any],
        make_optimizer: MakeOptimizer | None,
    ):
        self._make_schedule, self._is_finite = make_schedule, lambda: True
        with contextlib.redirect_stdout(io.StringIO()):
            super().__init__(
                args=None,
                model=module,
                optimizer=make_optimizer,
                model_parameters=list(parameter_groups),
                mpu=module.mpu(),
                config=config,
                config_class=DeepSpeedConfig(config, module.mpu()),
            )

    # -- what the base class asks

    def _configure_lr_scheduler(self) -> None:
        self.lr_scheduler = self._make_schedule(self.basic_optimizer)

    def _backward_prologue_per_tensor(self, grad: Tensor) -> Tensor:
        # the base class divides by the number of micro-batches; our loss is already the mean over
        # the batch
        return grad

    def _take_model_step(self, lr_kwargs: Mapping[str, Any] | None) -> None:
        """DeepSpeed's own optimizers check for themselves whether a gradient is not finite; fp32
        without ZeRO has none of them. There the step is skipped here, as they do it: counted,
        gradients dropped, and no step of the learning-rate schedule."""
        if isinstance(self.optimizer, ZeROOptimizer) or self._is_finite():
            super()._take_model_step(lr_kwargs)
            if not self._step_applied and self.zero_cpu_offload():
                # Where the optimizer is offloaded and adds up in fp32, DeepSpeed keeps the sums of
                # a skipped step, and adds those of the next to them: all further steps would be
                # skipped.
                self.optimizer.averaged_gradients.clear()
            return
        self.zero_grad()
        self._step_applied = False
        self.skipped_steps += 1
        self.global_steps += 1
        self.global_samples += self.train_batch_size()

    # -- what the backend asks

    def run_layers(self, inputs: dict[str, Tensor], **part: int) -> dict[str, Tensor]:
        return DeepSpeedEngine.forward(self, inputs, **part)

    def run_backward(self, roots: Roots) -> None:
        """As the base class runs its own, which is the only one that it allows."""
        self._running_engine_backward = True
        try:
            starts: list[Any] = [root for root, _ in roots]
            torch.autograd.backward(starts, [gradient for _, gradient in roots])
        finally:
            self._running_engine_backward = False

    def run_step(self, is_finite: Callable[[], bool]) -> bool:
        self._is_finite = is_finite
        self._step_and_report()
        return bool(self._step_applied)

    def _step_and_report(self) -> None:
        raise NotImplementedError

    @property
    def counters(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in _COUNTERS}

    def set_counters(self, counters: Mapping[str, int]) -> None:
        for name in _COUNTERS:
            setattr(self, name, counters[name])


class _WholeGradients(_Engine, PipelineEngine):
    """Every replica adds up whole gradients, which are averaged behind the last backward: without
    ZeRO, and under ZeRO-1."""

    def is_first_stage(self) -> bool:
        """So that no message is sent along a chain that does not exist."""
        return True

    def is_last_stage(self) -> bool:
        return True

    def _reduce_non_expert_gradients(
        self, grads: Sequence[Tensor], elements_per_buffer: int
    ) -> None:
        """Average gradients over the replicas. One has its averages already, and the base class
        would copy all of them twice."""
        if self.dp_world_size > 1:
            super()._reduce_non_expert_gradients(grads, elements_per_buffer)

    def reduce_gradients(self) -> None:
        self._exec_reduce_grads()

    def _step_and_report(self) -> None:
        self._exec_optimizer_step()


class _ShardedGradients(_Engine):
    """Every backward averages its gradients, and a replica adds up its slice of them: ZeRO-2.

    DeepSpeed's optimizer does both. When a gradient is its turn is decided here, not by its hooks:
    they take gradients in the order in which autograd makes them (`OrderedGradients` says why that
    is not enough), and a backward that one replica does alone would average with another's.
    """

    def __init__(
        self,
        module: StageLayers,
        config: dict[str, Any],
        parameter_groups: Sequence[Mapping[str, Any]],
        make_schedule: Callable[[torch.optim.Optimizer], Any],
        make_optimizer: MakeOptimizer | None,
        waiting: Callable[[], AbstractContextManager[None]],
    ):
        """`waiting`: records what happens in it as waiting for other ranks."""
        super().__init__(module, config, parameter_groups, make_schedule, make_optimizer)
        self._waiting = waiting
        # as the engine of a pipeline does
        interval = self._config.pipeline["activation_checkpoint_interval"]
        module.activation_checkpoint_interval = interval
        for hook in self.optimizer._grad_acc_hooks:
            hook.remove()
        self._group_of = {
            id(p): number for number, own in enumerate(self.optimizer.bit16_groups) for p in own
        }
        learned = [p for p in module.parameters() if id(p) in self._group_of]
        late = {id(parameter) for parameter in module.learned_behind_layers}
        self._late = [parameter for parameter in learned if id(parameter) in late]
        self._early = [parameter for parameter in reversed(learned) if id(parameter) not in late]
        self._ordered = OrderedGradients(self._early, self._average)
        self._kept: dict[int, Tensor] = {}  # sums of what was made alone, in fp32
        self._num_averaged = 0

    @property
    def num_averaged(self) -> int:
        """Gradients of single numbers that this rank has averaged with others so far."""
        return self._num_averaged

    def is_gradient_accumulation_boundary(self) -> bool:
        """Is this the last backward of the step? No backward knows that: `reduce_gradients` ends
        the step."""
        return False

    def run_backward(self, roots: Roots) -> None:
        self._begin()
        with self._ordered.backward():
            super().run_backward(roots)
        self._end()

    def run_alone(self, roots: Roots) -> None:
        """A backward that other replicas need not do: its gradients are kept until
        `reduce_gradients`. Raises RuntimeError for gradients of parameters in the layers."""
        super().run_backward(roots)
        if any(parameter.grad is not None for parameter in self._early):
            raise RuntimeError(
                "a part of the loss has made gradients of layers outside of their backward, which "
                'ZeRO-2 cannot average; use "zero_optimization": {"stage": 1}'
            )
        for parameter in self._late:
            self._keep(parameter)

    def reduce_gradients(self) -> None:
        """Average what is still kept, and make ready what the optimizer steps with."""
        if self._late:
            self._begin()
            for parameter in self._late:
                self._keep(parameter)
                kept = self._kept.pop(id(parameter), None)
                parameter.grad = None if kept is None else kept.to(parameter.dtype)
                self._average(parameter)
            self._end()
        self.optimizer.finalize_gradient_accumulation_boundary()

    def _keep(self, parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            total = self._kept.setdefault(id(parameter), torch.zeros_like(parameter).float())
            total += parameter.grad
            parameter.grad = None

    def _begin(self) -> None:
        self.optimizer.set_gradient_accumulation_boundary(False)
        self.optimizer.setup_buckets()

    def _average(self, parameter: nn.Parameter) -> None:
        """Put a gradient, zeros where there is none, into the bucket; a full one is averaged."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        self._num_averaged += parameter.numel()
        zero: Any = self.optimizer
        filled = zero.ipg_buckets[self.communication_data_type].elements + parameter.numel()
        is_full = filled > zero.reduce_bucket_size
        with self._waiting() if is_full else contextlib.nullcontext():
            zero.reduce_ready_partitions_and_remove_grads(parameter, self._group_of[id(parameter)])

    def _end(self) -> None:
        """Average the last bucket, add the own slices to those of earlier backwards, and free the
        gradients."""
        with self._waiting():
            self.optimizer.overlapping_partition_gradients_reduce_epilogue()

    def _step_and_report(self) -> None:
        """As the engine of a pipeline does."""
        self._take_model_step(None)
        if self.global_rank == 0 and self.monitor.enabled:
            events = [("Train/Samples/lr", self.get_lr()[0], self.global_samples)]
            if self.fp16_enabled():
                scale = self._get_optimizer_loss_scale()
                events.append(("Train/Samples/loss_scale", scale, self.global_samples))
            self.monitor.write_events(events)


class DeepSpeedBackend:
    """See `engine/backend/protocol.py:Backend`.

    `config`: DeepSpeed's, for this rank; `parameter_groups`: as torch's optimizers take them;
    `make_schedule`: makes a `GroupSchedule` of the optimizer; `averages_early`: whether gradients
    are averaged while the last backward runs, else behind it; `make_optimizer`: of these groups;
    None: DeepSpeed makes that of the configuration.
    """

    def __init__(
        self,
        module: StageLayers,
        comm: Communicator,
        config: dict[str, Any],
        parameter_groups: Sequence[Mapping[str, Any]],
        make_schedule: Callable[[torch.optim.Optimizer], Any],
        averages_early: bool,
        make_optimizer: MakeOptimizer | None = None,
    ):
        given = module, config, parameter_groups, make_schedule, make_optimizer
        self._engine: _ShardedGradients | _WholeGradients
        if zero_stage(config) == 2:
            self._engine = _ShardedGradients(*given, partial(comm.recorder.span, WAIT))
        else:
            self._engine = _WholeGradients(*given)
        self._module, self._replicas = module, comm.stage.replicas
        self._wrapper: Any = (
            self._engine.optimizer
        )  # the optimizer, or what DeepSpeed puts round it
        self._in_bf16 = isinstance(self._wrapper, BF16_Optimizer)
        # of each parameter group what is stepped; while ZeRO-1 steps one it has no others
        groups = self._wrapper.param_groups if self.is_sharded else []
        self._slices = [group["params"][0] for group in groups]
        learned = [p for p in module.parameters() if p.requires_grad]
        self._weights_bytes = sum(p.numel() * p.element_size() for p in learned)
        self._reducer: GradientReducer | None = None
        if averages_early and self._replicas > 1:
            late = [*module.learned_behind_layers]
            self._reducer = GradientReducer(
                learned, late, self._sums_of(), comm.start_sum_over_replicas, self._replicas
            )

    def _sums_of(self) -> Callable[[nn.Parameter], Tensor]:
        """What holds the sum of a parameter's gradients over the micro-batches."""
        if not self._in_bf16:
            return _gradient_or_zero
        groups = zip(self._wrapper.bf16_groups, self._wrapper.fp32_groups_gradients)
        sums = {id(p): gradient for group in groups for p, gradient in zip(*group)}
        return lambda parameter: sums[id(parameter)]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._engine.basic_optimizer

    @property
    def wrapper(self) -> str:
        """The name of the class that DeepSpeed steps: the optimizer's, or of what is round it."""
        return type(self._wrapper).__name__

    @property
    def dtype(self) -> torch.dtype:
        return self._engine.get_data_types()[0]

    @property
    def is_sharded(self) -> bool:
        return isinstance(self._wrapper, ZeROOptimizer)

    @property
    def averages_early(self) -> bool:
        return self._reducer is not None

    @property
    def loss_scale(self) -> float:
        scaled = self._engine.fp16_enabled() and hasattr(self._wrapper, "loss_scale")
        return float(self._wrapper.loss_scale) if scaled else 1.0

    @property
    def rates(self) -> Mapping[int | None, float]:
        return self._engine.lr_scheduler.rates

    @property
    def num_steps(self) -> int:
        return self._engine.global_steps

    @property
    def num_skipped(self) -> int:
        return self._engine.skipped_steps

    # -- a step

    def forward(self, inputs: dict[str, Tensor], **part: int) -> dict[str, Tensor]:
        return self._engine.run_layers(inputs, **part)

    def backward(self, roots: Roots, last: bool = False) -> None:
        """bf16: sums over the micro-batches are in fp32."""
        if self._in_bf16:
            self._wrapper.clear_lp_grads()
        early = self._reducer.last_backward() if self._reducer and last else None
        with early or contextlib.nullcontext():
            self._engine.run_backward(roots)
            if self._in_bf16 and not self._wrapper.immediate_grad_update:
                self._wrapper.update_hp_grads(clear_lp_grads=False)

    def backward_alone(self, roots: Roots) -> None:
        if isinstance(self._engine, _ShardedGradients):
            self._engine.run_alone(roots)
        else:
            self.backward(roots)

    def reduce_gradients(self) -> None:
        if self._module.placeholders and not isinstance(self._engine, _ShardedGradients):
            # a gradient of zero, the way all others come
            held = torch.cat(list(self._module.placeholders))
            self.backward([(held, torch.zeros_like(held))])
        if self._reducer:
            self._reducer.finish()
        else:
            self._engine.reduce_gradients()

    def step(self, is_finite: Callable[[], bool]) -> bool:
        return self._engine.run_step(is_finite)

    def forwards_only(self, number: int) -> AbstractContextManager[None]:
        """A forward needs no other replica."""
        return contextlib.nullcontext()

    # -- parameters

    def shards(self) -> list[Shard]:
        found = []
        for name, parameter in self._module.canonical_parameters.items():
            shape = tuple(parameter.shape)
            if not (self.is_sharded and parameter.requires_grad):
                whole = (name, shape, 0, parameter.numel(), parameter, 0)
                found.append(Shard(*whole, everywhere=True))
            elif place := self._place(parameter):
                held, start, numel, offset = place
                found.append(Shard(name, shape, offset, numel, held, start))
        return found

    def _place(self, parameter: Any) -> tuple[Tensor, int, int, int] | None:
        """(the flat slice that is stepped, where this rank's part of the parameter begins in it,
        its number of elements, where it begins in the parameter); None: it has none."""
        mapping = parameter._hp_mapping  # which ZeRO adds
        if mapping is None:
            return None
        address, offset = mapping.get_hp_fragment_address(), mapping.lp_fragment_address.start
        held = self._slices[mapping.param_group_index]
        return held, address.start, address.numel, offset

    def stepped(self, parameter: nn.Parameter) -> Tensor | None:
        if not self.is_sharded:
            return parameter.view(-1)
        place = self._place(parameter)
        return place and place[0].detach().narrow(0, *place[1:3])

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """ZeRO-1 steps its parameter groups one after the other."""
        if not self.is_sharded:
            return parameter.grad
        place = self._place(parameter)
        if place is None or not any(place[0] is held for held in stepped_tensors(self.optimizer)):
            return None
        gradient = place[0].grad
        return None if gradient is None else gradient.narrow(0, *place[1:3])

    def reduced_gradient(self, parameter: nn.Parameter) -> tuple[Tensor, float] | None:
        """Under ZeRO-1 it is there before its turn, too, but for an offloaded optimizer, in a list
        of pieces."""
        gradient = self.gradient(parameter)
        if gradient is not None:
            return gradient, 1.0
        place = self._place(parameter) if self.is_sharded else None
        if place is None:
            return None
        held, start, numel, _ = place
        scale = float(self._wrapper.loss_scale)
        if held.grad is not None:
            return held.grad.narrow(0, start, numel), scale
        group = next(i for i, each in enumerate(self._slices) if each is held)
        for piece in self._wrapper.averaged_gradients[group]:
            if start == 0:
                return piece, scale
            start -= piece.numel()
        raise RuntimeError(
            f"no piece of parameter group {group} begins where DeepSpeed's mapping says"
        )

    def weights_replaced(self) -> None:
        if self.is_sharded:
            self._wrapper.update_lp_params()

    # -- what goes on when a run does

    def progress(self) -> dict[str, Any]:
        scaler = self._dynamic_scaler
        schedule = self._engine.lr_scheduler
        return {
            "counters": self._engine.counters,
            "lr_scheduler": schedule.state_dict() if schedule is not None else {},
            "loss_scaler": {name: getattr(scaler, name) for name in _LOSS_SCALER} if scaler else {},
        }

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        """A loss scale that only one of the two precisions has is left as it is."""
        self._engine.set_counters(progress["counters"])
        if self._engine.lr_scheduler is not None and progress["lr_scheduler"]:
            self._engine.lr_scheduler.load_state_dict(progress["lr_scheduler"])
        scaler = self._dynamic_scaler
        if progress["loss_scaler"] and scaler:
            for name in _LOSS_SCALER:
                setattr(scaler, name, progress["loss_scaler"][name])

    @property
    def _dynamic_scaler(self) -> Any:
        scaler = getattr(self._wrapper, "loss_scaler", None)
        return scaler if getattr(scaler, "dynamic", False) else None

    # -- facts for metrics

    def searches_loss_scale(self, loss: float) -> bool:
        return self._dynamic_scaler is not None and math.isfinite(loss)

    def sent_bytes(self, num_steps: int) -> float:
        weights = num_steps * self._weights_bytes if self.is_sharded else 0
        if isinstance(self._engine, _ShardedGradients):
            gradients = self._engine.num_averaged * self._engine.communication_data_type.itemsize
        else:  # bf16: those are fp32
            gradients = num_steps * self._weights_bytes * (2 if self._in_bf16 else 1)
        return (self._replicas - 1) / self._replicas * (2 * gradients + weights)


def _gradient_or_zero(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:  # no micro-batch has reached it
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
