"""What hosts fetch of a stream of parquet shards: bytes from one store, by host and by shard.

    python bench/hosts.py store          image and text hosts, each with a cache of its own; an epoch
    python bench/hosts.py order          how many hosts read a shard, by the order alone

A host of `store` is the data side of a rank without a model, `tests/data_hosts.py`. The store is a
folder, which an HTTP server for each host shows in the process of this script; a server notes what
it was asked for. Images are random bytes behind the header of a picture. Steps take no time, so
hosts read ahead as far as their caches allow; what they fetch for the time after the last step is
not counted.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
import time
from bisect import bisect
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "tests"))

from data_hosts import SEED, Host, Line, read_lines
from stores import KEYS, Faults, http_server

from bench.common import NO_GPU, Column, Figures, Program, Study, Way, main, unlaunched
from data.batching.laps import Shards
from data.batching.stream_order import StreamOrder
from data.streams.source import INDEX_BYTES

IMAGE_BYTES, TEXT_WORDS, GROUP_ROWS = 20_000, 8, 16
LIMIT_S = 1800
REPLICAS = (2, 3, 8, 9, 12, 16, 32, 64)
SAMPLES = (16, 64, 256)  # of a replica in a global batch
Shard = tuple[int, list[range]]  # its size, and where its images are


class Log(Faults):
    """A server without faults that notes when it was asked, by the machine's clock."""

    def __init__(self) -> None:
        super().__init__()
        self.at_s: list[float] = []

    def asked(self, what: str) -> tuple[str, float]:
        self.at_s.append(time.monotonic())
        return super().asked(what)


