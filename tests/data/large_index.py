"""An index of any size within seconds, with rows made up by numpy: to measure what opening and
reading cost. N: rows."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from data.formats.rows import ROWS_OF_A_PART
from data.formats.tables import JsonlFormat
from data.identity import fingerprint
from data.index.building import IndexWriter
from data.index.mapped import index_folder, numbers_of, texts_of
from data.keys import HASH_BYTES

DIGITS = 9
CAPTIONS = [f"picture number {n} of a thing that has a colour and a place" for n in range(1000)]


def write_large_index(folder: Path, rows: int, pairs=(("image", "text"),)) -> str:
    """Writes an index of `rows` rows to `folder`/index; returns the spec under which
    `open_source(spec, pairs, folder=...)` finds it.

    Row i has the id and the name i in nine digits, and the caption `CAPTIONS[i % 1000]`; every
    thousandth is bad (missing-file).
    """
    file = folder / "large.jsonl"
    file.write_text("{}\n")
    format = JsonlFormat(str(file))
    format.pairs = pairs
    target = index_folder(format, folder=folder / "index")
    (target / "build").mkdir(parents=True)
    with IndexWriter(target / "build", format.modalities) as writer:
        for start in range(0, rows, ROWS_OF_A_PART):
            batch = _batch(start, min(ROWS_OF_A_PART, rows - start), format.modalities)
            writer.append(f"{start:032}", str(file), [batch], {})
    writer.publish(target, fingerprint(format.fingerprint()))
    return f"jsonl:{file}"


def _batch(start: int, rows: int, modalities: tuple[str, ...]) -> tuple[pa.RecordBatch, np.ndarray]:
    number = np.arange(start, start + rows)
    bad = number % 1000 == 999
    numbers = np.zeros(rows, numbers_of(modalities))
    measured = {
        "row": number + 1,
        "id_hash": number + 1,
        "num_captions": 1,
        "num_characters": np.array([len(text) for text in CAPTIONS])[number % len(CAPTIONS)],
        "bad": bad,
        "width": 640,
        "height": 480,
        "complexity": number % 97 / 97,
        "perceptual_hash": number.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15),
        "audio_seconds": number % 7 + 1,
    }
    for modality in modalities:
        hashes = np.repeat(number[:, None].astype("<u8"), HASH_BYTES // 8, axis=1)  # [N, 2]
        measured |= {f"{modality}_hash": hashes.view(f"V{HASH_BYTES}")[:, 0]}
        measured |= {f"{modality}_size": 50_000}
    for name in measured.keys() & {*numbers.dtype.names}:
        numbers[name] = measured[name]
    names = [f"{i:0{DIGITS}}" for i in number.tolist()]
    texts = {"detail": ["made up" if each else "" for each in bad], "language": [""] * rows}
    texts["captions"] = [[CAPTIONS[i % len(CAPTIONS)]] for i in number.tolist()]
    schema = texts_of(modalities)
    columns = [pa.array(texts.get(field.name, names), field.type) for field in schema]
    return pa.record_batch(columns, schema=schema), numbers
