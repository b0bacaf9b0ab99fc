"""Averages that start during the last backward: equal to the mean, in one order on all replicas,
and begun before the backward is over."""

import weakref
from dataclasses import replace

import torch
from gradient_reducer_cases import train_and_count
from ranks import run_all
from split_training import Case
from torch import nn

from engine.backend.gradient_reducer import BUCKETS_IN_FLIGHT, GradientReducer
from engine.config.implied import averages_early


class Done:
    def wait(self):
        pass


class Sums:
    """Stands for the other replica, whose gradients are three times as large."""

    def __init__(self):
        self.started = []

    def __call__(self, flat):
        self.started.append(flat.clone())
        flat.mul_(4)
        return Done()


def line(num_layers=4, width=3):
    torch.manual_seed(0)
    return [nn.Linear(width, width, bias=False) for _ in range(num_layers)]


def averages_of(layers, sums, at_the_end=(), bucket_bytes=1):
    parameters = [p for layer in layers for p in layer.parameters()]
    return GradientReducer(
        parameters, list(at_the_end), lambda p: p.grad, sums, replicas=2, bucket_bytes=bucket_bytes
    )


def backward(layers, x=None):
    x = torch.ones(2, 3) if x is None else x
    for layer in layers:
        x = layer(x).sin()
    x.sum().backward()


def test_gradients_become_the_mean_over_the_replicas():
    layers, sums = line(), Sums()
    averages = averages_of(layers, sums)
    backward(layers)  # an earlier micro-batch starts nothing
    assert not sums.started
    with averages.last_backward():
        backward(layers)
    own = [flat.view(3, 3) for flat in reversed(sums.started)]
    averages.finish()
    for layer, gradient in zip(layers, own):
        torch.testing.assert_close(layer.weight.grad, 2 * gradient, rtol=0, atol=0)
    with averages.last_backward():  # and again in the next step
        backward(layers)
    averages.finish()
    assert len(sums.started) == 8


def test_each_starts_when_its_bucket_is_complete():
    layers, sums, order = line(), Sums(), []
    averages = averages_of(layers, sums)
    for number, layer in enumerate(layers):
        layer.register_full_backward_hook(
            lambda *_, number=number: order.append((number, averages.num_started))
        )
    with averages.last_backward():
        backward(layers, torch.ones(2, 3, requires_grad=True))
    started = dict(order)
    assert averages.num_started == 4 and started[0] >= 3 and started[3] <= 1


def test_buckets_hold_as_many_bytes_as_asked_for():
    layers, sums = line(5), Sums()
    averages = averages_of(layers, sums, bucket_bytes=2 * 9 * 4)
    with averages.last_backward():
        backward(layers)
    averages.finish()
    assert [flat.numel() for flat in sums.started] == [18, 18, 9]


def test_few_flat_tensors_stand_at_a_time():
    layers, sums, standing, most = line(9), Sums(), weakref.WeakSet(), []

    class Flat:
        """Lives as long as the tensor."""

    def noting(flat):
        flat.standing = Flat()
        standing.add(flat.standing)
        most.append(len(standing))
        return sums(flat)

    averages = averages_of(layers, noting)
    with averages.last_backward():
        backward(layers)
    averages.finish()
    assert len(most) == 9 and max(most) == BUCKETS_IN_FLIGHT and not standing


def test_what_is_complete_out_of_order_waits_for_its_turn():
    """Replicas may complete layers in different orders; sums start in one order on all of them."""
    layers, sums = line(3), Sums()
    averages = averages_of(layers, sums)
    with averages.last_backward():
        (layers[0](torch.ones(1, 3)).sum() + layers[1](torch.ones(1, 3)).sum()).backward()
        assert not sums.started  # the last layer, whose turn is first, has no gradient yet
        layers[2](torch.full((1, 3), 2.0)).sum().backward()
    averages.finish()
    assert sums.started[0].tolist() == [2.0] * 9 and len(sums.started) == 3


def test_those_at_the_end_do_not_hold_up_the_others():
    layers, sums = line(3), Sums()
    averages = averages_of(layers, sums, at_the_end=layers[2].parameters())
    layers[2].weight.grad = torch.full((3, 3), 7.0)
    with averages.last_backward():
        backward(layers[:2])
    assert averages.num_started == 2
    averages.finish()
    assert layers[2].weight.grad.tolist() == [[14.0] * 3] * 3


BF16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}


def test_where_they_start_early():
    for config, early in (
        ({}, True),
        ({"zero_optimization": {"stage": 1}}, False),
        ({"zero_optimization": {"stage": 2}}, False),
        ({**BF16, "zero_optimization": {"stage": 2}}, False),
        (BF16, True),
        ({**BF16, "communication_data_type": "fp32"}, True),
        ({**BF16, "communication_data_type": "bf16"}, False),
        ({**BF16, "prescale_gradients": True}, False),
        ({**BF16, "gradient_predivide_factor": 2.0}, False),
        ({**BF16, "bf16": {"enabled": True, "immediate_grad_update": False}}, False),
        ({"zero_optimization": {"stage": 0, "overlap_comm": False}}, False),
    ):
        assert averages_early(config) is early, config


# -- in the engine

FORK = Case("fork", {"image": 2, "text": 1}, {"image": 2, "text": 2}, {"image": 4, "text": 6})


def test_sums_of_real_stages_start_during_the_last_backward():
    cases = [
        replace(FORK, zero_stage=0, steps=2),
        replace(FORK, precision="bf16", steps=2),
        replace(FORK, zero_stage=0, schedule="replay"),
    ]
    for case, results in run_all(train_and_count, cases):
        for _, early in results:
            assert len(early) == case.steps, case
            for started, buckets in early:
                assert buckets > 3 and started >= buckets - 1, case
