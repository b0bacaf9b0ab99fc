"""What bench/open_clip.py trains on: files that this program and OpenCLIP's trainer both read.

    images/*.png            RGB, flattened onto white
    train.csv, val.csv      filepath and title, separated by tabs, which is OpenCLIP's default
    tokenizer/              trained on the titles of train.csv; both programs use it
    unequal-0/, .json       OpenCLIP's text tower with random weights, and its towers' description

The demo's images are RGBA. Flattening them beforehand keeps the choice of a background out of the
comparison: OpenCLIP would show the colours behind the transparent parts, and this program white.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
from PIL import Image

HELD_OUT_SHARE = 0.1
IMAGE_SIZE, EMBED_DIM, MAX_TEXT_TOKENS = 64, 256, 32
# A ResNet by its name in timm and torchvision, and the width of a BERT of 4 layers.
TOWERS = {
    "unequal": ("resnet50", 256),  # an image costs ten texts and more
    "near": ("resnet18", 384),
}


def bert_sizes(width: int) -> dict[str, int]:
    return {
        "num_hidden_layers": 4,
        "hidden_size": width,
        "num_attention_heads": width // 64,
        "intermediate_size": 4 * width,
    }


def text_tower(width: int) -> str:
    """For train.py's --text-tower."""
    return "bert-mini:" + ",".join(f"{key}={value}" for key, value in bert_sizes(width).items())


def prepare_data(folder: Path, language: str) -> None:
    """Write the emoji with their names in `language` to `folder`, unless that was done before.
    Errors: ValueError, FileNotFoundError."""
    if folder.is_dir():
        return
    from data.index.sources import open_source
    from data.modalities.tokenizer import train_tokenizer

    source = open_source(f"demo:{language}")
    every = map(int, source.usable())
    samples = ((source.identity(i), source.value("image", i), source.captions(i)[0]) for i in every)
    partial = folder.with_name(f"{folder.name}.partial")  # an interruption leaves no half of a set
    shutil.rmtree(partial, ignore_errors=True)
    write_samples(partial, samples, folder)
    train_tokenizer([title for _, title in read_rows(partial / "train.csv")], partial / "tokenizer")
    partial.rename(folder)


def write_samples(
    folder: Path, samples: Iterable[tuple[str, bytes, str]], final_folder: Path
) -> None:
    """Images, train.csv and val.csv of (name, encoded image, title). The paths in the csv files are
    those below `final_folder`, to which the caller moves `folder`."""
    (folder / "images").mkdir(parents=True)
    rows, hashes = [], []
    for name, encoded, title in samples:
        image = flattened(encoded)
        image.save(folder / "images" / f"{name}.png")
        rows.append((final_folder / "images" / f"{name}.png", title))
        hashes.append(blake2b(image.tobytes()).digest())
    held_out = held_out_rows(hashes, seed=0)  # the same for all seeds of training
    for file, inside in (("train.csv", False), ("val.csv", True)):
        with (folder / file).open("w", encoding="utf-8", newline="") as stream:
            writer = csv.writer(stream, delimiter="\t", lineterminator="\n")
            writer.writerow(("filepath", "title"))
            writer.writerows(row for i, row in enumerate(rows) if (i in held_out) == inside)


def flattened(encoded: bytes) -> Image.Image:
    """The encoded image on a white background, RGB."""
    image = Image.open(io.BytesIO(encoded)).convert("RGBA")
    background = Image.new("RGB", image.size, "white")
    background.paste(image, mask=image.getchannel("A"))
    return background


def held_out_rows(hashes: Sequence[bytes], seed: int) -> set[int]:
    """A random tenth of all rows, drawn among those whose image occurs once: of emoji that share
    one, such as the flags of Norway and of its islands, one held out would have been trained on."""
    count = Counter(hashes)
    unique = [row for row, digest in enumerate(hashes) if count[digest] == 1]
    size = round(HELD_OUT_SHARE * len(hashes))
    return set(np.random.default_rng(seed).choice(unique, size, replace=False).tolist())


def read_rows(file: Path) -> list[list[str]]:
    with file.open(encoding="utf-8", newline="") as stream:
        return list(csv.reader(stream, delimiter="\t"))[1:]


def open_clip_towers(data: Path, towers: str, seed: int) -> Path:
    """OpenCLIP's description of its towers, a JSON file, which names a folder with the text tower's
    weights, drawn from `seed`; both are written where they are not there.

    OpenCLIP always reads the weights of a Hugging Face text tower from its folder. It draws those
    of the image tower from its own `--seed`.
    """
    image, width = TOWERS[towers]
    folder = data / f"{towers}-{seed}"
    if not folder.is_dir():
        _save_text_tower(folder, data / "tokenizer", width, seed)
    description = {
        "embed_dim": EMBED_DIM,
        "vision_cfg": {
            "timm_model_name": image,
            "timm_pool": "avg",
            "timm_proj": "linear",
            "image_size": IMAGE_SIZE,
        },
        "text_cfg": {
            "context_length": MAX_TEXT_TOKENS,
            "hf_model_name": str(folder),
            "hf_tokenizer_name": str(data / "tokenizer"),
            "hf_pooler_type": "mean_pooler",
            "hf_proj_type": "linear",
        },
    }
    file = folder.with_suffix(".json")
    file.write_text(json.dumps(description, indent=2), encoding="utf-8")
    return file


def _save_text_tower(folder: Path, tokenizer_folder: Path, width: int, seed: int) -> None:
    import torch
    from transformers import BertConfig, BertModel

    from data.modalities.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(tokenizer_folder))
    config = BertConfig(
        vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **bert_sizes(width)
    )
    torch.manual_seed(seed)
    partial = folder.with_name(f"{folder.name}.partial")
    BertModel(config, add_pooling_layer=False).save_pretrained(partial)  # OpenCLIP pools by itself
    partial.rename(folder)
