"""Runs the instruction lists of `engine/schedule.py` with real tensors, on one stage.

Between two instructions a micro-batch is what lies in these buffers, by its number:

    LoadMicroBatch ─┐
    RecvActivation ─┴─> inputs ── ForwardPass ──> outputs ── SendActivation, ComputeLoss ──> roots
                          │                                                                    │
    SendGrad <────────────┴──────────────────── BackwardPass <── output_grads <── RecvGrad, ComputeLoss

Forward, backward and averages are the backend's (`engine/backend/`); the loss and what a step needs
besides are functions that the engine gives (`engine/executor.py`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from engine.backend.protocol import Backend
from engine.communication import (
    Announcement,
    Communicator,
    MessageKey,
    Signature,
    existing,
    gradients_of,
    signature_of,
)
from engine.loss.term_batch import MAX_WEIGHT
from engine.module import Outline, StageModule
from engine.schedule import (
    BackwardPass,
    BufferOpInstruction,
    ComputeLoss,
    EmbedPass,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReloadMicroBatch,
    ReplayPass,
    SendActivation,
    SendGrad,
    StageSchedule,
    receives_to_post,
)
from engine.streams import DeviceCopies

_OF_FUSION = ("_tokens", "_mask")  # how the names end of what the heads make for it

FromBytes = Callable[[Tensor, torch.dtype], Tensor]
"""Makes values of a dtype of what was loaded as uint8, on the device where that is; of a tensor on
the meta device an empty one."""


class StageCalls(NamedTuple):
    """What a runner asks of the engine."""

    # (outputs of micro-batches, the number of these where each has a loss of its own, losses of the
    # step) -> the gradients of what the layers made of each
    loss_gradients: Callable[
        [Sequence[Mapping[str, Tensor]], int | None, int], list[dict[str, Tensor]]
    ]
    step_optimizer: Callable[[], None]


class StageRunner:
    """Runs schedules on the stage of this rank."""

    def __init__(
        self,
        module: StageModule,
        comm: Communicator,
        backend: Backend,
        calls: StageCalls,
        from_bytes: Mapping[str, FromBytes],
    ):
        self.module, self.comm, self.stage = module, comm, comm.stage
        self.backend, self.calls = backend, calls
        self.running: tuple[StageSchedule, PipeInstruction] | None = None
        # of training and evaluation: while it grows, this rank is not stuck
        self.instructions_done = 0
        self._dtype, self._from_bytes = backend.dtype, from_bytes
        self._copies = DeviceCopies(comm.device)
        self._outline = Outline(module.templates, backend.dtype)
        self.reset()

    def reset(self) -> None:
        """Free all micro-batches."""
        self.data_wait_s = 0.0
        self.outputs: dict[int, dict[str, Tensor]] = {}
        self._inputs: dict[int, dict[str, Tensor]] = defaultdict(dict)
        self._kept: dict[int, dict[str, Tensor]] = {}  # in host memory, for a second forward
        self._roots: dict[int, dict[str, GradientEdge]] = {}  # of what was handed on
        self._output_grads: dict[int, dict[str, Tensor]] = {}
        # signatures of the activations along both edges
        self._received: dict[MessageKey, Signature] = {}
        self._sent: dict[MessageKey, Signature] = {}
        self._ahead: deque[dict[str, Tensor]] = deque()  # loaded for their shapes

    def run(self, schedule: StageSchedule, data: Iterator[Any] | None, step: int) -> None:
        """All instructions of one global batch. `data`: see `ForkEngine.train_batch`; `step`: what
        layers draw from, with the number of the micro-batch."""
        self.reset()
        self._data, self._step, self._num_micro_batches = data, step, schedule.micro_batches
        program = [instruction for instructions in schedule for instruction in instructions]
        backwards = [i for i in program if isinstance(i, BackwardPass)]
        self._last_backward = backwards[-1].buffer_id if backwards else None
        self._announce(program)
        for instruction, receives in zip(program, receives_to_post(program)):
            self.running = schedule, instruction
            for receive in receives:
                self._post(receive)
            arguments = instruction.kwargs
            with self.comm.recorder.span(instruction.name, arguments.get("buffer_id")):
                INSTRUCTIONS[type(instruction)](self, **arguments)
            self.instructions_done += 1
        self.running = None
        self.comm.drain()

    # -- messages

    def _announce(self, program: Sequence[PipeInstruction]) -> None:
        """Learn the signatures of all messages of a step, and tell the next stage what it will get.
        Raises RuntimeError where the stage before sends or receives in another order."""
        if self.stage.previous is not None:
            announced = self.comm.announced()
            self._received = announced.signatures
            self._check_order(announced.activations, program, RecvActivation)
            self._check_order(announced.gradients, program, SendGrad)
        if self.stage.next is not None:
            entering = self._received if self.stage.previous is not None else self._entering()
            self._sent = {
                key: self._outline.signature(tensors, self.module.training)
                for key, tensors in entering.items()
            }
            sends, receives = (_keys_of(program, kind) for kind in (SendActivation, RecvGrad))
            self.comm.announce(Announcement(self._sent, sends, receives))

    def _check_order(
        self,
        announced: Sequence[MessageKey],
        program: Sequence[PipeInstruction],
        kind: type[BufferOpInstruction],
    ) -> None:
        """A message carries no key: one of another micro-batch with the same shapes would be taken
        for it."""
        keys = _keys_of(program, kind)
        for number, (theirs, ours) in enumerate(zip_longest(announced, keys), start=1):
            if theirs != ours:
                raise RuntimeError(
                    f"{self.stage.name}: message {number} of {kind.__name__} is {ours or 'none'} "
                    f"here, and {theirs or 'none'} at the stage before; both must send and receive "
                    "in the same order, so check the `steps` of the schedule"
                )

    def _entering(self) -> dict[MessageKey, Signature]:
        """Of the micro-batches of a step that are loaded here, as they enter the layers."""
        number = self._num_micro_batches
        first = self._load() if number else []
        if isinstance(first, list):
            outlines = first
        else:
            self._ahead.extend([first, *(self._load() for _ in range(number - 1))])
            outlines = list(self._ahead)
        return {
            _key(m): signature_of(
                {name: self._cast(name, tensor.to("meta")) for name, tensor in outline.items()}
            )
            for m, outline in enumerate(outlines)
        }

    def _post(self, receive: PipeInstruction) -> None:
        key = _key(receive.buffer_id)
        if isinstance(receive, RecvActivation):
            existing(self.comm.activations_in).expect(key, self._received[key])
        else:
            known = gradients_of(self._sent[key], self.comm.objective, self.stage.trained)
            existing(self.comm.gradients_in).expect(key, known)

    def _receive_activations(self, buffer_id: int) -> None:
        received = existing(self.comm.activations_in).receive(_key(buffer_id))
        trained = self.comm.graph.trained_before(self.stage)
        for name, tensor in received.items():
            needs = (
                tensor.is_floating_point()
                and torch.is_grad_enabled()
                and self.comm.objective.branch_of(name) in trained
            )
            self._inputs[buffer_id][name] = tensor.requires_grad_(needs)

    def _send_activations(self, buffer_id: int) -> None:
        outputs = self.outputs.pop(buffer_id)
        key = _key(buffer_id)
        existing(self.comm.activations_out).send(key, outputs, self._sent[key])
        self._keep_roots(buffer_id, outputs)

    def _receive_gradients(self, buffer_id: int) -> None:
        self._output_grads[buffer_id] = existing(self.comm.gradients_in).receive(_key(buffer_id))

    def _send_gradients(self, buffer_id: int) -> None:
        received = self._inputs.pop(buffer_id)
        grads = {name: t.grad for name, t in received.items() if t.grad is not None}
        missing = [name for name in received if name not in grads]
        if missing:
            raise RuntimeError(
                f"{self.stage.name}: received {missing} but its layers made no gradient for them; "
                "drop tensors no layer uses"
            )
        key = _key(buffer_id)
        # in the order and the dtype of the activations: that is what the other side expects
        known = gradients_of(
            self._received[key], self.comm.objective, self.comm.graph.trained_before(self.stage)
        )
        existing(self.comm.gradients_out).send(
            key, {name: grads[name] for name, _, _ in known}, known
        )

    # -- input

    def _load_micro_batch(self, buffer_id: int, keep: bool = False) -> None:
        loaded = self._ahead.popleft() if self._ahead else self._load()
        _check_weights(loaded, self.comm.objective.names)
        if keep:
            self._kept[buffer_id] = loaded  # where the loader left it
        self._take_in(buffer_id, loaded)

    def _load(self) -> Any:
        if self._data is None:
            raise RuntimeError(f"{self.stage.name} loads micro-batches, and was given no data")
        clock = self.comm.recorder.clock
        asked = clock()
        loaded = next(self._data)
        self.data_wait_s += clock() - asked
        return loaded

    def _reload_micro_batch(self, buffer_id: int) -> None:
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
        if tensor.dtype == torch.uint8 and name in self._from_bytes:
            return self._from_bytes[name](tensor, self._dtype)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    # -- passes

    def _forward_pass(self, buffer_id: int) -> None:
        outputs = self._forward(buffer_id, self._inputs.pop(buffer_id))
        if self.stage.is_last and not self.module.training:  # what is evaluated are embeddings
            outputs = {
                name: tensor for name, tensor in outputs.items() if not name.endswith(_OF_FUSION)
            }
        self.outputs[buffer_id] = outputs

    def _forward(self, buffer_id: int, inputs: dict[str, Tensor], **part: int) -> dict[str, Tensor]:
        """Run the stage's layers, or a part of them; of the inputs stay those that a gradient is
        made for."""
        number = self.comm.replica * self._num_micro_batches + buffer_id
        self.module.seed_micro_batch(self._step, number)
        received = {
            name: tensor
            for name, tensor in inputs.items()
            if tensor.requires_grad and tensor.is_leaf
        }
        if received and torch.is_grad_enabled():
            self._inputs[buffer_id] = received
        return self.backend.forward(inputs, **part)

    @torch.no_grad()
    def _embed_pass(self, buffer_id: int) -> None:
        inputs = self._inputs.pop(buffer_id)
        locked = self._num_skipped_again
        if locked:
            inputs = self._forward(buffer_id, inputs, stop=locked)
        if self.stage.has_backward and self._keeps_what_layers_made:
            self._kept[buffer_id] = self._copies.keep(inputs)
        self.outputs[buffer_id] = self._forward(buffer_id, inputs, start=locked)

    def _replay_pass(self, buffer_id: int) -> None:
        with self.module.statistics_untouched():  # the first forward has updated them
            outputs = self._forward(
                buffer_id, self._inputs.pop(buffer_id), start=self._num_skipped_again
            )
        if self.stage.is_last:  # the loss has had them
            self._keep_roots(buffer_id, outputs)
        else:
            self.outputs[buffer_id] = outputs

    @property
    def _num_skipped_again(self) -> int:
        """Locked layers at the front, which a second forward skips; none where their inputs come
        again with others that need it."""
        return (
            self.module.num_locked_first
            if self.stage.previous is None or not self.stage.sends_gradients
            else 0
        )

    @property
    def _keeps_what_layers_made(self) -> bool:
        """For a second forward: of locked layers, here or on the stage above, whose output does not
        come again; else what was loaded."""
        return self._num_skipped_again > 0 or not self.stage.sends_gradients

    def _keep_roots(self, buffer_id: int, outputs: Mapping[str, Tensor]) -> None:
        """Where a backward begins. The values themselves are freed, unless the graph needs them."""
        roots = {
            name: get_gradient_edge(tensor)
            for name, tensor in outputs.items()
            if tensor.requires_grad
        }
        if roots:  # else no backward will ask for them
            self._roots[buffer_id] = roots

    def _backward_pass(self, buffer_id: int) -> None:
        roots, grads = self._roots.pop(buffer_id, {}), self._output_grads.pop(buffer_id)
        if not set(roots) <= set(grads):
            raise RuntimeError(
                f"{self.stage.name}: sent {sorted(roots)} and got gradients of "
                f"{sorted(grads)} for micro-batch {buffer_id}; every floating-point tensor that "
                "leaves a stage and needs a gradient must reach the loss"
            )
        self.backend.backward(
            [(root, grads[name]) for name, root in roots.items()],
            last=buffer_id == self._last_backward,
        )

    def _compute_loss(self, buffer_id: int | None = None) -> None:
        """One loss over everything that is waiting here: the global batch, or, with `buffer_id`, a
        micro-batch of each replica."""
        waiting = sorted(self.outputs)
        outputs = [self.outputs.pop(m) for m in waiting]
        num_losses = 1 if buffer_id is None else self._num_micro_batches
        gradients = self.calls.loss_gradients(outputs, buffer_id, num_losses)
        if self.stage.has_backward:
            for m, made, of_made in zip(waiting, outputs, gradients):
                self._output_grads[m] = of_made
                self._keep_roots(m, made)

    def _reduce_gradients(self) -> None:
        self.backend.reduce_gradients()

    def _step_optimizer(self) -> None:
        self.calls.step_optimizer()


INSTRUCTIONS: dict[type, Callable[..., None]] = {
    LoadMicroBatch: StageRunner._load_micro_batch,
    RecvActivation: StageRunner._receive_activations,
    ReloadMicroBatch: StageRunner._reload_micro_batch,
    EmbedPass: StageRunner._embed_pass,
    ForwardPass: StageRunner._forward_pass,
    ReplayPass: StageRunner._replay_pass,
    SendActivation: StageRunner._send_activations,
    ComputeLoss: StageRunner._compute_loss,
    RecvGrad: StageRunner._receive_gradients,
    BackwardPass: StageRunner._backward_pass,
    SendGrad: StageRunner._send_gradients,
    ReduceGrads: StageRunner._reduce_gradients,
    OptimizerStep: StageRunner._step_optimizer,
}


def _key(buffer_id: int) -> MessageKey:
    """A rank has one slice of its branches."""
    return MessageKey(stage_slice=0, micro_batch=buffer_id)


def _keys_of(
    program: Sequence[PipeInstruction], kind: type[BufferOpInstruction]
) -> list[MessageKey]:
    """Of the messages that the instructions of this kind send or receive, in their order."""
    return [_key(each.buffer_id) for each in program if isinstance(each, kind)]


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
