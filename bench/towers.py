"""Which models of timm, torchvision and OpenCLIP can be towers, and into how many layers?

    python bench/towers.py                              all of them; writes models/TOWERS.md
    python bench/towers.py timm:resnet18 swin_t         some, one line each

Each is made, recorded and cut on the meta device, at the image size that it was published with: no
memory, no arithmetic. About a second each, half an hour for all on one core.

Expected. All that their library builds; a layer for each of the library's blocks, and two for what
comes before and behind them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # not this folder, where a script is called open_clip
TABLE = ROOT / "models" / "TOWERS.md"
SHORT = 6  # layers; fewer are too few for a pipeline


@dataclass(frozen=True)
class Row:
    """A tower: `library` and `family` as in the table; no `layers`: it could not be made, `notes`
    says why."""

    name: str
    library: str
    family: str
    layers: int
    notes: tuple[str, ...] = ()


def names() -> Iterator[tuple[str, str, str, int]]:
    """Name, library, family and image size of every tower; 0: a text tower."""
    import timm
    import torchvision

    from models.towers.libraries import open_clip
    from models.towers.libraries.torchvision_by_hand import ARCHITECTURES

    for name in timm.list_models():
        config = timm.get_pretrained_cfg(name)
        family = timm.model_entrypoint(name).__module__.rpartition(".")[2]
        yield f"timm:{name}", "timm", family, config.input_size[-1] if config else 224
    for name in torchvision.models.list_models(module=torchvision.models):
        weights = torchvision.models.get_model_weights(name)
        size = weights.DEFAULT.transforms().crop_size[0] if len(weights) else 224
        family = torchvision.models.get_model_builder(name).__module__.rpartition(".")[2]
        if name not in ARCHITECTURES:
            yield name, "torchvision", family, size
    for name in open_clip.names():
        vision = open_clip.model_config(f"{open_clip.PREFIX}{name}")["vision_cfg"]
        size = vision.get("image_size", 224)
        size = size if isinstance(size, int) else size[0]
        yield f"open_clip:{name}", "OpenCLIP, images", _open_clip_family(vision), size
        yield f"open_clip:{name}", "OpenCLIP, texts", "text", 0


def _open_clip_family(vision: dict) -> str:
    if "timm_model_name" in vision:
        return f"timm: {vision['timm_model_name'].split('_')[0]}"
    return "ModifiedResNet" if isinstance(vision["layers"], list) else "VisionTransformer"


def row(name: str, library: str, family: str, size: int) -> Row:
    """Make the tower on the meta device."""
    from models.towers.image import image_tower
    from models.towers.text import text_tower

    try:
        tower = image_tower(name, size) if size else text_tower(name, None, 16)
    except (ValueError, RuntimeError) as error:
        return Row(name, library, family, 0, (str(error).replace("\n", " "),))
    return Row(name, library, family, len(tower.specs), tuple(tower.config["notes"]))


def summary(rows: Iterable[Row], library: str) -> str:
    """One sentence on the towers of a library."""
    rows = [each for each in rows if each.library == library]
    made = [each.layers for each in rows if each.layers]
    return (
        f"{library}: {len(made)} of {len(rows)} names are towers, of {min(made)} to {max(made)} "
        f"layers, {statistics.median(made):g} on median; {sum(n < SHORT for n in made)} have fewer "
        f"than {SHORT}, {made.count(1)} of these one"
    )


def table(rows: list[Row]) -> str:
    """Markdown: a section for each library, a line for each family."""
    parts = [
        "# Towers that adapters make\n\nWritten by `python bench/towers.py`. Layers are counted "
        "without the head, at the image size that a model was published with."
    ]
    for library in dict.fromkeys(each.library for each in rows):
        of_library = [each for each in rows if each.library == library]
        lines = [
            f"## {library}\n\n{summary(rows, library)}.\n",
            "| family | names | layers | cut less, or not at all |\n|---|---|---|---|",
        ]
        for family in sorted({each.family for each in of_library}):
            members = [each for each in of_library if each.family == family]
            counts = sorted(each.layers for each in members)
            spread = f"{counts[0]} to {counts[-1]}" if counts[0] < counts[-1] else str(counts[0])
            lines.append(f"| {family} | {len(members)} | {spread} | {_reasons(members)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _reasons(members: list[Row]) -> str:
    """Each reason once, with the number of names that it is of."""
    found: dict[str, int] = {}
    for member in members:
        for reason in dict.fromkeys(_reason(note) for note in member.notes):
            found[reason] = found.get(reason, 0) + 1
    words = (f"{reason} ({number})" for reason, number in found.items())
    return "; ".join(words).replace("|", "/")


def _reason(note: str) -> str:
    """A note without the names in it."""
    if "texts go through transformers'" in note:
        return "texts of transformers: a tower of its own"
    if "no gradient comes back" in note:
        return "a block is given what it does not use"
    if "tensors would travel" in note:
        return "more than six tensors between blocks"
    if "more than a sequence" in note or "which is no tensor" in note:
        return "blocks hand on more than tensors"
    if "share weights" in note or "changes its input in place" in note:
        return note.rpartition(": ")[2]
    return note if len(note) < 160 else f"{note[:157]}..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of towers (default: all)")
    wanted = parser.parse_args().names
    start, rows = time.monotonic(), []
    for each in names():
        if wanted and each[0] not in wanted:
            continue
        rows.append(row(*each))
        print(f"{rows[-1].layers:4}  {each[1]}  {each[0]}  {'; '.join(rows[-1].notes)}", flush=True)
    if not wanted:
        TABLE.write_text(table(rows), encoding="utf-8")
        print(f"{TABLE}: {len(rows)} towers in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
