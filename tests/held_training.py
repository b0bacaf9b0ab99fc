"""train.py of which every rank but the first stands still while the run's folder has a file `hold`,
as soon as metrics.jsonl has step HOLD_AFTER, a variable of the environment. The first waits for
them in the step after it, or in the next one: what a test asks of the run then, it asks in the
middle. Signals are noted, and what is written in the background is written."""

import os
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # where train.py is

import train
from launch.config.options import parse_options
from launch.run.failures import Run, report_and_exit


def holding_clock(folder: Path, step: int) -> float:
    """The host's seconds, which each step asks for again and again."""
    metrics = folder / "metrics.jsonl"
    while (
        (folder / "hold").exists()
        and metrics.is_file()
        and f'"step": {step},' in metrics.read_text()
    ):
        time.sleep(0.02)
    return time.perf_counter()


if __name__ == "__main__":
    run, options = Run(), parse_options()
    clock = (
        []
        if os.environ["RANK"] == "0"
        else [lambda: holding_clock(options.run_dir, int(os.environ["HOLD_AFTER"]))]
    )
    try:
        status = train.main(options, run, *clock)
    except Exception as error:
        report_and_exit("train.py", error, run)
    sys.exit(status)
