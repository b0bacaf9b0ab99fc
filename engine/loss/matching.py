"""Image-text matching over the global batch: pairs of tokens through the fusion layers, where the
second branch of the pair ends.

    images end, replica r   ── tokens of a micro-batch ──>   texts end, each replica: the pairs of these images with its own texts,
                            <── their gradient, summed ──    scored and differentiated at once

The other replicas of images take part, and do nothing with it: they wait anyway, and one group of
all last stages is enough, however many replicas there are. A group takes memory of every member.

Images and texts stand for the first and the second branch of any pair with a `matching` loss. Each
replica where the texts end draws a negative image for each of its texts and, for its share of all
images, a negative text; the latter they tell each other. A pair is scored where its text is. Images
come in blocks, a micro-batch of one replica each, and are gone when the next one comes, so memory
grows with a rank's own tokens and one block, not with the global batch. Where both branches end in
one stage, the same goes on among its replicas.

A replica where the texts end waits for its device once, to learn which pairs each block has, and
how long their texts are. Of samples that are left out of the pair the tokens travel, too, but are in
no pair: so all sizes are those of the outputs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.communication import Communicator
from engine.loss.term_batch import TermBatch, rows_of
from engine.loss_protocols import MatchingLoss
from engine.objective import Pair

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
    """What this rank's pairs add to the loss, and the gradients of the tokens that it made, by
    micro-batch; `match`'s `scale` is in them."""

    share: Tensor  # [], those of all ranks add up to the loss
    num_right: Tensor  # []
    num_pairs: int
    # by tensor name, such as image_tokens [b, T, F], text_tokens [b, L, F]
    gradients: Mapping[str, Sequence[Tensor]]


class _Pairs(NamedTuple):
    image: Tensor  # [P] int64, rows of a block
    text: Tensor  # [P] int64, rows of `_Texts.tokens`
    belong: Tensor  # [P] bool
    weight: Tensor  # [P]
    longest: int  # of these texts, in tokens


class _Block(NamedTuple):
    """A micro-batch of a replica where the first branch ends."""

    replica: int
    rows: int
    num_tokens: int


@dataclass(frozen=True)
class _Texts:
    """The m own texts, and which pairs they make: n of them are left in the pair, and M images of
    everyone's."""

    tokens: Tensor  # [m, L, F]
    mask: Tensor  # [m, L], 1 = keep
    row: Tensor  # [n] int64, which of the m
    image: Tensor  # [n] int64, place of the image that a text belongs to
    drawn_image: Tensor  # [n] int64; −1: none
    # [M] int64, which of the m was drawn for each image; −1: none, or another rank has it
    drawn_text: Tensor
    weight: Tensor  # [n], of the pairs made for a text
    image_weight: Tensor  # [M], of the pair made for an image
    loss: MatchingLoss
    fusion: nn.Module
    gradient: Tensor  # [m, L, F] fp32, that of the tokens so far


def match(
    comm: Communicator,
    pair: Pair,
    batch: TermBatch,
    outputs: Sequence[Mapping[str, Tensor]],
    parameters: Mapping[str, Tensor],
    *,
    sizes: Sequence[Sequence[tuple[int, int]]],
    scoring: Scoring,
    scale: Tensor,
) -> Matched:
    """All last stages call it together. `outputs`: of the own micro-batches, with the tokens of the
    branches that end here; `parameters`: those of the contrastive loss, the same on all of them;
    `sizes`: of each replica where the first branch ends, rows and tokens of a row of each
    micro-batch; `scale`: of the gradients of the text stage, which parts of the loss are injected
    with."""
    image, text = (comm.graph.last_stage(branch) for branch in pair.branches)
    own = outputs if pair.first in batch.own else []
    blocks = [
        _Block(replica, *size) for replica, of_replica in enumerate(sizes) for size in of_replica
    ]
    places = _places(comm, pair, batch, blocks)
    texts, pairs_of = None, [list[_Pairs]() for _ in blocks]
    if pair.second in batch.own:
        texts = _texts(comm, pair, batch, outputs, parameters=parameters, scoring=scoring)
        pairs_of = _pairs(texts, places, blocks, scoring.most_pairs)
    image_gradients, shares, right = [], [scale.new_zeros(())], [scale.new_zeros(())]
    like = outputs[0][f"{pair.first if own else pair.second}_tokens"]
    waiting = iter(own)
    for block, of_block in zip(blocks, pairs_of):
        here = comm.rank == image.ranks[block.replica]
        tokens = (
            next(waiting)[f"{pair.first}_tokens"].detach()
            if here
            else like.new_empty(block.rows, block.num_tokens, like.shape[2])
        )
        tokens = comm.from_first(pair, block.replica, tokens)
        gradient = torch.zeros_like(tokens, dtype=torch.float32)
        if texts is not None:
            for pairs in of_block:
                scores, share = _scored(
                    texts, pairs, tokens, gradient=gradient, inject=scoring.inject, scale=scale
                )
                shares.append(share)
                right.append(((scores > 0) == pairs.belong).float().sum())
        if pair.first in image.trained:
            gradient = comm.sum_to_first(pair, block.replica, gradient)
        if here:
            # a stage's gradients are averaged over its replicas: `scale` makes up for those of the
            # text stage
            image_gradients.append((gradient * (image.replicas / text.replicas)).to(tokens.dtype))
    num_pairs = sum(len(pairs.image) for of_block in pairs_of for pairs in of_block)
    fusion = scoring.fusion.parameters() if scoring.fusion else ()
    learned = [parameter.sum() for parameter in fusion if parameter.requires_grad]
    if texts is not None and not num_pairs and learned:  # every replica has a gradient to average
        held = torch.stack(learned)
        scoring.inject([(held, torch.zeros_like(held))])
    gradients: dict[str, Sequence[Tensor]] = {}
    if own:
        gradients[f"{pair.first}_tokens"] = image_gradients
    if texts is not None:
        name = f"{pair.second}_tokens"
        of_outputs = texts.gradient.split([len(output[name]) for output in outputs])
        gradients[name] = [
            gradient[:, : output[name].shape[1]].to(output[name].dtype)
            for gradient, output in zip(of_outputs, outputs)
        ]
    return Matched(torch.stack(shares).sum(), torch.stack(right).sum(), num_pairs, gradients)


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
    longest = pairs.longest  # texts are padded behind
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


