"""From requests to tensors: a data set whose items are whole micro-batches, and the workers that make them.

b: samples of the micro-batch, L: tokens, H = W: image_size.
"""

import multiprocessing
import multiprocessing.context
import os
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase

from data.sampler import MicroBatchRequest
from data.sources import Source
from data.tokenizer import batch_tokens
from data.transforms import ImageTransform

MODALITIES = ("image", "text")
# Are the shapes of a modality's training micro-batches all equal? Images have one size; texts are as long as their longest.
CONSTANT_SHAPES = {"image": True, "text": False}
# Last word of the seeds: the streams of the two draws differ, and differ from that of GlobalOrder, which ends in 0
# (numpy reads [seed, epoch] as [seed, epoch, 0, 0]).
AUGMENTATION, CAPTION = 1, 2
MAX_WORKERS_GPU, MAX_WORKERS_CPU = 8, 2


class MicroBatchDataset(Dataset):
    """`dataset[request]` is one whole micro-batch, a pure function of the source, the request and `seed`.

    With "image": pixel_values float32 [b, 3, H, W], image_position and image_index int64 [b].
    With "text": input_ids and attention_mask int64 [b, L], text_position and text_index int64 [b].
    Only what the modalities ask for is done: without "image" nothing is decoded, without "text" nothing is tokenized.
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
    ) -> None:
        if not modalities or not set(modalities) <= set(MODALITIES):
            raise ValueError(f"modalities {sorted(modalities)}: one or both of {', '.join(MODALITIES)} are needed")
        if "image" in modalities and (transform_train is None or transform_eval is None):
            raise ValueError("modality 'image' needs transform_train and transform_eval; see data/transforms.py")
        if "text" in modalities and (tokenizer is None or max_text_tokens is None):
            raise ValueError("modality 'text' needs tokenizer and max_text_tokens; see data/tokenizer.py")
        if seed < 0:
            raise ValueError(f"seed {seed}: a whole number >= 0 is needed")
        self.source = source
        self.modalities = frozenset(modalities)
        self.transform_train = transform_train
        self.transform_eval = transform_eval
        self.tokenizer = tokenizer
        self.max_text_tokens = max_text_tokens
        self.seed = seed

    def __getitem__(self, request: MicroBatchRequest) -> dict[str, Tensor]:
        indices = request.index.tolist()
        if min(indices) < 0 or max(indices) >= len(self.source):
            raise ValueError(f"samples {min(indices)}..{max(indices)} asked for; {self.source.spec} has 0..{len(self.source) - 1}")
        micro_batch: dict[str, Tensor] = {}
        if "image" in self.modalities:
            pixel_values = torch.stack([self._picture(request, i) for i in indices])  # [b, 3, H, W]
            # Convolutions follow the memory format of their input, and are faster on channels-last on CPU and GPU alike.
            micro_batch["pixel_values"] = pixel_values.contiguous(memory_format=torch.channels_last)
        if "text" in self.modalities:
            texts = [self._caption(request, i) for i in indices]
            micro_batch |= batch_tokens(self.tokenizer, texts, self.max_text_tokens)  # [b, L]
        for modality in sorted(self.modalities):
            micro_batch[f"{modality}_position"] = torch.from_numpy(request.position.copy())  # [b]
            micro_batch[f"{modality}_index"] = torch.from_numpy(request.index.copy())  # [b]
        return micro_batch

    def _picture(self, request: MicroBatchRequest, i: int) -> Tensor:
        if not request.training:
            return self.transform_eval(self.source.image(i))
        with seeded_torch(self.seed, request.epoch, i, AUGMENTATION):
            return self.transform_train(self.source.image(i))

    def _caption(self, request: MicroBatchRequest, i: int) -> str:
        captions = self.source.captions(i)
        if not request.training or len(captions) == 1:
            return captions[0]
        return captions[np.random.default_rng([self.seed, request.epoch, i, CAPTION]).integers(len(captions))]


@contextmanager
def seeded_torch(*words: int) -> Iterator[None]:
    """torch's CPU randomness is a pure function of `words` inside, and goes on as if nothing had happened after.

    `torch.manual_seed` is avoided: it would also seed the GPU, on which the model draws its dropout.
    """
    seed = int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        yield


def micro_batches(
    dataset: MicroBatchDataset, requests: Iterable[MicroBatchRequest], workers: int = 0, pin_memory: bool = False, prefetch: int = 2
) -> Iterator[dict[str, Tensor]]:
    """The micro-batches of `requests`, in their order, made in this process (workers 0) or ahead of time in others.

    `prefetch`: micro-batches that each worker keeps ready. What a worker raises is raised here, with the same type and
    message, when its micro-batch is due. Errors: ValueError, OSError.
    """
    loader = DataLoader(
        _Carrier(dataset) if workers > 0 else dataset,
        sampler=requests,
        batch_size=None,  # a request is a whole micro-batch
        num_workers=workers,
        pin_memory=pin_memory,
        prefetch_factor=prefetch if workers > 0 else None,
        persistent_workers=workers > 0,
        worker_init_fn=_start_worker if workers > 0 else None,
        multiprocessing_context=_start_method() if workers > 0 else None,
        generator=torch.Generator(),  # its own: making a loader must not move the model's random state
    )
    return _unpacked(loader)


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


class _Carrier(Dataset):
    """Hands errors over as items: DataLoader would wrap the message in a traceback of the worker."""

    def __init__(self, dataset: MicroBatchDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, request: MicroBatchRequest) -> Any:
        try:
            return self.dataset[request]
        except (ValueError, OSError) as error:  # what data/ raises; these survive the way between processes
            return _Failure(error, traceback.format_exc())


def _unpacked(loader: DataLoader) -> Iterator[dict[str, Tensor]]:
    for item in loader:
        if isinstance(item, _Failure):
            raise item.error from _WorkerTraceback(item.where)
        yield item


def _start_method() -> multiprocessing.context.BaseContext:
    """Workers start from a fork server, or where there is none afresh; not by forking this process.

    In a rank run the threads of CUDA, NCCL and the tokenizer; a lock that one of them holds stays shut for ever in a fork.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Imported once by the server instead of once by each worker; "__main__" is Python's own default.
    context.set_forkserver_preload(["__main__", "data.loader"])
    return context


def _start_worker(worker: int) -> None:
    torch.set_num_threads(1)  # the cores are shared out by resolve_workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
