"""What bench/open_clip.py trains on: files that this program and OpenCLIP's trainer both read, and
the start of OpenCLIP's towers.

    data/en/images/*.png              RGB, flattened onto white
    data/en/train.csv, val.csv        columns filepath and title, separated by tabs, which is OpenCLIP's default
    data/en/tokenizer/                trained on the titles of train.csv; both programs use it
    data/en/text-seed-0/              a BERT of transformers with random weights, of which OpenCLIP makes its text tower

The demo's images are RGBA. Flattening them beforehand keeps the choice of a background out of the
comparison: OpenCLIP would show the colours behind the transparent parts, and this program a random
light colour.
"""

from __future__ import annotations

import csv
import io
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

HELD_OUT_SHARE = 0.1
SPLIT_SEED = 0  # the same split for every seed of training, so that seeds differ in training alone
IMAGE_SIZE = 64
EMBED_DIM = 256
MAX_TEXT_TOKENS = 32


@dataclass(frozen=True)
class Towers:
    """An architecture that both programs have: a ResNet by its name in timm and torchvision, and a
    BERT by its sizes."""

    image: str
    num_layers: int
    width: int

    @property
    def num_heads(self) -> int:
        return self.width // 64

    @property
    def text(self) -> str:
        """For train.py's --text-tower."""
        sizes = {
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.width,
            "num_attention_heads": self.num_heads,
            "intermediate_size": 4 * self.width,
        }
        return "bert-mini:" + ",".join(f"{key}={value}" for key, value in sizes.items())


TOWERS = {
    "unequal": Towers("resnet50", num_layers=4, width=256),  # an image costs ten texts and more
    "near": Towers("resnet18", num_layers=4, width=384),
}


class Sample(NamedTuple):
    """`encoded`: the file."""

    name: str
    encoded: bytes
    title: str


@dataclass(frozen=True)
class Files:
    """Where the files of one data set are."""

    folder: Path

    @property
    def train(self) -> Path:
        return self.folder / "train.csv"

    @property
    def held_out(self) -> Path:
        return self.folder / "val.csv"

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer"


def prepare_data(folder: Path, language: str) -> Files:
    """Write the emoji with their names in `language` to `folder`, unless that was done before.
    Errors: ValueError, FileNotFoundError."""
    files = Files(folder)
    if not folder.is_dir():
        from data.modalities.tokenizer import train_tokenizer

        partial = folder.with_name(
            f"{folder.name}.partial"
        )  # renamed when it is whole, so an interruption leaves no half of a data set
        shutil.rmtree(partial, ignore_errors=True)
        write_samples(partial, demo_samples(language), folder)
        titles = [row["title"] for row in read_rows(partial / files.train.name)]
        train_tokenizer(titles, save_to=partial / files.tokenizer.name)
        partial.rename(folder)
    return files


def demo_samples(language: str) -> Iterator[Sample]:
    """The emoji in the project's demo data, each with one name."""
    from data.index.sources import open_source

    source = open_source(f"demo:{language}")
    for i in map(int, source.usable()):
        yield Sample(source.identity(i), source.value("image", i), source.captions(i)[0])


def write_samples(folder: Path, samples: Iterable[Sample], final_folder: Path) -> None:
    """Images, train.csv and val.csv. The paths in the csv files are those below `final_folder`,
    to which the caller moves `folder`."""
    (folder / "images").mkdir(parents=True)
    rows, hashes = [], []
    for sample in samples:
        image = flattened(sample.encoded)
        image.save(folder / "images" / f"{sample.name}.png")
        rows.append((final_folder / "images" / f"{sample.name}.png", sample.title))
        hashes.append(blake2b(image.tobytes()).digest())
    held_out = held_out_rows(hashes, HELD_OUT_SHARE, SPLIT_SEED)
    write_rows(folder / "train.csv", [row for i, row in enumerate(rows) if i not in held_out])
    write_rows(folder / "val.csv", [row for i, row in enumerate(rows) if i in held_out])


def flattened(encoded: bytes) -> Image.Image:
    """The encoded image on a white background, RGB."""
    image = Image.open(io.BytesIO(encoded)).convert("RGBA")
    background = Image.new("RGB", image.size, "white")
    background.paste(image, mask=image.getchannel("A"))
    return background


def held_out_rows(hashes: Sequence[bytes], share: float, seed: int) -> set[int]:
    """A random `share` of all rows, drawn among those whose image occurs once.

    Some emoji share one image, such as the flags of Norway and of its islands. One of them held
    out would be a sample that was trained on.
    """
    count = Counter(hashes)
    unique = [row for row, digest in enumerate(hashes) if count[digest] == 1]
    drawn = np.random.default_rng(seed).choice(
        unique, size=round(share * len(hashes)), replace=False
    )
    return set(drawn.tolist())


def write_rows(file: Path, rows: Iterable[tuple[Path, str]]) -> None:
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, delimiter="\t", lineterminator="\n")
        writer.writerow(("filepath", "title"))
        writer.writerows(rows)


def read_rows(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream, delimiter="\t"))


def text_weights(files: Files, towers: Towers, seed: int) -> Path:
    """The folder of OpenCLIP's text tower with random weights drawn from `seed`; written where it
    is not there yet.

    OpenCLIP's trainer always reads the weights of a Hugging Face text tower from its folder, so
    seeds that are to begin with different weights need a folder each. The image tower has no such
    folder: OpenCLIP draws its weights from its own `--seed`.
    """
    folder = files.folder / f"text-{towers.num_layers}x{towers.width}-seed-{seed}"
    if not folder.is_dir():
        _save_text_tower(folder, files.tokenizer, towers, seed)
    return folder


def tower_description(towers: Towers, weights: Path, tokenizer: Path) -> dict[str, Any]:
    """A model configuration of OpenCLIP, with the sizes of `towers`."""
    return {
        "embed_dim": EMBED_DIM,
        "vision_cfg": {
            "timm_model_name": towers.image,
            "timm_pool": "avg",
            "timm_proj": "linear",
            "image_size": IMAGE_SIZE,
        },
        "text_cfg": {
            "context_length": MAX_TEXT_TOKENS,
            "hf_model_name": str(weights),
            "hf_tokenizer_name": str(tokenizer),
            "hf_pooler_type": "mean_pooler",
            "hf_proj_type": "linear",
        },
    }


def _save_text_tower(folder: Path, tokenizer_folder: Path, towers: Towers, seed: int) -> None:
    import torch
    from transformers import BertConfig, BertModel

    from data.modalities.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(tokenizer_folder))
    config = BertConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        num_hidden_layers=towers.num_layers,
        hidden_size=towers.width,
        num_attention_heads=towers.num_heads,
        intermediate_size=4 * towers.width,
    )
    torch.manual_seed(seed)
    partial = folder.with_name(f"{folder.name}.partial")
    BertModel(config, add_pooling_layer=False).save_pretrained(partial)  # OpenCLIP pools by itself
    partial.rename(folder)
