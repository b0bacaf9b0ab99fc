"""The command line of every program: flags, files of arguments, and one line on what is wrong.

    train.py @run.args --steps 200

A file of arguments has one on each line, as argparse's `fromfile_prefix_chars` reads it. No shell
sees it, so that nothing in it is quoted:

    # the small run
    --data stream:/data/{000..999}.parquet?mixed=16&text=caption&where=similarity>=0.5
    --set branches.stages={"image": 1, "text": 1}
    --deterministic
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from common.shell import REMEDY, refuse_cut_command
from common.spelling import near

FILE = "@"
SHOWN = 4  # words that a message lists
QUOTED = re.compile(r"""(?:--[^\s=]+=)?(['"]).*\1""")


@dataclass(frozen=True)
class InFile:
    """The type of an argument that is a text, or @FILE for those that `read` finds in the file: one,
    or several where the argument may be repeated. `endings`: of such files, by which they differ
    from files of arguments."""

    read: Callable[[Path], Sequence[str]]
    endings: tuple[str, ...]

    def __call__(self, text: str) -> str:
        return text


class CommandParser(argparse.ArgumentParser):
    """Reads the flags of a program. A word that begins with @ and is not the value of a flag is a
    file of arguments. Where the type of a value is `InFile`, @FILE stands for what is in that file.

    What is wrong is one line on stderr and exit status 2. Started on many ranks at once, it speaks
    on the first only.
    """

    def __init__(self, **how: Any):
        how.setdefault(
            "formatter_class",
            lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=120),
        )
        super().__init__(**how)

    def error(self, message: str) -> NoReturn:
        if _is_first_rank():
            self.say(f"{self.prog}: error: {message} (see {self.prog} --help)")
        sys.exit(2)

    def say(self, message: str) -> None:
        print(message, file=sys.stderr)

    def print_help(self, file: Any = None) -> None:
        if _is_first_rank():
            super().print_help(file)

    def words(self, arguments: Sequence[str] | None = None) -> list[str]:
        """The arguments, with what files hold in their places; without any, those that this process
        was started with, which `sys.argv` then has like this, for records. Ends with a message where
        a file cannot be read, or a shell has visibly cut the command."""
        try:
            if arguments is None:
                refuse_cut_command()
            found = self._with_files(sys.argv[1:] if arguments is None else arguments)
            found = self._with_values(found)
        except (OSError, ValueError) as error:
            self.error(str(error))
        if arguments is None:
            sys.argv[1:] = found
        return found

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        found, unknown = self.parse_known_args(self.words(args), namespace)
        if unknown:
            self.error(self._refused(unknown))
        return found

    def _with_files(self, arguments: Sequence[str]) -> list[str]:
        found: list[str] = []
        for place, word in enumerate(arguments):
            if word == "--":  # what follows is another program's
                return [*found, *arguments[place:]]
            is_value = place > 0 and self._waits_for_value(arguments[place - 1])
            is_value |= not is_value and self._of_file_of_values("", word) is not None
            if word.startswith(FILE) and len(word) > 1 and not is_value:
                found += self._of_file(Path(word[1:]))
            else:
                found.append(word)
        return found

    def _with_values(self, words: Sequence[str]) -> list[str]:
        """The words, with the values that files hold. Errors: ValueError for several values of an
        argument that takes one."""
        found: list[str] = []
        for place, word in enumerate(words):
            if word == "--":
                return [*found, *words[place:]]
            flag, equals, value = word.partition("=")
            if not (equals and word.startswith("--")):
                waits = found and self._waits_for_value(found[-1])
                flag, equals, value = found[-1] if waits else "", "", word
            action = self._of_file_of_values(flag, value)
            if action is None:
                found.append(word)
                continue
            values = action.type.read(Path(value[1:]))
            if len(values) > 1 and not isinstance(action, argparse._AppendAction):
                name = flag or action.metavar or action.dest
                raise ValueError(f"{value} holds {len(values)} of {name}, which takes one")
            for n, each in enumerate(values):
                found += [f"{flag}={each}"] if equals else [flag, each] if n else [each]
        return found

    def _of_file_of_values(self, flag: str, word: str) -> Any:
        """The argument whose values are in the file that `word` names; None: it names no such file.
        `flag`: before it, perhaps the beginning of one; "": none."""
        if not word.startswith(FILE) or len(word) == 1:
            return None
        named = self._option_string_actions
        meant = (
            [flag] if flag in named else [name for name in named if name.startswith(flag or " ")]
        )
        actions = [named[name] for name in meant] if flag else self._get_positional_actions()
        if len(actions) != 1 or not isinstance(actions[0].type, InFile):
            return None
        is_one = flag or Path(word).suffix.lower() in actions[0].type.endings
        return actions[0] if is_one else None

    def _waits_for_value(self, word: str) -> bool:
        """Whether it is a flag, perhaps the beginning of one, whose value is the next word."""
        return word.startswith("-") and any(
            written.startswith(word) and action.nargs != 0
            for action in self._actions
            for written in action.option_strings
        )

    def _of_file(self, path: Path) -> list[str]:
        """The arguments of a file; a flag and its value may share a line. Errors: ValueError for
        what was written for a shell."""
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "is no text in UTF-8"
            raise ValueError(
                f"{FILE}{path}: {reason}; it is a file with an argument on each line (a path that "
                f"begins with {FILE} is written ./{FILE}…)"
            ) from error
        found: list[str] = []
        for number, line in enumerate(map(str.strip, lines), 1):
            if not line or line.startswith("#"):
                continue
            flag, value = re.fullmatch(r"(?:(--[^\s=]+)\s+)?(.*)", line).groups()  # type: ignore[union-attr]
            self._refuse_shells_words(f"{FILE}{path}, line {number}", value)
            found += [value] if flag is None else [flag, value]
        return found

    def _refuse_shells_words(self, where: str, value: str) -> None:
        if QUOTED.fullmatch(value) or value.endswith(" \\") or value == "\\":
            raise ValueError(
                f"{where}: {value}: no shell reads this file; leave out the quotes around an "
                "argument, and the \\ at the end of a line"
            )
        known = {written for action in self._actions for written in action.option_strings}
        if second := [word for word in value.split()[1:] if word.partition("=")[0] in known]:
            raise ValueError(f"{where}: {value}: give {second[0]} a line of its own")

    def _refused(self, unknown: Sequence[str]) -> str:
        more = f" … ({len(unknown)} words)" * (len(unknown) > SHOWN)
        message = f"unrecognized arguments: {' '.join(unknown[:SHOWN])}{more}"
        flags = [word for word in unknown if word.startswith("-")]
        if not flags:
            words = "a word that is" if len(unknown) == 1 else "words that are"
            return (
                f"{message}; {words} no value of a flag. If a shell has made several of one "
                f"argument, by a space, {{…}}, * or ?, {REMEDY}"
            )
        known = [
            written.lstrip("-")
            for action in self._actions
            if action.help is not argparse.SUPPRESS
            for written in action.option_strings
        ]
        return message + near(flags[0].partition("=")[0].lstrip("-"), known, "--")


def _is_first_rank() -> bool:
    return int(os.environ.get("RANK", "0")) == 0
