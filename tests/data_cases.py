"""The cases of `tests/data/test_pairs_of_options.py`: a covering array over what data can be given as
and how it can be read (`tests/covering.py`), and the files that they read.

The same records are written as every kind of data set, so that what a run loads is compared with the
records themselves. A case is named by its values, without those that stand first.
"""

from __future__ import annotations

import csv
import io
import json
import random
import re
import sys
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from covering import Case, apart_of, covering
from PIL import Image

from data.annotations import Annotation
from data.streams.bloom import CAPTION, key_of, write_unseen

sys.path.insert(0, str(Path(__file__).parent / "data"))
from bad_audio import tone, wav  # noqa: E402

FACTORS = {
    "kind": (
        *("jsonl", "table", "parquet", "webdataset", "python"),
        *("imagefolder", "audiofolder", "videofolder", "stream_of_tars", "stream_of_parquet"),
    ),
    "modality": ("pictures", "sounds", "films", "regions", "depths"),
    "balance": ("in_order", "packed", "buckets"),
    "held_out": ("all_trained", "fraction", "by_set"),
    "filter": ("every_row", "where", "unseen"),
    "sets": ("one_set", "two_alike", "two_kinds"),
    "store": ("local", "served"),
    "prefetch": ("when_needed", "prefetched"),
    "resume": ("unbroken", "resumed"),
    "cache": ("decoded", "cached"),
    "layout": ("fork", "merged"),
}
STREAMS = ("stream_of_tars", "stream_of_parquet")
FOLDERS = ("imagefolder", "audiofolder", "videofolder")
KNOWN = tuple(kind for kind in FACTORS["kind"] if kind not in STREAMS)
IMPOSSIBLE = {  # reason -> values of which none of the first goes with any of the second
    "only metadata of streams are filtered": (KNOWN, ("where", "unseen")),
    "only shards of streams are fetched ahead": (KNOWN, ("prefetched",)),
    "only shards are read from a web server": (
        (*FOLDERS, "jsonl", "table", "python"),
        ("served",),
    ),
    "a folder of classes holds files of one modality": (
        ("imagefolder",),
        ("sounds", "films", "regions", "depths"),
    ),
    "a folder of sounds holds nothing else": (
        ("audiofolder",),
        ("pictures", "films", "regions", "depths"),
    ),
    "a folder of films holds nothing else": (
        ("videofolder",),
        ("pictures", "sounds", "regions", "depths"),
    ),
    "a table has no column of regions": (("table",), ("regions",)),
    "buckets are shapes of images": (("audiofolder", "videofolder"), ("buckets",)),
}
MOST = 46
# with a filter, a prefetcher and packing together in a stream of either kind, and at most `MOST` cases
SEED = 9
PAIRS = {
    "pictures": "image:text",
    "sounds": "image:text,audio:text",
    "films": "image:text,video:text",
    "regions": "image:text,region:text",
    "depths": "image:text,depth:text",  # of `examples/depth/`: a modality of one's own
}
OF_FILES = ("image", "audio", "video", "depth")
BESIDE = OF_FILES[1:]
ALONE = {"audiofolder": "audio:text", "videofolder": "video:text"}

# sets: numbers of records, shard by shard; equal ones are in both
SHARDS = {
    "first": ((9, 5, 8, 6, 7, 5), 0),
    "second": ((6, 8, 4), 100),
    "held_out": ((6,), 200),
}
ALSO_HELD_OUT = (0, 1, 2)  # of the first set
WHERE = "score>0.3"
TEMPLATES = ("a {}", "the {} that was seen from very near this evening")
WORDS = "red green blue old small round slow bright apple stone river lamp horse".split()
SIZES = ((24, 24), (48, 20), (20, 48), (40, 30))  # of images


def cases() -> list[Case]:
    """Each once: made cheaper, two may be the same."""
    found = covering(FACTORS, apart_of(IMPOSSIBLE.values()), SEED)
    return [*{name_of(case): case for case in found}.values()]


