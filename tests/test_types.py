"""The static checks of the code: types, format, imports."""

import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("common", "data", "engine", "launch", "models")
IMPORT = re.compile(r"^ *(?:from|import) ([a-z]\w+)", re.MULTILINE | re.IGNORECASE)

import pytest


def run(*command: str) -> None:
    """A module of Python over the repository; what it says when it finds anything."""
    found = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert found.returncode == 0, (
        f"python -m {' '.join(command)} finds:\n{found.stdout[-8000:]}{found.stderr[-2000:]}"
    )


@pytest.mark.all("runs mypy over all of the code")
def test_types():
    """mypy.ini says what is checked, and gives a reason for each exception."""
    run("mypy", "--no-error-summary")


def test_format():
    run("ruff", "format", "--check", ".")
    run("ruff", "check", "--select", "F,I", ".")


def test_a_file_of_requirements_names_each_package_that_is_imported():
    """Not what only another one brings, which may go with its next version."""
    files = [
        *ROOT.glob("*.py"),
        *(file for each in PRODUCT for file in (ROOT / each).rglob("*.py")),
    ]
    imported = {name for file in files for name in IMPORT.findall(file.read_text("utf-8"))}
    packages = packages_distributions()
    found = {packages[n][0].replace("-", "_").lower() for n in imported if n in packages}
    lines = "\n".join(file.read_text("utf-8") for file in ROOT.glob("requirements*.txt"))
    named = {n.replace("-", "_").lower() for n in re.findall(r"^[\w.-]+", lines, re.MULTILINE)}
    assert found - named == {"typing_extensions"}  # for mypy alone
