"""A data set as a file of JSON lines: `{"image_path": "a/b.png", "text": "a red apple", "id": "b"}`."""

import difflib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from PIL import Image

from data.pictures import ContentKeys, decode

MAX_SHOWN_ERRORS = 5
FORMAT = '{"image_path": "relative/path.png", "text": "a caption" or ["several", "captions"], "id": "optional name"}'


@dataclass(frozen=True)
class Record:
    """One checked line."""

    line: int
    identity: str
    path: Path
    captions: tuple[str, ...]


class JsonlSource:
    """The samples of one JSON-lines file, in file order. Paths count from the file's folder and may not leave it."""

    def __init__(self, file: str | Path) -> None:
        self.spec = f"jsonl:{file}"
        self._file = Path(file)
        self._records = _read_records(self._file)

    @cached_property
    def _content_keys(self) -> ContentKeys:
        return ContentKeys()

    def __len__(self) -> int:
        return len(self._records)

    def identity(self, i: int) -> str:
        return self._records[i].identity

    def captions(self, i: int) -> list[str]:
        return list(self._records[i].captions)

    def image(self, i: int) -> Image.Image:
        return self._readable(i, decode)

    def content_key(self, i: int) -> str:
        return self._readable(i, self._content_keys)

    def _readable(self, i: int, read):
        record = self._records[i]
        try:
            return read(record.path)
        except Exception as error:  # the set of types that image decoders raise is open
            raise ValueError(
                f"{self._file}:{record.line}: sample '{record.identity}': cannot read the image {record.path} ({error}); "
                "replace the file or delete the line"
            ) from error


def open_jsonl(where: str) -> JsonlSource:
    """`where`: the file. Errors: FileNotFoundError, and ValueError that lists the first faulty lines and their number."""
    if not where:
        raise ValueError("data spec 'jsonl:' names no file; write jsonl:FILE")
    if not Path(where).is_file():
        what = "is a folder" if Path(where).is_dir() else "does not exist"
        raise FileNotFoundError(f"data spec 'jsonl:{where}': {what}; give a file of JSON lines {FORMAT}")
    return JsonlSource(where)


def _read_records(file: Path) -> list[Record]:
    records: list[Record] = []
    errors: list[str] = []
    line_of_identity: dict[str, int] = {}
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = _parse(line, number, file.parent)
                if record.identity in line_of_identity:
                    raise ValueError(f"id '{record.identity}' is already that of line {line_of_identity[record.identity]}; ids must differ")
            except ValueError as error:  # collected: a user mends several lines at once
                errors.append(f"{file}:{number}: {error}")
                continue
            line_of_identity[record.identity] = number
            records.append(record)
    if errors:
        more = f"\n... and {len(errors) - MAX_SHOWN_ERRORS} more" if len(errors) > MAX_SHOWN_ERRORS else ""
        shown = "\n".join(errors[:MAX_SHOWN_ERRORS])
        raise ValueError(f"{len(errors)} faulty line(s) in {file}; a line is {FORMAT}\n{shown}{more}")
    if not records:
        raise ValueError(f"{file} holds no sample; give one per line: {FORMAT}")
    return records


def _parse(line: bytes, number: int, folder: Path) -> Record:
    try:
        fields = json.loads(line.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ValueError(f"invalid JSON: {error.msg} at column {error.colno}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte {line[error.start]:#04x} at position {error.start}; save the file as UTF-8") from error
    if not isinstance(fields, dict):
        raise ValueError(f"a {type(fields).__name__} is given, an object {{...}} is needed")
    for key in ("image_path", "text"):
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.4)
            hint = f"; rename '{near[0]}'?" if near else ""
            raise ValueError(f"no key '{key}'; given: {', '.join(fields) or 'none'}{hint}")
    identity = fields.get("id", number)
    if isinstance(identity, bool) or not isinstance(identity, (str, int)) or identity == "":
        raise ValueError(f"'id' is {json.dumps(identity)}; a text or a whole number is needed")
    return Record(number, str(identity), _image_path(fields["image_path"], folder), _captions(fields["text"]))


def _image_path(given: Any, folder: Path) -> Path:
    if not isinstance(given, str) or not given:
        raise ValueError(f"'image_path' is {json.dumps(given)}; a path as text is needed")
    if PurePosixPath(given).is_absolute() or ".." in PurePosixPath(given).parts:
        raise ValueError(f"image_path '{given}' leaves the folder {folder}; give a path below it, without '..'")
    path = folder / given
    if not path.is_file():
        raise ValueError(f"image file {path} does not exist; paths count from the folder of the jsonl file")
    return path


def _captions(given: Any) -> tuple[str, ...]:
    captions = given if isinstance(given, list) else [given]
    if not all(isinstance(caption, str) for caption in captions):
        raise ValueError(f"'text' is {json.dumps(given, ensure_ascii=False)}; a text or a list of texts is needed")
    if not captions or not all(caption.strip() for caption in captions):
        raise ValueError("'text' is empty; every sample needs words")
    return tuple(captions)
