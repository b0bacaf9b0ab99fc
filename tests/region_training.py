"""Images with regions and texts with phrases, split over ranks by the engine and unsplit in plain
torch.

The unsplit side shares no code with the engine: whole towers in one process, and autograd through
one loss over all regions of the global batch. A third of the samples have no region, one has
fifty; some regions are not in the view; phrases repeat, and some come with negatives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from split_training import (
    EMBED_DIM,
    FIRST_INDEX,
    MAX_TOKENS,
    SEED,
    VOCAB,
    Case,
    global_batch,
    gradient_pieces,
    micro_batch,
    towers_of,
)
from three_branches import engine_for
from torch import Tensor

from common.boxes import WHOLE
from models.losses import InfoNCE, Sigmoid, Targets
from models.towers.building import with_head

G, PHRASES, MOST = 24, 9, 50
LOSSES = {"infonce": InfoNCE, "sigmoid": Sigmoid}
WEIGHT = 0.5


@dataclass(frozen=True)
class WithRegions:
    """One way to split. `whole`: no region is there at all."""

    layout: str
    stages: Any
    replicas: Any
    micro_batch_size: Any
    schedule: str = "batch_sync"
    towers: str = "vit+clip"
    loss: str = "infonce"
    duplicates: str = "positives"
    zero_stage: int = 1
    weighted: bool = False
    none: bool = False

    @cached_property
    def world_size(self) -> int:
        if self.layout == "fork":
            return sum(self.stages[b] * self.replicas[b] for b in self.stages)
        return sum(self.stages.values()) * self.replicas

    def __str__(self) -> str:
        return " ".join(str(value) for value in vars(self).values())

    def places(self, replicas: int, number: int) -> list[list[Tensor]]:
        """[replica][micro-batch] -> samples."""
        parts = torch.arange(G).tensor_split(replicas)
        return [list(part.tensor_split(number)) for part in parts]


@dataclass(frozen=True)
class Regions:
    """R regions of the global batch, n negatives."""

    sample: Tensor  # [R]
    boxes: Tensor  # [R, 4]
    seen: Tensor  # [R] bool, in the view
    phrase: Tensor  # [R], which
    negative: Tensor  # [n], which phrase
    negative_of: Tensor  # [n], sample
    tokens: Tensor  # [PHRASES, L]


def regions_of(case: WithRegions) -> Regions:
    random = torch.Generator().manual_seed(5)
    numbers = torch.randint(1, 5, (G,), generator=random)
    numbers[::3], numbers[7] = 0, MOST
    if case.none:
        numbers[:] = 0
    sample = torch.arange(G).repeat_interleave(numbers)
    corners = torch.rand(len(sample), 2, 2, generator=random).sort(1).values  # [R, corner, xy]
    corners[:, 1] = (corners[:, 1] + 0.1).clamp(max=1)
    negatives = torch.randint(0, 3, (len(sample),), generator=random)
    return Regions(
        sample,
        (corners.reshape(-1, 4) * WHOLE).to(torch.int32),
        torch.rand(len(sample), generator=random) > 0.2,
        torch.randint(0, PHRASES, (len(sample),), generator=random),
        torch.randint(0, PHRASES, (int(negatives.sum()),), generator=random),
        sample.repeat_interleave(negatives),
        torch.randint(5, VOCAB, (PHRASES, MAX_TOKENS), generator=random),
    )


def labels(name: str, position: Tensor, index: Tensor, key: Tensor, case: WithRegions):
    found = {"position": position, "index": index, "key": key}
    if case.weighted:
        sample = torch.where(index < 0, -1 - index, index)
        found["weight"] = 500_000 * (1 + sample % 3)
    return {f"{name}_{what}": values for what, values in found.items()}


def loaded(case: WithRegions, branch: str, places: Tensor, image_size: int) -> dict[str, Tensor]:
    """A micro-batch of one branch."""
    of_two = Case("fork", 1, 1, global_batch_size=G, weighted=("image", "text") * case.weighted)
    batch = micro_batch(of_two, global_batch(of_two, 0, image_size), branch, places)
    if case.weighted:
        batch[f"{branch}_weight"] = 500_000 * (1 + (places + FIRST_INDEX) % 3)
    every = regions_of(case)
    own = torch.isin(every.sample, places).nonzero().flatten()
    index = every.sample[own] + FIRST_INDEX
    if branch == "image":
        row = (every.sample[own][:, None] == places).int().argmax(1)
        index = torch.where(every.seen[own], index, -1 - index)
        of_regions = labels("region", own, index, own + 10**6, case)
        return batch | of_regions | {"region_boxes": every.boxes[own], "region_row": row}
    more = torch.isin(every.negative_of, places).nonzero().flatten()
    phrase = torch.cat([every.phrase[own], every.negative[more]])
    position = torch.cat([own, more + len(every.sample)])
    index = torch.cat([index, every.negative_of[more] + FIRST_INDEX])
    width = batch["input_ids"].shape[1]
    full, missing = every.tokens[phrase], MAX_TOKENS - width
    ids = torch.cat([F.pad(batch["input_ids"], (0, missing)), full])
    mask = torch.cat([F.pad(batch["attention_mask"], (0, missing)), torch.ones_like(full)])
    return (
        batch
        | {"input_ids": ids, "attention_mask": mask}
        | labels("phrase", position, index, phrase, case)
    )


def all_of(case: WithRegions):
    """The objective, the towers with their heads, the images' size."""
    from engine.objective import Branch, Objective, Pair

    loss = LOSSES[case.loss](targets=Targets(case.duplicates))
    pairs = (
        Pair("image", "text", InfoNCE()),
        Pair("image", "text", loss, WEIGHT, prefix="region_", made=("region", "phrase")),
    )
    towers, image_size = towers_of(Case("fork", 1, 1, towers=case.towers))
    bare = {name: replace(tower, specs=tower.specs[:-1]) for name, tower in towers.items()}
    inputs = ("pixel_values", "region_boxes", "region_row"), ("input_ids", "attention_mask")
    objective = Objective(tuple(map(Branch, bare, inputs)), pairs)
    towers = {
        name: with_head(tower, EMBED_DIM, objective.scalars_of(name), regions=True)
        for name, tower in bare.items()
    }
    return objective, towers, image_size


