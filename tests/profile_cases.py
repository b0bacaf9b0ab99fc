"""Small layers to profile, and what ranks do with them."""

import os
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.planning.profile import profile_together
from engine.processes.places import Places

WIDTH = 8


class Block(nn.Module):
    """Linear and ReLU on `hidden` [B, WIDTH]; everything else passes through."""

    draws = False

    def __init__(self, layer_idx: int, dropout: float = 0.0, heads: int = 1):
        super().__init__()
        self.linear, self.layer_idx, self.heads = nn.Linear(WIDTH, WIDTH), layer_idx, heads
        self.dropout = nn.Dropout(dropout)
        self.canonical_names = {"linear.weight": f"text.{layer_idx}.weight"}
        self.seen = None

    def forward(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        self.seen = (
            self.training,
            torch.is_grad_enabled(),
            tensors["hidden"].requires_grad,
            tensors["hidden"].dtype,
        )
        return {**tensors, "hidden": torch.relu(self.linear(self.dropout(tensors["hidden"])))}


class Embedding(nn.Module):
    """`ids` [B] -> `hidden` [B, WIDTH]."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, WIDTH)

    def forward(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"hidden": self.table(tensors["ids"])}


@dataclass
class Spec:
    """Describes a layer as `models/towers/layers.py: LayerSpec` does."""

    name: str
    layer: dict = field(default_factory=dict)

    def make(self) -> nn.Module:
        return Block(**self.layer)

    @property
    def template(self) -> nn.Module:
        with torch.device("meta"):
            return self.make()


class Lookup(Spec):
    """Describes an `Embedding`."""

    def __init__(self):
        super().__init__("text.embeddings")

    def make(self) -> nn.Module:
        return Embedding()


class Large(Block):
    """A Block that allocates 2**60 bytes for a micro-batch of 4, which fails."""

    def forward(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if len(tensors["hidden"]) == 4 and tensors["hidden"].device.type != "meta":
            torch.empty(2**60, dtype=torch.uint8)
        return super().forward(tensors)


class LargeSpec(Spec):
    """Describes a `Large`."""

    def make(self) -> nn.Module:
        return Large(**self.layer)


@dataclass
class Builder:
    """Makes layers and remembers which."""

    built: list[str] = field(default_factory=list)
    layers: list[nn.Module] = field(default_factory=list)

    def __call__(self, spec: Spec) -> nn.Module:
        self.built.append(spec.name)
        self.layers.append(spec.make())
        return self.layers[-1]


def tower(length: int, **settings) -> list[Spec]:
    return [Spec(f"text.{i}", {"layer_idx": i, **settings}) for i in range(length)]


def inputs(size: int) -> dict[str, Tensor]:
    """As data gives them: a slice of something larger, a mask and a place that only pass
    through."""
    return {
        "hidden": torch.randn(1000, WIDTH)[:size],
        "attention_mask": torch.ones(size, 5, dtype=torch.int64),
        "text_position": torch.arange(size),
    }


def together(cache: str) -> list[dict]:
    """Profile two towers on all ranks, three times: nobody knows them, all do, only the first rank
    does."""
    rank = dist.get_rank()
    return [
        _profile(folder) for folder in (cache, cache, cache if rank == 0 else f"{cache}-{rank}")
    ]


def _profile(cache: str) -> dict:
    os.environ["WYE_CACHE"] = cache
    builder = Builder()
    towers = {"image": tower(2), "text": tower(3, heads=2)}
    profile = profile_together(
        towers,
        builder,
        dict.fromkeys(towers, inputs),
        torch.float32,
        torch.device("cpu"),
        {"image": [2, 4], "text": [4]},
        batch_size=16,
        embed_dim=WIDTH,
        places=Places.together(dist.get_world_size()),
        budget_s=1.0,
    )
    return {"layers": dict(profile.layers), "machine": profile.machine, "built": builder.built}
