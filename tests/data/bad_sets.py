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
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )


def png_claiming(width: int, height: int) -> bytes:
    """A small file whose header tells of an image of any size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", header)
        + png_chunk(b"IDAT", zlib.compress(bytes(1000)))
        + png_chunk(b"IEND", b"")
    )


def png_of_palette(transparent: int) -> bytes:
    """A PNG that decodes and cannot be converted where the transparent one is beyond its colours."""
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 2, 8, 3, 0, 0, 0))
        + png_chunk(b"PLTE", bytes(6))
        + png_chunk(b"tRNS", b"\xff" * transparent + b"\0")
        + png_chunk(b"IDAT", zlib.compress(bytes(6)))
        + png_chunk(b"IEND", b"")
    )


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
        line = json.dumps(
            {
                "id": identity,
                "image_path": path,
                "text": "TEXT" if isinstance(text, bytes) else text,
            }
        ).encode()
        lines.append(line.replace(b"TEXT", text) if isinstance(text, bytes) else line)
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
    return (
        f"jsonl:{root / 'set.jsonl'}",
        [*expected.items(), ("good", "duplicate-id")],
        [*good, "some"],
    )


def csv(folder: Path, separator: str = ","):
    root = folder_with_images(folder)
    rows, expected, good = file_rows()
    out = [separator.join(["id", "filepath", "title"]).encode()]
    for identity, path, text in rows:
        content = text if isinstance(text, bytes) else (text or "").encode()
        out.append(separator.join([identity, path, ""]).encode() + b'"' + content + b'"')
    expected["no-caption"] = "empty-caption"  # a cell that is empty is a text that is empty
    out.append(separator.join(["two lines", "images/good.png", '"first\nsecond"']).encode())
    out.append(separator.join(["good", "images/good.png", "a second one"]).encode())
    out.append(b"short")
    line = b"\n".join(out).count(b"\n") + 1
    expected[str(line)] = "invalid-row"
    kind = "tsv" if separator == "\t" else "csv"
    (root / f"set.{kind}").write_bytes(b"\n".join(out) + b"\n")
    return (
        f"{kind}:{root / f'set.{kind}'}",
        [*expected.items(), ("good", "duplicate-id")],
        [*good, "two lines"],
    )


def tsv(folder: Path):
    spec, expected, good = csv(folder, "\t")
    expected = [pair for pair in expected if pair[0] != "empty-caption"] + [
        ("empty-caption", "empty-caption")
    ]
    return spec, expected, good


def coco(folder: Path):
    root = folder_with_images(folder)
    rows, expected, good = file_rows()
    images, annotations = [], []
    for identity, path, text in rows:
        images.append({"id": identity, "file_name": path})
        if text is not None:
            annotations.append(
                {
                    "image_id": identity,
                    "caption": text.decode(errors="surrogateescape")
                    if isinstance(text, bytes)
                    else text,
                }
            )
    annotations.append({"image_id": "good", "caption": "and another"})
    images += [{"id": "good", "file_name": "images/good.png"}, {"id": "no file"}, 5]
    annotations += [{"image_id": "unknown", "caption": "of no image"}, "oops"]
    count = len(images)
    expected |= {
        "no file": "invalid-row",
        f"images[{count - 1}]": "invalid-row",
        f"images[{count}]": "invalid-row",
        "unknown": "invalid-row",
    }
    content = json.dumps({"images": images, "annotations": annotations}, ensure_ascii=False)
    (folder / "captions.json").write_bytes(content.encode(errors="surrogateescape"))
    return (
        f"coco:{root}:{folder / 'captions.json'}",
        [*expected.items(), ("good", "duplicate-id")],
        good,
    )


def imagefolder(folder: Path):
    # its folder `images` is a class, `linked` is one that leads out
    root = folder_with_images(folder)
    (root / "images" / "notes.txt").write_text("passed over")
    (folder / "outside" / "names.txt").write_text("images secret\n")
    (root / "classnames.txt").symlink_to(folder / "outside" / "names.txt")
    (root / "images" / "gone.png").symlink_to("none.png")
    (root / "images" / "deeper").mkdir()
    (root / "images" / "deeper" / "more.JPEG").write_bytes(encoded_image(1, "JPEG"))
    (root / "images" / "away").symlink_to(folder / "outside")
    (root / "images" / "again").symlink_to(root / "images")
    os.symlink(root / "images" / "good.png", os.fsencode(root / "images") + b"/caf\xe9.png")
    expected = {f"images/{reason}.png": reason for reason in BAD_IMAGES}
    expected |= {
        "images/link.png": "outside-root",
        "linked": "outside-root",
        "images/away": "outside-root",
    }
    expected |= {"images/gone.png": "missing-file", r"images/caf\udce9.png": "invalid-utf8"}
    return (
        f"imagefolder:{root}",
        list(expected.items()),
        [f"images/{name}" for name in ("deeper/more.JPEG", "good.png", "inside.png")],
    )


def parquet(folder: Path, in_struct: bool = True):
    """As Hugging Face writes images, or as plain bytes; in two files of row groups of 5."""
    (folder / "outside").mkdir()
    good = encoded_image()
    rows = [("good", good, b"a good one")]
    rows += [(reason, content, b"its image is bad") for reason, content in BAD_IMAGES.items()]
    rows += [("missing", None, b"no bytes")]
    rows += [
        (reason, good, text if isinstance(text, bytes) or text is None else text.encode())
        for reason, text in BAD_TEXTS.items()
    ]
    rows += [("good", good, b"a second one"), ("last", encoded_image(1), b"the last")]
    expected = {reason: reason for reason in [*BAD_IMAGES, *BAD_TEXTS]} | {
        # without bytes it is read from its path, and that is a way out
        "missing": "outside-root" if in_struct else "missing-file"
    }
    # bytes that are no text, as faulty writers leave them
    texts = pa.array([text for *_, text in rows], pa.binary()).view(pa.string())
    images = [
        {"bytes": image, "path": "../outside/secret.png"} if in_struct else image
        for _, image, _ in rows
    ]
    table = pa.table({"id": [row[0] for row in rows], "image": images, "text": texts})
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
    texts = [
        text if isinstance(text, bytes) or text is None else text.encode() for *_, text in rows
    ]
    columns = {"id": [row[0] for row in rows], "image_path": [row[1] for row in rows]}
    pq.write_table(
        pa.table(columns | {"caption": pa.array(texts, pa.binary()).view(pa.string())}),
        root / "set.parquet",
    )
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
    expected = {}
    with tarfile.open(first, "w") as tar:
        add(tar, "a/good.png", good)
        add(tar, "a/good.txt", b"a good one\n")
        add(tar, "../outside/secret.png", good)  # a name, never a path
        add(tar, "../outside/secret.txt", b"a name with dots")
        for reason, content in BAD_IMAGES.items():
            add(tar, f"{reason}.PNG", content)
            add(tar, f"{reason}.txt", b"its image is bad")
            expected[f"000.tar/{reason}"] = reason
        for reason, text in BAD_TEXTS.items():
            add(tar, f"{reason}.png", good)
            if text is None:
                add(tar, f"{reason}.json", b'{"width": 3}')
            else:
                add(tar, f"{reason}.txt", text if isinstance(text, bytes) else text.encode())
            expected[f"000.tar/{reason}"] = reason
        add(tar, "no json.png", good)
        add(tar, "no json.json", b"{")
        add(tar, "no words.jpg", good)
        add(tar, "no image.txt", b"words")
        link = tarfile.TarInfo("linked.png")
        link.type, link.linkname = tarfile.SYMTYPE, str(folder / "outside" / "secret.png")
        tar.addfile(link)
        add(tar, "linked.txt", b"a member that is a link is no image")
        add(tar, "a/good.png", good)
        add(tar, "a/good.txt", b"a second one")
        add(tar, "README", b"passed over")
        add(tar, "classes.cls", b"7")
        add(tar, "last.json", b'{"caption": ["in json", ""]}')
        add(tar, "last.webp", encoded_image(kind="WEBP"))
    expected |= {"000.tar/no json": "invalid-row"}
    orphans = ("no words", "no image", "linked", "classes")
    expected |= {f"000.tar/{name}": "orphan-member" for name in orphans}
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
    ends = {
        "001.tar/end of shard": "truncated-archive",
        "002.tar/end of shard": "truncated-archive",
        "003.tar": "empty-file",
    }
    good_ones = [
        "000.tar/a/good",
        "000.tar/../outside/secret",
        "000.tar/last",
        "001.tar/a",
        "002.tar/a",
    ]
    pairs = [*expected.items(), *ends.items(), ("000.tar/a/good", "duplicate-id")]
    return f"webdataset:{folder}/{{000..001}}.tar::{folder}/00[23].tar", pairs, good_ones


SETS: dict[str, Callable[[Path], tuple[str, list[tuple[str, str]], list[str]]]] = {
    function.__name__: function
    for function in (
        jsonl,
        csv,
        tsv,
        coco,
        imagefolder,
        parquet,
        parquet_bytes,
        parquet_paths,
        webdataset,
    )
}
