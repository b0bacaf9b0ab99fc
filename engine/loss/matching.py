"""Image-text matching over the global batch: pairs of tokens through the fusion layers, where the
second branch of the pair ends.

    images end, replica r   ── tokens of a micro-batch ──>   texts end, each replica: the pairs of these images with its own texts,
                            <── their gradient, summed ──    scored and differentiated at once

Images and texts stand for the first and the second branch of any pair with a `matching` loss. Each
text tail (a replica where the texts end) draws a negative image for each of its texts and, for its
share of all images, a negative text; the latter they tell each other. A pair is scored by the tail
that has its text. Images come in blocks, a micro-batch of one replica each, and are gone when the
next one comes, so memory grows with a tail's own tokens and one block, not with the global batch.
Where a tail has both branches, the same goes on among its replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from engine.communication import Communicator
from engine.loss.exchange import Meeting, Side
from engine.objective import Pair


class MatchingLoss(Protocol):
    """What is asked of a loss of pairs; it knows nothing of processes."""

    def negatives(
        self,
        sides: Mapping[str, Side],
        branch: str,
        mine: Tensor,
        parameters: Mapping[str, Tensor],
        seed: int,
    ) -> Tensor:
        """[b] int64: for each of the rows `mine` [b] one of the other side that does not belong to
        it; −1: there is none."""

    def weights(self, sides: Mapping[str, Side]) -> Mapping[str, Tensor]:
        """branch -> [B], what a pair counts that was made for this row."""

    def losses(self, scores: Tensor, belong: Tensor) -> Tensor:
        """[P] of P pairs."""


Inject = Callable[[list[tuple[Tensor, Tensor]]], None]
"""Runs a backward from (tensor, gradient) pairs."""


@dataclass(frozen=True)
class Scoring:
    """How a last stage scores pairs: through `fusion`, where texts end, `most_pairs` at a time.
    Negatives are drawn with `seed`; `inject` is given parts of the loss."""

    fusion: nn.Module | None
    most_pairs: int
    seed: int
    inject: Inject


class Matched(NamedTuple):
    """What this tail's pairs add to the loss, and the gradients of the tokens that it made, by
    micro-batch; `match`'s `scale` is in them."""

    share: Tensor  # [], those of all tails add up to the loss
    num_right: Tensor  # []
    num_pairs: int
    gradients: Mapping[
        str, Sequence[Tensor]
    ]  # by tensor name, such as image_tokens [b, T, F], text_tokens [b, L, F]


class _Pairs(NamedTuple):
    image: Tensor  # [P] int64, rows of a block
    text: Tensor  # [P] int64, own texts
    belong: Tensor  # [P] bool
    weight: Tensor  # [P]


@dataclass(frozen=True)
class _Texts:
    """The n own texts, and which pairs they make: N texts and M images are everyone's."""

    tokens: Tensor  # [n, L, F]
    mask: Tensor  # [n, L], 1 = keep
    image: Tensor  # [n] int64, place of the image that a text belongs to
    drawn_image: Tensor  # [n] int64; −1: none
    # [M] int64, row here of the text drawn for each image; −1: none, or another tail has it
    drawn_text: Tensor
    weight: Tensor  # [n], of the pairs made for a text
    image_weight: Tensor  # [M], of the pair made for an image
    loss: MatchingLoss
    fusion: nn.Module
    gradient: Tensor  # [n, L, F] fp32, that of the tokens so far


