"""`train.py --dry-run` and `--show-options`: everything up to the first step, in one process and
without the hardware. What a run writes goes to a temporary folder; the index stays in the cache."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from launch.config.options import Options
from launch.setup.first_screen import first_screen, print_screen
from launch.setup.options_table import options_table
from launch.setup.prepare import prepare_run
from launch.setup.ranks import PlannedRanks
from launch.terminal.tables import show


def dry_run(options: Options) -> int:
    """Print the first screen, or where each option comes from; returns the exit status. Of the
    processes of a launcher the first does it. Errors: those of a run."""
    if int(os.environ.get("RANK", "0")) > 0:
        return 0
    with tempfile.TemporaryDirectory(prefix="wye-dry-run-") as temporary:
        ranks = PlannedRanks(options, Path(temporary))
        run = prepare_run(options, ranks)
        if options.show_options:
            show(options_table(run))
        else:
            print_screen(first_screen(run, ranks))
    print("dry run: nothing was trained, and no folder was written")
    return 0