# -- split


def train_regions_split(case: WithRegions) -> dict[str, Any]:
    """On each rank: the metrics of one step, and the gradients as (name, offset, flat piece)."""
    objective, towers, image_size = all_of(case)
    engine = engine_for(case, objective, towers, G, {})
    gradients: list[tuple[str, int, Tensor]] = []
    engine.basic_optimizer.register_step_pre_hook(
        lambda *_: gradients.extend(gradient_pieces(engine))
    )
    parts = {
        branch: case.places(
            engine.batches[branch].replicas, engine.batches[branch].num_micro_batches
        )[engine.comm.replica]
        for branch in engine.stage.loads
    }

    def batches():
        if not parts:
            return None
        return iter(
            [
                {
                    name: tensor
                    for branch, places in zip(parts, together)
                    for name, tensor in loaded(case, branch, places, image_size).items()
                }
                for together in zip(*parts.values())
            ]
        )

    number = engine.batches[next(iter(engine.stage.layers))].num_micro_batches
    measured = engine.evaluate(batches(), number, G, alikeness)
    metrics = engine.train_batch(batches())
    return {
        "measured": {
            name: {way: sums.tolist() for way, sums in each.directions.items()}
            | {"n": each.num_samples}
            for name, each in measured.items()
        },
        "metrics": metrics,
        "gradients": gradients,
        "graph": engine.graph.describe(),
    }


def alikeness(sides: Any, branch: str, mine: Tensor) -> Tensor:
    """[3] sums over the rows that are somebody's: their similarity to their partner; to all of the
    same sample; 1."""
    own, other = sides[branch], sides[next(name for name in sides if name != branch)]
    mine = mine[own.label[mine] >= 0]
    similarity = own.embeds[mine] @ other.embeds.T
    partner = own.label[mine, None] == other.label
    together = partner
    if own.sample is not None:
        together = (own.sample[mine, None] == other.sample) & (other.label >= 0)
    sums = (partner * similarity).sum(), (together * similarity).sum()
    return torch.stack([*sums, own.embeds.new_tensor(len(mine))])


# -- unsplit


