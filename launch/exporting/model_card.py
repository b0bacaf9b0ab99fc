"""The front of an export's README.md: a model card as the Hugging Face hub reads it, with what the
run was trained on, its steps, its results and its command."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from common.files import read_json
from common.markdown import code, fenced, words
from launch.inference.trained import Trained
from launch.run.records import OPEN_CLIP
from models.metrics.retrieval import RECALL_AT

# the hub's words for what CLIP and SigLIP, and CLAP, are used for
TASKS = {"image": "zero-shot-image-classification", "audio": "zero-shot-audio-classification"}
DIRECTIONS = {
    f"{one}_to_{other}": f"{one} → {other}"
    for one, other in permutations(("image", "text", "audio"), 2)
}
Results = dict[str, dict[str, float]]  # of each held-out set


def model_card_data(trained: Trained, kind: str) -> str:
    """The YAML header. No license: what the data and the weights allow is not known here."""
    sigmoid = trained.options["loss"] == "sigmoid"
    is_class = kind.endswith("Model")
    branches = [tower.branch for tower in trained.towers]
    compared = next(branch for branch in TASKS if branch in branches)
    own = "siglip" if sigmoid else "clip" if compared == "image" else "clap"
    data = ModelCardData(
        library_name=OPEN_CLIP if kind == OPEN_CLIP else "transformers" if is_class else "pytorch",
        tags=[
            own,
            *(f"{branch}-text" for branch in TASKS if branch in branches),
            "contrastive-learning",
        ],
        pipeline_tag=TASKS[compared],
    )
    return f"---\n{data.to_yaml()}\n---\n\n"


def training_section(trained: Trained, averaged: bool) -> str:
    """Markdown of what is known of the run; empty for a model that no run here has trained."""
    record, options = trained.record, trained.options
    if "data" not in options:
        return ""
    results, line = results_of(trained, averaged)
    training = record.get("training", {})
    rows = {
        "data": ", ".join(map(code, options["data"])),
        "held out": code(options["val_data"])
        if options.get("val_data")
        else f"{options.get('val_fraction', 0):g} of the data",
        "started from": next(
            (
                code(options[key])
                for key in ("imported", "image_weights", "text_weights", "audio_weights")
                if options.get(key)
            ),
            "random weights",
        ),
        "steps": f"{trained.step:,} of {record.get('total_steps', trained.step):,}",
        "epochs": f"{line['epoch']:.4g}" if "epoch" in line else None,
        "samples per step": training.get("deepspeed", {}).get("train_batch_size"),
        "weights": "moving average (`--ema`)" if averaged else None,
    }
    lines = [f"| {name} | {value} |" for name, value in rows.items() if value is not None]
    parts = ["## Training", "| | |\n|---|---|\n" + "\n".join(lines)]
    if record.get("command"):
        parts.append(fenced(record["command"]))
    parts.append("## Results")
    parts.append(_table(results) if results else "The run has not evaluated these weights.")
    return "\n\n".join(parts)


def results_of(trained: Trained, averaged: bool) -> tuple[Results, dict[str, Any]]:
    """(what is known of these very weights: by evaluate.py on the samples that the run held out, else
    by the run itself; the run's own line of that step)."""
    run_dir = trained.checkpoint.parents[1]
    lines = [line for line in _lines(run_dir / "metrics.jsonl") if line.get("step") == trained.step]
    name = f"evaluation-{trained.checkpoint.name}{'-ema' if averaged else ''}.json"
    by_hand = _json(run_dir / name)
    found: Results = {}
    for key, value in by_hand.items():
        part, slash, metric = key.partition("/")
        if slash and isinstance(value, int | float):
            found.setdefault(part, {})[metric] = value
    if not found and averaged == bool(trained.options.get("eval_ema")):
        found = {line["held_out"]: line for line in lines if "held_out" in line}
    return found, lines[-1] if lines else {}


def _table(results: Results) -> str:
    header = ["held-out set", "query → answer", *(f"R@{k} %" for k in RECALL_AT)]
    rows = [
        [words(part), said, *(f"{100 * values[f'{direction}_R@{k}']:.2f}" for k in RECALL_AT)]
        for part, values in results.items()
        for direction, said in DIRECTIONS.items()
        if f"{direction}_R@{RECALL_AT[0]}" in values
    ]
    lines = [header, ["---"] * 2 + ["---:"] * len(RECALL_AT), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _lines(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:  # the last one, where the machine went down
            continue
    return lines


def _json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}
