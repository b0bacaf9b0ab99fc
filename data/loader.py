"""From requests to tensors: a data set whose items are whole micro-batches, and the workers that make them.

b: samples of the micro-batch, t: its texts, c: captions that each sample shows, L: tokens, K: patches kept, H, W: the tower's input in pixels.
"""

import multiprocessing
import multiprocessing.process
import os
import re
import signal
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase

from data.batching.draws import AUGMENTATION, caption_numbers, patch_numbers
from data.batching.feed import kept_number, scaled_size
from data.batching.sampler import MicroBatchRequest
from data.cache import PictureCache
from data.index.bad_samples import BadSample
from data.index.sources import Source
from data.modalities import shared_pixels
from data.modalities.tokenizer import batch_tokens_counted
from data.modalities.transforms import ImageTransform, normalised
from data.processes import end_with_parent, outlast_signals, start_method

MODALITIES = ("image", "text")
MAX_WORKERS_GPU, MAX_WORKERS_CPU = 8, 2
GREY = 128  # where a micro-batch has no readable picture at all


@dataclass(frozen=True)
class LoadReport:
    """What there is to say about one micro-batch."""

    bad: list[tuple[int, str, str]] = field(default_factory=list)  # (index, reason, detail) of pictures that cannot be read
    num_pictures: int = 0  # with the bad ones
    num_texts: int = 0
    num_truncated: int = 0  # of these texts, cut at the tower's limit
    num_tokens: int = 0
    num_padded_tokens: int = 0  # of the whole rectangle
    wait_s: float = 0.0  # how long the caller of `micro_batches` waited for it


