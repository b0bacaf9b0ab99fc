"""Maps to learn regions from: wide images with 12 labelled boxes each, as JSONL."""

import json
import math
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

COLOURS = ("red", "green", "blue", "yellow", "orange", "purple", "black", "cyan")
FIGURES = {"square": 4, "triangle": 3, "hexagon": 6, "circle": 40, "diamond": -4, "star": 5}
BOXES, CELL = 12, 48  # of a map; pixels of a side of a cell, which holds one box at most


def write_maps(folder: Path, number: int, shape: tuple[int, int] = (8, 2), seed: int = 0) -> Path:
    """`number` maps of `shape` cells, wide and high, as JSONL; no phrase is twice in a map."""
    random, lines = np.random.default_rng(seed), []
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(number):
        image = Image.new("RGB", (shape[0] * CELL, shape[1] * CELL), "white")
        cells = random.choice(shape[0] * shape[1], BOXES, replace=False)
        labels = random.choice(len(COLOURS) * len(FIGURES), BOXES, replace=False)
        regions = []
        for cell, label in zip(cells.tolist(), labels.tolist()):
            colour, figure = COLOURS[label % len(COLOURS)], [*FIGURES][label // len(COLOURS)]
            side = int(random.integers(32, CELL))
            left, top = (
                CELL * at + int(random.integers(CELL - side))
                for at in (cell % shape[0], cell // shape[0])
            )
            ImageDraw.Draw(image).polygon(corners(FIGURES[figure], left, top, side), colour)
            regions.append({"box": [left, top, side, side], "text": f"a {colour} {figure}"})
        image.save(folder / f"{i}.png")
        text = "a map with " + " and ".join(region["text"] for region in regions[:3])
        lines.append(json.dumps({"image_path": f"{i}.png", "text": text, "regions": regions}))
    (folder / "maps.jsonl").write_text("\n".join(lines))
    return folder / "maps.jsonl"


def corners(number: int, left: float, top: float, side: float) -> list[tuple[float, float]]:
    """Of a figure with so many corners in a square; -4: a square on its tip; 5: a star."""
    count = 10 if number == 5 else abs(number)
    turned = math.pi / 4 if number == 4 else -math.pi / 2
    found = []
    for k in range(count):
        radius = side / 2 * (0.4 if number == 5 and k % 2 else 1)
        angle = turned + 2 * math.pi * k / count
        found.append(
            (left + side / 2 + radius * math.cos(angle), top + side / 2 + radius * math.sin(angle))
        )
    return found
