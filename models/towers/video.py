"""Video towers by name: any image tower on each frame of a clip, with a temporal part behind it,
and networks of clips.

| name | tower |
|---|---|
| any name of an image tower | that tower on each frame; `time=` says how frames become a clip |
| `r3d_18`, `mvit_v2_s`, … | torchvision's classifiers of clips |
| `hf:NAME` | transformers' VideoMAE, TimeSformer, X-CLIP |
| a name in `OWN` | one of your own |

    video_frames [F, 3, H, W] ─> image tower ─> video_hidden [F, W] ─> time ─> video_features [C, W]

C clips of a micro-batch, F frames of all of them, clip after clip; `video_row` [F], which clip each
is of; `video_time` [F], seconds since the clip's first frame, or as integers milliseconds, which a
run in bf16 does not round; W width. Clips may have unequal numbers of frames.

Clips that overlap show some frames several times. With `video_frame_row` [F], the row in
`video_frames` of each of the F, `video_frames` [U, 3, H, W] has each of them once: the image tower
sees U frames, and the layers behind it F. Networks of clips take it too.

| `time=` | how frames become a clip |
|---|---|
| `mean` | the mean of their features |
| `transformer` | `time_layers` blocks with `time_heads` heads before the mean |

Networks of clips have no `time=`, and take clips of exactly as many frames as they were made for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.towers.image import image_tower
from models.towers.layers import Layer, LayerSpec, Tower, reset
from models.towers.libraries import torchvision, transformers_image, transformers_video
from models.towers.names import HF, alike, join_name, parse_overrides, refuse, split_name
from models.towers.of_image import OfImage, renamed_specs
from models.towers.pooling import num_heads

OWN: dict[str, Callable[[str, int, int], Tower]] = {}
"""Towers of one's own: how names begin -> from a whole name, the image size and the number of
frames to a tower without a head."""

FRAME_ROW = "video_frame_row"
KEYS = {"time": str, "time_layers": int, "time_heads": int}  # beside those of the image tower
TIMES = ("mean", "transformer")
TIME_LAYERS = 4  # as CLIP4Clip's sequential transformer (Luo et al. 2022)
FASTEST_S, SLOWEST_S = 0.25, 256.0  # periods of the positions in time


def video_tower(name: str, image_size: int, num_frames: int) -> Tower:
    """The tower of `name` for frames of `image_size` pixels a side and about `num_frames` a clip;
    it has no head yet. Errors: ValueError, FileNotFoundError."""
    if num_frames < 1:
        raise ValueError(f"video tower {name!r}: num_frames={num_frames} must be at least 1")
    base, overrides = split_name(name)
    if base in OWN:
        return OWN[base](name, image_size, num_frames)
    if whole := _whole_clips(base):
        if further := [key for key in KEYS if key in overrides]:
            raise ValueError(
                f"video tower {name!r}: {base} sees whole clips; leave out {', '.join(further)}"
            )
        return whole(join_name(base, overrides), image_size, num_frames)
    own = {key: overrides.pop(key) for key in KEYS if key in overrides}
    image = image_tower(join_name(base, overrides), image_size)
    time, made = _time(name, image.width, parse_overrides(name, own, KEYS))
    base, overrides = split_name(image.name)
    return Tower(
        branch="video",
        name=join_name(base, {**overrides, **own}),
        width=image.width,
        specs=(
            *renamed_specs(image, "video", Frames, "video_hidden"),
            *_time_specs(made, num_frames),
        ),
        config={**image.config, **time, "video_input": _video_input(image_size, num_frames)},
        example=partial(_example, image_size, num_frames),
    )


def frames_tower(name: str) -> str | None:
    """The name of the image tower that the video tower `name` shows its frames; None: it sees whole
    clips."""
    base, overrides = split_name(name)
    if base in OWN or _whole_clips(base):
        return None
    return join_name(base, {key: text for key, text in overrides.items() if key not in KEYS})


def _whole_clips(base: str) -> Callable[[str, int, int], Tower] | None:
    """What makes the tower of a network of clips, from its name, the image size and the number of
    frames; None: `base` is none."""
    if alike(base, torchvision.clip_names()):
        return partial(_of_clips, torchvision.clip_tower, True)
    if not base.startswith(HF) or transformers_image.hub_id_of(base):
        return None
    try:
        is_video = transformers_video.is_video(base)
    except ValueError:  # a name that nobody knows, which image towers refuse
        return None
    return partial(_of_clips, transformers_video.image_tower, False) if is_video else None


def _of_clips(
    make: Callable[[str, int, int], Tower],
    channels_first: bool,
    name: str,
    image_size: int,
    num_frames: int,
) -> Tower:
    """Of a network that is an image tower but for its `pixel_values`, which are clips."""
    tower = make(name, image_size, num_frames)
    first = partial(Clips, num_frames=num_frames, channels_first=channels_first)
    return Tower(
        branch="video",
        name=tower.name,
        width=tower.width,
        specs=renamed_specs(tower, "video", first),
        config={**tower.config, "video_input": _video_input(image_size, num_frames)},
        example=partial(_example, image_size, num_frames),
    )


def _video_input(image_size: int, num_frames: int) -> dict[str, int]:
    return {"num_frames": num_frames, "image_size": image_size}


def _example(image_size: int, num_frames: int, samples: int) -> dict[str, Tensor]:
    total = samples * num_frames
    return {
        "video_frames": torch.empty(total, 3, image_size, image_size, device="meta"),
        "video_row": torch.empty(total, dtype=torch.int64, device="meta"),
        "video_time": torch.empty(total, device="meta"),
    }


# -- frames


class Frames(OfImage):
    """The first layer: `video_frames` as images. Also `video_time` -> `video_ms` [F], whole
    milliseconds: what travels between stages as a number with a fraction would wait for a
    gradient."""

    given = ("video_frames", "video_time")

    def __init__(self, inner: Layer, renamed: Callable[[str], str]) -> None:
        super().__init__(inner, renamed)
        self.makes = (*self.makes, "video_ms")

    def pixels(self, frames: Tensor, time: Tensor) -> Tensor:
        return frames

    def compute(self, frames: Tensor, time: Tensor) -> tuple[Tensor, ...]:
        made = super().compute(frames, time)
        made = (made,) if isinstance(made, Tensor) else made
        return *made, ((time.float() * 1000).round() if time.is_floating_point() else time).long()


class Clips(OfImage):
    """The first layer of a network of clips: `video_frames` as clips [C, T, 3, H, W] of equally
    many frames T, or with `channels_first` [C, 3, T, H, W]."""

    given = ("video_frames", "video_row", "video_time")
    reads_if_given = (FRAME_ROW,)

    def __init__(
        self,
        inner: Layer,
        renamed: Callable[[str], str],
        num_frames: int,
        channels_first: bool,
    ) -> None:
        super().__init__(inner, renamed)
        self.num_frames, self.channels_first = num_frames, channels_first
        self.drops = (*self.given, *self.reads_if_given, "video_clips")

    def pixels(
        self, frames: Tensor, row: Tensor, time: Tensor, video_frame_row: Tensor | None = None
    ) -> Tensor:
        frames, number = of_clips(frames, video_frame_row), self.num_frames
        refusal = (
            f"this video tower takes clips of {number} frames and no others; give all clips that "
            "number of frames, or take an image tower, which is shown frame after frame"
        )
        if len(row) % number:
            raise ValueError(f"{len(row)} video_frames: {refusal}")
        if not row.is_meta:  # asked without waiting for a GPU, which prints the message and stops
            whole = torch.arange(len(row), device=row.device) // number
            torch._assert_async((row == whole).all(), refusal)
        clips = frames.unflatten(0, (-1, number))
        return clips.transpose(1, 2) if self.channels_first else clips


# -- time


def of_clips(frames: Tensor, video_frame_row: Tensor | None) -> Tensor:
    """What is known of each frame [U, ...] -> of the frames of all clips [F, ...]; as it is where
    each clip has frames of its own."""
    return frames if video_frame_row is None else frames[video_frame_row]


def _time(name: str, width: int, values: dict[str, Any]) -> tuple[dict[str, Any], list[Layer]]:
    """What the keys in a name say, for the run's record, and the layers of it."""
    time = values.get("time", "mean")
    if time not in TIMES:
        raise refuse(f"video tower {name!r}: time", time, TIMES)
    if time == "mean":
        if further := sorted(values.keys() - {"time"}):
            raise ValueError(
                f"video tower {name!r}: {further[0]} is of time=transformer; give that too, or "
                "leave it out"
            )
        return {"time": time}, []
    layers = values.get("time_layers", TIME_LAYERS)
    heads = values.get("time_heads", num_heads(width))
    if layers < 1:
        raise ValueError(f"video tower {name!r}: time_layers={layers} must be at least 1")
    if heads < 1 or width % heads:
        raise ValueError(
            f"video tower {name!r}: time_heads={heads} must divide the width of the frames' "
            f"features, {width}"
        )
    with torch.device("meta"):
        made: list[Layer] = [TimeBlock(f"time.{i}", width, heads) for i in range(layers)]
    return {"time": time, "time_layers": layers, "time_heads": heads}, made


