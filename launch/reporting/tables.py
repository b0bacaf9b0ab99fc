"""The parts of a report that are words, numbers and pictures: what was trained, how runs differ,
queries, bad samples, the environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from launch.reporting.charts import Table
from launch.reporting.parts import Facts, Gallery, Text, beside, count, duration, words
from launch.reporting.reading import RunData
from launch.tools.drawing import seconds

# of the page, in base64; the queries of further runs are left out, sounds are only drawn
MOST_PICTURE_BYTES, MOST_SOUND_BYTES = 1_600_000, 400_000
Runs = Sequence[RunData]


def summaries(runs: Runs) -> list[Facts]:
    return [Facts(run.label, _summary(run)) for run in runs]


def _summary(run: RunData) -> list[tuple[str, str]]:
    config, options, data = run.config, run.options, run.config.get("data", {})
    steps = run.steps
    held_out = data.get("held_out_samples")
    held_out = held_out if isinstance(held_out, Mapping) else {}
    facts = [
        ("state", run.state),
        ("data", ", ".join(map(str, options.get("data") or [data.get("source")]))),
        ("training samples", count(data.get("train_samples"))),
        ("held-out samples", ", ".join(f"{k} {count(v)}" for k, v in held_out.items())),
    ]
    for branch, tower in config.get("towers", {}).items():
        name, number = tower.get("tower", tower.get("architecture")), tower.get("num_parameters")
        facts.append((f"{branch} tower", f"{name}, {count(number)} parameters"))
    facts += [
        ("loss", f"{options.get('loss')}, pairs {options.get('pairs', 'image:text')}"),
        ("steps", f"{run.last_step:,} of {run.total_steps:,}"),
        ("plan", _plan(config)),
    ]
    if len(steps):
        facts.append(("last loss", f"{float(steps['loss'][-1]):.4g}"))
        middle = float(np.nanmedian(steps["step_s"]))
        facts.append(("median step", seconds(middle)))
        facts.append(
            ("median throughput", f"{float(np.nanmedian(steps['samples_per_s'])):,.1f} samples/s")
        )
        facts.append(("training time", duration(float(np.nansum(steps["step_s"])))))
    return [(name, value) for name, value in facts if value]


def _plan(config: Mapping[str, Any]) -> str:
    stages = " | ".join(
        f"{stage['name']} ×{len(stage['ranks'])}" for stage in config.get("stage_graph", ())
    )
    batches = ", ".join(
        f"{branch} {batch.get('micro_batch_size')} × {batch.get('num_micro_batches')} × {batch.get('replicas')}"
        for branch, batch in config.get("batches", {}).items()
    )
    return f"{config.get('layout')}: {stages}; {config.get('schedule')}; samples × micro-batches × replicas: {batches}"


def notices(runs: Runs) -> list[Text]:
    prefix = [f"{run.label}: " if len(runs) > 1 else "" for run in runs]
    return [Text(f"{own}{notice}") for run, own in zip(runs, prefix) for notice in run.notices]


def differences(runs: Runs) -> list[Table | Text]:
    if len(runs) < 2:
        return []
    flat = [
        {
            **flattened(run.options),
            **flattened(run.config.get("training", {}).get("deepspeed_config", {})),
            **flattened({"branches": run.config.get("training", {}).get("branches", {})}),
            **{
                key: run.config.get(key)
                for key in ("layout", "schedule", "world_size", "git_commit")
            },
            **flattened({"batches": run.config.get("batches", {})}),
            **flattened({"versions": run.config.get("versions", {})}),
        }
        for run in runs
    ]
    keys = dict.fromkeys(key for each in flat for key in each if key not in ("run_dir", "resume"))
    rows = [
        [key, *(words(each.get(key)) for each in flat)]
        for key in keys
        if any(_given(each.get(key)) != _given(flat[0].get(key)) for each in flat)
    ]
    header = ["option", *(run.label for run in runs)]
    if not rows:
        return [Text("All options, versions and plans are the same.")]
    return [Table("Options that differ", header, rows)]


def _given(value: Any) -> Any:
    """null, {} and [] are the same: nothing was given."""
    return None if value in ({}, []) else value


def flattened(record: Any, path: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    if not isinstance(record, Mapping) or not record:
        return {path: record} if path else {}
    found: dict[str, Any] = {}
    for key, value in record.items():
        found |= flattened(value, f"{path}.{key}" if path else str(key))
    return found


def queries(runs: Runs) -> list[Any]:
    parts: list[Any] = []
    pictures = 0
    asked_of = [
        (run, *own) for run in runs for own in (run.queries or {"sets": {}})["sets"].items()
    ]
    for run, name, record in asked_of:
        samples = _heard(record, MOST_SOUND_BYTES // len(asked_of))
        pictures += _size(samples, "picture")
        if pictures > MOST_PICTURE_BYTES:
            parts.append(Text("Further queries are left out, so that the page stays small."))
            break
        rows = [
            _asked(direction, query, samples)
            for direction, asked in record.items()
            if direction != "samples"
            for query in asked
        ]
        step = int(run.queries["step"])
        parts.append(Gallery(f"{beside(run, runs)}{name}, after step {step:,}", rows))
    if not parts:
        return [Text("There is no queries.json: an evaluation writes it.")]
    return parts


def _size(samples: Mapping[str, Any], ending: str) -> int:
    """Characters of what has a key that ends so."""
    return sum(
        len(value)
        for sample in samples.values()
        for key, value in sample.items()
        if key.endswith(ending) and value
    )


def _heard(record: Mapping[str, Any], most: int) -> dict[str, dict[str, Any]]:
    """The samples of a set; of the sounds those that fit into `most` characters, the queries
    first."""
    samples = dict(record.get("samples", {}))
    rows = [row for name, asked in record.items() if name != "samples" for row in asked]
    left = most
    for name in dict.fromkeys([*(row["query"] for row in rows), *samples]):
        size = _size({name: samples.get(name, {})}, "_sound")
        if size > left:
            samples[name] = {k: v for k, v in samples[name].items() if not k.endswith("_sound")}
        else:
            left -= size
    return samples


def _asked(direction: str, query: Mapping[str, Any], samples: Mapping[str, Any]) -> dict[str, Any]:
    asked, _, answered = direction.partition("_to_")
    answers = [
        {
            **_shown(samples.get(answer["sample"], {}), answered),
            "right": answer["right"],
            "similarity": f"{answer['similarity']:.2f}",
        }
        for answer in query["answers"]
    ]
    return {
        "direction": f"{asked} → {answered}",
        **_shown(samples.get(query["query"], {}), asked),
        "answers": answers,
        "found": next((i for i, a in enumerate(answers, 1) if a["right"]), None),
    }


def _shown(sample: Mapping[str, Any], branch: str) -> dict[str, Any]:
    """A text alone, or a picture with its caption; of a short sound what can be heard, too."""
    key = "picture" if branch == "image" else f"{branch}_picture"
    return {
        "text": str(sample.get("text", "")),
        "id": str(sample.get("id", "")),
        "picture": sample.get(key),
        "sound": sample.get(f"{branch}_sound"),
        "has_picture": branch == "image" or key in sample,
        "modality": branch,
    }


def bad(runs: Runs) -> list[Any]:
    parts: list[Any] = []
    for run in runs:
        known = run.config.get("data", {})
        left_out = known.get("bad_samples") or {}
        leaks = known.get("dropped_leaks") or {}
        counts = [["while the index was made", k, words(v)] for k, v in left_out.items()]
        counts += [
            ["no part of a sample", what, f"{number:,}, for example {where}"]
            for what, (number, where) in (known.get("unused") or {}).items()
        ]
        counts += [["held out and trained on", k, words(v)] for k, v in leaks.items()]
        counts += [["while training", k, f"{v:,}"] for k, v in run.bad_reasons.items()]
        if not counts and not run.bad_steps:
            parts.append(
                Text(
                    f"{beside(run, runs)}No sample was bad, and no step was skipped for its samples."
                )
            )
        if counts:
            parts.append(
                Table(f"{beside(run, runs)}Samples left out", ["when", "reason", "samples"], counts)
            )
        if run.bad_samples:
            rows = [
                [words(s.get(k)) for k in ("id", "where", "reason", "detail")]
                for s in run.bad_samples
            ]
            number = sum(run.bad_reasons.values())
            note = (
                f"The first {len(rows)} of {number:,}; all are in bad_samples.jsonl."
                if number > len(rows)
                else ""
            )
            parts.append(
                Table(
                    f"{beside(run, runs)}Bad samples",
                    ["id", "where", "reason", "detail"],
                    rows,
                    note,
                )
            )
        if run.bad_steps:
            rows = [
                [f"{b.get('step')}", words(b.get("loss")), words(b.get("samples", [])[:20])]
                for b in run.bad_steps[:20]
            ]
            parts.append(
                Table(
                    f"{beside(run, runs)}Steps skipped as not finite",
                    ["step", "loss", "first samples"],
                    rows,
                )
            )
    return parts


def environment(runs: Runs) -> list[Any]:
    versions: list[Facts] = []
    all_options: list[Table] = []
    for run in runs:
        config = run.config
        facts = [
            ("folder", str(run.path)),
            ("ranks", words(config.get("world_size"))),
            *((f"{name}", words(v)) for name, v in config.get("versions", {}).items()),
            ("git commit", words(config.get("git_commit"))),
        ]
        versions.append(Facts(f"{run.label}: versions" if len(runs) > 1 else "Versions", facts))
        options = [[k, words(v)] for k, v in flattened(run.options).items()]
        training = config.get("training", {})
        decided = {
            "deepspeed_config": training.get("deepspeed_config", {}),
            "branches": training.get("branches", {}),
        }
        options += [[k, words(v)] for k, v in flattened(decided).items()]
        title = f"{run.label}: all options" if len(runs) > 1 else "All options"
        all_options.append(Table(title, ["option", "value"], options))
    return [*versions, *all_options]
