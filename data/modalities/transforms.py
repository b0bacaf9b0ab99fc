"""Transforms of encoded images to what an image tower reads: [b, 3, H, W], channels-last,
normalised as its weights expect.

Two phases, so that a cache can stand between them and change nothing:

    A  `Stored`: bytes -> uint8 image [h, w, 3 or 4], deterministic: decoded at a reduced scale,
       upright, RGB or RGBA, and shrunk if it is much larger than the tower needs
    B  `TrainTransform`, `EvalTransform`: that image -> uint8 [H, W, 3], at random in training,
       always the same in evaluation; `view` also says where in the image that is

`stacked` then makes one tensor of the images of a micro-batch, and `normalise` its values, where
the tower computes. H, W: the tower's input; h, w: a stored image. Chance comes from a numpy
Generator that the caller seeds for each sample.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from data.batching.load_control import scaled_size
from data.decoding.images import decode_bytes, upright_8bit
from data.modalities.boxes import Placed
from data.modalities.memory import empty
from data.modalities.preprocessing import CLIP, Preprocessing

if TYPE_CHECKING:
    from data.batching.requests import MicroBatchRequest

# of phase A: to be raised when `Stored` gives other pixels, or caches answer with old ones
VERSION = "1"
WHITE = 255
# random backgrounds have channels of 176..255: light enough for the outlines of emoji
LIGHTEST_DARK = 176
CROP_AREA, CROP_RATIO = (0.8, 1.0), (0.9, 1.1)
COLOUR_JITTER = 0.2  # where it is asked for
# Images more than KEPT times as large as needed are shrunk to SHRUNK times: the smallest crop,
# sqrt(0.8) of a side, is then still 1.03 times as large as what it becomes, so no detail that the
# tower could see is lost.
KEPT, SHRUNK = 1.25, 1.15

Size = tuple[int, int]  # H, W


@dataclass(frozen=True)
class Stored:
    """Phase A for towers that read `size` = (H, W): bytes -> uint8 [h, w, 3], or [h, w, 4] where
    something is transparent.

    h >= H and w >= W wherever the file has as much; a smaller image stays as it is. Resizing uses
    `interpolation`.
    """

    size: Size
    interpolation: str = "bicubic"

    def __call__(self, data: bytes) -> np.ndarray:
        """Errors: BadSample."""
        return self.of(decode_bytes(data, at_least=self.size))

    def of(self, image: Image.Image) -> np.ndarray:
        """The same of a decoded image, of any mode."""
        image = upright_8bit(image)
        if image.mode == "RGBA" and image.getchannel("A").getextrema()[0] == 255:
            image = image.convert("RGB")
        size = self.sides((image.height, image.width))
        if size == (image.height, image.width):
            return np.array(image)
        if image.mode == "RGBA":  # Pillow weighs colours by their opacity
            return np.array(image.resize(size[::-1], Image.Resampling[self.interpolation.upper()]))
        return _resized(np.array(image), size, self.interpolation)

    def sides(self, image: Size) -> Size:
        """(h, w) of what becomes of an image of these sides."""
        larger = min(image[0] / self.size[0], image[1] / self.size[1])
        if larger <= KEPT:
            return image
        return round(image[0] * SHRUNK / larger), round(image[1] * SHRUNK / larger)

    @property
    def name(self) -> str:
        """A name, equal for two that give the same pixels for the same bytes. The mean and standard
        deviation are applied to what is stored, so they are not part of it."""
        resampling = "" if self.interpolation == "bicubic" else f":{self.interpolation}"
        return f"{VERSION}:{self.size[0]}x{self.size[1]}{resampling}"

    def key(self, content_hash: bytes) -> bytes:
        """The key in a cache of the image with this hash of its encoded bytes."""
        return content_hash + self.name.encode()


@dataclass(frozen=True)
class ImageTransform(ABC):
    """Phase B for towers that read `size` = (H, W), pixels: uint8 [h, w, 3 or 4] -> uint8
    [H, W, 3]. Errors: ValueError for a size below 1."""

    size: Size
    preprocessing: Preprocessing = CLIP

    def __post_init__(self) -> None:
        if min(self.size) < 1:
            raise ValueError(
                f"image_size {self.size}: whole numbers of pixels >= 1 are needed, height and width"
            )

    @property
    def stored(self) -> Stored:
        """Phase A of training: large enough for evaluation's resizing, too."""
        return Stored(self.preprocessing.resized(self.size), self.preprocessing.interpolation)

    def __call__(
        self, image: np.ndarray, generator: np.random.Generator | None = None
    ) -> np.ndarray:
        return self.view(image, generator)[0]

    @abstractmethod
    def view(
        self, image: np.ndarray, generator: np.random.Generator | None = None
    ) -> tuple[np.ndarray, Placed]:
        """The same, and what of the image it shows. What draws nothing needs no `generator`."""

    @abstractmethod
    def placed(self, sides: Size, generator: np.random.Generator | None = None) -> Placed:
        """What `view` shows of an image of these sides (h, w), without its pixels: the same where
        the generator is the same."""

    def placed_on(self, sides: Size, generator: np.random.Generator | None = None) -> Placed:
        """The same of a file whose image has these sides, before phase A."""
        return self.placed(self.stored.sides(sides), generator)


