"""Whole matrices out of shards, for an optimizer whose step needs them.

Where the optimizer's state is sharded, a rank steps slices of the parameters. Most matrices lie in
one slice; one that the end of a slice cuts lies in two or more.

    slice of replica 0        slice of replica 1        slice of replica 2
    |  A  |  B  |   C1        C2   |  D  |   E1           E2       E3 ...

What is elementwise (momentum, decay) is done where the elements are. The pieces of a cut matrix go
to its owner, which computes with the whole of it, and the pieces of the result come back: two
messages for a parameter group, whatever is cut in it, and none where nothing is.

Who holds what is told once, when the engine is built. Every replica of a stage then knows the same
plan, and so makes the same collective calls in the same order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.backend.protocol import Shard
from engine.communication import Communicator
from engine.json_messages import from_all_ranks


class Piece(NamedTuple):
    """Elements offset..offset+numel of the flattened matrix `name`, which a replica holds."""

    name: str
    offset: int
    numel: int


def owners_of(cut: Mapping[str, Mapping[int, int]]) -> dict[str, int]:
    """name -> the replica that computes with the whole matrix: the one that holds most of it. Of
    several, the one that owns the fewest elements so far, so that matrices of which all replicas
    hold as much are shared out; then the lowest.

    `cut[name][replica]`: how many of its elements that replica holds; names in the same order on
    all replicas.
    """
    owned: Counter[int] = Counter()
    found = {}
    for name, held in cut.items():
        most = max(held.values())
        candidates = [replica for replica, numel in held.items() if numel == most]
        found[name] = min(candidates, key=lambda replica: (owned[replica], replica))
        owned[found[name]] += sum(held.values())
    return found


@dataclass(frozen=True)
class Trade:
    """What one replica sends and gets for the cut matrices of a parameter group.

    `sent[r]`: its pieces that go to replica r, and of which the results come back from there;
    `got[r]`: the pieces of replica r that it gets, and whose results it sends back. `owned`: the
    matrices that it computes with, and the pieces of them that it holds itself.
    """

    sent: tuple[tuple[Piece, ...], ...]
    got: tuple[tuple[Piece, ...], ...]
    owned: Mapping[str, tuple[Piece, ...]]

    @property
    def num_sent(self) -> list[int]:
        """Elements, by replica."""
        return [sum(piece.numel for piece in pieces) for pieces in self.sent]

    @property
    def num_got(self) -> list[int]:
        return [sum(piece.numel for piece in pieces) for pieces in self.got]


def trade_of(told: Sequence[Iterable[Piece]], replica: int) -> Trade:
    """The trade of one replica. `told[r]`: the pieces of cut matrices that replica r holds."""
    held: dict[str, Counter[int]] = {}
    for name in sorted({piece.name for pieces in told for piece in pieces}):
        held[name] = Counter()
    for r, pieces in enumerate(told):
        for piece in pieces:
            held[piece.name][r] += piece.numel
    owners = owners_of(held)
    ordered = [sorted(pieces) for pieces in told]

    def of(holder: int, owner: int) -> tuple[Piece, ...]:
        return tuple(piece for piece in ordered[holder] if owners[piece.name] == owner)

    everyone = range(len(told))
    own = of(replica, replica)
    return Trade(
        tuple(() if r == replica else of(replica, r) for r in everyone),
        tuple(() if r == replica else of(r, replica) for r in everyone),
        {
            name: tuple(piece for piece in own if piece.name == name)
            for name, owner in owners.items()
            if owner == replica
        },
    )


class WholeMatrices:
    """The matrices of some parameter groups, as this replica holds them. All replicas of the stage
    make it together.

    `groups`: of each, the shards of its matrices on this rank; `told[r][g]`: the pieces of cut
    matrices of group g that replica r holds; `comm`: None where nothing is cut.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Shard]],
        told: Sequence[Sequence[Sequence[Piece]]] = (),
        comm: Communicator | None = None,
    ):
        self._whole = [[shard for shard in own if not _is_cut(shard)] for own in groups]
        self._cut = [{_piece(shard): shard for shard in own if _is_cut(shard)} for own in groups]
        # of the groups in which any replica has a piece
        self._trades: dict[int, tuple[Trade, Communicator]] = {}
        for g in range(len(groups)) if comm else ():
            pieces = [of_replica[g] for of_replica in told]
            if comm and any(pieces):
                self._trades[g] = trade_of(pieces, comm.replica), comm
        for trade, trading in self._trades.values():
            # NCCL connects two ranks with their first message: now, not in the middle of a step
            nothing = torch.zeros(sum(trade.num_sent), dtype=torch.uint8, device=trading.device)
            came = trading.trade_with_replicas(nothing, trade.num_sent, trade.num_got)
            trading.trade_with_replicas(came, trade.num_got, trade.num_sent)

    def shards(self, group: int) -> list[Shard]:
        """Of the matrices of a group on this rank."""
        return [*self._whole[group], *self._cut[group].values()]

    @torch.no_grad()
    def replace(
        self,
        group: int,
        values: Mapping[int, Tensor],
        function: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
    ) -> None:
        """Put `function(matrix)` in the place of each matrix of a group. All replicas of the stage
        call it together.

        `values`: by the id of what a shard is held in, a tensor of its shape, which is changed; of
        matrices that all replicas leave out there is none;
        `function`: [rows, columns] to the same; `dtype`: in which pieces travel, that in which it
        computes.
        """
        if group in self._trades:
            self._replace_cut(group, values, function, dtype)
        for shard in self._whole[group]:
            if id(shard.held) in values:
                own = shard.of(values[id(shard.held)])
                own.copy_(function(own.view(shard.shape)).reshape(-1))

    def _replace_cut(
        self,
        group: int,
        values: Mapping[int, Tensor],
        function: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
    ) -> None:
        (trade, comm), shards = self._trades[group], self._cut[group]
        here = {
            piece: shard.of(values[id(shard.held)])
            if id(shard.held) in values
            else torch.zeros(piece.numel, dtype=dtype, device=comm.device)
            for piece, shard in shards.items()
        }
        sent = [here[piece] for pieces in trade.sent for piece in pieces]
        got = [piece for pieces in trade.got for piece in pieces]
        message = torch.cat([torch.empty(0, dtype=dtype, device=comm.device), *sent]).to(dtype)
        came = comm.trade_with_replicas(message, trade.num_sent, trade.num_got)
        there = dict(zip(got, came.split([piece.numel for piece in got])))
        for name, own in trade.owned.items():
            of_matrix = {piece: here[piece] for piece in own}
            of_matrix |= {piece: part for piece, part in there.items() if piece.name == name}
            whole = came.new_empty(shards[own[0]].shape)
            for piece, part in of_matrix.items():
                _of(whole, piece).copy_(part)
            made = function(whole)
            for piece, part in of_matrix.items():
                part.copy_(_of(made, piece))
        back = comm.trade_with_replicas(came, trade.num_got, trade.num_sent)
        for part, result in zip(sent, back.split([part.numel() for part in sent])):
            part.copy_(result)


def tell_replicas(groups: Sequence[Sequence[Shard]], comm: Communicator) -> WholeMatrices:
    """The matrices of these groups, whatever the replicas of the stage hold of each. They call it
    together, with groups in the same order."""
    if comm.stage.replicas == 1:
        return WholeMatrices(groups)
    own = [[_piece(shard) for shard in shards if _is_cut(shard)] for shards in groups]
    told = [
        [[Piece(*piece) for piece in pieces] for pieces in of_replica]
        for of_replica in from_all_ranks(own, comm.stage_group)
    ]
    return WholeMatrices(groups, told, comm)


def _is_cut(shard: Shard) -> bool:
    return shard.numel < math.prod(shard.shape)


def _piece(shard: Shard) -> Piece:
    return Piece(shard.name, shard.offset, shard.numel)


def _of(matrix: Tensor, piece: Piece) -> Tensor:
    return matrix.reshape(-1)[piece.offset : piece.offset + piece.numel]
