"""What a run is planned by: its own towers' costs, and no others."""

from engine.devices import find_device
from launch.costing import are_of
from launch.estimates import estimated_costs
from models.towers import build_towers


def towers(image_tower: str, embed_dim: int = 16):
    return build_towers(image_tower, "bert-tiny", embed_dim, 32, 128, 16)


def test_costs_that_another_start_left_behind_are_not_taken():
    small = towers("resnet18:layers=1-1-1-1")
    costs = estimated_costs(small, {}, 16, find_device("A100"))
    assert are_of(costs, small)
    assert not are_of(costs, towers("resnet18"))  # other layers
    assert not are_of(costs, towers("resnet18:layers=1-1-1-1", embed_dim=32))  # the same layers, other sizes
