"""A host without a model: the data side of one rank, in a process with a cache of its own.

    python tests/data_hosts.py '{"spec": "stream:…", "branch": "image", …}'      fields of `Host`

It opens a stream, asks for the micro-batches of its replica as a rank does, with a prefetcher and
loader processes, and reads the bytes of each, without decoding them. Each step is a line of
`out`. The cache is that of WYE_CACHE.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.batching.batches import Batches, TextPacker
from data.batching.branch_cost import BranchCost
from data.batching.laps import Shards
from data.batching.requests import MicroBatchRequest
from data.batching.rows import Rows
from data.batching.settings import Setting
from data.batching.stream_order import StreamOrder
from data.loader import LoadReport, micro_batches
from data.modalities.tokenizer import load_tokenizer
from data.streams.lengths import of_streams, stream_token_counts
from data.streams.listing import ShardRules
from data.streams.opening import open_stream_listed
from data.streams.prefetch import Prefetcher
from data.streams.several import keep_shards, stream_counts
from data.streams.source import StreamSource

SEED, MAX_TEXT_TOKENS = 0, 32
TEXT_COST = BranchCost(fixed_s=1e-3, per_sample_s=1e-5, per_token_s=1e-6)
Line = dict[str, Any]


@dataclass(frozen=True)
class Host:
    """A replica of the stages that load `branch`, for the steps start..stop-1. `out`: the file that
    gets a line a step. `record`: the file of what a run found of its shards, which the host that
    `looks` writes and the others take; None: each looks. `tokenizer`: a folder, of text hosts.
    `limit_s`: after which the host ends itself."""

    spec: str
    global_batch_size: int
    cache_bytes: int
    out: str
    branch: str = "image"
    replica: int = 0
    replicas: int = 1
    start: int = 0
    stop: int = 0
    tokenizer: str = ""
    num_micro_batches: int = 1
    workers: int = 0
    record: str | None = None
    looks: bool = True
    limit_s: int = 600

    def words(self) -> str:
        return json.dumps(asdict(self))


class Bytes:
    """Micro-batches that are a hash of what their samples are made of."""

    def __init__(self, source: StreamSource, branch: str) -> None:
        self.source, self.branch = source, branch

    def load(self, request: MicroBatchRequest) -> tuple[dict[str, Tensor], LoadReport]:
        assert request.shards is not None
        keep_shards(self.source, request.shards)
        found = blake2b(digest_size=16)
        rows = request.texts() if self.branch == "text" else request
        for i, position in zip(rows.index.tolist(), rows.position.tolist()):
            found.update(f"{position} {i} ".encode() + self._value(i))
        digest = torch.frombuffer(bytearray(found.digest()), dtype=torch.uint8)
        return {"digest": digest}, LoadReport(counts=stream_counts(self.source))

    def _value(self, i: int) -> bytes:
        if self.branch == "text":
            return json.dumps(self.source.captions(i)).encode()
        return self.source.value(self.branch, i)


def opened(host: Host) -> tuple[StreamSource, Batches]:
    """The stream, and the batches of the host's branch."""
    record = None if host.record is None else Path(host.record)
    rules = ShardRules(record=record, looks=host.looks)
    source, mixed, listing = open_stream_listed(
        host.spec, cache_bytes=host.cache_bytes, rules=rules
    )
    if record is not None and host.looks:
        listing.write(record)
    # as launch/feeding.py
    source = source.texts_alone if host.branch == "text" else source.checking_texts
    shards = (Shards(source.table.counts, mixed),)
    order = StreamOrder(len(source), host.global_batch_size, SEED, shards=shards)
    setting = Setting(0, {host.branch: host.num_micro_batches}, TEXT_COST)
    packer = _packer(host, source, order)
    return source, Batches(order, Rows([(0, len(source))]), [setting], texts=packer)


def _packer(host: Host, source: StreamSource, order: StreamOrder) -> TextPacker | None:
    if host.branch != "text":
        return None
    counts = stream_token_counts(
        source,
        Rows([(0, len(source))]),
        order,
        load_tokenizer(host.tokenizer),
        MAX_TEXT_TOKENS,
        Path(host.out).parent,
    )
    return TextPacker(counts, MAX_TEXT_TOKENS, SEED)


def requests_of(host: Host, batches: Batches) -> Iterator[MicroBatchRequest]:
    which = (host.branch, host.replica, host.replicas, host.start, host.stop)
    for request in batches.requests(*which):
        assert isinstance(request, MicroBatchRequest)
        yield request


def steps(host: Host) -> Iterator[Line]:
    """Of each step: `digest` of all that was read, `at_s` by the machine's clock, `usage` of the
    cache in bytes, and what was counted."""
    source, batches = opened(host)
    order, packer = batches.order, batches.texts
    assert isinstance(order, StreamOrder)
    # as launch/feeding.py
    share = None if packer else (host.replica, host.replicas)
    tokens = of_streams(packer.tokens) if packer else {}
    counts: Counter[str] = Counter()
    with Prefetcher(source, order, share, host.start, tokens) as prefetcher:

        def requests() -> Iterator[MicroBatchRequest]:
            for request in requests_of(host, batches):
                prefetcher.at(request.step, order)
                yield request

        made = micro_batches(
            Bytes(source, host.branch),
            requests(),
            host.workers,
            on_load=lambda report: counts.update(report.counts),
        )
        with closing(made):
            for step in range(host.start, host.stop):
                digests = [next(made)["digest"] for _ in range(host.num_micro_batches)]
                counts["stream_bytes"] += prefetcher.taken_bytes()
                yield {
                    "step": step,
                    "digest": b"".join(bytes(each.tolist()) for each in digests).hex(),
                    "at_s": time.monotonic(),
                    "usage": source.cache.usage(),
                    **counts,
                }


def read_lines(file: Path | str) -> list[Line]:
    """Of a host, as far as it has come; a line that is being written is left out."""
    text = Path(file).read_text() if Path(file).exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


if __name__ == "__main__":
    host = Host(**json.loads(sys.argv[1]))
    signal.alarm(host.limit_s)
    with open(host.out, "a", buffering=1) as out:
        for line in steps(host):
            out.write(json.dumps(line) + "\n")
