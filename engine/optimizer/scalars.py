"""What the losses learn, as the optimizer steps it: in fp32, also where parameters are in half
precision.

A scale near 100 lies in log space at 4.6, where neighbours in bf16 are 0.03 apart: the scale itself
would move in steps of 3 %. What a stage hands to the losses is the fp32 value instead. It lies on
the replica whose slice of the weights it is in, and one sum tells the others; the gradient goes to
the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from engine.backend.protocol import Backend
from engine.communication import Communicator


class LearnedScalars:
    """Those of this stage, each [1], by the names of the tensors that the layers make of them.

    `first`: their values in fp32 before the parameters were rounded, where they were; what is
    stepped begins with them.
    """

    @torch.no_grad()
    def __init__(
        self,
        scalars: Mapping[str, nn.Parameter],
        first: Mapping[str, Tensor],
        backend: Backend,
        comm: Communicator,
    ):
        self._rounded = {
            name: parameter
            for name, parameter in scalars.items()
            if backend.dtype != torch.float32 and parameter.requires_grad
        }
        self._backend, self._comm = backend, comm
        for name, parameter in self._rounded.items():
            stepped = backend.stepped(parameter)
            if stepped is not None and parameter.dtype != torch.float32:
                stepped.copy_(first[name])

    @torch.no_grad()
    def values(self) -> dict[str, Tensor]:
        """As they are now, fp32 [1]; only those whose parameters are rounded. All replicas of the
        stage call it together."""
        if not self._rounded:
            return {}
        own = torch.zeros(len(self._rounded), device=self._comm.device)
        for place, parameter in zip(own, self._rounded.values()):
            if (stepped := self._backend.stepped(parameter)) is not None:
                place.copy_(stepped[0])
        whole = self._comm.sum_over(own, self._comm.stage_group)  # of one value and zeros: exact
        return dict(zip(self._rounded, whole.split(1)))
