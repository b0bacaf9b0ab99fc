"""What each rank does in the tests of Muon; a module of its own, because ranks import it by name."""

from __future__ import annotations

import random

import torch
from communication_cases import communicator
from cost_models import BRANCHES
from torch import Tensor

from engine.backend.protocol import Shard
from engine.optimizer.whole_matrices import Piece, tell_replicas
from engine.topology import merged

SHAPES = {"small": (3, 5), "wide": (4, 30), "tall": (41, 2), "other": (7, 7)}


def pieces_of(seed: int, replicas: int) -> list[list[Piece]]:
    """[replica] -> its pieces of all matrices, in any order: some matrices whole, others in up to
    nine pieces, of which a replica may hold several, or none."""
    draw = random.Random(seed)
    found: list[list[Piece]] = [[] for _ in range(replicas)]
    for name, (rows, columns) in SHAPES.items():
        cuts = draw.sample(range(1, rows * columns), draw.choice((0, 1, 2, 8)))
        ends = [0, *sorted(cuts), rows * columns]
        for a, b in zip(ends, ends[1:]):
            found[draw.randrange(replicas)].append(Piece(name, a, b - a))
    for pieces in found:
        draw.shuffle(pieces)
    return found


def matrix(name: str) -> Tensor:
    draw = torch.Generator().manual_seed(len(name))
    return torch.randn(SHAPES[name], generator=draw)


def changed(whole: Tensor) -> Tensor:
    """What no piece could compute by itself."""
    return whole @ whole.T @ whole + whole.sum()


def replace_on_ranks(seed: int, replicas: int) -> dict[tuple[str, int], Tensor]:
    """(name, offset) -> what `changed` has put in the place of each piece of this rank."""
    comm = communicator(merged({branch: [range(0, 1)] for branch in BRANCHES}, replicas))
    own = pieces_of(seed, replicas)[comm.replica]
    padding, shards = 3, []
    held = torch.zeros(padding + sum(piece.numel for piece in own))
    values, start = torch.full_like(held, 0.5), padding
    for name, offset, numel in own:
        shards.append(Shard(name, SHAPES[name], offset, numel, held, start))
        shards[-1].of(values).copy_(matrix(name).flatten()[offset : offset + numel])
        start += numel
    matrices, before = tell_replicas([[], shards], comm), comm.sent_bytes
    matrices.replace(0, {}, changed, torch.float32)
    assert comm.sent_bytes == before, "a message for a group without matrices"
    matrices.replace(1, {id(held): values}, changed, torch.float32)
    assert values[:padding].tolist() == [0.5] * padding
    return {(shard.name, shard.offset): shard.of(values).clone() for shard in shards}
