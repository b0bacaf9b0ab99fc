"""Layers: names, initial weights, what is made real, what travels, what draws."""

import math
from itertools import product

import pytest
import torch
import torchvision
from torch import nn

from models.towers.building import build_towers, count_flops, meta_inputs, with_head
from models.towers.image import image_tower
from models.towers.layers import Layer, cut, stable_seed
from models.towers.libraries.torchvision_by_hand import ARCHITECTURES
from models.towers.libraries.transformers_text import PRESETS
from models.towers.text import text_tower


def test_vit_positions_of_other_sizes_lie_between_the_learned_ones():
    name = "vit_b_16:num_layers=1,hidden_dim=24,num_heads=2,mlp_dim=8,patch_size=8"
    stem = image_tower(name, 32).specs[0].build(0)
    side = torch.linspace(-1, 1, 4)
    with torch.no_grad():  # what is learned: the row, the column, and a constant
        stem.pos_embedding[0, 1:, 0] = side.repeat_interleave(4)
        stem.pos_embedding[0, 1:, 1] = side.repeat(4)
        stem.pos_embedding[0, 1:, 2] = 5.0
    assert stem.positions(4, 4) is stem.pos_embedding
    wide = stem.positions(2, 6)
    assert wide.shape == (1, 13, 24) and torch.equal(wide[:, 0], stem.pos_embedding[:, 0])
    grid = wide[0, 1:].unflatten(0, (2, 6))
    assert torch.allclose(grid[..., 2], torch.tensor(5.0))
    assert (grid[:, 1:, 1] > grid[:, :-1, 1]).all() and (grid[1, :, 0] > grid[0, :, 0]).all()
    assert torch.allclose(grid[0, :, 1], -grid[0, :, 1].flip(0), atol=1e-5)  # symmetric
    stem({"pixel_values": torch.randn(2, 3, 16, 48)})["image_hidden"].sum().backward()
    assert stem.pos_embedding.grad.abs().sum() > 0


def test_names_of_layers_and_heads():
    image, text = build_towers("resnet18:layers=1-1-1-1", "bert-tiny", 8, 32, 50, 10, 0)
    blocks = [f"image.layer{i}.0" for i in range(1, 5)]
    names = ["image.stem", *blocks, "image.pool", "image.head"]
    assert [spec.name for spec in image.specs] == names
    blocks = [f"text.encoder.layer.{i}" for i in range(2)]
    names = ["text.embeddings", *blocks, "text.pooler", "text.head"]
    assert [spec.name for spec in text.specs] == names
    canonical = image.specs[1].build(0).canonical_names["block.conv1.weight"]
    assert canonical == "image.layer1.0.conv1.weight"
    heads = [tower.specs[-1].build(0) for tower in (image, text)]
    assert heads[0].canonical_names == {
        "image_projection.weight": "head.image_projection.weight",
        "logit_scale": "head.logit_scale",
    }
    assert heads[1].canonical_names == {"text_projection.weight": "head.text_projection.weight"}
    assert image.width == 512 and text.width == 128


# First values come from a layer's name, and checkpoints and exports have the parameters' (which
# test_towers_equal_library.py compares with the library's): these stay.
LAYERS = {
    "bert chinese-clip clap-text electra minilm mpnet roberta xlm-roberta": "embeddings "
    "encoder.layer.0 encoder.layer.1 pooler",
    "clip siglip": "embeddings encoder.layers.0 encoder.layers.1 pooler",
    "distilbert": "embeddings transformer.layer.0 transformer.layer.1 pooler",
    "modernbert": "embeddings layers.0 layers.1 layers.2 layers.3 pooler",
    "t5 mt5": "embeddings encoder.block.0 encoder.block.1 encoder.block.2 pooler",
    "xlm": "embeddings attentions.0 attentions.1 pooler",
    "hf-ast hf-dinov2 hf-dinov2-registers hf-vit": "embeddings encoder.layer.0 encoder.layer.1 "
    "pool",
    "hf-clip hf-siglip hf-siglip2": "embeddings encoder.layers.0 encoder.layers.1 pool",
    "hf-whisper": "embeddings layers.0 layers.1 pool",
    "hf-swin": "embeddings encoder.layers.0.blocks.0 encoder.layers.0.blocks.1 "
    "encoder.layers.0.downsample encoder.layers.1.blocks.0 encoder.layers.1.blocks.1 pool",
    "hf-htsat": "audio_encoder.patch_embed audio_encoder.layers.0.blocks.0 "
    "audio_encoder.layers.0.blocks.1 audio_encoder.layers.0.downsample "
    "audio_encoder.layers.1.blocks.0 audio_encoder.layers.1.blocks.1 pool",
    "hf-convnext hf-convnextv2": "embeddings encoder.stages.0.layers.0 "
    "encoder.stages.1.downsampling_layer encoder.stages.1.layers.0 "
    "encoder.stages.2.downsampling_layer encoder.stages.2.layers.0 encoder.stages.2.layers.1 "
    "encoder.stages.3.downsampling_layer encoder.stages.3.layers.0 pool",
    "resnet-basic": "stem layer1.0 layer2.0 layer3.0 layer3.1 layer4.0 pool",
    "resnet-bottleneck": "stem layer1.0 layer2.0 layer3.0 layer4.0 pool",
    "vit": "stem encoder.layers.encoder_layer_0 encoder.layers.encoder_layer_1 pool",
    "convnext": "stem features.1.0 features.2 features.3.0 features.4 features.5.0 features.5.1 "
    "features.6 features.7.0 pool",
}


