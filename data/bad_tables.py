"""Bad samples of data sets: counted, listed, and refused where they are too many."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from common.files import remove, replacing
from data.bad_samples import REASONS
from data.index.sources import Source


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
