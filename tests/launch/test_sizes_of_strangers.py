"""Configurations of strangers that say sizes which no model has, or none with the weights beside
it: one error before anything is built, whatever reads them. Models are small, and what would be
built is replaced by a failure."""

import argparse
import json
import re

import numpy as np
import open_clip
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, BertConfig, CLIPConfig

from common import model_sizes
from common.model_sizes import read_model_config, refuse_sizes, rule_of
from data.modalities.tokenizer import load_tokenizer, train_tokenizer
from launch.config.imported import options_of_export, options_of_import
from launch.exporting import modeling_clips, modeling_export
from launch.inference.trained import towers_of
from models.towers.image import image_tower
from models.towers.libraries import (
    transformers_audio,
    transformers_image,
    transformers_text,
    transformers_video,
)
from models.towers.text import text_tower

LAYERS, WIDTH, HEADS, ROWS = "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"
SIZES = {WIDTH: 32, LAYERS: 2, HEADS: 2, "intermediate_size": 64}
# what a file says -> what the error says
PLAIN = {
    (LAYERS, 10**8): "num_hidden_layers 100000000 must be from 0 to 1000",
    (WIDTH, 10**5): "hidden_size 100000 must be from 1 to 65536",
    (WIDTH, 0): "hidden_size 0 must be from 1 to",
    (HEADS, 0): "num_attention_heads 0 must be from 1 to",
    (HEADS, 3): "num_attention_heads 3 must divide hidden_size 32",
    (ROWS, 10**9): "vocab_size 1000000000 must be from 1 to 1048576",
}
UNLIKE = {  # the weights beside it
    (LAYERS, 999): "num_hidden_layers 999 is more than .*: model.safetensors has 16 tensors",
    (WIDTH, 16384): "hidden_size 16384 is more than .*no side of a tensor above 64",
}


@pytest.fixture
def built(monkeypatch):
    """Fails where a configuration is made or a model built."""

    def fail(*_, **__):
        pytest.fail("something was built")

    monkeypatch.setattr(AutoConfig, "from_pretrained", fail)
    for catalogue in (transformers_image, transformers_text):
        for family in catalogue.FAMILIES.values():
            monkeypatch.setattr(type(family), "made", fail)
    for name in ("CLIP", "CustomTextCLIP", "create_model_and_transforms"):
        monkeypatch.setattr(f"open_clip.{name}", fail)
    monkeypatch.setattr("models.towers.libraries.timm.traced_tower", fail)
    monkeypatch.setattr("models.towers.libraries.torchvision_by_hand.library_model", fail)
    monkeypatch.setattr("transformers.AutoFeatureExtractor.from_pretrained", fail)


def weights(folder, name="model.safetensors"):
    tensors = {f"layer.{i}.weight": torch.zeros(64, 32) for i in range(16)}
    save_file(tensors, folder / name)


def folder_of(path, config, name="config.json"):
    path.mkdir(exist_ok=True)
    (path / name).write_text(json.dumps(config), encoding="utf-8")
    weights(path)
    return path


def of_transformers(folder, key, value):
    """Ways to read a folder of transformers whose text tower says so."""
    text = {**BertConfig(**SIZES, vocab_size=60).to_dict(), key: value}
    both = CLIPConfig(vision_config=SIZES).to_dict()
    clip = folder_of(
        folder / "clip", {**both, "text_config": {**both["text_config"], **SIZES, key: value}}
    )
    bert = folder_of(folder / "bert", text)
    vit = folder_of(folder / "vit", {**text, "model_type": "vit", "image_size": 32})
    train_tokenizer(["two words"]).save_pretrained(bert)
    return {
        "--import": lambda: options_of_import(clip),
        "a text tower": lambda: text_tower(str(bert), 60, 8),
        "an image tower": lambda: image_tower(f"hf:{vit}", 32),
        "a tokenizer": lambda: load_tokenizer(str(bert)),
    }


