"""Saving and resuming: DeepSpeed writes the shards, we decide when they count.

    checkpoints/step-00000100/layer-image.stem-model_states.pt        weights and buffers of one layer, any topology reads them
                              mp_rank_00_model_states.pt              per stage: schedule, counters, our state
                              zero_pp_rank_0_mp_rank_00_optim_states.pt   per stage and replica: optimizer shard
    checkpoints/latest        the name of the newest folder that all ranks finished, put in place by one rename

DeepSpeed's own `latest` is written before the other ranks are known to be done; ours after a barrier.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from engine.averaging import load_average, save_average
from engine.executor import ForkEngine
from engine.module import layer_file

LATEST = "latest"
KEEP = 3  # newest checkpoints that stay


def step_folder(step: int) -> str:
    return f"step-{step:08d}"


def save_checkpoint(engine: ForkEngine, folder: Path, state: Mapping[str, Any]) -> Path:
    """Save after the current step; returns the checkpoint's folder. `state` is small, JSON-like and equal on all ranks."""
    name = step_folder(engine.global_steps)
    own = {"wye": dict(state), "engine": engine.progress()}
    engine.save_checkpoint(str(folder), tag=name, client_state=own, save_latest=False)
    save_average(engine, folder / name)
    dist.barrier()  # every rank's files are complete
    if engine.global_rank == 0:
        pointer = folder / f"{LATEST}.writing"
        pointer.write_text(name + "\n", encoding="utf-8")
        os.replace(pointer, folder / LATEST)
        for old in sorted(p for p in folder.glob("step-*") if p.is_dir() and p.name <= name)[:-KEEP]:
            shutil.rmtree(old)
    dist.barrier()
    return folder / name


def load_checkpoint(engine: ForkEngine, checkpoint: Path) -> dict[str, Any]:
    """Restore parameters, optimizer, schedule, clipping and counters of the same topology; returns what was saved as `state`."""
    path, client_state = engine.load_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
    if path is None:
        raise FileNotFoundError(
            f"checkpoint {checkpoint}: its files are missing or of another topology; choose another one with --resume PATH"
        )
    engine.load_progress(client_state["engine"])
    load_average(engine, checkpoint)
    return client_state["wye"]


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint `latest` names, or None when there is none yet. Raises FileNotFoundError when it names one that is gone."""
    pointer = folder / LATEST
    if not pointer.is_file():
        return None
    checkpoint = folder / pointer.read_text(encoding="utf-8").strip()
    if not checkpoint.is_dir():
        others = sorted(p.name for p in folder.glob("step-*") if p.is_dir())
        raise FileNotFoundError(
            f"{pointer} names {checkpoint.name}, which is not there; there are: {', '.join(others) or 'none'}; give one with --resume"
        )
    return checkpoint


def step_of(checkpoint: Path) -> int:
    match = re.fullmatch(r"step-(\d+)", checkpoint.name)
    if match is None:
        raise ValueError(f"{checkpoint}: a checkpoint folder is named step-NNNNNNNN")
    return int(match.group(1))


def load_layer(checkpoint: Path, layer: nn.Module, layer_name: str, device: torch.device | str = "cpu") -> nn.Module:
    """Fill one built layer from a checkpoint of any topology, in the precision it was trained in."""
    path = layer_file(str(checkpoint), layer_name)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: no such layer in this checkpoint; it was made with other towers")
    state = torch.load(path, map_location="cpu", weights_only=True)
    for name, parameter in layer.named_parameters():  # buffers stay in fp32, as in training
        parameter.data = parameter.data.to(state[name].dtype)
    layer.load_state_dict(state)
    return layer.to(device)
