"""`--data subtitles:DIR`: films with their subtitles beside them, `a.mp4` and `a.srt`, or
`a.en.vtt` of a language, as programs that download films write them."""

import contextlib
import html
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from data.bad_samples import BadSample
from data.formats.folders import files_below, kind_of
from data.formats.rows import (
    VIDEO_ENDINGS,
    Format,
    Part,
    Roots,
    Row,
    Stamp,
    Unused,
    in_parts,
    stamp,
)
from data.formats.specs import existing, split_options
from data.formats.tables import number_of_texts, with_near_texts

ENDINGS = ("srt", "vtt")
USED = (*ENDINGS, *VIDEO_ENDINGS)
LANGUAGE = re.compile(r"[A-Za-z]{2,3}(-[A-Za-z0-9]+)*")
TIME = r"(?:(\d{1,5}):)?(\d{1,2}):(\d{1,2}(?:[.,]\d{1,9})?)"  # WebVTT may leave out the hours
# FROM --> TO, and the lines up to an empty one, or to the next, which a number may stand above
CUE = re.compile(
    rf"[ \t]*{TIME}[ \t]*-->[ \t]*{TIME}(?![\d.,:]).*\n"
    r"((?:(?!.*-->)(?![ \t]*\d+[ \t]*\n.*-->)[^\S\n]*\S.*\n)*)"
)
ARROW = re.compile(r"^.*-->.*$", re.MULTILINE)
MARKUP = re.compile(r"<[^<>\n]*>|\{\\[^{}\n]*\}")  # of WebVTT, of SubRip


class SubtitlesFormat(Format):
    """A sample for each subtitle: its text, and the clip of the film while it is shown, which may
    overlap with others. An id is the path of the subtitles, # and a number from 0.

    Bad rows tell of films without subtitles, and of subtitles without a film or a text. Other files
    are counted as unused.
    """

    unit = "file"
    holds = ("video", "text")

    def __init__(self, where: str) -> None:
        """`where`: `DIR[?near=K]`, as `JsonlFormat` has it. Errors: ValueError,
        FileNotFoundError."""
        name, options, _ = split_options("subtitles", where, ("near",))
        spec = f"data spec 'subtitles:{where}':"
        self.near = number_of_texts(spec, options)
        folder = existing(spec, name, "folder", "one with films and subtitles: subtitles:DIR")
        self.roots = Roots.of(folder)
        self.spec = f"subtitles:{folder}" + (f"?near={self.near}" if self.near > 1 else "")

    def fingerprint(self) -> list[Stamp]:
        paths = [path for path, _ in files_below(self.roots.own) if _ending(path) in USED]
        stamps: list[Stamp] = [(repr(paths), 0, 0)]
        for path in paths:
            if _ending(path) in ENDINGS:
                with contextlib.suppress(OSError):  # a link to nothing is a bad sample
                    stamps.append(stamp(os.path.join(self.roots.own, path)))
        return stamps

    def total(self) -> int:
        return sum(1 for _ in self._entries())

    def parts(self) -> Iterator[Part]:
        return in_parts(self.roots.own, self._entries())

    def _entries(self) -> Iterator[tuple[tuple[int, Any], int]]:
        """Film or None, language or None, subtitles or None; or an Unused."""
        films: dict[str, str] = {}  # path without its ending -> with it
        subtitles: list[str] = []
        found: list[Any] = []
        for path, leads_out in files_below(self.roots.own):
            stem, ending = os.path.splitext(path)[0], _ending(path)
            if leads_out or ending in VIDEO_ENDINGS:
                if films.setdefault(stem, path) != path:
                    found.append((path, None, None))
            elif ending in ENDINGS:
                subtitles.append(path)
            else:
                found.append(Unused(kind_of(path), path))
        beside: defaultdict[str, dict[str | None, str]] = defaultdict(dict)
        for path in sorted(subtitles):
            stem, language = os.path.splitext(path)[0], None
            if stem not in films:
                stem, _, language = stem.rpartition(".")
            known = stem in films and (language is None or LANGUAGE.fullmatch(language))
            if known and language not in beside[stem]:
                beside[stem][language] = path
            else:
                found.append((None, None, path))
        for stem, film in sorted(films.items()):
            found += [(film, *each) for each in beside.get(stem, {None: None}).items()]
        for number, content in enumerate(found):
            yield (number, content), 1

    def rows(self, part: Part) -> Iterator[Row | Unused]:
        for number, content in part.content:
            if isinstance(content, Unused):
                yield content
            else:
                yield from (Row("", number, values) for values in self._values(*content))

    def _values(
        self, film: str | None, language: str | None, path: str | None
    ) -> list[dict[str, Any]]:
        if film is None:
            lacking = "no film has its name, or that one has other subtitles of the language"
            return [{"id": path, "video": BadSample("orphan-member", lacking)}]
        if path is None:
            lacking = "no .srt or .vtt of its name is beside it, or they are of another film"
            return [{"id": film, "video": film, "text": BadSample("orphan-member", lacking)}]
        try:
            found = [*cues(self.roots.read(path, "text"))]
            if not found:
                raise BadSample("no-caption", "no FROM --> TO with a text below it")
        except BadSample as problem:
            return [{"id": path, "video": film, "text": problem}]
        rows = [
            {"id": f"{path}#{k}", "video": film, "language": language, **cue}
            for k, cue in enumerate(found)
        ]
        return with_near_texts(rows, self.near)

    def where(self, file: str, path: str, number: int) -> str:
        return os.path.join(file, path)


def _ending(path: str) -> str:
    return os.path.splitext(path)[1][1:].lower()


def cues(content: bytes) -> Iterator[dict[str, Any]]:
    """Of SubRip or WebVTT: `start_s`, `end_s` and `text`, without markup; of a line with `-->` that
    is not understood what is wrong, as `text`. Raises BadSample: invalid-utf8."""
    coding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = content.decode(coding)
    except UnicodeDecodeError as error:
        raise BadSample("invalid-utf8", f"{error}; save the subtitles as UTF-8") from None
    text = "\n".join(text.splitlines()) + "\n"
    for arrow in ARROW.finditer(text):
        cue = CUE.match(text, arrow.start())
        if cue is None:
            line = f"{arrow[0].strip()!r:.100}"
            wrong = f"{line} is not FROM --> TO, such as 00:00:01,500 --> 00:00:03,000"
            yield {"text": BadSample("invalid-row", wrong)}
            continue
        *times, lines = cue.groups()
        start_s, end_s = (
            3600 * int(hours or 0) + 60 * int(minutes) + float(seconds.replace(",", "."))
            for hours, minutes, seconds in (times[:3], times[3:])
        )
        plain = html.unescape(MARKUP.sub("", lines))
        yield {"start_s": start_s, "end_s": end_s, "text": " ".join(plain.split())}
