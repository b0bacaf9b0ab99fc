"""What things cost, in seconds and bytes: the input of the simulator and the planner. Plain Python.

A cost comes from a measurement on the present device (`engine/planning/profile.py`) or from counted
operations and a device's data sheet (`engine/planning/devices.py`); from here on nobody asks which,
but for the message that says what was predicted when memory runs out.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError, with_config

from engine.config.implied import averages_early, offloads, steps_matrices, zero_stage
from engine.optimizer.locking import LockedBlock

# a number that may be infinite, for which JSON has null
Unlimited = Annotated[float, BeforeValidator(lambda value: inf if value is None else value)]


BLOCK_BYTES, BLOCK_SHARE = 64 * 2.0**20, 64  # as `models/losses/blocks.py` has them


@dataclass(frozen=True)
class Curve:
    """A cost as a function of the micro-batch size: straight lines between the points known,
    continued beyond them.

    One point is a proportion. `sizes` rise; `values` have the unit of the cost.
    """

    sizes: tuple[int, ...]
    values: tuple[float, ...]

    def __post_init__(self):
        if (
            not self.sizes
            or len(self.sizes) != len(self.values)
            or list(self.sizes) != sorted(set(self.sizes))
            or self.sizes[0] < 1
        ):
            raise ValueError(
                f"curve: sizes {self.sizes} with values {self.values}; sizes rise from 1 on, one "
                "value each"
            )

    def at(self, size: float) -> float:
        if len(self.sizes) == 1:
            return self.values[0] * size / self.sizes[0]
        right = min(max(bisect_left(self.sizes, size), 1), len(self.sizes) - 1)
        low, high = self.sizes[right - 1], self.sizes[right]
        below, above = self.values[right - 1], self.values[right]
        return max(0.0, below + (above - below) * (size - low) / (high - low))


@dataclass(frozen=True)
class LayerCost:
    """One layer. Seconds and bytes are of one micro-batch, as functions of its size."""

    name: str
    num_parameters: int
    forward_s: Curve
    backward_s: Curve
    # kept from the forward until the backward; its output is in it, its input in the layer's that
    # made it
    activation_bytes: Curve
    output_bytes: Curve  # what travels if the pipeline is cut behind this layer
    trainable: bool = True  # else its parameters have no gradients and no optimizer state
    # else nothing in it or before it learns: it has no backward and keeps nothing for one
    differentiated: bool = True

    # of its parameters those that learn, where only some do (adapters); None: all
    num_learned: int | None = None
    # of those that learn, in matrices that Muon steps
    num_muon: int = 0

    def longer(self, factor: float) -> LayerCost:
        """With samples that cost so much more."""
        curves: dict[str, Any] = {
            name: Curve(curve.sizes, tuple(factor * value for value in curve.values))
            for name, curve in vars(self).items()
            if isinstance(curve, Curve)
        }
        return replace(self, **curves)

    @property
    def num_trained(self) -> int:
        """The parameters with gradients and optimizer state."""
        if not self.trainable:
            return 0
        return self.num_parameters if self.num_learned is None else self.num_learned

    def training_s(self, size: float) -> float:
        """Of a forward and, if it has one, a backward."""
        return self.forward_s.at(size) + (self.backward_s.at(size) if self.differentiated else 0.0)


class Link(NamedTuple):
    """Between two ranks, one direction."""

    bytes_per_s: float
    latency_s: float

    def message_s(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


class Ring(NamedTuple):
    """How a tensor goes round the ranks of a collective.

    As NCCL estimates it to choose an algorithm (NVIDIA/nccl, src/graph/tuning.cc): a part of the
    tensor makes as many hops as there are other ranks, those between nodes with a latency of their
    own; the ranks that each node has in the ring use its network together.
    """

    size: int
    bytes_per_s: float  # of each rank
    latency_s: float  # of all hops
    collective_s_per_byte: float  # as in `Machine`

    def seconds(self, num_bytes: float) -> float:
        """Until all have the `num_bytes` that each had a part of: an all-gather, or either half of
        an all-reduce."""
        if self.size == 1:
            return 0.0
        moved = (self.size - 1) * num_bytes / self.size
        return self.latency_s + moved / self.bytes_per_s + num_bytes * self.collective_s_per_byte


@dataclass(frozen=True)
class Machine:
    """One rank's hardware and its links."""

    name: str
    memory_bytes: Unlimited  # what one rank may use
    link_bytes_per_s: Unlimited  # between two ranks of a node
    link_latency_s: float
    flops_per_s: Unlimited  # of the loss's matrix products, fp32
    optimizer_s_per_parameter: float  # clip and step one parameter in its owner
    # bring one gradient into the buffers it is reduced in, and its parameter back
    gradient_s_per_parameter: float
    instruction_s: float  # host time of an instruction, whatever it does
    ranks_per_node: int = 1_000_000
    # between two ranks of different nodes, when all ranks of a node send to another
    node_bytes_per_s: Unlimited = inf
    node_latency_s: float = 0.0
    # of a tensor that goes round a ring, besides its messages: copies and sums
    collective_s_per_byte: float = 0.0
    communicator_bytes: float = 0.0  # of device memory, for one communicator of NCCL
    # a block of logits, with what is made of it: the loss makes larger ones in blocks of rows
    block_bytes: float = BLOCK_BYTES
    measured: bool = False  # these numbers and the layers' costs; else they are counted

    def link(self, ranks: Sequence[int]) -> Link:
        """The slowest between two of these ranks."""
        if min(ranks) // self.ranks_per_node != max(ranks) // self.ranks_per_node:
            return Link(self.node_bytes_per_s, self.node_latency_s)
        return Link(self.link_bytes_per_s, self.link_latency_s)

    def ring(self, ranks: Sequence[int]) -> Ring:
        """Over these consecutive ranks, which fill one node after the other."""
        size = self.ranks_per_node
        first, last = ranks[0] // size, ranks[-1] // size
        if first == last:
            speed, latency_s = self.link_bytes_per_s, (len(ranks) - 1) * self.link_latency_s
        else:
            # of the node with the fewest: every ring that goes through the nodes goes through it
            together = min(size * (first + 1) - ranks[0], ranks[-1] + 1 - size * last)
            speed = min(self.link_bytes_per_s, together * self.node_bytes_per_s)
            latency_s = (last - first) * self.node_latency_s + (
                len(ranks) - 1 - (last - first)
            ) * self.link_latency_s
        return Ring(len(ranks), speed, latency_s, self.collective_s_per_byte)


