"""Every two of the options that say what data are and how they are read meet in a run of the data
plane: what all of its ranks load is what the records hold, each once an epoch, on every rank packed
alike, and the same after a resume. The cases: `tests/data_cases.py`. No rank is started and nothing is
trained: each is its own `Batching` and loader in this process."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cost_models import proportional
from covering import all_pairs, apart_of, pairs_of
from data_cases import (
    ALONE,
    ALSO_HELD_OUT,
    FACTORS,
    FOLDERS,
    IMPOSSIBLE,
    MOST,
    PAIRS,
    STREAMS,
    TEMPLATES,
    WHERE,
    Files,
    Record,
    cases,
    name_of,
    record_of,
    records_of,
    shards_of,
)
from stores import Faults, http_server

from data.bad_samples import Absent
from data.batching.buckets import nearest_sizes
from data.batching.requests import MicroBatchRequest
from data.batching.shown import ShownAnnotations
from data.clips import Clip
from data.decoding.films import describe_film
from data.keys import content_hash
from data.loader import micro_batches
from data.modules import import_modules
from data.options import branches_of, read_pairs
from data.prepare import prepare_data
from data.stored.derived import REGIONS
from data.streams.lengths import of_streams
from data.streams.prefetch import _Following
from engine.config.reading import check_config
from engine.planning.planner import plan_run
from launch.batching import batching, planned
from launch.config.options import parse_options
from launch.feeding import sample_cache
from launch.inputs import micro_batch_dataset
from launch.modalities import Inputs

pytest.importorskip("av", reason="pip install -r requirements-audio.txt")
pytest.importorskip("rbloom", reason="pip install -r requirements-filters.txt")
pytest.importorskip("soundfile", reason="pip install -r requirements-audio.txt")

CASES = cases()
PATCH, HELD_OUT = 16, 0.25
VIT = f"vit_b_32:patch_size={PATCH},num_layers=1,hidden_dim=32,num_heads=2,mlp_dim=64"
BATCH_SIZES = (12, 8)  # the first that leaves no sample out of an epoch, else the last
REST = 2  # steps of the second epoch


class Records:
    """The samples of a run's source, by the same numbers, as they were before they were written."""

    spec = "the records"

    def __init__(self, run: Run, source: Any) -> None:
        self.source, self.sparse = source, run.sparse
        # of which the captions are those of their class
        self.classes = [name for name in run.sets if run.kind_of(name) in FOLDERS]
        self._known: dict[int, Record] = {}

    def of(self, i: int) -> Record:
        if i not in self._known:
            self._known[i] = record_of(self.source.identity(i))
        return self._known[i]

    def __len__(self) -> int:
        return len(self.source)

    def captions(self, i: int) -> list[str]:
        each = self.of(i)
        if each.set in self.classes:
            return [template.replace("{}", each.id) for template in TEMPLATES]
        return list(each.captions)

    def language(self, i: int) -> None:
        return None

    def where(self, i: int, modality: str | None = None) -> str:
        return self.of(i).id

    def lacks(self, modality: str, i: int) -> bool:
        return self.sparse and self.of(i).lacks(modality)

    def value(self, modality: str, i: int) -> Any:
        if modality == "region":
            return [*self.of(i).regions]
        if self.lacks(modality, i):
            raise Absent(self.of(i).id)
        content = getattr(self.of(i), modality)
        return Clip(content, 0.0, self._seconds(i)) if modality == "video" else content

    def content_hash(self, modality: str, i: int) -> bytes:
        return bytes(16) if self.lacks(modality, i) else content_hash(getattr(self.of(i), modality))

    def numbers(self, name: str, index: np.ndarray) -> np.ndarray:
        return np.array([self._number(name, i) for i in index.tolist()])

    def _number(self, name: str, i: int) -> float:
        if name == "num_regions":
            return len(self.of(i).regions)
        if name == "num_negatives":
            return sum(len(region.negatives) for region in self.of(i).regions)
        if name == "video_end_s":
            return 0.0 if self.lacks("video", i) else self._seconds(i)
        if name == "audio_seconds":
            return 0.0 if self.lacks("audio", i) else 1.0
        assert name == "video_start_s"
        return 0.0

    def bucket(self, i: int, sizes: Any) -> int:
        """Which of the sizes its image is nearest to."""
        if self.lacks("image", i):
            return 0
        width, height = (np.array([side]) for side in self.of(i).size)
        return int(nearest_sizes(width, height, sizes)[0])

    def _seconds(self, i: int) -> float:
        return describe_film(self.of(i).video).seconds


