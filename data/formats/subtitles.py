"""`--data subtitles:DIR`: films with their subtitles beside them, `a.mp4` and `a.srt`, or
`a.en.vtt` of a language, as programs that download films write them."""

import contextlib
import html
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from common.output import brief
from data.bad_samples import BadSample
from data.formats.folders import files_below, kind_of
from data.formats.rows import (
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
from data.stored.video import VIDEO

ENDINGS = ("srt", "vtt")
USED = (*ENDINGS, *VIDEO.endings)
LANGUAGE = re.compile(r"[A-Za-z]{2,3}(-[A-Za-z0-9]+)*")
TIME = r"(?:(\d{1,5}):)?(\d{1,2}):(\d{1,2}(?:[.,]\d{1,9})?)"  # WebVTT may leave out the hours
TIMES = re.compile(rf"[ \t]*{TIME}[ \t]*-->[ \t]*{TIME}(?![\d.,:])")
ASIDE = re.compile(r"(NOTE|STYLE|REGION)\b")  # begins a block of WebVTT that is not shown
MAP = "X-TIMESTAMP-MAP="  # in a part of an HLS stream: LOCAL of the subtitles is MPEGTS of the film
LOCAL, MPEGTS = re.compile(rf"LOCAL:{TIME}"), re.compile(r"MPEGTS:(\d{1,15})")
CLOCK_HZ = 90_000  # of MPEGTS
# Tags of WebVTT and SubRip, time stamps within a line, and SubRip's {\an8}; `a < b > c` has none
MARKUP = re.compile(
    r"</?(?:c|i|b|u|s|v|lang|ruby|rt|font)(?:[.\s][^<>]*)?>|<[\d:]+\.\d+>|\{\\[^{}]*\}",
    re.IGNORECASE,
)
LONG_NUMBER = re.compile(r"&#[0-9]{8,}")  # no character, and of thousands of digits an error
JOINT_S = 0.02  # a cue as short as this joins two others, and nobody reads it
LINES_CARRIED = 15  # of a cue, at most: a screen of captions has no more rows
GAP_S = 0.05  # between two cues of which one goes on with the other, at most
VERSION = 2  # raised when the same files are read as other samples


class SubtitlesFormat(Format):
    """A sample for each subtitle: its text, and the clip of the film while it is shown, which may
    overlap with others. Of captions that roll, as those that YouTube makes by itself, each line is
    a sample once, with the time in which it is spoken. An id is the path of the subtitles, # and a number from 0.

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
        stamps: list[Stamp] = [(repr((VERSION, paths)), 0, 0)]
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
            if leads_out or ending in VIDEO.endings:
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


class Cue(NamedTuple):
    """When some lines are shown, in seconds. No line is empty or has markup."""

    start_s: float
    end_s: float
    lines: tuple[str, ...]


def cues(content: bytes) -> Iterator[dict[str, Any]]:
    """Read SubRip or WebVTT: `start_s`, `end_s` and `text` of each cue, or of each line where
    captions roll. Where a line with `-->` or a map of times is not understood, `text` says what is
    wrong. Raises BadSample: invalid-utf8."""
    coding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = content.decode(coding)
    except UnicodeDecodeError as error:
        raise BadSample("invalid-utf8", f"{error}; save the subtitles as UTF-8") from None
    found = [*_shown(re.sub(r"\r\n?", "\n", text).split("\n"))]
    shown = [cue for cue in found if isinstance(cue, Cue) and cue.lines]
    if _roll(shown):
        found = [*_spoken(shown), *(cue for cue in found if isinstance(cue, BadSample))]
    for cue in found:
        if isinstance(cue, BadSample):
            yield {"text": cue}
        else:
            yield {"start_s": cue.start_s, "end_s": cue.end_s, "text": " ".join(cue.lines)}


def _shown(lines: Sequence[str]) -> Iterator[Cue | BadSample]:
    """Yield what a player shows, in the order of the file, and what it does not understand. Only an
    empty line ends a cue; a line of one space does not."""
    is_webvtt, shift_s, at = lines[0].startswith("WEBVTT"), 0.0, 0
    while at < len(lines):
        line, at = lines[at], at + 1
        if is_webvtt and ASIDE.match(line) and not lines[at - 2]:
            at = _first(lines, at, lambda line: not line)
        elif is_webvtt and line.startswith(MAP):
            local, clock = LOCAL.search(line), MPEGTS.search(line)
            if local is None or clock is None:
                yield _not_understood(line, f"{MAP}LOCAL:00:00:00.000,MPEGTS:900000")
            else:
                shift_s = int(clock[1]) / CLOCK_HZ - _seconds(*local.groups())
        elif "-->" in line:
            begin, at = at, _first(lines, at, lambda line: not line or "-->" in line)
            # the next cue's number may stand above its times, without an empty line before
            numbered = begin < at < len(lines) and lines[at] and lines[at - 1].strip().isdecimal()
            if times := TIMES.match(line):
                start_s, end_s = (_seconds(*times.groups()[k : k + 3]) + shift_s for k in (0, 3))
                plain = map(_plain, lines[begin : at - 1 if numbered else at])
                yield Cue(start_s, end_s, tuple(filter(None, plain)))
            else:
                yield _not_understood(line, "FROM --> TO, such as 00:00:01,500 --> 00:00:03,000")


def _first(lines: Sequence[str], at: int, stops: Callable[[str], bool]) -> int:
    """The first line from `at` on that stops a block, or the end."""
    return next((k for k in range(at, len(lines)) if stops(lines[k])), len(lines))


def _not_understood(line: str, wanted: str) -> BadSample:
    return BadSample("invalid-row", f"{brief(line.strip())} is not {wanted}")


def _seconds(hours: str | None, minutes: str, seconds: str) -> float:
    return 3600 * int(hours or 0) + 60 * int(minutes) + float(seconds.replace(",", "."))


def _plain(line: str) -> str:
    return " ".join(html.unescape(LONG_NUMBER.sub("", MARKUP.sub("", line))).split())


def _carried(before: Cue, cue: Cue) -> int:
    """How many of the first lines of a cue are the last ones of the cue before it, which it goes on
    with."""
    if not before.start_s <= cue.start_s <= before.end_s + GAP_S:
        return 0
    most = min(len(before.lines), len(cue.lines), LINES_CARRIED)
    return next((k for k in range(most, 0, -1) if before.lines[-k:] == cue.lines[:k]), 0)


def _roll(shown: Sequence[Cue]) -> bool:
    """Whether each line moves up when the next one is spoken: half of the cues or more carry lines
    on, and of these one at least has a new line below, or only joins two others. In subtitles that
    somebody wrote a line may be said twice, and is kept."""
    carried = [(_carried(*two), two[1]) for two in pairwise(shown)]
    carrying = [(number, cue) for number, cue in carried if number]
    rolls = any(k < len(cue.lines) or cue.end_s - cue.start_s < JOINT_S for k, cue in carrying)
    return rolls and 2 * len(carrying) >= len(carried)


def _spoken(shown: Sequence[Cue]) -> Iterator[Cue]:
    """Yield each cue's new lines, if it has some."""
    for before, cue in pairwise((Cue(0.0, 0.0, ()), *shown)):
        new = cue.lines[_carried(before, cue) :]
        if new:
            yield cue._replace(lines=new)
