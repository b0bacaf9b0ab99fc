"""What can be wrong with a sample: one exception, one vocabulary, and its limits."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from common.output import brief

PIXEL_LIMIT = 100_000_000  # pixels of one image; an RGBA image of that size takes 400 MB
SIDE_LIMIT = 65_535  # pixels; the longest side that JPEG can express
ASPECT_LIMIT = 100  # longer side / shorter side
CAPTION_LIMIT = 10_000  # characters
FILE_LIMIT = 1 << 30  # bytes of one encoded image or sound
ANNOTATION_LIMIT = 1_000  # regions of an image or moments of a film, and phrases of one of them
# seconds of one sound; decoded to one channel at 48 kHz so many take 230 MB
SECONDS_LIMIT = 1_200
# samples of one sound: a file of 200 KB can hold 20 minutes at 655 kHz, which take 6 GB
SAMPLES_LIMIT = SECONDS_LIMIT * 96_000
# seconds of processor time that decoding one image, one sound, or a film up to the frame that is
# wanted may take; the largest image takes 3
DECODE_LIMIT_S = 20.0
LOWEST_HZ, HIGHEST_HZ = 1_000, 768_000
FILM_SECONDS_LIMIT = 6 * 3600
LOWEST_FPS, HIGHEST_FPS = 0.01, 240.0  # on average over the film
CHANNEL_LIMIT = 24  # mixed to one; as many as the largest layout of loudspeakers has, 22.2

# The position in this table is part of every index: new reasons go to its end, and none is ever
# taken out.
REASONS: dict[str, str] = {
    "missing-file": "the file of the image or the sound does not exist",
    "outside-root": "the path leaves the folders that files may lie in (--data-root); not opened",
    "empty-file": "the file has no byte",
    "not-an-image": "no known image format",
    "truncated-image": "the image ends before its last pixel",
    "too-many-pixels": f"more than {PIXEL_LIMIT:,} pixels",
    "impossible-size": f"a side of 0, of over {SIDE_LIMIT:,}, or {ASPECT_LIMIT} times the other",
    "unreadable": "the bytes cannot be read or decoded, for another reason than those above",
    "no-caption": "no text is given",
    "empty-caption": "the text is white space only",
    "huge-caption": f"the text has more than {CAPTION_LIMIT:,} characters",
    "invalid-utf8": "a text or a name is not valid UTF-8",
    "nul-character": "a text or a name holds the character NUL",
    "invalid-row": "not understood: not JSON, missing columns, values of another type",
    "duplicate-id": "an earlier sample has the same id",
    "orphan-member": "an image or a sound without its text, or a text alone",
    "truncated-archive": "the archive is damaged or cut off; what comes before remains",
    "no-value": "the sample has nothing of this modality",
    "not-audio": "no known audio format",
    "no-sound": "a film without a sound track",
    "truncated-audio": "the sound ends before the samples that its header promises",
    "empty-audio": "the sound has no sample",
    "silent-audio": "every sample of the sound, mixed to one channel, is 0",
    "huge-audio": f"over --max-audio-seconds, {SECONDS_LIMIT:,} seconds, {SAMPLES_LIMIT:,} samples",
    "impossible-audio": f"not {LOWEST_HZ:,} to {HIGHEST_HZ:,} Hz, or over {CHANNEL_LIMIT} channels",
    "not-finite-audio": "a sample of the sound is not a number, or infinite",
    "too-slow": f"over {DECODE_LIMIT_S:g} seconds of processor time, or millions of strips",
    "invalid-box": "the box of a region is not four finite numbers, or of an unknown unit",
    "empty-box": "the box of a region has no width or no height",
    "inverted-box": "the box of a region ends left of, or above, where it begins",
    "outside-image": "more than half of the box of a region is outside of the image",
    "not-relative": "the box of a region is called relative, and has numbers above 1",
    "no-phrase": "a region or a moment has no text",
    "too-many-regions": f"over {ANNOTATION_LIMIT:,} regions of an image, or texts of a region",
    "not-a-film": "no known film format, or nothing in it that moves",
    "no-frames": "a film without a frame",
    "truncated-film": "the film ends before the frames that its header promises, or within one",
    "impossible-film": f"not {LOWEST_FPS:g} to {HIGHEST_FPS:g} frames/s, or an impossible size",
    "huge-film": f"a film of over {FILM_SECONDS_LIMIT / 3600:g} hours",
    "outside-film": "the clip begins behind the end of its film, or ends before its first picture",
    "empty-segment": "the segment ends where it begins or before, or its times are no times",
    "missing-shard": "the shard is not there any more",
    "changed-shard": "the shard has changed since the run began",
    "miscounted-shard": "the shard has another number of samples than a file beside it tells",
    "below-a-pixel": "the box of a region is less than a pixel wide or high; of fractions?",
    "invalid-span": "start_s or end_s of a moment is no number, or it ends before it begins",
    "outside-clip": "more than half of a moment is outside of the clip of its sample",
    "too-many-moments": f"over {ANNOTATION_LIMIT:,} moments of a film, or texts of a moment",
}
ABSENCES = ("no-value", "no-caption", "empty-caption", "orphan-member")
"""Reasons that say of one modality that it was never there, not that it is broken."""
CODES: dict[str, int] = {reason: 1 + position for position, reason in enumerate(REASONS)}
"""Reason -> its number in the index; 0 is a usable sample."""
REASON_OF_CODE: dict[int, str] = {code: reason for reason, code in CODES.items()}


class BadSample(ValueError):
    """One sample cannot be used. `reason` is a key of `REASONS`, `detail` says what was found."""

    def __init__(self, reason: str, detail: str = "") -> None:
        if reason not in REASONS:
            raise ValueError(f"reason '{reason}' is none of {', '.join(REASONS)}")
        super().__init__(reason, detail)  # both, so that it survives pickling
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


@contextlib.contextmanager
def refusing(
    reason: Callable[[Exception], str] = lambda error: "unreadable",
    *,
    but: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Turn what a library raises inside the block into BadSample. Meant for calls of decoders and
    converters alone: the types that they raise are an open set, while an error of our own code has
    to end the run.

    `reason`: a key of `REASONS` for an error. `but`: types that pass, beside BadSample and
    MemoryError.
    """
    passing: tuple[type[Exception], ...] = (BadSample, MemoryError, *but)
    try:
        yield
    except passing:
        raise
    except Exception as error:
        raise BadSample(reason(error), f"{type(error).__name__}: {error}") from error


