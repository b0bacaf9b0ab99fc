"""Options of a program as fields of dataclasses, and the flags that are made of them.

Each component of a program says in a dataclass of its own what can be asked of it:

    @dataclass(frozen=True)
    class LoadingOptions(OptionGroup):
        title = "data"
        workers: str | int = option("auto", "data loading processes per rank", "auto|N", workers)

The flag is the field's name (`--workers`), its help says the default, and a function that takes
`LoadingOptions` can name no other option.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on

Group = TypeVar("Group", bound="OptionGroup")
_KEY = "flag"
SAME = object()


@dataclass(frozen=True)
class Flag:
    """What a field says of its flag.

    `help`: without the default, which is added: `shown`, else the field's own and, where they
    differ, that of the embedded data (`demo`) and those of single ones by name (`demos`). `parse`:
    from the text to the value; ValueError and argparse.ArgumentTypeError are the user's mistakes.
    `action`: argparse's, for flags that may be
    repeated. `free`: may differ when a run goes on, because it does not change what is trained.
    `kept`: where it is not given, a run that goes on has what it began with. `recorded`: is part of
    a run's record; another way to give other options is not. `in_recipe`: a recipe file may set it;
    not what to import, where to read and write, or what else only whoever types the command can
    decide.
    """

    default: Any
    help: str
    metavar: str | None = None
    parse: Callable[[str], Any] | None = None
    choices: Sequence[str] | None = None
    shown: str | None = None
    demo: Any = SAME
    demos: Mapping[str, Any] = field(default_factory=dict)
    action: Any = None
    nargs: str | None = None
    name: str | None = None  # where it is not the field's
    free: bool | None = None
    kept: bool = False
    recorded: bool = True
    in_recipe: bool | None = None


def option(default: Any, help: str, metavar: str | None = None, parse: Any = None, **more: Any):
    """A field of a dataclass of options. `more`: of `Flag`."""
    return field(default=default, metadata={_KEY: Flag(default, help, metavar, parse, **more)})


@dataclass(frozen=True, kw_only=True)
class OptionGroup:
    """The base of a component's options. `title`: of the group of its flags in the help; `free`,
    `in_recipe`: of all its flags that do not say it themselves."""

    title: ClassVar[str] = ""
    free: ClassVar[bool] = False
    in_recipe: ClassVar[bool] = False

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """From options by name, as config.json keeps them; names of other components are passed
        over."""
        known = {f.name: record[f.name] for f in fields(cls) if f.name in record}
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in known.items()})

    def part(self, kind: type[Group]) -> Group:
        """These options of that group, and no others: for what compares or keeps them all."""
        return kind(**{each.name: getattr(self, each.name) for each in fields(kind)})

    def record(self) -> dict[str, Any]:
        """By name, as JSON has it."""
        found: dict[str, Any] = {}
        for each in fields(self):
            if _KEY in each.metadata and each.metadata[_KEY].recorded:
                value = getattr(self, each.name)
                value = str(value) if isinstance(value, Path) else value
                found[each.name] = list(value) if isinstance(value, tuple) else value
        return found


def flags_of(kind: type[OptionGroup]) -> Iterator[tuple[str, Flag]]:
    """Name and flag of each option that this class adds to those of its bases."""
    inherited = {f.name for base in kind.__bases__ if is_dataclass(base) for f in fields(base)}
    for each in fields(kind):
        if each.name not in inherited:
            yield each.name, _completed(kind, each.metadata[_KEY])


def _completed(kind: type[OptionGroup], flag: Flag) -> Flag:
    # its own word, not that of a base, which is of the base's flags
    unsaid = {name: vars(kind).get(name, False) for name in ("free", "in_recipe")}
    return replace(flag, **{k: v for k, v in unsaid.items() if getattr(flag, k) is None})


def add_flags(parser: argparse.ArgumentParser, kinds: Sequence[type[OptionGroup]]) -> None:
    """Add the flags of each class. A flag that is not given leaves no value, so that what was given
    can be told from what was not."""
    groups: dict[str, Any] = {}
    for kind in kinds:
        group = groups.get(kind.title) or parser.add_argument_group(kind.title)
        groups[kind.title] = group
        for name, flag in flags_of(kind):
            add_flag(group, name, flag)


def add_flag(group: Any, name: str, flag: Flag) -> None:
    written = f"--{flag.name or name.replace('_', '-')}"
    help = f"{flag.help} (default: {_shown(flag)})".replace("%", "%%")
    more: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": help}
    if isinstance(flag.default, bool):
        group.add_argument(written, action="store_true", **more)
        return
    if flag.choices:
        more["choices"] = flag.choices
    else:
        more["metavar"] = flag.metavar
    more |= {key: value for key in ("action", "nargs") if (value := getattr(flag, key))}
    group.add_argument(written, type=flag.parse, **more)


def _shown(flag: Flag) -> str:
    if flag.shown is not None:
        return flag.shown
    demos = ({} if flag.demo is SAME else {"demo": flag.demo}) | {
        f"demo:{name}": value for name, value in flag.demos.items()
    }
    words = ["none" if flag.default is None else str(flag.default)]
    return "; ".join(words + [f"{name}: {value}" for name, value in demos.items()])


class Once(argparse.Action):
    """Keep the value; an option that is given twice is an error, where argparse would take the
    last."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        if getattr(namespace, self.dest, None) is not None:
            parser.error(
                f"{option_string} is given twice, {getattr(namespace, self.dest)} and {values}; "
                "give it once"
            )
        setattr(namespace, self.dest, values)


# -- what a flag takes


def at_least(least: int) -> Callable[[str], int]:
    """A whole number from `least` on."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        return value

    number.__name__ = "whole number"
    return number


def number_where(rule: Callable[[float], bool], words: str) -> Callable[[str], float]:
    """A number that `rule` holds for; `words`: what one is that it does not hold for."""

    def number(text: str) -> float:
        value = float(text)
        if not rule(value):
            raise argparse.ArgumentTypeError(f"{value:g} is {words}")
        return value

    number.__name__ = "number"
    return number


positive = number_where(lambda value: 0 < value < math.inf, "not above 0")
fraction = number_where(lambda value: 0 <= value < 1, "not in 0 <= F < 1")


def numbers(text: str) -> tuple[float, ...]:
    """Numbers separated by commas."""
    return tuple(float(word) for word in text.split(","))


numbers.__name__ = "list of numbers"


def rising(text: str) -> tuple[int, ...]:
    """Whole numbers from 1 on, separated by commas, each above the one before."""
    values = tuple(int(word) for word in text.split(","))
    if values[0] < 1 or list(values) != sorted({*values}):
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers from 1 on that rise")
    return values


rising.__name__ = "list of whole numbers"


def words(allowed: Sequence[str], first: str = "") -> Callable[[str], tuple[str, ...]]:
    """`none`, or some of `allowed` joined by +, each once; `first`: the one that must be there."""

    def several(text: str) -> tuple[str, ...]:
        given = () if text == "none" else tuple(text.split("+"))
        wrong = len(set(given)) < len(given) or not set(given) <= set(allowed)
        if wrong or (given and first and given[0] != first):
            start = f"; {first} comes first" if first else ""
            raise argparse.ArgumentTypeError(
                f"{text!r}: give none, or some of {', '.join(allowed)} joined by +, each once{start}"
            )
        return given

    return several
