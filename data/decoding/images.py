"""Images as they come out of files: decode safely, turn upright, bring to 8-bit RGB or RGBA,
recognise equal ones.

Bytes are read by content, never by name, with Pillow's decoders of a few formats. The size that the
header claims is checked before a pixel is decoded, by limits of our own: Pillow's are neither
needed nor changed.
"""

import hashlib
import io
import re
import struct
import time
from collections.abc import Callable

import numpy as np

# the seven plugins register themselves in Image.OPEN
from PIL import (
    BmpImagePlugin,  # noqa: F401
    ExifTags,
    GifImagePlugin,  # noqa: F401
    Image,
    JpegImagePlugin,  # noqa: F401
    PngImagePlugin,  # noqa: F401
    PpmImagePlugin,  # noqa: F401
    TiffImagePlugin,  # noqa: F401
    WebPImagePlugin,  # noqa: F401
    features,
)

from data.bad_samples import PIXEL_LIMIT, Allowance, BadSample, check_size, refusing

# What Pillow opens beside these is rare in data sets, and some of it (EPS, for one) runs programs.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
# words of decoders' messages
TRUNCATED = ("truncated", "unexpected end", "not enough image data", "no more images", "only got")
UPRIGHT = {  # EXIF orientation -> what makes it upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIDES_SWAPPED = (5, 6, 7, 8)
# by which a PNG says, before or behind its pixels, how it lies
TURNING = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")
STRIP_LIMIT = 400_000  # of a TIFF; 100 million pixels in tiles of 16 x 16 are fewer
BYTES_IN_TIFF = (1, 2, 6, 7)  # types of one byte, which Pillow leaves as they are


def decode_bytes(
    data: bytes, pixel_limit: int = PIXEL_LIMIT, at_least: int | tuple[int, int] | None = None
) -> Image.Image:
    """Fully decode an encoded image; any mode; of an animation the first frame.

    `at_least`, pixels: a JPEG is decoded at the smallest of libjpeg's scales 1/8, 1/4, 1/2 and 1
    that leaves the shorter side with at least so many; a pair is (height, width) of the upright
    image. Each pixel of a smaller scale is about the mean of those it stands for, so it is as
    good as decoding all and shrinking. Other formats come whole. Errors: BadSample, with reason
    empty-file, not-an-image, truncated-image, too-many-pixels, impossible-size, too-slow or
    unreadable.
    """
    if not data:
        raise BadSample("empty-file", "0 bytes")
    with refusing(_reason_for(data)):
        image = _opened(data)
        check_size(image.width, image.height, pixel_limit)
        # asking a PNG how it lies decodes it, and hides what is wrong with it
        if at_least is not None and image.format == "JPEG":
            height, width = (at_least, at_least) if isinstance(at_least, int) else at_least
            image.draft(
                None, (height, width) if orientation(image) in SIDES_SWAPPED else (width, height)
            )
        image.load()
        # the first frame of an animation may reach beyond what the header says
        check_size(image.width, image.height, pixel_limit)
        return image


def read_image_size(data: bytes) -> tuple[int, int, int]:
    """Width and height in pixels as shown, and EXIF's orientation, from the header alone.

    Errors: BadSample, with reason empty-file, not-an-image, too-many-pixels, impossible-size or
    unreadable.
    """
    if not data:
        raise BadSample("empty-file", "0 bytes")
    with refusing(_reason_for(data)):
        image = _opened(data)
        # Pillow decodes a PNG to look for EXIF behind its pixels, so there only what lies before
        # them counts.
        has_exif = image.format != "PNG" or "exif" in image.info
        turned = orientation(image) if has_exif else 1
        width, height = image.size
        if image.format == "TIFF":  # newer ones of Pillow give the size as shown
            width, height = image.tag_v2[256], image.tag_v2[257]
    check_size(width, height)
    return (height, width, turned) if turned in SIDES_SWAPPED else (width, height, turned)


def may_turn_late(data: bytes) -> bool:
    """Whether decoding may find that the image lies otherwise than its header says."""
    return data[:4] == b"\x89PNG" and any(word in data for word in TURNING)


def upright_8bit(image: Image.Image) -> Image.Image:
    """The image a viewer would show, as mode RGB, or RGBA where it has transparency; 8 bits a
    channel.

    EXIF rotation is applied; EXIF that cannot be read counts as none. 16-bit greyscale keeps its
    upper 8 bits (Pillow's own conversion would clip at 255); float greyscale is read as 0..1 when
    no value is above 1, else as 0..255. CMYK is converted by Pillow, which also knows that JPEG
    stores it inverted. Colours that are stored multiplied by their opacity are divided by it.
    Raises BadSample: unreadable, for a mode that Pillow cannot convert.
    """
    with refusing():
        return _upright_8bit(image)


def _upright_8bit(image: Image.Image) -> Image.Image:
    turned = orientation(image)
    if turned in UPRIGHT:
        transparency = {k: v for k, v in image.info.items() if k == "transparency"}
        image = image.transpose(UPRIGHT[turned])
        image.info = transparency  # alone, so that it is not turned again
    if image.mode in ("RGB", "RGBA") and "transparency" not in image.info:
        return image
    # "I": how Pillow before 11 opened a 16-bit PNG
    if image.mode == "I" or image.mode.startswith("I;16"):
        image = _from_16bit(np.asarray(image).clip(0, 65535), image.info.get("transparency"))
    elif image.mode == "F":
        values = np.nan_to_num(np.asarray(image))
        scale = 255.0 if values.max() <= 1.0 else 1.0
        image = Image.fromarray((values * scale).clip(0, 255).astype(np.uint8))
    elif image.mode == "La":
        image = image.convert("LA")  # the only mode that Pillow converts it to
    transparent = image.mode in ("LA", "PA", "RGBA", "RGBa") or "transparency" in image.info
    return image.convert("RGBA" if transparent else "RGB")


def missing_image_decoders() -> list[str]:
    """Those that Pillow can be built without."""
    return [name for name in ("jpg", "zlib", "libtiff", "webp") if not features.check(name)]


def pixel_key(image: Image.Image) -> str:
    """A hash that is equal for two images that look equal: same size, same visible pixels,
    whatever the file format."""
    image = upright_8bit(image)
    pixels = np.asarray(image)  # [H, W, 3 or 4]
    if image.mode == "RGBA":
        opaque = pixels[..., 3:]
        # The colour beneath a fully transparent pixel cannot be seen; a fully opaque image is an
        # RGB image.
        visible = np.where(opaque > 0, pixels, 0).astype(np.uint8)
        pixels = pixels[..., :3] if opaque.min() == 255 else visible
    digest = hashlib.blake2b(np.ascontiguousarray(pixels).tobytes(), digest_size=16)
    digest.update(repr(pixels.shape).encode())
    return digest.hexdigest()


# how films begin; an HEIC or AVIF image is an MP4 of another brand
FILMS = (
    re.compile(rb"....ftyp(?!avi|hei|hev|mif|msf)", re.DOTALL),
    re.compile(rb"\x1a\x45\xdf\xa3|RIFF....AVI ", re.DOTALL),
)


def _opened(data: bytes) -> Image.Image:
    """Open by the plugin whose signature the bytes bear. `Image.open` would first check Pillow's
    own limits of size."""
    prefix = data[:16]
    for name in FORMATS:
        opens, accepts = Image.OPEN[name]
        accepted = accepts is not None and accepts(prefix)
        # a text says what is missing here to read it
        if accepted and not isinstance(accepted, str):
            if name == "TIFF":
                _refuse_many_strips(data)
            return opens(_File(data), "")
    is_film = any(found.match(data) for found in FILMS)
    raise BadSample(
        "not-an-image",
        f"{len(data):,} bytes that begin with {data[:8]!r}; read are {', '.join(FORMATS)}"
        + "; films are read with --pairs video:text" * is_film,
    )


class _File(io.BytesIO):
    """An encoded file, of which no more is read once its decoding takes too long: Pillow decodes
    piece by piece, with a progressive JPEG's thousands of scans in pieces of 64 KB."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._allowance = Allowance()
        self._looks_at = self._allowance.clock_end

    # a header takes fifty reads, so each does as little as it can
    def read(self, size: int | None = -1, /, _read=io.BytesIO.read, _now=time.monotonic) -> bytes:
        if _now() > self._looks_at:
            self._allowance.check()
        return _read(self, size)


def _refuse_many_strips(data: bytes) -> None:
    """Raise BadSample for a TIFF with a tag of very many numbers. Pillow makes Python objects of
    each while it reads the header, and of each strip."""
    order = "<" if data[:2] == b"II" else ">"
    # BigTIFF has wider fields: where the directory is, how many tags it has, a tag and its count
    big = data[2:4] in (b"\x2b\0", b"\0\x2b")
    at, number, tag, size = (8, "Q", "HHQ", 20) if big else (4, "H", "HHI", 12)
    try:
        (start,) = struct.unpack_from(f"{order}{'Q' if big else 'I'}", data, at)
        (tags,) = struct.unpack_from(order + number, data, start)
        first = start + struct.calcsize(order + number)
        for entry in range(first, first + size * tags, size):
            name, kind, count = struct.unpack_from(order + tag, data, entry)
            if kind not in BYTES_IN_TIFF and count > STRIP_LIMIT:
                raise BadSample(
                    "too-slow",
                    f"{count:,} strips, or numbers of tag {name}; at most {STRIP_LIMIT:,} are read",
                )
    except (struct.error, OverflowError):
        return  # Pillow says what is wrong with it


def orientation(image: Image.Image) -> int:
    """EXIF's. A PNG that is not decoded yet is decoded for it; a TIFF that is has lost it."""
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except MemoryError:
        raise
    except Exception:  # EXIF that breaks its own rules: viewers show such an image as it lies
        return 1


def _reason_for(data: bytes) -> Callable[[Exception], str]:
    # WebP's decoder does not say
    is_short = data[:4] == b"RIFF" and int.from_bytes(data[4:8], "little") + 8 > len(data)

    def reason(error: Exception) -> str:
        if isinstance(error, (Image.DecompressionBombError, Image.DecompressionBombWarning)):
            return "too-many-pixels"
        says_so = any(words in str(error).lower() for words in TRUNCATED)
        is_truncated = is_short or says_so or isinstance(error, EOFError)
        return "truncated-image" if is_truncated else "unreadable"

    return reason


def _from_16bit(values: np.ndarray, transparent: int | None) -> Image.Image:
    """[H, W] 0..65535 -> L, or LA where one value stands for transparency."""
    grey = Image.fromarray((values // 256).astype(np.uint8))
    if isinstance(transparent, int):
        grey.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    return grey
