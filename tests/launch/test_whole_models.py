"""Whole models of transformers, in and out: the same embeddings, the same files, trained between."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from exports import (
    CAPTIONS,
    SIZE,
    SIZES,
    TOKENS,
    assert_same,
    embed_by_pages,
    embeddings,
    encoded,
    evaluated,
    sample_image,
    started_from,
    texts,
)
from launched import fork_flags, run_to_end, write_pairs
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    ChineseCLIPConfig,
    ChineseCLIPModel,
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    Siglip2Config,
    Siglip2Model,
    SiglipConfig,
    SiglipModel,
    SiglipProcessor,
    VisionTextDualEncoderConfig,
    VisionTextDualEncoderModel,
)

from data.modalities.preprocessing import NORMALIZATIONS, Preprocessing
from data.modalities.tokenizer import batch_tokens, load_tokenizer, train_tokenizer
from launch.config.options import parse_options
from launch.config.pixels import describe_pixels
from launch.exporting.writing import image_processor, write_export
from launch.inference.trained import open_model_folder, public_model, with_named_towers
from launch.setup.model import RunModel

PIXELS = Preprocessing(*NORMALIZATIONS["half"])
IMAGES = {**SIZES, "patch_size": 16, "image_size": SIZE}
PATCHES = {**SIZES, "patch_size": 16, "num_patches": 16}


def dual_encoder(tokenizer):
    image = CLIPVisionConfig(**IMAGES)
    text = BertConfig(**texts(tokenizer))
    return VisionTextDualEncoderModel(
        VisionTextDualEncoderConfig.from_vision_text_configs(image, text, projection_dim=24)
    )


MODELS = {
    "CLIPModel": lambda tokenizer: CLIPModel(
        CLIPConfig(text_config=texts(tokenizer), vision_config=IMAGES, projection_dim=24)
    ),
    "SiglipModel": lambda tokenizer: SiglipModel(
        SiglipConfig(text_config=texts(tokenizer, projection_size=32), vision_config=IMAGES)
    ),
    "Siglip2Model": lambda tokenizer: Siglip2Model(
        Siglip2Config(text_config=texts(tokenizer, projection_size=32), vision_config=PATCHES)
    ),
    "ChineseCLIPModel": lambda tokenizer: ChineseCLIPModel(
        ChineseCLIPConfig(
            text_config=texts(tokenizer, type_vocab_size=2),
            vision_config=IMAGES,
            projection_dim=24,
        )
    ),
    "VisionTextDualEncoderModel": dual_encoder,
}


@pytest.fixture(scope="module")
def models(module_folder):
    """By class: the folder of a model with its tokenizer, and that of its export."""
    root, made = module_folder("models"), {}
    for name, make in MODELS.items():
        torch.manual_seed(3)
        tokenizer = train_tokenizer(CAPTIONS)
        tokenizer.eos_token = "[SEP]"
        folder, out = root / name, root / f"{name} again"
        model = make(tokenizer)
        for parameter in model.parameters():  # no bias is zero
            parameter.data.add_(torch.randn_like(parameter) * 0.05)
        model.save_pretrained(folder)
        tokenizer.model_max_length = TOKENS
        tokenizer.save_pretrained(folder)
        image_processor(PIXELS, SIZE).save_pretrained(folder)
        assert write_export(open_model_folder(folder), out) == []
        made[name] = folder, out
    return made


@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_out_as_it_went_in(models, name):
    folder, out = models[name]
    before, after = (load_file(where / "model.safetensors") for where in (folder, out))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == [name]


def test_the_library_alone_has_our_embeddings(models):
    outs = [out for _, out in models.values()]
    for (folder, _), found in zip(models.values(), embed_by_pages(outs[0].parent, outs)):
        assert_same(open_model_folder(folder), found)


@pytest.mark.parametrize("name", MODELS)
def test_a_run_takes_from_the_model_what_is_not_given(models, name):
    folder, _ = models[name]
    sigmoid = name.startswith("Siglip")
    options = with_named_towers(started_from(folder), None)
    assert options.loss == ("sigmoid" if sigmoid else "infonce")
    assert options.projection == ("none" if sigmoid else "linear")
    assert options.embed_dim == (32 if sigmoid else 24)
    assert (options.image_size, options.max_text_tokens) == (SIZE, TOKENS)
    assert options.image_mean == PIXELS.mean and options.tokenizer == str(folder)
    tokenizer = load_tokenizer(options.tokenizer)
    model = RunModel.of(options, tokenizer)
    state = {
        layer.canonical_names[local]: tensor
        for specs in model.layers.values()
        for layer in map(model.build_layer, specs)
        for local, tensor in layer.state_dict().items()
    }
    theirs = load_file(folder / "model.safetensors")
    assert state["head.logit_scale"] == theirs["logit_scale"].reshape(1)
    assert len(state) == len(theirs)


def test_a_model_is_started_from_at_another_size(models):
    """Images of 96 pixels and texts of 30 tokens: positions are interpolated and stretched."""
    folder, _ = models["CLIPModel"]
    flags = ["--image-size", "96", "--max-text-tokens", "30", "--loss", "sigmoid"]
    options = with_named_towers(started_from(folder, *flags), None)
    model = RunModel.of(options, load_tokenizer(options.tokenizer))
    image, text = (specs[0] for specs in model.layers.values())
    positions = {
        name: tensor
        for spec in (image, text)
        for name, tensor in model.build_layer(spec).state_dict().items()
        if "position_embedding" in name
    }
    assert [len(tensor) for tensor in positions.values()] == [37, 30]


@pytest.mark.parametrize(
    ("tower", "size", "rest", "others"),
    [
        ("hf:dinov2-small:num_hidden_layers=1", 30, "2 pixels", "28 or 42"),
        ("open_clip:ViT-B-32:layers=1", 65, "1 pixel", "64 or 96"),
    ],
)
def test_pixels_that_no_patch_reads_are_said(tower, size, rest, others):
    line = patches_of(tower, size)
    assert f"leaves out {rest} at the right" in line and f"--image-size {others} " in line


@pytest.mark.parametrize(
    ("tower", "size"),
    [
        ("timm:vit_tiny_patch16_224:depth=1", 64),
        ("hf:convnext-tiny-224:depths=1-1-1-1", 66),
        ("resnet18", 65),
    ],
)
def test_of_whole_patches_nothing_is_said(tower, size):
    assert patches_of(tower, size) == ""


def patches_of(tower, size):
    flags = ["--data", "demo", "--image-tower", tower, "--image-size", str(size)]
    options = replace(parse_options(flags), label_smoothing=0.0)
    model = RunModel.of(options, train_tokenizer(CAPTIONS))
    return model.describe_patches()


SLOW = ("Siglip2Model", "ChineseCLIPModel", "VisionTextDualEncoderModel")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in MODELS]
)
def test_a_model_is_trained_in_a_fork_and_loaded_by_its_library(models, tmp_path, name):
    folder, _ = models[name]
    data, run, out = write_pairs(tmp_path, 96), tmp_path / "run", tmp_path / "out"
    how = ["--data", data, "--val-fraction", 0.25, "--workers", 0, "--steps", 2, "--save-every", 2]
    how += [*fork_flags(tmp_path), "--import", folder, "--run-dir", run]
    status, output = run_to_end("train.py", *how, ranks=2)
    assert status == 0, output[-5000:]
    status, output = run_to_end("export.py", run, out, "--format", "transformers")
    assert status == 0, output[-5000:]
    before, after = (load_file(where / "model.safetensors") for where in (folder, out))
    assert before.keys() == after.keys()
    assert not torch.equal(before["logit_scale"], after["logit_scale"])
    trained = open_model_folder(run)
    model = getattr(transformers, name).from_pretrained(out).eval()
    pixels = torch.stack([evaluated(encoded(sample_image((SIZE, SIZE))))])
    tokens = batch_tokens(trained.tokenizer, CAPTIONS, TOKENS)[0]
    ours = embeddings(trained.layers, {"pixel_values": pixels, **tokens})
    # the one in the export, which pads on the right whatever its class does (Siglip2Tokenizer: left)
    padded = transformers.AutoTokenizer.from_pretrained(out)(
        CAPTIONS, padding="max_length", max_length=TOKENS, truncation=True, return_tensors="pt"
    )
    given = {"input_ids": padded["input_ids"], "pixel_values": pixels}
    if not name.startswith("Siglip"):
        given["attention_mask"] = padded["attention_mask"]
    if name == "Siglip2Model":  # patches with their channels last, and how many there are
        sides = SIZE // PATCHES["patch_size"]
        patches = pixels.unflatten(3, (sides, -1)).unflatten(2, (sides, -1))  # [B, 3, n, p, n, p]
        given["pixel_values"] = patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        given["pixel_attention_mask"] = torch.ones(1, sides**2)
        given["spatial_shapes"] = torch.tensor([[sides, sides]])
    with torch.no_grad():
        theirs = model(**given)
    torch.testing.assert_close(theirs.image_embeds, ours["image_embeds"], rtol=0, atol=1e-6)
    torch.testing.assert_close(theirs.text_embeds, ours["text_embeds"], rtol=0, atol=1e-6)


def test_a_published_model_is_evaluated_without_a_run(models, tmp_path):
    folder, out = models["CLIPModel"]
    data = write_pairs(tmp_path, 48)
    figures = []
    for where in (folder, out):
        file = tmp_path / f"{len(figures)}.json"
        how = [where, "--val-data", data, "--workers", 0, "--json", file]
        status, output = run_to_end("evaluate.py", *how)
        assert status == 0, output[-5000:]
        figures.append(json.loads(file.read_text()))
    assert figures[0] == figures[1] and figures[0]


def without(folder, copy, *patterns):
    """A copy of a folder without some of its files."""
    return shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(*patterns))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_without_its_tokenizer_is_refused(models, tmp_path, capsys, name):
    """Published or exported. transformers would make one up of most (transformers#18570, #23035)."""
    for i, whole in enumerate(models[name]):
        folder = without(whole, tmp_path / str(i), "tokenizer*", "preprocessor*")
        with pytest.raises(SystemExit) as end:
            started_from(folder)
        assert end.value.code == 2 and "--tokenizer" in capsys.readouterr().err
        with pytest.raises(ValueError, match="has no vocabulary"):
            open_model_folder(folder)
        assert started_from(folder, "--tokenizer", str(whole)).tokenizer == str(whole)


def test_a_tokenizer_of_another_tower_is_refused(models):
    """Ids above the table of embeddings, and no end where the tower pools."""
    options = with_named_towers(started_from(models["CLIPModel"][0]), None)
    larger, endless = (load_tokenizer(options.tokenizer) for _ in range(2))
    larger.add_tokens([f"<{number}>" for number in range(6)])
    endless.backend_tokenizer.post_processor = TemplateProcessing(single="$A")
    for tokenizer, message in ((larger, r"it knows \d+ tokens"), (endless, r"its '\[SEP\]' there")):
        with pytest.raises(ValueError, match=message):
            RunModel.of(options, tokenizer)


def test_pixels_that_a_model_does_not_describe_are_assumed_aloud_or_refused(models, tmp_path):
    folder = without(models["SiglipModel"][0], tmp_path / "copy", "preprocessor*")
    assert "CLIP's values are assumed" in describe_pixels(started_from(folder))
    given = started_from(folder, "--image-normalization", "half")
    assert "assumed" not in describe_pixels(given)
    with pytest.raises(ValueError, match="no preprocessor_config.json or processor_config.json"):
        open_model_folder(folder)
    processor = SiglipProcessor(image_processor(PIXELS, SIZE), load_tokenizer(str(folder)))
    processor.save_pretrained(folder)  # by transformers 5 in a file of another name
    assert not (folder / "preprocessor_config.json").exists()
    assert open_model_folder(folder).preprocessing == PIXELS


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("VisionTextDualEncoderModel", "text_model.pooler.dense.weight"),
        ("SiglipModel", "logit_bias"),
    ],
)
def test_a_model_that_lacks_a_tensor_is_not_evaluated(models, tmp_path, name, tensor):
    """Not with random values in its place; a run may train them."""
    folder = without(models[name][0], tmp_path / "copy")
    state = load_file(folder / "model.safetensors")
    del state[tensor]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=tensor.rpartition("_model.")[2]):
        open_model_folder(folder)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--import", "nowhere.pt"], "there is no such file or folder"),
        (["--projection", "none"], None),
    ],
)
def test_what_does_not_go_together_is_refused(flags, message, capsys):
    if message is None:
        options = replace(parse_options(["--data", "demo", *flags]), label_smoothing=0.0)
        with pytest.raises(ValueError, match="give --embed-dim 512, or --projection linear"):
            RunModel.of(options, train_tokenizer(CAPTIONS))
    else:
        with pytest.raises(SystemExit):
            parse_options(["--data", "demo", *flags])
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {},
            "holds no whole model: there is no config.json of a model. Give a folder of export.py",
        ),
        ({"config.json": '{"model_type": "bert"}'}, "its config.json is of a 'bert'"),
        ({"config.json": '{"model_type": "clip"'}, "its config.json is no JSON"),
        ({"config.json": '{"options": {}}'}, "is the folder of a run; write its model out with"),
    ],
)
def test_a_folder_without_a_whole_model_is_refused(tmp_path, files, message, capsys):
    """By train.py and by evaluate.py, with the same words."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit):
        parse_options(["--data", "demo", "--import", str(tmp_path)])
    assert message in " ".join(capsys.readouterr().err.split())
    with pytest.raises(ValueError, match=re.escape(message)):
        public_model(str(tmp_path))


def test_the_form_of_an_export_can_be_chosen(models, tmp_path):
    trained = open_model_folder(models["SiglipModel"][0])
    reasons = write_export(trained, tmp_path / "state", form="state_dict")
    assert reasons == ["--format state_dict was asked for"]
    names = load_file(tmp_path / "state" / "model.safetensors")
    assert {"head.logit_scale", "head.logit_bias"} < names.keys()
    again = open_model_folder(tmp_path / "state")
    assert len(again.layers) == len(trained.layers)
