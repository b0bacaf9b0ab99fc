"""Any library's model as layers: its forward is recorded by torch.fx with the library's own blocks
as single steps, and the record is cut before each block.

    model on the meta device ── record ──> graph of blocks ── cut where few tensors are alive ──> layers

No architecture is named here. A block is a child of one of the model's lists of blocks
(`nn.Sequential`, `nn.ModuleList`), or a module that stands for itself and has several weights. What
cannot be recorded stays whole: the module becomes a block, and at worst the model one layer.
`Recipe.notes` says so.
"""

from __future__ import annotations

import logging
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from models.towers.layers import Layer

log = logging.getLogger(__name__)

MOST_TENSORS = (
    6  # that a layer hands to the next; a message between stages has room for their names
)
LISTS = (nn.Sequential, nn.ModuleList)
# Two sizes of the batch: what differs between them follows the batch, what does not is a constant.
SAMPLES, OTHER_SAMPLES = 2, 3
MODE = "training"  # the input of a record that says whether it is training


class CannotRecord(Exception):
    """Why a model, or a module of it, cannot be recorded."""


class CannotRun(Exception):
    """Why a model does not take the example: what its forward raised."""


# -- layers


class RecordedLayer(Layer):
    """A part of a library's forward. `body` is the recorded graph; its inputs are the tensors of
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
        self.random = False  # settled by `_try_out`
        self.only_size: tuple[int, int] | None = None

    @property
    def draws(self) -> bool:
        """Known exactly: its training forward was run on the meta device and watched."""
        return self.random

    def compute(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        used = [
            self._as_weights(name, tensor)
            for name, tensor in zip(self.reads, tensors, strict=True)
            if name not in self.unused
        ]
        own = (getattr(self, f"own_{number}") for number in range(self.num_own))
        return self.body(*used, *own, self.training)

    def _as_weights(self, name: str, tensor: Tensor) -> Tensor:
        if name != "pixel_values":
            return tensor
        if self.only_size not in (None, tensor.shape[-2:]):
            raise ValueError(
                f"pixel_values are {tuple(tensor.shape[-2:])} but the forward of this tower was "
                f"recorded for images of {self.only_size}; give all images that size"
            )
        return tensor.to(next(self.parameters()).dtype)


@dataclass
class Recipe:
    """A model as layers, in order, each with its name. `features`: the shape of what the last one
    makes, for `SAMPLES` rows; `unused`: the model's tensors that its forward does not use; `notes`:
    why it has fewer layers than blocks, a reason each."""

    layers: list[tuple[str, Layer]]
    features: tuple[int, ...]
    unused: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)


def record_layers(
    model: nn.Module,
    branch: str,
    given: tuple[str, Tensor],
    call: Callable[[nn.Module, Any], Tensor] = lambda model, tensor: model(tensor),
    leaf_functions: Sequence[Callable] = (),
    leaf_modules: tuple[type[nn.Module], ...] = (),
    drop_last: tuple[str, ...] = (),
) -> Recipe:
    """The layers of `model` on the meta device, from the tensor `given` (its name, and an example
    of `SAMPLES` rows) to `{branch}_features`.

    `call` says what of the model is run. `leaf_functions`, `leaf_modules`: what the library says is
    not to be looked into. `drop_last`: names of tensors that the last layer drops unread. Raises
    CannotRun for an example that the model does not take.
    """
    name, example = given
    root, notes = _Root(model, call).train(), []
    try:
        with torch.no_grad():
            features = root(example)
        if not isinstance(features, Tensor):
            raise TypeError(f"it makes a {type(features).__name__}, and not one tensor")
    except Exception as error:  # whatever code of a library raises
        raise CannotRun(_in_short(error)) from error
    try:
        tape = _recorded(root, example, leaf_functions, leaf_modules, notes)
        return _Cutter(tape, branch, name, notes).recipe(drop_last)
    except CannotRecord as error:
        notes.append(f"one layer: {error}")
        log.info("%s is kept as one layer: %s", type(model).__name__, error)
        root.train()
        whole = _Whole(root, branch, name, drop_last)
        _try_out([whole], {name: _more(example)} | _unread(drop_last, example))
        return Recipe([("model", whole)], tuple(features.shape), notes=notes)


class _Whole(Layer):
    """A model that could not be recorded."""

    def __init__(self, root: _Root, branch: str, given: str, unused: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.call = root.model, root.call
        self.reads = self.drops = (given, *unused)
        self.makes = (f"{branch}_features",)
        self.random = False

    @property
    def draws(self) -> bool:
        return self.random

    def compute(self, tensor: Tensor, *unused: Tensor) -> Tensor:
        if tensor.is_floating_point():
            tensor = tensor.to(next(self.parameters()).dtype)
        return self.call(self.model, tensor)


# -- the record


class _Root(nn.Module):
    """A model, and what is called of it."""

    def __init__(self, model: nn.Module, call: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, given: Any) -> Any:
        return self.call(self.model, given)


class _Value(fx.Proxy):
    """A proxy that knows its value on the meta device, so that Python code may ask for a length or
    decide by a shape. What was asked is noted: it must not depend on the batch."""

    @property
    def value(self) -> Any:
        return self.tracer.values[self.node]

    def __getattr__(self, name: str) -> _Attribute:
        return _Attribute(self, name)

    def _decided(self, kind: Callable[[Any], Any]) -> Any:
        result = kind(self.value)
        self.tracer.decided.append((self.node, kind, result))
        return result

    def __bool__(self) -> bool:
        return self._decided(bool)

    def __int__(self) -> int:
        return self._decided(int)

    def __index__(self) -> int:
        return self._decided(operator.index)

    def __float__(self) -> float:
        return self._decided(float)

    def __len__(self) -> int:
        return len(self.value)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))


class _Attribute(_Value):
    """An attribute of a proxy; recorded when it is used and not when it is called, as fx's own."""

    def __init__(self, root: _Value, name: str) -> None:
        self.root, self.attr, self.tracer, self._node = root, name, root.tracer, None

    @property
    def node(self) -> fx.Node:
        if self._node is None:
            made = self.tracer.create_proxy("call_function", getattr, (self.root, self.attr), {})
            self._node = made.node
        return self._node

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tracer.create_proxy("call_method", self.attr, (self.root, *args), kwargs)


