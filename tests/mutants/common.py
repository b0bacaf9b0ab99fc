"""Of what every folder uses: files, secrets, limits."""

from mutants import Mutant

FILES = "tests/common/test_files.py"

MUTANTS = (
    Mutant(
        "link-followed",
        "common/files.py",
        "if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:",
        "if False:",
        "nothing is written through a link",
        f"{FILES} tests/launch/test_run_folder.py",
    ),
    Mutant(
        "removed-outside",
        "common/files.py",
        "if not resolved.is_relative_to(within.resolve()):",
        "if False:",
        "nothing outside of a folder is removed because of what lies in it",
        FILES,
    ),
    Mutant(
        "half-a-file",
        "common/files.py",
        "beside.chmod(0o666 & ~_umask())",
        "beside.chmod(0o600)",
        "a file that is replaced has the rights of any new file",
        FILES,
    ),
    Mutant(
        "line-cut-short",
        "common/files.py",
        "if cut is None and _ends_whole(path):",
        "if cut is None:",
        "a last line that was cut short is ended before others follow",
        f"{FILES} tests/launch/test_run_folder.py",
    ),
    Mutant(
        "secret-in-a-query",
        "common/secrets.py",
        'return word if key.lstrip("?") in OF_SPECS else f"{key}={HIDDEN}"',
        "return word",
        "no credentials are shown",
        "tests/common/test_shown.py tests/launch/test_tracking.py",
    ),
    Mutant(
        "secret-of-the-environment",
        "common/secrets.py",
        "for value in _secrets_of_environment():",
        "for value in ():",
        "values of variables that are named like secrets are not shown",
        "tests/common/test_shown.py tests/launch/test_tracking.py",
    ),
    Mutant(
        "file-without-end",
        "common/files.py",
        "if (size := size + len(piece)) > most:",
        "if (size := size + len(piece)) < 0:",
        "of a file without end no more is read than its limit",
        f"{FILES} tests/data/test_bombs.py tests/data/streams/test_counts.py",
    ),
)
