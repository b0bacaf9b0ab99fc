"""Preparation of a run's data: source, splits and tokenizer, made of the command line's options."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from common.files import read_json, remove, replacing, replacing_folder, write_text
from common.secrets import redacted
from common.sizes import GIB
from data.bad_samples import REASONS, Absent, BadSample
from data.batching.draws import LIMIT
from data.batching.laps import Shards
from data.batching.mixing import apportioned, mixed
from data.batching.mixture import Mixture, open_sources
from data.batching.order import BatchSizes, GlobalOrder, Parts, Together
from data.batching.rows import Rows
from data.batching.stream_order import StreamOrder
from data.index.leaks import count_leaks, describe_leaks, find_leaks
from data.index.roots import with_roots
from data.index.sources import KnownSource, Source, open_source
from data.index.splits import Splits, split_source
from data.modalities.tokenizer import load_tokenizer, refuse_unknown_words, train_tokenizer
from data.options import DataOptions, compared, derived_of, read_pairs
from data.stored.kinds import annotations_of, is_text, stored, text_of
from data.streams.division import MOST_HELD_OUT, divide_shards
from data.streams.filters import Kept
from data.streams.listing import Listing, ShardRules, refuse_lost
from data.streams.opening import is_stream, open_stream_listed
from data.streams.several import kept_samples
from data.streams.source import StreamSource

TRAIN = "train"
SAMPLES_TRIED = 1000  # with a tokenizer that is given
SAMPLES_LOOKED_INTO = 200  # of each data set, for modalities that none of them has
EXAMPLES = 100_000  # training samples of streams that make a tokenizer
STREAM_ORDER = 2  # that runs have which begin now; those of version 0.1 have none, or 1
# options that do not say which samples there are, but how often they come and how many may be bad
NOT_OF_SAMPLES = {
    "data_weights",
    "data_temperature",
    "data_floors",
    "data_adapt",
    "max_bad_fraction",
    "stream_cache",
    "on_bad_shard",
}


@dataclass(frozen=True)
class HeldOut:
    """A named set of samples that training never sees: `subset` [n] of `source`."""

    source: KnownSource
    subset: np.ndarray


@dataclass(frozen=True)
class PreparedData:
    """The training samples `train` [N] of `source`, the held-out sets, and the tokenizer of both
    (None where no pair has texts).

    `parts`: (samples, weight) of each data set in `train`, none where there is one. `leaks`: what
    was found and dropped. `length_multiple`: what texts are padded to. `shards`: of each data set,
    where one is a stream. `seed`: of their order. `notes`: sentences for the first screen.
    """

    source: Source
    train: np.ndarray | Rows
    held_out: dict[str, HeldOut]
    tokenizer: PreTrainedTokenizerBase | None
    parts: Parts = ()
    leaks: Mapping[str, int] = field(default_factory=dict)
    length_multiple: int = 1
    shards: tuple[Shards, ...] = ()
    seed: int = 0
    notes: tuple[str, ...] = ()

    def order(
        self, global_batch_size: int, earlier: BatchSizes = (), film_clips: int = 1
    ) -> GlobalOrder:
        """In which the training samples come. `film_clips`: so many clips of a film stand together.
        Errors: ValueError where these are of streams."""
        sizes = (len(self.train), global_batch_size, self.seed, self.parts, earlier)
        if not self.shards:
            together = Together(self._films(), film_clips) if film_clips > 1 else None
            return GlobalOrder(*sizes, together=together)
        if film_clips > 1:
            raise ValueError(
                "argument --film-clips: the samples of a stream come shard by shard, so its films "
                "are not known beforehand; leave it out, or give data that is no stream"
            )
        return StreamOrder(*sizes, shards=self.shards)

    def _films(self) -> np.ndarray:
        """[N]: equal numbers for training samples that are clips of one film."""
        key = self.known.keys("video")[self.train[:]]
        label = np.unique(key, return_inverse=True)[1].reshape(-1)
        return np.where(key == 0, len(key) + np.arange(len(key)), label)

    @property
    def stream_order(self) -> StreamOrder:
        """As `order`, one sample after the other, of streams."""
        order = self.order(1)
        assert isinstance(order, StreamOrder)
        return order

    @property
    def known(self) -> KnownSource:
        """The source, where no data set is a stream."""
        assert not self.shards
        return cast(KnownSource, self.source)

    def examples(self, most: int = EXAMPLES) -> np.ndarray:
        """Training samples to try things on; of streams those that are needed first."""
        return self.train[self.example_numbers(most)]

    def example_numbers(self, most: int = EXAMPLES) -> np.ndarray:
        """Their numbers among the training samples. Of several data sets each has its share of an
        epoch in them."""
        parts = self.parts or ((len(self.train), 1.0),)
        visits = np.array([count * weight for count, weight in parts])
        wanted = apportioned(visits / max(1.0, visits.sum()), min(most, len(self.train)))
        found: list[np.ndarray] = []
        first = 0
        for number, (count, _) in enumerate(parts):
            near = self._first_needed(number, int(wanted[number])) if self.shards else None
            own = np.arange(count) if near is None else near
            found.append(first + own[: wanted[number]])
            first += count
        return np.concatenate(found)

    def _first_needed(self, number: int, least: int) -> np.ndarray:
        """The samples of the shards of a data set that are needed first, `least` or more where it
        has so many."""
        shards, coming = self.shards[number], self.stream_order.coming(number)
        last = int(np.searchsorted(np.cumsum(shards.counts[coming]), least)) + 1
        near = [
            shards.samples.starts[k] + np.arange(shards.counts[k]) for k in coming[:last].tolist()
        ]
        return np.concatenate(near)

    def first_with(self, *modalities: str) -> int | None:
        """The first training sample that has a value of each of these; None: there is none. Of streams
        the shards that are needed first are looked into, and so are bad values found."""
        if not self.shards:
            train = self.train[:]
            lacking = [self.known.lacking(name)[train] for name in modalities]
            having = np.flatnonzero(~np.logical_or.reduce(lacking))
            return int(train[having[0]]) if len(having) else None
        looked_into = (self.looked_into(number) for number in range(len(self.shards)))
        return next((i for i in chain(*looked_into) if has_all(self.source, i, modalities)), None)

    def looked_into(self, number: int) -> list[int]:
        """Some samples of a data set, where one is a stream: of the shards that are needed first."""
        first = sum(int(each.counts.sum()) for each in self.shards[:number])
        near = first + self._first_needed(number, SAMPLES_LOOKED_INTO)
        return self.train[near[:: 1 + len(near) // SAMPLES_LOOKED_INTO]].tolist()

    @property
    def source_starts(self) -> tuple[int, ...] | None:
        """The first index in `source` of each of several data sets; None: there is one."""
        return self.source.starts if isinstance(self.source, Mixture) else None

    @property
    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, where a pair has texts; else ValueError."""
        if self.tokenizer is None:
            raise ValueError(f"{self.source.spec}: no pair has texts, so there is no tokenizer")
        return self.tokenizer

    def summary(self) -> dict[str, Any]:
        return {
            "source": self.source.spec,
            "samples": len(self.source),
            "bad_samples": count_bad(self.source),
            **({"unused": self.source.unused()} if self.source.unused() else {}),
            "dropped_leaks": dict(self.leaks),
            "train_samples": len(self.train),
            "held_out_samples": {n: len(h.subset) for n, h in self.held_out.items()},
        }