@dataclass(frozen=True)
class TrainTransform(ImageTransform):
    """Phase B of training; all chance is drawn from `generator`.

    The crop has 80 to 100 % of the area of the largest box of the target's shape, changed in shape
    by up to 10 %, anywhere in the image; with another `train_resize_mode` than `shortest`, of the
    whole image and of its shape, then squashed, or filled up. Transparent parts show a random light
    colour, or with `white` what they show in evaluation. `flip` (the probability of mirroring) is
    off because captions say left and right; `colour_jitter` (relative change of brightness and
    contrast) because captions name colours and skin tones.
    """

    colour_jitter: float = 0.0
    flip: float = 0.0
    white: bool = False

    def view(
        self, image: np.ndarray, generator: np.random.Generator | None = None
    ) -> tuple[np.ndarray, Placed]:
        drawn = _drawn(generator)
        spread = WHITE + 1 - LIGHTEST_DARK
        colour = tuple(LIGHTEST_DARK + int(part * spread) for part in drawn[:3])
        image = _on_background(image, (WHITE, WHITE, WHITE) if self.white else colour)
        rows, columns = self._windows(image.shape[:2], drawn)
        placed = self._placed(image.shape[:2], drawn)
        crop = np.array(image[rows.start : rows.stop, columns.start : columns.stop])
        inner = rows.length, columns.length
        image = _on_black(
            _resized(crop, inner, self.preprocessing.interpolation), self.size, rows.at, columns.at
        )
        if placed.mirrored:
            image = np.ascontiguousarray(image[:, ::-1])
        if self.colour_jitter:
            brightness, contrast = (1 + self.colour_jitter * (2 * part - 1) for part in drawn[8:10])
            pixels = torch.from_numpy(image).permute(2, 0, 1)  # [3, H, W]
            pixels = functional.adjust_brightness(pixels, brightness)
            pixels = functional.adjust_contrast(pixels, contrast)
            image = np.ascontiguousarray(pixels.permute(1, 2, 0).numpy())
        return image, placed

    def placed(self, sides: Size, generator: np.random.Generator | None = None) -> Placed:
        return self._placed(sides, _drawn(generator))

    def _placed(self, sides: Size, drawn: np.ndarray) -> Placed:
        rows, columns = self._windows(sides, drawn)
        (top, height), (left, width) = rows.shown(self.size[0]), columns.shown(self.size[1])
        mirrored = bool(drawn[7] < self.flip)
        return Placed.of((top, left, height, width), sides, self.size, mirrored)

    def _windows(self, sides: Size, drawn: np.ndarray) -> list[_Window]:
        """Rows and columns of an image of these sides (h, w) that are shown."""
        mode = self.preprocessing.train_resize_mode
        box = _crop_box(sides, self.size if mode == "shortest" else sides, *drawn[3:7])
        if mode == "longest":
            return _windows(box, sides, self.size)
        return [_Window(a, a + n, to, 0) for a, n, to in zip(box[:2], box[2:], self.size)]


