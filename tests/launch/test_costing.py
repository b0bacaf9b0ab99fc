"""What a run is planned by: its own towers' costs, and no others."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from ranks import run_ranks
from unlike_cases import costs_of_run

from engine.objective import Pair
from engine.planning.costs import FurtherRows
from engine.planning.devices import find_device
from engine.planning.measured import device_identity
from launch.setup.costing import are_of, compared, further_rows
from launch.setup.estimates import estimated_costs
from models.losses import InfoNCE
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


def test_rows_beside_those_of_samples_are_counted_in_the_data():
    """Of four samples: 2, 0, 20 and 3 regions, of which 16 are shown at most, and negatives."""
    have = {"num_regions": np.array([2, 0, 20, 3]), "num_negatives": np.array([4, 0, 0, 0])}
    source = SimpleNamespace(numbers=lambda name, indices: have[name][indices])
    data = SimpleNamespace(source=source, examples=lambda most: np.arange(4))
    pairs = (
        Pair("image", "text", InfoNCE()),
        Pair("image", "text", InfoNCE(), made=("region", "phrase"), prefix="region_phrase_"),
    )
    model = SimpleNamespace(objective=SimpleNamespace(terms=pairs))
    for given, expected in (
        ("image:text,region:text", (FurtherRows("image", "text", (21 / 4, 25 / 4)),)),
        ("image:text", ()),
    ):
        inputs = SimpleNamespace(pairs=given, max_regions=16, max_moments=16, max_negatives=16)
        assert further_rows(model, data, inputs) == expected
    assert compared(model) == (("image", "text"),)
