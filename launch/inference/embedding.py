"""Embeddings of a data set by a trained model, on one device: in memory, or in a folder that other
programs map.

A folder of embeddings has `image.npy` float32 [n, D] and `text.npy` float32 [m, D], rows of length
1; `images.jsonl`, a line per row of the first with `index` in the data, `id`, `where` and
`content`, a checksum of the image; `texts.jsonl`, a line per row of the second with `image`, its
row in the first, and `text`; and `about.json`, which says what model they are of.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.batching.mixture import specs_of
from data.batching.sampler import evaluation_requests
from data.index.sources import Source
from data.loader import MicroBatchDataset, micro_batches
from data.modalities.audio.modality import AudioModality
from data.modalities.image import ImageModality
from data.modalities.tokenizer import batch_tokens, length_multiple
from data.modalities.transforms import eval_transform
from data.progress import progress_bar
from launch.inference.trained import Trained
from launch.inputs import languages_of
from launch.run.report import show
from launch.settings.modalities import audio_features
from models.towers.fusion import Fusion

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Name -> what autocast computes in; None: nothing is cast."""
FILES = ("about.json", "image.npy", "text.npy", "images.jsonl", "texts.jsonl")


@dataclass(frozen=True)
class Embedded:
    """n images and m texts, on the CPU, of length 1. An image that cannot be read is left out,
    with its texts."""

    index: Tensor  # [n] int64, in the data
    image: Tensor  # [n, D] float32
    text: Tensor  # [m, D] float32
    image_of_text: Tensor  # [m] int64, row of `image`
    texts: Sequence[str]  # m

    @property
    def is_paired(self) -> bool:
        """Is text i that of image i, and no other?"""
        return torch.equal(self.image_of_text, torch.arange(len(self.image)))


