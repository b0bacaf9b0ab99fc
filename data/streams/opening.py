"""Opens a stream by its spec, from the counts of its shards alone."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from common.sizes import sized
from data.formats.classes import RETRIEVAL, TYPE_FILE, type_beside
from data.formats.parquet import LABEL, columns
from data.formats.prompts import OPTIONS as CLASS_OPTIONS
from data.formats.rows import DEFAULT_PAIRS, Pairs
from data.formats.shards import expand
from data.formats.specs import cache_folder, is_remote, local_path, split_options
from data.formats.tables import READING
from data.index.sources import refuse_hidden
from data.streams.bloom import CAPTION, Unseen, open_unseen
from data.streams.cache import ShardCache
from data.streams.listing import Filter, Listing, ShardRules, list_shards
from data.streams.source import StreamSource
from data.streams.table import FORMATS, ShardTable, ending_of

USAGE = "stream:PATTERN, for example stream:s3://bucket/{00000..01242}.tar"
MIXED = 64  # shards
MEMBERS = "members"
SPARE = 2  # that come while as many leave
OPTIONS = ("mixed", "where", "unseen", "unseen_by", "split", "texts")
PLAIN = "/:{} ,.'()+@~"  # what stands as it is in the value of an option
DISK_SHARE = 0.5  # of what is free, where no limit is given


def of_shards_known() -> tuple[str, ...]:
    """What the format of a shard may be told."""
    return (*columns(), LABEL, *READING, *CLASS_OPTIONS)


def is_stream(spec: str) -> bool:
    return spec.startswith("stream:")


def open_stream(spec: str, *arguments: Any, **named: Any) -> tuple[StreamSource, int]:
    """As `open_stream_listed`, without the listing."""
    return open_stream_listed(spec, *arguments, **named)[:2]


def open_stream_listed(
    spec: str,
    pairs: Pairs = DEFAULT_PAIRS,
    cache_bytes: int | None = None,
    max_audio_seconds: float | None = None,
    progress: bool = False,
    rules: ShardRules = ShardRules(),
) -> tuple[StreamSource, int, Listing]:
    """`stream:PATTERN[?mixed=K&image=COLUMN&…]` -> its samples, how many shards are mixed, and
    all shards that it names.
    `cache_bytes`: limit of the shards that are kept on this machine; None: half of what is free
    there. Errors: ValueError, OSError."""
    names, options = named_shards(spec)
    options = _with_marked_captions(spec, names, options)
    of_shards = {key: value for key, value in options.items() if key in of_shards_known()}
    folder = cache_folder() / "streams"
    asked = Filter(
        options.get("where"),
        _unseen(spec, options),
        options.get("text"),
        options.get("captions") == "lines",
    )
    listing, kept = list_shards(spec, names, asked, folder / "counts", rules, progress)
    if not listing.columns["counts"].any():
        raise ValueError(f"data spec '{spec:.1000}': its {len(names)} shards hold no sample")
    table = listing.table(_written(of_shards), kept, rules.drops, _texts_apart(spec, options))
    cache = ShardCache(folder / "shards", cache_bytes or _share_of_disk(folder))
    mixed = _mixed(spec, options)
    _refuse_small_cache(spec, table, cache, min(mixed, len(table.names)))
    return StreamSource(spec, table, cache, pairs, max_audio_seconds), mixed, listing


def named_shards(spec: str) -> tuple[list[str], dict[str, str]]:
    """The shards of a stream, which need not be there, and its options. Errors: ValueError,
    OSError."""
    refuse_hidden(spec)
    where = spec.partition(":")[2]
    pattern, options, _ = split_options("stream", where, (*OPTIONS, *of_shards_known()))
    names = expand("stream", pattern, USAGE, must_exist=False, split=options.get("split"))
    endings = sorted({ending_of(name) for name in names})
    if len(endings) != 1 or endings[0] not in FORMATS:
        raise ValueError(
            f"data spec '{spec:.1000}': its shards end in {', '.join(endings) or 'nothing'}; a "
            f"stream has shards that all end in one of {', '.join(FORMATS)}"
        )
    if options.keys() & {*columns(), LABEL} and endings[0] != ".parquet":
        raise ValueError(f"data spec '{spec:.1000}': only .parquet has columns; leave them out")
    return names, options


def _with_marked_captions(
    spec: str, names: Sequence[str], options: dict[str, str]
) -> dict[str, str]:
    """With captions=lines where the shards' own mark says it, and no option says how captions are
    made. Errors: ValueError where not all shards are of one kind."""
    if "captions" in options or ending_of(names[0]) != ".tar":
        return options
    folders = {name.rpartition("/")[0]: name for name in names if not is_remote(name)}
    marked = {folder: type_beside(name) == RETRIEVAL for folder, name in folders.items()}
    if not any(marked.values()):
        return options
    if not all(marked.values()) or any(map(is_remote, names)):
        first = next(folder for folder, is_marked in marked.items() if is_marked)
        raise ValueError(
            f"data spec '{spec:.1000}': {first} has a caption a line, by its {TYPE_FILE}, and others of "
            "its shards do not say so; give captions=lines for all, or a --data for each"
        )
    return {**options, "captions": "lines"}


def _unseen(spec: str, options: dict[str, str]) -> Unseen | None:
    if "unseen" in options:
        return open_unseen(Path(local_path(options["unseen"])), options.get("unseen_by", CAPTION))
    if "unseen_by" in options:
        raise ValueError(f"data spec '{spec:.1000}': unseen_by needs &unseen=FILE; give both")
    return None


def _texts_apart(spec: str, options: dict[str, str]) -> bool:
    if options.get("texts", MEMBERS) != MEMBERS:
        raise ValueError(
            f"data spec '{spec:.1000}': texts={options['texts']}; texts={MEMBERS} reads the captions "
            "of tars from their members, and not from parquet files beside them"
        )
    return "texts" not in options


def _mixed(spec: str, options: dict[str, str]) -> int:
    given = options.get("mixed", str(MIXED))
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(
            f"data spec '{spec:.1000}': mixed={given}; a whole number of shards from 1 on is needed"
        )
    return int(given)


def _written(options: dict[str, str]) -> str:
    words = "&".join(f"{key}={quote(value, safe=PLAIN)}" for key, value in options.items())
    return f"?{words}" if words else ""


def _share_of_disk(folder: Path) -> int:
    there = next(each for each in (folder, *folder.parents) if each.exists())
    own = ShardCache(folder / "shards", 1).usage()
    return int((shutil.disk_usage(there).free + own) * DISK_SHARE)


def _refuse_small_cache(spec: str, table: ShardTable, cache: ShardCache, mixed: int) -> None:
    """Raise ValueError where the shards that are needed at a time do not fit."""
    remote = [n for n, name in enumerate(table.names) if is_remote(name)]
    if not remote:
        return
    size = int(table.sizes[remote].mean())
    if (mixed + SPARE) * size > cache.limit_bytes:
        most = max(1, cache.limit_bytes // size - SPARE)
        raise ValueError(
            f"data spec '{spec:.1000}': {mixed} shards of {sized(size)} are mixed, and the "
            f"cache of this machine has {sized(cache.limit_bytes)} for them; give a larger "
            f"--stream-cache, WYE_CACHE on another disk, or mix fewer: ?mixed={most}"
        )
