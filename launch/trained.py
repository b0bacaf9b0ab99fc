"""A trained model as its run left it: what evaluate.py and export.py read of a run's folder, whatever topology it was trained on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from data.tokenizer import load_tokenizer
from engine.averaging import AVERAGE
from engine.checkpoint import load_layer, newest_checkpoint, step_of
from models.layers import Layer, Tower
from models.losses import build_loss
from models.towers import build_towers


@dataclass(frozen=True)
class Trained:
    """The model of one checkpoint. `record`: what was decided when the run began; `layers`: those of both towers in order, for evaluation."""

    record: dict[str, Any]
    checkpoint: Path
    step: int
    tokenizer: PreTrainedTokenizerBase
    towers: tuple[Tower, Tower]
    layers: list[Layer]

    @property
    def options(self) -> dict[str, Any]:
        """train.py's, by name."""
        return self.record["options"]


def open_run(run_dir: Path, checkpoint: str | None = None, device: torch.device | str = "cpu", averaged: bool = False) -> Trained:
    """The model of `checkpoint`, the name of a folder below RUN_DIR/checkpoints; None: of the newest. `averaged`: with the weights' moving average.

    Errors: FileNotFoundError for a folder of no run and for a checkpoint that is not there, ValueError.
    """
    record = read_record(run_dir)
    found = find_checkpoint(run_dir / "checkpoints", checkpoint)
    weights = found / AVERAGE if averaged else found
    if not weights.is_dir():
        raise FileNotFoundError(
            f'{weights}: no such folder; the run keeps no average of its weights ("ema" in "branches"), leave out --ema'
        )
    options = record["options"]
    tokenizer = load_tokenizer(record["tokenizer"] or str(run_dir / "tokenizer"))
    towers = build_towers(
        options["image_tower"],
        options["text_tower"],
        options["embed_dim"],
        options["image_size"],
        len(tokenizer),
        options["max_text_tokens"],
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
        build_loss(options["loss"]).parameters,
    )
    layers = [load_layer(weights, spec.build(options["seed"]), spec.name, device).eval() for tower in towers for spec in tower.specs]
    return Trained(record, found, step_of(found), tokenizer, towers, layers)


def read_record(run_dir: Path) -> dict[str, Any]:
    """What was decided when the run began."""
    file = run_dir / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{run_dir}: holds no config.json; give the folder of a run of train.py")
    return json.loads(file.read_text(encoding="utf-8"))


def find_checkpoint(folder: Path, name: str | None) -> Path:
    """The one that is asked for, or the newest."""
    checkpoint = folder / name if name else newest_checkpoint(folder)
    if checkpoint is None or not checkpoint.is_dir():
        there = ", ".join(sorted(path.name for path in folder.glob("step-*"))) or "none"
        raise FileNotFoundError(f"{checkpoint or folder}: no such checkpoint; there are: {there}")
    return checkpoint
