"""The parts of a report that are words, numbers and pictures: what was trained, how runs differ,
queries with their answers, bad samples, the environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from launch.records import flat
from launch.reporting.parts import Facts, Gallery, words
from launch.reporting.reading import RunData
from launch.run.queries import read_queries
from launch.terminal.tables import Table, duration

# of the page, in base64; further queries are left out, further sounds are only drawn
MOST_PICTURE_BYTES, MOST_SOUND_BYTES = 1_600_000, 400_000
MOST_STEPS = 20  # bad steps that are listed
NO_OPTIONS = ("run_dir", "resume")  # differ between any two runs


def summary(run: RunData) -> Facts:
    """What was trained on what, and how far it is."""
    config, steps = run.config, run.steps
    options, data = config.get("options", {}), config.get("data", {})
    held_out = data.get("held_out_samples") or {}
    stages = [f"{stage['name']} ×{len(stage['ranks'])}" for stage in config.get("stage_graph", ())]
    batches = [
        f"{branch} {batch['micro_batch_size']} × {batch['num_micro_batches']} × {batch['replicas']}"
        for branch, batch in config.get("batches", {}).items()
    ]
    facts = {
        "state": run.state,
        "data": ", ".join(map(str, options.get("data") or [data.get("source")])),
        "training samples": f"{data.get('train_samples', 0):,}",
        "held-out samples": ", ".join(f"{name} {number:,}" for name, number in held_out.items()),
    }
    for branch, tower in config.get("towers", {}).items():
        name = tower.get("tower", tower.get("architecture"))
        facts[f"{branch} tower"] = f"{name}, {tower['num_parameters']:,} parameters"
    facts |= {
        "loss": f"{options.get('loss')}, pairs {options.get('pairs')}",
        "steps": f"{run.last_step:,} of {config.get('total_steps', 0):,}",
        "plan": f"{config.get('layout')}: {' | '.join(stages)}; {config.get('schedule')}; "
        f"samples × micro-batches × replicas: {', '.join(batches)}",
    }
    if steps:
        step_s, per_s = steps["step_s"], steps["samples_per_s"]
        facts |= {
            "last loss": f"{float(steps['loss'][-1]):.4g}",
            "median step": duration(float(np.nanmedian(step_s))),
            "median throughput": f"{float(np.nanmedian(per_s)):,.1f} samples/s",
            "training time": duration(float(np.nansum(step_s))),
        }
    return Facts(run.label, [(name, value) for name, value in facts.items() if value])


def differences(runs: Sequence[RunData]) -> list[Table | str]:
    """What was asked for and decided in another way in another run."""
    if len(runs) < 2:
        return []
    flat = [_all_options(run) for run in runs]
    keys = dict.fromkeys(key for each in flat for key in each if key not in NO_OPTIONS)
    differing = []
    for key in keys:
        # null, {} and [] are the same: nothing was given
        values = [None if each.get(key) in ({}, []) else each.get(key) for each in flat]
        if any(value != values[0] for value in values):
            differing.append([key, *map(words, values)])
    if not differing:
        return ["All options, versions and plans are the same."]
    return [Table("Options that differ", ["option", *(run.label for run in runs)], differing)]


def environment(run: RunData) -> list[Facts | Table]:
    config = run.config
    facts = {"folder": str(run.path), "ranks": config.get("world_size")}
    facts |= {**config.get("versions", {}), "git commit": config.get("git_commit")}
    options = [[key, words(value)] for key, value in _all_options(run).items()]
    return [
        Facts("Versions", [(name, words(value)) for name, value in facts.items()]),
        Table("All options", ["option", "value"], options),
    ]


def queries(run: RunData, share: float) -> list[Any]:
    """Of each held-out set what was found for some of its samples. `share`: of the bytes that
    pictures and sounds of the page may take."""
    if (found := read_queries(run.path)) is None:
        return ["There is no queries.json: an evaluation writes it."]
    parts: list[Any] = []
    picture_bytes = 0
    sets = found["sets"]
    for name, record in sets.items():
        samples = _heard(record, share * MOST_SOUND_BYTES / len(sets))
        picture_bytes += sum(_size(sample, "picture") for sample in samples.values())
        if picture_bytes > share * MOST_PICTURE_BYTES:
            parts.append("Further queries are left out, so that the page stays small.")
            break
        asked = {
            direction.replace("_to_", " → "): (*direction.split("_to_"), rows)
            for direction, rows in record.items()
            if direction != "samples"
        }
        parts.append(Gallery(f"{name}, after step {found['step']:,}", asked, samples))
    return parts


def bad(run: RunData) -> list[Table | str]:
    """What was left out of the data, and which steps were skipped."""
    known = run.config.get("data", {})
    kinds = {
        "while the index was made": known.get("bad_samples") or {},
        "also there, and not read": {
            what: f"{number:,}, for example {where}"
            for what, (number, where) in (known.get("unused") or {}).items()
        },
        "held out and trained on": known.get("dropped_leaks") or {},
        "while training": {reason: f"{n:,}" for reason, n in run.bad_reasons.items()},
    }
    counts = [[when, what, words(n)] for when, own in kinds.items() for what, n in own.items()]
    number = run.bad_reasons.total()
    note = f"The first {len(run.bad_samples)} of {number:,}; all are in bad_samples.jsonl."
    columns = ["id", "where", "reason", "detail"]
    samples = [[words(sample.get(key)) for key in columns] for sample in run.bad_samples]
    steps = [
        [words(each.get("step")), words(each.get("loss")), words(each.get("samples", [])[:20])]
        for each in run.bad_steps[:MOST_STEPS]
    ]
    tables = [
        Table("Samples left out", ["when", "reason", "samples"], counts),
        Table("Bad samples", columns, samples, note if number > len(samples) else ""),
        Table("Steps skipped as not finite", ["step", "loss", "first samples"], steps),
    ]
    found: list[Table | str] = [table for table in tables if table.rows]
    return found or ["No sample was bad, and no step was skipped for its samples."]


def _all_options(run: RunData) -> dict[str, Any]:
    """Everything that was given and decided, as {"optimizer.params.lr": value}."""
    config = run.config
    training = config.get("training", {})
    plan = {key: config.get(key) for key in ("layout", "schedule", "world_size", "git_commit")}
    named = {key: config.get(key, {}) for key in ("batches", "versions")}
    named["branches"] = training.get("branches", {})
    return flat(
        {**config.get("options", {}), **training.get("deepspeed_config", {}), **plan, **named}
    )


def _size(sample: Mapping[str, Any], ending: str) -> int:
    """Characters of what has a key that ends so."""
    return sum(len(value or "") for key, value in sample.items() if key.endswith(ending))


def _heard(record: Mapping[str, Any], most: float) -> dict[str, dict[str, Any]]:
    """The samples of a set; of the sounds those that fit into `most` characters, the queries
    first."""
    samples = dict(record["samples"])
    asked = [row["query"] for name, rows in record.items() if name != "samples" for row in rows]
    left = most
    for name in dict.fromkeys([*asked, *samples]):
        if (size := _size(samples[name], "_sound")) <= left:
            left -= size
        else:
            samples[name] = {k: v for k, v in samples[name].items() if not k.endswith("_sound")}
    return samples
