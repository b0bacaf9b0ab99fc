"""Which models of four libraries can be towers, and into how many layers?

    python docs/towers.py                 writes models/TOWERS.md, its summary into models/README.md
    python docs/towers.py --rows FILE     keeps each row in FILE, and goes on from there

Each is made, traced and cut on the meta device, at the image size that it was published with: no
memory, no arithmetic. One to three seconds each, an hour for all on one core.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
TABLE, README = ROOT / "models" / "TOWERS.md", ROOT / "models" / "README.md"
SUMMARY = re.compile(r"^\| library \| names \|.+?(?=\n\n)", re.M | re.S)  # in both
SHORT = 6  # layers; fewer are too few for a pipeline
PACKAGES = ("timm", "torchvision", "open_clip_torch", "transformers")
IMAGES, TEXTS, SOUNDS = "images", "texts", "sounds"
PREFIXES = ("timm:", "open_clip:", "hf:")  # left out in the lists of names of a library


@dataclass(frozen=True)
class Row:
    """A tower: `library` and `family` as in the table. `size`: pixels a side of the images that it
    was published with, 0 for texts and sounds; `width`: of its features. No `layers`: it could not
    be made, and `notes` says why."""

    name: str
    library: str
    family: str
    size: int
    layers: int
    width: int
    notes: tuple[str, ...] = ()


def names() -> Iterator[tuple[str, str, str, int]]:
    """Name, library, family and image size of every tower; 0: a text or an audio tower."""
    import timm
    import torchvision

    for name in timm.list_models():
        config = timm.get_pretrained_cfg(name)
        family = timm.model_entrypoint(name).__module__.rpartition(".")[2]
        yield f"timm:{name}", "timm", family, config.input_size[-1] if config else 224
    for name in torchvision.models.list_models(module=torchvision.models):
        weights = torchvision.models.get_model_weights(name)
        size = weights.DEFAULT.transforms().crop_size[0] if len(weights) else 224
        family = torchvision.models.get_model_builder(name).__module__.rpartition(".")[2]
        yield name, "torchvision", family, size
    yield from _of_open_clip()
    yield from _of_transformers()


def _of_open_clip() -> Iterator[tuple[str, str, str, int]]:
    from models.towers.libraries import open_clip

    for name in open_clip.names():
        config = open_clip.model_config(f"{open_clip.PREFIX}{name}")
        vision, text = config["vision_cfg"], config["text_cfg"]
        size = vision.get("image_size", 224)
        size = size if isinstance(size, int) else size[0]
        family = "TextTransformer"
        if "hf_model_name" in text:
            family = f"transformers: {text['hf_model_name'].rpartition('/')[2].split('-')[0]}"
        yield f"open_clip:{name}", f"OpenCLIP, {IMAGES}", _open_clip_family(vision), size
        yield f"open_clip:{name}", f"OpenCLIP, {TEXTS}", family, 0


def _open_clip_family(vision: dict) -> str:
    if "timm_model_name" in vision:
        return f"timm: {vision['timm_model_name'].split('_')[0]}"
    return "ModifiedResNet" if isinstance(vision["layers"], list) else "VisionTransformer"


def _of_transformers() -> Iterator[tuple[str, str, str, int]]:
    from models.towers.libraries import (
        transformers_audio,
        transformers_image,
        transformers_text,
    )

    for name, preset in transformers_image.PRESETS.items():
        size = getattr(preset.config(), "image_size", 256)
        yield f"hf:{name}", f"transformers, {IMAGES}", preset.model_type, size
    for name, preset in transformers_text.PRESETS.items():
        yield name, f"transformers, {TEXTS}", preset.model_type, 0
    for name, preset in transformers_audio.PRESETS.items():
        yield f"hf:{name}", f"transformers, {SOUNDS}", preset.model_type, 0


def row(name: str, library: str, family: str, size: int) -> Row:
    """Make the tower on the meta device."""
    from models.towers.audio import audio_tower
    from models.towers.image import image_tower
    from models.towers.text import text_tower

    try:
        if library.endswith(SOUNDS):
            tower = audio_tower(name)
        else:
            tower = image_tower(name, size) if size else text_tower(name, None, 16)
    except (ValueError, RuntimeError) as error:
        return Row(name, library, family, size, 0, 0, (str(error).replace("\n", " "),))
    notes = tuple(tower.config.get("notes", ()))
    return Row(name, library, family, size, len(tower.specs), tower.width, notes)


# -- the page


def summary(rows: Iterable[Row], num_names: Mapping[str, int]) -> str:
    """A Markdown table: of each library how many names it has (`num_names`), and what became of
    those that were tried."""
    lines = [
        "| library | names | tried | towers | layers: least, median, most | fewer than "
        f"{SHORT} | one |",
        "|---|---|---|---|---|---|---|",
    ]
    by_library: dict[str, list[int]] = {}
    for each in rows:
        by_library.setdefault(each.library, []).append(each.layers)
    for library, layers in by_library.items():
        made = [number for number in layers if number]
        spread = f"{min(made)}, {statistics.median(made):g}, {max(made)}"
        short = sum(number < SHORT for number in made)
        lines.append(
            f"| {library} | {num_names[library]} | {len(layers)} | {len(made)} | {spread} | "
            f"{short} | {made.count(1)} |"
        )
    return "\n".join(lines)


def page(rows: Sequence[Row], every: Sequence[tuple[str, str, str, int]]) -> str:
    """Markdown: a section for each library with a table of its families, a list of all names with
    their layers, and the names that are no tower. `every`: of `names`."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    parts = [
        "# Towers that libraries' models make\n\nWritten by `python docs/towers.py`, with "
        f"{versions}; checked by `tests/docs/test_towers.py`. Layers are counted without the head, "
        "at the image size that a model was published with.",
        summary(rows, Counter(library for _, library, _, _ in every)),
    ]
    families = Counter(each[1:3] for each in every)
    for library in dict.fromkeys(each.library for each in rows):
        own = [each for each in rows if each.library == library]
        parts += _section(library, own, families)
    return "\n\n".join(parts) + "\n"


