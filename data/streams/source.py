"""A data set in shards of which few are at hand at a time.

S: shards, N: samples.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from common.files import replacing, write_text
from common.secrets import redact
from data.bad_samples import CODES, REASON_OF_CODE, BadSample
from data.box_checks import FEWEST, refuse_wrong_unit
from data.concat import Concat
from data.formats.rows import DEFAULT_PAIRS, Pairs
from data.formats.specs import is_remote
from data.formats.store import fetch, identity_of
from data.identity import Identity
from data.index.building import load_index
from data.index.mapped import UnusedCounts
from data.index.sources import IndexedSource
from data.keys import HASH_BYTES
from data.stored.kinds import Registered, is_text
from data.streams.cache import Held, ShardCache
from data.streams.metadata import Beside, beside
from data.streams.table import BadShard, ShardTable, ending_of
from data.streams.texts import (
    DAMAGES,
    Texts,
    agrees_at_first,
    opened_texts,
    tar_of_captions,
    unlike_captions,
)

INDEX_BYTES = 1 << 10  # of a sample, at most on average: its row, captions and token counts
TEXTS = "#texts"  # follows the name of a shard in that of an entry that has nothing but these
HELD_UNTOLD = 2  # shards that are held by who reads samples in any order
KEPT_NUMBERS = 256  # columns of shards

# seconds in which a reader waited for shards, shards that were there and that were not when they
# were needed, and bytes that were fetched
COUNTS = ("stream_wait_s", "stream_hits", "stream_misses", "stream_bytes")


class Counts:
    """What is counted, by several threads."""

    def __init__(self) -> None:
        self._lock, self._numbers = threading.Lock(), dict.fromkeys(COUNTS, 0.0)

    def add(self, name: str, number: float) -> None:
        with self._lock:
            self._numbers[name] += number

    def taken(self) -> dict[str, float]:
        """Since the last call."""
        with self._lock:
            numbers, self._numbers = self._numbers, dict.fromkeys(COUNTS, 0.0)
        return numbers


@dataclass
class OpenShard:
    """A shard that is held in the cache, and its samples."""

    held: Held
    source: IndexedSource
    rows: np.ndarray  # of each sample, in `source`; fewer where the shard is damaged
    is_left_out: bool = False  # as a whole: it has another number of samples than was told

    @property
    def folder(self) -> Path:
        """In which what is known of the shard can be kept as long as it is in the cache."""
        return self.held.folder


class StreamSource:
    """The samples of all shards in a row. A shard is fetched into the cache, and listed there, when
    one of its samples is first asked for; so what is bad is found while training, and is left out
    of the loss as an image that breaks under a run is.

    Once `keep` was called, a shard that was opened stays in the cache until `keep` says that it is
    not needed; before that until others are. Pickled it is the table and the cache's folder.

    `only_texts`: of remote shards nothing else is fetched where that goes. Their samples have the
    same numbers, names and captions as those of the whole shards, and no values. `checks_texts`:
    whether the captions of whole tars are compared with what `only_texts` reads.
    """

    def __init__(
        self,
        spec: str,
        table: ShardTable,
        cache: ShardCache,
        pairs: Pairs = DEFAULT_PAIRS,
        max_audio_seconds: float | None = None,
        only_texts: bool = False,
        checks_texts: bool = False,
    ) -> None:
        self.spec = redact(spec)
        self.table, self.cache, self.pairs = table, cache, pairs
        self.max_audio_seconds = max_audio_seconds
        self.only_texts, self.checks_texts = only_texts, checks_texts
        self.samples = Concat(table.counts)  # of all shards in a row
        self._reset()

    def _reset(self) -> None:
        self._open: dict[int, OpenShard] = {}
        self._is_told = False  # by `keep`
        self._numbers: dict[tuple[int, str], np.ndarray] = {}
        self._counts = Counts()
        self._beside: dict[int, Beside | None] = {}
        # None: they cannot be read alone. Where there is no room, it is tried again and again, and
        # nothing is fetched for that
        self._text_sizes: dict[int, int | None] = {}
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        state = {"kinds": Registered(), **self.__dict__}
        for name in ("_open", "_is_told", "_numbers", "_counts", "_beside", "_text_sizes", "_lock"):
            del state[name]
        state.pop("texts_alone", None)  # which is made of the rest
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state.pop("kinds")
        self.__dict__.update(state)
        self._reset()

    # -- samples

    def __len__(self) -> int:
        return len(self.samples)

    def identity(self, i: int) -> str:
        found = self._of(i)
        return self.where(i) if found is None else found[0].identity(found[1])

    def captions(self, i: int) -> list[str]:
        found = self._of(i)
        return [] if found is None else found[0].captions(found[1])

    def language(self, i: int) -> str | int | None:
        found = self._of(i)
        return None if found is None else found[0].language(found[1])

    def value(self, modality: str, i: int) -> Any:
        if found := self._of(i):
            return found[0].value(modality, found[1])
        shard, _ = self._at(i)
        told = f"{self.table.told[shard]:,} samples were announced"
        if code := int(self.table.lost[shard]):
            raise BadSample(REASON_OF_CODE[code], told)
        opened = self._open[shard]
        raise BadSample(
            "miscounted-shard" if opened.is_left_out else "truncated-archive",
            f"it has {len(opened.source):,} samples; {told}",
        )

    def content_hash(self, modality: str, i: int) -> bytes:
        found = self._of(i)
        return bytes(HASH_BYTES) if found is None else found[0].content_hash(modality, found[1])

    def where(self, i: int, modality: str | None = None) -> str:
        if found := self._of(i):
            return found[0].where(found[1], modality)
        shard, row = self._at(i)
        return f"{redact(self.table.names[shard])}#row {row}"

    def numbers(self, name: str, index: np.ndarray) -> np.ndarray:
        """What is known when a shard is read, of `IndexedSource.numbers`; of samples that are not
        there 0."""
        found = None
        for shard, own, rows in self.samples.split(index):
            if self.table.lost[shard]:
                continue
            column = self._column(shard, name)
            if found is None:
                found = np.zeros(len(index), column.dtype)
            there = rows < len(column)
            found[own[there]] = column[rows[there]]
        return np.zeros(len(index)) if found is None else found

    def bad_counts(self) -> dict[str, int]:
        return {}

    def bad_samples(self) -> Iterator[tuple[str, str, str, str]]:
        return iter(())

    def broken_values(self) -> Iterator[tuple[str, str, str, str]]:
        return iter(())

    def unused(self) -> UnusedCounts:
        return {}

    def hints(self) -> list[str]:
        return []

    def _at(self, i: int) -> tuple[int, int]:
        """The shard of a sample, and its number there."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {self.spec}: there are 0..{len(self) - 1}")
        return self.samples.part(i)

    def _of(self, i: int) -> tuple[IndexedSource, int] | None:
        """The samples of its shard, and its row there; None: it is announced, and not there."""
        shard, sample = self._at(i)
        if self.table.lost[shard]:
            return None
        with self._lock:
            source, rows = self.shard(shard), self._open[shard].rows
        return (source, int(rows[sample])) if sample < len(rows) else None

    def _column(self, shard: int, name: str) -> np.ndarray:
        if (shard, name) not in self._numbers:
            while len(self._numbers) >= KEPT_NUMBERS:
                del self._numbers[next(iter(self._numbers))]
            with self.opened(shard) as opened:
                self._numbers[shard, name] = opened.source.column(name)[opened.rows]
        return self._numbers[shard, name]

    # -- shards

    @property
    def shown(self) -> list[str]:
        """The shards' names, without credentials."""
        return [redact(name) for name in self.table.names]

    @property
    def entries(self) -> list[str]:
        """The name in the cache of each shard, without credentials; `TEXTS`, and more, follows it in
        that of its texts."""
        return [redact(self.table.entry(shard)) for shard in range(len(self.table.names))]

    def of_shards(self, shards: np.ndarray, counts: np.ndarray) -> StreamSource:
        """Some of the shards, of each the first `counts` samples."""
        table = replace(self.table.chosen(shards), counts=counts)
        return StreamSource(self.spec, table, self.cache, self.pairs, self.max_audio_seconds)

    @cached_property
    def texts_alone(self) -> StreamSource:
        """The same samples as far as texts go, without the rest of their shards where it need not
        be fetched. Errors: OSError."""
        texts = dict.fromkeys(name for pair in self.pairs for name in pair if is_text(name))
        names = self.table.names
        is_known = self.only_texts or not any(map(is_remote, names))
        if not texts or is_known or not self.table.apart:
            return self
        if self.table.are_tars and not self._has_captions_beside():
            return self
        pairs = tuple((name, name) for name in texts)
        view = StreamSource(self.spec, self.table, self.cache, pairs, only_texts=True)
        view._counts = self._counts
        return view

    @property
    def checking_texts(self) -> StreamSource:
        """The same, where others read `texts_alone` of it."""
        if self.texts_alone is self or not self.table.are_tars:
            return self
        known = (self.spec, self.table, self.cache, self.pairs, self.max_audio_seconds)
        view = StreamSource(*known, checks_texts=True)
        view._counts = self._counts
        return view

    def _has_captions_beside(self) -> bool:
        there = np.flatnonzero(self.table.lost == 0)
        if not len(there) or self.table.captions_are == "classes":
            return False
        first = int(there[0])
        name, is_lines = self.table.names[first], self.table.captions_are == "lines"
        return agrees_at_first(name, self.table.total(first), is_lines)

    def fingerprint(self) -> int:
        """Another number where shards have other names, counts or kept rows."""
        names = "\n".join(map(redact, self.table.names)).encode(errors="backslashreplace")
        kept = b"" if self.table.kept is None else self.table.marks.tobytes()
        return zlib.crc32(names, zlib.crc32(self.table.counts.tobytes() + kept))

    def shard(self, shard: int) -> IndexedSource:
        """The samples of a shard, which is held from now on. Errors: OSError."""
        with self._lock:  # readers of one process are few threads, and need it all
            if shard not in self._open:
                if not self._is_told:
                    self._close([*self._open][: 1 - HELD_UNTOLD])
                began = time.monotonic()
                opened = self._opened(shard)
                assert opened is not None
                self._open[shard] = opened
                self._counts.add("stream_wait_s", time.monotonic() - began)
            return self._open[shard].source

    @contextmanager
    def opened(self, shard: int) -> Iterator[OpenShard]:
        """A shard that is held no longer than before. Errors: OSError."""
        with self._lock:
            known = self._open.get(shard)
        opened = known or self._opened(shard)
        assert opened is not None
        try:
            yield opened
        finally:
            if known is None:
                opened.held.close()

    def prefetch(
        self,
        shard: int,
        next_use: Callable[[str], float],
        then: Callable[[int, OpenShard], Any] | None = None,
        begin: Callable[[], None] = lambda: None,
    ) -> bool:
        """Have a shard in the cache, if there is room for it, and do something with it. `begin`:
        called when there is, before anything is fetched. Errors: OSError."""
        if self.table.lost[shard]:
            return True
        opened = self._opened(shard, needed=False, next_use=next_use, begin=begin)
        if opened is None:
            return False
        try:
            if then is not None:
                then(shard, opened)
        finally:
            opened.held.close()
        return True

    def keep(self, shards: Iterable[int]) -> None:
        """Hold none but these from now on."""
        kept = {*shards}
        with self._lock:
            self._is_told = True
            self._close([each for each in self._open if each not in kept])

    def _close(self, shards: Iterable[int]) -> None:
        for shard in shards:
            self._open.pop(shard).held.close(done=True)

    def taken_counts(self) -> dict[str, float]:
        """What was counted since the last call, see `COUNTS`; by those that were made of each other
        together."""
        return self._counts.taken()

    def held(
        self,
        shard: int,
        needed: bool = True,
        next_use: Callable[[str], float] | None = None,
        begin: Callable[[], None] = lambda: None,
    ) -> tuple[Held, bool] | None:
        """A shard in the cache, and whether it was not there before; None, and the rest: see
        `ShardCache.hold`. `begin`: as in `prefetch`. Errors: OSError; BadShard where it is not what
        the run began with."""
        name, table = self.table.names[shard], self.table
        entry, remote = table.entry(shard), is_remote(name)
        told = self._told_beside(shard) if self.only_texts else None
        if self.only_texts:
            entry += TEXTS if told is None else f"{TEXTS}#{told.stored.key:x}"
        if not remote:
            self._refuse_changed(shard, identity_of)
        if there := self.cache.find(entry):  # the store is not asked
            return there, False
        rest = self.table.total(shard) * INDEX_BYTES

        def hold(size: int, write: Callable[[Path], object] | None) -> tuple[Held, bool] | None:
            filled = False

            def fill(folder: Path) -> None:
                nonlocal filled
                begin()
                filled = True
                if write is not None:
                    write(folder / _file_name(name))

            held = self.cache.hold(entry, size + rest, fill, needed, next_use)
            return None if held is None else (held, filled)

        if not remote:
            return hold(0, None)
        if self.only_texts and (size := self._text_sizes.get(shard, 0)) is not None:
            with suppress(ValueError):  # of what is damaged all is fetched, and read as it is
                if size:
                    return hold(size, partial(self._fetch_texts, shard))
                with self._texts_of(shard) as texts:
                    self._text_sizes[shard] = texts.size
                    return hold(texts.size, texts.write)
            self._text_sizes[shard] = None
        return hold(int(table.sizes[shard]), partial(self._fetch, shard))

    def _told_beside(self, shard: int) -> Beside | None:
        """The parquet file beside a remote tar, for which the store is asked once. Errors:
        OSError."""
        name = self.table.names[shard]
        if not self.table.are_tars or not is_remote(name):
            return None
        if shard not in self._beside:
            self._beside[shard] = beside(name)
        return self._beside[shard]

    def _fetch(self, shard: int, file: Path) -> None:
        check = partial(self._refuse_other, shard)
        fetched = self._refuse_changed(shard, lambda name: fetch(name, file, check=check))
        self._count_bytes(fetched.size)

    def _fetch_texts(self, shard: int, file: Path) -> None:
        with self._texts_of(shard) as texts:
            texts.write(file)

    @contextmanager
    def _texts_of(self, shard: int) -> Iterator[Texts]:
        """Errors, also of writing: as `opened_texts`; BadShard."""
        name, stored = self.table.names[shard], self._refuse_changed(shard, identity_of)
        if self.table.are_tars:
            told = self._told_beside(shard)
            if told is None:
                raise ValueError(f"{redact(name)}: has no parquet file beside it")
            captions = tar_of_captions(name, told, self.table.total(shard), self._count_bytes)
            yield Texts(len(captions), partial(_write, captions))
            return
        known = partial(self.table.format, shard, pairs=self.pairs)
        with opened_texts(name, stored, known, self._count_bytes) as texts:
            yield Texts(texts.size, partial(self._write_texts, shard, texts))

    def _write_texts(self, shard: int, texts: Texts, file: Path) -> None:
        texts.write(file)
        self._refuse_changed(shard, identity_of)  # its parts are all of one file

    def _count_bytes(self, fetched: int) -> None:
        self._counts.add("stream_bytes", fetched)

    def _refuse_changed(self, shard: int, look: Callable[[str], Identity]) -> Identity:
        """What `look` finds under the shard's name. Errors: BadShard, OSError."""
        try:
            found = look(self.table.names[shard])
        except FileNotFoundError as error:
            raise self.table.missed(shard, "missing-shard") from error
        self._refuse_other(shard, found)
        return found

    def _refuse_other(self, shard: int, found: Identity) -> None:
        if found.key != self.table.keys[shard]:
            raise self.table.missed(shard, "changed-shard")

    def _opened(
        self,
        shard: int,
        needed: bool = True,
        next_use: Callable[[str], float] | None = None,
        begin: Callable[[], None] = lambda: None,
    ) -> OpenShard | None:
        name, table = self.table.names[shard], self.table
        found = self.held(shard, needed, next_use, begin)
        if found is None:
            return None
        held, filled = found
        with ExitStack() as undo:
            undo.callback(held.close)
            file = held.folder / _file_name(name) if is_remote(name) else Path(name)
            format = table.format(shard, file, self.pairs)
            is_new = not (held.folder / "index").exists()
            make = partial(
                load_index,
                format,
                folder=held.folder / "index",
                workers=1,
                check="header",
                max_audio_seconds=self.max_audio_seconds,
            )
            # what is listed ahead takes nothing from others
            index = self.cache.write_beside(held, make) if needed else make()
            if is_new:
                self.cache.count_anew(held)
            refuse_wrong_unit(redact(name), index.notes(), FEWEST)
            source = IndexedSource(self.spec, format, index)
            # whoever opens it: what is kept beside it is of these rows
            every = table.kept.rows_of(shard, source) if table.kept else np.arange(len(source))
            is_left_out = self._is_miscounted(shard, source, len(every))
            if self.checks_texts and not is_left_out:  # else nothing is trained on
                self._refuse_unlike_texts(shard, held, source)
            undo.pop_all()
        if needed:
            self._counts.add("stream_misses" if filled else "stream_hits", 1)
        return OpenShard(held, source, every[:0] if is_left_out else every, is_left_out)

    def _refuse_unlike_texts(self, shard: int, held: Held, source: IndexedSource) -> None:
        """Errors: BadShard where what `only_texts` reads of a tar is not what it has."""
        told, name = self._told_beside(shard), self.table.names[shard]
        if told is None:
            return
        compared = held.folder / f"compared-{told.stored.key:x}"
        if compared.exists():
            return
        with suppress(ValueError):  # then who reads texts alone reads this tar, too
            captions = tar_of_captions(name, told, self.table.total(shard), self._count_bytes)
            if unlike := unlike_captions(captions, source, self.table.captions_are == "lines"):
                raise BadShard(
                    f"{redact(name)}: sample {unlike} has another name or other captions in the "
                    "parquet file beside it, which stages of texts read; write that file anew, or "
                    "give ?texts=members, which reads the captions of the tars"
                )
            self.cache.write_beside(held, partial(write_text, compared, ""))

    def _is_miscounted(self, shard: int, source: IndexedSource, number: int) -> bool:
        """Whether it has another number of samples than was told. Of a damaged one some may lack,
        which are bad samples. Every reader finds the same, so all leave it out alike. Errors:
        BadShard."""
        told = int(self.table.told[shard])
        is_damaged = bool(np.isin(source.column("bad"), [CODES[each] for each in DAMAGES]).any())
        if number == told or (is_damaged and number < told):
            return False
        if not self.table.drops:
            raise BadShard(
                f"{redact(self.table.names[shard])}: has {number:,} samples, and {told:,} were told "
                "by sizes.json, NAME_stats.json or NAME.parquet beside it; mend or remove that file "
                "and begin a new --run-dir, or start again with --on-bad-shard drop, which leaves "
                "such shards out"
            )
        return True


def _write(content: bytes, file: Path) -> None:
    with replacing(file) as beside:
        beside.write_bytes(content)


def _file_name(name: str) -> str:
    return f"shard{ending_of(name)}"
