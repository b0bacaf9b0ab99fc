"""train.py that stands still while its folder has a file `hold`, as soon as metrics.jsonl has step HOLD_AFTER, a variable of the environment. What
a test asks of it then, it asks in the middle of the run. Signals are noted, and what is written in the background goes on."""

import os
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # where train.py is

import train
from launch.failures import Run, report_and_exit
from launch.options import parse_options


def holding_clock(folder: Path, step: int) -> float:
    """The host's seconds, which every step asks for."""
    metrics = folder / "metrics.jsonl"
    while (folder / "hold").exists() and metrics.is_file() and f'"step": {step},' in metrics.read_text():
        time.sleep(0.02)
    return time.perf_counter()


if __name__ == "__main__":
    run, options = Run(), parse_options()
    try:
        status = train.main(options, run, lambda: holding_clock(options.run_dir, int(os.environ["HOLD_AFTER"])))
    except Exception as error:
        report_and_exit("train.py", error, run)
    sys.exit(status)