class Embedder:
    """The towers of `trained` on `device`, `batch_size` images or texts at a time. `precision`: a
    key of `PRECISIONS`; embeddings are float32 in any."""

    def __init__(
        self,
        trained: Trained,
        device: torch.device | str,
        batch_size: int,
        workers: int,
        precision: str = "fp32",
    ):
        self.precision = precision
        self.trained, self.device, self.batch_size, self.workers = (
            trained,
            torch.device(device),
            batch_size,
            workers,
        )
        layers = iter(trained.layers)
        self._layers = {
            tower.branch: list(islice(layers, len(tower.specs))) for tower in trained.towers
        }
        self._languages = languages_of(trained.towers)

    def images(self, source: Source, subset: np.ndarray) -> tuple[Tensor, Tensor]:
        """Of the samples `subset` whose images can be read: (their indices int64 [n], [n, D])."""
        index, embeds = [], []
        for batch, outputs in self._of_images(source, subset):
            loaded = batch["image_index"] >= 0  # below: could not be read
            index.append(batch["image_index"][loaded])
            embeds.append(outputs["image_embeds"].float().cpu()[loaded])
        return _together(index, torch.int64), _rows(embeds)

    @property
    def branches(self) -> tuple[str, ...]:
        return tuple(self._layers)

    def sounds(self, source: Source, subset: np.ndarray) -> tuple[Tensor, Tensor]:
        """Of the samples `subset` whose sounds can be read: (their indices int64 [n], [n, D])."""
        options = self.trained.options
        features = audio_features(
            *(options[key] for key in ("audio_tower", "audio_seconds", "audio_size")), ()
        )
        subset = subset[~source.lacking("audio")[subset]]
        dataset = MicroBatchDataset(source, [AudioModality(features)], options["seed"])
        requests = evaluation_requests(subset, 0, 1, self.batch_size)
        index, embeds = [], []
        batches = micro_batches(dataset, requests, self.workers)
        for batch in _with_progress(batches, len(requests), "sounds"):
            loaded = batch["audio_index"] >= 0  # below: could not be read
            outputs = self._run("audio", batch)
            index.append(batch["audio_index"][loaded])
            embeds.append(outputs["audio_embeds"].float().cpu()[loaded])
        return _together(index, torch.int64), _rows(embeds)

    def texts(self, texts: Sequence[str], languages: Sequence[Any] | None = None) -> Tensor:
        """[m, D]. `languages`: of each text, None where it is not known; read if the tower tells
        languages apart."""
        return _rows(
            [outputs["text_embeds"].float().cpu() for outputs in self._of_texts(texts, languages)]
        )

    def autocast(self) -> torch.autocast:
        """The precision, for what runs inside of it."""
        dtype = PRECISIONS[self.precision]
        return torch.autocast(self.device.type, dtype or torch.bfloat16, enabled=dtype is not None)

    @property
    def fusion(self) -> Fusion | None:
        """What scores pairs of tokens; None: the model was trained without."""
        return self._layers["text"][-1].fusion

    def image_tokens(self, source: Source, index: Tensor) -> Iterator[Tensor]:
        """[b, T, F] of each batch of the samples `index`, on the device."""
        return (outputs["image_tokens"] for _, outputs in self._of_images(source, index.numpy()))

    def text_tokens(self, texts: Sequence[str]) -> list[Tensor]:
        """[L, F] of each text without its padding, on the CPU."""
        tokens = []
        for outputs in self._of_texts(texts):
            for own, mask in zip(outputs["text_tokens"].cpu(), outputs["text_mask"].cpu()):
                tokens.append(own[mask != 0])
        return tokens

    def embedded(self, source: Source, subset: np.ndarray, all_captions: bool = False) -> Embedded:
        """A data set: with the first caption of each image, as training evaluates, or with
        all."""
        index, image = self.images(source, subset)
        captions = [
            source.captions(i) if all_captions else source.captions(i)[:1] for i in index.tolist()
        ]
        texts = list(chain.from_iterable(captions))
        whose = torch.repeat_interleave(
            torch.arange(len(captions)),
            torch.tensor([len(own) for own in captions], dtype=torch.int64),
        )
        languages = (
            [source.language(int(index[sample])) for sample in whose.tolist()]
            if self._languages
            else None
        )
        return Embedded(index, image, self.texts(texts, languages), whose, texts)

    def _of_images(
        self, source: Source, subset: np.ndarray
    ) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
        """(what was loaded, what the tower makes of it) of one batch after the other."""
        transform = eval_transform(self.trained.options["image_size"], self.trained.preprocessing)
        dataset = MicroBatchDataset(
            source, [ImageModality(transform, transform)], self.trained.options["seed"]
        )
        requests, reports = evaluation_requests(np.asarray(subset), 0, 1, self.batch_size), []
        batches = micro_batches(dataset, requests, self.workers, on_load=reports.append)
        for batch in _with_progress(batches, len(requests), "images"):
            yield batch, self._run("image", batch)
        bad = [f"{where} ({reason})" for report in reports for _, reason, where in report.bad]
        if bad:
            message = f"{len(bad)} of {len(subset)} images of {source.spec} cannot be read; the first: {bad[0]}"
            if len(bad) == len(subset):
                raise OSError(message)
            show(f"{message}. They are left out.")

    def _of_texts(
        self, texts: Sequence[str], languages: Sequence[Any] | None = None
    ) -> Iterator[dict[str, Tensor]]:
        starts, limit = (
            range(0, len(texts), self.batch_size),
            self.trained.options["max_text_tokens"],
        )
        multiple = length_multiple(self.device.type)
        for start in _with_progress(starts, len(starts), "texts"):
            part = slice(start, start + self.batch_size)
            tokens = batch_tokens(self.trained.tokenizer, texts[part], limit, multiple)
            if self._languages and languages is not None:
                tokens["language_ids"] = self._languages.ids(list(languages[part]))
            yield self._run("text", tokens)

    @torch.inference_mode()
    def _run(self, branch: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors = {name: tensor.to(self.device) for name, tensor in tensors.items()}
        with self.autocast():
            for layer in self._layers[branch]:
                tensors = layer(tensors)
        return tensors


def chosen_device(given: str) -> torch.device:
    """The device of `cpu`, `cuda`, `cuda:N` or `auto`, the first GPU if there is one. Errors:
    ValueError for another word, and for a GPU that this machine does not have."""
    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if given == "auto":
        return torch.device("cuda" if number else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", given):
        raise ValueError(f"{given!r}; give cpu, cuda, cuda:N or auto")
    device = torch.device(given)
    if device.type == "cuda" and (device.index or 0) >= number:
        there = f"cuda:0 to cuda:{number - 1}" if number else "no GPU that torch can use"
        raise ValueError(f"{given}; this machine has {there}; give one of its devices, or auto")
    return device


def _with_progress(batches: Iterable[Any], total: int, of: str) -> Iterable[Any]:
    return progress_bar(batches, of, "batch", total)


def _together(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(list(parts)) if parts else torch.zeros(0, dtype=dtype)


def _rows(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if parts else torch.zeros(0, 0)


# -- folders


def refuse_other_content(folder: Path) -> None:
    """Errors: FileExistsError for a folder that holds something else than embeddings, of one or of
    several held-out sets."""
    if folder.exists() and (
        not folder.is_dir() or (any(folder.iterdir()) and not folders_of(folder))
    ):
        raise FileExistsError(
            f"--embeddings {folder}: holds something else; give a new folder, or one with earlier "
            "embeddings"
        )


def folders_of(folder: Path) -> list[Path]:
    """Itself, or those in it that hold embeddings."""
    return (
        [folder]
        if (folder / "about.json").is_file()
        else sorted(file.parent for file in folder.glob("*/about.json"))
    )


def forget_embeddings(folder: Path) -> None:
    """Of earlier, whatever sets they are of: none may be taken for those that come now."""
    for part in folders_of(folder):
        for name in FILES:
            (part / name).unlink(missing_ok=True)


def write_embeddings(
    folder: Path, embedded: Embedded, source: Source, about: dict[str, Any]
) -> None:
    """about.json last: a folder counts with it."""
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "image.npy", embedded.image.numpy())
    np.save(folder / "text.npy", embedded.text.numpy())
    _write_lines(folder / "images.jsonl", (line_of(source, i) for i in embedded.index.tolist()))
    _write_lines(
        folder / "texts.jsonl",
        (
            {"image": row, "text": text}
            for row, text in zip(embedded.image_of_text.tolist(), embedded.texts)
        ),
    )
    (folder / "about.json").write_text(
        json.dumps({**about, "data": specs_of(source)}, indent=2) + "\n", encoding="utf-8"
    )


def line_of(source: Source, i: int) -> dict[str, Any]:
    """What images.jsonl says of a sample."""
    return {
        "index": i,
        "id": source.identity(i),
        "where": source.where(i),
        "content": source.content_hash(i).hex(),
    }


def refuse_other_images(folder: Path, lines: Sequence[dict[str, Any]], source: Source) -> None:
    """Errors: ValueError where the samples of `source` are not those that were embedded."""
    for line in lines:
        if line["index"] >= len(source) or source.content_hash(line["index"]).hex() != line.get(
            "content"
        ):
            raise ValueError(
                f"--embeddings {folder}: {line['where']} is no longer what it was when it was "
                "embedded, or another data set is given; make them again without --query, or give "
                "the data of then with --val-data"
            )


def read_images(folder: Path) -> tuple[np.ndarray, list[dict[str, Any]], dict[str, Any]]:
    """Of a folder of embeddings: (images' [n, D], mapped from the disk; the line of each;
    about.json). Errors: FileNotFoundError."""
    if not (folder / "about.json").is_file():
        raise FileNotFoundError(
            f"{folder}: holds no about.json; make it with evaluate.py RUN_DIR --embeddings {folder}"
        )
    lines = [
        json.loads(line)
        for line in (folder / "images.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return (
        np.load(folder / "image.npy", mmap_mode="r"),
        lines,
        json.loads((folder / "about.json").read_text(encoding="utf-8")),
    )


def _write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