def match(
    comm: Communicator,
    pair: Pair,
    meeting: Meeting,
    outputs: Sequence[Mapping[str, Tensor]],
    parameters: Mapping[str, Tensor],
    *,
    scoring: Scoring,
    scale: Tensor,
) -> Matched:
    """All tails call it together. `outputs`: of the own micro-batches, with the tokens of the
    branches that end here; `parameters`: those of the contrastive loss, the same on all tails;
    `scale`: of a text tail's gradients, which parts of the loss are injected with."""
    texts = (
        _texts(comm, pair, meeting, outputs=outputs, parameters=parameters, scoring=scoring)
        if pair.second in meeting.own
        else None
    )
    image_gradients, shares, right, num_pairs = [], [scale.new_zeros(())], [scale.new_zeros(())], 0
    image, text = (comm.graph.tail(branch) for branch in pair.branches)
    for replica, place, block in _blocks(comm, pair, meeting, outputs):
        gradient = torch.zeros_like(block, dtype=torch.float32)
        if texts is not None:
            for pairs in _split(_pairs(texts, place), scoring.most_pairs):
                scores, share = _scored(
                    texts, pairs, block, gradient=gradient, inject=scoring.inject, scale=scale
                )
                shares.append(share)
                right.append(((scores > 0) == pairs.belong).float().sum())
                num_pairs += len(scores)
        if pair.first in image.trained:
            gradient = comm.sum_to_first(pair, replica, gradient)
        if comm.rank == image.ranks[replica]:
            # a tail's own gradients are averaged over its replicas: `scale` makes up for those of
            # the text tail
            image_gradients.append((gradient * (image.replicas / text.replicas)).to(block.dtype))
    fusion = scoring.fusion.parameters() if scoring.fusion else ()
    learned = [parameter.sum() for parameter in fusion if parameter.requires_grad]
    if texts is not None and not num_pairs and learned:  # every replica has a gradient to average
        held = torch.stack(learned)
        scoring.inject([(held, torch.zeros_like(held))])
    gradients = {}
    if pair.first in meeting.own:
        gradients[f"{pair.first}_tokens"] = _restored(meeting, pair.first, outputs, image_gradients)
    if texts is not None:
        name = f"{pair.second}_tokens"
        rows = texts.gradient.split(
            [int(present.sum()) for present in _present(meeting, pair.second, outputs)]
        )
        lengths = [output[name].shape[1] for output in outputs]
        gradients[name] = _restored(
            meeting, pair.second, outputs, [own[:, :length] for own, length in zip(rows, lengths)]
        )
    return Matched(torch.stack(shares).sum(), torch.stack(right).sum(), num_pairs, gradients)


def _present(
    meeting: Meeting, branch: str, outputs: Sequence[Mapping[str, Tensor]]
) -> list[Tensor]:
    """Of each micro-batch, which of its rows the meeting left in: bool [b]."""
    return list(
        meeting.present[branch].split([len(output[f"{branch}_tokens"]) for output in outputs])
    )


def _scored(
    texts: _Texts,
    pairs: _Pairs,
    block: Tensor,
    gradient: Tensor,
    inject: Inject,
    scale: Tensor,
) -> tuple[Tensor, Tensor]:
    """The scores of some pairs and their part of the loss, after its backward: what it makes for
    the image tokens of the `block` is added to `gradient`, for the texts' to theirs."""
    tokens = block[pairs.image].requires_grad_()
    longest = int(texts.mask[pairs.text].sum(1).max())  # texts are padded behind
    text_tokens = texts.tokens[pairs.text, :longest].requires_grad_()
    with torch.enable_grad():
        scores = texts.fusion(tokens, text_tokens, texts.mask[pairs.text, :longest])
        share = (texts.loss.losses(scores, pairs.belong) * pairs.weight).sum()
    share_value = share.detach()
    # not-a-number where it is not finite, so that the step is skipped
    inject([(share, scale + (share_value - share_value))])
    _add_gradient(gradient, pairs.image, tokens)
    _add_gradient(texts.gradient[:, :longest], pairs.text, text_tokens)
    return scores, share_value


def _add_gradient(total: Tensor, rows: Tensor, leaf: Tensor) -> None:
    if leaf.grad is not None:
        total.index_add_(0, rows, leaf.grad.float())


def _left_in(meeting: Meeting, values: Tensor, present: Tensor) -> Tensor:
    """The rows that the meeting left in; where it left out none, `values` itself: a copy would be
    as large as all tokens."""
    return values[present] if meeting.num_left_out else values


def _restored(
    meeting: Meeting,
    branch: str,
    outputs: Sequence[Mapping[str, Tensor]],
    gradients: Sequence[Tensor],
) -> list[Tensor]:
    """In the tokens' dtype, with zeros for the rows that were left out."""
    tokens = [output[f"{branch}_tokens"] for output in outputs]
    gradients = [gradient.to(like.dtype) for like, gradient in zip(tokens, gradients, strict=True)]
    if not meeting.num_left_out:
        return gradients
    return [
        torch.zeros_like(like).masked_scatter_(present[:, None, None], gradient)
        for like, present, gradient in zip(tokens, _present(meeting, branch, outputs), gradients)
    ]