@pytest.mark.parametrize("said", [*PLAIN, *UNLIKE], ids=str)
def test_of_transformers(said, tmp_path, built):
    message = {**PLAIN, **UNLIKE}[said]
    for source, read in of_transformers(tmp_path, *said).items():
        with pytest.raises(ValueError, match=rf"config\.json: {message}"):
            read()
            pytest.fail(source)


def test_what_is_ordinary_may_be_more_than_its_weights_have(tmp_path):
    """As that of a whole model beside its encoder."""
    folder = folder_of(tmp_path / "a", {})
    for key, ordinary in ((LAYERS, 100), (WIDTH, 8192)):
        (folder / "config.json").write_text(json.dumps({key: ordinary}))
        read_model_config(folder / "config.json")
        (folder / "config.json").write_text(json.dumps({key: ordinary + 1}))
        with pytest.raises(ValueError, match=f"{key} {ordinary + 1} is more than its weights have"):
            read_model_config(folder / "config.json")


OPEN_CLIP = {
    ("layers", 10**8): "layers 100000000 must be from 0 to 1000",
    ("width", 10**5): "width 100000 must be from 1 to",
    ("heads", 0): "heads 0 must be from 1 to",
    ("heads", 5): "heads 5 must divide width 32",
    ("vocab_size", 10**9): "vocab_size 1000000000 must be from",
    ("layers", 999): "layers 999 is more than .* has 16 tensors",
    ("width", 16384): "width 16384 is more than .*no side of a tensor",
}


@pytest.mark.parametrize("said", OPEN_CLIP, ids=str)
def test_of_open_clip(said, tmp_path, built):
    key, value = said
    side = {"layers": 2, "width": 32}
    config = {"embed_dim": 32, "vision_cfg": side, "text_cfg": {**side, "heads": 2, key: value}}
    folder = folder_of(tmp_path / "model", {"model_cfg": config}, "open_clip_config.json")
    for read in (
        lambda: options_of_import(folder),
        lambda: image_tower(f"open_clip:{folder}", 32),
        lambda: text_tower(f"open_clip:{folder}", None, 8),
    ):
        with pytest.raises(ValueError, match=f"open_clip_config.json: {OPEN_CLIP[said]}"):
            read()


def test_a_folder_of_open_clip_that_lacks_a_side_is_one_error(tmp_path):
    folder = folder_of(tmp_path / "model", {"embed_dim": 32}, "open_clip_config.json")
    with pytest.raises(ValueError, match="open_clip_config.json: has no vision_cfg, text_cfg"):
        options_of_import(folder)


def test_of_an_export(tmp_path, built):
    for name, value in (
        ("embed_dim", 10**8),
        ("max_text_tokens", 10**9),
        ("image_size", 10**6),
        ("audio_seconds", 1e9),
    ):
        record = {"format": 1, "options": {name: value}}
        (tmp_path / "wye.json").write_text(json.dumps(record), encoding="utf-8")
        with pytest.raises(ValueError, match=f"wye.json: {name} {value} must be from"):
            options_of_export(tmp_path)
    (tmp_path / "wye.json").write_text(json.dumps({"options": {}}), encoding="utf-8")
    weights(tmp_path)
    folder_of(tmp_path / "text", {**BertConfig(**SIZES).to_dict(), LAYERS: 999})
    (tmp_path / "text" / "model.safetensors").unlink()  # an export has them in the folder above
    with pytest.raises(ValueError, match=UNLIKE[LAYERS, 999]):
        text_tower(f"{tmp_path}/text", 60, 8)


@pytest.mark.parametrize(
    "name",
    [
        "resnet18:layers=2000-1-1-1",
        "timm:vit_tiny_patch16_224:depth=2000",
        "timm:vit_tiny_patch16_224:num_heads=0",
        "open_clip:ViT-B-32:layers=2000",
        "hf:vit-base:num_hidden_layers=2000",
        "hf:vit-base:num_attention_heads=7",
    ],
)
def test_of_a_tower_by_name(name, built):
    """Such a name may stand in an export. Without weights beside them, sizes have plain bounds."""
    key, value = name.rpartition(":")[2].split("=")
    with pytest.raises(ValueError, match=f"{key} {value.partition('-')[0]} must "):
        image_tower(name, 224)