def prepare_data(
    options: DataOptions,
    tokenizer: str | None,
    folder: Path,
    workers: int | None = None,
    progress: bool = False,
    length_multiple: int = 1,
    looks: bool = True,
) -> PreparedData:
    """Open, check, divide and tokenize; what takes long is kept in `folder`, or in the cache, and
    found there the next time.

    Held-out samples come from `val_data` when given, else are `val_fraction` of `data`. `tokenizer`
    is a folder or a Hugging Face id; None trains a WordPiece on the training captions. Where no
    pair has texts there is none. `looks`: whether this process looks if shards of streams are still
    what they were; else it takes what another one found and kept in `folder`. Bad samples are
    listed in `folder`/bad_samples.jsonl. Where processes share `folder`, one goes first and the
    others find what it made. Errors: ValueError, OSError.
    """
    building: dict[str, Any] = {
        "workers": workers,
        "progress": progress,
        "check": options.index_check,
        "max_audio_seconds": options.max_audio_seconds,
        "pairs": options.compared(),
    }
    specs = [with_roots(spec, options.data_root) for spec in options.data]
    validation = None
    if options.val_data is not None:
        validation = open_source(with_roots(options.val_data, options.data_root), **building)
        refuse_too_many_bad(validation, options.max_bad_fraction)
    if any(map(is_stream, specs)):
        opened = _open_streams(specs, options, building, folder, validation, looks)
    else:
        opened = _open_known(specs, options, building, folder, validation)
    empty = empty_pairs(opened, options.pairs) if looks or not opened.shards else []
    if empty and not opened.shards:
        raise ValueError("\n".join(empty))
    return replace(
        opened,
        notes=tuple(empty),
        tokenizer=_tokenizer(options, tokenizer, folder / "tokenizer", opened),
        length_multiple=length_multiple,
    )


