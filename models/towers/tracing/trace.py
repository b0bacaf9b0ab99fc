"""What a library's model does, traced by torch.fx: its own blocks are single steps.

    model on the meta device ── traced ──> Trace: a graph of blocks, and the value of every step

No architecture is named here. A module is looked into if it is, or holds, one of the model's lists
of blocks (`nn.Sequential`, `nn.ModuleList`); all others are steps. A module that cannot be traced
becomes a step too, which a note says. `partitioning.py` makes layers of the trace.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

LISTS = (nn.Sequential, nn.ModuleList)
# Two sizes of the batch: what differs between them follows the batch, what does not is a constant.
SAMPLES, OTHER_SAMPLES = 2, 3
MODE = "training"  # the input of a trace that says whether it is training


class CannotTrace(Exception):
    """Why a model, or a module of it, cannot be traced."""


class CannotRun(Exception):
    """Why a model does not take the example: what its forward raised."""


# -- the trace


class Root(nn.Module):
    """A model, and what is called of it."""

    def __init__(self, model: nn.Module, call: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, given: Any) -> Any:
        return self.call(self.model, given)


class _Value(fx.Proxy):
    """A proxy that knows its value on the meta device, so that Python code may ask for a length or
    decide by a shape. What was asked is noted: it must not depend on the batch."""

    tracer: Trace

    if TYPE_CHECKING:  # fx gives it to its proxies when it is imported

        def __getitem__(self, key: Any) -> Any: ...

    @property
    def value(self) -> Any:
        return self.tracer.values[self.node]

    # instead of fx's own class of attributes
    def __getattr__(self, name: str) -> _Attribute:  # type: ignore[override]
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
        # of a shape it is the same for every batch
        return self._decided(len) if is_tensor(self.value) else len(self.value)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))


class _Attribute(_Value):
    """An attribute of a proxy; traced when it is used and not when it is called, as fx's own."""

    def __init__(self, root: _Value, name: str) -> None:
        self.root, self.attr, self.tracer = root, name, root.tracer
        self._node: fx.Node | None = None

    @property  # as in fx's own class
    def node(self) -> fx.Node:  # type: ignore[override]
        if self._node is None:
            made = self.tracer.create_proxy("call_function", getattr, (self.root, self.attr), {})
            self._node = made.node
            return made.node
        return self._node

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tracer.create_proxy("call_method", self.attr, (self.root, *args), kwargs)


