"""Weights of towers that adapters make: files of the libraries, other image sizes, names of
published weights with the network replaced by a file, and whole models of OpenCLIP."""

import json
import logging
from functools import partial

import open_clip
import pytest
import timm
import torch
import torchvision
from open_clip.model import resize_pos_embed, resize_text_pos_embed
from rounding import assert_equal_rows
from safetensors.torch import save_file
from torch.nn import functional as F

from models.towers.audio import audio_tower
from models.towers.building import build_towers, with_head
from models.towers.image import image_tower
from models.towers.layers import library_models_kept
from models.towers.text import text_tower
from models.weights.reading import open_model, open_weights, published_weights

VOCAB, TOKENS, EOS = 90, 12, 89
VIT = "timm:vit_tiny_patch16_224:depth=2,embed_dim=48,num_heads=3"
SIZES = {"depth": 2, "embed_dim": 48, "num_heads": 3}


def built(tower, weights, seed=0):
    with library_models_kept():
        return [spec.build(seed, weights).eval() for spec in tower.specs]


def features(tower, weights, **given):
    tensors = given
    with torch.no_grad():
        for layer in built(tower, weights):
            tensors = layer(tensors)
    return tensors[f"{tower.branch}_features"]


def away_from_first_values(model):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model.eval()


def timm_vit(size, **more):
    return timm.create_model("vit_tiny_patch16_224", img_size=size, **SIZES, **more)


def test_published_weights_are_proposed_for_a_tower_that_they_fit(subtests):
    for tower, proposed in (
        (partial(image_tower, "resnet50:zero_init_residual=true", 64), "DEFAULT"),
        (partial(image_tower, "resnet18:layers=1-1-1-1", 64), None),
        (partial(image_tower, "timm:vit_small_patch16_224", 224), "DEFAULT"),
        (partial(image_tower, "open_clip:ViT-B-32", 224), "DEFAULT"),
        (partial(image_tower, "hf:dinov2-small:pool=cls", 224), "facebook/dinov2-small"),
        (
            partial(text_tower, "bert-base-uncased:pool=mean", 50, 8),
            "google-bert/bert-base-uncased",
        ),
        (partial(text_tower, "bert-mini:num_hidden_layers=2", 50, 8), None),
        (partial(text_tower, "open_clip:ViT-B-32", None, 8), "DEFAULT"),
        (partial(audio_tower, "hf:clap"), "laion/clap-htsat-unfused"),
    ):
        with subtests.test(str(tower)):
            assert published_weights(tower()) == proposed


# -- timm


def test_a_file_of_timm_is_read_tensor_by_tensor(tmp_path):
    model = away_from_first_values(timm_vit(64))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    tower = image_tower(VIT, 64)
    reader = open_weights("image", str(tmp_path), tower)
    assert reader.read_names == []
    with library_models_kept():
        layer = tower.specs[1].build(0, reader)
    assert sorted(reader.read_names) == sorted(
        name.removeprefix("image.") for name in layer.canonical_names.values()
    )
    pixels = torch.randn(2, 3, 64, 64)
    model.reset_classifier(0)
    assert torch.equal(features(tower, reader, pixel_values=pixels), model(pixels))


def test_a_file_of_another_image_size_is_as_timm_makes_it(tmp_path, caplog):
    tower, pixels = image_tower(VIT, 96), torch.randn(2, 3, 96, 96)
    for num_classes in (1000, 7, 0):
        saved = away_from_first_values(timm_vit(64, num_classes=num_classes))
        where = str(tmp_path / f"{num_classes}.pth")
        torch.save({"state_dict": saved.state_dict()}, where)
        caplog.clear()
        with caplog.at_level(logging.INFO, "models"):
            reader = open_weights("image", where, tower)
        changes = "timm changes pos_embed from (1, 17, 48) to (1, 37, 48)"
        assert any(changes in message for message in caplog.messages)
        more = {"pretrained_cfg_overlay": {"file": where, "num_classes": num_classes}}
        model = timm_vit(96, num_classes=num_classes, pretrained=True, **more).eval()
        model.reset_classifier(0)
        assert torch.equal(features(tower, reader, pixel_values=pixels), model(pixels))