def block_bytes(gpu_bytes: float) -> float:
    """What the losses take for a block on a GPU of so much memory, at most."""
    return max(BLOCK_BYTES, gpu_bytes / BLOCK_SHARE)


@dataclass(frozen=True)
class Loading:
    """Making the micro-batches. `sample_s`: seconds of one core for one sample, by branch."""

    sample_s: Mapping[str, float]
    workers: int  # processes that load for a rank; 0: the rank itself does, before each forward
    cores: int  # of a node
    shared: bool  # do the ranks compute on these cores, too?


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter that a rank holds throughout: `whole` on every replica, `sharded` divided
    among them (ZeRO)."""

    whole: float
    sharded: float
    gradient: float  # bytes per gradient that travel when replicas average
    weight: float = 4  # bytes per weight that travel when their owners hand them round (ZeRO)
    muon_saves: float = 0  # of these bytes, in matrices that Muon steps

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> StateBytes:
        """From DeepSpeed's configuration, for Adam; Muon has one moment of a matrix. fp32: weight
        and gradient, two moments. Half precision: weight and gradient in half, master weight and
        two moments in fp32. bf16 adds gradients up in fp32, and those in half go at once unless
        `immediate_grad_update` is off.
        Under ZeRO-2 they always do, and the sums are sharded; under ZeRO-3 all of it is in fp32, and
        sharded. State that is offloaded to the CPU is not counted."""
        stage, offloaded = zero_stage(config), offloads(config)
        bf16, fp16 = (config.get(key, {}).get("enabled", False) for key in ("bf16", "fp16"))
        weight = 2 if bf16 or fp16 else 4
        muon_saves = 4 if steps_matrices(config.get("optimizer", {})) else 0
        if stage == 3:
            return cls(0, 16, 4, weight, muon_saves)
        at_once = bf16 and config["bf16"].get("immediate_grad_update", True)
        gradient = (0 if at_once else weight) + (4 if bf16 else 0)
        # ZeRO keeps an fp32 copy of its slice also under fp32
        state = 12 if bf16 or fp16 or stage else 8
        if offloaded:
            state = 0
        sharded, whole = (state, 0) if stage else (0, state)
        if stage == 2:  # bf16's sums stay on the GPU where the state is offloaded, others do not
            sharded += 4 if bf16 else 0 if offloaded else weight
            gradient = 0
        return cls(
            weight + gradient + whole,
            sharded,
            4 if bf16 or not fp16 else 2,
            weight,
            muon_saves,
        )


class FurtherRows(NamedTuple):
    """A pair of branches that compares rows beside those of samples, and how many of each side a
    sample has on average."""

    first: str
    second: str
    rows: tuple[float, float]


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class CostModel:
    """Everything the simulator asks. `layers[branch]` are all layers of a tower in order.

    `compared`: the pairs of branches whose samples a loss compares; where nothing is said, the two
    that there are. `further`: those that compare other rows. `pairs`: where a pair is matched, what that takes for so many rows of its second
    branch, parameters not counted; `token_bytes`, by branch, of the tokens of one sample, the first
    branch of that pair before the second. `compiled_share`: as in `profile_together`. `loading`:
    None where it is not known, and then free.
    """

    layers: Mapping[str, Sequence[LayerCost]]
    machine: Machine
    state: StateBytes
    embed_dim: int
    checkpoint_interval: int = 0  # layers per activation checkpoint; 0: none
    sharded_optimizer: bool = True  # ZeRO-1 to ZeRO-3
    # ZeRO-2 and ZeRO-3: every backward averages its own over the replicas
    sharded_gradients: bool = False
    sharded_weights: bool = False  # ZeRO-3: every pass gathers each layer before it runs
    early_averages: bool = False  # over replicas, during the last backward
    pairs: LayerCost | None = None
    token_bytes: Mapping[str, float] = field(default_factory=dict)
    compared: tuple[tuple[str, str], ...] = ()
    compiled_share: Mapping[str, float] = field(default_factory=dict)
    loading: Loading | None = None
    further: tuple[FurtherRows, ...] = ()

    def __post_init__(self):
        if not self.compared and len(self.layers) != 2:
            raise ValueError(
                f"cost model: {len(self.layers)} branches ({', '.join(self.layers)}) and no pairs; "
                "say which are compared"
            )

    @cached_property
    def sums(self) -> dict[Any, Any]:
        """Sums over these layers that the simulator remembers."""
        return {}

    @property
    def trainable(self) -> dict[str, tuple[bool, ...]]:
        """Which layers learn, by branch."""
        return {
            branch: tuple(layer.trainable for layer in line) for branch, line in self.layers.items()
        }

    @property
    def matched(self) -> tuple[str, ...]:
        """The two branches of the pair that is matched, where one is."""
        return tuple(self.token_bytes) or self.all_compared[0]

    @property
    def all_compared(self) -> tuple[tuple[str, str], ...]:
        if self.compared:
            return self.compared
        first, second = self.layers
        return ((first, second),)


def configured(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a cost model that DeepSpeed's configuration decides: precision, ZeRO and
    activation checkpoints."""
    return {
        "state": StateBytes.of(config),
        "checkpoint_interval": config.get("pipeline", {}).get("activation_checkpoint_interval", 0),
        "sharded_optimizer": zero_stage(config) > 0,
        "sharded_gradients": zero_stage(config) > 1,
        "sharded_weights": zero_stage(config) == 3,
        "early_averages": averages_early(config),
    }