@dataclass(frozen=True)
class Step:
    """A micro-batch that a rank loaded."""

    request: MicroBatchRequest
    tensors: dict[str, torch.Tensor]


@dataclass
class Rank:
    stage: Any
    replica: int
    data: Any
    batching: Any
    steps: list[Step] = field(default_factory=list)

    def load(self, options: Any, start: int, stop: int, prefetches: bool) -> None:
        cache = sample_cache(options)
        inputs = Inputs(options, self.data.tokenizer, 1, cache, PATCH)
        dataset = micro_batch_dataset(self.data.source, inputs, self.stage.loads)
        asked: list[MicroBatchRequest] = []

        def requests() -> Iterator[MicroBatchRequest]:
            ahead = self.prefetching(start) if prefetches else lambda step: None
            ahead(start)
            for request in self.batching.requests(start, stop, meta_first=False):
                ahead(request.step)
                asked.append(request)
                yield request

        def noted(report: Any) -> None:
            assert not report.bad
            if cache is not None:
                cache.store()

        for tensors in micro_batches(dataset, requests(), on_load=noted):
            self.steps.append(Step(asked[-1], tensors))

    def prefetching(self, start: int) -> Any:
        """What the process of a rank that fetches ahead does, until it has nothing more to do, when
        a step is asked for. It has copies of what the rank has, as a process has."""
        batches, texts = self.batching.batches, self.batching.batches.texts
        in_order = batches.buckets is batches.weights_of is batches.annotations is None
        share = None
        if in_order and "text" not in self.stage.loads:
            share = (self.replica, self.stage.replicas)
        tokens = of_streams(texts.tokens) if texts and "text" in self.stage.loads else {}
        known = (self.data.source, self.batching.order, share, start, tokens)
        following = _Following(None, None, *pickle.loads(pickle.dumps(known)))
        coming = following.coming()

        def ahead(step: int) -> None:
            following.step = step
            for what in iter(lambda: next(coming), None):
                following.fetch(*what)

        return ahead