def test_files_that_do_not_fit_are_refused_by_name(tmp_path):
    state = timm_vit(64).state_dict()
    del state["blocks.1.mlp.fc1.bias"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"no tensor for image\.blocks\.1\.mlp\.fc1\.bias"):
        open_weights("image", str(tmp_path), image_tower(VIT, 64))
    save_file(timm_vit(64).state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"no tensor for image\.blocks\.2"):
        open_weights("image", str(tmp_path), image_tower(VIT.replace("depth=2", "depth=3"), 64))


def test_names_of_timms_weights(monkeypatch):
    """The library's own download, with the network replaced by a file."""
    model = away_from_first_values(timm.create_model("test_vit"))
    asked = []

    def load(hub_id, **options):
        asked.append(hub_id)
        return dict(model.state_dict())

    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", load)
    monkeypatch.setattr("models.weights.libraries.snapshot_download", lambda *_, **__: None)
    tower = image_tower("timm:test_vit", 160)
    pixels = torch.randn(2, 3, 160, 160)
    expected = model.forward_head(model.forward_features(pixels), pre_logits=True)
    for where in ("DEFAULT", "r160_in1k"):
        found = features(tower, open_weights("image", where, tower), pixel_values=pixels)
        assert torch.equal(found, expected)
    assert asked == ["timm/test_vit.r160_in1k"] * 2
    tagged = image_tower("timm:resnet18.a1_in1k", 64)
    with pytest.raises(ValueError, match=r"'a1' is not known; did you mean 'a\d_in1k'\?.*DEFAULT"):
        open_weights("image", "a1", tagged)

    def unreachable(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", unreachable)
    with pytest.raises(
        FileNotFoundError,
        match=r"resnet18\.a1_in1k could not be had .*download timm/resnet18\.a1_in1k and give",
    ):
        open_weights("image", "DEFAULT", tagged)


# -- torchvision


def test_names_of_torchvisions_weights_for_traced_towers(monkeypatch):
    model = away_from_first_values(torchvision.models.mobilenet_v3_small())
    monkeypatch.setattr(
        "torchvision.models._api.load_state_dict_from_url", lambda *_, **__: model.state_dict()
    )
    tower = image_tower("mobilenet_v3_small", 64)
    pixels = torch.randn(2, 3, 64, 64)
    found = features(tower, open_weights("image", "DEFAULT", tower), pixel_values=pixels)
    model.classifier[3] = torch.nn.Identity()
    assert torch.equal(found, model(pixels))


def test_positions_of_torchvisions_recorded_vits(tmp_path, caplog):
    sizes = {"patch_size": 16, "num_layers": 1, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 16}
    # a ViT that is cut by hand has the same table, at whatever size
    saved = torchvision.models.VisionTransformer(64, **sizes)
    save_file(saved.state_dict(), tmp_path / "model.safetensors")
    name = f"vit_b_16:{','.join(f'{key}={value}' for key, value in sizes.items())}"
    tower = image_tower(name, 128)
    layers = built(tower, open_weights("image", str(tmp_path), tower))
    grid = saved.encoder.pos_embedding[0, 1:].T.unflatten(1, (4, 4))[None]
    expected = F.interpolate(grid, (8, 8), mode="bicubic", antialias=True)[0].flatten(1).T
    assert torch.equal(layers[0].pos_embedding[0, 1:], expected)
    assert torch.equal(layers[0].pos_embedding[0, 0], saved.encoder.pos_embedding[0, 0])
    assert "interpolated between the learned ones" in caplog.text


# -- OpenCLIP

TEXT = {"layers": 2, "width": 48, "heads": 4, "context_length": TOKENS, "vocab_size": VOCAB}
TEXT_KEYS = f"layers=2,width=48,heads=4,context_length={TOKENS}"
VISION = {"layers": 2, "width": 64, "patch_size": 16, "image_size": 64}


def clip(name, vision, text=(), **more):
    config = open_clip.get_model_config(name)
    kind = open_clip.CustomTextCLIP if config.pop("custom_text", False) else open_clip.CLIP
    config["vision_cfg"] |= vision
    config["text_cfg"] |= {**TEXT, **dict(text)}
    return away_from_first_values(kind(**{**config, **more}))


def texts():
    ids = torch.randint(1, EOS, (3, TOKENS))
    for row, length in enumerate((TOKENS, 5, 3)):
        ids[row, length - 1], ids[row, length:] = EOS, 0
    return ids


def saved(model, folder):
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "model.safetensors")
    return str(folder)


