"""A plain training loop for regions and phrases, to compare this project with: PIL, torch, torchvision
and transformers, and nothing of ours. Also makes the data: maps, wide images with 12 labelled boxes.

A view is a rectangle of the image, stretched to a rectangle of the input; the rest of the input is
black. Boxes are x1, y1, x2, y2.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn
from torch.nn import functional as F
from torchvision.ops import roi_align
from transformers import BertConfig, BertModel, ConvNextConfig, ConvNextModel

COLOURS = ("red", "green", "blue", "yellow", "orange", "purple", "black", "cyan")
FIGURES = {"square": 4, "triangle": 3, "hexagon": 6, "circle": 40, "diamond": -4, "star": 5}
BOXES, CELL = 12, 48  # of a map; pixels of a side of a cell, which holds one box at most
VIEWS = ("crop", "squash", "pad", "keep")
HIDDEN, DEPTHS = [32, 64, 128, 192], [1, 1, 1, 1]
Rectangle = tuple[float, float, float, float]


# -- data


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


def read_rows(file: Path) -> list[tuple[Image.Image, str, np.ndarray, list[str]]]:
    """Image, caption, boxes [n, 4] in its pixels and phrases of each line."""
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        image = Image.open(file.parent / row["image_path"]).convert("RGB")
        boxes = np.array([region["box"] for region in row["regions"]], float).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        rows.append((image, row["text"], boxes, [region["text"] for region in row["regions"]]))
    return rows


# -- views


def rectangles(
    view: str,
    size: tuple[int, int],
    side: int,
    boxes: np.ndarray,
    random: np.random.Generator | None,
) -> tuple[Rectangle, Rectangle]:
    """What a view shows of an image of `size` (width, height), and where it stands in the input.
    Without `random` that of an evaluation; else 80 to 100 % of the area, a tenth wider or
    narrower."""
    whole = min(size), min(size)
    if view in ("squash", "pad"):
        whole = size
    if random is None:
        left, top = ((a - b) / 2 for a, b in zip(size, whole))
        width, height = whole
    else:
        area, ratio = random.uniform(0.8, 1), math.exp(random.uniform(math.log(0.9), math.log(1.1)))
        width, height = (
            min(a, b * math.sqrt(area * r)) for a, b, r in zip(size, whole, (ratio, 1 / ratio))
        )
        left, top = random.uniform(0, size[0] - width), random.uniform(0, size[1] - height)
        if view == "keep":  # a crop that holds one of the boxes, whichever
            x1, y1, x2, y2 = boxes[random.integers(len(boxes))]
            left = random.uniform(max(0, x2 - width), min(x1, size[0] - width))
            top = random.uniform(max(0, y2 - height), min(y1, size[1] - height))
    shown = left, top, left + width, top + height
    if view != "pad":
        return shown, (0, 0, side, side)
    scale = side / max(width, height)
    x, y = (side - scale * width) / 2, (side - scale * height) / 2
    return shown, (x, y, side - x, side - y)


def seen(
    view: str,
    image: Image.Image,
    boxes: np.ndarray,
    side: int,
    random: np.random.Generator | None = None,
) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """The input [3, side, side], the boxes in its pixels, and which of them are in it by half."""
    (x1, y1, x2, y2), (u1, v1, u2, v2) = rectangles(view, image.size, side, boxes, random)
    put = tuple(round(each) for each in (u1, v1, u2, v2))
    out = Image.new("RGB", (side, side))
    out.paste(
        image.resize(
            (put[2] - put[0], put[3] - put[1]), Image.Resampling.BICUBIC, (x1, y1, x2, y2)
        ),
        put[:2],
    )
    scale = np.array([(u2 - u1) / (x2 - x1), (v2 - v1) / (y2 - y1)] * 2)
    placed = (boxes - np.array([x1, y1, x1, y1])) * scale + np.array([u1, v1, u1, v1])
    cut = placed.clip(0, side)
    area, part = ((each[:, 2:] - each[:, :2]).prod(1) for each in (placed, cut))
    pixels = torch.from_numpy(np.array(out)).permute(2, 0, 1) / 127.5 - 1
    return pixels, cut, part >= area / 2


# -- model


class Model(nn.Module):
    """A small ConvNeXt whose last two maps are read at boxes by RoIAlign, and a small BERT."""

    def __init__(self, vocabulary: int, width: int = 64) -> None:
        super().__init__()
        convnext = ConvNextConfig(hidden_sizes=HIDDEN, depths=DEPTHS)
        self.image = ConvNextModel(convnext)
        bert = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = BertConfig(vocab_size=vocabulary, **bert, intermediate_size=256)
        self.text = BertModel(config, add_pooling_layer=False)
        self.image_projection = nn.Linear(HIDDEN[-1], width, bias=False)
        self.text_projection = nn.Linear(64, width, bias=False)
        both = sum(HIDDEN[-2:])
        self.region_projection = nn.Sequential(nn.LayerNorm(both), nn.Linear(both, width))
        self.scales = nn.Parameter(torch.full((2,), math.log(1 / 0.07)))

    def images(
        self, pixels: torch.Tensor, boxes: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Embeddings of images and of their boxes, which are given for each image."""
        out = self.image(pixels, output_hidden_states=True)
        maps = out.hidden_states[-2:]
        side = pixels.shape[-1]
        found = [
            roi_align(m, [*boxes], 1, m.shape[-1] / side, aligned=True).flatten(1) for m in maps
        ]
        regions = self.region_projection(torch.cat(found, 1))
        return (
            F.normalize(self.image_projection(out.pooler_output), dim=-1),
            F.normalize(regions, dim=-1),
        )

    def texts(self, ids: torch.Tensor) -> torch.Tensor:
        """[n, L], 0 behind their ends."""
        first = self.text(ids, attention_mask=(ids > 0).long()).last_hidden_state[:, 0]
        return F.normalize(self.text_projection(first), dim=-1)


