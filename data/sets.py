"""The data sets of a run, opened and divided into what is trained on and what is held out.

Of a data set that is looked at beforehand samples are held out, of a stream, whose parts are looked
at when they are needed, whole shards. Where one is a stream the others are trained on whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from common.sizes import GIB
from data.bad_tables import refuse_too_many_bad
from data.batching.draws import LIMIT
from data.batching.laps import Shards
from data.batching.mixing import mixed
from data.batching.mixture import Mixture, joined, open_sources
from data.batching.order import Parts
from data.batching.rows import Rows
from data.index.leaks import count_leaks, describe_leaks, find_leaks
from data.index.roots import with_roots
from data.index.sources import KnownSource, Source, open_source
from data.index.splits import Splits, split_source
from data.kept_splits import STREAM_ORDER, kept_splits, stream_order_of
from data.options import DataOptions
from data.prepared import HeldOut, PreparedData
from data.streams.division import MOST_HELD_OUT, divide_shards
from data.streams.filters import Kept
from data.streams.listing import Listing, ShardRules, refuse_lost
from data.streams.opening import is_stream, open_stream_listed
from data.streams.several import kept_samples


@dataclass(frozen=True)
class HeldShard:
    """A shard that is held out. `spec`: of it as a data set by itself; `kept`: what its stream
    keeps of all its shards, of which this one has a number."""

    spec: str
    kept: Kept | None
    number: int


@dataclass(frozen=True)
class OpenedSet:
    """One of --data. `rows`: those of `source` that can be trained on, how many where these are
    all. `shards`: in which they come. `listing`: of a stream, and the file where the run keeps it.
    """

    source: Source
    rows: np.ndarray | int
    shards: Shards
    held_out: tuple[HeldShard, ...] = ()
    listing: tuple[Listing, Path] | None = None

    @property
    def is_stream(self) -> bool:
        return self.listing is not None


def open_sets(
    options: DataOptions, building: Mapping[str, Any], folder: Path, looks: bool
) -> PreparedData:
    """All of --data and --val-data, divided; without a tokenizer. `building`: as in `open_source`;
    the rest: as in `prepare_data`. Errors: ValueError, OSError."""
    specs = [with_roots(spec, options.data_root) for spec in options.data]
    validation: KnownSource | None = None
    if options.val_data is not None:
        validation = open_source(with_roots(options.val_data, options.data_root), **building)
        refuse_too_many_bad(validation, options.max_bad_fraction)
    if any(map(is_stream, specs)):
        _refuse_beside_streams(options)
    slides = stream_order_of(folder) < STREAM_ORDER
    sets: list[OpenedSet] = []
    for number, spec in enumerate(specs):
        if is_stream(spec):
            record = folder / "shards" / f"{number}.json"
            rules = ShardRules(
                options.on_bad_shard == "drop", options.max_bad_fraction, record, looks
            )
            fraction = 0.0 if validation is not None else options.val_fraction
            sets.append(_open_stream(spec, options, building, rules, fraction, slides))
        else:
            known = open_source(spec, **building)
            usable = known.usable()
            sets.append(OpenedSet(known, usable, Shards(np.array([len(usable)]), 1, slides)))
    known_sets = [cast(KnownSource, each.source) for each in sets if not each.is_stream]
    if known_sets:
        refuse_too_many_bad(joined(known_sets), options.max_bad_fraction)
    if len(known_sets) == len(sets):
        return _divided_by_samples(
            options, cast(KnownSource, joined(known_sets)), folder, validation
        )
    prepared = _divided_by_shards(options, sets, folder, validation, building)
    for listing, record in (each.listing for each in sets if each.listing) if looks else ():
        listing.write(record)
    return prepared


def _open_stream(
    spec: str,
    options: DataOptions,
    building: Mapping[str, Any],
    rules: ShardRules,
    val_fraction: float,
    slides: bool,
) -> OpenedSet:
    assert rules.record is not None
    whole, mixed_shards, listing = open_stream_listed(
        spec,
        options.compared(),
        None if options.stream_cache is None else int(options.stream_cache * GIB),
        options.max_audio_seconds,
        bool(building["progress"]),
        rules,
    )
    table = whole.table
    division = divide_shards(table.counts, val_fraction, options.limit_samples, options.seed)
    refuse_lost(whole, division.held_out)
    held_out = tuple(
        HeldShard(table.known_spec(n), table.kept, n) for n in division.held_out.tolist()
    )
    stream = whole.of_shards(division.train, division.counts)
    shards = Shards(division.counts, mixed_shards, slides)
    return OpenedSet(stream, len(stream), shards, held_out, (listing, rules.record))


def _refuse_beside_streams(options: DataOptions) -> None:
    if options.limit_samples is not None and len(options.data) > 1:
        raise ValueError(
            f"--limit-samples {options.limit_samples}: of several --data with a stream none is cut; "
            "give one --data, or fewer shards"
        )
    if options.leak_bits is not None:
        raise ValueError(
            f"--leak-bits {options.leak_bits}: samples of streams are not compared with held-out "
            "ones; leave it out, or leave known captions out by ?unseen=FILE"
        )


def _divided_by_samples(
    options: DataOptions, source: KnownSource, folder: Path, validation: KnownSource | None
) -> PreparedData:
    every = [source, *([] if validation is None else [validation])]
    splits = kept_splits(folder, options, every, lambda: _divide(options, source, validation))
    whose = source if validation is None else validation
    held_out = {name: HeldOut(whose, subset) for name, subset in splits.held_out.items()}
    parts: Parts = ()
    if isinstance(source, Mixture):
        parts = _parts(options, source.parts(splits.train, _weights(options)))
    seed = options.seed
    return PreparedData(source, splits.train, held_out, None, parts, splits.leaks, seed=seed)


def _divided_by_shards(
    options: DataOptions,
    sets: Sequence[OpenedSet],
    folder: Path,
    validation: KnownSource | None,
    building: Mapping[str, Any],
) -> PreparedData:
    held = [shard for each in sets for shard in each.held_out]
    if validation is None and held:
        validation = open_sources([shard.spec for shard in held], **building)
        refuse_too_many_bad(validation, options.max_bad_fraction)

    def divide() -> Splits:
        subset = np.empty(0, np.int64)
        if validation is not None and held:
            subset = kept_samples(validation, [(shard.kept, shard.number) for shard in held])
        elif validation is not None:
            subset = validation.usable()
        names = ["validation"] if len(subset) else []
        return Splits(np.empty(0, np.int64), dict.fromkeys(names, subset[:MOST_HELD_OUT]))

    sources = [each.source for each in sets]
    every = [*sources, *([] if validation is None else [validation])]
    splits = kept_splits(folder, options, every, divide)
    held_out = {
        name: HeldOut(validation, subset)
        for name, subset in splits.held_out.items()
        if validation is not None
    }
    starts = np.cumsum([0, *map(len, sources)]).tolist()
    train = Rows([(start, each.rows) for start, each in zip(starts, sets)])
    shards = tuple(each.shards for each in sets)
    parts: Parts = ()
    if len(shards) > 1:
        counts = [len(each.samples) for each in shards]
        parts = _parts(options, tuple(zip(counts, _weights(options), strict=True)))
    source = joined(sources)
    return PreparedData(source, train, held_out, None, parts, shards=shards, seed=options.seed)


def _weights(options: DataOptions) -> tuple[float, ...]:
    return options.data_weights or (1.0,) * len(options.data)


def _parts(options: DataOptions, asked: Parts) -> Parts:
    return mixed(asked, options.data_temperature, options.data_floors)


def _divide(options: DataOptions, source: KnownSource, validation: KnownSource | None) -> Splits:
    if validation is None:
        splits = split_source(source, options.val_fraction, options.seed, progress=True)
    else:
        train, held_out = source.usable(), validation.usable()
        found = find_leaks(source, train, validation, held_out, options.leak_bits)
        if found and options.on_leak == "refuse":
            raise ValueError(
                f"{describe_leaks(source, validation, validation.spec, found)}\nmeasured on them, "
                "retrieval would look better than it is: remove them, or leave them out with "
                "--on-leak drop"
            )
        for leak in found:
            train = np.setdiff1d(train, leak.train, True)
        splits = Splits(train, {"validation": held_out}, count_leaks(found))
    if options.limit_samples is not None and options.limit_samples < len(splits.train):
        generator = np.random.default_rng([options.seed, LIMIT])
        chosen = generator.choice(splits.train, options.limit_samples, replace=False)
        splits = replace(splits, train=np.sort(chosen))
    return splits
