"""Embeddings of a data set by a trained model, on one device: in memory, or in a folder that other
programs map.

A folder of embeddings has for each modality an array float32 [n, D] with rows of length 1, named
after it: `image.npy`, `audio.npy`, `text.npy`. Beside each is a file with a line per row:
`images.jsonl`, `audio.jsonl` and so on with `index` in the data, `id`, `where` and `content`, a
checksum of the value; `texts.jsonl` with `text` and, for each other modality, the row of its sample
there: `image`, `audio`. `about.json` says what model and what data they are of.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.files import make_folder, read_json, remove, replacing, write_text
from common.secrets import redacted
from data.batching.mixture import specs_of
from data.batching.sampler import evaluation_requests
from data.index.keys import caption_key
from data.index.sources import Source
from data.loader import LoadReport, MicroBatchDataset, micro_batches
from data.modalities.audio.modality import AudioModality
from data.modalities.image import ImageModality
from data.modalities.modality import Modality
from data.modalities.tokenizer import batch_tokens, length_multiple
from data.modalities.transforms import eval_transform
from data.progress import progress_bar
from engine.objective import without_loss
from launch.inference.kinds import KINDS
from launch.inference.trained import Trained
from launch.inputs import as_values, languages_of
from launch.modalities import MODALITIES, audio_features
from launch.run.report import show
from models.towers.fusion import Fusion
from models.towers.head import TextHead

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Name -> what autocast computes in; None: nothing is cast."""
LINES = {"image": "images.jsonl", "text": "texts.jsonl"}
"""By modality the file of lines, where it is not called `<modality>.jsonl`."""
Pairs = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Rows:
    """Embeddings of one modality, on the CPU: rows of length 1, float32 [n, D], the sample of each
    in the data, int64 [n], ascending, a key that is equal for equal values, int64 [n], and of texts
    what was embedded, else nothing."""

    sample: Tensor
    embeds: Tensor
    key: Tensor
    texts: Sequence[str] = ()

    def of(self, samples: Tensor) -> Rows:
        """Those of some samples only."""
        chosen = torch.isin(self.sample, samples)
        if chosen.all():
            return self
        texts = [*compress(self.texts, chosen.tolist())]
        return Rows(self.sample[chosen], self.embeds[chosen], self.key[chosen], texts)

    def row_of(self, sample: int) -> int | None:
        """The first one of a sample."""
        row = int(torch.searchsorted(self.sample, sample))
        return row if row < len(self.sample) and int(self.sample[row]) == sample else None


