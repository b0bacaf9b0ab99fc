"""What all replicas of a stage hold, read from a checkpoint once instead of by each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from engine.checkpoint.reading import CheckpointReader


class SharedReader:
    """One replica reads, the others get it. All replicas of a stage make one, and ask for the same
    tensors in the same order.

    Who reads a tensor follows from the file in which it begins: each replica has as many files of
    those that hold `names`, so a file is opened by one replica, or by a second one for a tensor that
    goes on in it. `hand_on(replica, tensor)` gives all replicas the values of that one, in place.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        names: Collection[str],
        replica: int,
        replicas: int,
        hand_on: Callable[[int, Tensor], None],
    ):
        holders = reader.holders(names)
        self._reads = {rank: i * replicas // len(holders) for i, rank in enumerate(holders)}
        self.reader, self._replica, self._hand_on = reader, replica, hand_on

    @torch.no_grad()
    def fill(self, target: Tensor, kind: str, name: str, shape: Sequence[int]) -> None:
        """Copy a whole tensor of this shape into `target`, which has as many elements.

        Raises ValueError as `CheckpointReader.read`, on all replicas alike.
        """
        (first, _), *_ = self.reader.fragments(kind, name, shape)
        reads = self._reads[first]
        if reads == self._replica:
            target.copy_(self.reader.read(kind, name, shape).view(target.shape))
        self._hand_on(reads, target)
