"""Embeddings of moments of films, from the features of their frames.

    video_hidden ──tap──> moment_frames ── mean over the span (moment_spans) ── project ──> moment_embeds

F frames of all clips of a micro-batch, n moments of them, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from models.towers.annotations import AnnotationsHead
from models.towers.fusion import tap
from models.towers.layers import Layer, LayerSpec, Tower
from models.towers.video import FRAME_ROW, FramesMean, of_clips

FRAMES = ("moment_frames", "moment_frame_row", "moment_frame_ms")


class FramesTap(Layer):
    """`video_hidden` of the frames of all clips, before they become clips -> a copy for the head:
    `moment_frames` [F, W], and of each frame its clip and its milliseconds, int64 [F]."""

    reads = ("video_hidden", "video_row", "video_ms")
    reads_if_given = (FRAME_ROW,)
    makes = FRAMES

    def compute(
        self, hidden: Tensor, row: Tensor, ms: Tensor, video_frame_row: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        # * 1: what is sent on under two names must not share its memory
        return of_clips(hidden, video_frame_row) * 1, row * 1, ms * 1


def tap_frames(tower: Tower) -> tuple[tuple[LayerSpec, ...], partial[MomentsHead]]:
    """The recipes of a video tower without a head, with a tap behind the layers of its frames, and
    what makes its head. Errors: ValueError for a tower that has no features of frames."""
    *before, last = tower.specs
    if not isinstance(last.template, FramesMean):
        raise ValueError(
            f"{tower.branch} tower {tower.name!r} sees whole clips, and moments are cut out of the "
            "features of frames; take the name of an image tower, or leave moment:text out of --pairs"
        )
    specs = (*before, tap(f"{tower.branch}.frames", tower.branch, FramesTap()), last)
    return specs, partial(MomentsHead, tower.branch, tower.width)


def span_weights(spans: Tensor, row: Tensor, frame_row: Tensor, frame_ms: Tensor) -> Tensor:
    """How much of each moment a frame stands for: `spans` [n, 2] start and end, milliseconds, `row`
    [n] of which clip -> [n, F] fp32, whose rows add up to 1.

    A frame stands for the time that is nearer to it than to any other frame of its clip, the first
    and the last also for all before and behind them: a moment between two frames has the features
    of both, by as much of it as is nearer to each.
    """
    middle = (frame_ms[1:] + frame_ms[:-1]).float() / 2
    alone = frame_row[1:] != frame_row[:-1]
    ends = torch.cat([middle.masked_fill(alone, torch.inf), middle.new_full((1,), torch.inf)])
    begins = torch.cat([middle.new_full((1,), -torch.inf), middle.masked_fill(alone, -torch.inf)])
    start, end = spans.float().unbind(1)
    end = torch.maximum(end, start + 1)  # of a clip that could not be read both are 0
    overlap = torch.minimum(ends, end[:, None]) - torch.maximum(begins, start[:, None])
    overlap = overlap.clamp(min=0) * (row[:, None] == frame_row)
    return overlap / overlap.sum(1, keepdim=True)


class MomentsHead(AnnotationsHead):
    """The head of clips with moments: `moment_spans` int32 [n, 2], milliseconds since the clip's
    first frame, and `moment_row`, see `span_weights`."""

    def __init__(self, branch: str, channels: int, *given: Any) -> None:
        super().__init__(branch, "moment", "moment_spans", FRAMES, channels, *given)

    def pooled(
        self, tapped: Sequence[Tensor], extents: Tensor | None, row: Tensor | None
    ) -> Tensor:
        frames, frame_row, frame_ms = tapped
        if extents is None or row is None:
            return frames[:0]
        weights = span_weights(extents, row, frame_row, frame_ms)
        return (weights @ frames.float()).to(frames.dtype)
