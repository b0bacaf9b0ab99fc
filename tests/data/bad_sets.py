"""One data set per format, with one sample of everything that can be wrong in that format, and what
must be said of it.

`SETS` has a function per format: it writes the set below a folder and returns its spec, {identity:
reason} of the bad samples, and the identities of the good ones. Beside each set lies a folder
`outside`, which nothing may open.
"""

import io
import json
import os
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

HUGE = "word " * 2001  # 10,005 characters


def encoded_image(number: int = 0, kind: str = "PNG", size: tuple[int, int] = (16, 12)) -> bytes:
    out = io.BytesIO()
    noise = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(noise).save(out, kind)
    return out.getvalue()


def png_chunk(kind: bytes, content: bytes) -> bytes:
    check = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + check


def png(header: tuple[int, ...], *chunks: tuple[bytes, bytes]) -> bytes:
    """`header`: width, height, bits of a channel, kind of colours."""
    begin = (b"IHDR", struct.pack(">IIBBBBB", *header, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*c) for c in (begin, *chunks, (b"IEND", b"")))


def png_claiming(width: int, height: int) -> bytes:
    """A small file whose header tells of an image of any size."""
    return png((width, height, 8, 2), (b"IDAT", zlib.compress(bytes(1000))))


def png_of_palette(transparent: int) -> bytes:
    """A PNG that decodes and cannot be converted where the transparent one is beyond its colours."""
    opacities = b"\xff" * transparent + b"\0"
    pixels = zlib.compress(bytes(6))
    return png((2, 2, 8, 3), (b"PLTE", bytes(6)), (b"tRNS", opacities), (b"IDAT", pixels))


def tiff_claiming(strips: int) -> bytes:
    """A header alone, which promises so many strips."""
    return b"II*\0" + struct.pack("<IHHHII", 8, 1, 273, 4, strips, 26) + bytes(4)


BAD_IMAGES = {
    "empty-file": b"",
    "not-an-image": b"<html>404 Not Found</html>",
    "truncated-image": encoded_image(kind="JPEG", size=(64, 64))[:-400],
    "too-many-pixels": png_claiming(20_000, 20_000),
    "impossible-size": png_claiming(70_000, 10),
    "too-slow": tiff_claiming(1_000_000),
    "unreadable": encoded_image()[:60] + b"\xff" * 40 + encoded_image()[100:],
}
BAD_TEXTS = {
    "no-caption": None,
    "empty-caption": " \t\n",
    "huge-caption": HUGE,
    "nul-character": "a\0b",
    "invalid-utf8": b"caf\xe9",
}
BAD_PATHS = {
    "missing": ("missing-file", "images/none.png"),
    "absolute": ("outside-root", "/etc/hostname"),
    "dots": ("outside-root", "images/../../outside/secret.png"),
    "link": ("outside-root", "images/link.png"),
    "below a linked folder": ("outside-root", "linked/secret.png"),
    "folder": ("not-an-image", "images"),
    "windows": ("missing-file", "images\\good.png"),
}


def folder_with_images(folder: Path) -> Path:
    """`set/images` with a good image, the bad ones, and links to `outside`."""
    outside, root = folder / "outside", folder / "set"
    (root / "images").mkdir(parents=True)
    outside.mkdir()
    (outside / "secret.png").write_bytes(encoded_image(9))
    (root / "images" / "good.png").write_bytes(encoded_image())
    # a link that stays inside is as good as a file
    (root / "images" / "inside.png").symlink_to("good.png")
    (root / "images" / "link.png").symlink_to(outside / "secret.png")
    (root / "linked").symlink_to(outside)
    for reason, content in BAD_IMAGES.items():
        (root / "images" / f"{reason}.png").write_bytes(content)
    return root


def file_rows() -> tuple[list[tuple[str, str, object]], dict[str, str], list[str]]:
    """(id, path, text) for formats that name files; expected reasons; good ids."""
    good = "images/good.png"
    rows = [("good", good, "a good one"), ("inside", "images/inside.png", "a link inside")]
    expected = {}
    for reason in BAD_IMAGES:
        rows.append((reason, f"images/{reason}.png", "its image is bad"))
        expected[reason] = reason
    for name, (reason, path) in BAD_PATHS.items():
        rows.append((name, path, "its path is bad"))
        expected[name] = reason
    for reason, text in BAD_TEXTS.items():
        rows.append((reason, good, text))
        expected[reason] = reason
    return rows, expected, ["good", "inside"]