def empty_pairs(data: PreparedData, given: str) -> list[str]:
    """Of each pair of `--pairs` of which no training sample has both values, or none that was looked
    at, what is missing and where it would stand. A single pair is that of all usable samples."""
    found, pairs = [], read_pairs(given)
    for pair in pairs if len(pairs) > 1 else ():
        one, other = pair.modalities
        if data.first_with(one, other) is not None:
            continue
        missing = [name for name in (one, other) if data.first_with(name) is None]
        places = "".join(f" ({stored(name).sought})" for name in missing)
        which = "no sample of the shards that come first" if data.shards else "no training sample"
        word = f"{pair.first}:{pair.second}"
        found.append(
            f"{data.source.spec}: {which} has {' and '.join(missing or ('both', one, other))}, which "
            f"--pairs {word} compares{places}; give data that has them, or leave {word} out"
            + ", unless shards that come later have them"
            * bool(data.shards)
        )
    return found


def has_all(source: Source, i: int, modalities: Sequence[str]) -> bool:
    """Whether a sample has a value of each of these that can be read."""
    try:
        return all(
            source.captions(i) if is_text(name) else source.value(name, i) is not None
            for name in modalities
        )
    except (Absent, BadSample):
        return False


def _open_known(
    specs: Sequence[str],
    options: DataOptions,
    building: Mapping[str, Any],
    folder: Path,
    validation: KnownSource | None,
) -> PreparedData:
    """Data sets of which every sample is looked at beforehand."""
    source = open_sources(specs, **building)
    refuse_too_many_bad(source, options.max_bad_fraction)
    splits = _kept_splits(
        folder, options, [source], validation, lambda: _divide(options, source, validation)
    )
    whose = source if validation is None else validation
    held_out = {name: HeldOut(whose, subset) for name, subset in splits.held_out.items()}
    parts: Parts = ()
    if isinstance(source, Mixture):
        parts = _parts(options, source.parts(splits.train, _weights(options)))
    seed = options.seed
    return PreparedData(source, splits.train, held_out, None, parts, splits.leaks, seed=seed)


def _open_streams(
    specs: Sequence[str],
    options: DataOptions,
    building: Mapping[str, Any],
    folder: Path,
    validation: KnownSource | None,
    looks: bool,
) -> PreparedData:
    """Streams, maybe beside data sets that are looked at beforehand: these are trained on whole.
    What is held out are whole shards."""
    if options.limit_samples is not None and len(specs) > 1:
        raise ValueError(
            f"--limit-samples {options.limit_samples}: of several --data with a stream none is cut; "
            "give one --data, or fewer shards"
        )
    if options.leak_bits is not None:
        raise ValueError(
            f"--leak-bits {options.leak_bits}: samples of streams are not compared with held-out "
            "ones; leave it out, or leave known captions out by ?unseen=FILE"
        )
    slides = _stream_order(folder) < STREAM_ORDER
    sources: list[Source] = []
    orders: list[Shards] = []
    rows: list[np.ndarray | int] = []
    held_out: list[str] = []
    kept: list[tuple[Kept | None, int]] = []  # of each of these
    listings: list[tuple[Listing, Path]] = []
    for number, spec in enumerate(specs):
        if not is_stream(spec):
            known = open_source(spec, **building)
            refuse_too_many_bad(known, options.max_bad_fraction)
            sources.append(known)
            usable = known.usable()
            rows.append(usable)
            orders.append(Shards(np.array([len(usable)]), 1, slides))
            continue
        record = folder / "shards" / f"{number}.json"
        whole, mixed_shards, listing = open_stream_listed(
            spec,
            options.compared(),
            None if options.stream_cache is None else int(options.stream_cache * GIB),
            options.max_audio_seconds,
            bool(building["progress"]),
            ShardRules(options.on_bad_shard == "drop", options.max_bad_fraction, record, looks),
        )
        listings.append((listing, record))
        fraction = 0.0 if validation is not None else options.val_fraction
        division = divide_shards(whole.table.counts, fraction, options.limit_samples, options.seed)
        refuse_lost(whole, division.held_out)
        held_out += [whole.table.known_spec(int(n)) for n in division.held_out]
        kept += [(whole.table.kept, int(n)) for n in division.held_out]
        stream = whole.of_shards(division.train, division.counts)
        sources.append(stream)
        rows.append(len(stream))
        orders.append(Shards(division.counts, mixed_shards, slides))
    starts = np.cumsum([0, *map(len, sources)]).tolist()
    train = Rows(list(zip(starts, rows)))
    if validation is None and held_out:
        validation = open_sources(held_out, **building)
        refuse_too_many_bad(validation, options.max_bad_fraction)
    source = sources[0] if len(sources) == 1 else Mixture(sources)

    def divide() -> Splits:
        subset = validation.usable() if validation is not None else np.empty(0, np.int64)
        if validation is not None and kept:
            subset = kept_samples(validation, kept)
        names = ["validation"] if len(subset) else []
        return Splits(np.empty(0, np.int64), dict.fromkeys(names, subset[:MOST_HELD_OUT]))

    splits = _kept_splits(folder, options, sources, validation, divide)
    for listing, record in listings if looks else ():
        listing.write(record)
    held = {
        name: HeldOut(validation, subset)
        for name, subset in splits.held_out.items()
        if validation is not None
    }
    parts: Parts = ()
    if len(orders) > 1:
        counts = [int(each.counts.sum()) for each in orders]
        parts = _parts(options, tuple(zip(counts, _weights(options), strict=True)))
    shards = tuple(orders)
    return PreparedData(source, train, held, None, parts, shards=shards, seed=options.seed)


