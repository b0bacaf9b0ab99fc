"""Which shards a stream has: what a run found when it began, and what is there now.

What was found is kept in the run's folder. When the run goes on, one process looks at each shard
once, and a shard that is gone or has changed is refused, or left out as a whole. The others take
what that one found, so all ranks leave out the same.

S: shards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.files import OWN_LIMIT, make_folder, read_json, write_text
from common.secrets import redact
from data.bad_samples import CODES, REASON_OF_CODE, REASONS
from data.formats.specs import is_remote
from data.streams.bloom import Unseen
from data.streams.counts import counts_of, identities_of, shown_names
from data.streams.filters import Kept, kept_rows, metadata_keys
from data.streams.source import StreamSource
from data.streams.table import ShardTable

COLUMNS: dict[str, type[np.signedinteger]] = {
    "counts": np.int64,
    "marks": np.int64,
    "sizes": np.int64,
    "keys": np.int64,
}
COLUMNS |= {"facts": np.int64, "lost": np.int8}
GONE, CHANGED = CODES["missing-shard"], CODES["changed-shard"]


@dataclass(frozen=True)
class ShardRules:
    """What is done about shards that are not what they should be. `drops`: they are left out, up to
    `max_bad_fraction` of the samples; else they are refused. `record`: the file of what a run
    found. `looks`: whether this process looks at what is there now."""

    drops: bool = False
    max_bad_fraction: float = 0.0
    record: Path | None = None
    looks: bool = True


@dataclass(frozen=True)
class Filter:
    """Which rows are kept, as `kept_rows` has it."""

    where: str | None = None
    unseen: Unseen | None = None
    text: str | None = None
    lines: bool = False

    def __bool__(self) -> bool:
        return self.where is not None or self.unseen is not None


@dataclass(frozen=True)
class Listing:
    """All shards that a spec names. `columns`: [S] each. `counts` and `marks`: samples, and numbers
    of the kept rows, as in `Kept`; `sizes`, `keys`: of the identities; `facts`: as `metadata_keys`,
    of what the kept rows follow from; `lost`: as in `ShardTable`."""

    spec: str
    names: tuple[str, ...]
    columns: Mapping[str, np.ndarray]

    def write(self, file: Path) -> None:
        """Without credentials."""
        record = {name: column.tolist() for name, column in self.columns.items()}
        record |= {"spec": redact(self.spec), "names": shown_names(self.names)}
        make_folder(file.parent)
        write_text(file, json.dumps(record, ensure_ascii=False))

    def table(self, options: str, kept: Kept | None, drops: bool, apart: bool) -> ShardTable:
        """Of the shards that have samples: others would be fetched for nothing."""
        found = {name: column for name, column in self.columns.items() if name != "facts"}
        gone = [
            self.names[n] for n in np.flatnonzero((found["counts"] == 0) & (found["lost"] != 0))
        ]
        table = ShardTable(
            self.names,
            told=found["counts"],
            options=options,
            kept=kept,
            drops=drops,
            apart=apart,
            gone=tuple(shown_names(gone)),
            **found,
        )
        return table.chosen(np.flatnonzero(found["counts"]))


def list_shards(
    spec: str,
    names: Sequence[str],
    asked: Filter,
    folder: Path,
    rules: ShardRules,
    progress: bool = False,
) -> tuple[Listing, Kept | None]:
    """`folder`: where counts and kept rows are cached. Errors: ValueError, OSError
    (FileNotFoundError for a shard that is not there)."""
    before = _read(rules.record, spec, names) if rules.record else None
    if before is not None:
        names = before.names
    if before is not None and not rules.looks:
        columns = dict(before.columns)
    else:
        columns = _looked_at(names, asked, progress, before)
    lost = columns["lost"]
    _judge(spec, names, columns, before, rules)
    kept = None
    if asked:
        facts = np.where(lost, 0, columns["facts"])
        kept = kept_rows(
            names, facts, folder, asked.where, asked.unseen, asked.text, asked.lines, progress
        )
    if before is not None and kept is not None:
        _refuse_other_rows(spec, columns, kept)
    if before is None:
        if kept is None:
            columns["counts"] = counts_of(
                names, columns["sizes"], columns["keys"], folder, progress
            )
        else:
            columns |= {"counts": kept.counts.copy(), "marks": kept.marks.copy()}
    return Listing(spec, tuple(names), columns), kept


def _refuse_other_rows(spec: str, columns: Mapping[str, np.ndarray], kept: Kept) -> None:
    """Errors: ValueError where other rows are kept now of shards that have not changed."""
    now = (kept.counts == columns["counts"]) & (kept.marks == columns["marks"])
    if not (now | (columns["lost"] != 0)).all():
        raise ValueError(
            f"data spec '{redact(spec):.300}': its filter keeps other rows than when the run began; "
            "the data changed under the run: give another --run-dir, or the data of before"
        )


def _looked_at(
    names: Sequence[str], asked: Filter, progress: bool, before: Listing | None
) -> dict[str, np.ndarray]:
    """The columns, after one look at each shard."""
    identities = identities_of(names, progress)
    keys = np.array([each.key for each in identities], np.int64)
    facts = keys
    if asked:
        facts = np.where(keys, metadata_keys(names, keys, progress), 0)
    sizes = np.array([max(0, each.size) for each in identities], np.int64)
    lost = np.where(keys == 0, GONE, 0).astype(np.int8)
    if before is None:
        none = np.zeros(len(names), np.int64)
        given = {"counts": none, "marks": none, "sizes": sizes, "keys": keys, "facts": facts}
        return {**given, "lost": lost}
    changed = (lost == 0) & (before.columns["facts"] != facts)
    return {**before.columns, "lost": np.where(changed, CHANGED, lost).astype(np.int8)}


def _judge(
    spec: str,
    names: Sequence[str],
    columns: Mapping[str, np.ndarray],
    before: Listing | None,
    rules: ShardRules,
) -> None:
    """Refuse shards that are gone or have changed, unless they are left out and few. Errors:
    ValueError, FileNotFoundError."""
    lost = columns["lost"]
    if not lost.any():
        return
    where = np.flatnonzero(lost)
    examples = "; ".join(
        f"{redact(names[n])}: {REASONS[REASON_OF_CODE[int(lost[n])]]}" for n in where[:3]
    )
    more = f"; and {len(where) - 3:,} more" if len(where) > 3 else ""
    said = f"data spec '{redact(spec):.300}': of its {len(names):,} shards {examples}{more}"
    weights = columns["counts"] if before is not None else np.ones(len(names))
    share = weights[where].sum() / max(1, weights.sum())
    kind = FileNotFoundError if (lost[where] == GONE).all() else ValueError
    if not rules.drops:
        raise kind(
            f"{said}. Give them back as they were, or leave them out by --on-bad-shard drop"
            + ("" if before is None else "; a new --run-dir takes all as it is now")
        )
    if share > rules.max_bad_fraction:
        raise kind(
            f"{said}. Left out they are {share:.1%} of the {'samples' if before else 'shards'}, more "
            f"than the {rules.max_bad_fraction:.1%} of --max-bad-fraction; give them back, or raise it"
        )


def refuse_lost(stream: StreamSource, held_out: np.ndarray) -> None:
    """Raise OSError where shards that are held out are not what they were: what is measured would
    be another set. A copy of a remote one is kept for good."""
    table = stream.table
    for shard in held_out.tolist():
        reason = REASON_OF_CODE.get(int(table.lost[shard]))
        if reason == "changed-shard" or (reason and not is_remote(table.names[shard])):
            raise OSError(
                f"{stream.shown[shard]}: {REASONS[reason]}, and its samples are held out; give it "
                "back as it was, or another --run-dir"
            )


def _read(file: Path, spec: str, names: Sequence[str]) -> Listing | None:
    """What a run found, with the addresses of now; None: nothing, or of another spec. Errors:
    ValueError where there are shards now that the run did not find."""
    record: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        record = read_json(file, OWN_LIMIT)
    if record.get("spec") != redact(spec):
        return None
    addresses = dict(zip(shown_names(names), names))
    if more := sorted(addresses.keys() - {*record["names"]}):
        raise ValueError(
            f"data spec '{redact(spec):.300}': names {len(more):,} shards that were not there when the "
            f"run began, such as {more[0]}; the data changed under the run: give another --run-dir, "
            "or the data of before"
        )
    columns = {name: np.array(record[name], kind) for name, kind in COLUMNS.items()}
    return Listing(spec, tuple(addresses.get(name, name) for name in record["names"]), columns)
