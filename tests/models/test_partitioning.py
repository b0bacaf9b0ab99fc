"""Small models that are hard to cut: each is cut where that is exact, and says why where it is
not."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from models.towers.layers import LayerSpec, LibraryModel, cut, library_models_kept
from models.towers.tracing.partitioning import CannotRun, partitioned
from models.towers.tracing.trace import OTHER_SAMPLES, SAMPLES

ROWS = 4


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, *more):
        for each in more:
            x = x + each
        return x + self.second(F.gelu(self.first(x)))


class Chain(nn.Module):
    """A stem, blocks, a norm."""

    def __init__(self, depth=3):
        super().__init__()
        self.stem = nn.Linear(3, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(8)

    def forward(self, x):  # [B, 6, 3]
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x).mean(1)


def partition_of(make):
    with torch.device("meta"):
        model = make()
    return model, partitioned(
        model, "image", ("pixel_values", torch.empty(SAMPLES, 6, 3, device="meta"))
    )


def same_as_the_model(make):
    """Output and gradients of the layers one after the other; returns the partition."""
    model, partition = partition_of(make)
    whole = LibraryModel(make)
    specs = cut(
        "image", model, partition.layers, lambda layer: None, partition.unused, original=whole
    )
    with library_models_kept():
        layers = [spec.build(0) for spec in specs]
    reference = make()
    state = {
        layer.canonical_names[local].removeprefix("image."): tensor
        for layer in layers
        for local, tensor in layer.state_dict().items()
    }
    assert not reference.load_state_dict(state, strict=False).unexpected_keys
    for training in (True, False):
        given = torch.randn(ROWS, 6, 3)  # other numbers of rows than it was traced with
        tensors = {"pixel_values": given}
        for layer in layers:
            before = {name: tensor.clone() for name, tensor in tensors.items()}
            made = layer.train(training)(tensors)
            assert all(torch.equal(tensors[name], before[name]) for name in before)
            tensors = made
        torch.manual_seed(0)
        expected = reference.train(training)(given)
        assert set(tensors) == {"image_features"}
        assert torch.equal(tensors["image_features"], expected)
    for module in (reference, *layers):
        module.zero_grad()
    tensors["image_features"].square().sum().backward()
    expected.square().sum().backward()
    gradients = {name: p.grad for name, p in reference.named_parameters()}
    for layer in layers:
        for local, parameter in layer.named_parameters():
            name = layer.canonical_names[local].removeprefix("image.")
            assert torch.equal(parameter.grad, gradients.pop(name)), name
    assert all(gradient is None for gradient in gradients.values())
    return partition


def names(partition):
    return [name for name, _ in partition.layers]


def test_a_chain_is_cut_before_each_block():
    partition = same_as_the_model(Chain)
    assert names(partition) == ["stem", "blocks.0", "blocks.1", "blocks.2", "pool"]
    assert partition.notes == [] and partition.unused == () and partition.features == (SAMPLES, 8)
    stem, block, _, _, pool = (layer for _, layer in partition.layers)
    assert (stem.reads, stem.makes, stem.drops) == (
        ("pixel_values",),
        ("image_hidden",),
        ("pixel_values",),
    )
    assert (block.reads, block.makes, block.drops) == (("image_hidden",), ("image_hidden",), ())
    assert (pool.makes, pool.drops) == (("image_features",), ("image_hidden",))


class Beside(Chain):
    """A tensor goes past all blocks, and one past some."""

    def forward(self, x):
        x = past = self.stem(x)
        for i, block in enumerate(self.blocks):
            x = block(x, past) if i < 2 else block(x)
        return self.norm(x + x.mean(1, keepdim=True) * 0 + past).mean(1)


def test_several_tensors_travel():
    partition = same_as_the_model(Beside)
    assert len(partition.layers) == 5
    reads = [layer.reads for _, layer in partition.layers]
    assert reads[1] == ("image_stem",)
    assert set(reads[2]) == set(reads[4]) == {"image_hidden", "image_stem"}
    assert reads[3] == ("image_hidden",)


class Pairs(Chain):
    """Blocks that hand on a tuple."""

    class Two(Block):
        def forward(self, pair):
            first, second = pair
            return super().forward(first), second * 2

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Two() for _ in range(3))

    def forward(self, x):
        pair = self.stem(x), x.sum(2)
        for block in self.blocks:
            pair = block(pair)
        return self.norm(pair[0]).mean(1) + pair[1].mean(1, keepdim=True)


def test_tuples_travel_as_tensors():
    partition = same_as_the_model(Pairs)
    assert len(partition.layers) == 5 and len(partition.layers[2][1].reads) == 2


class Idle(Chain):
    """A block is given a tensor that it does not use, and makes one that nobody does."""

    class Ignoring(Block):
        def forward(self, x, ignored):
            return super().forward(x), ignored.abs() + x

    def __init__(self):
        super().__init__()
        self.blocks[1] = self.Ignoring()

    def forward(self, x):
        x = self.stem(x)
        past = self.blocks[0](x, x)
        x, _ = self.blocks[1](x, past)
        return self.norm(self.blocks[2](x)).mean(1) + past.mean((1, 2))[:, None]


def test_a_stage_owes_a_gradient_for_all_that_it_receives():
    partition = same_as_the_model(Idle)
    assert partition.notes == [
        "blocks.0 to blocks.1 are one layer: no gradient comes back to image_blocks_0"
    ]
    assert all("image_blocks_1_1" not in layer.makes for _, layer in partition.layers)


class Shapes(Chain):
    """Numbers of rows and tokens are asked for at the start and needed at the end."""

    def forward(self, x):
        rows, tokens, _ = x.shape
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        if tokens > 4:
            x = x * 2
        return self.norm(x).reshape(rows * 2, tokens // 2, 8).reshape(rows, tokens, 8).mean(1)


def test_numbers_of_rows_follow_the_batch_and_others_are_kept():
    partition = same_as_the_model(Shapes)
    assert len(partition.layers) == 5
    assert partition.layers[0][1].only_size == (6, 3)
    stem = copy.deepcopy(partition.layers[0][1])
    with pytest.raises(
        ValueError, match=r"are \(8, 3\) but .* images of .*6, 3.*; give all images"
    ):
        stem({"pixel_values": torch.empty(2, 8, 3, device="meta")})
    assert same_as_the_model(Chain).layers[0][1].only_size is None


class Angles(Chain):
    """A table that is not trained, and what is computed of it, for every block."""

    def __init__(self):
        super().__init__()
        self.register_buffer("periods", torch.arange(1.0, 9.0), persistent=False)

    def forward(self, x):
        tokens = torch.arange(x.shape[1], device=x.device)
        angles = (tokens[:, None] / self.periods).sin()
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, angles)
        return self.norm(x).mean(1)


def test_what_no_weight_decides_is_computed_where_it_is_read():
    partition = same_as_the_model(Angles)
    assert len(partition.layers) == 5
    assert all(layer.reads == ("image_hidden",) for _, layer in partition.layers[1:])


class Dropping(Chain):
    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return F.dropout(self.norm(x).mean(1), p=0.0 * self.norm.eps, training=self.training)


class HalfDropping(Dropping):
    def forward(self, x):
        return F.dropout(super().forward(x), p=0.5, training=self.training)


def test_a_mode_is_followed_and_random_numbers_are_noticed():
    partition = same_as_the_model(Dropping)
    assert len(partition.layers) == 5 and not any(layer.draws for _, layer in partition.layers)
    model, partition = partition_of(HalfDropping)
    assert [layer.draws for _, layer in partition.layers] == [False] * 4 + [True]
    layers = [layer.to_empty(device="cpu") for _, layer in partition.layers]
    for parameter in (p for layer in layers for p in layer.parameters()):
        nn.init.normal_(parameter)
    for training, zeros in ((True, True), (False, False)):
        tensors = {"pixel_values": torch.randn(ROWS, 6, 3)}
        for layer in layers:
            tensors = layer.train(training)(tensors)
        assert (tensors["image_features"] == 0).any() == zeros


class Shared(Chain):
    def __init__(self):
        super().__init__()
        self.blocks[2].first = self.blocks[1].first

    def forward(self, x):
        return super().forward(x)


def test_blocks_that_share_weights_are_one_layer():
    model, partition = partition_of(Shared)
    assert names(partition) == ["stem", "blocks.0", "blocks.1", "pool"]
    assert partition.notes == ["blocks.1 to blocks.2 are one layer: they share weights"]
    same_as_the_model(Shared)


class InPlace(Chain):
    class Rectifying(Block):
        def forward(self, x):
            return super().forward(F.relu_(x))

    def __init__(self):
        super().__init__()
        self.blocks[1] = self.Rectifying()

    def forward(self, x):
        return super().forward(x)


def test_a_block_that_changes_its_input_belongs_to_the_one_before():
    partition = same_as_the_model(InPlace)
    assert partition.notes == [
        "blocks.0 to blocks.1 are one layer: the second changes its input in place"
    ]


class Filling(Chain):
    """The result of a change in place is thrown away."""

    def forward(self, x):
        scale = torch.zeros_like(x[..., :1])
        scale.add_(x.mean()).mul_(2)
        x = self.stem(x) * scale
        for block in self.blocks:
            x = block(x)
        return self.norm(x).mean(1)


class Writing(Filling):
    def forward(self, x):
        x = self.stem(x)
        x[:, 0] = 0
        for block in self.blocks:
            x = block(x)
        return self.norm(x).mean(1)


def test_changes_in_place_are_followed_or_refused():
    assert len(same_as_the_model(Filling).layers) == 5
    partition = same_as_the_model(Writing)
    assert names(partition) == ["model"] and "one layer" in partition.notes[-1]


class Deciding(Chain):
    """Nothing of it can be known before the run."""

    def forward(self, x):
        x = super().forward(x)
        return x * 2 if len(x) == SAMPLES else x * 3


class OtherSteps(Chain):
    def forward(self, x):
        x = super().forward(x)
        return x if self.training else x * 2


class Loose(Chain):
    def __init__(self):
        super().__init__()
        self.offset = torch.ones(8)

    def forward(self, x):
        return super().forward(x) + self.offset


def test_what_cannot_be_recorded_is_one_layer(subtests):
    for make, reason in (
        (Deciding, "what its forward does depends on the number of images"),
        (OtherSteps, "its forward takes other steps in training than in evaluation"),
        (Loose, "its forward reads a tensor that is no parameter and no buffer"),
    ):
        with subtests.test(str(make)):
            model, partition = partition_of(make)
            assert names(partition) == ["model"]
            assert partition.notes == [f"one layer: {reason}"]
            if make is not Loose:
                same_as_the_model(make)


class Tabled(Chain):
    """A table of one size until the first forward puts a larger one in its place."""

    class Sized(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.zeros(1), persistent=False)

        def forward(self, x):
            if len(self.table) != x.shape[1]:
                self.table = torch.arange(float(x.shape[1]), device=x.device)
            return super().forward(x, self.table[:, None])

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Sized() for _ in range(3))

    def forward(self, x):
        return super().forward(x)


def test_tables_that_a_first_forward_makes_are_made_in_the_layers_first_forward():
    partition = same_as_the_model(Tabled)
    assert len(partition.layers) == 5
    assert partition.layers[1][1].get_buffer("body.block_0.table").shape == (1,)


class Unused(Chain):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 8)


def test_tensors_that_the_forward_does_not_use_are_named():
    assert same_as_the_model(Unused).unused == ("head.weight", "head.bias")


class Wide(Chain):
    def forward(self, x):
        x = self.stem(x)
        several = [x * i for i in range(9)]
        for block in self.blocks[:2]:
            x = block(x)
        for each in several:
            x = x + each
        return self.norm(self.blocks[2](x)).mean(1)


def test_many_tensors_do_not_travel():
    partition = same_as_the_model(Wide)
    assert names(partition) == ["stem", "blocks.0", "blocks.2", "pool"]
    assert partition.notes[-1].endswith("10 tensors would travel between them")


def test_an_input_that_the_model_does_not_take():
    with torch.device("meta"):
        model = Chain()
    with pytest.raises(CannotRun, match="RuntimeError: "):
        partitioned(model, "image", ("pixel_values", torch.empty(2, 6, 4, device="meta")))


def test_layers_are_copied_and_kept():
    _, partition = partition_of(Angles)
    for _, layer in partition.layers:
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert list(other.state_dict()) == list(layer.state_dict())
            assert [name for name, _ in other.named_buffers()] == [
                name for name, _ in layer.named_buffers()
            ]
            given = {
                name: torch.empty(ROWS, 6, 3 if name == "pixel_values" else 8, device="meta")
                for name in layer.reads
            }
            assert {n: t.shape for n, t in other(given).items()} == {
                n: t.shape for n, t in layer(given).items()
            }


def test_whole_models_are_made_once_where_they_are_kept():
    made = []

    def make():
        made.append(1)
        return Chain()

    model, partition = partition_of(Chain)
    specs = cut("image", model, partition.layers, lambda layer: None, original=LibraryModel(make))
    with library_models_kept():
        together = [spec.build(5).state_dict() for spec in specs]
        assert len(made) == 1
        torch.manual_seed(3)
        before = torch.get_rng_state()
        other = specs[1].build(6).state_dict()
        assert len(made) == 2
    for spec, expected in reversed(list(zip(specs, together))):
        alone = spec.build(5).state_dict()
        assert all(torch.equal(alone[name], expected[name]) for name in expected)
    assert len(made) == 2 + len(specs)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(
        other["body.block_0.first.weight"], together[1]["body.block_0.first.weight"]
    )
    assert isinstance(specs[0], LayerSpec) and OTHER_SAMPLES != SAMPLES
