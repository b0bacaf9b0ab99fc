"""A module of a derived class in the place of a library's."""

import copy

import torch
from torch import nn

from models.towers.attention import SelfAttention, with_self_attention
from models.towers.derived import as_kind, with_kinds


class Halved(nn.Linear):
    def forward(self, input):
        return super().forward(input) / 2


def test_it_holds_the_same_tensors_settings_and_hooks():
    linear = nn.Linear(2, 2).eval().requires_grad_(False)
    called = []
    linear.register_forward_hook(lambda *_: called.append(1))
    given = torch.ones(1, 2)
    expected = linear(given) / 2
    halved = as_kind(linear, Halved)
    assert type(halved) is Halved and not halved.training and halved.weight is linear.weight
    assert halved(given).equal(expected) and len(called) == 2
    assert type(linear) is nn.Linear
    assert copy.deepcopy(halved)(given).equal(expected)


def test_every_place_of_a_module_and_the_model_itself():
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": nn.Sequential(shared, nn.ReLU()), "b": shared, "c": nn.Identity()})
    model["a"].register_module("none", None)
    names, found = (
        list(model.state_dict()),
        with_kinds(model, lambda module: Halved if type(module) is nn.Linear else None),
    )
    assert found is model and type(model["b"]) is Halved and model["a"][0] is model["b"]
    assert list(model.state_dict()) == names and list(model) == ["a", "b", "c"]
    assert type(with_self_attention(nn.MultiheadAttention(4, 2))) is SelfAttention