def name_of(case: Case) -> str:
    words = [v for factor, v in case.items() if factor == "kind" or v != FACTORS[factor][0]]
    return "-".join(words)


@dataclass(frozen=True)
class Record:
    """A sample as it was before it was written. Some lack an image, a sound, a film or regions; what
    they lack is not written where a modality beside the image is compared."""

    number: int

    @property
    def id(self) -> str:
        return f"r{self.number:04d}"

    @property
    def set(self) -> str:
        """Which has it first."""
        return [name for name, (_, first) in SHARDS.items() if first <= self.number][-1]

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of its image."""
        return SIZES[self.number % len(SIZES)]

    @cached_property
    def image(self) -> bytes:
        fields = np.random.default_rng(self.number).integers(0, 256, (6, 6, 3), np.uint8)
        image = Image.fromarray(fields).resize(self.size)
        with io.BytesIO() as file:
            image.save(file, "JPEG" if self.number % 3 else "PNG")
            return file.getvalue()

    @cached_property
    def audio(self) -> bytes:
        return wav(tone(0.2 + self.number % 5 / 10, 200 + 7 * self.number))

    @cached_property
    def video(self) -> bytes:
        """Some frames, each of other fields."""
        import av

        rng = np.random.default_rng(self.number)
        with io.BytesIO() as file:
            with av.open(file, "w", format="mp4") as out:
                stream = out.add_stream("mpeg4", rate=10)
                stream.width, stream.height, stream.pix_fmt = 36, 32, "yuv420p"
                stream.codec_context.thread_count = 1
                for _ in range(2 + self.number % 5):
                    fields = np.kron(rng.integers(0, 256, (8, 9)), np.ones((4, 4)))
                    pixels = np.repeat(fields.astype(np.uint8)[..., None], 3, 2)
                    out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, "rgb24")))
                out.mux(stream.encode())
            return file.getvalue()

    @cached_property
    def depth(self) -> bytes:
        """Of each pixel of its image."""
        rng = np.random.default_rng(self.number)
        image = Image.fromarray(rng.integers(1, 1 << 16, self.size[::-1], np.uint16))
        with io.BytesIO() as file:
            image.save(file, "PNG")
            return file.getvalue()

    @property
    def captions(self) -> tuple[str, ...]:
        draw = random.Random(self.number)
        return tuple(
            " ".join([*draw.choices(WORDS, k=draw.randint(0, 9)), f"{self.id} {k}"])
            for k in range(1 + self.number % 3)
        )

    @property
    def regions(self) -> tuple[Annotation, ...]:
        if self.number % 4 == 0:
            return ()
        return tuple(
            Annotation(
                (0.125 * k, 0.25, 0.125 * k + 0.5, 0.875),
                tuple(self.captions[: 1 + k % 2]),
                (f"no {WORDS[(self.number + k) % len(WORDS)]}",) * (k % 2),
            )
            for k in range(self.number % 4)
        )

    @property
    def score(self) -> float | None:
        return None if self.number % 11 == 5 else self.number * 37 % 100 / 100

    @property
    def is_seen(self) -> bool:
        """Whether its captions are among those that are not to be seen again."""
        return self.number % 3 == 1

    def lacks(self, modality: str) -> bool:
        beside = self.number % 5 == 2
        return beside if modality in BESIDE else self.number % 7 == 3 and not beside

    def is_kept(self, filter: str) -> bool:
        if filter == "where":
            return self.score is not None and self.score > 0.3
        return filter == "every_row" or not self.is_seen


@lru_cache(None)
def record(number: int) -> Record:
    return Record(number)


def record_of(identity: str) -> Record:
    """By the name that a source gives the sample."""
    (found,) = {*re.findall(r"r(\d{4})", identity)}
    return record(int(found))


def shards_of(name: str) -> list[list[Record]]:
    counts, first = SHARDS[name]
    numbers = iter(range(first, first + sum(counts)))
    shards = [[record(next(numbers)) for _ in range(count)] for count in counts]
    if name == "held_out":
        shards[0] += map(record, ALSO_HELD_OUT)
    return shards


def records_of(name: str) -> list[Record]:
    return [each for shard in shards_of(name) for each in shard]


def held_by(each: Record, sparse: bool) -> Iterator[tuple[str, bytes]]:
    """Modality and encoded value. `sparse`: without what it lacks."""
    for modality in OF_FILES:
        if not (sparse and each.lacks(modality)):
            yield modality, getattr(each, modality)


def ending_of(modality: str, content: bytes) -> str:
    if modality == "image":
        return "png" if content.startswith(b"\x89PNG") else "jpg"
    return {"audio": "wav", "video": "mp4", "depth": "depth.png"}[modality]


def regions_of(each: Record) -> list[dict]:
    return [
        {
            "xyxy": [*region.extent],
            "unit": "relative",
            "text": [*region.phrases],
            "negatives": [*region.negatives],
        }
        for region in each.regions
    ]


def fields_of(each: Record) -> dict:
    return {"id": each.id, "score": each.score, "regions": regions_of(each) or None}


# -- data sets


class Files:
    """Writes data sets below a folder when they are first asked for. `sparse`: as in `held_by`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def spec(self, kind: str, name: str, sparse: bool, where: str = "") -> str:
        """Of the set of that name. `where`: instead of the folder, an address that serves it."""
        folder = self.folder / f"{kind}-{name}{'-sparse' * sparse}"
        pattern = getattr(self, f"_{kind}")(folder, name, sparse)
        place = f"{where}/{folder.name}" if where else str(folder)
        return pattern.replace("FOLDER", place)

    def unseen(self) -> Path:
        """A file of the captions of records that are not to be seen again."""
        file = self.folder / "seen"
        if not file.exists():
            every = [each for name in SHARDS for each in records_of(name) if each.is_seen]
            keys = [key_of(CAPTION, each.captions[0]) for each in every]
            write_unseen(file, CAPTION, keys, 1e-4)
        return file

    def _paths(self, folder: Path, each: Record, sparse: bool) -> dict[str, str]:
        paths = {}
        for modality, content in held_by(each, sparse):
            paths[modality] = f"{each.id}.{ending_of(modality, content)}"
            (folder / paths[modality]).write_bytes(content)
        return paths

    def _jsonl(self, folder: Path, name: str, sparse: bool) -> str:
        """With a bad sample before all others, so that numbers in the source are not those in what
        is trained on."""
        if is_new(folder):
            lines = [json.dumps({"id": "bad", "text": "no file"})]
            for each in records_of(name):
                paths = self._paths(folder, each, sparse)
                row = fields_of(each) | {f"{key}_path": path for key, path in paths.items()}
                lines.append(json.dumps({**row, "text": each.captions}))
            (folder / "set.jsonl").write_text("\n".join(lines))
        return "jsonl:FOLDER/set.jsonl"

    def _table(self, folder: Path, name: str, sparse: bool) -> str:
        """The first is a csv, another a tsv."""
        kind = "csv" if name == "first" else "tsv"
        if is_new(folder):
            with (folder / f"set.{kind}").open("w", newline="") as file:
                table = csv.writer(file, "excel" if kind == "csv" else "excel-tab")
                columns = [f"{modality}_path" for modality in BESIDE]
                table.writerow(["id", "title", "filepath", *columns])
                for each in records_of(name):
                    paths = self._paths(folder, each, sparse)
                    cells = [paths.get(key, "") for key in OF_FILES]
                    table.writerow([each.id, "\n".join(each.captions), *cells])
        return f"{kind}:FOLDER/set.{kind}?captions=lines"

    def _parquet(self, folder: Path, name: str, sparse: bool) -> str:
        shards = shards_of(name)
        if is_new(folder):
            for number, shard in enumerate(shards):
                write_parquet(folder / f"{number}.parquet", shard, sparse)
        return f"parquet:FOLDER/{{0..{len(shards) - 1}}}.parquet"

    def _webdataset(self, folder: Path, name: str, sparse: bool) -> str:
        return f"webdataset:{self._tars(folder, name, sparse)}?captions=lines"

    def _tars(self, folder: Path, name: str, sparse: bool) -> str:
        """The second set has img2dataset's parquet beside its tars."""
        shards = shards_of(name)
        if is_new(folder):
            for number, shard in enumerate(shards):
                write_tar(folder / f"{number}.tar", shard, sparse)
                if name == "second":
                    write_beside(folder / f"{number}.parquet", shard)
        return f"FOLDER/{{0..{len(shards) - 1}}}.tar"

    def _stream_of_tars(self, folder: Path, name: str, sparse: bool) -> str:
        return f"stream:{self._tars(folder, name, sparse)}?mixed=2&captions=lines"

    def _stream_of_parquet(self, folder: Path, name: str, sparse: bool) -> str:
        return f"stream:{self._parquet(folder, name, sparse).partition(':')[2]}?mixed=3"

    def _python(self, folder: Path, name: str, sparse: bool) -> str:
        kind = f"{name.title()}{'Sparse' * sparse}"
        return f"python:data_cases:{kind}"

    def _imagefolder(self, folder: Path, name: str, sparse: bool) -> str:
        return self._classes(folder, "image", name)

    def _audiofolder(self, folder: Path, name: str, sparse: bool) -> str:
        return self._classes(folder, "audio", name)

    def _videofolder(self, folder: Path, name: str, sparse: bool) -> str:
        return self._classes(folder, "video", name)

    def _classes(self, folder: Path, modality: str, name: str) -> str:
        """A class for each record: samples of equal captions are never divided."""
        templates = self.folder / "templates.txt"
        templates.write_text("\n".join(TEMPLATES))
        if is_new(folder):
            for each in records_of(name):
                content = getattr(each, modality)
                (folder / each.id).mkdir()
                (folder / each.id / f"0.{ending_of(modality, content)}").write_bytes(content)
        return f"{modality}folder:FOLDER?templates={templates}"


