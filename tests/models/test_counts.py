"""Counts of layers on the meta device, against formulas and the library's published figures."""

import copy
from functools import cache

import pytest
import torch
from torch import nn

from models.towers.building import (
    build_towers,
    changing_buffers,
    count_flops,
    meta_inputs,
    with_head,
)
from models.towers.building import describe_layers as describe
from models.towers.tracing.towers import Traceable, traced_tower
from models.towers.tracing.trace import SAMPLES

IMAGE, TEXT = build_towers("vit_b_16", "bert-base-uncased", 512, 224, None, 64)
describe_layers = cache(describe)


def test_flops_and_parameters_are_those_of_the_tower():
    small = build_towers("resnet18", "clip-text-base", 64, 32, None, 16)[0]
    for tower in (IMAGE, TEXT, small):
        counts = describe_layers(tower, 4)
        assert [2 * c.flops for c in counts] == count_flops(tower, meta_inputs(tower, 2))
        assert sum(c.num_parameters for c in counts) == tower.num_parameters
        assert [c.name for c in counts] == [spec.name for spec in tower.specs]


def test_a_transformer_block_keeps_what_the_formula_says():
    """ViT-B/16, per sample, N tokens of width D, fp32. [N, D] each: two norms' outputs, query, key,
    value and their common copy (3), attention out and its projection's input, the sum that the
    second norm reads, the output; [N, 4D] twice, around GELU; and of each head and token one
    log-sum-exp, of each norm and token two statistics. No matrix of attention probabilities: that
    would be 12 N² more."""
    tokens, width = 197, 768
    stem, block = describe_layers(IMAGE, 4)[:2]
    low, high = (4 * (n * tokens * width + 2 * tokens * 4 * width) for n in (7, 10))
    assert low < block.activation_bytes < high
    assert block.output_bytes == 4 * tokens * width
    assert block.convolution_flops == 0 and stem.convolution_flops == stem.flops > 0


def test_half_precision_halves_what_is_kept_and_moved():
    """But for statistics in fp32, masks of dropout and integers, a tenth at most. Each byte that is
    kept was written, and the input read."""
    for tower in (IMAGE, TEXT):
        whole = describe_layers(tower, 4)
        for one, half in zip(whole[1:-1], describe_layers(tower, 2)[1:-1]):
            assert half.flops == one.flops
            for of in ("activation_bytes", "moved_bytes"):
                assert 0.5 <= getattr(half, of) / getattr(one, of) < 0.55, (one.name, of)
        for one in whole:
            assert one.moved_bytes >= one.activation_bytes - 64 * 17 or one.num_kernels == 0, one


def test_nothing_is_made_real_and_templates_stay_as_they_were():
    before = [p.dtype for spec in TEXT.specs for p in spec.template.parameters()]
    describe(TEXT, 2)
    assert (
        [p.dtype for spec in TEXT.specs for p in spec.template.parameters()]
        == before
        == [torch.float32] * len(before)
    )
    assert all(p.is_meta for spec in TEXT.specs for p in spec.template.parameters())


def test_bytes_of_no_weight_are_refused():
    with pytest.raises(ValueError, match="precision_bytes=3 must be one of 4, 2"):
        describe_layers(TEXT, 3)


@pytest.mark.all("every family of towers")
def test_every_family_is_counted_without_memory(cases, subtests):
    """The planner prices towers on the meta device, where nothing can be read."""
    for name, case in cases.items():
        with subtests.test(name):
            tower = with_head(case.tower(), 16)
            counts = describe(tower, 2)
            assert sum(c.num_parameters for c in counts) == tower.num_parameters
            assert all(c.flops > 0 for c in counts[1:-2]), [c.name for c in counts if not c.flops]
            flops = count_flops(tower, meta_inputs(tower, 2))
            assert 2 * sum(c.flops for c in counts) == sum(flops)
            assert all(p.is_meta for spec in tower.specs for p in spec.template.parameters())


class Stem(nn.Module):
    """What a model of one's own may normalise with, and keep between forwards."""

    def __init__(self, norm: nn.Module, replaces: bool = False):
        super().__init__()
        self.conv, self.norm, self.replaces = nn.Conv2d(3, 8, 8, 8), norm, replaces
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("table", torch.zeros(8))
        self.register_buffer("cache", torch.zeros(()), persistent=False)

    def forward(self, pixels):
        found = self.norm(self.conv(pixels)).mean((2, 3))
        self.cache = found.detach().sum()
        if self.replaces and self.training:
            self.mean = 0.9 * self.mean + 0.1 * found.detach().mean(0)
        return found + self.mean + self.table


def test_buffers_that_training_changes_are_found():
    """Whether they are written to or replaced; not those of batch normalisation, tables, or what is
    no part of the state."""
    for norm, replaces, expected in (
        (nn.BatchNorm2d(8), False, []),
        (nn.InstanceNorm2d(8), False, []),
        (nn.InstanceNorm2d(8, track_running_stats=True), False, ["running_mean", "running_var"]),
        (nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 8, 1)), False, ["_u", "_v"]),
        (nn.Identity(), True, ["image.mean"]),
    ):
        given = Traceable(
            "image",
            lambda norm=norm, replaces=replaces: Stem(copy.deepcopy(norm), replaces).to("meta"),
            ("pixel_values", (SAMPLES, 3, 16, 16), torch.float32),
            not_taken="",
            remedy="",
        )
        found = changing_buffers(traced_tower(given, "own", {"image_size": 16}))
        assert len(found) == len(expected) and all(
            part in name for part, name in zip(expected, found)
        ), (norm, found)
    assert not changing_buffers(IMAGE) and not changing_buffers(TEXT)