def frozen(costs: CostModel, locked: LockedBlock) -> CostModel:
    """The costs in which those layers learn that are not locked and, where a tower learns in parts
    of its layers alone (adapters), have such a part."""
    free = locked.trainable(
        {branch: [layer.num_parameters for layer in line] for branch, line in costs.layers.items()}
    )
    return with_trainable(
        costs,
        {
            branch: [learns and layer.num_learned != 0 for learns, layer in zip(free[branch], line)]
            for branch, line in costs.layers.items()
        },
    )


def with_trainable(costs: CostModel, trainable: Mapping[str, Sequence[bool]]) -> CostModel:
    """The costs in which layers that do not learn have no gradients, and layers before the first
    that learns no backward."""
    layers = {
        branch: [
            replace(
                layer,
                trainable=trainable[branch][i],
                differentiated=any(trainable[branch][: i + 1]),
            )
            for i, layer in enumerate(line)
        ]
        for branch, line in costs.layers.items()
    }
    return replace(costs, layers=layers)


def with_learned(costs: CostModel, num_learned: Mapping[str, Sequence[int | None]]) -> CostModel:
    """The costs of towers of whose layers only so many parameters learn, by branch; None: all."""
    layers = {
        branch: [
            replace(layer, num_learned=number)
            for layer, number in zip(line, num_learned[branch], strict=True)
        ]
        for branch, line in costs.layers.items()
    }
    return replace(costs, layers=layers)


def with_matrices(costs: CostModel, num_muon: Mapping[str, Sequence[int]]) -> CostModel:
    """The costs of towers of whose layers Muon steps so many parameters, by branch."""
    layers = {
        branch: [
            replace(layer, num_muon=number)
            for layer, number in zip(line, num_muon[branch], strict=True)
        ]
        for branch, line in costs.layers.items()
    }
    return replace(costs, layers=layers)


_JSON = TypeAdapter(CostModel)


def cost_model_to_json(costs: CostModel) -> dict[str, Any]:
    """As JSON-able data. Infinity, which JSON does not have, becomes null."""
    return json.loads(_JSON.dump_json(costs))


def cost_model_from_json(record: Mapping[str, Any]) -> CostModel:
    """The model that `cost_model_to_json` wrote. Raises ValueError, with the reason, when it is not
    one."""
    try:
        return _JSON.validate_python(record)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"not a cost model of this version: {where}: {first['msg']}") from error
