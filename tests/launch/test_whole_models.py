"""Whole models of transformers, in and out: the same embeddings, the same files, trained between."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from exports import (
    CAPTIONS,
    SIZE,
    SIZES,
    TOKENS,
    assert_same,
    embed_by_pages,
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
from data.modalities.tokenizer import load_tokenizer, train_tokenizer
from launch.config.options import parse_options
from launch.config.pixels import describe_pixels
from launch.exporting.inputs import image_processor
from launch.exporting.writing import write_export
from launch.inference.trained import (
    Trained,
    open_model_folder,
    public_model,
    with_named_towers,
)
from launch.setup.model import RunModel
from models.losses import build_loss
from models.towers.building import with_head
from models.towers.image import image_tower
from models.towers.text import text_tower
from models.weights.whole_models import whole_model_of

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
}
DUAL_ENCODER = "VisionTextDualEncoderModel"
READ = {**MODELS, DUAL_ENCODER: dual_encoder}  # and not written


@pytest.fixture(scope="module")
def models(module_folder):
    """By class: the folder of a model with its tokenizer, and that of its export."""
    root, made = module_folder("models"), {}
    for name, make in READ.items():
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
        differences = write_export(open_model_folder(folder), out)
        assert (differences == []) == (name in MODELS)
        made[name] = folder, out
    return made


def test_a_model_comes_out_as_it_went_in_and_the_library_alone_has_our_embeddings(models):
    outs = [out for _, out in models.values()]
    by_pages = embed_by_pages(outs[0].parent, outs)
    for (name, (folder, out)), found in zip(models.items(), by_pages):
        if name in MODELS:
            before, after = (load_file(where / "model.safetensors") for where in (folder, out))
            assert before.keys() == after.keys(), name
            assert all(torch.equal(before[key], after[key]) for key in before), name
            config = json.loads((out / "config.json").read_text())
            assert config["architectures"] == [name]
        assert_same(open_model_folder(folder), found)


@pytest.mark.parametrize("name", READ)
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


def test_pixels_that_no_patch_reads_are_said():
    for tower, size, *said in (
        ("hf:dinov2-small:num_hidden_layers=1", 30, "2 pixels", "28 or 42"),
        ("open_clip:ViT-B-32:layers=1", 65, "1 pixel", "64 or 96"),
        ("timm:vit_tiny_patch16_224:depth=1", 64),
        ("hf:convnext-tiny-224:depths=1-1-1-1", 66),
        ("resnet18", 65),
    ):
        flags = ["--data", "demo", "--image-tower", tower, "--image-size", str(size)]
        options = replace(parse_options(flags), label_smoothing=0.0)
        line = RunModel.of(options, train_tokenizer(CAPTIONS)).describe_patches()
        assert bool(line) == bool(said), tower
        if said:
            assert f"leaves out {said[0]} at the right" in line, tower
            assert f"--image-size {said[1]} " in line, tower


SLOW = ("SiglipModel", "Siglip2Model", "ChineseCLIPModel")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.all("trains from more models")] * (name in SLOW))
        for name in MODELS
    ],
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
    (found,) = embed_by_pages(tmp_path, [out])
    assert_same(open_model_folder(run), found)


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
        unknown = figures[-1].pop("trained_on")
        assert f"{where} does not say what it was trained on" in unknown["why"]
    assert figures[0] == figures[1] and figures[0]


def without(folder, copy, *patterns):
    """A copy of a folder without some of its files."""
    return shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(*patterns))


def test_a_model_without_its_tokenizer_is_refused(models, tmp_path, capsys):
    """Published or exported. transformers would make one up of most (transformers#18570, #23035)."""
    for i, whole in enumerate(folder for own in models.values() for folder in own):
        folder = without(whole, tmp_path / str(i), "tokenizer*", "preprocessor*")
        with pytest.raises(SystemExit) as end:
            started_from(folder)
        assert end.value.code == 2 and "--tokenizer" in capsys.readouterr().err, whole
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


def test_a_model_that_lacks_a_tensor_is_not_evaluated(models, tmp_path):
    """Not with random values in its place; a run may train them."""
    for name, tensor in (
        (DUAL_ENCODER, "text_model.pooler.dense.weight"),
        ("SiglipModel", "logit_bias"),
    ):
        folder = without(models[name][0], tmp_path / name)
        state = load_file(folder / "model.safetensors")
        del state[tensor]
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=tensor.rpartition("_model.")[2]):
            open_model_folder(folder)


def test_what_does_not_go_together_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse_options(["--data", "demo", "--import", "nowhere.pt"])
    assert "there is no such file or folder" in capsys.readouterr().err
    options = parse_options(["--data", "demo", "--projection", "none"])
    with pytest.raises(ValueError, match="give --embed-dim 512, or --projection linear"):
        RunModel.of(replace(options, label_smoothing=0.0), train_tokenizer(CAPTIONS))


def test_a_folder_without_a_whole_model_is_refused(tmp_path, capsys):
    """By train.py and by evaluate.py, with the same words."""
    for config, message in (
        (None, "no whole model: there is no config.json of a model. Give a folder of export.py"),
        ('{"model_type": "bert"}', "its config.json is of a 'bert'"),
        ('{"model_type": "clip"', "its config.json is no JSON"),
        ('{"options": {}}', "is the folder of a run; write its model out with"),
    ):
        if config:
            (tmp_path / "config.json").write_text(config)
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
    with pytest.raises(
        ValueError, match="CLIPVisionModel .* BertModel .*with --format state_dict$"
    ):
        write_export(
            open_model_folder(models[DUAL_ENCODER][0]), tmp_path / "x", form="transformers"
        )


