"""Opens the file of a film by its content: no image, no playlist, no folder."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from functools import lru_cache
from typing import Any

from data.bad_samples import BadSample

INSTALL = "pip install -r requirements-audio.txt"
OLDEST = 17  # version of PyAV
# Films alone: no images, and no playlists, which would open other files.
FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,live_flv,ogg,asf,mxf,nut"
STREAMS_LIMIT = 100  # of a film: tracks of sound and subtitles in any language
PROBED_BYTES = 5_000_000  # that are read at most to know the streams; FFmpeg's own number
# What a film begins with whose table of frames is missing when it is cut off: offset, bytes.
BEGINNINGS = ((4, b"ftyp"), (0, b"\x1a\x45\xdf\xa3"), (8, b"AVI "))


def probing(av: Any) -> dict[str, str]:
    """Options of a container that FFmpeg opens: the limits of what it does by itself, before a
    stream is chosen and its decoder has limits of its own."""
    return {
        "max_streams": str(STREAMS_LIMIT),
        "probesize": str(PROBED_BYTES),
        "codec_whitelist": _sound_decoders(av),
    }


@lru_cache(1)
def _sound_decoders(av: Any) -> str:
    """Without these, lengths of packets of sound would not be known. Of films, a picture of each
    stream, of any size, would be decoded to guess what the header left out."""
    found = []
    for name in sorted(av.codecs_available):
        with contextlib.suppress(av.codec.codec.UnknownCodecError):
            if av.Codec(name, "r").type == "audio":
                found.append(name)
    return ",".join(found)


def film_status(path: str) -> os.stat_result:
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise BadSample("missing-file", f"'{path}' does not exist") from None
    if not stat.S_ISREG(status.st_mode):
        raise BadSample("not-a-film", f"{path} is a folder, a pipe or a device, not a file")
    return status


def open_container(file: str | bytes) -> tuple[Any, Any]:
    """PyAV and the container of a film, whatever its name. Raises BadSample."""
    try:
        import av
    except (ImportError, OSError) as error:
        raise ImportError(f"films are decoded by av, which is not here; {INSTALL}") from error
    content = io.BytesIO(file) if isinstance(file, bytes) else open(file, "rb")
    with content:
        begins = content.read(16)
    if not begins:
        raise BadSample("empty-file", "0 bytes")
    version = int(av.__version__.split(".")[0])
    if version < OLDEST:  # without tables of key frames
        raise ImportError(f"films need av {OLDEST} or newer, and {av.__version__} is here")
    # titles that are no UTF-8 end nothing; from PyAV 19 on by itself
    old = version < 19
    try:
        return av, av.open(
            io.BytesIO(file) if isinstance(file, bytes) else f"file:{file}",
            options={"format_whitelist": FORMATS, "protocol_whitelist": "file", **probing(av)},
            **({"metadata_errors": "replace"} if old else {}),
        )
    except av.FFmpegError as error:
        if error.errno == errno.ENOMEM:
            found = f"it has over {STREAMS_LIMIT} streams, or asks for more memory than there is"
            raise BadSample("unreadable", found) from error
        is_film = any(begins[at:].startswith(known) for at, known in BEGINNINGS)
        raise BadSample(
            "truncated-film" if is_film else "not-a-film",
            f"a file that begins with {begins[:12]!r}: {error.strerror}",
        ) from error