class _Tape(fx.Tracer):
    """Records a root's forward and computes it on the meta device at the same time.

    `values`: of every node; `decided`: what Python code asked of them, and the answers; `inside`:
    the module whose forward was being recorded when something failed.
    """

    proxy_buffer_attributes = True

    def __init__(
        self,
        example: Tensor,
        leaf_functions: Sequence[Callable],
        is_block: Callable[[nn.Module, str], bool],
    ) -> None:
        super().__init__(autowrap_functions=tuple(leaf_functions))
        self.example, self._is_block = example, is_block
        self.values: dict[fx.Node, Any] = {}
        self.decided: list[tuple[fx.Node, Callable[[Any], Any], Any]] = []
        self.inside: str | None = None
        self._computing = False

    def record(self, root: _Root) -> _Tape:
        self.trace(root)
        return self

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self._is_block(m, module_qualified_name)

    def proxy(self, node: fx.Node) -> _Value:
        return _Value(node, self)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if self._computing:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(self, m: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> Any:
        if self._computing:
            return forward(*args, **kwargs)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            if self.inside is None:
                self.inside = self.path_of_module(m)
            raise

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor) and a not in self.tensor_attrs:
            raise CannotRecord("its forward makes a tensor of numbers that no input decides")
        return super().create_arg(a)

    def create_proxy(
        self,
        kind: str,
        target: Any,
        args: tuple,
        kwargs: dict,
        name: str | None = None,
        type_expr: Any = None,
        proxy_factory_fn: Any = None,
    ) -> Any:
        proxy = super().create_proxy(kind, target, args, kwargs, name, type_expr)
        value = self.values[proxy.node] = self.compute(proxy.node, self.values, self.example)
        return None if value is None else proxy

    def compute(self, node: fx.Node, values: Mapping[fx.Node, Any], example: Tensor) -> Any:
        """The value of a node, from those of the nodes before it."""
        args, kwargs = map_arg((node.args, node.kwargs), lambda one: values[one])
        self._computing = True
        try:
            if node.op == "placeholder":
                return True if node.target == MODE else example
            if node.op == "get_attr":
                return operator.attrgetter(node.target)(self.root)
            if node.op == "call_module":
                return self.root.get_submodule(node.target)(*args, **kwargs)
            if node.op == "call_method":
                return getattr(args[0], node.target)(*args[1:], **kwargs)
            return node.target(*args, **kwargs) if node.op == "call_function" else args[0]
        finally:
            self._computing = False

    def again(self, example: Tensor) -> dict[fx.Node, Any]:
        """The values for another example. Raises CannotRecord where Python code would decide
        otherwise for it."""
        values: dict[fx.Node, Any] = {}
        for node in self.graph.nodes:
            values[node] = self.compute(node, values, example)
        for node, kind, answer in self.decided:
            if kind(values[node]) != answer:
                raise CannotRecord("what its forward does depends on the number of images")
        return values


