"""An index of any size within seconds, with rows made up by numpy: to measure what opening and
reading cost. N: rows."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from data.formats.jsonl import JsonlFormat
from data.index.building import publish
from data.index.mapped import HASH_BYTES, NUMBERS, SCHEMA, fingerprint_of, index_folder

DIGITS = 9
CAPTIONS = [f"picture number {n} of a thing that has a colour and a place" for n in range(1000)]
ROWS_AT_ONCE = 1 << 20


def write_large_index(folder: Path, rows: int) -> str:
    """Writes an index of `rows` rows to `folder`/index; returns the spec under which
    `open_source(spec, folder=...)` finds it.

    Row i has the id and the name i in nine digits, and the caption `CAPTIONS[i % 1000]`; every
    thousandth is bad (missing-file).
    """
    file = folder / "large.jsonl"
    file.write_text("{}\n")
    format = JsonlFormat(str(file))
    target = index_folder(format, folder=folder / "index")
    (target / "build").mkdir(parents=True)
    written = target / "build" / "index.arrow"
    # One record batch is what the index is; its columns are made in pieces, and joined.
    pieces = [
        _columns(start, min(ROWS_AT_ONCE, rows - start)) for start in range(0, rows, ROWS_AT_ONCE)
    ]
    batch = pa.record_batch(
        [pa.concat_arrays([piece[field.name] for piece in pieces]) for field in SCHEMA],
        schema=SCHEMA,
    )
    del pieces
    with pa.OSFile(str(written), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        writer.write_batch(batch)
    publish(target, written, format.spec, "decode", fingerprint_of(format), [str(file)], {})
    return f"jsonl:{file}"


def _columns(start: int, rows: int) -> dict[str, pa.Array]:
    number = np.arange(start, start + rows, dtype=np.int64)
    names = _texts(number)
    bad = number % 1000 == 999
    values = {name: np.zeros(rows, kind) for name, kind in NUMBERS.items()}
    captions = pa.array(CAPTIONS, pa.large_string()).take(pa.array(number % len(CAPTIONS)))
    values |= {
        "row": number + 1,
        "size": np.full(rows, 50_000),
        "num_captions": np.ones(rows, np.int16),
        "num_characters": np.array([len(text) for text in CAPTIONS], np.int32)[
            number % len(CAPTIONS)
        ],
        "width": np.full(rows, 640, np.int32),
        "height": np.full(rows, 480, np.int32),
        "complexity": (number % 97 / 97).astype(np.float32),
        "perceptual_hash": number.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15),
        "bad": bad.astype(np.int8),
    }
    columns = {name: pa.array(value, SCHEMA.field(name).type) for name, value in values.items()}
    hashes = np.repeat(number[:, None].astype("<u8"), HASH_BYTES // 8, axis=1)  # [N, 2]
    return columns | {
        "id": names,
        "path": names,
        "detail": pa.array(["", "made up"], pa.large_string()).take(pa.array(bad.astype(np.int8))),
        "captions": pa.LargeListArray.from_arrays(pa.array(np.arange(rows + 1)), captions),
        "content_hash": pa.Array.from_buffers(
            pa.binary(HASH_BYTES), rows, [None, pa.py_buffer(hashes)]
        ),
    }


def _texts(number: np.ndarray) -> pa.Array:
    digits = (number[:, None] // 10 ** np.arange(DIGITS - 1, -1, -1)) % 10  # [N, 9]
    content = (digits + ord("0")).astype(np.uint8)
    offsets = np.arange(len(number) + 1, dtype=np.int64) * DIGITS
    return pa.Array.from_buffers(
        pa.large_string(), len(number), [None, pa.py_buffer(offsets), pa.py_buffer(content)]
    )