@dataclass(frozen=True)
class StoredWhole(Stored):
    """Phase A of evaluation: the file is decoded at its full size, and resized once, from there to
    what the centre is cropped of. Always uint8 [h, w, 3]."""

    resize_mode: str = "shortest"

    def __call__(self, data: bytes) -> np.ndarray:
        return self.of(decode_bytes(data))

    def of(self, image: Image.Image) -> np.ndarray:
        image = np.array(upright_8bit(image))
        return _resized_to_crop(image, self.size, self.interpolation, self.resize_mode)

    def sides(self, image: Size) -> Size:
        return _sides_to_crop(image, self.size, self.resize_mode)

    @property
    def name(self) -> str:
        return f"whole:{super().name}:{self.resize_mode}"


@dataclass(frozen=True)
class EvalTransform(ImageTransform):
    """Phase B of evaluation: on white, resized, and its centre cropped.

    Sizes and offsets are rounded as in torchvision's `Resize` and `CenterCrop`, so images have the
    pixels of the presets of torchvision and OpenCLIP. `whole`: phase A gives it images that are
    resized once, from their full size; else those that training sees, for training itself.
    """

    whole: bool = True

    @property
    def stored(self) -> Stored:
        shared = super().stored
        if not self.whole:
            return shared
        return StoredWhole(shared.size, shared.interpolation, self.preprocessing.resize_mode)

    def view(
        self, image: np.ndarray, generator: np.random.Generator | None = None
    ) -> tuple[np.ndarray, Placed]:
        (height, width), given = self.size, self.preprocessing
        least = given.resized(self.size)
        image = _resized_to_crop(image, least, given.interpolation, given.resize_mode)
        sides = image.shape[:2]
        top, left = _margins(sides, self.size)
        placed = Placed.of((top, left, height, width), sides, self.size)
        return np.ascontiguousarray(_centred(image, self.size)), placed

    def placed(self, sides: Size, generator: np.random.Generator | None = None) -> Placed:
        least = self.preprocessing.resized(self.size)
        sides = _sides_to_crop(sides, least, self.preprocessing.resize_mode)
        return Placed.of((*_margins(sides, self.size), *self.size), sides, self.size)


@dataclass(frozen=True)
class Views:
    """The transforms of a run, which all that lies on an image shares: where the generator is the
    same, it shows the same part. `side_multiple`: of the sides that the tower takes."""

    train: ImageTransform
    evaluation: ImageTransform
    side_multiple: int = 1

    def of(self, request: MicroBatchRequest) -> ImageTransform:
        """For the images of a micro-batch, of the size that it is to have."""
        transform = self.train if request.training else self.evaluation
        size = request.size or transform.size
        if request.training and request.feed_rates.image_size:
            rate = request.feed_rates.image_size
            size = scaled_size(size, rate, max(transform.size), self.side_multiple)
        return replace(transform, size=size)


def augmented(
    size: Size, words: Sequence[str], preprocessing: Preprocessing = CLIP
) -> ImageTransform:
    """The transform of training: `words` of train.py's --augmentation; without any, what evaluation
    does, to the images of a cache. Half of the images are flipped where flips are asked for."""
    if not words:
        return EvalTransform(size, preprocessing, whole=False)
    return TrainTransform(
        size,
        preprocessing,
        colour_jitter=COLOUR_JITTER * ("colour" in words),
        flip=0.5 * ("flip" in words),
        white="white" in words,
    )


def stacked(images: Sequence[np.ndarray]) -> Tensor:
    """uint8 [H, W, 3] each -> uint8 [b, 3, H, W], channels-last.

    Convolutions follow the memory format of their input, and are faster on channels-last on CPU and
    GPU alike.
    """
    out = empty((len(images), *images[0].shape), torch.uint8)
    np.stack(images, out=out.numpy())
    return out.permute(0, 3, 1, 2)