def _recorded(
    root: _Root,
    example: Tensor,
    leaf_functions: Sequence[Callable],
    leaf_modules: tuple[type[nn.Module], ...],
    notes: list[str],
) -> _Tape:
    """The record for training, in which what is other in evaluation asks whether it is training.
    Modules whose forward cannot be recorded become blocks, one after the other."""
    closed: set[str] = set()
    chains = not _holds_blocks(root.model)

    def is_block(module: nn.Module, path: str) -> bool:
        if path == "model":
            return False
        return path in closed or isinstance(module, leaf_modules) or not _is_opened(module, chains)

    while True:
        tapes = []
        try:
            for training in (True, False):
                tape = _Tape(example, leaf_functions, is_block)
                tapes.append(tape)
                with torch.no_grad():
                    tape.record(root.train(training))
            return _both_ways(*tapes)
        except Exception as error:  # whatever code of a library raises
            inside = tapes[-1].inside
            if inside in (None, "model"):
                raise (
                    error
                    if isinstance(error, CannotRecord)
                    else CannotRecord(f"{type(error).__name__}: {error}")
                ) from error
            closed.add(inside)
            notes.append(f"{inside.removeprefix('model.')} is one block: {_in_short(error)}")
        finally:
            root.train()


def _in_short(error: Exception) -> str:
    text = str(error) if isinstance(error, CannotRecord) else f"{type(error).__name__}: {error}"
    return text if len(text) < 160 else f"{text[:157]}..."


def _both_ways(training: _Tape, evaluation: _Tape) -> _Tape:
    """The record of training, with the places in it where evaluation has False instead of True
    (`F.dropout(..., training=self.training)`) following the layer's mode."""
    ours, theirs = list(training.graph.nodes), list(evaluation.graph.nodes)
    there = dict(zip(theirs, ours))
    if [(n.op, n.target) for n in ours] != [(n.op, n.target) for n in theirs]:
        raise CannotRecord("its forward takes other steps in training than in evaluation")
    mode = None
    for mine, other in zip(ours, theirs):
        if (mine.args, mine.kwargs) == map_arg((other.args, other.kwargs), lambda n: there[n]):
            continue
        leaves, spec = tree_flatten((mine.args, mine.kwargs), is_leaf=_is_slice)
        others = tree_leaves(
            map_arg((other.args, other.kwargs), lambda n: there[n]), is_leaf=_is_slice
        )
        for i, (leaf, at_evaluation) in enumerate(zip(leaves, others)):
            if leaf is True and at_evaluation is False:
                if mode is None:
                    with training.graph.inserting_before(ours[1]):
                        mode = training.graph.placeholder(MODE)
                    training.values[mode] = True
                leaves[i] = mode
            elif leaf != at_evaluation:
                raise CannotRecord("its forward has other numbers in training than in evaluation")
        mine.args, mine.kwargs = tree_unflatten(leaves, spec)
    return training


def _is_slice(value: Any) -> bool:
    return isinstance(value, slice)


# -- the cut


class _Together(Exception):
    """Layers from `first` to `last` must be one; `reason` says why."""

    def __init__(self, first: int, last: int, reason: str) -> None:
        self.first, self.last, self.reason = first, last, reason


