"""Gradients are averaged over the replicas of a stage while the backward that completes them still
runs.

    last backward     layer 5   layer 4   layer 3   layer 2   layer 1
    all-reduce                  bucket 0            bucket 1          bucket 2

Buckets are filled in the reverse order of the layers and start in that order on every replica,
whichever of them is complete first, as in torch's DistributedDataParallel (Li et al. 2020). What no
backward has completed starts at the end. The flat tensors that are summed are few: a bucket waits
for the one that began `BUCKETS_IN_FLIGHT` before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

BUCKET_BYTES = 25 << 20  # as in DistributedDataParallel
BUCKETS_IN_FLIGHT = 4


class Work(Protocol):
    """A collective that was started."""

    def wait(self) -> object: ...


class _Started(NamedTuple):
    work: Work
    flat: Tensor
    gradients: list[Tensor]


class GradientReducer:
    """Averages the gradients of `parameters`, in place, over the replicas of their stage.

    `gradient_of` gives the tensor that holds a parameter's gradient and is called when it is
    complete; `start_sum` starts to add a tensor up over the replicas, in place. `parameters`: in
    the order of their layers; those of `at_the_end` are not waited for in the backward.
    `bucket_bytes`: of what is summed at a time, at least.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        at_the_end: Sequence[nn.Parameter],
        gradient_of: Callable[[nn.Parameter], Tensor],
        start_sum: Callable[[Tensor], Work],
        replicas: int,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        self._gradient_of, self._start_sum, self._replicas = gradient_of, start_sum, replicas
        last = {id(parameter) for parameter in at_the_end}
        early = [parameter for parameter in reversed(parameters) if id(parameter) not in last]
        late = [parameter for parameter in parameters if id(parameter) in last]
        self._buckets = [*_buckets(early, bucket_bytes), *_buckets(late, bucket_bytes)]
        self._bucket_of = {
            id(parameter): number
            for number, bucket in enumerate(self._buckets)
            for parameter in bucket
        }
        self._armed = False
        self._begin()
        for parameter in (*early, *late):
            parameter.register_post_accumulate_grad_hook(self._complete)

    @property
    def num_buckets(self) -> int:
        return len(self._buckets)

    @property
    def num_started(self) -> int:
        """Buckets that were started in this step."""
        return self._num_started

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """The backward in here completes the gradients of this step."""
        self._armed = True
        try:
            yield
        finally:
            self._armed = False

    @torch.no_grad()
    def finish(self) -> None:
        """Start what is left, wait for all of it and put the averages in place."""
        while self._num_started < len(self._buckets):
            self._start()
        while self._in_flight:
            self._finish_oldest()
        self._begin()

    def _begin(self) -> None:
        self._in_flight: deque[_Started] = deque()
        self._num_started = 0
        self._missing = [len(bucket) for bucket in self._buckets]
        self._seen: set[int] = set()

    def _complete(self, parameter: nn.Parameter) -> None:
        if not self._armed or id(parameter) in self._seen:
            return
        self._seen.add(id(parameter))
        self._missing[self._bucket_of[id(parameter)]] -= 1
        while self._num_started < len(self._buckets) and not self._missing[self._num_started]:
            self._start()

    @torch.no_grad()
    def _start(self) -> None:
        if len(self._in_flight) == BUCKETS_IN_FLIGHT:
            self._finish_oldest()
        gradients = [self._gradient_of(p) for p in self._buckets[self._num_started]]
        flat = _flatten_dense_tensors(gradients)
        self._in_flight.append(_Started(self._start_sum(flat), flat, gradients))
        self._num_started += 1

    def _finish_oldest(self) -> None:
        work, flat, gradients = self._in_flight.popleft()
        work.wait()  # NCCL: the stream of the backward waits, not the host
        flat.mul_(1 / self._replicas)
        torch._foreach_copy_(gradients, list(_unflatten_dense_tensors(flat, gradients)))


def _buckets(parameters: Sequence[nn.Parameter], least_bytes: int) -> list[list[nn.Parameter]]:
    """Runs of parameters whose gradients, in fp32, take `least_bytes` or more, but for the last."""
    buckets: list[list[nn.Parameter]] = []
    size = least_bytes
    for parameter in parameters:
        if size >= least_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += 4 * parameter.numel()
    return buckets