class MicroBatchDataset(Dataset):
    """`dataset[request]` is one whole micro-batch, a pure function of the source, the request and `seed`.

    With "image": pixel_values float32 [b, 3, H, W], channels-last, image_position and image_index int64 [b].
    With "text": input_ids and attention_mask int64 [t, L], text_position and text_index int64 [t], t texts: c of each sample, or b of those.
    Where the request has weights also image_weight [b] and text_weight [t], int64 millionths: what each row counts in the loss.
    With `patch_size` (ViT) and fewer patches asked for: kept_patches int64 [b, K], ascending. `side_multiple`: of the sides that the tower takes;
    `length_multiple`: of L.
    Only what the modalities ask for is done: without "image" nothing is decoded, without "text" nothing is tokenized.

    A picture that cannot be read shows the next readable one of the micro-batch (grey if there is none), and its image_index
    is -1 - index, so that the loss can leave the pair out. `cache` changes no value.
    """

    def __init__(
        self,
        source: Source,
        modalities: frozenset[str],
        transform_train: ImageTransform | None = None,
        transform_eval: ImageTransform | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_text_tokens: int | None = None,
        seed: int = 0,
        cache: PictureCache | None = None,
        side_multiple: int = 1,
        patch_size: int | None = None,
        length_multiple: int = 1,
    ) -> None:
        if not modalities or not set(modalities) <= set(MODALITIES):
            raise ValueError(f"modalities {sorted(modalities)}: one or both of {', '.join(MODALITIES)} are needed")
        if "image" in modalities and (transform_train is None or transform_eval is None):
            raise ValueError("modality 'image' needs transform_train and transform_eval; see data/modalities/transforms.py")
        if "text" in modalities and (tokenizer is None or max_text_tokens is None):
            raise ValueError("modality 'text' needs tokenizer and max_text_tokens; see data/modalities/tokenizer.py")
        if seed < 0:
            raise ValueError(f"seed {seed}: a whole number >= 0 is needed")
        self.source = source
        self.modalities = frozenset(modalities)
        self.transform_train = transform_train
        self.transform_eval = transform_eval
        self.tokenizer = tokenizer
        self.max_text_tokens = max_text_tokens
        self.seed = seed
        self.cache = cache
        self.side_multiple = side_multiple
        self.patch_size = patch_size
        self.length_multiple = length_multiple

    def __getitem__(self, request: MicroBatchRequest) -> dict[str, Tensor]:
        return self.load(request)[0]

    def load(self, request: MicroBatchRequest, memory: Callable[[int], Tensor] | None = None) -> tuple[dict[str, Tensor], LoadReport]:
        """The micro-batch and its report. `memory`: gives flat float32 memory for so many pixel values."""
        indices = request.index.tolist()
        asked = [*indices, *(() if request.dealt_texts is None else request.dealt_texts.index.tolist())]
        if min(asked) < 0 or max(asked) >= len(self.source):
            raise ValueError(f"samples {min(asked)}..{max(asked)} asked for; {self.source.spec} has 0..{len(self.source) - 1}")
        micro_batch: dict[str, Tensor] = {}
        bad: list[tuple[int, str, str]] = []
        num_pictures = num_texts = num_truncated = num_tokens = num_padded = 0
        if "image" in self.modalities:
            pictures, bad = self._pictures(request, indices)
            num_pictures = len(pictures)
            out = memory and memory(sum(picture.size for picture in pictures))
            micro_batch["pixel_values"] = normalised(pictures, out, self.transform_eval.preprocessing)
            if request.knobs.kept_patches < 1 and self.patch_size:
                micro_batch["kept_patches"] = torch.from_numpy(self._kept_patches(request, indices, pictures[0].shape[:2]))  # [b, K]
        if "text" in self.modalities:
            text_index, text_position, number = request.texts()
            texts = [self._caption(request, i, k) for i, k in zip(text_index.tolist(), number.tolist())]
            tokens, num_truncated = batch_tokens_counted(self.tokenizer, texts, self.max_text_tokens, self.length_multiple)  # [b, L]
            micro_batch, num_texts = micro_batch | tokens, len(texts)
            num_tokens, num_padded = int(tokens["attention_mask"].sum()), tokens["attention_mask"].numel()
            micro_batch["text_position"] = torch.from_numpy(text_position.copy())  # [t]
            micro_batch["text_index"] = torch.from_numpy(text_index.copy())  # [t]
            if (weight := request.text_weight()) is not None:
                micro_batch["text_weight"] = torch.from_numpy(weight.copy())  # [t]
        if "image" in self.modalities:
            micro_batch["image_position"] = torch.from_numpy(request.position.copy())  # [b]
            micro_batch["image_index"] = torch.from_numpy(request.index.copy())  # [b]
            if request.weight is not None:
                micro_batch["image_weight"] = torch.from_numpy(request.weight.copy())  # [b]
        if bad:
            index, unreadable = micro_batch["image_index"], torch.tensor([i for i, _, _ in bad])
            micro_batch["image_index"] = torch.where(torch.isin(index, unreadable), -1 - index, index)
        return micro_batch, LoadReport(bad, num_pictures, num_texts, num_truncated, num_tokens, num_padded)

    def _pictures(self, request: MicroBatchRequest, indices: list[int]) -> tuple[list[np.ndarray], list[tuple[int, str, str]]]:
        """[H, W, 3] uint8 for each index, and which of them could not be read."""
        transform = self.transform_train if request.training else self.transform_eval
        size = request.size or transform.size
        if request.training and request.knobs.image_size:
            size = scaled_size(size, request.knobs.image_size, max(transform.size), self.side_multiple)
        transform = replace(transform, size=size)
        pictures: list[np.ndarray | None] = []
        bad = []
        for i in indices:
            try:
                generator = np.random.default_rng([self.seed, request.epoch, i, AUGMENTATION]) if request.training else None
                pictures.append(transform(self._stored(transform, i), generator))
            except BadSample as error:
                pictures.append(None)
                bad.append((i, error.reason, f"{self.source.where(i)}: {error.detail}"))
        if bad:
            readable = [picture for picture in pictures if picture is not None] or [np.full((*transform.size, 3), GREY, np.uint8)]
            before = np.cumsum([picture is not None for picture in pictures])  # readable ones up to here
            pictures = [readable[n % len(readable)] if picture is None else picture for picture, n in zip(pictures, before)]
        return pictures, bad

    def _stored(self, transform: ImageTransform, i: int) -> np.ndarray:
        if self.cache is None:
            return transform.stored(self.source.image_bytes(i))
        return self.cache.picture(self.source.content_hash(i), transform.stored, lambda: self.source.image_bytes(i))

    def _caption(self, request: MicroBatchRequest, i: int, number: int) -> str:
        captions = self.source.captions(i)
        return captions[caption_numbers(self.seed, request.epoch, i, len(captions), number + 1)[number] if request.training else 0]

    def _kept_patches(self, request: MicroBatchRequest, indices: list[int], size: tuple[int, int]) -> np.ndarray:
        patches = (size[0] // self.patch_size) * (size[1] // self.patch_size)
        kept = kept_number(patches, request.knobs.kept_patches)
        return np.stack([patch_numbers(self.seed, request.epoch, i, patches, kept) for i in indices])


def micro_batches(
    dataset: MicroBatchDataset,
    requests: Iterable[MicroBatchRequest],
    workers: int = 0,
    pin_memory: bool = False,
    prefetch: int = 2,
    on_load: Callable[[LoadReport], None] | None = None,
    name: str = "",
) -> Iterator[dict[str, Tensor]]:
    """The micro-batches of `requests`, in their order, made in this process (workers 0) or ahead of time in others.

    `prefetch`: micro-batches that each worker keeps ready. `on_load` is called here, before a micro-batch is handed out.
    `name`: whose loader this is, for messages, for example "rank 3". What a worker raises is raised here, with the same type
    and message, when its micro-batch is due. Errors: ValueError, OSError; ChildProcessError when a worker was killed, at most a few
    seconds later.
    """
    token = uuid.uuid4().hex
    loader = DataLoader(
        _Carrier(dataset, token if workers > 0 else None),
        sampler=requests,
        batch_size=None,  # a request is a whole micro-batch
        num_workers=workers,
        pin_memory=pin_memory,
        prefetch_factor=prefetch if workers > 0 else None,
        persistent_workers=workers > 0,
        worker_init_fn=_start_worker if workers > 0 else None,
        multiprocessing_context=start_method() if workers > 0 else None,
        generator=torch.Generator(),  # its own: making a loader must not move the model's random state
    )
    return _unpacked(loader, token, on_load, name)


def host_bytes(workers: int, prefetch: int, micro_batch_bytes: int, pin_memory: bool = False) -> int:
    """Most memory of this machine that one loader's micro-batches take: `prefetch` of each worker, and the one handed out.

    Pinning holds one more, while it is copied. What the caller keeps beyond the newest is the caller's, and comes on top.
    """
    if min(workers, prefetch, micro_batch_bytes) < 0:
        raise ValueError(f"workers {workers}, prefetch {prefetch}, micro_batch_bytes {micro_batch_bytes}: none may be below 0")
    return (workers * prefetch + 1 + int(pin_memory)) * micro_batch_bytes


def resolve_workers(asked: str | int, ranks_on_node: int, cpu_count: int, on_gpu: bool) -> int:
    """How many loader processes one rank starts: `asked` where it is a number, else what the machine has to spare.

    "auto" with a GPU: the cores beside each rank's own, 1 to 8. Without: towers compute on the cores, so at most 2, and
    0 (load in the rank itself) when no rank has a core to spare. Errors: ValueError.
    """
    if isinstance(asked, int) and not isinstance(asked, bool) and asked >= 0:
        return asked
    if asked != "auto":
        raise ValueError(f"workers {asked!r}: 'auto' or a whole number >= 0 is needed")
    if ranks_on_node < 1 or cpu_count < 1:
        raise ValueError(f"ranks_on_node {ranks_on_node}, cpu_count {cpu_count}: both must be >= 1")
    spare = cpu_count // ranks_on_node - 1
    return min(max(spare, 1), MAX_WORKERS_GPU) if on_gpu else min(max(spare, 0), MAX_WORKERS_CPU)


@dataclass(frozen=True)
class _Failure:
    error: Exception
    where: str


class _WorkerTraceback(Exception):
    """Shown as the cause of an error that a worker raised."""


class _ByValue:
    """A small tensor that travels inside the message; each other one costs a connection to the worker, to hand over its memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self):
        return torch.from_numpy, (self.tensor.numpy(),)


class _Carrier(Dataset):
    """Hands over micro-batches with their reports, and errors as items: DataLoader would wrap the message in a traceback of the worker."""

    def __init__(self, dataset: MicroBatchDataset, token: str | None) -> None:
        self.dataset = dataset
        self.token = token  # of a loader with workers
        self.blocks: shared_pixels.Blocks | None = None  # of this worker

    def __getitem__(self, request: MicroBatchRequest) -> Any:
        try:
            return self.dataset.load(request) if self.token is None else self._packed(request)
        except (ValueError, OSError) as error:  # what data/ raises; these survive the way between processes
            return _Failure(error, traceback.format_exc())

    def _packed(self, request: MicroBatchRequest) -> tuple[dict[str, Any], LoadReport]:
        if self.blocks is None:
            self.blocks = shared_pixels.Blocks(self.token)
        taken: list[shared_pixels.SharedPixels] = []

        def memory(num_values: int) -> Tensor:
            taken.append(self.blocks.take(num_values))
            return taken[0].out

        micro_batch, report = self.dataset.load(request, memory)
        packed: dict[str, Any] = {name: _ByValue(tensor) for name, tensor in micro_batch.items() if name != "pixel_values"}
        if taken:
            b, _, height, width = micro_batch["pixel_values"].shape
            packed["pixel_values"] = replace(taken[0], shape=(b, height, width))
        return packed, report


def _unpacked(loader: DataLoader, token: str, on_load: Callable[[LoadReport], None] | None, name: str) -> Iterator[dict[str, Tensor]]:
    others = multiprocessing.active_children()
    iterator = iter(loader)
    workers = [child for child in multiprocessing.active_children() if child not in others]
    try:
        while True:
            start = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            except (RuntimeError, EOFError, OSError) as error:  # of the way between the processes: others come as _Failure
                dead = _dead(workers, str(error)) if loader.num_workers else []
                if not dead:
                    raise
                raise ChildProcessError(_obituary(dead, len(workers), name)) from error
            if isinstance(item, _Failure):
                raise item.error from _WorkerTraceback(item.where)
            micro_batch, report = item
            if on_load is not None:
                on_load(replace(report, wait_s=time.perf_counter() - start))
            del item  # or it would keep the micro-batch before alive while the next one is made
            yield micro_batch
            del micro_batch
    finally:
        del iterator
        shared_pixels.forget(token)


def _dead(workers: list[multiprocessing.process.BaseProcess], message: str) -> list[tuple[int, int, int | None]]:
    """(number, process id, exit code) of the workers that are gone, and of those that `message` says are."""
    named = {int(pid) for pids in re.findall(r"DataLoader worker \(pids?(?:\(s\))? ([\d, ]+)\)", message) for pid in pids.split(",")}
    return [(n, worker.pid, worker.exitcode) for n, worker in enumerate(workers) if worker.pid in named or worker.exitcode is not None]


def _obituary(dead: list[tuple[int, int, int | None]], workers: int, name: str) -> str:
    of = f" of {name}" if name else ""
    fates = ", ".join(f"worker {number} of {workers} (process {pid}) {_fate(code)}" for number, pid, code in dead)
    return (
        f"the loader{of} lost {fates}. Most often the machine ran out of memory and the system killed it: see dmesg, and in a container its "
        "memory limit and the size of /dev/shm. Give fewer --workers, smaller micro-batches, or the machine more memory"
    )


def _fate(code: int | None) -> str:
    if code is not None and code < 0:
        return f"to {signal.Signals(-code).name}" if -code in iter(signal.Signals) else f"to signal {-code}"
    return "without a word" if code is None else f"to its own exit with status {code}"


def _start_worker(worker: int) -> None:
    end_with_parent()
    outlast_signals()
    warnings.filterwarnings("ignore", module="PIL")  # remarks on odd files: what cannot be read is reported as such
    torch.set_num_threads(1)  # the cores are shared out by resolve_workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
