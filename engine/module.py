"""The layers of this rank's stage, as a DeepSpeed `PipelineModule`."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.backend.deepspeed import StageLayers
from engine.communication import Signature, empty_tensors, signature_of
from engine.compiling import compile_layer, compiling
from engine.layer_keys import layer_key
from engine.optimizer.locking import Trainable
from engine.optimizer.parameter_groups import (
    OptimizerGroups,
    Setting,
    groups_of_names,
    matrices_of,
)
from engine.topology import Stage, StageGraph

ALIGNED = 8  # elements of bf16 and fp16: the 16 bytes that kernels read at once

Contexts = tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]


class DescribesLayer(Protocol):
    """What the engine needs to know of a layer before it exists: its name, its parameters' shapes by
    their names in the run, which of these are tables of embeddings, and the layer on the meta
    device."""

    @property
    def name(self) -> str: ...

    @property
    def canonical_parameters(self) -> Mapping[str, Sequence[int]]: ...

    @property
    def tables(self) -> Collection[str]: ...

    @property
    def template(self) -> nn.Module: ...


class StageModule(StageLayers):
    """The layers of one stage. Builds only its own; `forward` takes and returns a dictionary of
    named tensors.

    Each layer draws its random numbers (dropout, stochastic depth) from a seed that is a function
    of the layer and of the micro-batch alone, so that training does not depend on how layers are
    split, and a resumed run draws the same again.
    """

    def __init__(
        self,
        graph: StageGraph,
        rank: int,
        layers: Mapping[str, Sequence[DescribesLayer]],
        build_layer: Callable[[Any], nn.Module],  # from what `layers` hold
        stage_group: Any,
        seed: int,
        settings: Mapping[str, Setting],
        trainable: Trainable,
        batch_norm_locked: bool = False,
        compiled: Collection[str] = (),
        shard_layer: Callable[[nn.Module], None] | None = None,
    ):
        """`settings`: of every parameter of the run, by canonical name
        (`engine/optimizer/parameter_groups.py`); `trainable`: which layers learn.

        `batch_norm_locked`: layers that do not learn normalise by their running statistics, and
        leave them as they are. `compiled`: branches whose layers run through torch.compile, each by
        itself. `shard_layer`: leaves a part of each layer on each replica, before the next is built
        (`engine/backend/fully_sharded.py`).
        """
        specs = [spec for branch in graph.branches for spec in layers[branch]]
        super().__init__(graph, rank, specs, stage_group, seed)
        # name -> [1] fp32: in the place of what layers make of rounded parameters
        self.exact_scalars: Mapping[str, Tensor] = {}
        self._micro_batch = 0, 0
        self._compiled = frozenset(compiled)
        self._choose_layers(graph, graph.stage_of(rank), trainable)
        self._build(build_layer, graph, trainable, batch_norm_locked, shard_layer)
        # shards have no collective for each group
        number = 0 if shard_layer else _most_groups(graph, layers, settings, trainable)
        self._group_parameters(settings, number)

    def _choose_layers(self, graph: StageGraph, stage: Stage, trainable: Trainable) -> None:
        offset, locked, self._own_indices = 0, [], []
        for branch in graph.branches:
            learned = [any(trainable[branch][: i + 1]) for i in range(len(trainable[branch]))]
            own = stage.layers.get(branch, ())
            locked += [offset + i for i in own if not learned[i]]
            self._own_indices += [offset + i for i in own if learned[i]]
            offset += len(learned)
        # What nothing learns in or before comes first, of all branches: no gradient enters there.
        self._own_indices, self.num_locked_first = locked + self._own_indices, len(locked)
        self._set_bounds(0, len(self._own_indices))

    def _build(
        self,
        build_layer: Callable[[Any], nn.Module],
        graph: StageGraph,
        trainable: Trainable,
        batch_norm_locked: bool,
        shard_layer: Callable[[nn.Module], None] | None,
    ) -> None:
        self._device = get_accelerator().device_name(self.local_rank)
        self._locked_norms: list[nn.Module] = []
        learns = [learns for branch in graph.branches for learns in trainable[branch]]
        branches = [branch for branch in graph.branches for _ in trainable[branch]]
        self._branches = [branches[index] for index in self._own_indices]  # of each layer
        for index in self._own_indices:
            spec = self._layer_specs[index]
            layer = build_layer(spec)
            if not learns[index]:
                layer.requires_grad_(False)
            if batch_norm_locked:
                still = _still_norms if learns[index] else _batch_norms
                self._locked_norms += still(layer)
            if branches[index] in self._compiled:
                compile_layer(layer)
            layer.to(self._device)
            if shard_layer:
                shard_layer(layer)
            self.forward_funcs.append(layer)
            self.add_module(spec.name.replace(".", "/"), layer)
            for parameter in layer.parameters():
                self.add_stage_parameter(parameter)
        self._draws = [bool(getattr(layer, "draws", True)) for layer in self.forward_funcs]
        self._scalars = [frozenset(getattr(layer, "scalars", ())) for layer in self.forward_funcs]

    def _group_parameters(self, settings: Mapping[str, Setting], number: int) -> None:
        """Make `parameter_groups`: the settings of each, and its parameters; at least `number`, as
        many on every stage where ZeRO-1 has collectives for each.

        Where a stage has fewer than another, a group holds a placeholder: one number that is never
        used, with a gradient of zero.
        """
        parameters = self.canonical_parameters
        # of two names the first
        own = {id(p): name for name, p in reversed(parameters.items()) if p.requires_grad}
        names = [name for name, p in parameters.items() if own.get(id(p)) == name]
        # In half precision DeepSpeed makes a group's parameters views of one tensor. Behind one of an
        # odd size, such as the logit scale, none is aligned, and products and norms with them take
        # the slow kernels: 1.2 times the whole step of a ViT-B/32 on an H200.
        names.sort(key=lambda name: parameters[name].numel() % ALIGNED != 0)
        self.parameter_groups = [
            (setting, [parameters[name] for name in members])
            for setting, members in groups_of_names(names, settings).items()
        ]
        self.placeholders = nn.ParameterList()
        for _ in range(len(self.parameter_groups), number):
            placeholder = nn.Parameter(torch.zeros(1, device=self._device))
            self.add_stage_parameter(placeholder)
            self.placeholders.append(placeholder)
            self.parameter_groups.append((Setting(1.0, 0.0, None), [placeholder]))
        if not self.parameter_groups:  # a schedule asks for one
            self.parameter_groups.append((Setting(1.0, 0.0, None), []))

    @property
    def canonical_parameters(self) -> dict[str, nn.Parameter]:
        """By their names in the run."""
        return {
            layer.canonical_names[name]: parameter
            for layer in self.forward_funcs
            for name, parameter in layer.named_parameters()
        }

    @property
    def templates(self) -> list[nn.Module]:
        """Of its layers, in the order in which they run."""
        return [self._layer_specs[index].template for index in self._own_indices]

    @property
    def scalars(self) -> dict[str, nn.Parameter]:
        """What the losses learn, of the layers that hold it, by the names of the tensors that they
        make of it."""
        return {
            name: layer.get_parameter(name)
            for layer, names in zip(self.forward_funcs, self._scalars)
            for name in names
        }

    @property
    def fusion(self) -> nn.Module | None:
        """What scores matching pairs, where a layer of this stage has it. The loss asks it, the
        forward does not."""
        return next(
            (
                layer.fusion
                for layer in self.forward_funcs
                if getattr(layer, "fusion", None) is not None
            ),
            None,
        )

    @property
    def learned_behind_layers(self) -> list[nn.Parameter]:
        """Parameters whose gradient may come when the backward of the layers is over."""
        return [*self.placeholders, *(self.fusion.parameters() if self.fusion else ())]

    def changing_buffers(self, branches: Collection[str] | None = None) -> list[Tensor]:
        """Buffers that training changes, of the layers of these branches or of all: batch
        normalisation's running means and variances, and its count of micro-batches."""
        return [
            buffer
            for layer, branch in zip(self.forward_funcs, self._branches)
            if branches is None or branch in branches
            for module in _batch_norms(layer)
            if module not in self._locked_norms
            for buffer in module.buffers()
        ]

    @property
    def canonical_buffers(self) -> dict[str, Tensor]:
        """Those that are part of the state. Asked anew each time: DeepSpeed puts others in their
        place when it moves or casts the module."""
        return {
            layer.canonical_names[name]: buffer
            for layer in self.forward_funcs
            for name, buffer in layer.named_buffers()
            if name in layer.canonical_names
        }

    def running_statistics(self) -> list[Tensor]:
        """Of these the means and variances."""
        return [buffer for buffer in self.changing_buffers() if buffer.is_floating_point()]

    def train(self, mode: bool = True) -> StageModule:
        super().train(mode)
        for module in self._locked_norms:
            module.eval()
        return self

    def seed_micro_batch(self, step: int, branch_micro_batch: int) -> None:
        """Fix the random numbers of the next forward: step and number of the micro-batch within the
        global batch."""
        self._micro_batch = step, branch_micro_batch

    def forward(
        self, tensors: dict[str, Tensor], start: int = 0, stop: int | None = None
    ) -> dict[str, Tensor]:
        """Run the layers from `start` to `stop`; with `activation_checkpoint_interval` k, k at a
        time keep their inputs only and run again in the backward; layers without a backward keep
        nothing as it is."""
        micro_batch, number = self._micro_batch, len(self.forward_funcs) if stop is None else stop
        if not (self.activation_checkpoint_interval and self.training and torch.is_grad_enabled()):
            return self._run(range(start, number), micro_batch, tensors)
        learning = max(start, min(self.num_locked_first, number))
        tensors = self._run(range(start, learning), micro_batch, tensors)

        def contexts(part: range) -> Contexts:
            """Of the forward, and of the one in the backward."""
            return contextlib.nullcontext(), self.statistics_untouched(part)

        for start in range(learning, number, self.activation_checkpoint_interval):
            part = range(start, min(start + self.activation_checkpoint_interval, number))
            # Not reentrant: exact for inputs without gradient too. The seeds make random state
            # equal, nothing needs to be saved.
            tensors = checkpoint(
                self._run,
                part,
                micro_batch,
                tensors,
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=partial(contexts, part),
            )
        return tensors

    def _run(
        self, part: range, micro_batch: tuple[int, int], tensors: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        with compiling() if self._compiled else contextlib.nullcontext():
            for i in part:
                if self._draws[i] and self.training:
                    torch.manual_seed(
                        layer_seed(self.base_seed, *micro_batch, self._own_indices[i])
                    )
                tensors = self.forward_funcs[i](tensors)
                for name in self.exact_scalars.keys() & self._scalars[i]:
                    made = tensors[name]  # whose gradient stays, beside a difference of 0
                    tensors[name] = self.exact_scalars[name] + (made - made.detach())
        return tensors

    @contextlib.contextmanager
    def statistics_untouched(self, part: range | None = None) -> Iterator[None]:
        """A forward in here is the same function as one outside, but leaves the buffers (running
        means) of the layers as they were."""
        layers = self.forward_funcs if part is None else self.forward_funcs[part.start : part.stop]
        buffers = [buffer for layer in layers for buffer in layer.buffers()]
        before = [buffer.clone() for buffer in buffers]
        try:
            yield
        finally:
            for buffer, value in zip(buffers, before):
                # .data: batch normalisation updates its buffers behind autograd's back as well,
                # other backwards still refer to them
                buffer.data.copy_(value)


class Outline:
    """Shapes and dtypes of what layers make, found on the meta device: no memory, no arithmetic.

    Each signature is looked at once, and only by one of several equal layers. `dtype`: that of the
    run, to which DeepSpeed casts the layers.
    """

    def __init__(self, templates: Sequence[nn.Module], dtype: torch.dtype):
        layers = nn.ModuleList(copy.deepcopy(list(templates))).to(dtype)
        self._layers = [(layer_key(layer), layer) for layer in layers]
        self._made: dict[tuple[str, Signature, bool], Signature] = {}

    @torch.no_grad()
    def signature(self, inputs: Signature, training: bool) -> Signature:
        """Of what the layers make of such inputs."""
        for key, layer in self._layers:
            given = key, inputs, training
            if given not in self._made:
                made = layer.train(training)(empty_tensors(inputs, "meta"))
                self._made[given] = signature_of(made)
            inputs = self._made[given]
        return inputs


def _batch_norms(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]


def _still_norms(layer: nn.Module) -> list[nn.Module]:
    """Of a layer of which only some parameters learn (adapters), the batch normalisations that do
    not learn themselves; of others none."""
    if all(parameter.requires_grad for parameter in layer.parameters()):
        return []
    return [
        norm
        for norm in _batch_norms(layer)
        if not any(parameter.requires_grad for parameter in norm.parameters())
    ]


def learned_parameters(spec: DescribesLayer) -> list[str]:
    """The canonical names of the parameters that learn where the layer does: all, or those that its
    template leaves trainable (adapters)."""
    names: Any = spec.template.canonical_names  # local name -> name in the run
    still = {
        names[local]
        for local, parameter in spec.template.named_parameters()
        if not parameter.requires_grad
    }
    return [name for name in spec.canonical_parameters if name not in still]


def num_muon(
    groups: OptimizerGroups,
    layers: Mapping[str, Sequence[DescribesLayer]],
    optimizer: Mapping[str, Any],
) -> dict[str, list[int]]:
    """By branch, of each layer the elements that Muon steps where the layer learns; 0 with another
    optimizer. Arguments and errors: as `settings_of`."""
    matrices = matrices_of(groups, layers, optimizer)
    return {
        branch: [
            sum(
                math.prod(spec.canonical_parameters[name])
                for name in (learned_parameters(spec) if matrices else ())
                if name in matrices
            )
            for spec in specs
        ]
        for branch, specs in layers.items()
    }


def _most_groups(
    graph: StageGraph,
    layers: Mapping[str, Sequence[DescribesLayer]],
    settings: Mapping[str, Setting],
    trainable: Trainable,
) -> int:
    """Of parameters, on the stage with the most; at least 1."""
    names = [
        [
            n
            for branch, own in stage.layers.items()
            for i in own
            if trainable[branch][i]
            for n in learned_parameters(layers[branch][i])
        ]
        for stage in graph.stages
    ]
    return max(1, *(len(groups_of_names(of_stage, settings)) for of_stage in names))


def layer_seed(seed: int, step: int, micro_batch: int, layer: int) -> int:
    """What a layer draws from: `micro_batch` counts within the global batch of a branch, `layer`
    over the layers of all branches."""
    return _mix(seed, step * 1_000_003 + micro_batch, layer)


def _mix(*values: int) -> int:
    """A 63-bit seed out of several numbers (splitmix64's finaliser, Steele et al. 2014), so that
    near inputs give far seeds."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1