def normalise(
    pixels: Tensor, dtype: torch.dtype = torch.float32, preprocessing: Preprocessing = CLIP
) -> Tensor:
    """uint8 [b, 3, H, W], channels-last -> the same of `dtype`: (value / 255 - mean) / std of each
    channel, computed in float32 on the device where the pixels are.

    So a quarter of the bytes of float32 have to get there.
    """
    if pixels.is_meta:
        return torch.empty_like(pixels, dtype=dtype)
    channels_last = pixels.permute(0, 2, 3, 1)  # [b, H, W, 3]
    scale, shift = _scale_and_shift(preprocessing, pixels.shape[3], pixels.device)
    rows = channels_last.reshape(-1, len(scale))  # [b H, 3 W]
    out = torch.empty(rows.shape, dtype=dtype, device=pixels.device)
    # on a CPU image by image: in between, the values stay in its cache, and no further memory of
    # the size of a micro-batch is touched
    step = pixels.shape[2] if pixels.device.type == "cpu" else len(rows)
    for part, made in zip(rows.split(step), out.split(step)):
        torch.addcmul(shift, part, scale, out=made)
    return out.view(channels_last.shape).permute(0, 3, 1, 2)


@functools.lru_cache(64)  # a copy to the device for each micro-batch would make the host wait
def _scale_and_shift(
    preprocessing: Preprocessing, width: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Scale and shift of a row of an image, [3 W] each: a broadcast over 3 channels would be a loop
    of 3 steps."""
    mean, std = preprocessing.mean, preprocessing.std
    scale = [1 / (255 * s) for s in std]
    shift = [-m / s for m, s in zip(mean, std)]
    with torch.inference_mode(False):  # training may be the next to use them
        return (
            torch.tensor(scale, device=device).repeat(width),
            torch.tensor(shift, device=device).repeat(width),
        )


def _drawn(generator: np.random.Generator | None) -> np.ndarray:
    """All at once, and always all: what one option draws never shifts another. [10] of 0..1"""
    assert generator is not None, "training draws by chance"
    return generator.random(10)


def _crop_box(
    image: Size, target: Size, area: float, ratio: float, down: float, right: float
) -> tuple[int, int, int, int]:
    """(top, left, height, width) of a random crop; `area` .. `right` are drawn evenly from 0..1.

    torchvision's RandomResizedCrop measures the area of the whole image; a square of 80 % of a
    4:3 photo does not fit, and it falls back to the same centre nearly every time. Here the area is
    that of the largest box that fits.
    """
    (h, w), shape = image, target[1] / target[0]
    largest = min(h, w / shape) * min(w, h * shape)
    pixels = largest * (CROP_AREA[0] + area * (CROP_AREA[1] - CROP_AREA[0]))
    low, high = np.log(CROP_RATIO)
    shape *= float(np.exp(low + ratio * (high - low)))
    height = min(h, max(1, round((pixels / shape) ** 0.5)))
    width = min(w, max(1, round((pixels * shape) ** 0.5)))
    return int(down * (h - height + 1)), int(right * (w - width + 1)), height, width


def _on_background(image: np.ndarray, colour: tuple[int, ...]) -> np.ndarray:
    if image.shape[2] == 3:
        return image
    pil_image = Image.fromarray(image)  # RGBA
    background = Image.new("RGB", pil_image.size, colour)
    background.paste(pil_image, mask=pil_image.getchannel("A"))
    return np.array(background)


def _resized(image: np.ndarray, size: Size, interpolation: str) -> np.ndarray:
    """uint8 [h, w, 3], contiguous -> uint8 [H, W, 3], contiguous; antialiased."""
    # [3, h, w], channels-last in memory: its fast path
    pixels = torch.from_numpy(image).permute(2, 0, 1)
    pixels = functional.resize(pixels, list(size), InterpolationMode(interpolation), antialias=True)
    return np.ascontiguousarray(pixels.permute(1, 2, 0).numpy())


def _resized_to_crop(
    image: np.ndarray, least: Size, interpolation: str, resize_mode: str
) -> np.ndarray:
    """uint8 [h, w, 3 or 4] -> that of which the centre is cropped, uint8 [h, w, 3]; one that was
    resized already stays as it is."""
    image = _on_background(image, (WHITE, WHITE, WHITE))
    h, w = image.shape[:2]
    size = _sides_to_crop((h, w), least, resize_mode)
    # By Pillow, as OpenCLIP and torchvision's presets resize files: torch rounds some of the
    # values to the next one.
    resampling = Image.Resampling[interpolation.upper()]
    return np.array(Image.fromarray(image).resize(size[::-1], resampling))


def _sides_to_crop(image: Size, least: Size, resize_mode: str) -> Size:
    """(h, w) -> the sides to which an image is resized before its centre is cropped or filled
    up."""
    if resize_mode == "squash":
        return least
    if resize_mode == "longest":
        return _within(least, image)
    # one side becomes the least that is asked for; the other follows in proportion, rounded down
    (h, w), shorter_h = image, least[0] * image[1] >= least[1] * image[0]
    return (least[0], least[0] * w // h) if shorter_h else (least[1] * h // w, least[1])


def _within(target: Size, image: Size) -> Size:
    """The largest sides of the image's shape within the target, rounded as OpenCLIP's."""
    ratio = max(image[0] / target[0], image[1] / target[1])
    height, width = (max(1, round(side / ratio)) for side in image)
    return height, width


def _margins(image: Size, size: Size) -> tuple[int, int]:
    """Top and left of the centre of `size` in an image; below 0 where the image is smaller. Both
    are rounded as OpenCLIP's and torchvision's."""
    top, left = (round((a - b) / 2) if a >= b else -((b - a) // 2) for a, b in zip(image, size))
    return top, left


def _centred(image: np.ndarray, size: Size) -> np.ndarray:
    """uint8 [h, w, 3] -> [H, W, 3]: its centre, on black where the image is smaller."""
    top, left = _margins(image.shape[:2], size)
    image = image[max(0, top) : max(0, top) + size[0], max(0, left) : max(0, left) + size[1]]
    return _on_black(image, size, max(0, -top), max(0, -left))


def _on_black(image: np.ndarray, size: Size, top: int, left: int) -> np.ndarray:
    """uint8 [h, w, 3] -> [H, W, 3], black around it."""
    if image.shape[:2] == size:
        return image
    out = np.zeros((*size, 3), np.uint8)
    out[top : top + image.shape[0], left : left + image.shape[1]] = image
    return out


class _Window(NamedTuple):
    """Rows or columns `start` .. `stop` of an image, which become `length` pixels of a view that
    begin at `at`."""

    start: int
    stop: int
    length: int
    at: int

    def shown(self, size: int) -> tuple[float, float]:
        """Where a view of `size` begins in the image, and how much of it that would be; beyond its
        edges where the view is filled up."""
        scale = (self.stop - self.start) / self.length
        return self.start - self.at * scale, size * scale


def _windows(box: tuple[int, int, int, int], image: Size, size: Size) -> list[_Window]:
    """Rows and columns of the view of `size` in whose middle the `box` (top, left, height, width)
    stands as large as it fits: black is only what lies beyond the image, so that no part of a box
    is where the view has nothing."""
    scale = max(box[2] / size[0], box[3] / size[1])
    found = []
    for begin, length, side, to in zip(box[:2], box[2:], image, size):
        first = begin + length / 2 - to * scale / 2
        start, stop = max(0, round(first)), min(side, round(first + to * scale))
        pixels = min(to, max(1, round((stop - start) / scale)))
        found.append(_Window(start, stop, pixels, min(to - pixels, max(0, round(-first / scale)))))
    return found
