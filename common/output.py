"""What a program shows: a stream that is gone or cannot show a character, a picture that fails, or
a control character in a caption ends no run and reaches no terminal.

`train.py … | tee log` loses its reader at Ctrl-C, before the run has saved; over ssh, with the
connection.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from common.secrets import redact

# All but tab and newline: C0 and C1, lone surrogates (bytes of a name that are not UTF-8), and what
# breaks lines or turns the direction of writing.
UNSHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
COLOUR = re.compile("(\x1b\\[(?!(?:[0-9]*;)*0*8[;m])[0-9;]*m)")  # none that hides text
OF_A_BAR = re.compile("[\r\n]*(?:\x1b\\[A)*")  # how a progress bar begins
LONG_BITS = 256  # of a number that is not written out
BRACKETS: dict[Any, tuple[str, str]] = {list: ("[", "]"), tuple: ("(", ")"), dict: ("{", "}")}
INTERRUPTED = 130  # exit status, as a shell has it after Ctrl-C


class _Outliving(io.TextIOWrapper):
    replaced: io.TextIOWrapper

    def write(self, text: str) -> int:
        try:
            super().write(shown(text))
        except OSError:
            self._let_go()
        return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            self._let_go()

    def _let_go(self) -> None:
        """A pipe or a terminal that is gone, a disk that is full: what is said from now on is said
        to nobody."""
        nobody = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nobody, self.fileno())  # for what libraries write, too
        os.close(nobody)


def outlive_output() -> None:
    """From now on writing to this process's stdout and stderr never fails. A character that their
    encoding lacks (PYTHONIOENCODING, LC_ALL) is shown by its number. For the start of a program."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by who started this process
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8", errors="replace"))
        elif isinstance(stream, io.TextIOWrapper):
            strict = stream.errors in ("strict", "surrogateescape")
            outliving = _Outliving(
                stream.buffer,
                encoding=stream.encoding,
                errors="backslashreplace" if strict else stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            outliving.replaced = stream  # which would close the file when it is collected
            setattr(sys, name, outliving)


def shown(text: str) -> str:
    """What reaches a stream: without credentials, and with nothing that a terminal would obey but
    colours, and the one return and the moves with which a progress bar begins."""
    begin = OF_A_BAR.match(text)
    start = begin.end() if begin else 0
    pieces = COLOUR.split(redact(text[start:]))
    return text[:start] + "".join(
        piece if number % 2 else plain(piece) for number, piece in enumerate(pieces)
    )


def plain(text: str) -> str:
    """With what a file or a sample may hold and a terminal would obey in escapes, such as \\x1b."""
    return UNSHOWN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def brief(value: Any, most: int = 100) -> str:
    """The first characters of `repr(value)`, of which no more are made: a list that holds itself, or
    another one many times, has no end of them, and a number of 100,000 digits takes seconds."""
    shown = ""
    for piece in _pieces(value, most):
        shown += piece
        if len(shown) >= most:
            return shown[:most]
    return shown


def _pieces(value: Any, most: int) -> Iterator[str]:
    """Of `repr(value)`, none longer than `most` needs. Each level has a bracket of its own, so they
    are no more than its characters."""
    if isinstance(value, (str, bytes)):
        yield repr(value[:most])
    elif isinstance(value, int) and value.bit_length() > LONG_BITS:
        yield f"<a number of {value.bit_length():,} bits>"
    elif type(value) in BRACKETS:
        before, after = BRACKETS[type(value)]
        yield before
        for number, each in enumerate(value):
            yield ", " if number else ""
            yield from _pieces(each, most)
            if isinstance(value, dict):
                yield ": "
                yield from _pieces(value[each], most)
        yield after
    else:
        yield repr(value)


@contextlib.contextmanager
def only_shows(what: str) -> Iterator[None]:
    """Around what shows and does nothing else: a failure in it is one warning."""
    try:
        yield
    except Exception as error:
        reason = plain(" ".join(str(error).split()))
        logging.getLogger("wye").warning("%s (%s: %s)", what, type(error).__name__, reason)


def run_program(program: str, work: Callable[[], int | None]) -> int:
    """The exit status of `program`: that of `work`, where None is 0. A ValueError or OSError, which
    says what is wrong and what to do, is one message on stderr and status 2."""
    try:
        return work() or 0
    except (ValueError, OSError) as error:
        print(f"{program}: error: {plain(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return INTERRUPTED
