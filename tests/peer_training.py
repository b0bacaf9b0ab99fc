"""One rank of OpenCLIP's own program, from weights and batches that are given to it: python
peer_training.py GIVEN RESULT.

`GIVEN` is what `torch.save` wrote: `arguments`, the program's own; `config`, the file of its
model's configuration; `batches`, (images, ids) of the whole global batch step by step, of which
this rank takes its part. `RESULT-<rank>` gets this rank's loss of each step. RANK, WORLD_SIZE and
the rest are in the environment.
"""

import os
import sys
from types import SimpleNamespace
from unittest import mock

import open_clip
import open_clip_train.main as program
import torch
from torch.nn.parallel import DistributedDataParallel


class Batches:
    """What `train_one_epoch` asks of a data loader."""

    def __init__(self, batches, rank: int, world_size: int) -> None:
        self.parts = [[whole.chunk(world_size)[rank] for whole in batch] for batch in batches]
        self.num_batches, self.num_samples = len(batches), len(batches) * len(batches[0][0])

    def __iter__(self):
        return iter(self.parts)


class OnCpu(DistributedDataParallel):
    """The program always names devices, which torch refuses on a CPU."""

    def __init__(self, module, device_ids) -> None:
        super().__init__(module)


def main(given: str, result: str) -> None:
    asked = torch.load(given)
    open_clip.add_model_config(asked["config"])
    dataloader = Batches(asked["batches"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    data = {"train": SimpleNamespace(set_epoch=lambda epoch: None, dataloader=dataloader)}
    losses = []

    def recording(args):
        loss = open_clip.create_loss(args)

        def recorded(**given):
            found = loss(**given)
            losses.append(found["contrastive_loss"].item())
            return found

        return recorded

    with (
        mock.patch.object(program, "get_data", lambda *_, **__: data),
        mock.patch.object(program, "create_loss", recording),
        mock.patch("torch.nn.parallel.DistributedDataParallel", OnCpu),
    ):
        program.main(asked["arguments"])
    torch.save(losses, f"{result}-{os.environ['RANK']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