def _time_specs(blocks: list[Layer], num_frames: int) -> list[LayerSpec]:
    named = [(f"video.time.{i}", block) for i, block in enumerate(blocks)]
    named.append(("video.time.mean", FramesMean(num_frames)))
    return [LayerSpec(name, "video", layer, _initialise) for name, layer in named]


class TimeBlock(Layer):
    """`video_hidden` [F, W] -> `video_hidden`: a block of a transformer, pre-norm, over the frames
    of each clip.

    What attends and what is attended to has its position added behind the norm, so the positions
    are no part of what is pooled; and both of the block's outputs begin as zeros: at first a
    stack of them changes nothing. Frames lie one behind the other and see those of their own
    clip by a mask: no frame is padding, whatever the lengths, and the shapes need no numbers from
    the device. Of 2,048 frames through four blocks, all pairs are 0.3 % of a ViT-B/32's operations.
    """

    reads = ("video_hidden", "video_row", "video_ms")
    reads_if_given = (FRAME_ROW,)
    drops = reads_if_given
    makes = ("video_hidden",)

    def __init__(self, name: str, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.canonical_names = {local: f"video.{name}.{local}" for local in self.state_dict()}

    def compute(
        self, hidden: Tensor, row: Tensor, ms: Tensor, video_frame_row: Tensor | None = None
    ) -> Tensor:
        hidden = of_clips(hidden, video_frame_row)
        given = self.norm_1(hidden)
        given = given + positions(ms, given.shape[1]).to(given.dtype)
        # three [1, heads, F, W / heads]
        parts = self.qkv(given).unflatten(1, (3, self.heads, -1))
        q, k, v = parts.permute(1, 2, 0, 3)[:, None]
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=row[:, None] == row)
        hidden = hidden + self.out(found[0].transpose(0, 1).flatten(1))
        return hidden + self.fc2(F.gelu(self.fc1(self.norm_2(hidden))))


