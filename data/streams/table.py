"""The shards of a stream: their names and counts, what makes each another one, and what reads them.

S: shards.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from common.secrets import redact
from data.bad_samples import REASONS
from data.formats.parquet import ParquetFormat
from data.formats.rows import Format, Pairs
from data.formats.shards import Shard, short_names
from data.formats.store import Unexpected
from data.formats.webdataset import WebdatasetFormat
from data.streams.filters import Kept

FORMATS: dict[str, Callable[[str, Shard], Format]] = {
    ".tar": WebdatasetFormat,
    ".parquet": ParquetFormat,
}


@dataclass(frozen=True, eq=False)
class ShardTable:
    """The shards of a data set. `counts` [S] int64: samples of each that are used; `told`: all that
    it has as far as is known before it is opened; `sizes`: bytes; `keys`: of their identities.
    `marks`: as in `Kept`. `lost` [S] int8: codes of reasons why a shard is left out (see REASONS),
    0: it is not. `options`: of the format, as in a spec. `kept`: the rows that are samples, which
    `told` counts; None: all. `drops`: whether a shard that has another number of samples than was
    told is left out, or ends the run. `gone`: shards that were not there from the start, which are
    none of these. `apart`: whether texts may be read without the rest of their shards.
    """

    names: tuple[str, ...]
    counts: np.ndarray
    told: np.ndarray
    sizes: np.ndarray
    keys: np.ndarray
    lost: np.ndarray
    marks: np.ndarray
    options: str = ""
    kept: Kept | None = None
    drops: bool = False
    gone: tuple[str, ...] = ()
    apart: bool = True

    def known_spec(self, shard: int) -> str:
        """The spec of a shard by itself, as a data set that is looked at beforehand."""
        kind = {".tar": "webdataset", ".parquet": "parquet"}[ending_of(self.names[shard])]
        return f"{kind}:{self.names[shard]}{self.options}"

    @cached_property
    def short(self) -> list[str]:
        return short_names([redact(name) for name in self.names])

    def chosen(self, shards: np.ndarray) -> ShardTable:
        names = tuple(self.names[shard] for shard in shards.tolist())
        kept = self.kept and self.kept.chosen(shards)
        each = {
            name: getattr(self, name)[shards]
            for name in ("counts", "told", "sizes", "keys", "lost", "marks")
        }
        return replace(self, names=names, kept=kept, **each)

    def entry(self, shard: int) -> str:
        """The name of a shard in the cache, another one for another content."""
        return f"{self.names[shard]}#{self.keys[shard]:x}"

    def missed(self, shard: int, reason: str) -> BadShard:
        """What is wrong with a shard as a whole. `reason`: of REASONS."""
        return BadShard(
            f"{redact(self.names[shard])}: {REASONS[reason]}, and {self.told[shard]:,} of its samples "
            "were to be trained on; give it back as it was, or start again: --on-bad-shard drop "
            "leaves such shards out, and a new --run-dir takes them as they are now"
        )

    @property
    def are_tars(self) -> bool:
        return ending_of(self.names[0]) == ".tar"

    @property
    def captions_are(self) -> str | None:
        """As the option `captions` of tars has it."""
        return self.format(0, Path(self.names[0])).captions

    def total(self, shard: int) -> int:
        """All samples of a shard, also those that are not kept."""
        return int((self.told if self.kept is None else self.kept.totals)[shard])

    def format(self, shard: int, file: Path, pairs: Pairs | None = None) -> Any:
        """What reads the samples of a shard, from a file of it."""
        name = self.names[shard]
        given = Shard(name, str(file), self.short[shard])
        format = FORMATS[ending_of(name)](f"shard{self.options}", given)
        if pairs is not None:
            format.pairs = pairs
        return format


class BadShard(Unexpected):
    """A shard that is not what was announced."""


def ending_of(name: str) -> str:
    return os.path.splitext(name.partition("?")[0])[1].lower()
