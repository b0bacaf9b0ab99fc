"""Python modules of a user's own, imported at the start of a command (`--import-module`).

What they register, such as a schedule, can then be chosen by its name.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence


def add_module_flag(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--import-module",
        action="extend",
        type=_names,
        metavar="MODULE[,MODULE]",
        help="Python modules to import first, which register what is yours, such as a schedule "
        "(engine/README.md); they are found as in an import statement, and in the current folder; "
        "may be repeated (default: none)",
    )


def import_modules(names: Sequence[str] | None) -> None:
    """Import these modules in their order; None: there are none.

    The current folder is searched last, so that nothing in it hides a module of the environment.
    Raises ValueError for a module that cannot be imported, whatever its code raised.
    """
    if names and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    for name in names or ():
        try:
            importlib.import_module(name)
        except Exception as error:
            raise ValueError(f"--import-module {name}: {_why(name, error)}") from error


def _why(name: str, error: Exception) -> str:
    if (
        isinstance(error, ModuleNotFoundError)
        and error.name
        and f"{name}.".startswith(f"{error.name}.")
    ):
        return (
            f"there is no module {error.name!r} in the environment or in {os.getcwd()}; give the "
            "name of one that is there, or start in the folder that holds it"
        )
    file, line, *_ = traceback.extract_tb(error.__traceback__)[-1]
    where = (
        "" if isinstance(error, SyntaxError) else f" (line {line} of {file})"
    )  # a SyntaxError names its own
    what = f"{type(error).__name__}: {error}{where}"
    return f"importing it failed with {what}; mend the module, or leave it out"


def _names(text: str) -> list[str]:
    names = text.split(",")
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of module names, such as examples.schedule or mine.a,mine.b"
        )
    return names
