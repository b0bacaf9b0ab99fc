"""The loader: a data set whose items are whole micro-batches, and the workers that make them from
requests.

n: rows of a modality in the micro-batch.
"""

import multiprocessing
import multiprocessing.process
import os
import re
import signal
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from data.batching.requests import MicroBatchRequest
from data.index.sources import Source
from data.modalities import memory
from data.modalities.modality import Loaded, Modality
from data.processes import end_with_parent, outlast_signals, start_method
from data.stored.kinds import stored
from data.streams.several import keep_shards, stream_counts

MAX_WORKERS_GPU, MAX_WORKERS_CPU = 16, 2
# exit codes where memory, or /dev/shm, is full
ENDED_BY_SYSTEM = (-signal.SIGKILL, -signal.SIGBUS)
SEEN_S = 2.0  # within which a process that ended is seen to be gone


@dataclass(frozen=True)
class LoadReport:
    """A report about one micro-batch.

    `bad`: (index, reason, detail) of what cannot be read. `counts`: of all modalities, by name.
    `num_decoded`: values that may turn out bad while they are loaded, with those that did.
    """

    bad: list[tuple[int, str, str]] = field(default_factory=list)
    counts: Mapping[str, float] = field(default_factory=dict)
    num_decoded: int = 0


class MicroBatchDataset(Dataset):
    """`dataset[request]` is one whole micro-batch, a pure function of the source, the request and
    `seed`.

    It holds the tensors of each modality, and of each modality NAME int64 [n]: NAME_position, the
    row's place in the global batch, NAME_index, its sample in the source, and NAME_key, equal where
    values are equal; where the request has weights also NAME_weight, millionths that each row
    counts in the loss. Only what the modalities ask for is done: without the images nothing is
    decoded, without the texts nothing is tokenized.

    A sample that lacks the modality, or whose value cannot be read, shows a stand-in, and its index
    is -1 - index, so that the loss leaves the row out.
    """

    def __init__(self, source: Source, modalities: Sequence[Modality], seed: int = 0) -> None:
        self.source, self.modalities, self.seed = source, tuple(modalities), seed

    def __getitem__(self, request: MicroBatchRequest) -> dict[str, Tensor]:
        return self.load(request)[0]

    def load(self, request: MicroBatchRequest) -> tuple[dict[str, Tensor], LoadReport]:
        """The micro-batch and its report."""
        phrases = request.phrases()
        of_phrases = [] if phrases is None else [phrases.index]
        asked = np.concatenate([request.index, request.texts().index, *of_phrases])
        if asked.min() < 0 or asked.max() >= len(self.source):
            raise ValueError(
                f"samples {asked.min()}..{asked.max()} asked for; {self.source.spec} has "
                f"0..{len(self.source) - 1}"
            )
        if request.shards is not None:
            keep_shards(self.source, request.shards)
        micro_batch: dict[str, Tensor] = {}
        bad: list[tuple[int, str, str]] = []
        counts: dict[str, float] = {}
        num_decoded = 0
        for modality in self.modalities:
            loaded = modality.load(self.source, request, self.seed)
            micro_batch |= _tensors(modality.name, loaded)
            bad += loaded.bad
            counts |= loaded.counts
            if modality.decodes:
                counts[stored(modality.name).unreadable] = len(loaded.bad)
                num_decoded += len(request.index)
        return micro_batch, LoadReport(bad, counts | stream_counts(self.source), num_decoded)

    @property
    def count_names(self) -> list[str]:
        """Of what is counted, whatever a micro-batch holds; without those of shards."""
        decoding = [each.name for each in self.modalities if each.decodes]
        own = [name for each in self.modalities for name in each.count_names]
        return [*own, *(stored(name).unreadable for name in decoding)]

    def meta_batch(self, request: MicroBatchRequest) -> dict[str, Tensor]:
        """The micro-batch on the meta device: its names, dtypes and shapes. No image is decoded."""
        return {
            name: tensor.to("meta")
            for modality in self.modalities
            for name, tensor in _tensors(
                modality.name, modality.meta_batch(self.source, request, self.seed)
            ).items()
        }


def _tensors(name: str, loaded: Loaded) -> dict[str, Tensor]:
    """The tensors of a modality, as they enter the stage."""
    index, missing = loaded.index, [*loaded.absent, *(i for i, _, _ in loaded.bad)]
    if missing:
        index = np.where(np.isin(index, missing), -1 - index, index)
    key = loaded.index if loaded.key is None else loaded.key
    labels = {"position": loaded.position, "index": index, "key": key, "weight": loaded.weight}
    tensors = loaded.tensors | {
        f"{name}_{label}": torch.from_numpy(values.copy())
        for label, values in labels.items()
        if values is not None
    }
    for further, rows in loaded.further.items():
        tensors |= _tensors(further, rows)
    return tensors


class Loads(Protocol):
    """What workers can be given: makes micro-batches of requests."""

    def load(self, request: Any) -> tuple[dict[str, Tensor], LoadReport]: ...


