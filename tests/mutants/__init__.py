"""Faults of one line that the tests must see. A mutant says in words what it breaks and finds its
place by the text that stands there, so that it moves with the code: a place that is not there, or
is there twice, is an error (`tests/test_mutants.py`). `bench/mutants.py` runs the tests of each.

To add one, write a `Mutant` into the file of its folder and run
`python bench/mutants.py --only NAME`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("common", "data", "engine", "launch", "models")


@dataclass(frozen=True)
class Mutant:
    """`place`: a piece of `file` that occurs once, whatever its line breaks; `fault`: what stands
    there instead. `breaks`: the invariant, in words. `tests`: what covers the place, as pytest
    takes it, the fastest first."""

    name: str
    file: str
    place: str
    fault: str
    breaks: str
    tests: str

    def applied(self, source: str) -> str:
        """The file's text with the fault. Errors: LookupError unless its place is there once."""
        pattern = r"\s+".join(map(re.escape, self.place.split()))
        found = [*re.finditer(pattern, source)]
        if len(found) != 1:
            raise LookupError(
                f"mutant {self.name}: {self.file} has its place {len(found)} times, and once is "
                f"needed; move it to where the code now keeps this: {self.breaks}\n{self.place}"
            )
        return source[: found[0].start()] + self.fault + source[found[0].end() :]


def all_mutants() -> list[Mutant]:
    found = [m for folder in FOLDERS for m in import_module(f"mutants.{folder}").MUTANTS]
    names = [mutant.name for mutant in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"mutants of one name: {', '.join(twice)}")
    return found
