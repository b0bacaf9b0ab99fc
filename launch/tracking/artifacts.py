"""An export as an artifact of the W&B run that trained it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from deepspeed.monitor.config import WandbConfig

from common.output import only_shows
from launch.tracking.login import choose_mode
from launch.tracking.wandb_run import WandbRun

if TYPE_CHECKING:
    from launch.inference.trained import Trained


def log_export(trained: Trained, run_dir: Path, export: Path, averaged: bool) -> None:
    """Adds all files of the export to the run, as a new version with the aliases `latest`,
    `step-N` and, for the moving average of the weights, `ema`. A run that was not tracked gets its
    W&B run now. Without a login or a network it is recorded offline; a failure is one warning."""
    # asked for by name, so online unless W&B's own settings say otherwise
    mode, notice = choose_mode("auto", WandbConfig(enabled=True))
    if mode == "disabled":
        reason = notice or "W&B: off, by WANDB_MODE, WANDB_DISABLED or the settings of its client"
        logging.getLogger("wye").warning("the export is not in W&B; %s", reason)
        return
    with only_shows("the export is not in W&B"):
        run = WandbRun(mode, run_dir, trained.record["tracking"], {}, job_type=None)
        aliases = ["latest", f"step-{trained.step}", *(["ema"] if averaged else [])]
        run.model(export, aliases, {"step": trained.step, "averaged": averaged})
        run.finish(0)