def test_layers_keep_their_names(cases):
    named = {name: layers for names, layers in LAYERS.items() for name in names.split()}
    assert named.keys() == cases.keys()
    for name, layers in named.items():
        branch, tower = cases[name].branch, cases[name].tower()
        expected = [f"{branch}.{layer}" for layer in layers.split()]
        assert [spec.name for spec in tower.specs] == expected, name


def test_image_presets_are_torchvisions():
    for name in ARCHITECTURES:
        with torch.device("meta"):
            state = torchvision.models.get_model(name).state_dict()
        expected = {f"image.{key}": tensor.shape for key, tensor in state.items()}
        specs = image_tower(name, 224).specs
        ours = {
            canonical: spec.template.state_dict()[local].shape
            for spec in specs
            for local, canonical in spec.template.canonical_names.items()
        }
        assert ours.items() <= expected.items(), name
        left = {key.split(".")[1] for key in expected.keys() - ours.keys()}
        assert left <= {"fc", "heads", "classifier"}, name
        # stochastic depth by default
        assert any(spec.template.draws for spec in specs) == name.startswith("convnext"), name


PUBLISHED = """
bert-base-uncased 109.48, bert-large-uncased 335.14, distilbert-base-uncased 66.36,
roberta-base 124.65, roberta-large 355.36, bert-tiny 4.39, bert-mini 11.17, bert-small 28.76,
bert-medium 41.37, minilm-l6 22.71, minilm-l12 33.36, clip-text-base 63.17, clip-text-large 123.06,
bert-base-cased 108.31, bert-base-chinese 102.27, bert-base-multilingual-cased 177.85,
xlm-roberta-base 278.04, xlm-roberta-large 559.89, all-minilm-l6-v2 22.71, mpnet-base 109.49,
electra-small 13.48, modernbert-base 149.01, modernbert-large 394.78, t5-small 35.33,
t5-base 109.63, mt5-small 146.94, siglip-text-base 110.27, chinese-clip-text-base 101.68
"""  # millions; as the models' pages and papers say, where these have a figure


def test_text_presets_have_the_published_sizes():
    for preset in PUBLISHED.split(","):
        name, millions = preset.split()
        assert name in PRESETS
        found = text_tower(name, None, 64).num_parameters / 1e6
        assert found == pytest.approx(float(millions), abs=0.005), name


def test_initial_weights_are_the_librarys(cases, subtests):
    """Per parameter: constants exactly, else mean, deviation and shape (4th moment) within 5
    standard errors of two samples."""
    for name, case in cases.items():
        with subtests.test(name):
            torch.manual_seed(11)
            library = case.first_values()
            for layer in (spec.build(5) for spec in case.tower().specs):
                for local, ours in layer.state_dict().items():
                    name = layer.canonical_names[local]
                    ours, theirs = (
                        ours.double().flatten(),
                        library[name.split(".", 1)[1]].double().flatten(),
                    )
                    if theirs.unique().numel() == 1:
                        assert torch.equal(ours, theirs), name
                        continue
                    deviation, n = theirs.std(), theirs.numel()
                    assert abs(ours.mean() - theirs.mean()) < 5 * deviation * math.sqrt(2 / n), name
                    assert abs(ours.std() / deviation - 1) < 5 * math.sqrt(1 / n), name
                    if n > 2000:
                        kurtosis = [
                            (((x - x.mean()) / x.std()) ** 4).mean() for x in (ours, theirs)
                        ]
                        assert abs(kurtosis[0] - kurtosis[1]) < 5 * math.sqrt(2 * 24 / n), name


