"""Gradients are handed on in one order on all replicas, whichever the backward of each makes, and
while it runs."""

from dataclasses import replace

import pytest
import torch
from ordered_gradients_cases import train_with_skipped_layers, waits_in_backwards
from ranks import run_cases
from refusals import pattern
from split_training import assemble, check_gradients, merged_of
from torch import nn

from engine.backend.ordered_gradients import OrderedGradients


def layers_of(number=3):
    torch.manual_seed(0)
    return [nn.Linear(2, 2, bias=False) for _ in range(number)]


class Noted:
    """What was handed on, in order: (layer, its gradient, or None), and frees it."""

    def __init__(self, layers):
        self.number = {id(layer.weight): number for number, layer in enumerate(layers)}
        self.found = []
        weights = [layer.weight for layer in reversed(layers)]
        self.ordered = OrderedGradients(weights, self)

    def __call__(self, weight):
        gradient, weight.grad = weight.grad, None
        self.found.append((self.number[id(weight)], gradient))

    @property
    def order(self):
        return [number for number, _ in self.found]


def value_of(layers, x=None):
    x = torch.ones(1, 2) if x is None else x
    for layer in layers:
        x = layer(x)
    return x.sum()


def test_each_is_handed_on_during_the_backward():
    layers, seen = layers_of(), []
    noted = Noted(layers)
    for number, layer in enumerate(layers):
        layer.register_full_backward_pre_hook(lambda *_, n=number: seen.append((n, noted.order)))
    with noted.ordered.backward():
        value_of(layers, torch.ones(1, 2, requires_grad=True)).backward()
    assert noted.order == [2, 1, 0] and dict(seen)[0][:1] == [2]
    assert all(gradient is not None for _, gradient in noted.found)


def test_an_order_that_is_not_that_of_the_backward_is_kept():
    layers = layers_of()
    noted = Noted(layers)
    with noted.ordered.backward():
        value_of(layers[:1]).backward()
        assert noted.order == []  # waits for the two before it
        value_of(layers[1:]).backward()
    assert noted.order == [2, 1, 0]


@pytest.mark.parametrize("skipped", [0, 1, 2])
def test_a_layer_that_this_replica_skips_has_its_turn_too(skipped):
    """As with layer drop: the others would else average its neighbour with it."""
    layers = layers_of()
    noted = Noted(layers)
    for _ in range(2):
        with noted.ordered.backward():
            value_of([each for n, each in enumerate(layers) if n != skipped]).backward()
    assert noted.order == [2, 1, 0] * 2
    assert [n for n, gradient in noted.found if gradient is None] == [skipped] * 2


def test_a_backward_outside_hands_nothing_on():
    layers = layers_of()
    noted = Noted(layers)
    value_of(layers).backward()
    assert noted.order == [] and all(layer.weight.grad is not None for layer in layers)


def test_a_gradient_that_comes_twice_is_refused():
    """The first may be gone."""
    layers = layers_of()
    noted = Noted(layers)
    words = pattern('made a gradient twice … {"stage": 1}')
    with pytest.raises(RuntimeError, match=words), noted.ordered.backward():
        value_of(layers).backward()
        value_of(layers).backward()


# -- in the engine

BLOCKS = tuple(f"image.encoder.layers.encoder_layer_{number}" for number in range(3))


def test_replicas_that_skip_unlike_layers_average_like_ones():
    """Blocks of one size, of which each replica leaves out another at a time: autograd makes as
    many gradients on each, and not of the same parameters."""
    case = merged_of(1, 2, 4)
    cases = [(replace(case, zero_stage=stage), BLOCKS) for stage in (0, 2, 3)]
    whole, *others = (
        [{"gradients": pieces} for pieces in of_ranks]
        for of_ranks in run_cases(2, train_with_skipped_layers, cases)
    )
    shapes = {name: torch.Size([piece.numel()]) for name, _, piece in whole[0]["gradients"]}
    expected = assemble(whole, shapes)
    assert all(any(name.startswith(block) for name in expected) for block in BLOCKS)
    for sharded in others:
        check_gradients(assemble(sharded, shapes), expected)


def test_what_replicas_wait_for_each_other_in_a_backward_is_no_work():
    """Else a slow one would look like the others. 117,601 gradients in buckets of 100,000."""
    cases = [(merged_of(1, 2, 4, zero_stage=stage),) for stage in (1, 2)]
    whole, sharded = run_cases(2, waits_in_backwards, cases)
    assert whole == [[0, 0, 0]] * 2 and sharded == [[2, 2, 2]] * 2
