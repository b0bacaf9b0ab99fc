"""What a rank feeds its stage with: the micro-batches of the branches that enter there, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from data.loader import MicroBatchDataset, micro_batches
from data.prepare import PreparedData
from data.sampler import GlobalOrder, evaluation_requests, training_requests
from data.sources import Source
from data.transforms import eval_transform, train_transform
from engine.executor import ForkEngine
from launch.options import Options
from launch.report import recalls
from models.retrieval import recall_hits

# Below this many micro-batches, starting loader processes takes longer than they save.
WORTH_WORKERS = 64


class Feeding:
    """Training micro-batches for `engine`, and its held-out sets."""

    def __init__(self, data: PreparedData, order: GlobalOrder, engine: ForkEngine, options: Options, workers: int, pin_memory: bool):
        self.data, self.order, self.engine, self.options = data, order, engine, options
        self.workers, self.pin_memory = workers, pin_memory
        self.modalities = frozenset(engine.place.loads)
        self.batch = engine.batches[next(iter(engine.place.layers))]

    def training(self, start_step: int, stop_step: int) -> Iterator[dict[str, Tensor]] | None:
        """This rank's micro-batches for the steps start_step..stop_step-1; None where nothing enters."""
        if not self.modalities:
            return None
        requests = training_requests(
            self.order, self.data.train, self.engine.replica, self.batch.replicas, self.batch.num_micro_batches, start_step, stop_step
        )
        return micro_batches(self._dataset(self.data.source), requests, self.workers, self.pin_memory)

    def evaluate_held_out(self) -> Iterator[tuple[str, dict[str, float]]]:
        """(name, recalls) of each held-out set, computed through the stages, equal on all ranks."""
        for name, held_out in self.data.held_out.items():
            requests = evaluation_requests(held_out.subset, self.engine.replica, self.batch.replicas, self.batch.micro_batch_size)
            batches = None
            if self.modalities:
                workers = self.workers if len(requests) >= WORTH_WORKERS else 0
                batches = micro_batches(self._dataset(held_out.source), requests, workers, self.pin_memory)
            totals = self.engine.evaluate(batches, len(requests), recall_hits)
            num_pairs = max(1, int(totals.pop("num_pairs")))
            yield name, recalls({direction: hits.tolist() for direction, hits in totals.items()}, num_pairs)

    def held_out_sizes(self) -> Mapping[str, int]:
        return {name: len(held_out.subset) for name, held_out in self.data.held_out.items()}

    def _dataset(self, source: Source) -> MicroBatchDataset:
        return micro_batch_dataset(self.data, source, self.options, self.modalities)


def micro_batch_dataset(data: PreparedData, source: Source, options: Options, modalities: frozenset[str]) -> MicroBatchDataset:
    """Micro-batches of `source` as the run sees them, with what `modalities` need and nothing else."""
    image, text = "image" in modalities, "text" in modalities
    return MicroBatchDataset(
        source,
        modalities,
        train_transform(options.image_size) if image else None,
        eval_transform(options.image_size) if image else None,
        data.tokenizer if text else None,
        options.max_text_tokens if text else None,
        options.seed,
    )
