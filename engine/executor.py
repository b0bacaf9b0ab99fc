"""The executor: a DeepSpeed `PipelineEngine` that runs the instruction lists of `engine/schedule.py` with real tensors.

DeepSpeed keeps what it is good at (ZeRO-1, averaging over replicas, mixed precision, optimizer, learning-rate schedule,
checkpoints); this class replaces the linear chain: named tensors, own buffers per micro-batch, and one loss for the whole
global batch. The contract of every scale is written where it is applied.
"""

from __future__ import annotations

import contextlib
import io
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe import schedule as ds_schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from engine.clipping import GROUPS, GroupedClipping
from engine.communication import Communicator
from engine.exchange import OTHER, ContrastiveLoss, Rows, exchange_loss, meet
from engine.module import StageModule
from engine.planner import BranchBatch
from engine.schedule import SCHEDULES, ComputeLoss, ForwardOnly
from engine.topology import BRANCHES, StageGraph


@dataclass(frozen=True)
class StepMetrics:
    """What one step tells, equal on all ranks. Norms are taken before clipping; `loss` is over the global batch."""

    loss: float
    logit_scale_exp: float
    grad_norm: Mapping[str, float]
    lr: float
    step_applied: bool
    loss_scale: float
    stop_requested: bool  # by any rank

    def record(self, step: int, epoch: float, samples_per_s: float, step_s: float) -> dict[str, float]:
        """The line of metrics.jsonl."""
        return {
            "step": step,
            "epoch": round(epoch, 4),
            "loss": self.loss,
            "lr": self.lr,
            "logit_scale_exp": self.logit_scale_exp,
            **{f"grad_norm/{group}": norm for group, norm in self.grad_norm.items()},
            "samples_per_s": round(samples_per_s, 2),
            "step_s": round(step_s, 5),
            **({} if self.loss_scale == 1.0 else {"loss_scale": self.loss_scale}),
            **({} if self.step_applied else {"step_applied": False}),
        }