_SIZES = "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=48"
IMAGE, TEXT = f"hf:clip-vit-base-patch32:{_SIZES},patch_size=16", f"clip-text-base:{_SIZES}"


@pytest.mark.parametrize(
    ("image", "text", "more", "reasons"),
    [
        (IMAGE, TEXT, {}, []),
        (f"{IMAGE},pool=avg", f"{TEXT},pool=last", {}, ["images by pool=cls, not avg", "texts by pool=eos, not last"]),
        (IMAGE, f"{TEXT},mlp_proj=24", {}, ["has no mlp_proj behind its text tower"]),
        (IMAGE, TEXT, {"eos_token_id": 2}, ["takes eos_token_id 2 for 'the highest id"]),
        (IMAGE, TEXT, {"projection": "mlp"}, ["has --projection linear, not mlp"]),
        (IMAGE, TEXT, {"loss": "sigmoid"}, ["has no logit_bias"]),
    ],
)  # fmt: skip
def test_why_towers_are_no_clip_model_is_said(image, text, more, reasons):
    projection = more.get("projection", "linear")
    scalars = build_loss(more.get("loss", "infonce")).parameters
    towers = (
        with_head(image_tower(image, SIZE), 32, scalars, projection=projection),
        with_head(
            text_tower(text, 60, TOKENS, 0, more.get("eos_token_id", 5)),
            32,
            {},
            projection=projection,
        ),
    )
    key, found = whole_model_of(*towers)
    assert key == "clip" and len(found) == len(reasons)
    for reason, said in zip(reasons, found):
        assert said.startswith("CLIPModel ") and reason in said


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("time", ["", ":time=transformer,time_heads=2"])
def test_a_model_of_images_is_started_from_for_clips(models, name, time):
    """A clip is the mean of its frames as the model embeds them; a temporal part changes nothing
    yet."""
    folder, _ = models[name]
    flags = ["--pairs", "video:text"] + (["--video-tower", f"hf:{folder}{time}"] if time else [])
    options = with_named_towers(started_from(folder, *flags), None)
    assert options.image_mean == PIXELS.mean and options.image_size == SIZE
    assert "--import" in describe_pixels(options)
    model = RunModel.of(options, load_tokenizer(options.tokenizer))
    assert set(model.pretrained) == {"video", "text"}
    of_images = RunModel.of(
        with_named_towers(started_from(folder), None), load_tokenizer(options.tokenizer)
    )

    def forward(layers, tensors):
        for layer in layers:
            tensors = layer(tensors)
        return tensors

    frames = torch.randn(5, 3, SIZE, SIZE)
    row = torch.tensor([0, 0, 0, 1, 1])
    clips = {"video_frames": frames, "video_row": row, "video_time": row * 0.5}
    with torch.no_grad():
        layers = [model.build_layer(spec).eval() for spec in model.layers["video"]]
        found = forward(layers, clips)
        *tower, head = (of_images.build_layer(spec).eval() for spec in of_images.layers["image"])
        features = forward(tower, {"pixel_values": frames})["image_features"]
        means = torch.stack([features[:3].mean(0), features[3:].mean(0)])
        expected = forward([head], {"image_features": means})
    assert torch.allclose(found["video_embeds"], expected["image_embeds"], atol=1e-5)
    scale = next(value for key, value in found.items() if key.endswith("logit_scale"))
    assert scale == expected["logit_scale"]


def test_a_tower_of_whole_clips_does_not_start_from_a_model_of_images(models):
    folder, _ = models["CLIPModel"]
    options = started_from(folder, "--pairs", "video:text", "--video-tower", "r3d_18")
    with pytest.raises(ValueError, match="sees single frames, and --video-tower r3d_18"):
        RunModel.of(options, load_tokenizer(options.tokenizer))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_for_clips_is_exported_as_the_model_of_its_frames(models, name, tmp_path):
    folder, _ = models[name]
    options = with_named_towers(started_from(folder, "--pairs", "video:text"), None)
    tokenizer = load_tokenizer(options.tokenizer)
    model = RunModel.of(options, tokenizer)
    layers = [model.build_layer(spec).eval() for specs in model.layers.values() for spec in specs]
    found = {
        name: value for name, value in vars(options).items() if name not in ("data", "sources")
    }
    record = {"options": found}
    trained = Trained(record, tmp_path / "step-00000003", 3, tokenizer, model.towers, layers)
    assert write_export(trained, tmp_path / "out") == []
    before, after = (load_file(where / "model.safetensors") for where in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert "saw 8 frames each at most" in (tmp_path / "out/README.md").read_text()
    again = with_named_towers(started_from(tmp_path / "out", "--pairs", "video:text"), None)
    assert set(RunModel.of(again, tokenizer).pretrained) == {"video", "text"}
    with pytest.raises(ValueError, match="with time=mean and a linear projection"):
        video = replace(model.towers[0], config={**model.towers[0].config, "time": "transformer"})
        write_export(replace(trained, towers=(video, model.towers[1])), tmp_path / "none")
