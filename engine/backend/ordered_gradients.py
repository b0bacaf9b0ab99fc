"""Gradients are handed on in one order while a backward still runs.

    backward          layer 3   layer 1   layer 2
    handed on         3                   2, 1

Replicas send what is handed on, so they must agree on the order. Autograd finishes gradients in an
order that follows from the graph, which may differ between replicas: a layer that one of them skips
(layer drop), or that has no row there, gets no gradient at all. Hence an order that is fixed, in
which a gradient waits for those before it, and what the backward has not made is handed on at its
end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn


class OrderedGradients:
    """Calls `hand_on` for each of `parameters`, in their order, in every backward inside
    `backward()`.

    `hand_on` may free the gradient, and is called without one for a parameter that the backward has
    not reached.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], hand_on: Callable[[nn.Parameter], None]):
        self._parameters, self._hand_on = list(parameters), hand_on
        self._place = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._armed = False
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._complete)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """The backward in here is one that all replicas do. Raises RuntimeError for a gradient that
        is made a second time."""
        self._next, self._made = 0, [False] * len(self._parameters)
        self._armed = True
        try:
            yield
        finally:
            self._armed = False
        self._hand_on_until(len(self._parameters))

    def _complete(self, parameter: nn.Parameter) -> None:
        if not self._armed:
            return
        place = self._place[id(parameter)]
        if self._made[place]:
            raise RuntimeError(
                "a backward has made a gradient twice, and the first may have been sent; use "
                '"zero_optimization": {"stage": 1}'
            )
        self._made[place] = True
        last = self._next
        while last < len(self._made) and self._made[last]:
            last += 1
        self._hand_on_until(last)

    def _hand_on_until(self, end: int) -> None:
        for place in range(self._next, end):
            self._hand_on(self._parameters[place])
        self._next = end