class ForkEngine(PipelineEngine):
    """Trains one stage of a stage graph. `train_batch` runs one global batch, `evaluate` a held-out set."""

    _ready = False

    def __init__(
        self,
        module: StageModule,
        comm: Communicator,
        loss: ContrastiveLoss,
        batches: Mapping[str, BranchBatch],
        config: dict[str, Any],
        schedule: str,
        max_grad_norm: Mapping[str, float],
        embed_dim: int,
    ):
        grid = module.mpu()
        parameters = [p for p in module.parameters() if p.requires_grad]
        with contextlib.redirect_stdout(io.StringIO()):
            super().__init__(
                args=None,
                model=module,
                model_parameters=parameters,
                mpu=grid,
                config=config,
                config_class=DeepSpeedConfig(config, grid),
            )
        self.comm, self.place, self.replica = comm, comm.stage, comm.replica
        self.embed_dim = embed_dim
        self.loss_function, self.batches, self.schedule_type = loss, dict(batches), SCHEDULES[schedule]
        self.clipping = GroupedClipping(module.canonical_parameters, max_grad_norm, comm, self.basic_optimizer)
        self.instruction_seconds: dict[str, float] = defaultdict(float)
        self._reset_buffers()
        self._ready = True

    # -- what the base class asks ------------------------------------------------------------------------------------

    def is_first_stage(self) -> bool:
        """Does input enter here? During construction always yes: there is no linear chain to warm up."""
        return not self._ready or bool(self.place.loads)

    def is_last_stage(self) -> bool:
        return not self._ready or self.place.is_tail

    def _backward_prologue_per_tensor(self, grad: Tensor) -> Tensor:
        return grad  # the base class divides by the number of micro-batches; our loss is already the mean over the batch

    @property
    def graph(self) -> StageGraph:
        return self.comm.graph

    # -- one step ----------------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[dict[str, Tensor]] | None, stop_requested: bool = False) -> StepMetrics:
        """One optimizer step over one global batch. Stages that load input take their micro-batches from `data_iter`.

        `stop_requested` travels with the metrics, so that all ranks learn in the same step that one of them was asked to end.
        """
        self.module.train()
        self.set_dataiterator(data_iter)
        self._reset_buffers()
        self._lr = self.get_lr()[0]
        self.clipping.norms.clear()
        self._exec_schedule(self.schedule_type(self.place, self.batches[self._branch].num_micro_batches))
        self.comm.drain()
        # Replicas saw different samples; the mean of their running statistics is that of the whole batch's. After every
        # step, so that what is evaluated and saved does not depend on when it is.
        self.comm.average_over_replicas(self.module.running_statistics())
        return self._step_metrics(stop_requested)

    def _exec_schedule(self, pipe_schedule) -> None:
        for instructions in pipe_schedule:
            for instruction in instructions:
                start = time.perf_counter()
                self._INSTRUCTION_MAP[type(instruction)](self, **instruction.kwargs)
                self.instruction_seconds[instruction.name] += time.perf_counter() - start

    def _reset_buffers(self) -> None:
        """Buffers by micro-batch: named tensors that came in, that go out, and the gradients of what went out."""
        self._inputs: dict[int, dict[str, Tensor]] = defaultdict(dict)
        self._outputs: dict[int, dict[str, Tensor]] = {}
        self._output_grads: dict[int, dict[str, Tensor]] = {}
        self._loss_share = torch.zeros((), device=self.device)
        self._num_misaligned = torch.zeros((), device=self.device)
        self._logit_scale_exp = torch.zeros((), device=self.device)

    @property
    def _branch(self) -> str:
        return next(iter(self.place.layers))

    # -- instructions ------------------------------------------------------------------------------------------------

    def _exec_load_micro_batch(self, buffer_id: int) -> None:
        dtype = self.get_data_types()[0]
        for name, tensor in next(self.data_iterator).items():
            tensor = tensor.to(self.device, non_blocking=True)
            self._inputs[buffer_id][name] = tensor.to(dtype) if tensor.is_floating_point() else tensor

    def _exec_recv_activations(self, buffer_id: int) -> None:
        for name, tensor in self.comm.activations_in.receive().items():
            self._inputs[buffer_id][name] = tensor.requires_grad_(tensor.is_floating_point() and torch.is_grad_enabled())

    def _exec_forward_pass(self, buffer_id: int) -> None:
        number = self.replica * self.batches[self._branch].num_micro_batches + buffer_id
        self.module.seed_micro_batch(self.global_steps, number)
        outputs = super(PipelineEngine, self).forward(dict(self._inputs[buffer_id]))
        self._outputs[buffer_id] = outputs
        if not torch.is_grad_enabled():
            del self._inputs[buffer_id]

    def _exec_send_activations(self, buffer_id: int) -> None:
        self.comm.activations_out.send(self._outputs[buffer_id])
        if not torch.is_grad_enabled():
            del self._outputs[buffer_id]

    def _exec_recv_grads(self, buffer_id: int) -> None:
        self._output_grads[buffer_id] = self.comm.gradients_in.receive()

    def _exec_backward_pass(self, buffer_id: int) -> None:
        outputs, grads = self._outputs.pop(buffer_id), self._output_grads.pop(buffer_id)
        differentiable = {name: tensor for name, tensor in outputs.items() if tensor.requires_grad}
        if set(differentiable) != set(grads):
            raise RuntimeError(
                f"{self.place.name}: sent {sorted(differentiable)} and got gradients of {sorted(grads)} for micro-batch {buffer_id}; "
                "every floating-point tensor that leaves a stage must reach the loss"
            )
        self._inject([(tensor, grads[name]) for name, tensor in differentiable.items()])

    def _inject(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Backward from gradients that came from elsewhere, the way the base class runs its own (BF16: fp32 accumulation)."""
        accumulates = isinstance(self.optimizer, BF16_Optimizer) and not self.optimizer.immediate_grad_update
        if isinstance(self.optimizer, BF16_Optimizer):
            self.optimizer.clear_lp_grads()
        self._running_engine_backward = True
        try:
            torch.autograd.backward([tensor for tensor, _ in pairs], [grad.to(tensor.dtype) for tensor, grad in pairs])
        finally:
            self._running_engine_backward = False
        if accumulates:
            self.optimizer.update_hp_grads(clear_lp_grads=False)

    def _exec_send_grads(self, buffer_id: int) -> None:
        received = {name: t for name, t in self._inputs.pop(buffer_id).items() if t.is_leaf and t.requires_grad}
        missing = [name for name, tensor in received.items() if tensor.grad is None]
        if missing:
            raise RuntimeError(
                f"{self.place.name}: received {missing} but its layers made no gradient for them; drop tensors no layer uses"
            )
        self.comm.gradients_out.send({name: tensor.grad for name, tensor in received.items()})

    def _exec_compute_loss(self) -> None:
        batch = self.batches[self._branch]
        counts = [batch.micro_batch_size * batch.num_micro_batches] * batch.replicas
        outputs = [self._outputs[m] for m in sorted(self._outputs)]
        parameters = {name: outputs[0][name].detach() for name in self.loss_function.parameters if name in outputs[0]}
        with torch.no_grad():
            meeting = meet(self.comm, self._own_rows(), counts)
            result = exchange_loss(self.comm, self.loss_function, meeting, counts, parameters)
        self._loss_share = result.share
        if self.comm.rank == self.graph.tail("image").ranks[0]:  # every tail sees the same; one counts
            self._num_misaligned = meeting.num_misaligned.float()
        if parameters and self.replica == 0:
            self._logit_scale_exp = parameters["logit_scale"].exp().clamp(max=100.0).reshape(())
        # ∂L/∂ of the own rows, L over the global batch. The reduction over replicas averages what each accumulated: times
        # the number of replicas makes that the sum. fp16: times the loss scale, which the optimizer takes out again.
        scale = self.place.replicas * self._loss_scale()
        sizes = [self._num_rows(output) for output in outputs]
        pieces = {branch: (grad * scale).split(sizes) for branch, grad in result.embeds.items()}
        for m, output in enumerate(outputs):
            grads = {f"{branch}_embeds": pieces[branch][m] for branch in pieces}
            for name in parameters:  # the whole gradient goes with the first micro-batch
                grads[name] = result.parameters[name] * scale if m == 0 else torch.zeros_like(parameters[name])
            self._output_grads[m] = grads
            self._outputs[m] = {name: tensor for name, tensor in output.items() if tensor.requires_grad}

    def _loss_scale(self) -> float:
        return float(self.optimizer.loss_scale) if self.fp16_enabled() and hasattr(self.optimizer, "loss_scale") else 1.0

    def _num_rows(self, outputs: Mapping[str, Tensor]) -> int:
        return len(outputs[f"{self.place.tail_of[0]}_embeds"])

    def _own_rows(self) -> dict[str, Rows]:
        """The embeddings of all micro-batches of this tail, in the order they ran."""
        outputs = [self._outputs[m] for m in sorted(self._outputs)]
        rows = {}
        for branch in self.place.tail_of:
            embeds, position, index = (
                [output[f"{branch}_{part}"].detach() for output in outputs] for part in ("embeds", "position", "index")
            )
            none = torch.zeros(0, dtype=torch.int64, device=self.device)
            blank = torch.zeros(0, self.embed_dim, device=self.device)
            rows[branch] = Rows(torch.cat([blank, *embeds]), torch.cat([none, *position]), torch.cat([none, *index]))
        return rows

    # -- held-out sets -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(
        self, data_iter: Iterator[dict[str, Tensor]] | None, num_micro_batches: int, measure: Callable[..., Tensor]
    ) -> dict[str, Tensor]:
        """Run a held-out set through the stages and measure both directions at the tails.

        `num_micro_batches` is the number on this replica (it may differ between replicas, and be 0); `measure(own, other,
        target)` returns a vector that is summed over all own rows. Returns {"image_to_text": …, "text_to_image": …} on every rank.
        """
        self.module.eval()
        self.set_dataiterator(data_iter)
        self._reset_buffers()
        self._exec_schedule(ForwardOnly(self.place, num_micro_batches))
        self.comm.drain()
        meeting = None
        if self.place.is_tail:
            own = self._own_rows()
            meeting = meet(self.comm, own, self.comm.gather_counts(len(next(iter(own.values())).position)))
        totals = {}
        for branch in BRANCHES:
            if meeting is not None and branch in meeting.own:
                rows = meeting.own[branch]
                part = measure(rows.embeds, meeting.everyone[OTHER[branch]], rows.position)
            else:
                blank = torch.zeros(0, self.embed_dim, device=self.device)
                part = measure(blank, blank, torch.zeros(0, dtype=torch.int64, device=self.device))
            totals[f"{branch}_to_{OTHER[branch]}"] = self.comm.sum_over(part)
        self._reset_buffers()
        return totals

    # -- metrics -----------------------------------------------------------------------------------------------------

    def _step_metrics(self, stop_requested: bool) -> StepMetrics:
        """Gather the numbers of one step from the ranks that have them: each is given by one rank, zeros by the others."""
        norms = [
            self.clipping.norms[group].reshape(()) if self._speaks_for(group) else torch.zeros((), device=self.device) for group in GROUPS
        ]
        stop = torch.tensor(float(stop_requested), device=self.device)
        values = torch.stack([self._loss_share, self._num_misaligned, self._logit_scale_exp, stop, *norms]).float()
        loss, misaligned, logit_scale_exp, stopping, *grad_norms = self.comm.sum_over(values).tolist()
        if misaligned:
            raise RuntimeError(
                f"the image and text branches disagree about {int(misaligned)} samples of this batch; both must be given the same "
                "samples at the same positions (data order, seed and number of samples must be equal on all ranks)"
            )
        return StepMetrics(
            loss=loss,
            logit_scale_exp=logit_scale_exp,
            grad_norm=dict(zip(GROUPS, grad_norms)) if self._step_applied else dict.fromkeys(GROUPS, math.nan),
            lr=self._lr,
            step_applied=self._step_applied,
            loss_scale=self._loss_scale(),
            stop_requested=stopping > 0,
        )

    def _speaks_for(self, group: str) -> bool:
        return group in self.clipping.norms and self.comm.group_members[group][0] == self.comm.rank

    _INSTRUCTION_MAP = {
        ds_schedule.LoadMicroBatch: _exec_load_micro_batch,
        ds_schedule.RecvActivation: _exec_recv_activations,
        ds_schedule.ForwardPass: _exec_forward_pass,
        ds_schedule.SendActivation: _exec_send_activations,
        ComputeLoss: _exec_compute_loss,
        ds_schedule.RecvGrad: _exec_recv_grads,
        ds_schedule.BackwardPass: _exec_backward_pass,
        ds_schedule.SendGrad: _exec_send_grads,
        ds_schedule.ReduceGrads: PipelineEngine._exec_reduce_grads,
        ds_schedule.OptimizerStep: PipelineEngine._exec_optimizer_step,
    }
