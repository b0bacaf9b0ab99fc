"""Spoken names for `--data demo:voices`: eSpeak NG says them, from the pip package
`espeakng-loader`, in several voices and speeds.

Each emoji's name is spoken by one of `SPEAKERS`, and a fifth of them once more by one of
`NEW_SPEAKERS`. The sounds are made once, into the cache folder; made again they differ a little,
because breath is noise.
"""

import ctypes
import hashlib
import wave
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from common.files import make_folder, replacing_folder
from data.formats.specs import cache_folder, installed
from data.keys import hash64
from data.progress import progress_bar

INSTALL = "pip install espeakng-loader"
FOLDER = "voices"  # of the cache folder
VERSION = 1  # of what is spoken, and how
ENDING = ".wav"
NEW_EVERY = 5  # an emoji of so many has a second sample, by a new speaker


class Speaker(NamedTuple):
    """`variant`: of eSpeak's voice of a language; `rate`: words per minute; `pitch`: 0 to 99."""

    variant: str
    rate: int
    pitch: int

    @property
    def name(self) -> str:
        return f"{self.variant}-{self.rate}-{self.pitch}"


SPEAKERS = (
    Speaker("m1", 150, 40),
    Speaker("m3", 190, 50),
    Speaker("m7", 130, 35),
    Speaker("m2", 170, 60),
    Speaker("f1", 160, 60),
    Speaker("f2", 200, 50),
    Speaker("f4", 140, 70),
    Speaker("f3", 180, 45),
)
NEW_SPEAKERS = (Speaker("m5", 160, 45), Speaker("f5", 175, 65))
# eSpeak reads Chinese characters in Japanese texts as "Chinese letter"
VOICES = {code: code for code in "en es pt it fr de id ru tr ko fa ar".split()} | {"zh": "cmn"}


def spoken_names(names: Iterable[tuple[str, list[str]]], languages: tuple[str, ...]) -> Path:
    """The folder of the sounds of all names, which are made where they are not there yet.
    Processes that start together make them once.

    `names`: code points of an emoji, and its name in each language. Errors: FileNotFoundError,
    OSError.
    """
    spoken = [
        (file_of(points, speaker), captions[number], languages[number], speaker)
        for points, captions in names
        for number in [hash64(points) // 64 % len(languages)]
        for speaker in speakers_of(points)
    ]
    what = repr((VERSION, spoken, Path(_loader().get_library_path()).stat().st_size))
    name = hashlib.blake2b(what.encode(), digest_size=8).hexdigest()
    folder = cache_folder() / FOLDER / name
    if folder.is_dir():
        return folder
    make_folder(folder.parent)
    with FileLock(folder.with_suffix(".lock")):
        if not folder.is_dir():
            with replacing_folder(folder) as unfinished:
                for file, text, language, speaker in progress_bar(spoken, "speaking", "name"):
                    say(unfinished / file, text, language, speaker)
    return folder


def speakers_of(points: str) -> list[Speaker]:
    """The speakers of an emoji's samples."""
    number = hash64(points)
    speakers = [SPEAKERS[number % len(SPEAKERS)]]
    if number // 8 % NEW_EVERY == 0:
        speakers.append(NEW_SPEAKERS[number // 512 % len(NEW_SPEAKERS)])
    return speakers


def is_new(speaker: str) -> bool:
    return speaker in {each.name for each in NEW_SPEAKERS}


def file_of(points: str, speaker: Speaker) -> str:
    return f"{points}_{speaker.name}{ENDING}"


# -- eSpeak NG, by the functions of its speak_lib.h

_SYNCHRONOUS, _RATE, _PITCH, _CHARACTERS, _UTF8 = 2, 1, 3, 1, 1
_Heard = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
)


def _loader() -> Any:
    installed("espeakng-loader", "speaks the names", INSTALL)
    import espeakng_loader  # here, not above: nothing else needs it

    return espeakng_loader


@lru_cache
def _engine() -> tuple[Any, int]:
    """The library, once in a process, and its rate in Hz."""
    loader = _loader()
    library = ctypes.CDLL(loader.get_library_path())
    rate = library.espeak_Initialize(_SYNCHRONOUS, 0, loader.get_data_path().encode(), 0)
    if rate <= 0:
        raise OSError(f"eSpeak NG does not start (status {rate}); reinstall it: {INSTALL}")
    return library, rate


def say(file: Path, text: str, language: str, speaker: Speaker) -> None:
    """Write a spoken text as a WAV file of 16 bits and one channel. Errors: OSError."""
    library, rate = _engine()
    voice = f"{VOICES[language]}+{speaker.variant}"
    if library.espeak_SetVoiceByName(voice.encode()):
        raise OSError(f"eSpeak NG has no voice {voice}; reinstall it: {INSTALL}")
    library.espeak_SetParameter(_RATE, speaker.rate, 0)
    library.espeak_SetParameter(_PITCH, speaker.pitch, 0)
    heard: list[bytes] = []

    @_Heard
    def take(samples: Any, count: int, events: Any) -> int:
        if samples and count > 0:
            heard.append(ctypes.string_at(samples, 2 * count))
        return 0

    library.espeak_SetSynthCallback(take)
    words = text.encode()
    status = library.espeak_Synth(words, len(words) + 1, 0, _CHARACTERS, 0, _UTF8, None, None)
    if status:
        raise OSError(f"eSpeak NG could not say {text!r} (status {status})")
    with wave.open(str(file), "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(b"".join(heard))