def _section(
    library: str, rows: Sequence[Row], families: Mapping[tuple[str, ...], int]
) -> Iterator[str]:
    """`families`: (library, family) -> how many names it has."""
    yield f"## {library}"
    lines = [
        "| family | names tried | in | out | layers | cut into fewer than it has blocks (names) |",
        "|---|---|---|---|---|---|",
    ]
    listed = []
    for family in sorted({each.family for each in rows}):
        members = [each for each in rows if each.family == family]
        made = [each for each in members if each.layers]
        pixels = [each.size for each in made]
        without_pixels = "spectrogram" if library.endswith(SOUNDS) else "tokens"
        size = without_pixels if pixels and not pixels[0] else f"{_spread(pixels)} px"
        cells = (size, _spread([m.width for m in made]), _spread([m.layers for m in made]))
        lines.append(
            f"| {family} | {len(members)} of {families[library, family]} | "
            f"{' | '.join(cells) if made else '– | – | –'} | {_reasons(made)} |"
        )
        if made:
            listed.append(_layers_of_names(family, made))
    yield "\n".join(lines)
    yield f"Layers of each name of {library}:"
    yield "\n".join(listed)
    refused = [each for each in rows if not each.layers]
    if refused:
        yield f"No towers of {library}, with the reason:"
        yield "\n".join(f"- `{_short(each.name)}`: {_reason(each.notes[0])}" for each in refused)


def _layers_of_names(family: str, rows: Sequence[Row]) -> str:
    """`- family: 10 `name` `name`; 18 `name`` ."""
    by_layers: dict[int, list[str]] = {}
    for each in sorted(rows, key=lambda each: (each.layers, each.name)):
        by_layers.setdefault(each.layers, []).append(f"`{_short(each.name)}`")
    return f"- {family}: " + "; ".join(f"{n} {' '.join(names)}" for n, names in by_layers.items())


def _short(name: str) -> str:
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
    return name.removeprefix(prefix)


def _spread(values: Sequence[int]) -> str:
    if not values:
        return ""
    return f"{min(values)} to {max(values)}" if min(values) < max(values) else str(values[0])


def _reasons(members: Iterable[Row]) -> str:
    """Each reason once, with the number of names that it is of."""
    found = Counter(
        reason
        for member in members
        for reason in dict.fromkeys(_reason(note) for note in member.notes)
    )
    return "; ".join(f"{reason} ({number})" for reason, number in found.items())


def _reason(note: str) -> str:
    """A note without the names in it."""
    note = note.replace("|", "/")
    if "texts go through transformers'" in note:
        return "its texts go through a model of transformers, which is a tower of its own"
    if "no gradient comes back" in note:
        return "a block is given what it does not use"
    if "tensors would travel" in note:
        return "more than six tensors between blocks"
    if "more than a sequence" in note or "which is no tensor" in note:
        return "blocks hand on more than tensors"
    if "share weights" in note or "changes its input in place" in note:
        return note.rpartition(": ")[2]
    return note if len(note) < 200 else f"{note[:197]}..."


def read_rows(file: Path | None) -> dict[tuple[str, str], Row]:
    """(name, library) -> the row in a file of JSON lines; none where there is no file."""
    if file is None or not file.is_file():
        return {}
    records = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    rows = (Row(**{**record, "notes": tuple(record["notes"])}) for record in records)
    return {(each.name, each.library): each for each in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=Path, metavar="FILE", help="JSON lines, read and added to")
    arguments = parser.parse_args()
    rows, every, known = [], list(names()), read_rows(arguments.rows)
    for each in every:
        rows.append(known.get(each[:2]) or row(*each))
        if each[:2] not in known:
            print(f"{rows[-1].layers:4}  {each[1]}  {each[0]}  {'; '.join(rows[-1].notes)}")
            if arguments.rows:
                with arguments.rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(rows[-1])) + "\n")
    text = page(rows, every)
    TABLE.write_text(text, encoding="utf-8")
    before = README.read_text(encoding="utf-8")
    README.write_text(SUMMARY.sub(SUMMARY.search(text)[0], before), encoding="utf-8")


if __name__ == "__main__":
    main()