class Trace(fx.Tracer):
    """Records a root's forward and computes it on the meta device at the same time.

    `values`: of every node; `decided`: what Python code asked of them, and the answers; `inside`:
    the module whose forward was being traced when something failed.
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
        self._own: set[int] = set()

    def follow(self, root: Root) -> Trace:
        self._own = {id(tensor) for tensor in (*root.parameters(), *root.buffers())}
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
        if is_tensor(a) and id(a) not in self._own:
            raise CannotTrace("its forward reads a tensor that is no parameter and no buffer")
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
                return operator.attrgetter(str(node.target))(self.root)
            if node.op == "call_module":
                return self.root.get_submodule(str(node.target))(*args, **kwargs)
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            return node.target(*args, **kwargs) if callable(node.target) else args[0]
        finally:
            self._computing = False

    def again(self, example: Tensor) -> dict[fx.Node, Any]:
        """The values for another example. Raises CannotTrace where Python code would decide
        otherwise for it."""
        values: dict[fx.Node, Any] = {}
        for node in self.graph.nodes:
            values[node] = self.compute(node, values, example)
        for node, kind, answer in self.decided:
            if kind(values[node]) != answer:
                raise CannotTrace("what its forward does depends on the number of images")
        return values


def traced(
    root: Root,
    example: Tensor,
    leaf_functions: Sequence[Callable],
    leaf_modules: tuple[type[nn.Module], ...],
    notes: list[str],
) -> Trace:
    """The trace for training, in which what is other in evaluation asks whether it is training.
    Modules whose forward cannot be traced become blocks, one after the other.

    `leaf_functions` are steps too, so that what they do may depend on the size of an image; where
    that does not work, they are looked into. Raises CannotTrace.
    """
    try:
        return _closing(root, example, leaf_functions, leaf_modules, notes)
    except CannotTrace:
        if not leaf_functions:
            raise
        return _closing(root, example, (), leaf_modules, notes)


def _closing(
    root: Root,
    example: Tensor,
    leaf_functions: Sequence[Callable],
    leaf_modules: tuple[type[nn.Module], ...],
    notes: list[str],
) -> Trace:
    closed: set[str] = set()
    chains = not _holds_blocks(root.model)

    def is_block(module: nn.Module, path: str) -> bool:
        if path == "model":
            return False
        return path in closed or isinstance(module, leaf_modules) or not _is_opened(module, chains)

    while True:
        traces = []
        try:
            for training in (True, False):
                trace = Trace(example, leaf_functions, is_block)
                traces.append(trace)
                with torch.no_grad():
                    trace.follow(root.train(training))
            return _both_ways(*traces)
        except Exception as error:  # whatever code of a library raises
            inside = traces[-1].inside
            if inside in (None, "model"):
                raise CannotTrace(in_short(error)) from error
            closed.add(inside)
            notes.append(f"{inside.removeprefix('model.')} is one block: {in_short(error)}")
        finally:
            root.train()


def in_short(error: Exception) -> str:
    text = str(error) if isinstance(error, CannotTrace) else f"{type(error).__name__}: {error}"
    return text if len(text) < 160 else f"{text[:157]}..."


def _both_ways(training: Trace, evaluation: Trace) -> Trace:
    """The trace of training, with the places in it where evaluation has False instead of True
    (`F.dropout(..., training=self.training)`) following the layer's mode."""
    ours, theirs = list(training.graph.nodes), list(evaluation.graph.nodes)
    there = dict(zip(theirs, ours))
    if [(n.op, n.target) for n in ours] != [(n.op, n.target) for n in theirs]:
        raise CannotTrace("its forward takes other steps in training than in evaluation")
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
                raise CannotTrace("its forward has other numbers in training than in evaluation")
        mine.args, mine.kwargs = tree_unflatten(leaves, spec)
    return training


def _is_slice(value: Any) -> bool:
    return isinstance(value, slice)


# -- numbers that follow from shapes


UNKNOWN = object()


@dataclass(frozen=True)
class Rows:
    """So many times the number of rows."""

    times: int

    def __str__(self) -> str:
        return "number of rows"


@dataclass(frozen=True)
class Of:
    """The dtype or the device of a tensor that is at hand."""

    name: str

    def __str__(self) -> str:
        return self.name


def number_of(value: Any, other: Any) -> Any:
    """What two examples, of `SAMPLES` and `OTHER_SAMPLES` rows, say about a value."""
    if isinstance(value, torch.device):
        return Of("device")
    if isinstance(value, torch.dtype):
        return Of("dtype") if value == torch.float32 else value
    if isinstance(value, (tuple, list)):
        parts = [number_of(*both) for both in zip(value, other, strict=True)]
        kind = list if isinstance(value, list) else tuple
        return UNKNOWN if UNKNOWN in parts else kind(parts)
    if not isinstance(value, (bool, int, float, str, slice, type(None))):
        return UNKNOWN
    if value == other:
        return value
    if isinstance(value, int) and value * OTHER_SAMPLES == other * SAMPLES:
        return Rows(value // SAMPLES)
    return UNKNOWN


# -- the library's lists of blocks


def num_weights(module: nn.Module) -> int:
    """How many of the modules in it have a weight of two dimensions or more."""
    return sum(
        any(parameter.dim() > 1 for parameter in part.parameters(recurse=False))
        for part in module.modules()
    )


def _holds_blocks(module: nn.Module) -> bool:
    """Is there a list in it with two blocks of one kind, each of several weights?"""
    return any(
        isinstance(part, LISTS)
        and max(Counter(type(c) for c in part if num_weights(c) > 1).values(), default=0) > 1
        for part in module.modules()
    )


def _is_opened(module: nn.Module, chains: bool) -> bool:
    """Is its forward traced step by step? Those of lists of blocks are, and those of modules that
    hold such lists; where the model has none (`chains`), also plain chains of four weights."""
    if isinstance(module, LISTS) and any(num_weights(child) > 1 for child in module):
        return True
    if chains and isinstance(module, nn.Sequential) and num_weights(module) > 3:
        return True
    return _holds_blocks(module)


def memories(value: Any) -> set[int]:
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(value) if is_tensor(leaf)}


def is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
