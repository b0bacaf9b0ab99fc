"""Layers of a traced model: the trace is cut before each block, where few tensors are alive.

    Trace ── where? ──> parts: what each computes, reads, makes ── bodies ──> layers, tried out

A block is a child of one of the model's lists of blocks, or a module that stands for itself and has
several weights. Neighbours become one layer where a cut between them is not possible: they share
weights, more than `MOST_TENSORS` tensors would travel, or the second changes its input in place.
A model that cannot be traced at all is one layer. `Partition.notes` says why.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.towers.layers import Layer
from models.towers.patches import kept_tokens
from models.towers.tracing.precision import run
from models.towers.tracing.trace import (
    LISTS,
    MODE,
    OTHER_SAMPLES,
    UNKNOWN,
    CannotRun,
    CannotTrace,
    Of,
    Root,
    Rows,
    Trace,
    in_short,
    is_tensor,
    memories,
    num_weights,
    number_of,
    traced,
)

log = logging.getLogger(__name__)

# That a layer hands to the next. A message between stages has room for the names of more.
MOST_TENSORS = 6


# -- layers


class TriedOut(Layer):
    """A layer whose training forward was run on the meta device and watched: `random` says whether
    it drew, exactly."""

    random = False

    @property
    def draws(self) -> bool:
        return self.random


class TracedLayer(TriedOut):
    """A part of a library's forward. `body` is the traced graph; its inputs are the tensors of
    `reads`, then the model's own tensors that no module of the part holds (`own_0`, `own_1`, ...),
    then whether it is training."""

    def __init__(
        self,
        body: fx.GraphModule,
        own: Sequence[tuple[Tensor, bool]],
        names: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]],
        unused: tuple[str, ...] = (),
    ) -> None:
        """`own`: tensors, and whether they are part of the state. `names`: `reads`, `makes` and
        `drops`; `unused` of `reads` are dropped here without being looked at."""
        super().__init__()
        self.body = body
        self.reads, self.makes, self.drops = names
        self.unused = unused
        self.num_own = len(own)
        for number, (tensor, kept) in enumerate(own):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(f"own_{number}", tensor)
            else:
                self.register_buffer(f"own_{number}", tensor, persistent=kept)
        self.only_size: tuple[int, int] | None = None
        self.prefix: int | None = None

    def let_leave_out_patches(self, prefix: int) -> None:
        """From now on leave out the patches of an image that are not in `kept_patches`. `prefix`:
        as in `kept_tokens`."""
        self.prefix, self.reads_if_given = prefix, ("kept_patches",)
        self.drops = (*self.drops, "kept_patches")

    def compute(
        self, *tensors: Tensor, kept_patches: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        used = [
            self._as_weights(name, tensor)
            for name, tensor in zip(self.reads, tensors, strict=True)
            if name not in self.unused
        ]
        own = (getattr(self, f"own_{number}") for number in range(self.num_own))
        made = run(self.body, *used, *own, self.training)
        if kept_patches is None or self.prefix is None:
            return made
        (tokens,) = made
        return kept_tokens(tokens, kept_patches, self.prefix)

    def _as_weights(self, name: str, tensor: Tensor) -> Tensor:
        if name != "pixel_values":
            return tensor
        if self.only_size not in (None, tensor.shape[-2:]):
            raise ValueError(
                f"pixel_values are {tuple(tensor.shape[-2:])} but the forward of this tower was "
                f"traced for images of {self.only_size}; give all images that size"
            )
        return tensor.to(next(self.parameters()).dtype)


@dataclass
class Partition:
    """A model as layers, in order, each with its name. `features`: the shape of what the last one
    makes, for `SAMPLES` rows; `unused`: the model's tensors that its forward does not use; `notes`:
    why it has fewer layers than blocks, a reason each."""

    layers: list[tuple[str, Layer]]
    features: tuple[int, ...]
    unused: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)


def partitioned(
    model: nn.Module,
    branch: str,
    given: tuple[str, Tensor],
    call: Callable[[nn.Module, Any], Tensor] = lambda model, tensor: model(tensor),
    leaf_functions: Sequence[Callable] = (),
    leaf_modules: tuple[type[nn.Module], ...] = (),
    drop_last: tuple[str, ...] = (),
) -> Partition:
    """The layers of `model` on the meta device, from the tensor `given` (its name, and an example
    of `SAMPLES` rows) to `{branch}_features`.

    `call` says what of the model is run. `leaf_functions`, `leaf_modules`: what the library says is
    not to be looked into. `drop_last`: names of tensors that the last layer drops unread. Raises
    CannotRun for an example that the model does not take.
    """
    name, example = given
    root = Root(model, call).train()
    notes: list[str] = []
    untouched = _Untouched(model)
    try:
        with torch.no_grad(), untouched:
            features = root(example)
        if not isinstance(features, Tensor):
            raise TypeError(f"it makes a {type(features).__name__}, and not one tensor")
    except Exception as error:  # whatever code of a library raises
        raise CannotRun(in_short(error)) from error
    try:
        with untouched:
            trace = traced(root, example, leaf_functions, leaf_modules, notes)
            return Partitioner(trace, branch, name, notes).partition(drop_last)
    except CannotTrace as error:
        notes.append(f"one layer: {error}")
        log.info("%s is kept as one layer: %s", type(model).__name__, error)
        root.train()
        whole = WholeLayer(root, branch, name, drop_last)
        with untouched:
            _try_out([whole], {name: _more(example)} | _unread(drop_last, example))
        return Partition([("model", whole)], tuple(features.shape), notes=notes)


class WholeLayer(TriedOut):
    """A model that could not be traced."""

    def __init__(self, root: Root, branch: str, given: str, unused: tuple[str, ...]) -> None:
        super().__init__()
        self.root = root
        self.reads = self.drops = (given, *unused)
        self.makes = (f"{branch}_features",)

    def compute(self, tensor: Tensor, *unused: Tensor) -> Tensor:
        if tensor.is_floating_point():
            tensor = tensor.to(next(self.parameters()).dtype)
        return run(self.root, tensor)


# -- the cut


class Together(Exception):
    """Layers from `first` to `last` must be one; `reason` says why."""

    def __init__(self, first: int, last: int, reason: str) -> None:
        self.first, self.last, self.reason = first, last, reason


@dataclass
class Part:
    """One layer while it is made. `nodes`: what it computes; `reads`: tensors made before it, in a
    fixed order; `makes`: tensors that later layers read, each with the number of the last."""

    name: str
    nodes: set[fx.Node] = field(default_factory=set)
    reads: dict[fx.Node, None] = field(default_factory=dict)
    makes: dict[fx.Node, int] = field(default_factory=dict)


class Partitioner:
    """Cuts a trace before each block, at the place where the fewest tensors are alive."""

    def __init__(self, trace: Trace, branch: str, given: str, notes: list[str]) -> None:
        self.trace, self.branch, self.given, self.notes = trace, branch, given, notes
        self._follow_changes()
        self.values, self.others = trace.values, trace.again(_more(trace.example))
        self.nodes = list(trace.graph.nodes)
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.model = trace.root.get_submodule("model")
        # parameters, and the buffers that are saved
        self.kept = {id(tensor) for tensor in self.model.state_dict(keep_vars=True).values()}
        (self.output,) = self.nodes[-1].args
        if not isinstance(self.output, fx.Node) or not is_tensor(self.values[self.output]):
            raise CannotTrace("it returns more than one tensor")
        self.of_input = self._of_input()
        self.of_weights = self._of_weights()
        self.constants = self._constants()

    def _follow_changes(self) -> None:
        """Where a tensor is changed in place (`mask.fill_(0)`), let what comes later read the
        result: the order of a graph follows from what reads what."""
        nodes, values = list(self.trace.graph.nodes), self.trace.values
        for i, node in enumerate(nodes):
            if node.op == "call_function" and node.target is operator.setitem:
                raise CannotTrace("its forward writes into a tensor")
            if not (node.op == "call_method" and node.target.strip("_") + "_" == node.target):
                continue
            changed, later = values[node.args[0]], set(nodes[i + 1 :])
            memory = changed.untyped_storage()._cdata
            for other in nodes[:i]:
                users = later.intersection(other.users)
                if users and memory in memories(values[other]):
                    if values[other] is not changed:
                        raise CannotTrace(
                            f"its forward changes a part of a tensor in place ({node.target})"
                        )
                    for user in users:
                        user.replace_input_with(other, node)

    def partition(self, drop_last: tuple[str, ...]) -> Partition:
        starts = self._starts()
        while True:
            try:
                parts = self._parts(starts)
                layers = self._layers(parts, drop_last)
                given = {self.given: _more(self.trace.example)}
                made = _try_out(layers, given | _unread(drop_last, self.trace.example))
                expected = self.others[self.output].shape
                found = made[f"{self.branch}_features"].shape
                if found != expected:
                    raise CannotTrace(f"cut, it makes {tuple(found)} and not {tuple(expected)}")
                break
            except Together as error:
                names = [starts[i][1] for i in range(error.first, error.last + 1)]
                self.notes.append(f"{names[0]} to {names[-1]} are one layer: {error.reason}")
                del starts[error.first + 1 : error.last + 1]
        owned = {id(t) for layer in layers for t in layer.state_dict(keep_vars=True).values()}
        unused = tuple(
            name
            for name, tensor in self.model.state_dict(keep_vars=True).items()
            if id(tensor) not in owned
        )
        return Partition(
            [(part.name, layer) for part, layer in zip(parts, layers)],
            tuple(self.values[self.output].shape),
            unused,
            self.notes,
        )

    # -- where

    def _starts(self) -> list[tuple[int, str]]:
        """The first node of each layer, and the layer's name: `stem`, the paths of the blocks,
        `pool` for what is behind the last one."""
        blocks = self._blocks()
        if not blocks:
            return [(0, "stem")]
        weighty = next(i for i, node in enumerate(self.nodes) if self._has_weights(node))
        if weighty == blocks[0]:  # what comes before the first block has no weights
            starts = [(0, self._path(blocks[0]))]
        else:
            first = self._narrowest(weighty + 1, blocks[0])
            starts = [(0, "stem"), (first, self._path(blocks[0]))]
        for before, block in zip(blocks, blocks[1:]):
            starts.append((self._narrowest(before + 1, block), self._path(block)))
        if blocks[-1] + 1 < len(self.nodes) - 1:
            starts.append((blocks[-1] + 1, "pool"))
        return starts

    def _blocks(self) -> list[int]:
        """Positions of modules in lists of blocks, and between these of others with several
        weights."""
        listed, others = [], []
        for i, node in enumerate(self.nodes):
            if node.op != "call_module":
                continue
            weights = num_weights(self.trace.root.get_submodule(node.target))
            parent = self.trace.root.get_submodule(node.target.rpartition(".")[0])
            if weights and isinstance(parent, LISTS):
                listed.append(i)
            elif weights > 1:
                others.append(i)
        if listed:
            others = [i for i in others if listed[0] < i < listed[-1]]
        return sorted(listed + others)

    def _path(self, position: int) -> str:
        return self.nodes[position].target.removeprefix("model.")

    def _has_weights(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return num_weights(self.trace.root.get_submodule(str(node.target))) > 0
        return (
            node.op == "get_attr"
            and isinstance(self.values[node], nn.Parameter)
            and not self.of_weights.issuperset(node.users)
        )

    def _narrowest(self, first: int, last: int) -> int:
        """Where between two nodes the fewest tensors are alive; of such places the last."""

        def alive(position: int) -> tuple[int, int]:
            tensors = [
                self.values[node]
                for node in self.nodes[:position]
                if node.op != "get_attr"
                and node not in self.constants
                and any(self.order[u] >= position for u in node.users if self._is_tensor(u))
                and self._is_tensor(node)
            ]
            return len(tree_leaves(tensors)), -position

        return min(range(first, last + 1), key=alive)

    def _is_tensor(self, node: fx.Node) -> bool:
        return node.op == "output" or any(map(is_tensor, tree_leaves(self.values[node])))

    # -- what each layer computes and reads

    def _of_input(self) -> set[fx.Node]:
        """What depends on the input, be it on its shape alone."""
        found = {self.nodes[0]}
        for node in self.nodes:
            if any(given in found for given in node.all_input_nodes):
                found.add(node)
        return found

    def _of_weights(self) -> set[fx.Node]:
        """Numbers and dtypes that are asked of parameters alone: a layer need not hold these."""
        weights = {
            node
            for node in self.nodes
            if node.op == "get_attr" and isinstance(self.values[node], nn.Parameter)
        }
        found: set[fx.Node] = set()
        for node in self.nodes:
            given = node.all_input_nodes
            of_weights = bool(given) and weights.union(found).issuperset(given)
            if of_weights and not self._is_tensor(node) and self._number(node) is not UNKNOWN:
                found.add(node)
        return found

    def _constants(self) -> set[fx.Node]:
        """Tensors that depend neither on the numbers of the input nor on what is learned, such as
        the angles of rotary positions: each layer that reads them computes them itself."""
        constants: set[fx.Node] = set()
        for node in self.nodes:
            if node.op == "get_attr":
                value = self.values[node]
                if isinstance(value, Tensor) and id(value) not in self.kept:
                    constants.add(node)
            elif node.all_input_nodes and self._is_tensor(node) and not self._has_state(node):
                fixed = all(
                    given in constants
                    or (not self._is_tensor(given) and self._number(given) is not UNKNOWN)
                    for given in node.all_input_nodes
                )
                if fixed and not self._is_random(node):
                    constants.add(node)
        return constants

    def _has_state(self, node: fx.Node) -> bool:
        """Does the node hold tensors that are trained or saved?"""
        return any(id(tensor) in self.kept for tensor in self._state(node))

    def _state(self, node: fx.Node) -> list[Tensor]:
        if node.op == "call_module":
            module = self.trace.root.get_submodule(str(node.target))
            return list(module.state_dict(keep_vars=True).values())
        return [self.values[node]] if node.op == "get_attr" else []

    def _is_random(self, node: fx.Node) -> bool:
        with _Watch() as watch:
            self.trace.compute(node, self.values, self.trace.example)
        return watch.random

    def _parts(self, starts: Sequence[tuple[int, str]]) -> list[Part]:
        """What each layer computes and reads, found from the output backwards. Raises Together for
        layers that cannot be apart."""
        parts = [Part(name) for _, name in starts]
        bounds = [start for start, _ in starts[1:]]
        self.layer_of = {
            node: sum(bound <= i for bound in bounds) for i, node in enumerate(self.nodes)
        }
        self.layer_of[self.nodes[0]] = -1  # the input is there before the first layer
        for node in self.nodes:  # of a tuple only what is read travels
            if node.target is operator.getitem and isinstance(node.args[1], int):
                if self._is_tensor(node) and not is_tensor(self.values[node.args[0]]):
                    self.layer_of[node] = self.layer_of[node.args[0]]
        # whether layers hold numbers that follow from the size of the images
        self.has_size = any(node in self.of_input for node, _, _ in self.trace.decided)
        self.until: dict[fx.Node, int] = {}  # of what travels, the last layer that reads it
        wanted = [(self.layer_of[self.output], self.output)]
        while wanted:
            number, node = wanted.pop()
            if node not in parts[number].nodes:
                parts[number].nodes.add(node)
                wanted += self._needs(node, number, parts[number])
        for node, last in self.until.items():
            if self.layer_of[node] >= 0:
                parts[self.layer_of[node]].makes[node] = last
        self._check_shared(parts)
        self._check_width(parts)
        for number, part in enumerate(parts):
            if not any(self.layer_of[node] == number for node in part.nodes):
                raise Together(max(0, number - 1), max(1, number), "one of them does nothing")
        return parts

    def _needs(self, node: fx.Node, number: int, part: Part) -> list[tuple[int, fx.Node]]:
        """What has to be computed for `node` in layer `number`, each with its layer; notes in
        `part` what that layer reads."""
        needs = []
        for given in node.all_input_nodes:
            is_mode = given.op == "placeholder" and given is not self.nodes[0]
            if is_mode or given in self.of_weights:  # an input of every layer; a number
                continue
            here = self.layer_of[given] == number or given.op == "get_attr"
            if here or given in self.constants:
                needs.append((number, given))
            elif self._is_tensor(given):
                self._check_travels(given, number)
                part.reads[given] = None
                self.until[given] = max(number, self.until.get(given, number))
                if self.layer_of[given] >= 0:
                    needs.append((self.layer_of[given], given))
            elif self._number(given) is UNKNOWN:
                raise Together(
                    self.layer_of[given], number, f"both need {given.name}, which is no tensor"
                )
            else:
                self.has_size |= given in self.of_input
        return needs

    def _check_travels(self, node: fx.Node, number: int) -> None:
        """Raise unless the value is a tensor, or a sequence of nothing else."""
        value = self.values[node]
        flat = value if isinstance(value, (tuple, list)) else [value]
        if not all(map(is_tensor, flat)):
            raise Together(
                self.layer_of[node], number, f"{node.name} is more than a sequence of tensors"
            )

    def _check_shared(self, parts: Sequence[Part]) -> None:
        owner: dict[int, int] = {}
        for number, part in enumerate(parts):
            for tensor in (tensor for node in part.nodes for tensor in self._state(node)):
                first = owner.setdefault(id(tensor), number)
                if id(tensor) in self.kept and first != number:
                    raise Together(first, number, "they share weights")

    def _check_width(self, parts: Sequence[Part]) -> None:
        for number in range(1, len(parts)):
            alive = [n for n in self.until if self.layer_of[n] < number <= self.until[n]]
            width = sum(len(self._flat(n)) for n in alive)
            if width > MOST_TENSORS:
                raise Together(number - 1, number, f"{width} tensors would travel between them")

    def _flat(self, node: fx.Node) -> list[Tensor]:
        value = self.values[node]
        return list(value) if isinstance(value, (tuple, list)) else [value]

    def _number(self, node: fx.Node) -> Any:
        """A value that is no tensor as a function of the number of rows; `UNKNOWN`: it is none."""
        return number_of(self.values[node], self.others[node])

    # -- layers

    def _layers(self, parts: Sequence[Part], drop_last: tuple[str, ...]) -> list[TracedLayer]:
        names = self._names(parts)
        layers = []
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            reads = [name for node in part.reads for name in names[node]]
            over = {
                name for node in part.reads if self.until[node] == number for name in names[node]
            }
            makes = (
                [f"{self.branch}_features"]
                if last
                else [name for node in part.makes for name in names[node]]
            )
            unused = drop_last if last else ()
            drops = [name for name in reads if name in over and name not in makes]
            tensors = (*reads, *unused), tuple(makes), (*drops, *unused)
            layers.append(TracedLayer(*self._body(part, last), tensors, unused))
        if self.has_size and self.given != "pixel_values":
            raise CannotTrace("its layers would be for inputs of one length")
        if self.has_size:
            height, width = self.trace.example.shape[-2:]
            layers[0].only_size = height, width
        return layers

    def _names(self, parts: Sequence[Part]) -> dict[fx.Node, tuple[str, ...]]:
        """Of every tensor that travels. Those that are read soonest are `{branch}_hidden`, one
        after the other, as the blocks of a chain hand on; others have the name of what made
        them."""
        names: dict[fx.Node, tuple[str, ...]] = {self.nodes[0]: (self.given,)}
        made = [
            (last - number, number, last, node)
            for number, part in enumerate(parts)
            for node, last in part.makes.items()
        ]
        hidden: list[tuple[int, int]] = []  # from which layer to which that name is taken
        for _, number, last, node in sorted(made, key=lambda each: (each[0], -self.order[each[3]])):
            free = all(last <= first or number >= end for first, end in hidden)
            if free and is_tensor(self.values[node]):
                names[node] = (f"{self.branch}_hidden",)
                hidden.append((number, last))
                continue
            base = f"{self.branch}_{node.name.removeprefix('model_')}"
            names[node] = (
                (base,)
                if is_tensor(self.values[node])
                else tuple(f"{base}_{i}" for i in range(len(self._flat(node))))
            )
        return names

    def _body(self, part: Part, last: bool) -> tuple[fx.GraphModule, list[tuple[Tensor, bool]]]:
        """The graph of a part. Modules have short names in it, so that equal blocks are equal."""
        graph = fx.Graph()
        env: dict[fx.Node, Any] = {}  # a node of the trace -> what stands for it here
        for node in part.reads:
            several = isinstance(self.values[node], (tuple, list))
            tensors = [
                graph.placeholder(f"given_{len(env)}_{i}") for i in range(len(self._flat(node)))
            ]
            env[node] = type(self.values[node])(tensors) if several else tensors[0]
        attributes = [n for n in self.nodes if n in part.nodes and n.op == "get_attr"]
        own = [(self.values[n], id(self.values[n]) in self.kept) for n in attributes]
        for i, node in enumerate(attributes):
            env[node] = graph.placeholder(f"own_{i}")
        mode = graph.placeholder(MODE)
        modules: dict[str, str] = {}
        holder = nn.Module()

        def moved(given: fx.Node) -> Any:
            if given in env:
                return env[given]
            if given.op == "placeholder":
                return mode
            return self._written(self._number(given), graph, env, part)

        for node in (n for n in self.nodes if n in part.nodes and n.op != "get_attr"):
            args, kwargs = map_arg((node.args, node.kwargs), moved)
            target = node.target
            if node.op == "call_module":
                module = self.trace.root.get_submodule(target)
                target = modules.setdefault(target, f"block_{len(modules)}")
                holder.add_module(target, module)
            env[node] = graph.create_node(node.op, target, args, kwargs)
        made: list[fx.Node] = []
        for node in [self.output] if last else part.makes:
            several = isinstance(self.values[node], (tuple, list))
            made += (
                [
                    graph.call_function(operator.getitem, (env[node], i))
                    for i in range(len(self._flat(node)))
                ]
                if several
                else [env[node]]
            )
        graph.output(tuple(made))
        return fx.GraphModule(holder, graph), own

    def _written(self, number: Any, graph: fx.Graph, env: Mapping, part: Part) -> Any:
        """A number that was made in an earlier layer, as an argument in the graph of this one: what
        follows the batch is asked of a tensor that it reads."""
        if isinstance(number, (tuple, list)):
            return type(number)(self._written(n, graph, env, part) for n in number)
        if not isinstance(number, (Of, Rows)):
            return number
        for node in env:
            value = self.values[node]
            if not is_tensor(value):
                continue
            if isinstance(number, Of):
                of_weights = isinstance(value, nn.Parameter) or node in part.reads
                if number.name == "device" or (of_weights and value.is_floating_point()):
                    return graph.call_function(getattr, (env[node], number.name))
            elif value.dim() and isinstance(
                rows := number_of(len(value), len(self.others[node])), Rows
            ):
                shape = graph.call_function(getattr, (env[node], "shape"))
                length = graph.call_function(operator.getitem, (shape, 0))
                times = graph.call_function(operator.mul, (length, number.times))
                return graph.call_function(operator.floordiv, (times, rows.times))
        raise CannotTrace(f"a layer needs the {number}, and reads no tensor that has it")


# -- trying out


class _Watch(TorchDispatchMode):
    """Was a random number drawn in here?"""

    def __init__(self) -> None:
        super().__init__()
        self.random = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


class _Untouched:
    """Gives modules back the tensors that they had: some keep a table that they make in the first
    forward, which would be one of the meta device."""

    def __init__(self, model: nn.Module) -> None:
        self._held = [(module, _held(module), dict(module._buffers)) for module in model.modules()]

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        for module, attributes, buffers in self._held:
            for name in _held(module).keys() - attributes.keys():
                delattr(module, name)
            vars(module).update(attributes)
            module._buffers.update(buffers)


def _held(module: nn.Module) -> dict[str, Any]:
    return {
        name: value for name, value in vars(module).items() if value is None or is_tensor(value)
    }


def _try_out(layers: Sequence[TriedOut], given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run the layers in training on the meta device: settles what draws, and raises `Together` for
    a layer that changes what it was given, and for one that reads a tensor from which no gradient
    comes back."""
    tensors = given
    for number, layer in enumerate(layers):
        before = {name: tensor._version for name, tensor in tensors.items()}
        with torch.no_grad(), _Watch() as watch:
            made = layer(tensors)
        changed = [name for name, version in before.items() if tensors[name]._version != version]
        if changed:
            if number == 0:
                raise CannotTrace(f"its forward changes {changed[0]} in place")
            raise Together(number - 1, number, "the second changes its input in place")
        unused = _without_gradient(layer, tensors) if number and len(layer.reads) > 1 else []
        if unused:
            makers = [i for i, each in enumerate(layers[:number]) if unused[0] in each.makes]
            raise Together(makers[-1], number, f"no gradient comes back to {unused[0]}")
        layer.random, tensors = watch.random, made
    return tensors


def _without_gradient(layer: Layer, tensors: Mapping[str, Tensor]) -> list[str]:
    """Which floating-point tensors that a layer reads have no part in what it makes: a stage owes a
    gradient for each that it receives."""
    given = {
        name: tensor.detach().requires_grad_(tensor.is_floating_point())
        for name, tensor in tensors.items()
    }
    with torch.enable_grad():
        made = layer(given)
    outputs = [made[name] for name in layer.makes if made[name].requires_grad]
    inputs = [name for name in layer.reads if given[name].requires_grad]
    gradients = torch.autograd.grad(
        outputs,
        [given[name] for name in inputs],
        [torch.empty_like(output) for output in outputs],
        allow_unused=True,
    )
    return [name for name, gradient in zip(inputs, gradients) if gradient is None]


def _more(example: Tensor) -> Tensor:
    """The example with `OTHER_SAMPLES` rows."""
    return torch.empty((OTHER_SAMPLES, *example.shape[1:]), dtype=example.dtype, device="meta")


def _unread(names: Iterable[str], example: Tensor) -> dict[str, Tensor]:
    """What is only dropped: of which shape does not matter."""
    return {name: _more(example) for name in names}
