"""An export as an artifact of the W&B run that trained it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from deepspeed.monitor.config import WandbConfig

from launch.tracking.login import choose_mode
from launch.tracking.wandb_run import WandbRun

if TYPE_CHECKING:
    from launch.inference.trained import Trained

PROJECT = "wye"  # of runs whose config.json does not say it


def log_export(trained: Trained, run_dir: Path, export: Path, averaged: bool) -> None:
    """Adds all files of the export to the run, as a new version with the aliases `latest`,
    `step-N` and, for the moving average of the weights, `ema`. A run that was not tracked gets its
    W&B run now. Without a login or a network it is recorded offline, with one line."""
    where = trained.record.get("tracking") or {
        "project": trained.options.get("wandb_project") or PROJECT
    }
    # asked for by name, so online unless the user has told W&B's client something else
    mode, _ = choose_mode("auto", WandbConfig(enabled=True))
    run = WandbRun(mode, run_dir, where, {}, job_type=None)
    aliases = ["latest", f"step-{trained.step}", *(["ema"] if averaged else [])]
    run.model(export, aliases, {"step": trained.step, "averaged": averaged})
    run.finish()