@dataclass
class _Part:
    """One layer while it is made. `nodes`: what it computes; `reads`: tensors made before it, in
    the order in which they are first read; `until`: number of the last layer that reads them."""

    name: str
    nodes: set[fx.Node] = field(default_factory=set)
    reads: dict[fx.Node, None] = field(default_factory=dict)
    makes: dict[fx.Node, int] = field(default_factory=dict)


class _Cutter:
    """Cuts a record before each block, at the place where the fewest tensors are alive."""

    def __init__(self, tape: _Tape, branch: str, given: str, notes: list[str]) -> None:
        self.tape, self.branch, self.given, self.notes = tape, branch, given, notes
        self._follow_changes()
        self.values, self.others = tape.values, tape.again(_more(tape.example))
        self.nodes = list(tape.graph.nodes)
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.model = tape.root.get_submodule("model")
        self.kept = {
            id(tensor) for tensor in self.model.state_dict(keep_vars=True).values()
        }  # parameters and the buffers that are saved
        (self.output,) = self.nodes[-1].args
        self._check()
        self.of_input = self._of_input()
        self.of_weights = self._of_weights()
        self.constants = self._constants()

    def _check(self) -> None:
        if not isinstance(self.output, fx.Node) or not isinstance(self.values[self.output], Tensor):
            raise CannotRecord("it returns more than one tensor")

    def _follow_changes(self) -> None:
        """Where a tensor is changed in place and the result thrown away (`mask.fill_(0)`), let what
        comes later read the result: the order of a graph follows from what reads what."""
        nodes, values = list(self.tape.graph.nodes), self.tape.values
        for i, node in enumerate(nodes):
            if node.users or node.op not in ("call_method", "call_function"):
                continue
            if node.target is operator.setitem:
                raise CannotRecord("its forward writes into a tensor")
            if not (node.op == "call_method" and node.target.strip("_") + "_" == node.target):
                continue
            changed = node.args[0]
            memory = values[changed].untyped_storage()._cdata
            for other in nodes[:i]:
                later = any(user in nodes[i + 1 :] for user in other.users)
                if other is not changed and later and memory in _memories(values[other]):
                    raise CannotRecord(f"its forward changes a part of a tensor ({node.target})")
            for user in [user for user in changed.users if user in nodes[i + 1 :]]:
                user.replace_input_with(changed, node)

    def recipe(self, drop_last: tuple[str, ...]) -> Recipe:
        starts = self._starts()
        while True:
            try:
                parts = self._parts(starts)
                layers = self._layers(parts, drop_last)
                given = {self.given: _more(self.tape.example)}
                made = _try_out(layers, given | _unread(drop_last, self.tape.example))
                expected = self.others[self.output].shape
                found = made[f"{self.branch}_features"].shape
                if found != expected:
                    raise CannotRecord(f"cut, it makes {tuple(found)} and not {tuple(expected)}")
                break
            except _Together as error:
                names = [starts[i][1] for i in range(error.first, error.last + 1)]
                self.notes.append(f"{names[0]} to {names[-1]} are one layer: {error.reason}")
                del starts[error.first + 1 : error.last + 1]
        owned = {id(t) for layer in layers for t in layer.state_dict(keep_vars=True).values()}
        unused = tuple(
            name
            for name, tensor in self.model.state_dict(keep_vars=True).items()
            if id(tensor) not in owned
        )
        return Recipe(
            [(part.name, layer) for part, layer in zip(parts, layers)],
            tuple(self.values[self.output].shape),
            unused,
            self.notes,
        )

    # -- where

    def _starts(self) -> list[tuple[int, str]]:
        """The first node of each layer, and the layer's name."""
        blocks, listed = [], []
        for i, node in enumerate(self.nodes):
            if node.op != "call_module":
                continue
            path = node.target
            in_list = isinstance(self.tape.root.get_submodule(path.rpartition(".")[0]), LISTS)
            weights = _num_weights(self.tape.root.get_submodule(path))
            if weights and in_list:
                listed.append(i)
            if weights > 1 or (weights and in_list):
                blocks.append(i)
        if listed:
            blocks = [i for i in blocks if listed[0] <= i <= listed[-1]]
        weighty = [i for i, node in enumerate(self.nodes) if self._has_weights(node)]
        if blocks and weighty[0] == blocks[0]:
            starts = [(0, self._path(blocks[0]))]
        else:
            starts = [(0, "stem")]
            if blocks:
                starts.append((self._narrowest(weighty[0] + 1, blocks[0]), self._path(blocks[0])))
        for before, block in zip(blocks, blocks[1:]):
            starts.append((self._narrowest(before + 1, block), self._path(block)))
        if blocks and blocks[-1] + 1 < len(self.nodes) - 1:
            starts.append((blocks[-1] + 1, "pool"))
        return starts

    def _path(self, position: int) -> str:
        return self.nodes[position].target.removeprefix("model.")

    def _has_weights(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return _num_weights(self.tape.root.get_submodule(node.target)) > 0
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
        return node.op == "output" or any(map(_is_tensor, tree_leaves(self.values[node])))

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
            if given and not self._is_tensor(node) and weights.union(found).issuperset(given):
                if self._number(node) is not _UNKNOWN:
                    found.add(node)
        return found

    def _constants(self) -> set[fx.Node]:
        """Tensors that depend neither on the input nor on what is learned, such as the angles of
        rotary positions: each layer that reads them computes them itself."""
        constants: set[fx.Node] = set()
        for node in self.nodes:
            if node.op == "get_attr":
                value = self.values[node]
                if isinstance(value, Tensor) and id(value) not in self.kept:
                    constants.add(node)
            elif node.op in ("call_function", "call_method", "call_module"):
                if not self._is_tensor(node) or not node.all_input_nodes:
                    continue
                if node.op == "call_module" and any(
                    id(t) in self.kept
                    for t in self.tape.root.get_submodule(node.target)
                    .state_dict(keep_vars=True)
                    .values()
                ):
                    continue
                fixed = all(
                    given in constants
                    or (not self._is_tensor(given) and self._number(given) is not _UNKNOWN)
                    for given in node.all_input_nodes
                )
                if fixed and not self._is_random(node):
                    constants.add(node)
        return constants

    def _is_random(self, node: fx.Node) -> bool:
        with _Watch() as watch:
            self.tape.compute(node, self.values, self.tape.example)
        return watch.random

    def _parts(self, starts: Sequence[tuple[int, str]]) -> list[_Part]:
        parts = [_Part(name) for _, name in starts]
        # whether layers hold numbers that follow from the size of the images
        self.has_size = any(node in self.of_input for node, _, _ in self.tape.decided)
        bounds = [start for start, _ in starts[1:]]
        self.layer_of = {
            node: sum(bound <= i for bound in bounds) for i, node in enumerate(self.nodes)
        }
        self.layer_of[self.nodes[0]] = -1  # the input is there before the first layer
        until: dict[fx.Node, int] = {}
        wanted = [(self.layer_of[self.output], self.output)]
        while wanted:
            number, node = wanted.pop()
            part = parts[number]
            if node in part.nodes:
                continue
            part.nodes.add(node)
            for given in node.all_input_nodes:
                if given.op == "placeholder" and given is not self.nodes[0]:
                    continue  # the mode
                if given in self.of_weights:
                    continue  # written as a number
                here = self.layer_of[given] == number
                if given.op == "get_attr" or here or given in self.constants:
                    wanted.append((number, given))
                elif self._is_tensor(given):
                    self._check_travels(given, number)
                    part.reads[given] = None
                    until[given] = max(number, until.get(given, number))
                    if self.layer_of[given] >= 0:
                        wanted.append((self.layer_of[given], given))
                elif self._number(given) is _UNKNOWN:
                    raise _Together(
                        self.layer_of[given], number, f"both need {given.name}, which is no tensor"
                    )
                else:
                    self.has_size |= given in self.of_input
        for node, last in until.items():
            if self.layer_of[node] >= 0:
                parts[self.layer_of[node]].makes[node] = last
        self._check_shared(parts)
        self._check_width(parts, until)
        self.until = until
        for number, part in enumerate(parts):
            if not any(self.layer_of[node] == number for node in part.nodes):
                raise _Together(max(0, number - 1), max(1, number), "nothing is left in it")
        return parts

    def _check_travels(self, node: fx.Node, number: int) -> None:
        """Raise unless the value is a tensor, or a sequence of nothing else."""
        value = self.values[node]
        flat = value if isinstance(value, (tuple, list)) else [value]
        if not all(map(_is_tensor, flat)):
            raise _Together(
                self.layer_of[node], number, f"{node.name} is more than a sequence of tensors"
            )

    def _check_shared(self, parts: Sequence[_Part]) -> None:
        owner: dict[int, int] = {}
        for number, part in enumerate(parts):
            for node in part.nodes:
                if node.op == "call_module":
                    module = self.tape.root.get_submodule(node.target)
                    tensors = list(module.state_dict(keep_vars=True).values())
                else:
                    tensors = [self.values[node]] if node.op == "get_attr" else []
                for tensor in tensors:
                    first = owner.setdefault(id(tensor), number)
                    if id(tensor) in self.kept and first != number:
                        raise _Together(
                            min(first, number), max(first, number), "they share weights"
                        )

    def _check_width(self, parts: Sequence[_Part], until: Mapping[fx.Node, int]) -> None:
        for number in range(1, len(parts)):
            alive = [n for n in until if self.layer_of[n] < number <= until[n]]
            width = sum(len(self._flat(n)) for n in alive)
            if width > MOST_TENSORS:
                raise _Together(number - 1, number, f"{width} tensors would travel between them")

    def _flat(self, node: fx.Node) -> list[Tensor]:
        value = self.values[node]
        return list(value) if isinstance(value, (tuple, list)) else [value]

    def _number(self, node: fx.Node) -> Any:
        """A value that is no tensor as a function of the number of rows; `_UNKNOWN`: it is none."""
        return _number_of(self.values[node], self.others[node])

    # -- layers

    def _layers(self, parts: Sequence[_Part], drop_last: tuple[str, ...]) -> list[RecordedLayer]:
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
            layers.append(RecordedLayer(*self._body(part, last), tensors, unused))
        if self.has_size and self.given != "pixel_values":
            raise CannotRecord("its layers would be for inputs of one length")
        if self.has_size:
            layers[0].only_size = self.tape.example.shape[-2:]
        return layers

    def _names(self, parts: Sequence[_Part]) -> dict[fx.Node, tuple[str, ...]]:
        """Of every tensor that travels. The one that is read for the last time first is
        `{branch}_hidden`, as the blocks of a chain hand on; others have the name of what made
        them."""
        names = {self.nodes[0]: (self.given,)}
        holder = -1  # the last layer that reads the present `hidden`
        for number, part in enumerate(parts):
            new = sorted(part.makes, key=lambda node: (part.makes[node], -self.order[node]))
            for node in new:
                if (
                    len(self._flat(node)) == 1
                    and _is_tensor(self.values[node])
                    and holder <= number
                ):
                    names[node], holder = (f"{self.branch}_hidden",), part.makes[node]
                    continue
                base = f"{self.branch}_{node.name.removeprefix('model_').removeprefix('l__')}"
                several = isinstance(self.values[node], (tuple, list))
                names[node] = (
                    tuple(f"{base}_{i}" for i in range(len(self._flat(node))))
                    if several
                    else (base,)
                )
        return names

    def _body(self, part: _Part, last: bool) -> tuple[fx.GraphModule, list[tuple[Tensor, bool]]]:
        """The graph of a part. Modules have short names in it, so that equal blocks are equal."""
        graph, env = fx.Graph(), {}
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
        modules, holder = {}, nn.Module()

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
                module = self.tape.root.get_submodule(target)
                target = modules.setdefault(target, f"block_{len(modules)}")
                holder.add_module(target, module)
            env[node] = graph.create_node(node.op, target, args, kwargs)
        made = []
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

    def _written(self, number: Any, graph: fx.Graph, env: Mapping, part: _Part) -> Any:
        """A number that was made in an earlier layer, as an argument in the graph of this one: what
        follows the batch is asked of a tensor that it reads."""
        if isinstance(number, (tuple, list)):
            return type(number)(self._written(n, graph, env, part) for n in number)
        if not isinstance(number, (_Of, _Rows)):
            return number
        for node in env:
            value = self.values[node]
            if not _is_tensor(value):
                continue
            of_weights = isinstance(value, nn.Parameter) or node in part.reads
            if isinstance(number, _Of) and (
                number.name == "device" or (of_weights and value.is_floating_point())
            ):
                return graph.call_function(getattr, (env[node], number.name))
            if isinstance(number, _Rows) and (
                value.shape[:1] == (SAMPLES,) and self.others[node].shape[:1] == (OTHER_SAMPLES,)
            ):
                shape = graph.call_function(getattr, (env[node], "shape"))
                rows = graph.call_function(operator.getitem, (shape, 0))
                return graph.call_function(operator.mul, (rows, number.times))
        raise CannotRecord(f"{number} is needed where no tensor has it")


# -- numbers that follow from shapes


_UNKNOWN = object()


@dataclass(frozen=True)
class _Rows:
    """So many times the number of rows."""

    times: int


@dataclass(frozen=True)
class _Of:
    """The dtype or the device of a tensor that is at hand."""

    name: str


def _number_of(value: Any, other: Any) -> Any:
    """What two examples, of `SAMPLES` and `OTHER_SAMPLES` rows, say about a value."""
    if isinstance(value, torch.device):
        return _Of("device")
    if isinstance(value, torch.dtype):
        return _Of("dtype") if value == torch.float32 else value
    if isinstance(value, (tuple, list)):
        parts = [_number_of(*both) for both in zip(value, other, strict=True)]
        kind = list if isinstance(value, list) else tuple
        return _UNKNOWN if _UNKNOWN in parts else kind(parts)
    if not isinstance(value, (bool, int, float, str, slice, type(None))):
        return _UNKNOWN
    if value == other:
        return value
    if isinstance(value, int) and value * OTHER_SAMPLES == other * SAMPLES:
        return _Rows(value // SAMPLES)
    return _UNKNOWN


# -- the library's lists of blocks


def _num_weights(module: nn.Module) -> int:
    """How many of the modules in it have a weight of two dimensions or more."""
    return sum(
        any(parameter.dim() > 1 for parameter in part.parameters(recurse=False))
        for part in module.modules()
    )


def _holds_blocks(module: nn.Module) -> bool:
    """Is there a list in it with two blocks of one kind, each of several weights?"""
    return any(
        isinstance(part, LISTS)
        and max(Counter(type(c) for c in part if _num_weights(c) > 1).values(), default=0) > 1
        for part in module.modules()
    )


def _is_opened(module: nn.Module, chains: bool) -> bool:
    """Is its forward recorded step by step? Those of lists of blocks are, and those of modules that
    hold such lists; where the model has none (`chains`), also plain chains of four weights."""
    if isinstance(module, LISTS) and any(_num_weights(child) > 1 for child in module):
        return True
    if chains and isinstance(module, nn.Sequential) and _num_weights(module) > 3:
        return True
    return _holds_blocks(module)


# -- trying out


class _Watch(TorchDispatchMode):
    """Was a random number drawn in here?"""

    def __init__(self) -> None:
        super().__init__()
        self.random = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _try_out(layers: Sequence[Layer], given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run the layers in training on the meta device: settles what draws, and raises `_Together` for
    a layer that changes what it was given."""
    tensors = given
    for number, layer in enumerate(layers):
        before = {name: tensor._version for name, tensor in tensors.items()}
        with torch.no_grad(), _Watch() as watch:
            made = layer(tensors)
        changed = [name for name, version in before.items() if tensors[name]._version != version]
        if changed:
            if number == 0:
                raise CannotRecord(f"its forward changes {changed[0]} in place")
            raise _Together(number - 1, number, "the second changes its input in place")
        layer.random, tensors = watch.random, made
    return tensors


def _memories(value: Any) -> set[int]:
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(value) if _is_tensor(leaf)}


def _more(example: Tensor) -> Tensor:
    """The example with `OTHER_SAMPLES` rows."""
    return torch.empty((OTHER_SAMPLES, *example.shape[1:]), dtype=example.dtype, device="meta")


def _unread(names: Iterable[str], example: Tensor) -> dict[str, Tensor]:
    """What is only dropped: of which shape does not matter."""
    return {name: _more(example) for name in names}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
