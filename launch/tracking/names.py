"""What metrics are called in W&B, TensorBoard, CSV files and Comet.

All of them group charts by the part of a name before its first slash. `metrics.jsonl` keeps its own
keys; this is the one place that says which panel each of them goes to. Plain Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from data.stored.kinds import files_of
from data.stored.record import UNREADABLE
from models.metrics.retrieval import FIGURES

# panel -> keys of a step's line that keep their name in it
PANELS = {
    "loss": "matching_accuracy",
    "data": "epoch epochs left_out_samples duplicate_samples truncated_texts",
    "optimizer": "lr logit_scale_exp logit_bias loss_scale step_applied skipped_steps",
    "clipping": "grad_norm",
    "throughput": "samples_per_s step_s sent_bytes",
    "padding": "text_tokens padded_text_tokens audio_seconds padded_audio_seconds",
    "balance": "captions_per_image kept_patches image_size",
    "stream": "stream_wait_s stream_hits stream_misses stream_bytes",
}
# Key of a step's line -> name. What follows a slash in the key follows in the name:
# `grad_norm/image` is `clipping/grad_norm/image`.
NAMES = {key: f"{panel}/{key}" for panel, keys in PANELS.items() for key in keys.split()} | {
    "loss": "loss/total",
    "contrastive_loss": "loss/contrastive",
    "matching_loss": "loss/matching",
    "clip_coefficient": "clipping/coefficient",
    "clipped_share": "clipping/share",
    "text_tokens_per_s": "throughput/text/tokens_per_s",
    "data_wait_s": "data_wait",
    "peak_memory_bytes": "memory/most_bytes",
    "padding_share": "padding",
}
SCALARS = ("logit_scale_exp", "logit_bias")
BY_RANK = "peak_memory_bytes/"  # of a line, and of few ranks only; `rank_names` has it of all


def step_names(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a step's line by the names of their panels, without `step`. A key that the
    table lacks, such as `idle/<stage>`, is a name already."""
    return {
        _renamed(key): _number(value)
        for key, value in line.items()
        if key != "step" and not key.startswith(BY_RANK)
    }


def _renamed(key: str) -> str:
    first, slash, rest = key.partition("/")
    for scalar in SCALARS:  # `audio_text_logit_scale_exp` is of one of several pairs
        if key.endswith(f"_{scalar}"):
            return f"{NAMES[scalar]}/{key.removesuffix(f'_{scalar}')}"
    if key.startswith(UNREADABLE):  # followed by what the values of a modality are called
        return f"data/{key}"
    for kind in files_of():
        if key == kind.rate:
            return f"throughput/{kind.name}/samples_per_s"
    # the loss of a data set, `loss/<set>`, is a name already
    return key if key.startswith("loss/") else NAMES.get(first, first) + slash + rest


def rank_names(
    memory_bytes: Sequence[float], busy_s: Sequence[float], step_s: float
) -> dict[str, float]:
    """By rank the most bytes that it held so far, and the part of the step in which it computed."""
    names = {f"memory/rank_{rank}_bytes": held for rank, held in enumerate(memory_bytes)}
    if step_s > 0:
        names |= {
            f"utilisation/rank_{rank}": min(1.0, seconds / step_s)
            for rank, seconds in enumerate(busy_s)
        }
    return names


def branch_names(line: Mapping[str, Any]) -> dict[str, float]:
    """`throughput/<branch>/possible_samples_per_s`: what the slowest stage of the branch would do
    if it never waited. From the `busy_s/<stage>` of a step's line; stages are called `image 0`."""
    samples = line["samples_per_s"] * line["step_s"]
    slowest: dict[str, float] = {}
    for key, seconds in line.items():
        if key.startswith("busy_s/"):
            branch = key.removeprefix("busy_s/").rsplit(" ", 1)[0]
            slowest[branch] = max(slowest.get(branch, 0.0), seconds)
    return {
        f"throughput/{branch}/possible_samples_per_s": round(samples / seconds, 2)
        for branch, seconds in slowest.items()
        if seconds > 0
    }


def evaluation_names(held_out: str, values: Mapping[str, float]) -> dict[str, float]:
    """The figures of a held-out set: `retrieval/<set>/image_to_text/R@1` and
    `alignment/<set>/modality_gap`."""
    names = {}
    for key, value in values.items():
        direction, of_queries, figure = key.rpartition("_")
        if of_queries and (figure in FIGURES or figure.startswith("R@")):
            panel = f"retrieval/{held_out}/{direction}/{figure}"
        else:
            panel = f"alignment/{held_out}/{key}"
        names[panel] = _number(value)
    return names


def _number(value: Any) -> float:
    return int(value) if isinstance(value, bool) else value
