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
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
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

OUT = ROOT / "bench" / "out"
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
TESTS_FAILED = 1  # pytest's status


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
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            words, cwd=tree, stdout=said, stderr=said, env=environment, start_new_session=True
        )
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM if process.poll() is None else signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        said.seek(0)
        return status, said.read()


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


def table(records: Mapping[str, Mapping[str, Any]], mutants: Iterable[Mutant]) -> str:
    """Markdown."""
    lines = ["| mutant | breaks | outcome | by | seconds |", "|---|---|---|---|---|"]
    seconds, outcomes = [], []
    for mutant in mutants:
        if (found := records.get(mutant.name)) is not None:
            outcomes.append(found["outcome"])
            seconds += [found["seconds"]] * (found["outcome"] == "killed")
            lines.append(
                f"| {mutant.name} | {mutant.breaks} | {found['outcome']} | "
                f"{found['by'].removeprefix('tests/')} | {found['seconds']:.0f} |"
            )
    counts = ", ".join(f"{outcomes.count(each)} {each}" for each in dict.fromkeys(outcomes))
    median = f"; {statistics.median(seconds):.0f} s to kill, the median" if seconds else ""
    return "\n".join(["# Mutants", "", f"{len(outcomes)}: {counts}{median}.", "", *lines, ""])


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
    file, records = OUT / "mutants.json", {}
    if file.is_file():
        records = json.loads(file.read_text(encoding="utf-8"))
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = copied(Path(folder))
        for mutant in mutants:
            known, state = records.get(mutant.name, {}), state_of(mutant)
            if known.get("state") != state or given.fresh:
                known = tried(mutant, tree, given.limit_s) | {"state": state}
                records[mutant.name] = known
                file.write_text(json.dumps(records, indent=1), encoding="utf-8")
            print(
                f"{known['outcome']:10}{known['seconds']:5.0f} s  {mutant.name}  {known['by']}",
                flush=True,
            )
    text = table(records, all_mutants())
    (OUT / "mutants.md").write_text(text, encoding="utf-8")
    print(text.splitlines()[2])
    return 0 if all(records[mutant.name]["outcome"] == "killed" for mutant in mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