def test_a_learned_pool_starts_as_siglips():
    """Xavier's variance 2 / (in + out); the network's biases near zero."""
    vit = "vit_b_16:num_layers=1,hidden_dim=512,num_heads=4,mlp_dim=8,pool=attention"
    convnext = "convnext_tiny:dims=16-24-32-512,depths=1-1-1-1,pool=attention"
    rows_of = {"attention.in_proj_weight": 1536, "attention.out_proj.weight": 512}
    rows_of |= {"mlp.fc1.weight": 2048}
    for tower in (
        image_tower("resnet18:layers=1-1-1-1,pool=attention", 32),
        image_tower(vit, 32),
        image_tower(convnext, 32),
        text_tower("bert-small:num_hidden_layers=1,pool=attention", 50, 10),
    ):
        state = tower.specs[-1].build(0).state_dict()
        for name, rows in rows_of.items():
            std = state[f"pool.{name}"].std().item()
            assert std == pytest.approx(math.sqrt(2 / (rows + 512)), rel=0.01), (tower.name, name)
        assert not state["pool.attention.in_proj_bias"].any()
        assert 0 < state["pool.mlp.fc2.bias"].std() < 2e-6
        assert state["pool.layernorm.weight"].unique().tolist() == [1.0]


def test_single_first_values(cases):
    """Every row of tokens, what is in no file, equal layers, a seed that is the same everywhere."""
    words = cases["roberta"].tower().specs[0].build(0).embeddings.word_embeddings.weight
    assert words.any(1).all()
    embeddings = cases["bert"].tower().specs[0].build(0).embeddings
    assert embeddings.position_ids.tolist() == [list(range(20))]
    assert embeddings.token_type_ids.tolist() == [[0] * 20]
    norm = cases["resnet-basic"].tower().specs[0].build(0).embeddings[1]
    assert (norm.running_mean == 0).all() and (norm.running_var == 1).all()
    assert norm.num_batches_tracked == 0
    blocks = [spec.build(0).state_dict() for spec in text_tower("bert-tiny", 50, 10).specs[1:3]]
    name = "block.intermediate.dense.weight"
    assert not torch.equal(blocks[0][name], blocks[1][name])
    assert stable_seed(0, "image.stem") == 6736953771085296990
    assert 0 <= stable_seed(2**40, "text.pooler") < 2**63


def test_a_layer_is_built_alone(cases, subtests):
    """Its first values depend on the seed and its name, and nothing else is made real."""
    for name, case in cases.items():
        with subtests.test(name):
            specs = with_head(case.tower(), 8).specs
            together = [spec.build(7) for spec in specs]
            torch.manual_seed(123)
            before = torch.get_rng_state()
            # in another order, after another random state
            for spec, layer in reversed(list(zip(specs, together))):
                expected, alone = layer.state_dict(), spec.build(7).state_dict()
                assert all(torch.equal(alone[name], expected[name]) for name in expected)
                assert set(layer.canonical_names) == set(expected)
                for tensor in (*layer.parameters(), *layer.buffers()):
                    assert tensor.device.type == "cpu"
                    assert tensor.dtype in (torch.float32, torch.int64)
                assert sum(p.numel() for p in layer.parameters()) == spec.num_parameters
                assert all(p.requires_grad and p.dim() > 0 for p in layer.parameters())
            assert torch.equal(torch.get_rng_state(), before)
            for spec in specs:
                template = spec.template
                assert all(t.is_meta for t in (*template.parameters(), *template.buffers()))
            first, other = together[0].state_dict(), specs[0].build(8).state_dict()
            assert any(not torch.equal(other[name], tensor) for name, tensor in first.items())


