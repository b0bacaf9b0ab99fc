"""A backward in two parts: the gradients of the inputs, for which the stage before waits, and later
those of the parameters, for which nobody does.

Autograd computes both in one walk down the graph. Here the first walk goes only where the inputs
lie, and notes the gradient that arrives at every node where a parameter joins; the second goes from
these nodes to the parameters. The kernels are those of an ordinary backward, each run once but for
what computes both in one (layer normalisation), so the gradients are equal to rounding. Between the
two parts the graph and the noted gradients stay in memory.

As `torch.distributed.pipelining` does it (Qi et al. 2023, "Zero Bubble Pipeline Parallelism"), but
for named tensors of which some may not depend on any input.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass
class _Join:
    """Nodes on the way to the inputs where `parameters` join, none of which joins elsewhere.
    `grads`: of each node's outputs, as they arrived."""

    nodes: list[Node]
    parameters: list[nn.Parameter]
    grads: dict[int, tuple[Tensor | None, ...]] = field(default_factory=dict)


@dataclass
class HeldBackward:
    """What the second part of a backward needs. `apart`: outputs that depend on no input, with
    their gradients; an ordinary backward of these is still to be run."""

    joins: list[_Join]
    apart: list[tuple[GradientEdge, Tensor]]


def backward_inputs(
    outputs: Sequence[tuple[GradientEdge, Tensor]],
    inputs: Sequence[Tensor],
    parameters: Iterable[nn.Parameter],
) -> HeldBackward:
    """Set `grad` of the `inputs`, leaves that need one, from the gradients of the outputs.

    `outputs`: (where it was made, its gradient) pairs. An input that no output depends on keeps no
    gradient.
    Parameters are left as they are.
    """
    roots = [edge.node for edge, _ in outputs]
    parents = _parents(roots)
    to_inputs = _above([get_gradient_edge(tensor).node for tensor in inputs], parents)
    joins = _joins(parameters, to_inputs, parents)
    attached = [pair for pair, root in zip(outputs, roots) if root in to_inputs]
    apart = [pair for pair, root in zip(outputs, roots) if root not in to_inputs]
    if attached:
        hooks = [
            node.register_prehook(_note(join, i))
            for join in joins
            for i, node in enumerate(join.nodes)
        ]
        try:
            grads = torch.autograd.grad(
                [edge for edge, _ in attached],
                inputs,
                [grad for _, grad in attached],
                retain_graph=True,
                allow_unused=True,
            )
        finally:
            for hook in hooks:
                hook.remove()
        for tensor, grad in zip(inputs, grads):
            tensor.grad = grad
    return HeldBackward(joins, apart)


def parameter_gradients(held: HeldBackward) -> list[tuple[nn.Parameter, Tensor]]:
    """The second part, but for the outputs that depend on no input. Frees the graph."""
    found = []
    while held.joins:
        join = held.joins.pop()
        edges, grads = [], []
        for i, node in enumerate(join.nodes):
            for number, grad in enumerate(join.grads.get(i, ())):
                if grad is not None:
                    edges.append(GradientEdge(node, number))
                    grads.append(grad)
        if not edges:
            continue
        # Where a parameter is used twice, the walk from one of its nodes may reach the other, whose
        # gradient is known already and must not grow.
        hooks = [
            node.register_prehook(lambda _, kept=join.grads.get(i): kept)
            for i, node in enumerate(join.nodes)
            if len(join.nodes) > 1
        ]
        try:
            of_parameters = torch.autograd.grad(edges, join.parameters, grads, allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
        found += [
            (parameter, grad)
            for parameter, grad in zip(join.parameters, of_parameters)
            if grad is not None
        ]
    return found


def _note(join: _Join, i: int):
    def note(grads: tuple[Tensor | None, ...]) -> None:
        join.grads[i] = grads

    return note


def _parents(roots: Sequence[Node]) -> Mapping[Node, list[Node]]:
    """Of every node below the roots the nodes that its gradient comes from."""
    parents: dict[Node, list[Node]] = defaultdict(list)
    waiting, seen = deque(roots), set(roots)
    while waiting:
        node = waiting.popleft()
        for below, _ in node.next_functions:
            if below is not None:
                parents[below].append(node)
                if below not in seen:
                    seen.add(below)
                    waiting.append(below)
    return parents


def _above(nodes: Iterable[Node], parents: Mapping[Node, list[Node]]) -> set[Node]:
    """These nodes and all that their gradients come from."""
    found = set(nodes)
    waiting = deque(found)
    while waiting:
        for parent in parents.get(waiting.popleft(), ()):
            if parent not in found:
                found.add(parent)
                waiting.append(parent)
    return found


def _joins(
    parameters: Iterable[nn.Parameter], to_inputs: set[Node], parents: Mapping[Node, list[Node]]
) -> list[_Join]:
    """Where the parameters join the way to the inputs; parameters that share a node are together."""
    at: dict[Node, _Join] = {}
    for parameter in parameters:
        start = get_gradient_edge(parameter).node
        nodes, seen, waiting = [], {start}, deque([start])
        while waiting:
            for parent in parents.get(waiting.popleft(), ()):
                if parent in seen:
                    continue
                seen.add(parent)
                if parent in to_inputs:
                    nodes.append(parent)
                else:
                    waiting.append(parent)
        if not nodes:
            continue
        known = {id(at[node]): at[node] for node in nodes if node in at}
        join = _Join([], [])
        for other in known.values():
            join.nodes += other.nodes
            join.parameters += other.parameters
        join.nodes += [node for node in nodes if node not in at]
        join.parameters.append(parameter)
        at.update(dict.fromkeys(join.nodes, join))
    return list({id(join): join for join in at.values()}.values())