class Run:
    """A run of a case in `folder`, on all of its ranks."""

    def __init__(self, case: dict[str, str], files: Files, folder: Path, url: str) -> None:
        self.case, self.folder = case, folder
        self.kind, self.sets = case["kind"], ["first", "second"][: 1 + (case["sets"] != "one_set")]
        beside = case["modality"] in ("sounds", "films", "depths")
        self.sparse = beside and self.kind not in FOLDERS
        folder.mkdir()
        if case["modality"] == "depths":
            import_modules(["examples.depth.shown"])
        self.options = parse_options(self.flags(files, url))
        self.ranks: list[Rank] = []

    def kind_of(self, name: str) -> str:
        if name == "second" and self.case["sets"] == "two_kinds":
            return "jsonl" if self.kind != "jsonl" else "parquet"
        return self.kind

    def spec(self, files: Files, name: str, url: str) -> str:
        served = self.case["store"] == "served" and self.kind_of(name) == self.kind
        spec = files.spec(self.kind_of(name), name, self.sparse, url if served else "")
        if self.kind_of(name) in STREAMS:
            filters = {"where": f"&where={WHERE}", "unseen": f"&unseen={files.unseen()}"}
            spec += filters.get(self.case["filter"], "")
        return spec

    def flags(self, files: Files, url: str) -> list[str]:
        pairs = ALONE.get(self.kind, PAIRS[self.case["modality"]])
        self.branches = branches_of(pairs)
        flags = ["--pairs", pairs, "--workers", "0", "--epochs", "2", "--seed", "3"]
        flags += ["--max-bad-fraction", "0.1"]
        for name in self.sets:
            flags += ["--data", self.spec(files, name, url)]
        if self.case["held_out"] == "by_set":
            flags += ["--val-data", files.spec("jsonl", "held_out", self.sparse)]
            flags += ["--on-leak", "drop"]
        else:
            flags += ["--val-fraction", str(HELD_OUT * (self.case["held_out"] == "fraction"))]
        flags += ["--text-tower", "bert-tiny", "--max-text-tokens", "12"]
        if "image" in self.branches:
            flags += ["--image-tower", VIT, "--image-size", "32", "--augmentation", "crop+flip"]
        if "audio" in self.branches:
            flags += ["--audio-tower", VIT, "--audio-size", "32", "--audio-seconds", "0.4"]
        if "video" in self.branches:
            flags += ["--video-tower", VIT, "--video-frames", "3", "--video-rate", "6"]
        if "region" in pairs:
            flags += ["--max-regions", "2", "--max-negatives", "1"]
        if self.case["balance"] == "buckets":
            flags += ["--image-buckets", "3"]
        if self.case["cache"] == "cached":
            flags += ["--cache", str(self.folder / "cache")]
        return flags

    # -- what is trained on

    def kept(self) -> dict[str, list[list[int]]]:
        """Of each set the records that the filter keeps, shard by shard."""
        return {
            name: [
                [
                    each.number
                    for each in shard
                    if self.kind_of(name) not in STREAMS or each.is_kept(self.case["filter"])
                ]
                for shard in shards_of(name)
            ]
            for name in self.sets
        }

    def check_division(self) -> set[int]:
        """The records that are trained on."""
        data = self.ranks[0].data
        kept = self.kept()
        every = {*chain(*chain(*kept.values()))}
        numbers = [record_of(data.source.identity(i)).number for i in data.train[:].tolist()]
        trained = {*numbers}
        assert len(numbers) == len(trained)
        held_out = [
            record_of(held.source.identity(i)).number
            for held in data.held_out.values()
            for i in held.subset.tolist()
        ]
        rule = self.case["held_out"]
        streams = [name for name in self.sets if self.kind_of(name) in STREAMS]
        if rule == "by_set":
            assert sorted(held_out) == sorted(each.number for each in records_of("held_out"))
            assert trained == (every if streams else every - {*ALSO_HELD_OUT})
            return trained
        assert sorted([*numbers, *held_out]) == sorted(every)
        if rule == "all_trained":
            assert not held_out
        elif not streams:
            assert len(held_out) == round(HELD_OUT * len(every))
        for name in streams:
            apart = [{*shard} for shard in kept[name] if {*shard} & {*held_out}]
            assert bool(apart) == (rule == "fraction")
            assert {*held_out} >= {*chain(*apart)}
        return trained

    # -- what the ranks load

    def start(self, state: dict[str, Any] | None = None) -> None:
        """All ranks, as processes of their own start: each opens the data by itself."""
        self.ranks, first, step = [], self.prepared(looks=True), 0
        if state is None:
            sizes = [size for size in BATCH_SIZES if len(first.train) % size == 0]
            self.batch_size = (*sizes, BATCH_SIZES[-1])[0]
            self.plan_ranks()
        else:
            step = state["step"]
        places = [(s, r) for s in self.plan.graph.stages for r in range(s.replicas)]
        for number, (stage, replica) in enumerate(places):
            data = self.prepared(looks=False) if number else first
            known = state or {"batch_sizes": ()}
            order, total_steps = batching.order_of_run(data, self.options, self.batch_size, known)
            own = batching.Batching(
                self.plan,
                stage.ranks[replica],
                0,
                data=data,
                order=order,
                total_steps=total_steps,
                options=self.options,
                block=self.block,
                patch_size=PATCH,
                folder=self.folder,
            )
            if state is not None:
                own.load_state_dict(state["balance"], step)
            self.ranks.append(Rank(stage, replica, data, own))

    def prepared(self, looks: bool) -> Any:
        return prepare_data(self.options, None, self.folder, workers=1, looks=looks)

    def plan_ranks(self) -> None:
        stages: Any = {"merged": 1}
        replicas: Any = 2
        if self.case["layout"] == "fork":
            stages = dict.fromkeys(self.branches, 1)
            replicas = {branch: 1 + (branch == "text") for branch in self.branches}
        strategy = "off" if self.case["balance"] == "in_order" else "deal"
        config = {
            "train_batch_size": self.batch_size,
            "optimizer": {"type": "AdamW"},
            "branches": {
                "layout": self.case["layout"],
                "stages": stages,
                "replicas": replicas,
                "micro_batch_size": self.batch_size // 4,
                "schedule": "batch_sync",
                "balance": {"strategy": strategy},
            },
        }
        checked, self.block = check_config(config, self.branches)
        compared = [pair.branches for pair in read_pairs(self.options.pairs)]
        costs = proportional({branch: [1.0] for branch in self.branches}, compared=compared)
        ranks = 2 if self.case["layout"] == "merged" else 1 + len(self.branches)
        self.plan = plan_run(checked, self.block, ranks, costs)

    def load(self, start: int, stop: int) -> None:
        for rank in self.ranks:
            rank.load(self.options, start, stop, self.case["prefetch"] == "prefetched")

    def state(self, step: int) -> dict[str, Any]:
        own = self.ranks[0].batching
        sizes = own.order.batch_sizes(step)
        state = {"step": step, "batch_sizes": sizes, "balance": own.state_dict()}
        return json.loads(json.dumps(state))


