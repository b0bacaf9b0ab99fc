"""The samples that evaluate.py measures: those that a run held out, or a data set of their own."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace

from data.bad_tables import first_bad
from data.batching.mixture import open_sources
from data.index.roots import with_roots
from data.index.sources import open_source
from data.options import DataOptions
from data.prepare import prepare_data
from data.prepared import HeldOut
from launch.inference.trained import Trained, import_of_data
from launch.terminal.tables import show


def held_out(arguments: argparse.Namespace, trained: Trained) -> dict[str, HeldOut]:
    """The samples to evaluate, by name; at least one set."""
    if arguments.val_data:
        return {"validation": opened(arguments.val_data, trained)}
    if "data" not in trained.options:
        raise ValueError(
            f"{arguments.run_dir}: an exported model has no samples of its own; give some with "
            "--val-data"
        )
    import_of_data(trained.options, arguments.run_dir)
    options = DataOptions.from_record(trained.options)
    if options.val_data:
        spec = with_roots(options.val_data, options.data_root)
        return {"validation": opened(spec, trained, options.max_audio_seconds)}
    try:
        parts = prepare_data(
            options, trained.record["tokenizer"], arguments.run_dir, progress=True
        ).held_out
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{error}\nthe samples that the run held out cannot be had any more; give samples with "
            "--val-data"
        ) from error
    if not parts:
        raise ValueError(
            f"{arguments.run_dir}: no samples were held out (--val-fraction 0), so there is "
            "nothing to evaluate; give samples with --val-data, or train a new run with "
            "--val-fraction 0.1"
        )
    return _with_regions(parts, options, trained) if trained.unlearned_regions else parts


def _with_regions(
    parts: Mapping[str, HeldOut], options: DataOptions, trained: Trained
) -> dict[str, HeldOut]:
    """The same samples of data whose regions are read as well, which the run did not do."""
    specs = [with_roots(spec, options.data_root) for spec in options.data]
    source = open_sources(
        specs, pairs=trained.read, progress=True, max_audio_seconds=options.max_audio_seconds
    )
    for part in parts.values():
        if len(part.source) != len(source):
            raise ValueError(
                f"{source.spec}: has {len(source):,} samples, and had {len(part.source):,} when "
                "the run began; give samples with --val-data"
            )
    return {name: replace(part, source=source) for name, part in parts.items()}


def opened(spec: str, trained: Trained, max_audio_seconds: float | None = None) -> HeldOut:
    """All samples of a data set that have two modalities of the model; says how many cannot be
    used. `max_audio_seconds`: longer sounds are not."""
    source = open_source(spec, trained.read, progress=True, max_audio_seconds=max_audio_seconds)
    part = HeldOut(source, source.usable())
    if left_out(part):
        first = next(first_bad(source)).strip()
        show(
            f"{left_out(part):,} of {len(source):,} samples of {spec} cannot be used and are left "
            f"out; the first: {first}"
        )
    for hint in source.hints():
        show(hint)
    return part


def left_out(part: HeldOut) -> int:
    return sum(part.source.bad_counts().values())
