"""Python modules of a user's own, imported at the start of a command (`--import-module`).

What they register, such as a schedule, can then be chosen by its name. A module runs as a program
with the rights of the user, so what a file names (the record of a run, an export, a folder of
embeddings) is imported only if the command line of this process names it too, or says
`--trust-run`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FOLDERS = ("common", "data", "engine", "launch", "models")
_named: set[str] = set()  # by the command line of this process
TRUST_ALL = "*"


def add_module_flag(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--import-module",
        action="extend",
        type=module_names,
        metavar="MODULE[,MODULE]",
        help="Python modules to import first, which register what is yours, such as a schedule "
        "(engine/README.md); they are found as in an import statement, and in the current folder; "
        "may be repeated (default: none)",
    )


def add_trust_flags(parser: argparse.ArgumentParser) -> None:
    """`--import-module` and `--trust-run`, for programs that open what others may have made."""
    add_module_flag(parser)
    parser.add_argument(
        "--trust-run",
        action="store_true",
        help="import the Python modules that the given folder names, which run as programs: for a "
        "folder of your own, or of somebody you trust (default: only those of --import-module)",
    )


def import_named(arguments: argparse.Namespace) -> None:
    """Import and trust what the flags of `add_trust_flags` say. Errors: as `import_modules`."""
    import_modules(arguments.import_module)
    if arguments.trust_run:
        _named.add(TRUST_ALL)


def modules_of_specs(specs: Iterable[str | None]) -> list[str]:
    """The modules that data specs `python:MODULE:NAME` call."""
    parts = [(spec or "").split(":") for spec in specs]
    return [part[1] for part in parts if part[0] == "python" and len(part) > 1]


def import_recorded(names: Sequence[str] | None, where: object, others: Sequence[str] = ()) -> None:
    """Import modules that a file names. `where`: the file or its folder; `others`: further modules
    that it names, which the message of a refusal lists too.

    Raises ValueError for a module that the command line does not name, before any is imported.
    """
    refused = [name for name in names or () if not {name, TRUST_ALL} & _named]
    if refused:
        every = list(dict.fromkeys([*(names or ()), *others]))
        raise ValueError(
            f"{where}: it names the Python module{'s' * (len(every) > 1)} {', '.join(every)}, and "
            "importing one runs it as a program. If you trust whoever made this, add "
            f"--import-module {','.join(every)}, or --trust-run for all that it names"
        )
    import_modules(names)


def is_trusted(names: Iterable[str]) -> bool:
    """Whether the command line names all of these, or trusts what a folder names."""
    return TRUST_ALL in _named or {*names} <= _named


def import_modules(names: Sequence[str] | None) -> None:
    """Import these modules of the command line in their order; None: there are none.

    The current folder is searched last, so that nothing in it hides a module of the environment.
    Raises ValueError for a module that cannot be imported, whatever its code raised.
    """
    if not names:
        return
    # pyarrow and more, which --help can do without
    from data.stored.kinds import refuse_unfit

    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    for name in names:
        try:
            importlib.import_module(name)
            refuse_unfit()
        except Exception as error:
            raise ValueError(f"--import-module {name}: {_why(name, error)}") from error
    _named.update(names)


def _why(name: str, error: Exception) -> str:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and f"{name}.".startswith(f"{missing}."):
        return (
            f"there is no module {missing!r} in the environment or in {os.getcwd()}; give the "
            "name of one that is there, or start in the folder that holds it"
        )
    # a SyntaxError names its own
    where = "" if isinstance(error, SyntaxError) else line_of(error)
    what = f"{type(error).__name__}: {error}{where}"
    return f"importing it failed with {what}; mend the module, or leave it out"


def line_of(error: BaseException) -> str:
    """The last line of a user's own that led to an error, else of a library, in brackets: ` (line 7 of
    mine.py)`; empty where there is none."""
    ours = tuple(os.path.join(ROOT, folder) + os.sep for folder in FOLDERS)
    libraries = tuple(folder + os.sep for folder in {sys.prefix, sys.base_prefix})
    every = [(file, line) for file, line, *_ in traceback.extract_tb(error.__traceback__)]
    lines = [each for each in every if os.path.isabs(each[0]) and not each[0].startswith(ours)]
    own = [each for each in lines if not each[0].startswith(libraries)]
    for file, line in (own or lines)[-1:]:
        return f" (line {line} of {file})"
    return ""


@contextlib.contextmanager
def own_code(what: str, but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn what code of a module raises inside the block into a ValueError that names its line. `what`:
    whose code it is, for the message; `but`: types that pass."""
    try:
        yield
    except but:
        raise
    except Exception as error:
        raise ValueError(
            f"{what} failed with {type(error).__name__}: {error}{line_of(error)}"
        ) from error


def module_names(text: str) -> list[str]:
    names = text.split(",")
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of module names, such as examples.schedule or mine.a,mine.b"
        )
    return names