def test_of_a_run(built):
    options = {"image_tower": "resnet18", "text_tower": "bert-tiny", "loss": "infonce"}
    with pytest.raises(ValueError, match="runs/a: max_text_tokens 1000000000 must be from"):
        towers_of({**options, "run_dir": "runs/a", "max_text_tokens": 10**9}, None)


def test_of_a_feature_extractor(tmp_path, built):
    said = {"feature_extractor_type": "ClapFeatureExtractor", "feature_size": 10**9}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said), encoding="utf-8")
    with pytest.raises(ValueError, match="preprocessor_config.json: feature_size 1000000000 must"):
        transformers_audio.extractor_values(str(tmp_path))


def test_of_an_image_in_too_many_patches(built):
    with pytest.raises(ValueError, match="image_size 16384 in patches of 4 are more than 1048576"):
        image_tower("hf:vit-base:patch_size=4", 16384)


# -- the rules


def test_every_size_of_a_tower_has_a_rule_and_what_is_published_keeps_them():
    """A new family's keys belong to a rule, or to what is no size."""
    found = set()
    for module in (transformers_audio, transformers_image, transformers_text, transformers_video):
        for catalogue in (each for each in vars(module).values() if hasattr(each, "presets")):
            configs = [AutoConfig.for_model(kind).to_dict() for kind in catalogue.families]
            configs += [preset.config().to_dict() for preset in catalogue.presets.values()]
            for config in configs:
                refuse_sizes(config["model_type"], config)
                found |= {key for key, value in config.items() if model_sizes._numbers(value)}
    no_sizes = (
        r".*(_id|_index|_indices|_rate|_eps|_epsilon|_std|_range|_prob|dropout|_n_top|_theta)"
    )
    no_sizes += r"|.*(_factor|_scale|_value|_alpha|_bias|_masks|mask_\w+_length|_forward|_r|_epsilon|_cutoff.*|drop.*)"
    assert (
        sorted(key for key in found if not rule_of(key) and not re.fullmatch(no_sizes, key)) == []
    )


def test_published_models_of_open_clip_keep_the_rules():
    for name in open_clip.list_models():
        refuse_sizes(name, open_clip.get_model_config(name))


def test_what_are_no_sizes_is_passed_over(tmp_path):
    said = {"label2id": {"heads": 0}, "train_steps": 10**9, "hidden_act": "gelu", HEADS: None}
    said |= {"text_config_dict": None, "rope_theta": 1e7, "use_heads": False}
    assert read_model_config(folder_of(tmp_path / "a", said) / "config.json") == said


def test_weights_that_are_not_whole_bound_nothing_and_a_header_is_read_bounded(tmp_path):
    folder = folder_of(tmp_path / "a", {LAYERS: 50})
    (folder / "model.safetensors").unlink()
    weights(folder, "model-00001-of-00002.safetensors")
    read_model_config(folder / "config.json")
    file = folder / "model.safetensors"
    (folder / "model-00001-of-00002.safetensors").unlink()
    weights(folder)
    (folder / "config.json").write_text(json.dumps({LAYERS: 999}))
    whole = file.read_bytes()
    for content in (whole, whole[: 8 + int.from_bytes(whole[:8], "little")]):  # no value is read
        file.write_bytes(content)
        with pytest.raises(ValueError, match=UNLIKE[LAYERS, 999]):
            read_model_config(folder / "config.json")
    for content, message in (
        ((1 << 60).to_bytes(8, "little"), "its header: has over 32"),
        (b"version https://git-lfs", "its header: has over"),
        ((4).to_bytes(8, "little") + b"abcd", "is no whole safetensors file"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=f"model.safetensors: {message}"):
            read_model_config(folder / "config.json")


def test_what_is_no_json_names_its_file(tmp_path):
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="config.json: is no JSON"):
        read_model_config(tmp_path / "config.json")