def train_regions_whole(case: WithRegions) -> dict[str, Any]:
    """The reference, with the micro-batches of the split, which batch normalisation sees."""
    objective, towers, image_size = all_of(case)
    replicas, sizes = (
        each if isinstance(each, dict) else dict.fromkeys(objective.names, each)
        for each in (case.replicas, case.micro_batch_size)
    )
    batches = {b: (replicas[b], G // replicas[b] // sizes[b]) for b in objective.names}
    layers = {n: [spec.build(SEED).train() for spec in t.specs] for n, t in towers.items()}
    named = {
        layer.canonical_names[n]: p
        for own in layers.values()
        for layer in own
        for n, p in layer.named_parameters()
    }
    rows: dict[str, list[Tensor]] = {}
    scalars: dict[str, Tensor] = {}
    for branch, (replicas, number) in batches.items():
        for places in (p for parts in case.places(replicas, number) for p in parts):
            tensors = loaded(case, branch, places, image_size)
            for layer in layers[branch]:
                tensors = layer(tensors)
            scalars |= {tensor: tensors[tensor] for tensor in objective.scalars_of(branch)}
            for name in objective.made_by([branch]):
                for what in ("embeds", "position"):
                    rows.setdefault(f"{name}_{what}", []).append(tensors[f"{name}_{what}"])
    embeds = {}
    for name in objective.made_by(objective.names):
        position = torch.cat(rows[f"{name}_position"])
        embeds[name] = torch.cat(rows[f"{name}_embeds"])[position.argsort()]
    every, weight = regions_of(case), lambda sample: 1.0 + (sample + FIRST_INDEX) % 3
    samples = torch.arange(G)
    of_samples = weight(samples) if case.weighted else torch.ones(G)
    losses = {
        "image_text": _infonce(
            embeds["image"], embeds["text"], scalars["logit_scale"], torch.eye(G), of_samples
        )
    }
    seen = every.seen.nonzero().flatten()
    columns = torch.cat([seen, torch.arange(len(every.negative)) + len(every.sample)])
    first, second = embeds["region"][seen], embeds["phrase"][columns]
    key = torch.cat([every.phrase, every.negative])[columns]
    own = torch.zeros(len(seen), len(columns))
    own[range(len(seen)), range(len(seen))] = 1
    equal = (every.phrase[seen][:, None] == key).float()
    positive = equal if case.duplicates == "positives" else own
    masked = equal * (1 - own) if case.duplicates == "masked" else torch.zeros_like(own)
    ask = torch.ones(len(seen))
    of_columns = every.sample[seen], every.negative_of
    if case.weighted:
        ask = weight(every.sample[seen])
    if not len(seen):
        losses["region_phrase"] = 0 * embeds["region"].sum()
    elif case.loss == "infonce":
        losses["region_phrase"] = _infonce(
            first, second, scalars["region_logit_scale"], positive, ask, masked
        )
    else:
        logits = scalars["region_logit_scale"].exp() * first @ second.T
        logits = logits + scalars["region_logit_bias"]
        across = torch.ones(len(columns))
        if case.weighted:
            across = weight(torch.cat(of_columns))
        pairwise = -F.logsigmoid((2 * positive - 1) * logits) * (1 - masked)
        weights = ask[:, None] / ask.mean() + across / across.mean()
        losses["region_phrase"] = (weights * pairwise).sum() / 2 / len(seen)
    number = len(seen)
    measured = {}
    for name, two, one, other in (
        ("image_text", ("image", "text"), embeds["image"], embeds["text"]),
        ("region_phrase", ("region", "phrase"), first, second[:number]),
    ):
        of = every.sample[seen] if name == "region_phrase" else samples
        similarity = (one @ other.T).detach()
        together = similarity * (of[:, None] == of)
        sums = [similarity.trace().item(), together.sum().item(), float(len(one))]
        ways = {f"{a}_to_{b}": sums for a, b in (two, two[::-1])}
        measured[name] = ways | {"n": len(one)}
    loss = losses["image_text"] + WEIGHT * losses["region_phrase"]
    loss.backward()
    return {
        "measured": measured,
        "loss": loss.item(),
        "losses": {name: own.item() for name, own in losses.items()},
        "gradients": {
            name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named.items()
        },
    }


def _infonce(first, second, log_scale, positive, weight, masked=None) -> Tensor:
    """Rows of the second side behind those of the first have no partner, and no weight."""
    logits = log_scale.exp() * first @ second.T
    if masked is not None:
        logits = logits.masked_fill(masked.bool(), -torch.inf)
    weight = weight / weight.sum()

    def direction(logits: Tensor, positive: Tensor) -> Tensor:
        target = positive / positive.sum(1, keepdim=True)
        terms = torch.where(positive > 0, target * logits, 0.0).sum(1)
        return (weight * (logits.logsumexp(1) - terms)).sum()

    number = len(first)
    return (direction(logits, positive) + direction(logits.T[:number], positive.T[:number])) / 2
