"""Images with regions, or clips with moments, and texts with phrases: which there are in a batch,
and what a micro-batch brings of them.

A third of the samples have no annotation, one has fifty; some are not in the view; phrases repeat,
and some come with negatives.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from small_towers import MAX_TOKENS, VOCAB
from torch import Tensor

from common.boxes import WHOLE

PHRASES, MOST, WEIGHT = 9, 50, 0.5
OF = {"region": "image", "moment": "video"}
EXTENTS = {"region": "region_boxes", "moment": "moment_spans"}


@dataclass(frozen=True)
class Annotations:
    """R annotations of the global batch, n negatives. `name`: of `OF`."""

    name: str
    sample: Tensor  # [R]
    extents: Tensor  # [R, 4] or [R, 2]
    seen: Tensor  # [R] bool, in the view
    phrase: Tensor  # [R], which
    negative: Tensor  # [n], which phrase
    negative_of: Tensor  # [n], sample
    tokens: Tensor  # [PHRASES, L]

    def of_values(self, places: Tensor, first_index: int) -> dict[str, Tensor]:
        """The labels of the annotations of these samples."""
        own = torch.isin(self.sample, places).nonzero().flatten()
        return self._labels(self.name, own, own + 10**6, self._index(own, first_index))

    def of_texts(self, places: Tensor, first_index: int) -> dict[str, Tensor]:
        """The labels of their phrases: those of the annotations, then negatives."""
        own = torch.isin(self.sample, places).nonzero().flatten()
        more = torch.isin(self.negative_of, places).nonzero().flatten()
        position = torch.cat([own, more + len(self.sample)])
        key = torch.cat([self.phrase[own], self.negative[more]])
        negative_index = self.negative_of[more] + first_index
        index = torch.cat([self._index(own, first_index), negative_index])
        return self._labels("phrase", position, key, index)

    def _index(self, own: Tensor, first_index: int) -> Tensor:
        index = self.sample[own] + first_index
        return torch.where(self.seen[own], index, -1 - index)

    @staticmethod
    def _labels(name: str, position: Tensor, key: Tensor, index: Tensor) -> dict[str, Tensor]:
        return {f"{name}_position": position, f"{name}_index": index, f"{name}_key": key}

    def where(self, position: Tensor, places: Tensor) -> dict[str, Tensor]:
        """Of annotations at these positions, among the samples `places` of a micro-batch."""
        row = (self.sample[position][:, None] == places).int().argmax(1)
        return {EXTENTS[self.name]: self.extents[position], f"{self.name}_row": row}

    def behind(self, captions: Mapping[str, Tensor], phrase: Tensor) -> dict[str, Tensor]:
        """The captions of a micro-batch, with these phrases behind them."""
        missing = MAX_TOKENS - captions["input_ids"].shape[1]
        added = {"input_ids": self.tokens[phrase]}
        added["attention_mask"] = torch.ones_like(added["input_ids"])
        return {
            name: torch.cat([F.pad(captions[name], (0, missing)), own])
            for name, own in added.items()
        }


@cache
def annotations_of(
    name: str, num_samples: int, without: Collection[int] = (), not_seen: Collection[int] = ()
) -> Annotations:
    """`without`, `not_seen`: samples that have no annotation, or whose annotations are not in the
    view."""
    random = torch.Generator().manual_seed(5)
    numbers = torch.randint(1, 5, (num_samples,), generator=random)
    numbers[::3], numbers[7] = 0, MOST
    numbers[list(without)] = 0
    sample = torch.arange(num_samples).repeat_interleave(numbers)
    corners = torch.rand(len(sample), 2, 2, generator=random).sort(1).values  # [R, corner, xy]
    corners[:, 1] = (corners[:, 1] + 0.1).clamp(max=1)
    negatives = torch.randint(0, 3, (len(sample),), generator=random)
    hidden = torch.isin(sample, torch.tensor(list(not_seen), dtype=torch.int64))
    if name == "region":
        extents = (corners.reshape(-1, 4) * WHOLE).to(torch.int32)
    else:  # of clips of one frame each 300 ms, some moments behind the last
        extents = (corners[..., 0] * 1500).to(torch.int32)
    return Annotations(
        name,
        sample,
        extents,
        (torch.rand(len(sample), generator=random) > 0.2) & ~hidden,
        torch.randint(0, PHRASES, (len(sample),), generator=random),
        torch.randint(0, PHRASES, (int(negatives.sum()),), generator=random),
        sample.repeat_interleave(negatives),
        torch.randint(5, VOCAB, (PHRASES, MAX_TOKENS), generator=random),
    )