def check_whole(model, where, pair, forward, size=64):
    """The towers and heads of `pair`, filled from a whole model, give its embeddings."""
    weights = open_model(where, *pair)
    layers = [layer for tower in pair for layer in built(tower, weights)]
    pixels, ids = torch.randn(3, 3, size, size), texts()
    given = {"pixel_values": pixels, "input_ids": ids, "attention_mask": (ids > 0).long()}
    with torch.no_grad():
        made = forward(layers, given)
        images = model.encode_image(pixels, normalize=True)
        captions = model.encode_text(ids, normalize=True)
    assert_equal_rows(made["image_embeds"], images)
    assert_equal_rows(made["text_embeds"], captions)
    assert torch.equal(made["logit_scale"], model.logit_scale.detach().reshape(1))
    return made


RESNET = {"layers": (1, 1, 1, 1), "width": 16, "image_size": 64}
RESNET_KEYS = "layers=1-1-1-1,width=16"
# name, changes of its sizes for OpenCLIP, keys of the image tower, the embedding's width
CONVNEXT = {"timm_model_name": "convnext_atto", "image_size": 64}
WHOLE = (
    ("ViT-B-32", VISION, "layers=2,width=64,patch_size=16", 512),
    ("ViT-B-32-quickgelu", VISION, "layers=2,width=64,patch_size=16", 512),
    ("RN50", RESNET, RESNET_KEYS, 1024),
    ("convnext_base", CONVNEXT, "timm_model_name=convnext_atto", 512),
    (  # two layers
        "convnext_base",
        {**CONVNEXT, "timm_proj": "mlp"},
        "timm_model_name=convnext_atto,timm_proj=mlp",
        512,
    ),
)


def test_a_whole_model_becomes_its_two_sides_and_heads(tmp_path, forward, subtests):
    for i, (name, vision, keys, width) in enumerate(WHOLE):
        with subtests.test(f"{name}, {keys}"):
            model = clip(name, vision)
            sides = f"open_clip:{name}:{keys}", f"open_clip:{name}:{TEXT_KEYS}"
            pair = build_towers(*sides, width, 64, VOCAB, TOKENS, 0, EOS)
            (tmp_path / str(i)).mkdir()
            check_whole(model, saved(model, tmp_path / str(i)), pair, forward)


def test_siglip(tmp_path, forward):
    """Its image side has no projection, its text side one with a bias: both stay in the towers, and
    a head that is the identity, or none, leaves them as they are."""
    config = {**open_clip.get_model_config("ViT-B-16-SigLIP"), "embed_dim": 96}
    config["vision_cfg"] |= {"timm_model_name": "test_vit3", "image_size": 160}
    config["text_cfg"] |= TEXT
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    del config["custom_text"]
    model = away_from_first_values(open_clip.CustomTextCLIP(**config))
    where = saved(model, tmp_path)
    image = image_tower(f"open_clip:{tmp_path}", 160)
    text = text_tower(f"open_clip:{tmp_path}", VOCAB, TOKENS, 0, EOS)
    assert [tower.config["library_projection"] for tower in (image, text)] == [None, None]
    scalars = {"logit_scale": 1.0, "logit_bias": 0.0}
    for projection in ("linear", "none"):
        pair = (
            with_head(image, 96, scalars, projection=projection),
            with_head(text, 96, {}, projection=projection),
        )
        made = check_whole(model, where, pair, forward, 160)
        assert made["logit_bias"].item() == model.logit_bias.item()