# -- modeling_export.py, which has its own


def exported(folder, loading=(), options=(), **config):
    record = {"model": "CLIPModel", "file": "model.safetensors", "towers": {}, **dict(loading)}
    said = {"loading": record, "options": dict(options)}
    (folder / "wye.json").write_text(json.dumps(said), encoding="utf-8")
    both = {**CLIPConfig().to_dict(), "text_config": {**SIZES, **config}, "vision_config": SIZES}
    folder_of(folder, both)
    return folder


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("text_config: num_hidden_layers is 100000000, and can be from 0 to 16", {LAYERS: 10**8}),
        ("text_config: hidden_size is 100000, and can be from 1 to", {WIDTH: 10**5}),
        ("text_config: num_attention_heads is 0, and can be from 1 to", {HEADS: 0}),
        ("text_config: vocab_size is 1000000000, and", {ROWS: 10**9}),
        ("16 layers as wide as 4096 are not in its weights", {LAYERS: 16, WIDTH: 4096}),
        ("options: image_size is 1000000,", {"options": {"image_size": 10**6}}),
        ("wye.json: .*: depth is 100000000", {"loading": {"towers": {"image": {"depth": 10**8}}}}),
        ("options: image_resize is 20000", {"options": {"image_resize": 20000}}),
        ("wye.json: .*blocks: depths is 100000000", {"loading": {"blocks": [[8, 8, 10**8]]}}),
        ("image_size by patch_size is 1048576,", {"image_size": 1024, "patch_size": 1}),
        ("context_length is 10000, and can be from -1 to 8192", {"context_length": 10**4}),
        ("holds no tokenizer, none of tokenizer.json", {}),
    ],
)
def test_the_loader_of_exports(message, said, tmp_path, built):
    folder = exported(tmp_path, **said)
    with pytest.raises(ValueError, match=message):
        modeling_export.load(folder)


def test_the_loader_makes_no_module_of_more_values_than_its_weights(tmp_path):
    for record in (
        {"library": "timm", "architecture": "vit_base_patch16_224"},
        {"library": "torchvision", "architecture": "vit_b_16"},
    ):
        with pytest.raises(ValueError, match=f"wye.json: {record['architecture']} has .* values"):
            modeling_export._module(tmp_path, record, {"a": torch.zeros(2)})


def test_the_loader_of_clips_opens_films_alone_and_so_many_frames(tmp_path, monkeypatch):
    av = pytest.importorskip("av", reason="pip install -r requirements-audio.txt")
    with av.open(str(tmp_path / "a.mp4"), "w") as out:
        stream = out.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        for value in range(20):
            frame = np.full((32, 32, 3), 10 * value, np.uint8)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(frame)))
        out.mux(stream.encode())
    model = argparse.Namespace(record={"clips": {"frames": 4, "rate": None}})
    model.prepared = lambda image: torch.from_numpy(np.array(image))
    clips = modeling_clips.Clips(model)
    found = clips.frames(tmp_path / "a.mp4")[:, 0, 0, 0]
    assert len(found) == 4 and torch.allclose(found.float(), torch.arange(4) * 50.0 + 25, atol=10)
    for name, text in {
        "a.m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\na.mp4\n#EXT-X-ENDLIST\n",
        "a.ffconcat": "ffconcat version 1.0\nfile a.mp4\n",
    }.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(av.error.FFmpegError):
            clips.frames(tmp_path / name)
    monkeypatch.setattr(modeling_clips, "CLIP_LIMIT", 3)
    with pytest.raises(ValueError, match="4 frames in a clip"):
        clips.frames(tmp_path / "a.mp4")
    assert modeling_clips.FRAMES_LIMIT == 2_000_000
    monkeypatch.setattr(modeling_clips, "FRAMES_LIMIT", 10)
    with pytest.raises(ValueError, match="has over 10 frames"):
        clips.frames(tmp_path / "a.mp4")