def _texts(
    comm: Communicator,
    pair: Pair,
    batch: TermBatch,
    outputs: Sequence[Mapping[str, Tensor]],
    parameters: Mapping[str, Tensor],
    scoring: Scoring,
) -> _Texts:
    loss, (first, second) = pair.matching, pair.branches
    fusion, seed = scoring.fusion, scoring.seed
    if loss is None or fusion is None:
        raise ValueError(f"the pair {first}-{second} has no matching loss, or {second} no fusion")
    sides, place = batch.everyone, batch.own[second].position
    longest = max(output[f"{second}_tokens"].shape[1] for output in outputs)
    tokens, mask = (
        torch.cat([_padded(output[name].detach(), longest) for output in outputs])
        for name in (f"{second}_tokens", f"{second}_mask")
    )
    # each replica draws for its share of the images, whoever has them
    shares = torch.arange(len(sides[first].label), device=place.device).tensor_split(
        comm.stage.replicas
    )
    drawn = loss.negatives(sides, first, shares[comm.replica], parameters, seed)
    drawn = comm.gather_replicas(drawn, [len(share) for share in shares])
    row = rows_of(batch.present[second], len(place))
    row_here = torch.full_like(sides[second].label, -1).index_copy_(0, place, row)
    weights = loss.weights(sides)
    return _Texts(
        tokens=tokens,
        mask=mask,
        row=row,
        # labels ascend, with gaps where samples were left out
        image=torch.searchsorted(sides[first].label, sides[second].label[place]),
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


def _places(comm: Communicator, pair: Pair, batch: TermBatch, blocks: Sequence[_Block]) -> Tensor:
    """[S] int64, places of the S rows of all blocks; −1: left out."""
    places = []
    for replica, rank in enumerate(comm.graph.last_stage(pair.first).ranks):
        rows = sum(block.rows for block in blocks if block.replica == replica)
        own = torch.empty(rows, dtype=torch.int64, device=comm.device)
        if rank == comm.rank:
            own = batch.places[pair.first].split(list(batch.counts[pair.first]))[replica]
        places.append(comm.from_first(pair, replica, own))
    return torch.cat(places)


def _pairs(
    texts: _Texts, places: Tensor, blocks: Sequence[_Block], most: int
) -> list[list[_Pairs]]:
    """Those of the own texts with the images of each block, at most `most` at a time: each text
    with its own image, with the one that was drawn for it, and with the images that it was drawn
    for. `places` [S]: of the images of all blocks."""
    number, device = len(texts.drawn_text), places.device
    images = torch.arange(len(places), device=device)  # [S]
    # [M + 1]: the last one is of those that were left out
    image_at = torch.full((number + 1,), -1, device=device).index_copy_(
        0, places % (number + 1), images
    )
    drawn_image = torch.where(texts.drawn_image < 0, -1, image_at[texts.drawn_image])
    drawn_text = F.pad(texts.drawn_text, (0, 1), value=-1)[places]
    image = torch.cat([image_at[texts.image], drawn_image, images])
    text = torch.cat([texts.row, texts.row, drawn_text])
    belong = torch.zeros_like(image, dtype=torch.bool)
    belong[: len(texts.row)] = True
    image_weight = F.pad(texts.image_weight, (0, 1))[places]
    weight = torch.cat([texts.weight, texts.weight, image_weight])
    block = torch.cat([image.new_full((rows,), i) for i, (_, rows, _) in enumerate(blocks)])
    block = torch.where((image < 0) | (text < 0), len(blocks), block[image])
    block, order = block.sort(stable=True)
    image, text, belong, weight = (values[order] for values in (image, text, belong, weight))
    # the host waits for the device here
    of_blocks, lengths = torch.stack([block, texts.mask.sum(1).long()[text]]).tolist()
    ends = [bisect_left(of_blocks, i) for i in range(len(blocks) + 1)]
    found, start_row = [], 0
    for start, end, (_, rows, _) in zip(ends, ends[1:], blocks):
        cuts = [*range(start, end, most), end]
        found.append(
            [
                _Pairs(
                    image[a:b] - start_row,
                    text[a:b],
                    belong[a:b],
                    weight[a:b],
                    longest=max(lengths[a:b]),
                )
                for a, b in zip(cuts, cuts[1:])
            ]
        )
        start_row += rows
    return found
