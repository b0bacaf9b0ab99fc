"""OpenCLIP's state dicts: those of our architectures give OpenCLIP's embeddings, others are refused
with what differs."""

import open_clip
import pytest
import torch
from rounding import assert_equal_rows
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from models.towers.building import build_towers
from models.weights.reading import open_model

SIZE, VOCAB, TOKENS = 64, 90, 12
TEXT = {"context_length": TOKENS, "vocab_size": VOCAB, "width": 48, "heads": 4, "layers": 2}
CONVNEXT = {
    "timm_model_name": "convnext_tiny",
    "timm_pool": "",
    "timm_proj": "linear",
    "timm_drop": 0.0,
    "image_size": SIZE,
}
CLIP_TEXT = "clip-text-base:hidden_size=48,num_hidden_layers=2,num_attention_heads=4,"
CLIP_TEXT += f"intermediate_size=192,max_position_embeddings={TOKENS}"


def towers(image="convnext_tiny", text=CLIP_TEXT + ",hidden_act=gelu", vocab_size=VOCAB):
    return build_towers(
        image, text, 32, SIZE, vocab_size, TOKENS, pad_token_id=0, eos_token_id=vocab_size - 1
    )


def theirs(vision, module=open_clip.CLIP) -> nn.Module:
    """Away from its first values, so that layer scales and norms count."""
    torch.manual_seed(0)
    model = module(32, vision, TEXT).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


@pytest.mark.parametrize("kind", [open_clip.CLIP, open_clip.CustomTextCLIP])
def test_a_convnext_with_clips_text_tower(tmp_path, forward, kind):
    """A checkpoint of OpenCLIP's trainer, and a file of a model whose text tower is its own."""
    model = theirs(CONVNEXT, kind)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if kind is open_clip.CLIP:
        where = tmp_path / "epoch_1.pt"
        of_trainer = {f"module.{name}": tensor for name, tensor in state.items()}
        torch.save({"epoch": 1, "state_dict": of_trainer}, where)
    else:
        where = tmp_path / "model.safetensors"
        save_file(state, where)
    pair = towers()
    weights = open_model(str(where), *pair)
    layers = [spec.build(0, weights).eval() for tower in pair for spec in tower.specs]
    pixels = torch.randn(3, 3, SIZE, SIZE)
    ids = torch.randint(1, VOCAB - 1, (3, TOKENS))
    for row, length in enumerate((TOKENS, 5, 3)):
        ids[row, length - 1], ids[row, length:] = VOCAB - 1, 0
    given = {"pixel_values": pixels, "input_ids": ids, "attention_mask": (ids > 0).long()}
    with torch.no_grad():
        tensors = forward(layers, given)
        images = model.encode_image(pixels, normalize=True)
        texts = model.encode_text(ids, normalize=True)
    assert_equal_rows(tensors["image_embeds"], images)
    assert_equal_rows(tensors["text_embeds"], texts)
    assert torch.equal(tensors["logit_scale"], F.relu(model.logit_scale.detach()).reshape(1))


def saved(folder, vision):
    state = {name: t.contiguous() for name, t in theirs(vision).state_dict().items()}
    save_file(state, folder / "model.safetensors")


def test_its_own_image_networks_are_refused(tmp_path):
    vit = {"image_size": SIZE, "layers": 1, "width": 64, "patch_size": 16}
    resnet = {"image_size": SIZE, "layers": [1, 1, 1, 1], "width": 16}
    for vision, difference in (
        (vit, "a norm before the blocks"),
        (resnet, "three convolutions in its stem"),
    ):
        saved(tmp_path, vision)
        with pytest.raises(ValueError, match=difference):
            open_model(str(tmp_path), *towers())


def test_towers_of_other_sizes_and_activations_are_refused(tmp_path):
    saved(tmp_path, CONVNEXT)
    for pair, message in (
        (towers(text=CLIP_TEXT), r"quick_gelu\); give --text-tower clip-text-base:hidden_act=gelu"),
        (towers(text="bert-tiny"), "the text tower is bert-tiny"),
        (towers(image="resnet50"), "but the image tower is resnet50; give --image-tower convnext_"),
        (towers(image="convnext_small"), r"no tensor for image\.features\.5\.9"),
        (towers(vocab_size=99), "the vocabularies differ"),
    ):
        with pytest.raises(ValueError, match=message):
            open_model(str(tmp_path), *pair)


def test_a_single_tower_is_no_model(tmp_path):
    save_file(
        {"embeddings.word_embeddings.weight": torch.zeros(3, 4)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(
        ValueError, match="a single tower is started from with --image-weights, --text-weights or"
    ):
        open_model(str(tmp_path), *towers())
