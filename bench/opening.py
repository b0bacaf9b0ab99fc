"""What a stream of 100 million samples costs a process before its first step.

    python bench/opening.py                     10,000 shards; writes bench/out/opening.md
    python bench/opening.py --latency-ms 50     of a store further away

The store is a web server in a process of its own: one parquet file under as many names as it is
asked for, each with an etag of its own. Timed is what a rank does: a look at each shard, counts,
what is held out, the order and how well it mixes; then, with a pickled copy as a prefetcher has it,
the first shard of a random step. Not timed: imports, and what reads shards.
"""

from __future__ import annotations

import asyncio
import atexit
import io
import json
import os
import pickle
import re
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import MIB, Column, Figures, Program, Study, Way, alone, main, resident_bytes

ROWS, GLOBAL_BATCH, STEP = 10_000, 8192, 123_456
COLUMNS = (
    *(Column(key, f"{key}, s", "{:.2f}") for key in ("opened", "at a random step")),
    Column("requests", "requests", "{:,.0f}"),
    *(Column(key, f"{key}, MiB", "{:.1f}", 1 / MIB) for key in ("growth", "imports", "pickled")),
)
SERVER = "import sys, bench.opening as b; b.asyncio.run(b.serve(*map(int, sys.argv[1:])))"


def opening(shards: int = 10_000, latency_ms: int = 20) -> Study:
    """Opened within 10 s and 300 MB; a random step is asked for within 5 s of going on."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    log = Path(folder.name) / "port"
    server = Program([sys.executable, "-c", SERVER, shards, latency_ms], log)
    atexit.register(server.end, 0)
    while not server.said().endswith("\n"):
        time.sleep(0.1)
    store = f"http://127.0.0.1:{int(server.said())}"
    ways = ("begin", "begin without sizes.json", "go on", "go on as another rank")
    return Study(
        f"Opening {shards * ROWS:,} samples in {shards:,} shards",
        {way: Way(partial(alone, measure, store, folder.name, shards, way)) for way in ways},
        COLUMNS,
        f"The store waits {latency_ms} ms before each answer. Global batch {GLOBAL_BATCH:,}.",
    )


STUDIES = (opening,)


def measure(store: str, folder: str, shards: int, way: str) -> Figures:
    os.environ["WYE_CACHE"] = tempfile.mkdtemp(dir=folder)
    import data.loader  # noqa: F401  torch
    from bench.memory_probe import ProcessGrowth
    from data.batching.laps import Shards
    from data.batching.stream_order import StreamOrder
    from data.streams.division import divide_shards
    from data.streams.listing import ShardRules
    from data.streams.opening import open_stream_listed
    from data.streams.prefetch import _Following

    where = f"{store}/{'alone' if 'without' in way else 'told'}"
    record = Path(folder) / "record.json" if "go on" in way else None
    requests = int(urlopen(f"{store}/asked").read())
    imports, growth, start = resident_bytes(field="VmRSS"), ProcessGrowth(), time.perf_counter()
    spec = f"stream:{where}/{{00000..{shards - 1:05d}}}.parquet"
    rules = ShardRules(record=record, looks="another" not in way)
    whole, mixed, listing = open_stream_listed(spec, rules=rules)
    division = divide_shards(whole.table.counts, 0.05, None, 0)
    stream = whole.of_shards(division.train, division.counts)
    order = StreamOrder(len(stream), GLOBAL_BATCH, 0, shards=(Shards(division.counts, mixed),))
    order.mixing()
    opened, pickled = time.perf_counter(), pickle.dumps((stream, order))
    next(_Following(None, None, *pickle.loads(pickled), None, STEP, {}).coming())  # type: ignore
    done, grown = time.perf_counter(), growth.peak_bytes()
    if way == "begin":
        listing.write(Path(folder) / "record.json")
    requests = int(urlopen(f"{store}/asked").read()) - requests - 1
    found = {"opened": opened - start, "at a random step": done - start, "requests": requests}
    return found | {"growth": grown, "imports": imports, "pickled": len(pickled)}


async def serve(shards: int, latency_ms: int) -> None:
    """Until it is killed. /asked tells how often it was asked."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": [f"of row {n}" for n in range(ROWS)]}), file := io.BytesIO())
    sizes = json.dumps({f"{n:05d}.parquet": ROWS for n in range(shards)}).encode()
    asked = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            verb, path, _ = head.split(maxsplit=2)
            asked += 1
            await asyncio.sleep(latency_ms / 1e3)
            told = {"/told/sizes.json": sizes, "/asked": str(asked).encode()}
            body = file.getvalue() if path.endswith(".parquet") else told.get(path, b"")
            status, span = 200 if body else 404, re.search(r"range: bytes=(\d+)-(\d+)", head)
            lines = ["Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT", f'ETag: "{path}"']
            if span:
                lines.append(f"Content-Range: bytes {span[1]}-{span[2]}/{len(body)}")
                status, body = 206, body[int(span[1]) : int(span[2]) + 1]
            lines = [f"HTTP/1.1 {status} .", *lines, f"Content-Length: {len(body)}", "", ""]
            writer.write("\r\n".join(lines).encode() + body * (verb == "get"))

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    main("bench.opening")
