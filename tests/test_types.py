"""The static checks of the code: types, format, imports."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str) -> None:
    """A module of Python over the repository; what it says when it finds anything."""
    found = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert found.returncode == 0, (
        f"python -m {' '.join(command)} finds:\n{found.stdout[-8000:]}{found.stderr[-2000:]}"
    )


def test_types():
    """mypy.ini says what is checked, and gives a reason for each exception."""
    run("mypy", "--no-error-summary")


def test_format():
    run("ruff", "format", "--check", ".")
    run("ruff", "check", "--select", "F,I", ".")
