"""Images with a depth each, in every format."""

import csv
import io
import json
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

NUMBER, WITHOUT = 40, 3  # samples, the first of which have no depth
HEIGHT, WIDTH = 60, 84


def png(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    return file.getvalue()


def contents(n: int, number: int | None = None) -> tuple[bytes, bytes | None]:
    """An image and its depth: both say of each pixel where it is. `number`: depths of one number are
    equal files; None: of `n`."""
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    image = np.stack([2 * columns, 2 * rows, np.full_like(rows, 5 * n)], -1)
    depth = (256 * columns + rows).astype(np.uint16)
    depth[0, 0] = n if number is None else number  # equal files are on one side of a split
    return png(image.astype(np.uint8)), png(depth) if n >= WITHOUT else None


def written(folder, number_of=lambda n: n):
    """The same samples in each format -> their specs. `number_of`: sample -> that of its depth, of which
    equal ones are equal files."""
    rows, lines = [], []
    with tarfile.open(folder / "a.tar", "w") as tar:
        for n in range(NUMBER):
            image, depth = contents(n, number_of(n))
            text = f"picture {n}".encode()
            for ending, content in {"png": image, "depth.png": depth, "txt": text}.items():
                if content is not None:
                    entry = tarfile.TarInfo(f"{n:03}.{ending}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
                    (folder / f"{n:03}.{ending}").write_bytes(content)
            rows.append({"id": f"{n:03}", "text": text.decode(), "image": image, "depth": depth})
            line = {"id": f"{n:03}", "text": text.decode(), "image_path": f"{n:03}.png"}
            lines.append(line | ({"depth_path": f"{n:03}.depth.png"} if depth else {}))
    (folder / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with (folder / "a.csv").open("w", newline="") as file:
        names = {"filepath": "image_path", "title": "text", "depth_path": "depth_path", "id": "id"}
        table = csv.writer(file)
        table.writerow(names)
        table.writerows([[line.get(key) for key in names.values()] for line in lines])
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    pq.write_table(pa.table(columns), folder / "a.parquet", row_group_size=16)
    files = {"jsonl": "a.jsonl", "csv": "a.csv", "parquet": "a.parquet", "webdataset": "a.tar"}
    specs = {kind: f"{kind}:{folder / name}" for kind, name in files.items()}
    return {**specs, "stream": f"stream:{folder / 'a.tar'}", "folder": folder}