class Allowance:
    """The processor time that decoding may take, from now on; a busy machine costs none of it."""

    def __init__(self) -> None:
        # no thread's processor time is ahead of the clock, which takes a tenth as long to ask
        self.clock_end = time.monotonic() + DECODE_LIMIT_S
        self._processor = time.thread_time()

    def check(self) -> None:
        """Called between the pieces that a decoder reads or makes. Raises BadSample: too-slow."""
        if time.monotonic() <= self.clock_end:
            return
        if time.thread_time() - self._processor > DECODE_LIMIT_S:
            raise BadSample(
                "too-slow", f"not decoded after {DECODE_LIMIT_S:g} seconds of processor time"
            )


class Absent(LookupError):
    """The sample lacks this modality, and takes part in the pairs of the others."""


def check_sound(rate: float, channels: int, samples: int | None = None) -> None:
    """Rate in Hz and number of channels, as a sound's header has them, and the number of samples
    per channel where it is known. Raises BadSample: impossible-audio, huge-audio."""
    if not LOWEST_HZ <= rate <= HIGHEST_HZ or not 1 <= channels <= CHANNEL_LIMIT:
        raise BadSample("impossible-audio", f"{rate:,} Hz, {channels} channels")
    if samples is not None and samples > SECONDS_LIMIT * rate:
        raise BadSample(
            "huge-audio",
            f"{samples / rate:,.0f} seconds; at most {SECONDS_LIMIT:,} are read: cut it into clips",
        )
    if samples is not None and samples > SAMPLES_LIMIT:
        raise BadSample(
            "huge-audio", f"{samples:,} samples at {rate:,} Hz; at most {SAMPLES_LIMIT:,} are read"
        )


def check_size(width: int, height: int, pixel_limit: int = PIXEL_LIMIT) -> None:
    """Width and height in pixels, as an image's header has them. Raises BadSample:
    impossible-size, too-many-pixels."""
    shorter, longer = min(width, height), max(width, height)
    if shorter < 1 or longer > SIDE_LIMIT or longer > ASPECT_LIMIT * shorter:
        raise BadSample("impossible-size", f"{width} x {height} pixels")
    if width * height > pixel_limit:
        raise BadSample(
            "too-many-pixels",
            f"{width} x {height} = {width * height:,} pixels; at most {pixel_limit:,} are read",
        )


def check_characters(text: str, what: str) -> None:
    """Raises BadSample: nul-character, invalid-utf8 (a lone surrogate, which is also what a byte
    that is not UTF-8 is read as)."""
    if "\0" in text:
        raise BadSample(
            "nul-character", f"{what} holds the character NUL at position {text.index(chr(0))}"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadSample(
            "invalid-utf8", f"{what} is not UTF-8 at position {error.start}; save it as UTF-8"
        ) from None


class Captions(NamedTuple):
    """The good texts of a sample, and what is wrong with the others."""

    good: list[str]
    dropped: list[BadSample]


def checked_captions(given: Any) -> Captions:
    """The good ones of one text or of several. Raises BadSample when none is good, with what is
    wrong with the first."""
    if hasattr(given, "tolist"):
        given = given.tolist()  # of numpy or pandas
    found = Captions([], [])
    for text in (list(given) if isinstance(given, (list, tuple)) else [given]) or [None]:
        try:
            check_caption(text)
            found.good.append(text)
        except BadSample as problem:
            found.dropped.append(problem)
    if not found.good:
        raise found.dropped[0]
    return found


def check_caption(text: Any) -> None:
    """Raises BadSample: no-caption, invalid-row, nul-character, invalid-utf8, empty-caption,
    huge-caption."""
    if text is None:
        raise BadSample("no-caption", "no text is given; every sample needs words")
    if not isinstance(text, str):
        raise BadSample(
            "invalid-row", f"the text is {brief(text)}; a text or a list of texts is needed"
        )
    check_characters(text, "the text")
    if not text.strip():
        raise BadSample("empty-caption", "the text is empty; every sample needs words")
    if len(text) > CAPTION_LIMIT:
        raise BadSample(
            "huge-caption",
            f"the text has {len(text):,} characters; at most {CAPTION_LIMIT:,} are read: "
            f"{text[:40]!r}...",
        )