def test_a_layer_draws_where_it_says_and_passes_other_tensors_on(cases, subtests):
    for (name, case), dropout in product(cases.items(), (False, True)):
        with subtests.test(f"{name}, dropout={dropout}"):
            others = {"image_position": torch.arange(4), "text_index": torch.arange(4)}
            given = tensors = {**case.inputs(), **others}
            layers = [spec.build(0) for spec in with_head(case.tower(dropout), 8).specs]
            for layer in layers:
                before = {key: (tensor, tensor.clone()) for key, tensor in tensors.items()}
                state = torch.get_rng_state()
                made = layer(tensors)
                drew = not torch.equal(torch.get_rng_state(), state)
                assert layer.draws or not drew
                assert not layer.draws or dropout
                assert tensors.keys() == before.keys()
                for key, (tensor, copy) in before.items():
                    assert tensors[key] is tensor and torch.equal(tensor, copy), key
                assert set(made) == (set(tensors) - set(layer.drops)) | set(layer.makes)
                assert set(layer.drops) <= {*layer.reads, *layer.reads_if_given}
                tensors = made
            assert any(layer.draws for layer in layers) == (dropout and bool(case.dropout))
            expected = {*others, f"{case.branch}_embeds"}
            expected |= {"logit_scale"} if case.branch == "image" else set()
            assert set(tensors) == expected and tensors["text_index"] is given["text_index"]


def test_layers_out_of_order_are_refused():
    layer = text_tower("bert-tiny", 50, 10).specs[1].build(0)
    with pytest.raises(ValueError, match="reads text_hidden, attention_mask but .* text_hidden"):
        layer({"attention_mask": torch.ones(1, 2, dtype=torch.int64)})


class _Half(Layer):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part


def test_a_wrong_cut_and_a_forgotten_rule_are_refused():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    half, whole = _Half(model[0]), _Half(model)
    for layers, message in (
        ([("0", half)], r"cut wrongly: \['1.bias', '1.weight'\]"),
        ([("0", half), ("1", whole)], "in two layers"),
    ):
        with pytest.raises(RuntimeError, match=message):
            cut("image", model, layers, lambda layer: None)
    specs = cut(
        "image", model, [("all", whole)], lambda layer: nn.init.zeros_(layer.part[0].weight)
    )
    with pytest.raises(RuntimeError, match="layer image.all: .* left 'part.0.bias' unset"):
        specs[0].build(0)


def test_heads():
    towers = build_towers("resnet18", "bert-tiny", 64, 32, 50, 10, 0)
    image, text = (tower.specs[-1].build(0) for tower in towers)
    assert image.logit_scale.tolist() == pytest.approx([math.log(1 / 0.07)])
    # 32768 and 8192 draws: standard errors of 0.4 and 0.8 %
    assert image.image_projection.weight.std().item() == pytest.approx(512**-0.5, rel=0.02)
    assert text.text_projection.weight.std().item() == pytest.approx(128**-0.5, rel=0.04)
    features = torch.randn(3, 512)
    made = image({"image_features": features})
    expected = features @ image.image_projection.weight.T
    torch.testing.assert_close(made["image_embeds"], expected / expected.norm(dim=-1, keepdim=True))
    scale = made["logit_scale"]
    assert scale.shape == (1,) and scale.requires_grad and scale is not image.logit_scale
    scale.sum().backward()
    assert image.logit_scale.grad.tolist() == [1.0]


def test_flops_are_the_published_ones():
    """ResNet-50: 4.09, ViT-B/16: 17.56 giga-multiply-adds for one image of 224 pixels
    (torchvision's tables), of which the classifier that towers lack has 0.002 or less; BERT-base:
    12 blocks of 24 L W^2 + 4 L^2 W operations and the pooler's 2 W^2."""
    for name, giga in (("resnet50", 4.09), ("vit_b_16", 17.56)):
        tower = image_tower(name, 224)
        found = sum(count_flops(tower, meta_inputs(tower, 2))) / 2 / 2e9
        assert found == pytest.approx(giga, rel=0.003)
    tower = with_head(text_tower("bert-base-uncased", None, 64), 512)
    flops = count_flops(tower, meta_inputs(tower, 1))
    block = 24 * 64 * 768**2 + 4 * 64**2 * 768
    assert flops == [0.0, *[block] * 12, 2 * 768**2, 2 * 768 * 512]
    assert sum(count_flops(tower, meta_inputs(tower, 1, num_tokens=32))) < sum(flops) / 2
