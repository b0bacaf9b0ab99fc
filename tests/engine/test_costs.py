"""Costs as plain numbers: curves, what states weigh, and estimates from a data sheet."""

from dataclasses import dataclass, replace

import pytest
from refusals import not_refused, refused

from engine.planning.costs import Curve, StateBytes
from engine.planning.devices import (
    DEVICES,
    EFFICIENCY,
    Device,
    estimated_layers,
    estimated_machine,
    find_device,
)


@dataclass(frozen=True)
class Counts:
    """Per sample. As it stands a layer that only computes."""

    name: str = "text.0"
    num_parameters: int = 0
    flops: float = 1e12
    convolution_flops: float = 0.0
    activation_bytes: float = 1e6
    output_bytes: float = 1e5
    moved_bytes: float = 1.0
    num_kernels: int = 1


def forward_s(
    counts: Counts,
    device: str | Device = "A100",
    precision: str = "bf16",
    size: int = 4,
    **more: float,
) -> float:
    device = find_device(device) if isinstance(device, str) else device
    (cost,) = estimated_layers([counts], device, precision, **more)
    return cost.forward_s.at(size)


# -- curves and states


def test_a_curve_is_straight_between_its_points_and_beyond_them():
    curve = Curve((2, 4, 8), (1.0, 2.0, 6.0))
    assert [curve.at(b) for b in (1, 2, 3, 4, 6, 8, 10)] == [0.5, 1.0, 1.5, 2.0, 4.0, 6.0, 8.0]
    assert Curve((4,), (2.0,)).at(6) == 3.0


def test_a_curve_of_anything_else_is_refused():
    for sizes, values in (
        ((), ()),
        ((1, 2), (1,)),
        ((2, 1), (1, 2)),
        ((1, 1), (1, 2)),
        ((0, 1), (1, 2)),
    ):
        with pytest.raises(ValueError, match="sizes rise from 1 on"):
            Curve(sizes, tuple(map(float, values)))
            pytest.fail(f"accepted: {sizes} {values}")


def test_bytes_of_a_parameters_state():
    two = {"zero_optimization": {"stage": 2}}
    offloaded = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    zero, halves = {"zero_optimization": {"stage": 1}}, {"enabled": True}
    for config, whole, sharded in (
        ({}, 4 + 4 + 8, 0),  # weight, gradient, two moments
        (zero, 4 + 4, 4 + 8),  # and ZeRO-1's own fp32 copy
        (zero | {"bf16": halves}, 2 + 4, 4 + 8),  # fp32 sums, master weight
        (zero | {"bf16": {**halves, "immediate_grad_update": False}}, 2 + 2 + 4, 4 + 8),
        (zero | {"fp16": halves}, 2 + 2, 4 + 8),
        (two, 4, 4 + 4 + 8),  # the gradients too
        (two | {"bf16": halves}, 2, 4 + 4 + 8),
        (two | {"fp16": halves}, 2, 2 + 4 + 8),
        (offloaded, 4, 0),
        (offloaded | {"bf16": halves}, 2, 4),
    ):
        state = StateBytes.of(config)
        assert (state.whole, state.sharded, state.muon_saves) == (whole, sharded, 0), config
        muon = StateBytes.of(config | {"optimizer": {"type": "Muon"}})
        assert muon == replace(state, muon_saves=4), "a second moment"


# -- estimates


def test_half_the_rate_doubles_the_time_of_a_layer_that_computes():
    half = {precision: rate / 2 for precision, rate in DEVICES["A100"].flops_per_s.items()}
    slow = replace(DEVICES["A100"], flops_per_s=half)
    assert forward_s(Counts()) == pytest.approx(4e12 / (312e12 * EFFICIENCY))
    assert forward_s(Counts(), slow) == pytest.approx(2 * forward_s(Counts()))
    assert forward_s(Counts(), efficiency=0.9) == pytest.approx(forward_s(Counts()) / 2)