@dataclass(frozen=True)
class Embedded:
    """The embeddings of some samples. `compared`: the modalities that are compared, two by two,
    pairs of the run first. A value that cannot be read is left out; of a sample with no other
    modality to compare, the texts too."""

    rows: Mapping[str, Rows]
    compared: Pairs

    def both(self, first: str, second: str) -> tuple[Rows, Rows]:
        """The rows of the samples that have both."""
        one, other = self.rows[first], self.rows[second]
        return one.of(other.sample), other.of(one.sample)

    def of(self, samples: Tensor) -> Embedded:
        """Those of some samples only."""
        return replace(self, rows={name: own.of(samples) for name, own in self.rows.items()})

    @property
    def samples(self) -> Tensor:
        """All of which there is a row, ascending."""
        return torch.cat([own.sample for own in self.rows.values()]).unique()


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

    @property
    def branches(self) -> tuple[str, ...]:
        return tuple(self._layers)

    def rows(self, branch: str, source: Source, subset: np.ndarray) -> Rows:
        """Of the samples `subset` that have a value of this modality, texts apart, that can be
        read. Raises OSError where none can."""
        index, embeds, key = [], [], []
        for batch, outputs in self._of_values(branch, source, subset):
            loaded = batch[f"{branch}_index"] >= 0  # below: could not be read, or is not there
            index.append(batch[f"{branch}_index"][loaded])
            key.append(batch[f"{branch}_key"][loaded])
            embeds.append(outputs[f"{branch}_embeds"].float().cpu()[loaded])
        return Rows(_together(index, torch.int64), _rows(embeds), _together(key, torch.int64))

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
        head = self._layers["text"][-1] if "text" in self._layers else None
        return head.fusion if isinstance(head, TextHead) else None

    def image_tokens(self, source: Source, index: Tensor) -> Iterator[Tensor]:
        """[b, T, F] of each batch of the samples `index`, on the device."""
        return (
            outputs["image_tokens"]
            for _, outputs in self._of_values("image", source, index.numpy())
        )

    def text_tokens(self, texts: Sequence[str]) -> list[Tensor]:
        """[L, F] of each text without its padding, on the CPU."""
        tokens = []
        for outputs in self._of_texts(texts):
            for own, mask in zip(outputs["text_tokens"].cpu(), outputs["text_mask"].cpu()):
                tokens.append(own[mask != 0])
        return tokens

    def embedded(self, source: Source, subset: np.ndarray, all_captions: bool = False) -> Embedded:
        """A data set: with the first caption of each sample, as training evaluates, or with all.
        Samples that have one modality alone are left out."""
        compared = compared_by(self.trained)
        lacking = {name: source.lacking(name) for name in self.branches}
        partners = {
            name: [set(two) - {name} for two in compared if name in two] for name in self.branches
        }
        rows = {}
        for name in self.branches:
            alone = np.logical_and.reduce([lacking[other] for (other,) in partners[name]])
            if name != "text":
                rows[name] = self.rows(name, source, subset[~(lacking[name] | alone)[subset]])
        if "text" not in self.branches:
            return Embedded(rows, compared)
        samples = torch.cat([own.sample for own in rows.values()]).unique()
        whose, texts = [], []
        for i in samples.tolist():
            captions = source.captions(i)[: None if all_captions else 1]
            whose += [i] * len(captions)
            texts += captions
        languages = [source.language(i) for i in whose] if self._languages else None
        key = torch.tensor([caption_key(text) for text in texts], dtype=torch.int64)
        sample = torch.tensor(whose, dtype=torch.int64)
        of_texts = Rows(sample, self.texts(texts, languages), key, texts)
        return Embedded({name: rows.get(name, of_texts) for name in self.branches}, compared)

    def _modality(self, branch: str) -> Modality:
        """What makes the tensors of a branch, as in the evaluation of a run."""
        options = self.trained.options
        if branch in MODALITIES:
            return MODALITIES[branch].load()
        if branch == "audio":
            tower, seconds = options["audio_tower"], options["audio_seconds"]
            return AudioModality(audio_features(tower, seconds, options["audio_size"], ()))
        transform = eval_transform(options["image_size"], self.trained.preprocessing)
        return ImageModality(transform, transform)

    def _of_values(
        self, branch: str, source: Source, subset: np.ndarray
    ) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
        """(what was loaded, what the tower makes of it) of one batch after the other."""
        dataset = MicroBatchDataset(source, [self._modality(branch)], self.trained.options["seed"])
        requests = evaluation_requests(np.asarray(subset), 0, 1, self.batch_size)
        reports: list[LoadReport] = []
        batches = micro_batches(dataset, requests, self.workers, on_load=reports.append)
        several = KINDS[branch].several if branch in KINDS else f"values of {branch}"
        for batch in _with_progress(batches, len(requests), several):
            yield batch, self._run(branch, batch)
        bad = [f"{where} ({reason})" for report in reports for _, reason, where in report.bad]
        if bad:
            message = (
                f"{len(bad)} of {len(subset)} {several} of {source.spec} cannot be read; the "
                f"first: {bad[0]}"
            )
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
            tokens = batch_tokens(self.trained.text_tokenizer, texts[part], limit, multiple)
            if self._languages and languages is not None:
                tokens["language_ids"] = self._languages.ids(list(languages[part]))
            yield self._run("text", tokens)

    @torch.inference_mode()
    def _run(self, branch: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors = {name: tensor.to(self.device) for name, tensor in tensors.items()}
        tensors = as_values(tensors, self.trained.preprocessing)
        with self.autocast():
            for layer in self._layers[branch]:
                tensors = layer(tensors)
        return tensors


def compared_by(trained: Trained) -> tuple[tuple[str, str], ...]:
    """The modalities that are compared, two by two: the pairs of the run, then those without a
    loss."""
    pairs = tuple(pair.modalities for pair in trained.pairs)
    branches = tuple(tower.branch for tower in trained.towers)
    return (*pairs, *without_loss(branches, pairs))


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
        for name in _modalities_in(part):
            for file in (f"{name}.npy", lines_of(name)):
                remove(part / file, folder)
        remove(part / "about.json", folder)


def _modalities_in(folder: Path) -> list[str]:
    about = read_json(folder / "about.json")
    names = about.get("modalities", ("image", "text"))  # as earlier versions wrote
    if not all(isinstance(name, str) and name.isidentifier() for name in names):
        raise ValueError(
            f"{folder / 'about.json'}: modalities {names!r}: names of modalities are needed; the "
            "folder was not made by evaluate.py --embeddings"
        )
    return list(names)


def lines_of(modality: str) -> str:
    """The file with a line per row."""
    return LINES.get(modality, f"{modality}.jsonl")


def write_embeddings(
    folder: Path, embedded: Embedded, source: Source, about: dict[str, Any]
) -> None:
    """about.json last: a folder counts with it."""
    make_folder(folder)
    for name, own in embedded.rows.items():
        with replacing(folder / f"{name}.npy") as beside, beside.open("wb") as file:
            np.save(file, own.embeds.numpy())
        _write_lines(folder / lines_of(name), lines_for(embedded, source, name))
    about = {**about, "data": specs_of(source), "modalities": list(embedded.rows)}
    write_text(folder / "about.json", json.dumps(redacted(about), indent=2) + "\n")


def lines_for(embedded: Embedded, source: Source, modality: str) -> Iterator[dict[str, Any]]:
    """What is written beside each row of a modality."""
    samples = embedded.rows[modality].sample.tolist()
    if modality != "text":
        yield from (line_of(source, i, modality) for i in samples)
        return
    others = {name: own for name, own in embedded.rows.items() if name != "text"}
    for i, text in zip(samples, embedded.rows[modality].texts):
        rows = {name: own.row_of(i) for name, own in others.items()}
        yield {**{name: row for name, row in rows.items() if row is not None}, "text": text}


def line_of(source: Source, i: int, modality: str) -> dict[str, Any]:
    """What is said of a sample, beside its embedding of one modality, texts apart."""
    kind = KINDS.get(modality)
    return {
        "index": i,
        "id": source.identity(i),
        "where": source.where(i, modality),
        "content": kind.content(source, i) if kind else source.identity(i),
    }


def refuse_other_content_of(
    folder: Path, lines: Sequence[dict[str, Any]], source: Source, modality: str
) -> None:
    """Errors: ValueError where the samples of `source` are not those that were embedded."""
    for line in lines:
        if (
            line["index"] >= len(source)
            or line_of(source, line["index"], modality)["content"] != line["content"]
        ):
            raise ValueError(
                f"--embeddings {folder}: {line['where']} is no longer what it was when it was "
                "embedded, or another data set is given; make them again without --query, or give "
                "the data of then with --val-data"
            )


def read_embeddings(
    folder: Path, modality: str
) -> tuple[np.ndarray, list[dict[str, Any]], dict[str, Any]]:
    """Of a folder of embeddings: (those of a modality [n, D], mapped from the disk; the line of
    each; about.json). The line of a text says of what sample it is, as those of others do. Errors:
    FileNotFoundError."""
    if not (folder / "about.json").is_file():
        raise FileNotFoundError(
            f"{folder}: holds no about.json; make it with evaluate.py RUN_DIR --embeddings {folder}"
        )
    there = _modalities_in(folder)
    if modality not in there:
        raise FileNotFoundError(
            f"{folder}: holds embeddings of {' and '.join(there)}, and none of {modality}; make "
            f"them again with evaluate.py RUN_DIR --embeddings {folder}, or search another modality"
        )
    lines = _read_lines(folder / lines_of(modality))
    if modality == "text":
        others = {name: _read_lines(folder / lines_of(name)) for name in there if name != "text"}
        lines = [
            {**next(others[name][line[name]] for name in others if name in line), **line}
            for line in lines
        ]
    return (
        np.load(folder / f"{modality}.npy", mmap_mode="r"),
        lines,
        read_json(folder / "about.json"),
    )


def _read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    with replacing(path) as beside, beside.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