def _texts(
    comm: Communicator,
    pair: Pair,
    meeting: Meeting,
    outputs: Sequence[Mapping[str, Tensor]],
    parameters: Mapping[str, Tensor],
    scoring: Scoring,
) -> _Texts:
    loss, (first, second) = pair.matching, pair.branches
    fusion, seed = scoring.fusion, scoring.seed
    if loss is None or fusion is None:
        raise ValueError(f"the pair {first}-{second} has no matching loss, or {second} no fusion")
    sides, place = meeting.everyone, meeting.own[second].position
    present = _present(meeting, second, outputs)
    longest = max(output[f"{second}_tokens"].shape[1] for output in outputs)
    tokens, mask = (
        torch.cat(
            [
                _padded(_left_in(meeting, output[name].detach(), own), longest)
                for output, own in zip(outputs, present)
            ]
        )
        for name in (f"{second}_tokens", f"{second}_mask")
    )
    # each replica draws for its share of the images, whoever has them
    shares = torch.arange(len(sides[first].label), device=place.device).tensor_split(
        comm.stage.replicas
    )
    drawn = loss.negatives(sides, first, shares[comm.replica], parameters, seed)
    drawn = comm.gather_replicas(drawn, [len(share) for share in shares])
    row_here = torch.full_like(sides[second].label, -1).index_copy_(
        0, place, torch.arange(len(place), device=place.device)
    )
    weights = loss.weights(sides)
    return _Texts(
        tokens=tokens,
        mask=mask,
        image=torch.searchsorted(
            sides[first].label, sides[second].label[place]
        ),  # labels ascend, with gaps where samples were left out
        drawn_image=loss.negatives(sides, second, place, parameters, seed),
        drawn_text=torch.where(drawn < 0, -1, row_here[drawn]),
        weight=weights[second][place],
        image_weight=weights[first],
        loss=loss,
        fusion=fusion,
        gradient=torch.zeros_like(tokens, dtype=torch.float32),
    )


def _padded(values: Tensor, longest: int) -> Tensor:
    """[b, L, ...] with zeros behind -> [b, longest, ...]."""
    return torch.cat(
        [values, values.new_zeros(values.shape[0], longest - values.shape[1], *values.shape[2:])], 1
    )


def _blocks(
    comm: Communicator, pair: Pair, meeting: Meeting, outputs: Sequence[Mapping[str, Tensor]]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(replica of the image tail, places [b], tokens [b, T, F]) of one micro-batch after the other,
    replica by replica.

    Image tails see their own ones only, text tails all. Sizes are sent first, so that nobody need
    know how the others deal.
    """
    first, second = pair.branches
    image, device = comm.graph.tail(first), comm.device
    own: list[tuple[Tensor, Tensor]] = []
    if first in meeting.own:
        present = _present(meeting, first, outputs)
        places = meeting.own[first].position.split([int(rows.sum()) for rows in present])
        own = [
            (place, _left_in(meeting, output[f"{first}_tokens"].detach(), rows))
            for place, output, rows in zip(places, outputs, present)
        ]
    for replica, rank in enumerate(image.ranks):
        if rank != comm.rank and second not in meeting.own:
            continue
        mine = own if rank == comm.rank else []
        sizes = torch.tensor(
            [tokens.shape[:2] for _, tokens in mine], dtype=torch.int64, device=device
        )
        number = comm.from_first(pair, replica, torch.tensor([len(mine)], device=device))
        sizes = comm.from_first(pair, replica, sizes if mine else sizes.new_empty(int(number), 2))
        like = outputs[0][f"{first}_tokens" if mine else f"{second}_tokens"]
        for i, (rows, length) in enumerate(sizes.tolist()):
            place, tokens = (
                mine[i]
                if mine
                else (sizes.new_empty(rows), like.new_empty(rows, length, like.shape[2]))
            )
            yield (
                replica,
                comm.from_first(pair, replica, place),
                comm.from_first(pair, replica, tokens),
            )


def _pairs(texts: _Texts, place: Tensor) -> _Pairs:
    """Those of the own texts with the images at `place` [b]: each text with its own, with the one
    that was drawn for it, and with the images that it was drawn for."""
    row = torch.full_like(texts.drawn_text, -1).index_copy_(
        0, place, torch.arange(len(place), device=place.device)
    )  # [M]
    everyone = torch.arange(len(texts.image), device=place.device)
    belonging, drawn = (
        row[texts.image],
        torch.where(texts.drawn_image < 0, -1, row[texts.drawn_image]),
    )
    found = [
        _Pairs(belonging, everyone, torch.ones_like(belonging, dtype=torch.bool), texts.weight),
        _Pairs(drawn, everyone, torch.zeros_like(drawn, dtype=torch.bool), texts.weight),
        _Pairs(
            torch.arange(len(place), device=place.device),
            texts.drawn_text[place],
            torch.zeros_like(place, dtype=torch.bool),
            texts.image_weight[place],
        ),
    ]
    together = _Pairs(*map(torch.cat, zip(*found)))
    return _of(together, ((together.image >= 0) & (together.text >= 0)).nonzero().squeeze(1))


def _of(pairs: _Pairs, which: Tensor) -> _Pairs:
    return _Pairs(*(values[which] for values in pairs))


def _split(pairs: _Pairs, most: int) -> Iterator[_Pairs]:
    for which in torch.arange(len(pairs.image), device=pairs.image.device).split(most):
        if len(which):
            yield _of(pairs, which)
