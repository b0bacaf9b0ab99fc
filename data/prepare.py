"""Preparation of a run's data: source, splits and tokenizer, made of the command line's options."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from common.files import read_json, remove, replacing, replacing_folder, write_text
from common.secrets import redacted
from data.bad_samples import REASON_OF_CODE, REASONS
from data.batching.draws import LIMIT
from data.batching.mixing import mixed
from data.batching.mixture import Mixture, open_sources
from data.batching.order import Parts
from data.index.leaks import count_leaks, describe_leaks, find_leaks
from data.index.roots import with_roots
from data.index.sources import Source, open_source
from data.index.splits import Splits, split_source
from data.modalities.tokenizer import load_tokenizer, refuse_unknown_words, train_tokenizer
from data.options import DataOptions, compared

TRAIN = "train"
SAMPLES_TRIED = 1000  # with a tokenizer that is given
# options that do not say which samples there are, but how often they come and how many may be bad
NOT_OF_SAMPLES = {
    "data_weights",
    "data_temperature",
    "data_floors",
    "data_adapt",
    "max_bad_fraction",
}


@dataclass(frozen=True)
class HeldOut:
    """A named set of samples that training never sees: `subset` [n] of `source`."""

    source: Source
    subset: np.ndarray


@dataclass(frozen=True)
class PreparedData:
    """The training samples `train` [N] of `source`, the held-out sets, and the tokenizer of both
    (None where no pair has texts).

    `parts`: (samples, weight) of each data set in `train`, none where there is one. `leaks`: what
    was found and dropped. `length_multiple`: what texts are padded to.
    """

    source: Source
    train: np.ndarray
    held_out: dict[str, HeldOut]
    tokenizer: PreTrainedTokenizerBase | None
    parts: Parts = ()
    leaks: Mapping[str, int] = field(default_factory=dict)
    length_multiple: int = 1

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
) -> PreparedData:
    """Open, check, divide and tokenize; what takes long is kept in `folder`, or in the cache, and
    found there the next time.

    Held-out samples come from `val_data` when given, else are `val_fraction` of `data`. `tokenizer`
    is a folder or a Hugging Face id; None trains a WordPiece on the training captions. Where no
    pair has texts there is none. Bad samples are listed in `folder`/bad_samples.jsonl. Where
    processes share `folder`, one goes first and the others find what it made. Errors: ValueError,
    OSError.
    """
    building: dict[str, Any] = {
        "workers": workers,
        "progress": progress,
        "check": options.index_check,
        "max_audio_seconds": options.max_audio_seconds,
        "pairs": options.compared(),
    }
    specs = [with_roots(spec, options.data_root) for spec in options.data]
    sources: list[Source] = [open_sources(specs, **building)]
    if options.val_data is not None:
        sources.append(open_source(with_roots(options.val_data, options.data_root), **building))
    for each in sources:
        refuse_too_many_bad(each, options.max_bad_fraction)
    source, validation = sources[0], sources[1] if options.val_data is not None else None
    samples, made_of = folder / "samples", _made_of(options, sources)
    splits = _read_splits(samples, made_of)
    if splits is None:
        write_bad_samples(folder / "bad_samples.jsonl", sources)
        _write_splits(samples, made_of, _divide(options, source, validation))
        splits = _read_splits(samples, made_of)
        assert splits is not None
    held_out = {name: HeldOut(sources[-1], subset) for name, subset in splits.held_out.items()}
    parts: Parts = ()
    if isinstance(source, Mixture):
        asked = source.parts(splits.train, options.data_weights or (1.0,) * len(options.data))
        parts = mixed(asked, options.data_temperature, options.data_floors)
    return PreparedData(
        source=source,
        train=splits.train,
        held_out=held_out,
        tokenizer=_tokenizer(options, tokenizer, folder / "tokenizer", source, splits.train),
        parts=parts,
        leaks=splits.leaks,
        length_multiple=length_multiple,
    )


def _tokenizer(
    options: DataOptions, where: str | None, kept: Path, source: Source, train: np.ndarray
) -> PreTrainedTokenizerBase | None:
    """The tokenizer at `where`, else the one that is kept or trained into the folder `kept`."""
    if not any("text" in pair for pair in options.compared()):
        return None
    if where is None:
        captions = (text for i in train for text in source.captions(int(i)))
        return load_tokenizer(str(kept)) if kept.is_dir() else train_tokenizer(captions, kept)
    tokenizer = load_tokenizer(where)
    tried = train[:: 1 + len(train) // SAMPLES_TRIED]
    refuse_unknown_words(where, tokenizer, (t for i in tried for t in source.captions(int(i))))
    return tokenizer


def _divide(options: DataOptions, source: Source, validation: Source | None) -> Splits:
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
    return dict(Counter(count_unusable(source)) + broken)


def count_unusable(source: Source) -> dict[str, int]:
    """Samples by the reason for which they are not used."""
    codes, counts = np.unique(source.column("bad"), return_counts=True)
    return {REASON_OF_CODE[int(code)]: int(count) for code, count in zip(codes, counts) if code}


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
    sizes = [[len(source), len(source.usable())] for source in sources]
    return {"options": redacted(json.loads(json.dumps(vars(options)))), "sizes": sizes}


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


def _write_splits(folder: Path, made_of: Mapping[str, Any], splits: Splits) -> None:
    record = {**made_of, "held_out": list(splits.held_out), "leaks": dict(splits.leaks)}
    with replacing_folder(folder) as beside:
        for name, subset in {TRAIN: splits.train, **splits.held_out}.items():
            np.save(beside / f"{name}.npy", subset)
        write_text(beside / "made_of.json", json.dumps(record, ensure_ascii=False))
