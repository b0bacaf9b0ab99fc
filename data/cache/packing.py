"""Arrays as bytes and back: what one value of the cache holds.

An image, uint8 [h, w, 3 or 4], has a header of 16 bytes: magic, height, width, channels, CRC-32.
What is of a sound, float32 of up to 4 dimensions, has one of 32: magic, encoding, number of
dimensions, shape, CRC-32. Samples that 16 bits hold exactly are stored as int16, in half the space.
The CRC is of the header before it and of the content.
"""

import struct
import zlib

import numpy as np

# magic, height, width, channels, CRC-32
HEADER = struct.Struct("<4sHHB3xI")
MAGIC = b"WyeA"
# magic, encoding, dimensions, four sizes, CRC-32
ARRAY_HEADER = struct.Struct("<4sBB2x4II4x")
ARRAY_MAGIC = b"WyeB"
FLOAT32, INT16 = 1, 2
ITEM_BYTES = {FLOAT32: 4, INT16: 2}
FULL_SCALE = 32_768  # of 16-bit sound: samples are whole numbers divided by this
TRIED = 4_096  # values that are looked at before all are


def packed(value: np.ndarray) -> bytes:
    """uint8 [h, w, 3 or 4], or float32 of up to 4 dimensions, none of them 0 -> header and
    content."""
    if value.dtype == np.uint8:
        content = np.ascontiguousarray(value).data.cast("B")
        size = (MAGIC, *value.shape)
        checksum = zlib.crc32(content, zlib.crc32(HEADER.pack(*size, 0)))
        return HEADER.pack(*size, checksum) + content
    if value.dtype != np.float32 or not 1 <= value.ndim <= 4 or not value.size:
        raise ValueError(f"{value.dtype} {value.shape}: not what the cache holds")
    whole = _as_int16(value)
    stored = np.ascontiguousarray(value) if whole is None else whole
    sizes = (*value.shape, *(1,) * (4 - value.ndim))
    size = (ARRAY_MAGIC, FLOAT32 if whole is None else INT16, value.ndim, *sizes)
    content = stored.data.cast("B")
    checksum = zlib.crc32(content, zlib.crc32(ARRAY_HEADER.pack(*size, 0)))
    return ARRAY_HEADER.pack(*size, checksum) + content


def _as_int16(value: np.ndarray) -> np.ndarray | None:
    """The same in 16 bits; None where that would change a bit of a value."""
    if not _is_int16(value.reshape(-1)[:TRIED]) or not _is_int16(value):
        return None
    return np.ascontiguousarray(value * FULL_SCALE).astype("<i2")


def _is_int16(value: np.ndarray) -> bool:
    scaled = np.rint(value * np.float32(FULL_SCALE))
    if not (np.abs(scaled) < FULL_SCALE).all():  # NaN, too
        return False
    back = scaled.astype("<i2").astype(np.float32) / np.float32(FULL_SCALE)
    return np.array_equal(back.view(np.int32), np.ascontiguousarray(value).view(np.int32))


def unpacked(value: memoryview | bytes, copy: bool = True) -> np.ndarray | None:
    """The array, writable if copied; None if the value is not whole."""
    if bytes(value[:4]) == ARRAY_MAGIC:
        return _unpacked_array(value, copy)
    if len(value) < HEADER.size:
        return None
    magic, height, width, channels, checksum = HEADER.unpack_from(value)
    pixels = memoryview(value)[HEADER.size :]
    if magic != MAGIC or channels not in (3, 4) or len(pixels) != height * width * channels:
        return None
    if zlib.crc32(pixels, zlib.crc32(HEADER.pack(magic, height, width, channels, 0))) != checksum:
        return None
    image = np.frombuffer(pixels, np.uint8).reshape(height, width, channels)
    return image.copy() if copy else image


def _unpacked_array(value: memoryview | bytes, copy: bool) -> np.ndarray | None:
    if len(value) < ARRAY_HEADER.size:
        return None
    *size, checksum = ARRAY_HEADER.unpack_from(value)
    encoding, dimensions, shape = size[1], size[2], size[3:]
    content = memoryview(value)[ARRAY_HEADER.size :]
    number = int(np.prod(shape, dtype=np.int64))
    if encoding not in ITEM_BYTES or not 1 <= dimensions <= 4:
        return None
    if len(content) != number * ITEM_BYTES[encoding]:
        return None
    if zlib.crc32(content, zlib.crc32(ARRAY_HEADER.pack(*size, 0))) != checksum:
        return None
    if encoding == INT16:
        made = np.frombuffer(content, "<i2").astype(np.float32) / np.float32(FULL_SCALE)
        return made.reshape(shape[:dimensions])
    made = np.frombuffer(content, "<f4").reshape(shape[:dimensions])
    return made.copy() if copy else made