def _weights(options: DataOptions) -> tuple[float, ...]:
    return options.data_weights or (1.0,) * len(options.data)


def _parts(options: DataOptions, asked: Parts) -> Parts:
    return mixed(asked, options.data_temperature, options.data_floors)


def _kept_splits(
    folder: Path,
    options: DataOptions,
    sources: Sequence[Source],
    validation: KnownSource | None,
    divide: Callable[[], Splits],
) -> Splits:
    """The division that `folder` keeps, else the one that is made and kept there."""
    every = [*sources, *([] if validation is None else [validation])]
    samples, made_of = folder / "samples", _made_of(options, every)
    splits = _read_splits(samples, made_of)
    if splits is None:
        write_bad_samples(folder / "bad_samples.jsonl", every)
        _write_splits(samples, made_of, divide())
        splits = _read_splits(samples, made_of)
        assert splits is not None
    return splits


def _tokenizer(
    options: DataOptions, where: str | None, kept: Path, data: PreparedData
) -> PreTrainedTokenizerBase | None:
    """The tokenizer at `where`, else the one that is kept or trained into the folder `kept`."""
    if text_of(options.branches) is None:
        return None
    if where is None and kept.is_dir():
        return load_tokenizer(str(kept))
    few = data.examples(EXAMPLES if where is None else SAMPLES_TRIED)
    whole = few if data.shards else data.train
    if where is None:
        return train_tokenizer(_texts(options, data.source, whole), kept)
    tokenizer = load_tokenizer(where)
    tried = whole[:: 1 + len(whole) // SAMPLES_TRIED]
    refuse_unknown_words(where, tokenizer, _texts(options, data.source, tried))
    return tokenizer


def _texts(options: DataOptions, source: Source, samples: np.ndarray | Rows) -> Iterator[str]:
    """Captions, and the phrases of annotations, where a pair has them."""
    derived = derived_of(options.pairs)
    kinds = annotations_of((derived.name,)) if derived else []
    have = [source.numbers(kind.count, samples[:]) for kind in kinds]
    for place, i in enumerate(samples[:].tolist()):
        yield from source.captions(i)
        for kind, numbers in zip(kinds, have):
            for each in source.value(kind.name, i) if numbers[place] else ():
                yield from each.phrases


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


# -- bad samples


def count_bad(source: Source) -> dict[str, int]:
    """Bad samples by reason, and those that are used without a value or captions that are bad."""
    broken = Counter(reason for _, _, reason, _ in source.broken_values())
    return dict(Counter(source.bad_counts()) + broken)


def bad_values(source: Source) -> Iterator[tuple[str, str, str, str]]:
    """(identity, where, reason, detail) of all that `count_bad` counts."""
    return chain(source.bad_samples(), source.broken_values())


def refuse_too_many_bad(source: Source, max_bad_fraction: float) -> None:
    """Raises ValueError with the table of reasons when more than this part of the samples is
    bad."""
    counts = Counter(count_bad(source))
    if counts.total() > max_bad_fraction * len(source):
        raise ValueError(
            bad_table(source.spec, counts, len(source), max_bad_fraction, first_bad(source))
        )


def first_bad(source: Source, most: int = 5) -> Iterator[str]:
    for (_, where, reason, detail), _ in zip(bad_values(source), range(most)):
        yield f"    {where}: {reason}: {detail}"


def bad_table(
    spec: str, counts: Counter, total: int, max_bad_fraction: float, examples: Iterator[str]
) -> str:
    number = counts.total()
    rows = [f"    {n:>8,}  {reason:<16} {REASONS[reason]}" for reason, n in counts.most_common()]
    return "\n".join(
        [
            f"{spec}: {number:,} of {total:,} samples cannot be used, {number / total:.1%}, more "
            f"than the {max_bad_fraction:.1%} of --max-bad-fraction; mend them, or raise it:",
            *rows,
            "the first:",
            *examples,
        ]
    )


def write_bad_samples(file: Path, sources: Sequence[Source]) -> None:
    """A line for each: {"data", "id", "where", "reason", "detail"}. No file where there are
    none."""
    if not any(count_bad(source) for source in sources):
        remove(file, file.parent)
        return
    names = ("id", "where", "reason", "detail")
    with replacing(file) as beside, beside.open("w", encoding="utf-8") as lines:
        for source in sources:
            for values in bad_values(source):
                record = {"data": source.spec, **dict(zip(names, values))}
                lines.write(json.dumps(record, ensure_ascii=False) + "\n")


# -- what is kept in the run's folder


def _made_of(options: DataOptions, sources: Sequence[Source]) -> dict[str, Any]:
    """The options and sizes that a division is made by, as JSON gives them back."""
    sizes = [[len(source), _usable(source)] for source in sources]
    return {"options": redacted(json.loads(json.dumps(vars(options)))), "sizes": sizes}


def _usable(source: Source) -> int:
    """Another number where other samples are trained on."""
    if isinstance(source, StreamSource):
        return source.fingerprint()
    return len(cast(KnownSource, source).usable())


def _of_samples(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that a division depends on; of the pairs, their modalities without the weights."""
    asked = {name: value for name, value in options.items() if name not in NOT_OF_SAMPLES}
    return asked | {"pairs": compared(options["pairs"])}


def _read_splits(folder: Path, made_of: Mapping[str, Any]) -> Splits | None:
    """The division that `_write_splits` kept, as arrays that every process maps; None where there
    is none. Raises ValueError for that of other options or data."""
    try:
        record = read_json(folder / "made_of.json")
    except FileNotFoundError:
        return None
    there, asked = _of_samples(record["options"]), _of_samples(made_of["options"])
    changed = [name for name in there | asked if there.get(name) != asked.get(name)]
    if changed:
        raise ValueError(
            f"{folder}: holds other samples than are asked for ({', '.join(changed)} changed: "
            f"there { {name: there.get(name) for name in changed} }); give another --run-dir"
        )
    if record["sizes"] != made_of["sizes"]:
        raise ValueError(
            f"{folder}: made of {record['sizes']} samples (all, usable), but now there are "
            f"{made_of['sizes']}; the data changed under the run: give another --run-dir, or the "
            "data of before"
        )
    names = (TRAIN, *record["held_out"])
    train, *held_out = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in names)
    return Splits(train, dict(zip(record["held_out"], held_out)), record["leaks"])


def _stream_order(folder: Path) -> int:
    """In which the samples of streams come, of a run that began in `folder` or begins there."""
    try:
        return read_json(folder / "samples" / "made_of.json").get("stream_order", 1)
    except FileNotFoundError:
        return STREAM_ORDER


def _write_splits(folder: Path, made_of: Mapping[str, Any], splits: Splits) -> None:
    record = {**made_of, "held_out": list(splits.held_out), "leaks": dict(splits.leaks)}
    record["stream_order"] = STREAM_ORDER
    with replacing_folder(folder) as beside:
        for name, subset in {TRAIN: splits.train, **splits.held_out}.items():
            np.save(beside / f"{name}.npy", subset)
        write_text(beside / "made_of.json", json.dumps(record, ensure_ascii=False))