def write_store(folder: Path, shards: int, rows: int) -> list[Shard]:
    """The shards, and a tokenizer of their texts."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    from data.modalities.tokenizer import train_tokenizer

    generator, header, found = np.random.default_rng(SEED), io.BytesIO(), []
    Image.new("RGB", (1, 1)).save(header, "PNG")
    words = [f"{a}{b}{c}" for a in "bdfgk" for b in "aeiou" for c in "lmnrst"]
    train_tokenizer(words, folder / "tokenizer", 1000)
    for shard in range(shards):
        texts = generator.choice(words, (rows, TEXT_WORDS)).tolist()
        pictures = (header.getvalue() + generator.bytes(IMAGE_BYTES) for _ in texts)
        table = pa.table({"image": list(pictures), "text": list(map(" ".join, texts))})
        file = folder / "pairs" / f"{shard:05d}.parquet"
        file.parent.mkdir(exist_ok=True)
        # the least and the largest picture would fill the footer; those of a real one are left out
        pq.write_table(table, file, row_group_size=GROUP_ROWS, write_statistics=["text"])
        metadata = pq.read_metadata(file)
        groups = map(metadata.row_group, range(metadata.num_row_groups))
        images = [group.column(metadata.schema.names.index("image")) for group in groups]
        starts = [each.dictionary_page_offset or each.data_page_offset for each in images]
        spans = [range(a, a + each.total_compressed_size) for a, each in zip(starts, images)]
        found.append((file.stat().st_size, spans))
    sizes = {f"{shard:05d}.parquet": rows for shard in range(shards)}
    (folder / "pairs" / "sizes.json").write_text(json.dumps(sizes))
    return found


def run(hosts: Sequence[Host], store: Path) -> list[tuple[Log, list[Line]]]:
    """All at once: what each asked for, and its lines."""
    logs, programs = [Log() for _ in hosts], []
    with ExitStack() as stack:
        for host, log in zip(hosts, logs):
            url = stack.enter_context(http_server(store, log))
            own = KEYS | {"WYE_CACHE": f"{host.out}.cache", "AWS_ENDPOINT_URL": url}
            command = [sys.executable, "tests/data_hosts.py", host.words()]
            program = Program(command, Path(f"{host.out}.log"), unlaunched() | NO_GPU | own)
            stack.callback(program.end, 0)
            programs.append(program)
        for program in programs:
            if program.end(LIMIT_S) != 0:
                sys.exit(f"a host ended early:\n{program.said()[-2000:]}")
    return [(log, read_lines(host.out)) for host, log in zip(hosts, logs)]


def order_of(counts: np.ndarray, mixed: int, global_batch_size: int) -> StreamOrder:
    shards = (Shards(counts, mixed),)
    return StreamOrder(int(counts.sum()), global_batch_size, SEED, shards=shards)


def last_uses(order: StreamOrder, replicas: int, steps: int) -> list[dict[int, int]]:
    """Of each replica the shards that it reads, with the last step that does."""
    found: list[dict[int, int]] = [{} for _ in range(replicas)]
    for step in range(steps):
        for own, part in zip(found, np.array_split(order.batch(step), replicas)):
            own.update(dict.fromkeys(order.needed(part)[0].tolist(), step))
    return found


def fetched(
    log: Log, lines: Sequence[Line], last_use: Mapping[int, int], shards: Sequence[Shard]
) -> np.ndarray:
    """[S, 3] bytes of images, other bytes and requests of each shard, until a host was done with
    the last step that reads it."""
    found, done_s = np.zeros((len(shards), 3), np.int64), [line["at_s"] for line in lines]
    for at_s, what in zip(log.at_s, log.requests):
        method, path, *span = what.split()
        shard = int(Path(path).stem) if path.endswith(".parquet") else -1
        if method == "GET" and bisect(done_s, at_s) <= last_use.get(shard, -1):
            size, spans = shards[shard]
            first, _, last = (span or ["0-"])[0].partition("-")
            start, stop = int(first), int(last) + 1 if last else size
            images = sum(max(0, min(stop, s.stop) - max(start, s.start)) for s in spans)
            found[shard] += images, stop - start - images, 1
    return found


def measure(
    hosts: Mapping[str, int],
    shards: int,
    rows: int,
    mixed: int,
    samples: int,
    kept: int,
    steps: int,
) -> Figures:
    """Figures of image hosts come first, then those of text hosts."""
    order = order_of(np.full(shards, rows), mixed, samples * hosts["image"])
    steps = steps or order.steps_per_epoch
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        store = write_store(place, shards, rows)
        looks = Host(
            spec=f"stream:s3://pairs/{{00000..{shards - 1:05d}}}.parquet?mixed={mixed}",
            global_batch_size=order.global_batch_size,
            cache_bytes=kept * (max(size for size, _ in store) + rows * INDEX_BYTES),
            out=str(place / "looks"),
            tokenizer=str(place / "tokenizer"),
            record=str(place / "record" / "shards.json"),
            limit_s=LIMIT_S,
        )
        run([looks], place)
        begun = [
            replace(looks, looks=False, stop=steps, branch=branch, replica=n, replicas=number)
            for branch, number in hosts.items()
            for n in range(number)
        ]
        begun = [replace(each, out=str(place / f"host{n}")) for n, each in enumerate(begun)]
        seen = run(begun, place)
    # a text host packs whole global batches, so it reads all shards
    uses = last_uses(order, hosts["image"], steps) + last_uses(order, 1, steps) * hosts["text"]
    own = np.stack([fetched(*each, use, store) for each, use in zip(seen, uses)])  # [hosts, S, 3]
    of_images = np.array([sum(map(len, spans)) for _, spans in store])
    whole = np.stack([of_images, [size for size, _ in store] - of_images], 1)  # [S, 2]
    read = sorted(set().union(*uses))
    kinds = [slice(hosts["image"]), slice(hosts["image"], None)]
    times = np.stack([own[kind, read, :2].sum(0) / whole[read] for kind in kinds])  # [2, S, 2]
    used = np.array([max(line["usage"] for line in lines) for _, lines in seen])
    return {
        "step_bytes": [float(own[kind, :, :2].sum((1, 2)).mean()) / steps for kind in kinds],
        "image_times": times[:, :, 0].mean(1).tolist(),
        "image_most": float(times[:, :, 0].sum(0).max()),
        "other_times": times[:, :, 1].mean(1).tolist(),
        "other_most": float(times[:, :, 1].sum(0).max()),
        "by_order": [sum(map(len, uses[kind])) / len(read) for kind in kinds],
        "requests": [float(own[kind, :, 2].sum(1).mean()) for kind in kinds],
        "used": [float(used[kind].max()) / looks.cache_bytes for kind in kinds],
        "counted": sum(lines[-1]["stream_bytes"] for _, lines in seen)
        / sum(log.sent for log, _ in seen),
    }


def store(
    image_hosts: int = 9,
    text_hosts: int = 3,
    shards: int = 2000,
    rows: int = 48,
    mixed: int = 64,
    samples: int = 64,
    kept: int = 128,
    steps: int = 0,
) -> Study:
    """What leaves a store: image hosts fetch their part of the K shards, more at the borders of
    replicas; each text host fetches all shards, with the images. --samples: of an image host in a
    global batch; --kept: shards that a cache has room for; --steps: 0 for an epoch."""
    hosts = {"image": image_hosts, "text": text_hosts}
    way = Way(partial(measure, hosts, shards, rows, mixed, samples, kept, steps))
    return Study(
        "What hosts fetch of a stream",
        {f"{image_hosts} image hosts, {text_hosts} text hosts": way},
        (
            Column("step_bytes", "KB a step and host: image, text", "{:,.1f}", 1e-3),
            Column("image_times", "image bytes of a shard, times: to image, text hosts", "{:.2f}"),
            Column("image_most", "most", "{:.2f}"),
            Column("other_times", "its other bytes, times: to image, text hosts", "{:.2f}"),
            Column("other_most", "most", "{:.2f}"),
            Column("by_order", "hosts that read a shard: image, text", "{:.2f}"),
            Column("requests", "requests a host: image, text", "{:,.0f}"),
            Column("used", "cache, most ÷ bound: image, text", "{:.3f}"),
            Column("counted", "counted by hosts ÷ sent", "{:.4f}"),
        ),
        f"{shards} shards of {rows} pairs, {mixed} mixed, global batches of "
        f"{samples * image_hosts}, room for {kept} shards.",
        rounds=1,
    )


def reads(counts: np.ndarray, mixed: int, samples: int) -> Figures:
    """By number of replicas: pairs of a host and a shard that it reads in an epoch ÷ shards."""
    found = {}
    for replicas in REPLICAS:
        order = order_of(counts, mixed, samples * replicas)
        uses = last_uses(order, replicas, order.steps_per_epoch)
        found[str(replicas)] = sum(map(len, uses)) / len(counts)
    return found


def order(shards: int = 512, rows: int = 500, mixed: int = 64) -> Study:
    """How many hosts read a shard in an epoch: the global batch is cut between replicas, and what
    lies at a cut is read on both sides."""
    unequal = np.random.default_rng(SEED).integers(rows // 2, 3 * rows // 2, shards, endpoint=True)
    return Study(
        "Hosts that read a shard",
        {
            f"{name} shards, {samples} samples": Way(partial(reads, counts, mixed, samples))
            for name, counts in (("equal", np.full(shards, rows)), ("unequal", unequal))
            for samples in SAMPLES
        },
        [Column(str(replicas), f"{replicas} replicas", "{:.2f}") for replicas in REPLICAS],
        f"{shards} shards of {rows} samples, or of {rows // 2} to {3 * rows // 2}; {mixed} mixed; "
        "so many samples of a replica in a global batch.",
        rounds=1,
    )


STUDIES = (store, order)

if __name__ == "__main__":
    main("bench.hosts")