def jsonl(folder: Path):
    root = folder_with_images(folder)
    rows, expected, good = file_rows()
    lines = []
    for identity, path, text in rows:
        of_bytes = isinstance(text, bytes)
        row = {"id": identity, "image_path": path, "text": "TEXT" if of_bytes else text}
        line = json.dumps(row).encode()
        lines.append(line.replace(b"TEXT", text) if of_bytes else line)
    # of a line that cannot be read the id is not known: the line's number stands for it
    del expected["invalid-utf8"]
    expected[str(len(lines))] = "invalid-utf8"
    # beside those of test_jsonl.py
    more = {
        b"[" * 100_000: "invalid-row",
        b'{"image_path": "images/good.png", "text": ["", "\\u0000"]}': "empty-caption",
        b'{"image_path": "images/good.png", "text": "\\ud800"}': "invalid-utf8",
        b'{"image_path": "images/\\u0000.png", "text": "a"}': "nul-character",
    }
    for line, reason in more.items():
        lines.append(line)
        expected[str(len(lines))] = reason
    lines.append(b'{"image_path": "images/good.png", "text": ["", "kept"], "id": "some"}')
    lines.append(b'{"image_path": "images/good.png", "text": "a second one", "id": "good"}')
    (root / "set.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    pairs = [*expected.items(), ("good", "duplicate-id")]
    return f"jsonl:{root / 'set.jsonl'}", pairs, [*good, "some"]


def csv(folder: Path, kind: str = "csv", separator: str = ","):
    root = folder_with_images(folder)
    rows, expected, good = file_rows()
    lines = [("id", "filepath", "title")]
    for identity, path, text in rows:
        # bytes that are no UTF-8 pass through as surrogates
        text = text.decode(errors="surrogateescape") if isinstance(text, bytes) else text
        lines.append((identity, path, f'"{text or ""}"'))
    expected["no-caption"] = "empty-caption"  # a cell that is empty is a text that is empty
    lines.append(("two lines", "images/good.png", '"first\nsecond"'))
    lines += [("good", "images/good.png", "a second one"), ("short",)]
    out = "\n".join(map(separator.join, lines))
    expected[str(out.count("\n") + 1)] = "invalid-row"
    (root / f"set.{kind}").write_bytes(out.encode(errors="surrogateescape") + b"\n")
    pairs = [*expected.items(), ("good", "duplicate-id")]
    return f"{kind}:{root / f'set.{kind}'}", pairs, [*good, "two lines"]


def tsv(folder: Path):
    return csv(folder, "tsv", "\t")


def coco(folder: Path):
    root = folder_with_images(folder)
    rows, expected, good = file_rows()
    images = [{"id": identity, "file_name": path} for identity, path, _ in rows]
    annotations: list = []
    for identity, _, text in rows:
        text = text.decode(errors="surrogateescape") if isinstance(text, bytes) else text
        annotations += [] if text is None else [{"image_id": identity, "caption": text}]
    annotations.append({"image_id": "good", "caption": "and another"})
    images += [{"id": "good", "file_name": "images/good.png"}, {"id": "no file"}, 5]
    annotations += [{"image_id": "unknown", "caption": "of no image"}, "oops"]
    faulty = ("no file", f"images[{len(images) - 1}]", f"images[{len(images)}]", "unknown")
    expected |= dict.fromkeys(faulty, "invalid-row")
    content = json.dumps({"images": images, "annotations": annotations}, ensure_ascii=False)
    (folder / "captions.json").write_bytes(content.encode(errors="surrogateescape"))
    pairs = [*expected.items(), ("good", "duplicate-id")]
    return f"coco:{root}:{folder / 'captions.json'}", pairs, good


def imagefolder(folder: Path):
    # its folder `images` is a class, `linked` is one that leads out
    root = folder_with_images(folder)
    images, outside = root / "images", folder / "outside"
    (images / "notes.txt").write_text("passed over")
    (outside / "names.txt").write_text("images secret\n")
    (root / "classnames.txt").symlink_to(outside / "names.txt")
    (images / "gone.png").symlink_to("none.png")
    (images / "deeper").mkdir()
    (images / "deeper" / "more.JPEG").write_bytes(encoded_image(1, "JPEG"))
    (images / "away").symlink_to(outside)
    (images / "again").symlink_to(images)
    os.symlink(images / "good.png", os.fsencode(images) + b"/caf\xe9.png")
    expected = {f"images/{reason}.png": reason for reason in BAD_IMAGES}
    expected |= dict.fromkeys(("images/link.png", "linked", "images/away"), "outside-root")
    expected |= {"images/gone.png": "missing-file", r"images/caf\udce9.png": "invalid-utf8"}
    good = [f"images/{name}" for name in ("deeper/more.JPEG", "good.png", "inside.png")]
    return f"imagefolder:{root}", list(expected.items()), good


def texts_as_they_are(rows: list) -> pa.Array:
    """Bytes that are no text too, as faulty writers leave them."""
    texts = [text.encode() if isinstance(text, str) else text for *_, text in rows]
    return pa.array(texts, pa.binary()).view(pa.string())


def parquet(folder: Path, in_struct: bool = True):
    """As Hugging Face writes images, or as plain bytes; in two files of row groups of 5."""
    (folder / "outside").mkdir()
    good = encoded_image()
    rows = [("good", good, "a good one")]
    rows += [(reason, content, "its image is bad") for reason, content in BAD_IMAGES.items()]
    rows += [("missing", None, "no bytes")]
    rows += [(reason, good, text) for reason, text in BAD_TEXTS.items()]
    rows += [("good", good, "a second one"), ("last", encoded_image(1), "the last")]
    expected = {reason: reason for reason in [*BAD_IMAGES, *BAD_TEXTS]}
    # without bytes it is read from its path, and that is a way out
    expected["missing"] = "outside-root" if in_struct else "missing-file"
    images = [image for _, image, _ in rows]
    if in_struct:
        images = [{"bytes": image, "path": "../outside/secret.png"} for image in images]
    columns = {"id": [row[0] for row in rows], "image": images, "text": texts_as_they_are(rows)}
    table = pa.table(columns)
    for number, part in enumerate((table.slice(0, 7), table.slice(7))):
        pq.write_table(part, folder / f"{number}.parquet", row_group_size=5)
    (folder / "2.parquet").write_bytes((folder / "1.parquet").read_bytes()[:-100])
    pairs = [*expected.items(), ("good", "duplicate-id"), ("2.parquet", "truncated-archive")]
    return f"parquet:{folder}/{{0..2}}.parquet", pairs, ["good", "last"]


def parquet_bytes(folder: Path):
    return parquet(folder, in_struct=False)


def parquet_paths(folder: Path):
    root = folder_with_images(folder)
    rows, expected, good = file_rows()
    columns = {"id": [row[0] for row in rows], "image_path": [row[1] for row in rows]}
    table = pa.table(columns | {"caption": texts_as_they_are(rows)})
    pq.write_table(table, root / "set.parquet")
    return f"parquet:{root}/*.parquet", list(expected.items()), good


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def webdataset(folder: Path):
    (folder / "outside").mkdir()
    (folder / "outside" / "secret.png").write_bytes(encoded_image(9))
    good = encoded_image()
    first, second, third, fourth = (folder / f"{number:03}.tar" for number in range(4))
    # name, image, text
    pairs = [("a/good", good, "a good one\n"), ("../outside/secret", good, "a name, never a path")]
    pairs += [(reason, content, "its image is bad") for reason, content in BAD_IMAGES.items()]
    pairs += [(reason, good, text) for reason, text in BAD_TEXTS.items() if text is not None]
    pairs += [("a/good", good, "a second one")]
    with tarfile.open(first, "w") as tar:
        for name, image, text in pairs:
            add(tar, f"{name}.PNG", image)
            add(tar, f"{name}.txt", text if isinstance(text, bytes) else text.encode())
        for name, content in (("no-caption", b'{"width": 3}'), ("no json", b"{")):
            add(tar, f"{name}.png", good)
            add(tar, f"{name}.json", content)
        add(tar, "no words.jpg", good)
        add(tar, "no image.txt", b"words")
        link = tarfile.TarInfo("linked.png")
        link.type, link.linkname = tarfile.SYMTYPE, str(folder / "outside" / "secret.png")
        tar.addfile(link)
        add(tar, "linked.txt", b"a member that is a link is no image")
        add(tar, "README", b"passed over")
        add(tar, "classes.cls", b"7")
        add(tar, "last.json", b'{"caption": ["in json", ""]}')
        add(tar, "last.webp", encoded_image(kind="WEBP"))
    expected = {reason: reason for reason in [*BAD_IMAGES, *BAD_TEXTS]} | {"no json": "invalid-row"}
    expected |= dict.fromkeys(("no words", "no image", "linked", "classes"), "orphan-member")
    for shard in (second, third):
        with tarfile.open(shard, "w") as tar:
            for key in ("a", "b"):
                add(tar, f"{key}.png", encoded_image())
                add(tar, f"{key}.txt", b"words")
        with tarfile.open(shard) as tar:
            start = tar.getmember("b.png").offset
    second.write_bytes(second.read_bytes()[: start + 512 + 40])  # within the image of b
    content = bytearray(third.read_bytes())
    content[start : start + 512] = b"\x01" * 512  # the header of b
    third.write_bytes(content)
    fourth.write_bytes(b"")
    found = [*((f"000.tar/{name}", reason) for name, reason in expected.items())]
    found += [(f"{shard}.tar/end of shard", "truncated-archive") for shard in ("001", "002")]
    found += [("003.tar", "empty-file"), ("000.tar/a/good", "duplicate-id")]
    good_ones = [f"000.tar/{name}" for name in ("a/good", "../outside/secret", "last")]
    spec = f"webdataset:{folder}/{{000..001}}.tar::{folder}/00[23].tar"
    return spec, found, [*good_ones, "001.tar/a", "002.tar/a"]


MAKERS = (jsonl, csv, tsv, coco, imagefolder, parquet, parquet_bytes, parquet_paths, webdataset)
SETS: dict[str, Callable[[Path], tuple[str, list[tuple[str, str]], list[str]]]] = {
    function.__name__: function for function in MAKERS
}
