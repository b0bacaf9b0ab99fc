"""Sounds as they come out of files: decode safely, mix to one channel, bring to a rate.

Bytes are read by content, never by name: by libsndfile (`soundfile`) where it knows the format,
else by FFmpeg (`av`). Neither says of every format that a file was cut off, so what a header
promises is compared with what is there.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, Literal

import numpy as np

from data.bad_samples import SECONDS_LIMIT, Allowance, BadSample, check_sound, refusing
from data.decoding.containers import probing

INSTALL = "pip install -r requirements-audio.txt"
BLOCK = 1 << 16  # samples of a channel that are decoded at once: 6 MB with 24 channels
# of a film's or a song's length, which a container rounds to its own ticks
LENGTH_TOLERANCE_S = 0.25
# Lengths that a program writes before it knows the true one, as into a pipe, or larger: 2e9,
# 0x7ffff000 or 0xffffffff bytes in WAV, AIFF and AU. No such file is read, as it is too large.
UNKNOWN_SIZE = 1_999_990_000
UNKNOWN_FRAMES = 1 << 35  # of FLAC, which has 36 bits for them; libsndfile makes 2**63 of its 0
# what libsndfile says of FLAC that ends within a frame, or before as many as its header has
BEHIND_THE_END = ("lost sync", "psf_fseek() failed")
LAST_PAGE = 4  # in the flags of an Ogg page
Order = Literal["little", "big"]


@dataclass(frozen=True, eq=False)
class Sound:
    """`samples` float32 [n], the mean of the `channels` that there were; `rate`, Hz."""

    samples: np.ndarray
    rate: int
    channels: int

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate


def decode_audio(data: bytes, strict: bool = False) -> Sound:
    """All of an encoded sound.

    `strict`: an MP3 is decoded by FFmpeg too, if that is there, which finds the broken frames that
    libsndfile passes over. Errors: BadSample, with reason empty-file, not-audio, no-sound,
    truncated-audio, empty-audio, silent-audio, huge-audio, impossible-audio, not-finite-audio or
    unreadable; ImportError where no decoder is installed.
    """
    if not data:
        raise BadSample("empty-file", "0 bytes")
    data = _with_known_length(data)
    with refusing(but=(ImportError,)):
        found = _by_libsndfile(data, strict) or _by_ffmpeg(data)
    if not len(found.samples):
        raise BadSample("empty-audio", "the file has a header and no sample")
    if not found.samples.any():
        raise BadSample("silent-audio", f"{found.seconds:.2f} seconds")
    return found


def describe_audio(data: bytes) -> tuple[float, int, int]:
    """Seconds, rate in Hz and channels of an encoded sound, as its header has them, or by decoding
    where that does not know the length. Errors: as `decode_audio`, as far as was read."""
    if not data:
        raise BadSample("empty-file", "0 bytes")
    data = _with_known_length(data)
    library = _library("soundfile")
    if library is not None:
        # what libsndfile does not know, FFmpeg may
        known = contextlib.suppress(library.LibsndfileError)
        with refusing(), known, library.SoundFile(io.BytesIO(data)) as file:
            if file.frames < UNKNOWN_FRAMES:
                check_sound(file.samplerate, file.channels, file.frames)
                return file.frames / file.samplerate, file.samplerate, file.channels
    found = decode_audio(data)  # FFmpeg's headers may say nothing of the length
    return found.seconds, found.rate, found.channels


def resampled(samples: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """float32 [n] at `rate` -> float32 [⌈n · wanted / rate⌉] at `wanted`, Hz: SciPy's polyphase
    filter, which lets nothing above half of the lower rate through."""
    if rate == wanted:
        return samples
    from scipy.signal import resample_poly  # a second, which only sounds wait for

    common = math.gcd(rate, wanted)
    up, down = wanted // common, rate // common
    made = resample_poly(samples, up, down, window=_filter(max(up, down)))
    return np.ascontiguousarray(made, np.float32)


@lru_cache(maxsize=16)
def _filter(longest: int) -> np.ndarray:
    """float32 [20 · longest + 1]: the filter that `resample_poly` designs by default, which takes
    longer than to resample a second of sound."""
    from scipy.signal import firwin

    return firwin(20 * longest + 1, 1 / longest, window=("kaiser", 5.0)).astype(np.float32)


@lru_cache
def _library(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError):  # OSError: the package is there, the library in it does not load
        return None


def missing_audio_decoders() -> list[str]:
    return [name for name in ("soundfile", "av") if _library(name) is None]


def _one_channel(blocks: Iterator[np.ndarray], rate: int) -> np.ndarray:
    """float32 [samples, channels] each -> float32 [n]. Raises BadSample: not-finite-audio, and
    huge-audio for a file that is longer than its header says."""
    mixed, length, allowance = [], 0, Allowance()
    for block in blocks:
        allowance.check()
        if not np.isfinite(block).all():
            raise BadSample("not-finite-audio", f"in the samples from {length:,} on")
        mixed.append(block.mean(1, dtype=np.float32))
        length += len(block)
        check_sound(rate, block.shape[1], length)
    return np.concatenate(mixed) if mixed else np.empty(0, np.float32)


# -- libsndfile


def _by_libsndfile(data: bytes, strict: bool) -> Sound | None:
    """Decode by libsndfile; None where it is not installed, or does not know the format or the
    length, without which it does not read to the end."""
    library = _library("soundfile")
    if library is None:
        return None
    try:
        file = library.SoundFile(io.BytesIO(data))
    except library.LibsndfileError:
        if data[:4] == b"RIFF":
            _refuse_header(data)  # else FFmpeg may know it: WebP is a RIFF file too
        return None
    with file:
        if file.frames >= UNKNOWN_FRAMES:
            return None
        check_sound(file.samplerate, file.channels, file.frames)
        try:
            samples = _one_channel(_blocks(file), file.samplerate)
        except library.LibsndfileError as error:
            is_short = any(words in str(error) for words in BEHIND_THE_END)
            kind = "truncated-audio" if is_short else "unreadable"
            raise BadSample(kind, str(error)) from error
        promised, kind, rate, channels = file.frames, file.format, file.samplerate, file.channels
    if len(samples) < promised:
        raise BadSample(
            "truncated-audio", f"{len(samples):,} samples of {promised:,}, {len(data):,} bytes"
        )
    if _is_cut_off(data):  # libsndfile promises only what is there
        raise BadSample(
            "truncated-audio",
            f"the {kind} file ends before its last sample, after {len(samples):,} samples and "
            f"{len(data):,} bytes",
        )
    if strict and kind == "MP3" and _library("av") is not None:
        _by_ffmpeg(data)
    return Sound(samples, rate, channels)


def _refuse_header(data: bytes) -> None:
    """Raise BadSample for a WAV file whose rate or number of channels cannot be."""
    if data[8:12] == b"WAVE" and (at := data.find(b"fmt ")) >= 0:
        channels = int.from_bytes(data[at + 10 : at + 12], "little")
        check_sound(int.from_bytes(data[at + 12 : at + 16], "little"), channels)


def _blocks(file: Any) -> Iterator[np.ndarray]:
    """Yield at most one block more than is allowed, whatever the header says."""
    for _ in range(math.ceil(SECONDS_LIMIT * file.samplerate / BLOCK) + 1):
        block = file.read(BLOCK, dtype="float32", always_2d=True)
        if len(block):
            yield block
        if len(block) < BLOCK:
            return


def _with_known_length(data: bytes) -> bytes:
    """The file with the length that is there in its header, where that has none: the true number of
    bytes for WAV and AIFF, and what stands for an unknown length in AU and FLAC."""
    if data[:4] == b".snd" and data[8:12] == bytes(4) and data[int.from_bytes(data[4:8], "big") :]:
        return data[:8] + b"\xff" * 4 + data[12:]
    if data[:4] == b"fLaC":
        # after a rate, channels and bits per sample, in the last 36 of 64 bits
        word = int.from_bytes(data[18:26], "big")
        if word % (1 << 36) >= UNKNOWN_FRAMES:
            return data[:18] + (word >> 36 << 36).to_bytes(8, "big") + data[26:]
    chunk = _sound_chunk(data)
    if chunk is None:
        return data
    at, size, order = chunk
    there = len(data) - at
    is_unknown = size >= max(UNKNOWN_SIZE, there) or size == 0 and not _are_chunks(data, at, order)
    return data[: at - 4] + there.to_bytes(4, order) + data[at:] if is_unknown else data


def _sound_chunk(data: bytes) -> tuple[int, int, Order] | None:
    """WAV and AIFF: where the samples begin, of how many bytes, in which order numbers are."""
    if data[:4] not in (b"RIFF", b"FORM"):
        return None
    order: Order = "little" if data[:4] == b"RIFF" else "big"
    at = 12
    while at + 8 <= len(data):  # one chunk after the other: a name, a size, as many bytes
        size = int.from_bytes(data[at + 4 : at + 8], order)
        if data[at : at + 4] in (b"data", b"SSND"):
            return at + 8, size, order
        at += 8 + size + size % 2
    return None


def _are_chunks(data: bytes, at: int, order: Order) -> bool:
    """Whether what follows is nothing, or whole chunks with names of letters."""
    while at + 8 <= len(data) and data[at : at + 4].decode("latin-1").strip().isalnum():
        size = int.from_bytes(data[at + 4 : at + 8], order)
        at += 8 + size + size % 2
    return at >= len(data)


def _is_cut_off(data: bytes) -> bool:
    """WAV, AIFF and Ogg: libsndfile takes what is there for all."""
    if chunk := _sound_chunk(data):
        at, size, _ = chunk
        return at + size > len(data)
    if data[:4] == b"OggS":
        last = data.rfind(b"OggS")
        head = data[last : last + 27]
        if len(head) < 27 or not head[5] & LAST_PAGE:
            return True
        table = data[last + 27 : last + 27 + head[26]]  # how long each segment of the page is
        return last + 27 + head[26] + sum(table) > len(data)
    return False


# -- FFmpeg


def _by_ffmpeg(data: bytes) -> Sound:
    library, begins = _library("av"), f"{len(data):,} bytes that begin with {data[:8]!r}"
    if library is None:
        if _library("soundfile") is None:
            raise ImportError(
                f"sounds are decoded by soundfile or av, and neither is here; {INSTALL}"
            )
        raise BadSample(
            "not-audio",
            f"{begins}, which libsndfile does not know; for FFmpeg's formats: {INSTALL}",
        )
    try:
        # titles that are no UTF-8 end nothing; from PyAV 19 on by itself
        old = int(library.__version__.split(".")[0]) < 19
        given = {"metadata_errors": "replace"} if old else {}
        # a playlist would open other files
        options = {"protocol_whitelist": "none", **probing(library)}
        container = library.open(io.BytesIO(data), options=options, **given)
    except library.FFmpegError as error:
        raise BadSample("not-audio", f"{begins}: {error.strerror}") from error
    with container:
        if not container.streams.audio:
            is_image = container.format.name.endswith("_pipe") or "image2" in container.format.name
            found = ", ".join(stream.type for stream in container.streams) or "nothing"
            raise BadSample(
                "not-audio" if is_image or not container.streams else "no-sound",
                f"{container.format.name} with {found}",
            )
        stream = container.streams.audio[0]
        rate, channels = stream.rate or 0, stream.channels
        check_sound(rate, channels)
        try:
            samples = _one_channel(_frames(library, container, stream), rate)
        except library.FFmpegError as error:
            raise BadSample("unreadable", f"{container.format.name}: {error.strerror}") from error
        promised = float(stream.duration * stream.time_base) if stream.duration else 0.0
        # An MP3 without a table of its frames promises only what its first frame lets one guess.
        is_known = container.format.name != "mp3"
    if is_known and len(samples) / rate < promised - max(LENGTH_TOLERANCE_S, 0.01 * promised):
        raise BadSample("truncated-audio", f"{len(samples) / rate:.2f} seconds of {promised:.2f}")
    return Sound(samples, rate, channels)


def _frames(library: ModuleType, container: Any, stream: Any) -> Iterator[np.ndarray]:
    """float32 [samples, channels] each, at the rate and with the channels of the stream."""
    planar = library.AudioResampler(format="fltp")  # other number format, same rate and channels
    for frame in container.decode(stream):
        if frame.sample_rate != stream.rate:
            raise BadSample(
                "unreadable", f"the rate changes from {stream.rate} to {frame.sample_rate} Hz"
            )
        for converted in planar.resample(frame):
            yield converted.to_ndarray().T