def positions(ms: Tensor, width: int) -> Tensor:
    """Sinusoids of the time of frames, [F] -> [F, width] fp32, with periods from `FASTEST_S` to
    `SLOWEST_S`. Of seconds and not of a learned table by number: clips have unequal rates and
    numbers of frames, and what a number means in one it does not mean in another."""
    steps = torch.arange((width + 1) // 2, device=ms.device) / max(1, (width - 1) // 2)
    period_ms = 1000 * FASTEST_S * (SLOWEST_S / FASTEST_S) ** steps
    angles = 2 * math.pi * ms[:, None] / period_ms
    return torch.cat([angles.sin(), angles.cos()], 1)[:, :width]


class FramesMean(Layer):
    """`video_hidden` [F, W] -> `video_features` [C, W], the mean of each clip's frames, added up in
    fp32.

    `video_clips` [C], the frames of each clip, says by its length how many clips there are.
    Without it the device is asked for the last of `video_row`, for which the host waits; on the
    meta device, which cannot be asked, each clip has `num_frames`.
    """

    reads = ("video_hidden", "video_row")
    reads_if_given = ("video_clips", FRAME_ROW)
    drops = (*reads, "video_ms", *reads_if_given)
    makes = ("video_features",)

    def __init__(self, num_frames: int) -> None:
        super().__init__()
        self.num_frames = num_frames

    def compute(
        self,
        hidden: Tensor,
        row: Tensor,
        video_clips: Tensor | None = None,
        video_frame_row: Tensor | None = None,
    ) -> Tensor:
        hidden = of_clips(hidden, video_frame_row)
        if video_clips is not None:
            number = len(video_clips)
        else:
            number = len(row) // self.num_frames if row.is_meta else int(row[-1]) + 1
        # [C, F], a product with which adds in the same order each time
        of_clip = (torch.arange(number, device=row.device)[:, None] == row).float()
        total = of_clip @ hidden.float()
        return (total / of_clip.sum(1, keepdim=True)).to(hidden.dtype)


def _initialise(layer: Layer) -> None:
    reset(layer)
    if isinstance(layer, TimeBlock):
        for linear in (layer.out, layer.fc2):
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)
