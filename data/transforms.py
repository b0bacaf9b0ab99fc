"""From a decoded picture to the tensor that an image tower reads: float32 [3, H, W], CLIP's normalisation.

H = W = image_size. Randomness comes from torch's default CPU generator, which the data set seeds for each sample.
"""

from collections.abc import Callable

import torch
from PIL import Image
from torchvision.transforms import InterpolationMode, v2

from data.pictures import upright_8bit

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)  # OpenAI CLIP, clip/clip.py
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
WHITE = 255
LIGHTEST_DARK = 176  # random backgrounds have channels of 176..255: light enough for the outlines of emoji

ImageTransform = Callable[[Image.Image], torch.Tensor]


class OnBackground:
    """A picture of any mode -> RGB; transparent parts show white, or in training a random light colour."""

    def __init__(self, random_colour: bool) -> None:
        self.random_colour = random_colour

    def __call__(self, image: Image.Image) -> Image.Image:
        image = upright_8bit(image)
        if image.mode == "RGB":
            return image
        colour = (WHITE, WHITE, WHITE)
        if self.random_colour:
            colour = tuple(torch.randint(LIGHTEST_DARK, WHITE + 1, (3,)).tolist())
        background = Image.new("RGB", image.size, colour)
        background.paste(image, mask=image.getchannel("A"))
        return background


def train_transform(image_size: int, colour_jitter: float = 0.0) -> ImageTransform:
    """A random crop of 80 to 100 % of the area, resized; PIL in any mode -> float32 [3, H, W].

    No flip: captions say left and right. `colour_jitter` is the relative change of brightness and contrast; it is off
    because captions name colours and skin tones. Errors: ValueError for a size below 1 pixel.
    """
    crop = v2.RandomResizedCrop(
        _checked(image_size), scale=(0.8, 1.0), ratio=(0.9, 1.1), interpolation=InterpolationMode.BICUBIC, antialias=True
    )
    jitter = [v2.ColorJitter(brightness=colour_jitter, contrast=colour_jitter)] if colour_jitter else []
    return v2.Compose([OnBackground(random_colour=True), crop, *jitter, *_to_tensor()])


def eval_transform(image_size: int) -> ImageTransform:
    """Shorter side to `image_size` pixels, then the centre; PIL in any mode -> float32 [3, H, W]; no randomness."""
    resize = v2.Resize(_checked(image_size), interpolation=InterpolationMode.BICUBIC, antialias=True)
    return v2.Compose([OnBackground(random_colour=False), resize, v2.CenterCrop(image_size), *_to_tensor()])


def _to_tensor() -> list:
    return [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(CLIP_MEAN, CLIP_STD)]


def _checked(image_size: int) -> int:
    if image_size < 1:
        raise ValueError(f"image_size {image_size}: a whole number of pixels >= 1 is needed")
    return image_size
