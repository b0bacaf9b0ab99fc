"""What a rank feeds its stage with: the micro-batches of the branches that enter there, and nothing
else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.cpus import usable_cpus
from common.sizes import GIB
from data.bad_tables import bad_table
from data.batching.requests import MicroBatchRequest
from data.batching.stream_order import StreamOrder
from data.cache import SampleCache, default_folder, open_cache
from data.index.sources import Source
from data.loader import LoadReport, micro_batches, resolve_workers
from data.modalities.text import Languages
from data.options import LoadingOptions
from data.prepared import PreparedData
from data.processes import start_early
from data.stored.kinds import is_file, is_text, text_of
from data.stored.record import UNREADABLE
from data.streams.lengths import of_streams
from data.streams.prefetch import Prefetcher
from data.streams.several import checking_texts, stream_counts, texts_alone
from data.streams.source import COUNTS as STREAM_COUNTS
from engine.executor import ForkEngine
from engine.processes.start import Processes
from launch.batching.batching import Batching
from launch.config.groups import InputOptions
from launch.inputs import micro_batch_dataset
from launch.modalities import Inputs
from launch.run.folder import RunFolder

MicroBatches = Generator[dict[str, Tensor] | list[dict[str, Tensor]], None, None]
OF_STORAGE = ("unreadable", "missing-file")
# of shards that are left out as a whole, whose share was judged when the run started
JUDGED_BEFORE = ("missing-shard", "changed-shard")
BAD_TO_JUDGE = 100  # a few images that break are no fraction yet
# Below this many micro-batches, starting loader processes takes longer than they save.
WORTH_WORKERS = 64


class Feeding:
    """Micro-batches for the stage of this rank: of training, and of held-out sets."""

    def __init__(
        self,
        data: PreparedData,
        engine: ForkEngine,
        batching: Batching,
        folder: RunFolder,
        inputs: InputOptions,
        loading: LoadingOptions,
        patch_size: int | None = None,
        languages: Languages | None = None,
    ):
        """`patch_size`: of a ViT; `languages`: that the text tower tells apart."""
        self.data, self.engine, self.batching, self.folder = data, engine, batching, folder
        self.loading = loading
        self.pin_memory = engine.comm.device.type != "cpu"
        self.branch = next(iter(engine.stage.layers))
        self.modalities = frozenset(engine.stage.loads)
        # the next stage must know all shapes of a step before its first micro-batch
        self.meta_first = engine.stage.next is not None
        self.batch = engine.batches[self.branch]
        # what training samples are read from
        self.source = data.source
        if batching.batches.texts_apart and self.modalities:
            alone = all(map(is_text, self.modalities))
            self.source = (texts_alone if alone else checking_texts)(data.source)
        self.inputs = Inputs(
            inputs,
            data.tokenizer,
            data.length_multiple,
            sample_cache(loading) if any(map(is_file, self.modalities)) else None,
            patch_size,
            languages,
        )
        self.name = engine.graph.describe_rank(engine.comm.rank)
        # counted on every rank by the same names, whatever it loads
        every = micro_batch_dataset(data.source, self.inputs, inputs.branches).count_names
        self._counts = dict.fromkeys([*every, *(STREAM_COUNTS if data.shards else ())], 0.0)
        self._prefetcher: Prefetcher | None = None
        self._unreadable: Counter[str] = Counter()
        self._loaded = 0
        self._listed: set[tuple[str, int]] = set()

    def training(self, start_step: int, stop_step: int) -> MicroBatches | None:
        """This rank's micro-batches for the steps start_step..stop_step-1, those of each step after
        their meta batches where a next stage waits for these; None where nothing enters."""
        requests = self.batching.requests(start_step, stop_step, self.meta_first)
        if self.data.shards and self.modalities:
            requests = self._prefetched(requests, start_step)
        return self._micro_batches(self.source, requests, self.loading.num_workers, training=True)

    def counts(self) -> dict[str, float]:
        """What was counted since the last call; the same names on every rank."""
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0.0)
        # what this process itself has read, to pack texts, is in no report of a loader
        for name, number in stream_counts(self.source).items():
            counts[name] += number
        if self._prefetcher is not None:
            counts["stream_bytes"] += self._prefetcher.taken_bytes()
        return counts

    def _prefetched(self, requests: Iterable[Any], start_step: int) -> Iterator[Any]:
        """The requests, of which a process of this rank knows the coming shards."""
        batches = self.batching.batches
        alone = text_of(self.modalities) is None and batches.asks_own(self.branch)
        share = (self.engine.comm.replica, self.batch.replicas) if alone else None
        texts = batches.texts if text_of(self.modalities) else None
        tokens = of_streams(texts.tokens) if texts else {}
        known = (self.source, self._order(), share, start_step, tokens)
        with Prefetcher(*known) as self._prefetcher:
            for request in requests:
                step = request[0].step if isinstance(request, list) else request.step
                self._prefetcher.at(step, self._order())
                yield request

    def _order(self) -> StreamOrder:
        order = self.batching.order
        assert isinstance(order, StreamOrder)
        return order

    def held_out(self, source: Source, requests: list[MicroBatchRequest]) -> MicroBatches | None:
        """This rank's micro-batches of a held-out set; None where nothing enters."""
        workers = self.loading.num_workers if len(requests) >= WORTH_WORKERS else 0
        meta = [requests] if self.meta_first else []
        return self._micro_batches(source, [*meta, *requests], workers, training=False)

    def _micro_batches(
        self, source: Source, requests: Iterable[Any], workers: int, training: bool
    ) -> MicroBatches | None:
        if not self.modalities:
            return None
        return micro_batches(
            micro_batch_dataset(source, self.inputs, self.modalities),
            requests,
            workers,
            self.pin_memory,
            on_load=partial(self._note, source, training),
            name=self.name,
        )

    def _note(self, source: Source, training: bool, report: LoadReport) -> None:
        """Count, list what could not be read, and stop when that is too much of what was loaded.
        Texts of held-out samples are no step's."""
        for name, number in report.counts.items():
            if training or name.startswith(UNREADABLE):
                self._counts[name] += number
        self._loaded += report.num_decoded
        for i, reason, detail in report.bad:
            if reason not in JUDGED_BEFORE:
                self._unreadable[reason] += 1
            if (source.spec, i) not in self._listed:  # it comes again in every epoch
                self._listed.add((source.spec, i))
                where = source.where(i)
                self.folder.note_bad_sample(
                    source.spec,
                    source.identity(i),
                    where,
                    reason,
                    detail.removeprefix(f"{where}: "),
                )
        number, limit = sum(self._unreadable.values()), self.loading.max_bad_fraction
        if number >= BAD_TO_JUDGE and number > limit * self._loaded:
            examples = (f"    {detail}" for _, _, detail in report.bad)
            # it may be mended when the run is started again
            of_storage = sum(self._unreadable[reason] for reason in OF_STORAGE)
            raise (OSError if 2 * of_storage > number else ValueError)(
                bad_table(source.spec, self._unreadable, self._loaded, limit, examples)
            )


def share_cores(loading: LoadingOptions, processes: Processes) -> LoadingOptions:
    """With as many workers as a rank starts. Without a GPU the ranks that share cores do so for
    their own work, too."""
    cores, on_gpu = usable_cpus(), processes.device.type != "cpu"
    shared = max(1, cores // processes.ranks_on_cores)
    # torch begins with a thread per core of the machine, also where a container has less
    torch.set_num_threads(min(cores, torch.get_num_threads()) if on_gpu else shared)
    workers = resolve_workers(loading.workers, processes.ranks_on_cores, cores, on_gpu)
    if workers:
        start_early()
    return replace(loading, workers=workers)


def sample_cache(loading: LoadingOptions) -> SampleCache | None:
    """Where --cache says; None when it is off or cannot be used, which is warned of."""
    if loading.cache == "off":
        return None
    return open_cache(
        default_folder() if loading.cache == "auto" else Path(loading.cache),
        int(loading.cache_limit * GIB),
    )
