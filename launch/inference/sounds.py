"""What a model with audio can do: retrieval from every modality to every other, also where no loss
compared the two."""

from __future__ import annotations

from itertools import permutations

import torch
from torch import Tensor

from data.prepare import HeldOut
from launch.inference.embedding import Embedder
from launch.inference.evaluation import rank_figures
from models.metrics.retrieval import best_ranks


def sound_retrieval(embedder: Embedder, part: HeldOut) -> dict[str, float]:
    """{"audio_to_text_R@1": …, "audio_to_image_R@1": …, …}: every direction from or to sounds, each
    over the samples that have both; the first caption of each. No samples: none."""
    found = {"audio": embedder.sounds(part.source, part.subset)}
    if "image" in embedder.branches:
        with_image = part.subset[~part.source.lacking("image")[part.subset]]
        found["image"] = embedder.images(part.source, with_image)
    if "text" in embedder.branches:
        with_text = part.subset[~part.source.lacking("text")[part.subset]]
        first = [part.source.captions(int(i))[0] for i in with_text]
        found["text"] = torch.from_numpy(with_text), embedder.texts(first)
    values: dict[str, float] = {}
    for one, other in permutations(found, 2):
        if "audio" in (one, other):
            queries, candidates = of_same_samples(found[one], found[other])
            numbers = torch.arange(len(queries))
            if len(numbers):
                ranks = best_ranks(queries, numbers, candidates, numbers)
                values |= rank_figures(f"{one}_to_{other}", ranks)
    return values


def of_same_samples(
    one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """(indices [n], rows [n, D]) of two modalities -> the rows of the samples that both have, in one
    order."""
    place = {index: row for row, index in enumerate(other[0].tolist())}
    both = [(row, place[index]) for row, index in enumerate(one[0].tolist()) if index in place]
    first, second = torch.tensor(both, dtype=torch.int64).reshape(-1, 2).T
    return one[1][first], other[1][second]
