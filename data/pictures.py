"""Pictures as they come out of files: decode, turn upright, bring to 8-bit RGB or RGBA, recognise equal ones."""

import hashlib
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

EXIF_ORIENTATION = 0x0112


def decode(path: Path) -> Image.Image:
    """Open and fully decode one image file; any mode.

    Errors: OSError, SyntaxError or ValueError of Pillow, whichever the format's decoder raises.
    """
    with Image.open(path) as image:
        image.load()
        return image


def upright_8bit(image: Image.Image) -> Image.Image:
    """The picture a viewer would show, as mode RGB, or RGBA where it has transparency; 8 bits a channel.

    EXIF rotation is applied. 16-bit greyscale keeps its upper 8 bits (Pillow's own conversion would clip at 255);
    float greyscale is read as 0..1 when no value is above 1, else as 0..255. CMYK is converted by Pillow.
    """
    if image.getexif().get(EXIF_ORIENTATION, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode in ("RGB", "RGBA") and "transparency" not in image.info:
        return image
    if image.mode == "I" or image.mode.startswith("I;16"):  # "I": how Pillow before 11 opened a 16-bit PNG
        image = Image.fromarray((np.asarray(image).clip(0, 65535) // 256).astype(np.uint8))
    elif image.mode == "F":
        values = np.nan_to_num(np.asarray(image))
        image = Image.fromarray((values * (255.0 if values.max() <= 1.0 else 1.0)).clip(0, 255).astype(np.uint8))
    transparent = image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info
    return image.convert("RGBA" if transparent else "RGB")


def pixel_key(image: Image.Image) -> str:
    """A hash that is equal for two pictures that look equal: same size, same visible pixels, whatever the file format."""
    image = upright_8bit(image)
    pixels = np.asarray(image)  # [H, W, 3 or 4]
    if image.mode == "RGBA":
        opaque = pixels[..., 3:]
        # The colour beneath a fully transparent pixel cannot be seen; a fully opaque picture is an RGB picture.
        pixels = pixels[..., :3] if opaque.min() == 255 else np.where(opaque > 0, pixels, 0).astype(np.uint8)
    digest = hashlib.blake2b(np.ascontiguousarray(pixels).tobytes(), digest_size=16)
    digest.update(repr(pixels.shape).encode())
    return digest.hexdigest()


class ContentKeys:
    """`pixel_key` of files, decoding only one file of each byte-identical group."""

    def __init__(self) -> None:
        self._key_of_bytes: dict[bytes, str] = {}

    def __call__(self, path: Path) -> str:
        digest = hashlib.blake2b(path.read_bytes(), digest_size=16).digest()
        if digest not in self._key_of_bytes:
            self._key_of_bytes[digest] = pixel_key(decode(path))
        return self._key_of_bytes[digest]
