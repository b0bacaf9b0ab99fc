"""A folder of embeddings, which other programs map.

It has for each modality an array float32 [n, D] with rows of length 1, named after it: `image.npy`,
`audio.npy`, `text.npy`. Beside each is a file with a line per row: `images.jsonl`, `audio.jsonl`,
`texts.jsonl` and so on, with `index` in the data, `id` and `where`; a text has itself as `text`
and, for each other modality, the row of its sample there (`image`, `audio`), any other value a
checksum as `content`, and the first text of its sample as `caption`. A run that compares regions
also has `region.npy` and `phrase.npy`: the lines of both have the `box` (x1, y1, x2, y2 in
fractions of the image's sides), its number among those of the image as `region`, and the phrase as
`text`, which a box without one lacks; one that compares moments has `moment.npy` beside
`phrase.npy`, whose lines have the `span` in seconds of the film, and its number as `moment`.
`about.json` says what model and what data they are of.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from common.files import make_folder, read_json, remove, replacing, write_text
from common.secrets import redacted
from data.batching.mixture import specs_of
from data.index.sources import KnownSource
from data.stored.derived import DERIVED
from data.stored.kinds import is_text
from launch.inference.embedding import Annotated, Rows
from launch.modalities import view_of

ABOUT = "about.json"
LINES = {"image": "images.jsonl", "text": "texts.jsonl"}  # others: `<modality>.jsonl`
Line = dict[str, Any]


def write_embeddings(
    folder: Path,
    rows: Mapping[str, Rows],
    source: KnownSource,
    about: Mapping[str, Any],
    annotated: Annotated | None = None,
) -> None:
    """`rows`: by modality. about.json last: a folder counts with it."""
    make_folder(folder)
    further = annotated.by_name() if annotated else {}
    for name, own in {**rows, **further}.items():
        # through a file handle: numpy would add .npy to the name of the file beside
        with replacing(folder / f"{name}.npy") as beside, beside.open("wb") as file:
            np.save(file, own.embeds.numpy())
        with (
            replacing(folder / _lines_of(name)) as beside,
            beside.open("w", encoding="utf-8") as out,
        ):
            if annotated and name in further:
                lines = annotation_lines(annotated, source, name)
            else:
                lines = lines_for(rows, source, name)
            for line in lines:
                out.write(json.dumps(line, ensure_ascii=False) + "\n")
    record = {**about, "data": specs_of(source), "modalities": [*rows, *further]}
    write_text(folder / ABOUT, json.dumps(redacted(record), indent=2) + "\n")


def lines_for(rows: Mapping[str, Rows], source: KnownSource, modality: str) -> Iterator[Line]:
    """What is written beside each row of a modality."""
    own = rows[modality]
    # of a sample the first row of each other modality
    first = {
        name: {sample: row for row, sample in reversed([*enumerate(other.sample.tolist())])}
        for name, other in rows.items()
        if name != modality
    }
    for row, i in enumerate(own.sample.tolist()):
        line = {"index": i, "id": source.identity(i), "where": source.where(i, modality)}
        if is_text(modality):
            line |= {name: known[i] for name, known in first.items() if i in known}
            yield line | {"text": own.texts[row]}
        else:
            caption = {"caption": text for text in source.captions(i)[:1]}
            yield line | {"content": _content(source, i, modality)} | caption


def annotation_lines(annotated: Annotated, source: KnownSource, modality: str) -> Iterator[Line]:
    """Of each annotation, or of each phrase. The text of an annotation is what the data says of it
    first, if anything."""
    kind, texts = annotated.kind, annotated.phrase.texts
    first = dict(zip(reversed(annotated.said_of.tolist()), reversed(texts)))
    of_phrases = modality == kind.rows[1]
    for number, row in enumerate(
        annotated.said_of.tolist() if of_phrases else range(len(annotated.of))
    ):
        i = int(annotated.of[row])
        text = texts[number] if of_phrases else first.get(row)
        yield {
            "index": i,
            "id": source.identity(i),
            "where": source.where(i, kind.of[0]),
            kind.name: int(annotated.which[row]),
            kind.extent: annotated.extent[row].tolist(),
            **({} if text is None else {"text": text}),
            "content": _content(source, i, kind.name),
        }


def _content(source: KnownSource, i: int, modality: str) -> str:
    view = view_of(modality)
    return view.content(source, i) if view else source.identity(i)


def refuse_other_data(
    folder: Path, lines: Sequence[Mapping[str, Any]], source: KnownSource, modality: str
) -> None:
    """Errors: ValueError where the samples of `source` are not those that were embedded. A text is
    as it was written down."""
    for line in () if is_text(modality) else lines:
        i = line["index"]
        of = next((name for name in DERIVED if name in line), modality)  # of a phrase
        if i >= len(source) or _content(source, i, of) != line["content"]:
            raise ValueError(
                f"--embeddings {folder}: {line['where']} is no longer what it was when it was "
                "embedded, or another data set is given; make them again without --query, or give "
                "the data of then with --val-data"
            )


def read_embeddings(
    folder: Path, model: Mapping[str, str], modality: str = "image"
) -> tuple[np.ndarray, list[Line], list[str]]:
    """Of a folder of embeddings, or of those of several held-out sets, if these weights made them:
    (those of a modality, mapped from the disk where it is one folder; their lines; the specs of the
    data). `model`: its `checksum`, the name of its `checkpoint`, and where its `run` is. Errors:
    ValueError, FileNotFoundError."""
    embeds: list[np.ndarray] = []
    lines: list[Line] = []
    specs: list[str] = []
    needed = ("index", "id", "where", "text" if is_text(modality) else "content")
    for part in _parts(folder) or [folder]:
        if not (part / ABOUT).is_file():
            raise FileNotFoundError(
                f"{part}: holds no {ABOUT}; make it with evaluate.py RUN_DIR --embeddings {part}"
            )
        about = _about(part, ("checkpoint", "checksum", "run", "data"))
        if modality not in about["modalities"]:
            raise FileNotFoundError(
                f"{part}: holds embeddings of {' and '.join(about['modalities'])}, and none of "
                f"{modality}; make them again with evaluate.py RUN_DIR --embeddings {part}, or "
                "search another modality"
            )
        if any(about[key] != model[key] for key in ("checkpoint", "checksum")):
            raise ValueError(
                f"--embeddings {folder}: are of {about['checkpoint']} in {about['run']}, not of "
                f"the weights of {model['checkpoint']} in {model['run']}; give another folder, or "
                "make them again without --query"
            )
        with _of_this_format(part), (part / _lines_of(modality)).open(encoding="utf-8") as file:
            own = [json.loads(line) for line in file]
            array = np.load(part / f"{modality}.npy", mmap_mode="r")
            if array.ndim != 2 or len(array) != len(own):
                raise ValueError(f"{len(own)} lines for an array {array.shape}")
            _ = [[line[name] for name in needed] for line in own]
        embeds.append(array)
        lines += own
        specs += about["data"]
    whole = embeds[0] if len(embeds) == 1 else np.concatenate(embeds)
    return whole, lines, list(dict.fromkeys(specs))


def refuse_other_content(folder: Path) -> None:
    """Errors: FileExistsError for a folder that holds something else than embeddings."""
    empty = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not empty and not (folder.is_dir() and _parts(folder)):
        raise FileExistsError(
            f"--embeddings {folder}: holds something else; give a new folder, or one with earlier "
            "embeddings"
        )


def forget_embeddings(folder: Path) -> None:
    """Of earlier, whatever sets they are of: none may be taken for those that come now."""
    for part in _parts(folder):
        names = _about(part)["modalities"]
        files = [file for name in names for file in (f"{name}.npy", _lines_of(name))]
        for file in [*files, ABOUT]:
            remove(part / file, folder)


def _parts(folder: Path) -> list[Path]:
    """Itself, or the folders in it, of several held-out sets, that hold embeddings."""
    if (folder / ABOUT).is_file():
        return [folder]
    return sorted(file.parent for file in folder.glob(f"*/{ABOUT}"))


def _about(folder: Path, keys: Sequence[str] = ()) -> dict[str, Any]:
    """The modalities, and these keys."""
    with _of_this_format(folder):
        read = read_json(folder / ABOUT)
        names = read["modalities"]
        # they become names of files, which nobody may lead out of the folder
        if not names or not all(isinstance(name, str) and name.isidentifier() for name in names):
            raise ValueError(f"modalities {names!r}: names of modalities are needed")
        return {key: read[key] for key in ("modalities", *keys)}


@contextmanager
def _of_this_format(folder: Path) -> Iterator[None]:
    """Whatever fails in reading embeddings as one ValueError."""
    try:
        yield
    except (ValueError, LookupError, TypeError, OSError, EOFError) as error:
        raise ValueError(
            f"--embeddings {folder}: was written in another format, or is damaged "
            f"({type(error).__name__}: {error}); remove it, and make it again with evaluate.py "
            f"RUN_DIR --embeddings {folder}"
        ) from error


def _lines_of(modality: str) -> str:
    return LINES.get(modality, f"{modality}.jsonl")