def masked_infonce(
    one: torch.Tensor, other: torch.Tensor, key: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Both ways; what is equal to a row's own is in none of its sums."""
    logits = scale.clamp(max=math.log(100)).exp() * one @ other.T
    equal = (key[:, None] == key) & ~torch.eye(len(key), dtype=torch.bool)
    logits, target = logits.masked_fill(equal, -math.inf), torch.arange(len(key))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


# -- training


class Words:
    """Words -> numbers: 0 none, 1 the start."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.key = {text: n for n, text in enumerate(dict.fromkeys(texts))}
        self.number = {
            word: n + 2 for n, word in enumerate(sorted({w for t in texts for w in t.split()}))
        }

    def ids(self, texts: Sequence[str]) -> torch.Tensor:
        rows = [torch.tensor([1, *(self.number[word] for word in text.split())]) for text in texts]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def train(
    file: Path,
    test: Path,
    view: str,
    steps: int = 150,
    batch: int = 24,
    side: int = 96,
    seed: int = 0,
    rate: float = 1e-3,
    tested: str = "",
) -> dict[str, float]:
    """Train on `file` by one view, test on `test` by it or another. Returns how many boxes a step
    trained, and what `right` finds."""
    torch.manual_seed(seed)
    random, rows = np.random.default_rng(seed), read_rows(file)
    words = Words([text for _, caption, _, phrases in rows for text in (caption, *phrases)])
    model = Model(len(words.number) + 2)
    optimizer = torch.optim.AdamW(model.parameters(), rate, (0.9, 0.98), weight_decay=0.1)
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min((n + 1) / warm, (1 + math.cos(math.pi * n / steps)) / 2)
    )
    order, trained = [], 0
    for _ in range(steps):
        if len(order) < batch:
            order = random.permutation(len(rows)).tolist()
        chosen, order = [rows[i] for i in order[:batch]], order[batch:]
        views = [seen(view, image, boxes, side, random) for image, _, boxes, _ in chosen]
        boxes = [torch.from_numpy(cut[there]).float() for _, cut, there in views]
        phrases = [
            p for (*_, own), (_, _, there) in zip(chosen, views) for p, t in zip(own, there) if t
        ]
        key = torch.tensor([words.key[phrase] for phrase in phrases])
        images, regions = model.images(torch.stack([pixels for pixels, _, _ in views]), boxes)
        texts = model.texts(words.ids([*(caption for _, caption, _, _ in chosen), *phrases])).split(
            [batch, len(phrases)]
        )
        loss = masked_infonce(images, texts[0], torch.arange(batch), model.scales[0])
        loss = loss + masked_infonce(regions, texts[1], key, model.scales[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        trained += len(phrases)
    found = right(model, words, read_rows(test), tested or view, side)
    return {"boxes_a_step": trained / steps, **found}


@torch.no_grad()
def right(
    model: Model, words: Words, rows: Sequence[Any], view: str, side: int
) -> dict[str, float]:
    """The part of all phrases that choose their box among those of their image in the view, that of
    the phrases whose box is in it, and the part of boxes that are."""
    model.eval()
    count = there_all = hits = 0
    for image, _, boxes, phrases in rows:
        pixels, cut, there = seen(view, image, boxes, side)
        _, regions = model.images(pixels[None], [torch.from_numpy(cut[there]).float()])
        own = [phrase for phrase, t in zip(phrases, there) if t]
        count, there_all = count + len(phrases), there_all + len(own)
        if own:
            hits += int(
                (model.texts(words.ids(own)) @ regions.T).argmax(1).eq(torch.arange(len(own))).sum()
            )
    return {"right": hits / count, "of_seen": hits / max(1, there_all), "seen": there_all / count}
