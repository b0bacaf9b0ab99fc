"""What an earlier version of this repository does in `test_earlier_versions.py`, with its own code
in a process of its own.

    python earlier_version.py SOURCE WORK RUN...

SOURCE: its code. WORK: where outputs go, see `main`. RUN: arguments of its train.py.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

# Of each script: with what runs before it, under the limit of the test that waits for all of them.
LIMIT_S = 240
SAVED, STEPS = 3, 6


def main(source: Path, work: Path, run: list[str]) -> None:
    """Trains STEPS steps in WORK/whole; exports that to WORK/export; resumes WORK/earlier, a copy
    of it that ends with the checkpoint of step SAVED; and evaluates whole and export. WORK/present
    is another such copy, for the present version."""
    os.chdir(source)  # the server from which ranks are forked looks for modules here
    sys.path[:0] = [str(source), str(source / "tests")]
    import launched

    launched.LIMIT_S = LIMIT_S

    def do(script: str, *arguments: object, ranks: int | None = None) -> None:
        status, output = launched.run_to_end(script, *arguments, ranks=ranks)
        if status:
            sys.exit(f"{script} ended with {status}:\n{output[-5000:]}")

    whole, export = work / "whole", work / "export"
    do("train.py", *run, "--run-dir", whole, ranks=2)
    for copy in ("earlier", "present"):
        shutil.copytree(whole, work / copy, ignore=shutil.ignore_patterns(f"step-{STEPS:08}"))
    do("export.py", whole, export)
    evaluate = ["evaluate.py", "--workers", 0, "--json"]
    do(*evaluate, work / "whole-earlier.json", whole, "--rerank", 4)
    do(*evaluate, work / "export-earlier.json", export, "--val-data", run[run.index("--data") + 1])
    do("train.py", *run, "--run-dir", work / "earlier", ranks=2)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