def is_new(folder: Path) -> bool:
    """Made now."""
    if folder.exists():
        return False
    folder.mkdir(parents=True)
    return True


def write_parquet(file: Path, shard: Iterable[Record], sparse: bool) -> None:
    """With a list of captions in each row; a few rows in a group."""
    rows = [{**fields_of(r), "text": r.captions, **dict(held_by(r, sparse))} for r in shard]
    none = dict.fromkeys(OF_FILES)
    pq.write_table(pa.Table.from_pylist([{**none, **row} for row in rows]), file, row_group_size=4)


def write_tar(file: Path, shard: Iterable[Record], sparse: bool) -> None:
    with tarfile.open(file, "w", format=tarfile.USTAR_FORMAT) as tar:
        for each in shard:
            members = {ending_of(m, content): content for m, content in held_by(each, sparse)}
            members["txt"] = "\n".join(each.captions).encode()
            members["json"] = json.dumps(fields_of(each)).encode()
            for ending, content in members.items():
                member = tarfile.TarInfo(f"{each.id}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def write_beside(file: Path, shard: Sequence[Record]) -> None:
    """In another order than the tar, with a row that is not in it."""
    rows = [
        {"key": r.id, "status": "success", "score": r.score, "caption": "\n".join(r.captions)}
        for r in reversed(shard)
    ]
    rows.insert(1, {**rows[0], "key": "failed", "status": "failed_to_download", "score": 0.9})
    pq.write_table(pa.Table.from_pylist(rows), file)


class First:
    """Of `python:` data."""

    name, sparse = "first", False

    def __init__(self) -> None:
        self.records = records_of(self.name)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, i: int) -> dict:
        each = self.records[i]
        item = {"id": each.id, "text": each.captions, "regions": regions_of(each) or None}
        return item | dict(held_by(each, self.sparse))


class Second(First):
    name = "second"


class FirstSparse(First):
    sparse = True


class SecondSparse(Second):
    sparse = True
