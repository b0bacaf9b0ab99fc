"""Shards of emoji with their names, as tar and as parquet files."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data.index.sources import open_source


def write_shards(
    folder: Path, counts: Sequence[int], ending: str = ".tar", first: int = 0, sizes: bool = True
) -> str:
    """Shards with so many samples each, and a sizes.json; the pattern that names them. `first`:
    number of the first emoji. No two samples are alike, as long as there are emoji."""
    folder.mkdir(parents=True, exist_ok=True)
    demo = open_source("demo")
    emoji = iter(demo.usable()[first:].tolist() * (1 + sum(counts) // len(demo)))
    for shard, count in enumerate(counts):
        rows = [
            {
                "id": f"{shard:05d}_{n:04d}",
                "image": demo.value("image", i),
                "text": demo.captions(i)[0],
            }
            for n, i in zip(range(count), emoji)
        ]
        file = folder / f"{shard:05d}{ending}"
        write_tar(file, rows) if ending == ".tar" else write_parquet(file, rows)
    if sizes:
        names = {f"{shard:05d}{ending}": count for shard, count in enumerate(counts)}
        (folder / "sizes.json").write_text(json.dumps(names))
    return f"{{00000..{len(counts) - 1:05d}}}{ending}"


def write_tar(file: Path, rows: Sequence[dict]) -> None:
    with tarfile.open(file, "w", format=tarfile.USTAR_FORMAT) as tar:
        for row in rows:
            for name, content in (("png", row["image"]), ("txt", row["text"].encode())):
                member = tarfile.TarInfo(f"{row['id']}.{name}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def write_parquet(file: Path, rows: Sequence[dict]) -> None:
    pq.write_table(pa.Table.from_pylist(list(rows)), file, row_group_size=16)
