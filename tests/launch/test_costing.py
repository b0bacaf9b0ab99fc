"""What a run is planned by: its own towers' costs, and no others."""

from dataclasses import replace

import torch
from ranks import run_ranks
from unlike_cases import costs_of_run

from engine.planning.devices import find_device
from engine.planning.measured import device_identity
from launch.setup.costing import are_of
from launch.setup.estimates import estimated_costs
from models.towers.building import build_towers


def towers(image_tower: str, embed_dim: int = 16):
    return build_towers(image_tower, "bert-tiny", embed_dim, 32, 128, 16)


def test_costs_that_another_start_left_behind_are_not_taken():
    small = towers("resnet18:layers=1-1-1-1")
    device = torch.device("cpu")
    estimate = estimated_costs(small, {}, 16, find_device("A100"))
    here = replace(estimate.machine, name=device_identity(device)["device"])
    costs = replace(estimate, machine=here)
    assert are_of(costs, small, {}, device) and not estimate.machine.measured
    assert not are_of(costs, towers("resnet18"), {}, device)  # other layers
    larger = towers("resnet18:layers=1-1-1-1", embed_dim=32)
    assert not are_of(costs, larger, {}, device)  # the same layers, other sizes
    assert not are_of(estimate, small, {}, device)  # another machine
    assert not are_of(costs, small, {"bf16": {"enabled": True}}, device)  # another precision


def test_ranks_of_unlike_nodes_plan_by_the_costs_of_the_first(tmp_path):
    first, second = run_ranks(2, costs_of_run, tmp_path)
    estimated, kept = first
    assert first == second and estimated["machine"]["name"].startswith("flops=50e9")
    assert kept["machine"]["flops_per_s"] == 123.0 and kept["machine"]["measured"]
