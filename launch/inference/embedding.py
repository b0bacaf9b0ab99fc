"""Embeddings of a data set by a trained model, on one device."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import compress
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from data.bad_samples import ANNOTATION_LIMIT
from data.batching.requests import evaluation_requests
from data.batching.shown import ShownAnnotations
from data.clips import Clip
from data.index.sources import KnownSource
from data.keys import content_hash
from data.loader import LoadReport, micro_batches
from data.modalities.tokenizer import length_multiple
from data.progress import progress_bar
from data.stored.derived import Derived
from data.stored.kinds import is_text, several_of, text_of
from launch.config.groups import InputOptions
from launch.inference.flags import PRECISIONS
from launch.inference.trained import Trained
from launch.inputs import as_values, languages_of, micro_batch_dataset
from launch.modalities import Inputs
from launch.terminal.tables import show
from models.towers.building import meta_inputs
from models.towers.regions import PooledRegions

DTYPES = dict(zip(PRECISIONS, (None, torch.bfloat16, torch.float16), strict=True))
"""Name -> what autocast computes in; None: nothing is cast."""

Tensors = dict[str, Tensor]


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


@dataclass(frozen=True)
class Annotated:
    """The embeddings of n annotations, such as regions of images, of which the tower sees at least
    half, and of m of their phrases. `sample` of both `rows` has numbers of annotations, which tell
    what a phrase is said of; `of` [n]: the samples that the annotations are of; `extent` float64
    [n, ...]: as in `data.annotations.Annotation`; `which` [n]: their numbers among those of their
    samples; `said_of` [m]: the row of the annotation of each phrase. `num_given`: with the
    annotations that are not seen. `all_phrases`: else the first of each annotation."""

    kind: Derived
    rows: Rows
    phrase: Rows
    of: Tensor
    extent: Tensor
    which: Tensor
    said_of: Tensor
    num_given: int
    all_phrases: bool = False

    def by_name(self) -> dict[str, Rows]:
        return dict(zip(self.kind.rows, (self.rows, self.phrase), strict=True))

    @property
    def num_candidates_only(self) -> int:
        """Of those seen, how many have no phrase."""
        return len(self.of) - len(self.said_of.unique())


@dataclass(frozen=True)
class Embedded:
    """The embeddings of some samples. `compared`: the modalities that are compared, two by two,
    pairs of the run first. A value that cannot be read is left out; of a sample with no other
    modality to compare, the texts too."""

    rows: Mapping[str, Rows]
    compared: Sequence[tuple[str, str]]
    annotated: Annotated | None = None  # where the run compares annotations

    def with_annotations(self) -> Embedded:
        """With the annotations and their phrases as two modalities beside the others."""
        if self.annotated is None:
            return self
        compared = (*self.compared, self.annotated.kind.rows)
        return Embedded({**self.rows, **self.annotated.by_name()}, compared)

    def both(self, first: str, second: str) -> tuple[Rows, Rows]:
        """The rows of the samples that have both."""
        one, other = self.rows[first], self.rows[second]
        return one.of(other.sample), other.of(one.sample)

    def of(self, samples: Tensor) -> Embedded:
        """Those of some samples only, without annotations."""
        return Embedded({name: own.of(samples) for name, own in self.rows.items()}, self.compared)

    @property
    def samples(self) -> Tensor:
        """All of which there is a row, ascending."""
        return torch.cat([own.sample for own in self.rows.values()]).unique()


@dataclass(frozen=True)
class Values:
    """Not a whole KnownSource, but all of one that values of one modality are loaded by: a sample
    each, which are texts, or what files hold. `languages`: of texts, None where it is not known."""

    values: Sequence[Any]
    spec: str = "texts"
    languages: Sequence[Any] | None = None

    def __len__(self) -> int:
        return len(self.values)

    def captions(self, i: int) -> Sequence[str]:
        return (self.values[i],)

    def value(self, modality: str, i: int) -> Any:
        return self.values[i]

    def content_hash(self, modality: str, i: int) -> bytes:
        value = self.values[i]
        return content_hash(os.fsencode(value.film) if isinstance(value, Clip) else value)

    def numbers(self, name: str, index: np.ndarray) -> np.ndarray:
        """Where clips begin and end, as an index has it."""
        key = name.removeprefix("video_")
        return np.array([getattr(self.values[i], key) for i in index.tolist()])

    def language(self, i: int) -> Any:
        return self.languages[i] if self.languages else None

    def where(self, i: int, modality: str | None = None) -> str:
        return self.spec


def as_source(
    values: Sequence[Any], spec: str = "texts", languages: Sequence[Any] | None = None
) -> KnownSource:
    """`Values`, for what loads them."""
    return cast(KnownSource, Values(values, spec, languages))


class Embedder:
    """The towers of `trained` on `device`, `batch_size` values at a time. `precision`: a key of
    `PRECISIONS`; embeddings are float32 in any. `prefix`: how many of their first numbers are kept,
    as rows of length 1; None: all. ValueError where there are no more than these."""

    def __init__(
        self,
        trained: Trained,
        device: torch.device | str,
        batch_size: int,
        workers: int,
        precision: str = "fp32",
        prefix: int | None = None,
    ) -> None:
        widths = [tower.config["embed_dim"] for tower in trained.towers]
        if prefix is not None and prefix >= min(widths):
            raise ValueError(
                f"--prefix {prefix}: the embeddings of this model have {min(widths)} numbers; give "
                "fewer, or leave it out"
            )
        self.prefix = prefix
        self.trained, self.device = trained, torch.device(device)
        self.batch_size, self.workers, self.precision = batch_size, workers, precision
        self.layers = {tower.branch: trained.layers_of(tower.branch) for tower in trained.towers}
        # of a run that did not learn them
        self.pooled: PooledRegions | None = None
        # samples are read as in the evaluation of a run
        self._inputs = Inputs(
            InputOptions.from_record({**trained.options, "augmentation": ()}),
            trained.tokenizer,
            length_multiple(self.device.type),
            languages=languages_of(trained.towers),
            share_frames=any("video_frame_row" in tower.inputs for tower in trained.towers),
        )

        image = trained.by_branch.get("image")
        if trained.unlearned_regions and image is not None:
            self.pooled = PooledRegions(image, meta_inputs(image, 2)["pixel_values"])

    @property
    def branches(self) -> tuple[str, ...]:
        return tuple(self.layers)

    def embedded(
        self, source: KnownSource, subset: np.ndarray, all_captions: bool = False
    ) -> Embedded:
        """A data set: with the first caption of each sample and the first phrase of each
        annotation, as training evaluates, or with all. Samples that have one modality alone are
        left out."""
        compared, derived = self.trained.compared, self.trained.derived
        every = (*self.branches, *([derived.name] if derived else []))
        lacking = {name: source.lacking(name) for name in every}
        if derived is not None and lacking[derived.name].all():
            derived = None
        rows, found, text = {}, None, text_of(self.branches)
        # values first: a text is embedded where some other value of its sample could be read
        for name in self.branches:
            others = [
                lacking[other]
                for two in self.trained.read
                if name in two
                for other in {*two} - {name}
            ]
            if name == text:
                continue
            unused = lacking[name] | np.logical_and.reduce(others)
            used = subset[~unused[subset]]
            if derived and name == derived.of[0]:
                rows[name], found = self.annotated(derived, source, used, all_captions)
            else:
                rows[name] = self.rows(name, source, used)
        if text is not None:
            samples = torch.cat([own.sample for own in rows.values()]).unique()
            rows[text] = self.rows(text, source, samples.numpy(), all_captions)
        return Embedded({name: rows[name] for name in self.branches}, compared, found)

    def annotated(
        self, kind: Derived, source: KnownSource, subset: np.ndarray, all_phrases: bool = False
    ) -> tuple[Rows, Annotated]:
        """The values of the samples `subset`, and all of their annotations of a kind, whatever the
        run takes of a sample in a step (`--max-regions`), with the first phrase of each or with
        all."""
        annotations = ShownAnnotations(source, kind, ANNOTATION_LIMIT, 0, candidates=True)
        names = (kind.of[0], kind.rows[0])
        values, (number, of, key, embeds) = self._gathered(names, source, subset, annotations)
        shown = annotations.places(subset, training=False).phrases(subset, None)
        which = shown.number[number.numpy()]  # those that are not seen are left out
        annotations_of = lru_cache(1)(lambda i: source.value(kind.name, i))
        seen = [annotations_of(i)[k] for i, k in zip(of.tolist(), which.tolist())]
        phrases = [each.phrases[: None if all_phrases else 1] for each in seen]
        counts = np.array([*map(len, phrases)], np.int64)
        said_of = torch.from_numpy(np.repeat(np.arange(len(seen)), counts))
        texts = [text for own in phrases for text in own]
        own = self._texts(texts, [source.language(i) for i in of[said_of].tolist()])
        return _as_rows(values), Annotated(
            kind,
            Rows(number, embeds, key),
            replace(own, sample=number[said_of], texts=texts),
            of,
            torch.tensor([each.extent for each in seen], dtype=torch.float64),
            torch.from_numpy(which),
            said_of,
            len(shown.index),
            all_phrases,
        )

    def rows(
        self, branch: str, source: KnownSource, subset: np.ndarray, all_captions: bool = False
    ) -> Rows:
        """Of the samples `subset` that have a value of this modality that can be read; of texts the
        first one of each sample, or all. Raises OSError where none can be read."""
        if is_text(branch):
            captions = [source.captions(i)[: None if all_captions else 1] for i in subset.tolist()]
            texts = [text for own in captions for text in own]
            whose = np.repeat(subset, [len(own) for own in captions])
            own = self._texts(texts, [source.language(i) for i in whose.tolist()])
            return replace(own, sample=torch.from_numpy(whose), texts=texts)
        return _as_rows(*self._gathered((branch,), source, subset))

    def texts(self, texts: Sequence[str]) -> Tensor:
        """[m, D]"""
        return self._texts(texts).embeds

    def _texts(self, texts: Sequence[str], languages: Sequence[Any] | None = None) -> Rows:
        source, branch = as_source(texts, languages=languages), text_of(self.branches)
        assert branch is not None
        return _as_rows(*self._gathered((branch,), source, np.arange(len(texts))))

    def _gathered(
        self,
        names: Sequence[str],
        source: KnownSource,
        subset: np.ndarray,
        annotations: ShownAnnotations | None = None,
    ) -> list[Gathered]:
        """Of each of `names`, a branch and the further rows that it makes."""
        nothing = torch.zeros(0, dtype=torch.int64)
        width = self.trained.by_branch[names[0]].config["embed_dim"]
        found = [[[nothing], [nothing], [nothing], [torch.zeros(0, width)]] for _ in names]
        for batch, outputs in self.outputs(names[0], source, subset, annotations):
            for name, parts in zip(names, found):
                loaded = batch[f"{name}_index"] >= 0  # below: could not be read, or is not there
                embeds = outputs[f"{name}_embeds"].float().cpu()
                labels = (batch[f"{name}_{label}"] for label in ("position", "index", "key"))
                for part, values in zip(parts, (*labels, embeds)):
                    part.append(values[loaded])
        return [self._cut(Gathered(*map(torch.cat, parts))) for parts in found]

    def _cut(self, whole: Gathered) -> Gathered:
        if self.prefix is None:
            return whole
        return whole._replace(embeds=F.normalize(whole.embeds[:, : self.prefix]))

    def outputs(
        self,
        branch: str,
        source: KnownSource,
        subset: np.ndarray,
        annotations: ShownAnnotations | None = None,
    ) -> Iterator[tuple[Tensors, Tensors]]:
        """(what was loaded, what the tower makes of it) of one batch after the other. Raises
        OSError where nothing can be read."""
        dataset = micro_batch_dataset(source, self._inputs, {branch})
        requests = evaluation_requests(subset, 0, 1, self.batch_size, annotations)
        reports: list[LoadReport] = []
        # texts are there already
        workers = 0 if is_text(branch) else self.workers
        batches = micro_batches(dataset, requests, workers, on_load=reports.append)
        values = several_of(branch)
        for batch in progress_bar(batches, values, "batch", len(requests)):
            yield batch, self._run(branch, batch)
        bad = [f"{where} ({reason})" for report in reports for _, reason, where in report.bad]
        if bad:
            message = (
                f"{len(bad)} of {len(subset)} {values} of {source.spec} cannot be read; "
                f"the first: {bad[0]}"
            )
            if len(bad) == len(subset):
                raise OSError(message)
            show(f"{message}. They are left out.")

    def autocast(self) -> torch.autocast:
        """The precision, for what runs inside of it."""
        dtype = DTYPES[self.precision]
        return torch.autocast(self.device.type, dtype or torch.bfloat16, enabled=dtype is not None)

    @torch.inference_mode()
    def _run(self, branch: str, tensors: Tensors) -> Tensors:
        tensors = {name: tensor.to(self.device) for name, tensor in tensors.items()}
        # images travel as bytes and become values on the device
        tensors = as_values(tensors, self.trained.preprocessing)
        with self.autocast():
            if self.pooled is not None and "region_boxes" in tensors:
                return self._pool_regions(self.pooled, tensors)
            for layer in self.layers[branch]:
                tensors = layer(tensors)
        return tensors

    def _pool_regions(self, pooled: PooledRegions, tensors: Tensors) -> Tensors:
        boxes, row = tensors.pop("region_boxes"), tensors.pop("region_row")
        layers = self.layers["image"]
        for layer in layers[: pooled.num_before]:
            tensors = layer(tensors)
        hidden = tensors["image_hidden"]

        def behind(image_hidden: Tensor) -> Tensors:
            values = {**tensors, "image_hidden": image_hidden}
            for layer in layers[pooled.num_before :]:
                values = layer(values)
            return values

        # a region costs these layers as much as an image does
        parts = zip(boxes.split(self.batch_size), row.split(self.batch_size))
        embeds = [behind(pooled.hidden(hidden, *part))["image_embeds"] for part in parts]
        return {**behind(hidden), "region_embeds": torch.cat(embeds)}


class Gathered(NamedTuple):
    """Rows of all batches, but for those that could not be read: their places, their samples and
    their keys, int64 [n], and their embeddings [n, D]."""

    position: Tensor
    sample: Tensor
    key: Tensor
    embeds: Tensor


def _as_rows(gathered: Gathered) -> Rows:
    return Rows(gathered.sample, gathered.embeds, gathered.key)
