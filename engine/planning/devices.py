"""Costs on hardware that is not here: counted operations and bytes against a device's data sheet.
Plain Python.

    forward_s(b) = max(b · flops / (peak rate · EFFICIENCY),  (b · bytes moved + weights) / (bandwidth · BANDWIDTH_EFFICIENCY),  launches)
    backward_s   = 2 · forward_s, because each product has two gradients

The roofline (Williams, Waterman, Patterson 2009) of a whole layer. It tells which plan is faster
and what fits; a measurement on the device (`engine/planning/profile.py`) tells how long it takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.spelling import near
from engine.planning.costs import Curve, LayerCost, Machine, block_bytes

# Assumptions, not data: what training in eager torch reaches of the peaks. Large transformers in
# half precision are reported at 0.4 to 0.55
# of peak (Megatron-LM: Narayanan et al. 2021, table 1); a copy reaches about 0.8 of the bandwidth.
# A user who knows better gives a number.
EFFICIENCY = 0.45
BANDWIDTH_EFFICIENCY = 0.8
# host time of one operation in eager torch; a device that is faster than its host waits for it
LAUNCH_S = 8e-6

BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}  # of a weight
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

# Bytes that pass through memory per parameter, counted in the operations of DeepSpeed 0.19 (ZeRO-1
# and BF16_Optimizer) and of AdamW of torch without fusing: decay 8, two moments 32, denominator 24,
# update 16. The norm, the clip, the flat copy, and the weights handed back are the rest.
_STEP_BYTES = {"fp32": 140.0, "fp16": 160.0, "bf16": 120.0}
_REDUCE_PASSES = {"fp32": 4, "fp16": 4, "bf16": 3}  # each reads and writes a gradient
_INSTRUCTION_S = 2e-4
# of a hop: what NCCL counts for its rings over NVLink and over a network (NVIDIA/nccl,
# src/graph/tuning.cc, hwLatencies)
_LINK_LATENCY_S, _NODE_LATENCY_S = 3.4e-6, 14e-6


@dataclass(frozen=True)
class Device:
    """A data sheet. Rates are dense (half of those "with sparsity"), links are one direction, per
    GPU."""

    name: str
    flops_per_s: Mapping[str, float]  # by precision: fp32 (without tensor cores), tf32, bf16, fp16
    memory_bytes: float
    bandwidth_bytes_per_s: float
    link_bytes_per_s: float  # NVLink
    node_bytes_per_s: float  # its part of the node's network
    ranks_per_node: int = 8
    communicator_bytes: float = 0.0  # of its memory, for one of NCCL

    def rate(self, precision: str) -> tuple[float, float]:
        """Peak FLOP/s of matrix products and of convolutions.

        They differ for fp32: torch leaves matrix products in full precision and runs cuDNN's
        convolutions in TF32, by default (torch.backends.cuda.matmul.allow_tf32 is False,
        torch.backends.cudnn.allow_tf32 is True). Raises ValueError for another precision.
        """
        if precision not in BYTES:
            raise ValueError(f"precision {precision!r} must be one of {', '.join(BYTES)}")
        return self.flops_per_s[precision], self.flops_per_s[
            "tf32" if precision == "fp32" else precision
        ]


# Measured on four A100 with NVLink, of a group of three and more (NCCL#964). It grows with the
# number of channels, not with the number of ranks (NCCL#986).
COMMUNICATOR_BYTES = 688 * 2.0**20
# NVIDIA A100 80GB, H100 and H200 Tensor Core GPU data sheets, SXM. NVLink is given there as the sum
# of both directions. Networks are
# those of DGX A100 (8 × 200 Gbit/s), DGX H100 and DGX H200 (8 × 400 Gbit/s) for 8 GPUs.
_HOPPER = {"fp32": 67e12, "tf32": 494.7e12, "bf16": 989.4e12, "fp16": 989.4e12}
DEVICES = {
    device.name: device
    for device in (
        Device(
            name="A100",
            flops_per_s={"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12},
            memory_bytes=80e9,
            bandwidth_bytes_per_s=2.039e12,
            link_bytes_per_s=300e9,
            node_bytes_per_s=25e9,
            communicator_bytes=COMMUNICATOR_BYTES,
        ),
        Device(
            name="H100",
            flops_per_s=_HOPPER,
            memory_bytes=80e9,
            bandwidth_bytes_per_s=3.35e12,
            link_bytes_per_s=450e9,
            node_bytes_per_s=50e9,
            communicator_bytes=COMMUNICATOR_BYTES,
        ),
        Device(
            name="H200",
            flops_per_s=_HOPPER,
            memory_bytes=141e9,
            bandwidth_bytes_per_s=4.8e12,
            link_bytes_per_s=450e9,
            node_bytes_per_s=50e9,
            communicator_bytes=COMMUNICATOR_BYTES,
        ),
    )
}

_FORM = "flops=312e12,memory=80e9,bandwidth=2.0e12[,link=300e9,network=25e9,ranks_per_node=8]"
_REQUIRED, _OPTIONAL = (
    ("flops", "memory", "bandwidth"),
    {"link": 50e9, "network": 25e9, "ranks_per_node": 8.0},
)


def find_device(text: str) -> Device:
    """A device by its name in `DEVICES`, or from numbers in FLOP/s, bytes and bytes/s:
    `flops=…,memory=…,bandwidth=…`.

    One `flops` holds for every precision. Raises ValueError that names the devices known and the
    form of the numbers.
    """
    if "=" not in text:
        known = {name.lower(): name for name in DEVICES}
        if text.lower() in known:
            return DEVICES[known[text.lower()]]
        raise ValueError(
            f"device {text!r} is not known{near(text, DEVICES) or '.'} Known: "
            f"{', '.join(DEVICES)}. Or give its numbers: {_FORM}"
        )
    values = {**_OPTIONAL, **_numbers(text)}
    missing = [key for key in _REQUIRED if key not in values]
    if missing:
        raise ValueError(
            f"device {text!r} lacks {', '.join(missing)}; write {_FORM}, or one of "
            f"{', '.join(DEVICES)}"
        )
    rates = dict.fromkeys(BYTES, values["flops"])
    return Device(
        name=text,
        flops_per_s=rates,
        memory_bytes=values["memory"],
        bandwidth_bytes_per_s=values["bandwidth"],
        link_bytes_per_s=values["link"],
        node_bytes_per_s=values["network"],
        ranks_per_node=int(values["ranks_per_node"]),
    )


def _numbers(text: str) -> dict[str, float]:
    values = {}
    for part in text.split(","):
        key, _, number = (piece.strip() for piece in part.partition("="))
        try:
            values[key] = float(number)
        except ValueError:
            values[key] = float("nan")
        if key not in (*_REQUIRED, *_OPTIONAL) or not 0 < values[key] < float("inf"):
            raise ValueError(
                f"device {text!r}: {part!r} is no KEY=NUMBER above 0 with a known key; write "
                f"{_FORM}, or one of {', '.join(DEVICES)}"
            )
    return values


class CountedLayer(Protocol):
    """Counts of one layer, per sample, as `models/towers/building.py: describe_layers` gives them
    for a precision."""

    @property
    def name(self) -> str: ...

    @property
    def num_parameters(self) -> int: ...

    @property
    def flops(self) -> float: ...

    @property
    def convolution_flops(self) -> float: ...

    @property
    def activation_bytes(self) -> float: ...

    @property
    def output_bytes(self) -> float: ...

    @property
    def moved_bytes(self) -> float: ...

    @property
    def num_kernels(self) -> int: ...


def estimated_layers(
    counts: Sequence[CountedLayer],
    device: Device,
    precision: str,
    efficiency: float = EFFICIENCY,
) -> list[LayerCost]:
    """The cost of every layer, in order. `precision`: fp32, tf32, bf16 or fp16; counts must be of
    the same."""
    products, convolutions = device.rate(precision)
    bandwidth = device.bandwidth_bytes_per_s * BANDWIDTH_EFFICIENCY
    costs = []
    for layer in counts:
        matrices = layer.flops - layer.convolution_flops
        compute_s = (matrices / products + layer.convolution_flops / convolutions) / efficiency
        move_s = layer.moved_bytes / bandwidth
        weights_s = layer.num_parameters * BYTES[precision] / bandwidth
        if not (layer.moved_bytes or layer.flops):
            weights_s = 0.0  # a layer that only hands on
        launches_s = layer.num_kernels * LAUNCH_S
        forward = [max(b * compute_s, b * move_s + weights_s, launches_s) for b in SIZES]
        costs.append(
            LayerCost(
                name=layer.name,
                num_parameters=layer.num_parameters,
                forward_s=Curve(SIZES, tuple(forward)),
                backward_s=Curve(SIZES, tuple(2 * seconds for seconds in forward)),
                activation_bytes=Curve((1,), (layer.activation_bytes,)),
                output_bytes=Curve((1,), (layer.output_bytes,)),
            )
        )
    return costs


def estimated_machine(device: Device, precision: str, efficiency: float = EFFICIENCY) -> Machine:
    """The rest of a rank's costs, for ZeRO-1 or BF16_Optimizer with torch's AdamW. The loss is in
    fp32 whatever the precision."""
    kind = "fp32" if precision == "tf32" else precision
    device.rate(precision)  # refuses what it does not know
    bandwidth = device.bandwidth_bytes_per_s * BANDWIDTH_EFFICIENCY
    gradient_bytes = 2 if kind == "fp16" else 4
    return Machine(
        name=device.name,
        memory_bytes=device.memory_bytes,
        communicator_bytes=device.communicator_bytes,
        block_bytes=block_bytes(device.memory_bytes),
        link_bytes_per_s=device.link_bytes_per_s,
        link_latency_s=_LINK_LATENCY_S,
        flops_per_s=device.flops_per_s["tf32" if precision == "tf32" else "fp32"] * efficiency,
        optimizer_s_per_parameter=_STEP_BYTES[kind] / bandwidth,
        gradient_s_per_parameter=2 * _REDUCE_PASSES[kind] * gradient_bytes / bandwidth,
        instruction_s=_INSTRUCTION_S,
        ranks_per_node=device.ranks_per_node,
        node_bytes_per_s=device.node_bytes_per_s,
        node_latency_s=_NODE_LATENCY_S,
    )