def micro_batches(
    dataset: Loads,
    requests: Iterable[Any],
    workers: int = 0,
    pin_memory: bool = False,
    on_load: Callable[[LoadReport], None] | None = None,
    name: str = "",
) -> Generator[dict[str, Tensor] | list[dict[str, Tensor]], None, None]:
    """The micro-batches of `requests`, in their order, made in this process (workers 0) or ahead of
    time in others, where each worker keeps two ready. A list of requests gives the list of their
    meta batches.

    `on_load` is called here, before a micro-batch is handed out. `name`: whose loader this is, for
    messages, for example "rank 3". What a worker raises is raised here, with the same type and
    message, when its micro-batch is due. Errors: ValueError, OSError; ChildProcessError when a
    worker was killed, at most a few seconds later.
    """
    loader = DataLoader(
        _Items(dataset),
        sampler=requests,
        batch_size=None,  # a request is a whole micro-batch
        num_workers=workers,
        pin_memory=pin_memory,
        worker_init_fn=_start_worker if workers > 0 else None,
        multiprocessing_context=start_method() if workers > 0 else None,
        # its own: making a loader must not move the model's random state
        generator=torch.Generator(),
    )
    others = multiprocessing.active_children()
    iterator = iter(loader)
    processes = [child for child in multiprocessing.active_children() if child not in others]
    try:
        while True:
            try:
                item = next(iterator)
            except StopIteration:
                return
            except (RuntimeError, EOFError, OSError) as error:
                # of the way between the processes: others come as _Failure
                lost = _lost(processes, str(error))
                if not lost:
                    raise
                of = f" of {name}" if name else ""
                raise ChildProcessError(f"the loader{of} lost {lost}") from error
            loaded, report = item
            if isinstance(report, _Failure):
                raise report.error from _WorkerTraceback(report.where)
            if report is not None and on_load is not None:
                on_load(report)
            del item  # or it would keep the micro-batch before alive while the next one is made
            yield loaded
            del loaded
    finally:
        del iterator
        memory.forget([process.pid or 0 for process in processes])


def resolve_workers(asked: str | int, ranks_on_node: int, cpu_count: int, on_gpu: bool) -> int:
    """The number of loader processes of one rank: `asked` where it is a number, else what the
    machine has to spare.

    "auto" with a GPU: the cores beside each rank's own, 1 to 16. Without: towers compute on the
    cores, so at most 2, and 0 (load in the rank itself) when no rank has a core to spare.
    """
    if isinstance(asked, int):
        return asked
    spare = cpu_count // ranks_on_node - 1
    return min(max(spare, 1), MAX_WORKERS_GPU) if on_gpu else min(max(spare, 0), MAX_WORKERS_CPU)


@dataclass(frozen=True)
class _Failure:
    error: Exception
    where: str


class _WorkerTraceback(Exception):
    """The cause of an error that a worker raised, with the worker's traceback."""


class _Items(Dataset):
    """(micro-batch, its report), (meta batches, None) or (None, _Failure): DataLoader would wrap
    the message of an error in a traceback of the worker."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, request: Any) -> Any:
        memory.reclaim()
        try:
            if isinstance(request, list):
                return [self.dataset.meta_batch(each) for each in request], None
            micro_batch, report = self.dataset.load(request)
            return memory.sendable(micro_batch), report
        except (ValueError, OSError) as error:  # what data/ raises; these survive the way
            return None, _Failure(error, traceback.format_exc())


def _lost(workers: Sequence[multiprocessing.process.BaseProcess], message: str) -> str:
    """A text that says which workers have ended, how, and what to do; "" if none has. `message`:
    DataLoader's, which names some."""
    if workers:
        # a connection may end a moment before the process that held it is seen to be gone
        wait([worker.sentinel for worker in workers], timeout=SEEN_S)
    found = re.search(r"DataLoader worker \(pids?(?:\(s\))? ([\d, ]+)\)", message)
    named = set(map(int, found[1].split(","))) if found else set()
    fates, killed = [], False
    for number, worker in enumerate(workers):
        code = worker.exitcode
        if code is None and worker.pid not in named:
            continue
        fate = "without a word" if code is None else f"to its own exit with status {code}"
        if code is not None and code < 0:
            known = -code in map(int, signal.Signals)
            fate = f"to {signal.Signals(-code).name}" if known else f"to signal {-code}"
        killed |= code in ENDED_BY_SYSTEM
        fates.append(f"worker {number} of {len(workers)} (process {worker.pid}) {fate}")
    if not fates:
        return ""
    cause = (
        ". Most often the machine ran out of memory and the system killed it: see dmesg, and in a "
        "container its memory limit and the size of /dev/shm. Give fewer --workers, smaller "
        "micro-batches, or the machine more memory"
    )
    return ", ".join(fates) + (cause if killed else "; what it printed stands above")


def _start_worker(worker: int) -> None:
    end_with_parent()
    outlast_signals()
    memory.share_from_now_on()
    # remarks on odd files: what cannot be read is reported as such
    warnings.filterwarnings("ignore", module="PIL")
    torch.set_num_threads(1)  # the cores are shared out by resolve_workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
