"""Shapes and dtypes of what the layers of every kind of tower make, found on the meta device: those
of what the layers make of data."""

import copy
import itertools

import pytest
import torch

from engine.communication import signature_of
from engine.module import Outline
from models.towers.building import with_head
from models.towers.fusion import FusionSizes
from models.towers.image import image_tower
from models.towers.text import text_tower

VOCAB, TOKENS, SIZE = 50, 12, 64
BERT = "hidden_size=32,num_hidden_layers=2,num_attention_heads=4,intermediate_size=48"
DISTILBERT = "dim=32,n_layers=2,n_heads=4,hidden_dim=48"
VIT = "vit_b_16:patch_size=8,num_layers=2,num_heads=2,hidden_dim=32,mlp_dim=48"
IMAGES = {
    "resnet": ("resnet50:layers=1-1-1-1,width_per_group=8", 2),
    "convnext": ("convnext_tiny:dims=8-12-16-24,depths=1-1-1-1", 0),
    "vit": (VIT, 1),
    "vit, attention": (f"{VIT},pool=attention", 0),
    "vit, timm": ("timm:vit_tiny_patch16_224:depth=1,embed_dim=48,num_heads=3", 1),
}
TEXTS = {
    "bert": (f"bert-base-uncased:{BERT}", True),
    "bert, mean": (f"bert-base-uncased:{BERT},pool=mean", False),
    "roberta": (f"roberta-base:{BERT}", False),
    "distilbert": (f"distilbert-base-uncased:{DISTILBERT}", False),
    "clip": (f"clip-text-base:{BERT}", False),
    "clip, attention": (f"clip-text-base:{BERT},pool=attention", True),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check(tower, inputs, dtype, training):
    """Layer by layer, so that a tower may be cut anywhere."""
    inputs = {n: t.to(dtype) if t.is_floating_point() else t for n, t in inputs.items()}
    outlines = [Outline([spec.template], dtype) for spec in tower.specs]
    made, tensors = signature_of(inputs), inputs
    with torch.no_grad():
        for spec, outline in zip(tower.specs, outlines):
            tensors = spec.build(0).to(dtype).train(training)(tensors)
            made = outline.signature(made, training)
            assert made == signature_of(tensors), (spec.name, dtype)
    whole = Outline([spec.template for spec in tower.specs], dtype)
    assert whole.signature(signature_of(inputs), training) == made


@pytest.mark.parametrize("name", IMAGES)
def test_images_of_several_sizes_and_with_patches_left_out(name):
    base, scales = IMAGES[name]
    fusion = FusionSizes(layers=2, width=16, heads=2, scales=scales) if scales else None
    tower = with_head(image_tower(base, SIZE), 8, None, fusion)
    # batch normalisation in half precision: not on every CPU
    dtypes = DTYPES[:1] if name == "resnet" else DTYPES
    sizes = ((2, (SIZE, SIZE)), (3, (SIZE, SIZE) if name == "vit, timm" else (32, 96)))
    for dtype, (number, size) in itertools.product(dtypes, sizes):
        labels = {"image_position": torch.arange(number), "image_index": torch.arange(number)}
        images = {"pixel_values": torch.randn(number, 3, *size), **labels}
        check(tower, images, dtype, training=number == 2)
        if name.startswith("vit"):
            kept = torch.arange(5).expand(number, 5).contiguous()
            check(tower, images | {"kept_patches": kept}, dtype, training=True)


@pytest.mark.parametrize("name", TEXTS)
def test_texts_of_several_lengths(name):
    base, fused = TEXTS[name]
    fusion = FusionSizes(layers=2, width=16, heads=2) if fused else None
    tower = with_head(text_tower(base, VOCAB, TOKENS, 0, 2), 8, {}, fusion)
    for dtype, (number, length) in itertools.product(DTYPES, ((4, TOKENS), (1, 5), (3, 7))):
        mask = (torch.arange(length) < torch.arange(length - number, length)[:, None] + 1).long()
        texts = {
            "input_ids": torch.randint(3, VOCAB, (number, length)) * mask,
            "attention_mask": mask,
            "text_position": torch.arange(number),
        }
        check(tower, texts, dtype, training=number == 4)


def test_equal_layers_are_looked_at_once_and_the_template_stays_as_it_was():
    tower = with_head(text_tower(TEXTS["bert"][0], VOCAB, TOKENS, 0, 2), 8)
    before = copy.deepcopy([spec.template for spec in tower.specs])
    outline = Outline([spec.template for spec in tower.specs], torch.bfloat16)
    given = signature_of(
        {name: torch.ones(2, 4, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
    )
    runs = []
    for _, layer in outline._layers:
        layer.register_forward_hook(lambda layer, *_: runs.append(type(layer).__name__))
    for _ in range(2):
        outline.signature(given, training=True)
    assert runs == ["TextEmbeddings", "TextBlock", "TextPool", "Head"]
    for spec, copied in zip(tower.specs, before):
        for own, other in zip(spec.template.parameters(), copied.parameters()):
            assert own.dtype == other.dtype == torch.float32 and own.is_meta


def test_the_random_state_stays_as_it_was():
    tower = with_head(text_tower(f"{TEXTS['bert'][0]},hidden_dropout_prob=0.5", VOCAB, TOKENS), 8)
    outline = Outline([spec.template for spec in tower.specs], torch.float32)
    given = {name: torch.ones(2, 4, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
    state = torch.get_rng_state()
    outline.signature(signature_of(given), training=True)
    assert torch.equal(torch.get_rng_state(), state)
