"""Which faults do the tests see? Each mutant (`tests/mutants/`) is put into a copy of the code, and
the tests that cover its place run until the first of them fails.

    python bench/mutants.py                              all; a table to bench/out/mutants.md
    python bench/mutants.py --only NAME[,NAME]           some, or those of a file: engine, data, …
    python bench/mutants.py --limit-s 300                seconds that the tests of one may take

A mutant is killed where a test fails that passes without it. It survives where all pass; its tests
do not end where they take longer than the limit. The status is 0 where all are killed. What was found
stays in bench/out/mutants.json, and a mutant whose record and code are as they were is not run again
unless `--fresh`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from mutants import FOLDERS, Mutant, all_mutants

from bench.common import OUT, Kept, Program, table, write

FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
TESTS_FAILED = 1  # pytest's status
MOST_BYTES = (
    8 << 30
)  # of a process's own: a mutant may read without end, and not take the machine's


def copied(folder: Path) -> Path:
    """The files that git knows, and those that it does not ignore, in a folder of their own."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    tree = folder / "code"
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    return tree


def run_tests(tree: Path, tests: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """pytest's status, None where the limit was over, and what it said."""
    words = ["prlimit", f"--data={MOST_BYTES}", sys.executable, "-m", "pytest", "-x", "-q"]
    words += ["-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    program = Program(words, tree.parent / "log", environment, tree)
    return program.end(limit_s), program.said()


def tried(mutant: Mutant, tree: Path, limit_s: float) -> dict[str, Any]:
    """`outcome`: killed, survived, not ended; no place in the code; or failing, where the test
    that fails does so without the mutant, too, or none could be run."""
    file, began = tree / mutant.file, time.monotonic()
    sound = file.read_text(encoding="utf-8")
    try:
        file.write_text(mutant.applied(sound), encoding="utf-8")
    except LookupError as error:
        return {"outcome": "no place", "seconds": 0.0, "by": "", "said": str(error)}
    try:
        status, said = run_tests(tree, mutant.tests.split(), limit_s)
    finally:
        file.write_text(sound, encoding="utf-8")
    found: dict[str, Any] = {"seconds": time.monotonic() - began, "by": ""}
    if status is None:
        return found | {"outcome": "not ended"}
    if status == 0:
        return found | {"outcome": "survived"}
    named = FAILED.search(said)
    if status != TESTS_FAILED or not named:
        return found | {"outcome": "failing", "said": said[-2000:]}
    again, said = run_tests(tree, [named[1]], limit_s)
    outcome = "killed" if again == 0 else "failing"
    return (
        found
        | {"outcome": outcome, "by": named[1]}
        | ({} if again == 0 else {"said": said[-2000:]})
    )


def state_of(mutant: Mutant) -> str:
    """Another text where the mutant, its file or its tests are others."""
    digest = hashlib.sha256(repr(mutant).encode())
    words = [word.partition("::")[0] for word in mutant.tests.split() if word.startswith("tests")]
    for path in map(ROOT.joinpath, (mutant.file, *words)):
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def report(records: Mapping[str, Mapping[str, Any]], mutants: Iterable[Mutant]) -> str:
    """Markdown."""
    found = [(mutant, records[mutant.name]) for mutant in mutants if mutant.name in records]
    rows = [
        [m.name, m.breaks, r["outcome"], r["by"].removeprefix("tests/"), f"{r['seconds']:.0f}"]
        for m, r in found
    ]
    outcomes = [record["outcome"] for _, record in found]
    counts = ", ".join(f"{outcomes.count(each)} {each}" for each in dict.fromkeys(outcomes))
    seconds = [record["seconds"] for _, record in found if record["outcome"] == "killed"]
    median = f"; {statistics.median(seconds):.0f} s to kill, the median" if seconds else ""
    text = table(["mutant", "breaks", "outcome", "by", "seconds"], rows)
    return f"# Mutants\n\n{len(outcomes)}: {counts}{median}.\n\n{text}"


def chosen(only: str | None) -> list[Mutant]:
    """By name, or by the file that they stand in. Errors: ValueError."""
    every = all_mutants()
    if only is None:
        return every
    names = {mutant.name for mutant in every}
    for word in (words := only.split(",")):
        if word not in names and word not in FOLDERS:
            raise ValueError(f"--only {word}: is none of {', '.join((*FOLDERS, *sorted(names)))}")
    return [m for m in every if m.name in words or m.file.partition("/")[0] in words]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME[,NAME]", help="some mutants, or those of a folder")
    parser.add_argument("--limit-s", type=float, default=900, metavar="S", help="(default: 900)")
    parser.add_argument("--fresh", action="store_true", help="also those that are known")
    given = parser.parse_args()
    try:
        mutants = chosen(given.only)
    except ValueError as error:
        parser.error(str(error))
    OUT.mkdir(parents=True, exist_ok=True)
    kept = Kept(OUT / "mutants.json")
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = copied(Path(folder))
        for mutant in mutants:
            known, state = kept.records.get(mutant.name, {}), state_of(mutant)
            if known.get("state") != state or given.fresh:
                known = tried(mutant, tree, given.limit_s) | {"state": state}
                kept.records[mutant.name] = known
                kept.write()
            print(
                f"{known['outcome']:10}{known['seconds']:5.0f} s  {mutant.name}  {known['by']}",
                flush=True,
            )
    text = report(kept.records, all_mutants())
    write(OUT / "mutants.md", text)
    print(text.splitlines()[2])
    return 0 if all(kept.records[m.name]["outcome"] == "killed" for m in mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
