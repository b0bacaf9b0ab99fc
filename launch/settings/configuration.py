"""The JSON file of a run, checked against this hardware and this number of processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.monitor.config import DeepSpeedMonitorConfig

from engine.config.reading import BranchesBlock, check_hardware, read_config
from engine.planning.planner import check_world
from engine.processes.start import Processes, has_bf16
from launch.settings.blocks import READERS
from launch.settings.options import Options, default_config
from launch.settings.overrides import with_settings
from launch.tracking.monitors import split_monitors


def read_configuration(
    options: Options, processes: Processes
) -> tuple[Path, dict[str, Any], BranchesBlock, DeepSpeedMonitorConfig]:
    """--deepspeed_config, or the file that suits the hardware; DeepSpeed's keys of it; its
    `branches` block; and the blocks of DeepSpeed's monitors. Errors: ValueError, OSError."""
    on_gpu, accelerator = processes.device.type != "cpu", get_accelerator()
    file = options.deepspeed_config or default_config(
        on_gpu, has_bf16(processes.device), processes.world_size
    )
    config, block = with_file(options, file)
    check_hardware(
        config,
        accelerator.is_fp16_supported(),
        accelerator.is_bf16_supported(),
        processes.device.type,
    )
    check_world(config, block, processes.world_size, options.branches)
    options.refuse_beside(block)
    try:
        config, monitors = split_monitors(config)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return Path(file), config, block, monitors


def with_file(options: Options, file: Path) -> tuple[dict[str, Any], BranchesBlock]:
    """DeepSpeed's keys and the `branches` block of the file, with those of --set in their place.
    Errors: ValueError, OSError."""
    try:
        change = partial(with_settings, settings=options.set)
        return read_config(file, options.branches, READERS, change)
    except ValueError as error:
        by = f"with --set {' '.join(options.set)}: " if options.set else ""
        raise ValueError(f"{by}{error}") from error