def described(request: MicroBatchRequest) -> list[Any]:
    """All of a request that a rank reads."""
    texts, phrases, places = request.texts(), request.phrases(), request.places
    arrays = [request.index, request.position, texts.index, texts.position]
    arrays += [] if phrases is None else [phrases.index, phrases.number, phrases.position]
    arrays += [] if places is None else [*vars(places).values()][1:]
    return [request.step, request.epoch, request.size, *(each.tolist() for each in arrays)]


def check_equal(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


def check_values(run: Run) -> None:
    """Each micro-batch holds what is made of the records themselves, one after the other, without
    files, shards or caches."""
    for rank in run.ranks:
        records = Records(run, rank.data.source)
        inputs = Inputs(run.options, rank.data.tokenizer, 1, None, PATCH)
        plain = micro_batch_dataset(records, inputs, rank.stage.loads)
        for step in rank.steps:
            expected, report = plain.load(replace(step.request, shards=None))
            assert not report.bad
            found = dict(step.tensors)
            if "video_key" in found:  # of a film in a file of its own it is of some pieces
                keys, index = found.pop("video_key"), found["video_index"]
                assert len({*keys[index >= 0].tolist()}) == int((index >= 0).sum())
                del expected["video_key"]
            check_equal(found, expected)


def check_buckets(run: Run, records: Records, number: int, sizes: Any) -> None:
    """The images of a step come in the order of their shapes, and each micro-batch has that of most
    of them."""
    every: list[int] = []
    for step in chain(*(rank.steps for rank in run.ranks if "image" in rank.stage.loads)):
        if step.request.step == number:
            shapes = [records.bucket(i, sizes) for i in step.request.index.tolist()]
            assert np.bincount(shapes).max() == shapes.count(sizes.index(step.request.size))
            every += shapes
    assert every == sorted(every)


def check_packing(run: Run, start: int, stop: int) -> list[np.ndarray]:
    """Every rank packs all of a step as those do that load it, by the lengths that the texts have.
    The samples of each step, in the source."""
    own = [[described(step.request) for step in rank.steps] for rank in run.ranks]
    for rank in run.ranks:
        for other, loaded in zip(run.ranks, own, strict=True):
            branch, loads = next(iter(other.stage.layers)), other.stage.loads
            replicas = run.plan.batches[branch].replicas
            packed = rank.batching.batches.requests(
                branch, other.replica, replicas, start, stop, loads
            )
            assert [*map(described, packed)] == loaded
    first = run.ranks[0].batching.batches
    records = Records(run, run.ranks[0].data.source)
    samples = []
    for number in range(start, stop):
        batch = first.at(number)
        lengths = None if first.texts is None else first.texts.lengths(batch)
        if first.annotations is not None:
            own = first.annotations
            places = ShownAnnotations(records, REGIONS, own.most, own.most_negatives)
            expected = vars(places.places(batch.indices))
            for name, found in vars(batch.places).items():
                assert name == "kind" or found.tolist() == expected[name].tolist()
        for branch in run.branches:
            index = np.full(run.batch_size, -1)
            phrases: list[int] = []
            for rank in run.ranks:
                for step in rank.steps if branch in rank.stage.loads else ():
                    if step.request.step != number:
                        continue
                    rows = step.request.texts() if branch == "text" else step.request
                    assert (index[rows.position] == -1).all()
                    index[rows.position] = rows.index
                    if branch == "text" and (of_regions := step.request.phrases()):
                        phrases += of_regions.position.tolist()
                    if branch == "text" and lengths is not None:
                        tokens = step.tensors["attention_mask"].sum(1)[: len(rows.position)]
                        assert tokens.tolist() == lengths[rows.position].tolist()
            assert index.tolist() == batch.indices.tolist(), branch
            if branch == "image" and first.buckets is not None:
                check_buckets(run, records, number, first.buckets.sizes)
            if branch == "text" and batch.places is not None:
                assert sorted(phrases) == [*range(batch.places.num_phrases)]
        samples.append(batch.indices)
    return samples


def check_epoch(run: Run, trained: set[int], samples: list[np.ndarray]) -> None:
    """Each training sample comes once, but for those that do not fill a global batch."""
    source = run.ranks[0].data.source
    came = [record_of(source.identity(i)).number for i in np.concatenate(samples).tolist()]
    assert len(came) == len({*came}) == len(trained) // run.batch_size * run.batch_size
    assert trained.issuperset(came)


@pytest.fixture(scope="module")
def files(module_folder):
    return Files(module_folder("sets"))


@pytest.mark.parametrize("case", CASES, ids=map(name_of, CASES))
def test_every_two_options_of_data_go_together(case, files, tmp_path, monkeypatch, registries):
    # of shards in which no rank has looked while it planned, as of those of a large set
    monkeypatch.setattr(planned, "MOST_EXAMPLES", 6)
    monkeypatch.setenv("WYE_CACHE", str(tmp_path / "machine"))
    served = case["store"] == "served"
    with http_server(files.folder, Faults()) if served else nullcontext("") as url:
        run = Run(case, files, tmp_path / "run", url)
        run.start()
        epoch = run.ranks[0].batching.order.steps_per_epoch
        stop, middle = epoch + REST, max(1, epoch // 2)
        run.load(0, stop)
        check_values(run)
        samples = check_packing(run, 0, stop)
        check_epoch(run, run.check_division(), samples[:epoch])
        resumed, cached = case["resume"] == "resumed", case["cache"] == "cached"
        if not (resumed or cached):
            return
        start = middle if resumed else 0
        before, state = run.ranks, run.state(middle) if resumed else None
        if not cached:  # it goes on on another machine
            monkeypatch.setenv("WYE_CACHE", str(tmp_path / "another machine"))
        run.start(state)
        run.load(start, stop)
        for rank, other in zip(run.ranks, before, strict=True):
            rest = [step for step in other.steps if step.request.step >= start]
            for found, expected in zip(rank.steps, rest, strict=True):
                assert described(found.request) == described(expected.request)
                check_equal(found.tensors, expected.tensors)
        check_packing(run, start, stop)


def test_every_two_values_that_are_possible_together_are_in_a_case():
    found = set().union(*(pairs_of(case.values()) for case in CASES))
    assert found == {*all_pairs(FACTORS)} - apart_of(IMPOSSIBLE.values())
    assert len(CASES) <= MOST and len({name_of(case) for case in CASES}) == len(CASES)
