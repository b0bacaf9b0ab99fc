"""A backward in two parts gives the gradients of an ordinary one."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from engine.split_backward import backward_inputs, parameter_gradients


class Twice(nn.Module):
    """A parameter that is used twice, the second time above the first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.linear(torch.tanh(self.linear(x)))) + x


class Plus(nn.Module):
    """What is added depends on a parameter and on no input."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(6))

    def forward(self, x):
        return x + F.gelu(self.positions)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(24, 6),
    )


MODULES = {
    "linear": lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6)),
    "norms": lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.LayerNorm(6)),
    "convolutions": convolutions,
    "transformer": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 2)),
        nn.TransformerEncoderLayer(2, 1, 8, dropout=0.0, batch_first=True),
        nn.Flatten(),
    ),
    "a parameter used twice": Twice,
    "a parameter that is added": Plus,
    "no parameters": lambda: nn.Tanh(),
}


def of_both(module: nn.Module, x: torch.Tensor, weight: torch.Tensor, outputs_of) -> None:
    """The gradients of an ordinary backward and of one in two parts, of two micro-batches."""
    whole, split = module.double(), copy.deepcopy(module).double()
    inputs = [[x.clone().requires_grad_() for _ in range(2)] for _ in range(2)]
    for leaf in inputs[0]:
        torch.autograd.backward(*outputs_of(whole, leaf, weight))
    held = [
        backward_inputs(
            [
                (get_gradient_edge(made), grad)
                for made, grad in zip(*outputs_of(split, leaf, weight))
            ],
            [leaf],
            list(split.parameters()),
        )
        for leaf in inputs[1]
    ]
    assert all(p.grad is None for p in split.parameters())
    for one in held:
        for tensor, grad in [
            *one.apart,
            *((p.view_as(p), grad) for p, grad in parameter_gradients(one)),
        ]:
            torch.autograd.backward([tensor], [grad])
    for a, b in zip(*inputs):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-14)
    for (name, a), b in zip(whole.named_parameters(), split.parameters()):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-13, msg=name)


@pytest.mark.parametrize("name", MODULES)
def test_gradients_equal_those_of_an_ordinary_backward(name):
    torch.manual_seed(0)
    x, weight = torch.randn(5, 6, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)

    def outputs_of(module, leaf, weight):
        return [module(leaf)], [weight]

    of_both(MODULES[name](), x, weight, outputs_of)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of_input, self.apart, self.shared = (nn.Linear(6, 6) for _ in range(3))


def test_an_output_that_depends_on_no_input_has_an_ordinary_backward():
    """A merged stage where a branch begins beside one that goes on; both use one layer."""
    torch.manual_seed(1)
    x, weight = torch.randn(5, 6, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)

    def outputs_of(module, leaf, weight):
        goes_on = module.shared(torch.tanh(module.of_input(leaf)))
        begins = module.shared(torch.tanh(module.apart(weight)))
        return [goes_on, begins], [weight, 2 * weight]

    of_both(Two(), x, weight, outputs_of)


def test_what_passes_through_keeps_its_gradient():
    torch.manual_seed(2)
    x, weight = torch.randn(5, 6, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)

    def outputs_of(module, leaf, weight):
        return [leaf, module(leaf)], [weight, 3 * weight]

    of_both(nn.Linear(6, 6), x, weight, outputs_of)


def test_a_layer_that_does_not_learn_has_no_gradient():
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    module[0].requires_grad_(False)
    leaf = torch.randn(5, 6, requires_grad=True)
    held = backward_inputs(
        [(get_gradient_edge(module(leaf)), torch.ones(5, 6))],
        [leaf],
        [p for p in module.parameters() if p.requires_grad],
    )
    found = dict((id(p), grad) for p, grad in parameter_gradients(held))
    assert leaf.grad is not None and set(found) == {id(p) for p in module[2].parameters()}