def test_half_the_bandwidth_doubles_the_time_of_a_layer_that_moves():
    counts = Counts(flops=1.0, moved_bytes=1e12)
    slow = replace(DEVICES["A100"], bandwidth_bytes_per_s=DEVICES["A100"].bandwidth_bytes_per_s / 2)
    assert forward_s(counts, slow) == pytest.approx(2 * forward_s(counts))


def test_newer_devices_are_not_slower():
    moves = Counts(flops=1.0, moved_bytes=1e12)
    assert forward_s(Counts(), "H100") < forward_s(Counts(), "A100")
    assert forward_s(moves, "H200") < forward_s(moves, "H100") < forward_s(moves, "A100")
    assert estimated_machine(DEVICES["H200"], "bf16").memory_bytes == 141e9


def test_backward_is_two_forwards_and_bytes_are_proportional():
    (cost,) = estimated_layers([Counts(num_parameters=7)], DEVICES["H100"], "bf16")
    assert cost.num_parameters == 7
    assert all(cost.backward_s.at(b) == 2 * cost.forward_s.at(b) for b in (1, 3, 300))
    assert (cost.activation_bytes.at(3), cost.output_bytes.at(300)) == (3e6, 3e7)


def test_a_small_layer_takes_as_long_as_its_launches():
    counts = Counts(flops=1.0, num_kernels=20)
    assert forward_s(counts, size=1) == forward_s(counts, size=64) == pytest.approx(20 * 8e-6)


def test_fp32_runs_matrix_products_without_and_convolutions_with_tf32():
    """As torch does by default. Either alone is as fast as the rate of its kind."""
    assert forward_s(Counts(), precision="fp32") == pytest.approx(4e12 / (19.5e12 * EFFICIENCY))
    assert forward_s(Counts(convolution_flops=1e12), precision="fp32") == pytest.approx(
        4e12 / (156e12 * EFFICIENCY)
    )
    assert forward_s(Counts(), precision="tf32") == pytest.approx(4e12 / (156e12 * EFFICIENCY))


def test_a_machine_steps_and_reduces_in_less_than_a_nanosecond_per_parameter():
    for precision in ("fp32", "tf32", "bf16", "fp16"):
        machine = estimated_machine(find_device("a100"), precision)
        assert 0 < machine.gradient_s_per_parameter < machine.optimizer_s_per_parameter < 1e-9
        assert machine.ranks_per_node == 8
        assert machine.node_bytes_per_s < machine.link_bytes_per_s


def test_a_device_from_numbers():
    device = find_device("flops=312e12, memory=40e9,bandwidth=1.5e12,link=1e11")
    assert device.rate("fp32") == (312e12, 312e12) == device.rate("bf16")
    assert (device.memory_bytes, device.bandwidth_bytes_per_s) == (40e9, 1.5e12)
    assert device.link_bytes_per_s == 1e11


def test_a_device_or_a_precision_that_is_none_is_refused_with_what_to_write():
    cases = [
        ("V100", "'V100' is not known … Known: A100, H100, H200 … flops=312e12,memory=80e9"),
        ("H1000", "did you mean 'H100'?"),
        ("flops=1e12", "lacks memory, bandwidth"),
        ("flops=1e12,memory=1e9,bandwidth=1e12,speed=3", "'speed=3' is no KEY=NUMBER"),
        ("flops=fast,memory=1e9,bandwidth=1e12", "'flops=fast' is no KEY=NUMBER"),
        ("flops=-1,memory=1e9,bandwidth=1e12", "'flops=-1' is no KEY=NUMBER above 0"),
        ("flops=1e12,memory=inf,bandwidth=1e12", "'memory=inf'"),
    ]
    assert not_refused(find_device, cases) == []
    with refused("precision 'int8' must be one of fp32, tf32, bf16, fp16"):
        estimated_layers([Counts()], DEVICES["A100"], "int8")
