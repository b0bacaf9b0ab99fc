"""The JSON file of a run, checked against this hardware and this number of processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.monitor.config import DeepSpeedMonitorConfig, get_monitor_config

from common.files import read_json
from engine.checks import AUTO
from engine.config.reading import BranchesBlock, check_hardware, read_config
from engine.planning.planner import check_world
from engine.processes.communication import COMMUNICATION
from engine.processes.start import has_bf16
from launch.config.blocks import READERS
from launch.config.options import ROOT, Options
from launch.config.recipe_files import MONITORS
from launch.config.settings import with_settings

# block -> the module that it needs, and what installs it
PACKAGES = {
    "tensorboard": ("tensorboard", "pip install tensorboard"),
    "comet": ("comet_ml", 'pip install "comet_ml>=3.41.0"'),
}


def default_config(on_gpu: bool, bf16_supported: bool, world_size: int) -> Path:
    """The JSON file that suits the hardware found. Without a GPU a fork where there are processes
    for one: it is planned from counted operations, so nothing is measured, and equal runs are
    equal."""
    if on_gpu:
        name = "zero1_bf16.json" if bf16_supported else "zero1_fp16.json"
    else:
        name = "cpu_fork_fp32.json" if world_size > 1 else "cpu_fp32.json"
    return ROOT / "ds_configs" / name


@dataclass(frozen=True)
class Abilities:
    """What a kind of device computes in. `fast_bf16`: in hardware."""

    device_type: str
    fp16: bool = True
    bf16: bool = True
    fast_bf16: bool = True

    @classmethod
    def here(cls, device: torch.device) -> Abilities:
        accelerator = get_accelerator()
        return cls(
            device.type,
            accelerator.is_fp16_supported(),
            accelerator.is_bf16_supported(),
            has_bf16(device),
        )


def read_configuration(
    options: Options, num_ranks: int, abilities: Abilities
) -> tuple[Path, dict[str, Any], BranchesBlock, DeepSpeedMonitorConfig]:
    """--deepspeed_config, or the file that suits the hardware; DeepSpeed's keys of it; its
    `branches` block; and the blocks of DeepSpeed's monitors. Errors: ValueError, OSError."""
    on_gpu = abilities.device_type != "cpu"
    file = options.deepspeed_config or default_config(on_gpu, abilities.fast_bf16, num_ranks)
    config, block = with_file(options, file)
    check_hardware(config, abilities.fp16, abilities.bf16, abilities.device_type)
    check_world(config, block, num_ranks, options.branches)
    options.refuse_beside(block)
    try:
        config, monitors = split_monitors(config)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return Path(file), config, block, monitors


def asked_communication(options: Options) -> str:
    """`branches.communication` of --deepspeed_config and --set, which the process group is made by.

    The rest of the file is read later, when the ranks can agree on who reports what is wrong with
    it; until then a file that cannot be read asks for nothing.
    """
    try:
        file = options.deepspeed_config
        written = read_json(Path(file)) if file else {}
        asked = with_settings(written, options.set)["branches"]["communication"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return AUTO
    return asked if asked in COMMUNICATION else AUTO


def with_file(options: Options, file: Path) -> tuple[dict[str, Any], BranchesBlock]:
    """DeepSpeed's keys and the `branches` block of the file, with those of --set in their place.
    Errors: ValueError, OSError."""
    try:
        change = partial(with_settings, settings=options.set)
        return read_config(file, options.branches, READERS, change)
    except ValueError as error:
        by = f"with --set {' '.join(options.set)}: " if options.set else ""
        raise ValueError(f"{by}{error}") from error


def split_monitors(config: Mapping[str, Any]) -> tuple[dict[str, Any], DeepSpeedMonitorConfig]:
    """The JSON's keys without the blocks of monitors, and these blocks. Errors: ValueError where an
    enabled one needs a package that is not installed."""
    monitors = get_monitor_config(dict(config))
    for name, (module, command) in PACKAGES.items():
        # looked for and not imported, because only the first rank uses it
        if getattr(monitors, name).enabled and find_spec(module) is None:
            raise ValueError(
                f"{name}.enabled: the package {module} is not installed; run `{command}`, or set "
                "it to false"
            )
    return {key: value for key, value in config.items() if key not in MONITORS}, monitors
