"""Embed clips of films with the model of this folder, with public libraries alone.

    from modeling_export import load
    from modeling_clips import Clips

    model = load(".")
    clips = Clips(model)
    frames = clips.frames("apple.mp4")  # [T, 3, H, W]; of a segment: clips.frames(FILE, 2.0, 5.5)
    video_embeds = clips.embed(frames[None])  # [1, D], of length 1

They are compared with `model.embed_texts` of sentences.
"""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

HALF_TICK_S = 0.0005  # Matroska rounds times to milliseconds
FRAMES_LIMIT = 2_000_000  # of a film, whose times are all kept: 18 hours at 30 frames/s
CLIP_LIMIT = 4096  # frames of a clip, all in memory
PIXEL_LIMIT = 100_000_000  # of a frame
# films alone: a playlist would open other files, or ask a server
FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,ogg,asf,mxf,nut"
OPTIONS = {"format_whitelist": FORMATS, "protocol_whitelist": "file", "max_streams": "100"}


class Clips:
    """Clips as `model` was trained on them: so many frames each, from the middles of equal parts,
    of which the image tower embeds each alone."""

    def __init__(self, model: Any) -> None:
        self.model, self.record = model, model.record["clips"]

    @torch.no_grad()
    def embed(self, frames: Tensor) -> Tensor:
        """[B, T, 3, H, W], as `frames` prepares them -> [B, D], of length 1: the mean of what the
        tower makes of each frame, before that is brought to the length 1."""
        features = self.model.image_features(frames.flatten(0, 1))
        return F.normalize(features.unflatten(0, frames.shape[:2]).mean(1), dim=-1)

    def frames(self, file: str | Path, start_s: float = 0.0, end_s: float | None = None) -> Tensor:
        """[T, 3, H, W] of a film, or of a segment of it in seconds, decoded by PyAV."""
        with _opened(file) as film:
            begins, end = _times(film, film.streams.video[0])
        end_s = end if end_s is None else min(end_s, end)
        number, rate = self.record["frames"], self.record["rate"]
        if rate is not None:
            number = min(max(round((end_s - start_s) * rate), 1), number)
        if number > CLIP_LIMIT:
            raise ValueError(f"{file}: {number} frames in a clip; give a segment of {CLIP_LIMIT}")
        middles = start_s + (np.arange(number) + 0.5) * ((end_s - start_s) / number)
        times = sorted(begins)  # of each middle the picture that is shown then
        wanted = [times[max(bisect_right(times, t + HALF_TICK_S) - 1, 0)] for t in middles]
        stamps = [begins[time] for time in wanted]
        with _opened(file) as film:
            film.streams.video[0].codec_context.options = {"max_pixels": str(PIXEL_LIMIT)}
            shown = {
                frame.pts: self.model.prepared(_as_shown(frame, film.streams.video[0]))
                for frame in film.decode(film.streams.video[0])
                if frame.pts in stamps
            }
        return torch.stack([shown[stamp] for stamp in stamps])


def _opened(file: str | Path) -> Any:
    """PyAV's container of a film. Raises what PyAV raises for what is none."""
    import av

    return av.open(f"file:{file}", options=OPTIONS)


def _times(film: Any, stream: Any) -> tuple[dict[float, int], float]:
    """(when each picture begins, in seconds from the film's beginning -> its time stamp; when the
    last one ends). Errors: ValueError for a film of over `FRAMES_LIMIT` frames."""
    zero, tick = max(film.start_time or 0, 0) / 1e6, float(stream.time_base)
    usual = 1 / float(stream.average_rate or 25)
    begins, end = {}, 0.0
    for number, packet in enumerate(film.demux(stream)):
        if number > FRAMES_LIMIT:
            raise ValueError(f"{film.name}: has over {FRAMES_LIMIT:,} frames; cut the film")
        if packet.pts is not None:
            begin = packet.pts * tick - zero
            begins[begin] = packet.pts
            end = max(end, begin + (packet.duration * tick if packet.duration else usual))
    return begins, end


def _as_shown(frame: Any, stream: Any) -> Image.Image:
    """With square pixels, and upright."""
    image = Image.fromarray(frame.to_ndarray(format="rgb24"))
    if stream.sample_aspect_ratio:
        width = max(1, round(image.width * stream.sample_aspect_ratio))
        if width != image.width:
            image = image.resize((width, image.height), Image.Resampling.BICUBIC)
    turned = np.rot90(np.asarray(image), round(frame.rotation / 90) % 4)
    return Image.fromarray(np.ascontiguousarray(turned))