def test_one_side_of_a_whole_model(tmp_path):
    model = clip("ViT-B-32", VISION)
    where, ids, pixels = saved(model, tmp_path), texts(), torch.randn(3, 3, 64, 64)
    image = image_tower("open_clip:ViT-B-32:layers=2,width=64,patch_size=16", 64)
    text = text_tower(f"open_clip:ViT-B-32:{TEXT_KEYS}", VOCAB, TOKENS, 0, EOS)
    with torch.no_grad():
        found = features(image, open_weights("image", where, image), pixel_values=pixels)
        torch.testing.assert_close(found @ model.visual.proj, model.encode_image(pixels))
        given = {"input_ids": ids, "attention_mask": (ids > 0).long()}
        found = features(text, open_weights("text", where, text), **given)
        torch.testing.assert_close(found @ model.text_projection, model.encode_text(ids))


def test_positions_are_resized_as_openclip_does(tmp_path):
    model = clip("ViT-B-32", VISION)
    where = saved(model, tmp_path)
    larger = clip("ViT-B-32", {**VISION, "image_size": 96}, {"context_length": 16})
    state = dict(model.state_dict())
    resize_pos_embed(state, larger)
    resize_text_pos_embed(state, larger)
    image = image_tower("open_clip:ViT-B-32:layers=2,width=64,patch_size=16", 96)
    longer = TEXT_KEYS.replace("context_length=12", "context_length=16")
    text = text_tower(f"open_clip:ViT-B-32:{longer}", VOCAB, 16, 0, EOS)
    for tower, name in ((image, "visual.positional_embedding"), (text, "positional_embedding")):
        layers = built(tower, open_weights(tower.branch, where, tower))
        found = {
            c: layer.state_dict()[local]
            for layer in layers
            for local, c in layer.canonical_names.items()
        }
        expected = state[name]
        assert_equal_rows(found[f"{tower.branch}.positional_embedding"], expected)


def test_names_of_openclips_weights(tmp_path, monkeypatch):
    keys = "layers=2,width=64,patch_size=16"
    where = saved(clip("ViT-B-32", VISION), tmp_path)
    asked = []

    def download(config, **_):
        asked.append(config["hf_hub"])
        return f"{where}/model.safetensors"

    monkeypatch.setattr(open_clip, "download_pretrained", download)
    monkeypatch.setattr("models.weights.libraries.snapshot_download", lambda *_, **__: None)
    tower = image_tower(f"open_clip:ViT-B-32:{keys}", 64)
    quick = image_tower(f"open_clip:ViT-B-32:{keys},quick_gelu=true", 64)
    for each in (tower, quick):
        assert open_weights("image", "DEFAULT", each).names
    assert len(set(asked)) == 2 and "openai" in asked[1] and "openai" not in asked[0]
    with pytest.raises(ValueError, match="trained with quick_gelu=true; give the tower that key"):
        open_weights("image", "openai", tower)
    with pytest.raises(ValueError, match=r"'laion2b' is not known; did you mean 'laion"):
        open_weights("image", "laion2b", tower)

    def unreachable(config, **_):
        raise OSError("no network")

    monkeypatch.setattr(open_clip, "download_pretrained", unreachable)
    with pytest.raises(
        FileNotFoundError, match="could not be had .OSError.; check the network, or"
    ):
        open_weights("image", "laion2b_s34b_b79k", tower)


def test_whole_models_that_do_not_fit(tmp_path):
    where = saved(clip("RN50", RESNET), tmp_path)
    image, text = f"open_clip:RN50:{RESNET_KEYS}", f"open_clip:RN50:{TEXT_KEYS}"
    sizes = (64, VOCAB, TOKENS, 0, EOS)
    for sides, message in (
        ((image, text), "give --embed-dim 1024"),
        (("resnet18", text), "give --image-tower and --text-tower the same"),
        (("resnet18", "bert-tiny"), "Give --image-tower and --text-tower"),
    ):
        with pytest.raises(ValueError, match=message):
            open_model(where, *build_towers(*sides, 512, *sizes))
