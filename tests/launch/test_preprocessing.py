"""The pixels of a run follow its weights: against torchvision's own presets and models, and
transformers' own files."""

import json
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch import nn
from transformers import CLIPImageProcessor, ViTImageProcessor

from data.batching.requests import evaluation_requests
from data.index.sources import open_source
from data.loader import MicroBatchDataset
from data.modalities.image import ImageModality
from data.modalities.preprocessing import CLIP, NORMALIZATIONS, RESIZE_MODES, Preprocessing
from data.modalities.transforms import EvalTransform, Views
from launch.config.options import parse_options
from launch.config.pixels import describe_pixels, trained_with
from launch.inputs import as_values
from launch.run.folder import training_identity
from models.towers.image import image_tower
from models.weights.reading import open_weights

FILE = "resnet18-f37072fd.pth"  # as torchvision downloads IMAGENET1K_V1


@pytest.fixture(scope="module")
def resnet18():
    """torchvision's model; its running statistics and affines are not what they begin with."""
    torch.manual_seed(0)
    model = torchvision.models.resnet18(weights=None)
    model.train()
    with torch.no_grad():
        model(torch.randn(8, 3, 64, 64) + 0.5)
    return model.eval()


def images(folder, sizes):
    """A jsonl file of PNGs of (width, height) pixels each, and the images."""
    draw, lines, made = np.random.default_rng(0), [], []
    for i, size in enumerate(sizes):
        coarse = Image.fromarray(draw.integers(0, 255, (7, 9, 3), dtype=np.uint8))
        made.append(coarse.resize(size, Image.Resampling.BICUBIC))
        made[i].save(folder / f"{i}.png")
        lines.append(json.dumps({"image_path": f"{i}.png", "text": f"number {i}"}))
    (folder / "set.jsonl").write_text("\n".join(lines))
    return f"jsonl:{folder / 'set.jsonl'}", made


def run_s_pixels(options, spec, number):
    """[number, 3, H, W] as a run with these options evaluates them."""
    preprocessing = options.preprocessing
    transform = EvalTransform((options.image_size, options.image_size), preprocessing)
    dataset = MicroBatchDataset(open_source(spec), [ImageModality(Views(transform, transform))])
    (request,) = evaluation_requests(np.arange(number), 0, 1, number)
    return as_values(dataset[request], preprocessing)["pixel_values"]


def run_s_features(options, pixel_values):
    """[B, D] of the run's tower with its pretrained weights, before the head."""
    tower = image_tower(options.image_tower, options.image_size)
    weights = open_weights("image", options.image_weights, tower)
    tensors = {"pixel_values": pixel_values}
    with torch.no_grad():
        for layer in tower.specs:
            tensors = layer.build(0, weights).eval()(tensors)
    return tensors["image_features"]


@pytest.mark.parametrize(
    "sizes, pixel_limit, feature_limit",
    [
        ([(256, 256), (300, 256), (256, 421), (301, 256)], 0, 1e-5),  # cropped only
        # resized: torch's and Pillow's arithmetic differ in the last of 8 bits at about one pixel
        # in a thousand
        ([(300, 261), (307, 264), (280, 319), (290, 290)], 1, 1e-3),
    ],
)
def test_a_pretrained_tower_embeds_as_torchvision_s_own_model(
    tmp_path, resnet18, sizes, pixel_limit, feature_limit
):
    """The model and the preset of the library on one side; a run's options, weights, loader and
    layers on the other."""
    torch.save(resnet18.state_dict(), tmp_path / FILE)
    spec, made = images(tmp_path, sizes)
    weights = ["--image-tower", "resnet18", "--image-weights", str(tmp_path / FILE)]
    arguments = ["--data", spec, *weights]
    preset = torchvision.models.ResNet18_Weights.IMAGENET1K_V1.transforms()
    library = nn.Sequential(*list(resnet18.children())[:-1], nn.Flatten())
    library_pixels = torch.stack([preset(image) for image in made])
    with torch.no_grad():
        expected = library(library_pixels)

    options = parse_options(arguments)
    pixels = run_s_pixels(options, spec, len(made))
    levels = (pixels - library_pixels).abs() * 255 * torch.tensor(preset.std)[:, None, None]
    assert levels.max() < pixel_limit + 0.02 and (levels > 0.5).float().mean() < 0.01
    # fp32
    torch.testing.assert_close(
        run_s_features(options, library_pixels), expected, rtol=1e-5, atol=1e-5
    )
    features = run_s_features(options, pixels)
    assert torch.linalg.norm(features - expected) < feature_limit * torch.linalg.norm(expected)
    for wrong in (["--image-normalization", "clip"], ["--image-resize", "224"]):
        others = parse_options([*arguments, *wrong])
        features = run_s_features(others, run_s_pixels(others, spec, len(made)))
        error, whole = torch.linalg.norm(features - expected), torch.linalg.norm(expected)
        assert error > 10 * feature_limit * whole


def test_every_weight_of_torchvision_brings_its_preset():
    for architecture in ("resnet50", "vit_b_16", "vit_l_16", "convnext_tiny"):
        tower = ["--data", "jsonl:x", "--image-tower", architecture]
        for weights in torchvision.models.get_model_weights(architecture):
            preset = weights.transforms()
            options = parse_options([*tower, "--image-weights", weights.name])
            sizes = preset.crop_size + preset.resize_size
            assert [options.image_size, options.image_resize] == sizes, weights
            assert (list(options.image_mean), list(options.image_std)) == (preset.mean, preset.std)
            assert options.image_interpolation == preset.interpolation.value
            file = f"/x/{weights.url.rpartition('/')[2]}"
            assert trained_with(weights.name, architecture) == trained_with(file, architecture)


def test_training_resizes_as_evaluation_does_and_regions_see_the_whole_image():
    def modes(*words):
        options = parse_options(["--data", "jsonl:x", *words])
        return options.image_resize_mode, options.image_train_resize_mode

    regions = ["--pairs", "image:text,region:text"]
    assert modes() == ("shortest", "shortest") and modes(*regions) == ("squash", "squash")
    for mode in RESIZE_MODES:
        assert modes("--image-resize-mode", mode) == (mode, mode)
        assert modes(*regions, "--image-resize-mode", mode) == (mode, mode)
    assert modes(*regions, "--image-train-resize-mode", "shortest") == ("squash", "shortest")


def test_a_run_of_version_0_1_keeps_its_crops(tmp_path):
    """Its record does not know the mode of training, and its evaluation may have squashed."""
    words = ["--data", "jsonl:x", "--pairs", "image:text,region:text", "--run-dir", str(tmp_path)]
    for mode in ("shortest", "squash"):
        record = parse_options([*words, "--image-resize-mode", mode]).record()
        del record["image_train_resize_mode"]
        with patch("launch.config.options.read_run", return_value={"options": record}):
            again = parse_options(words)
        assert (again.image_resize_mode, again.image_train_resize_mode) == (mode, "shortest")
        now = training_identity(again.record(), {}, {})["options"]
        assert now == {name: value for name, value in record.items() if name in now}


def test_what_is_given_goes_before_the_weights():
    weights = ["--data", "jsonl:x", "--image-weights", "DEFAULT"]  # resnet50's: 232, then 224
    options = parse_options([*weights, "--image-size", "112"])
    assert (options.image_size, options.image_resize) == (112, 116)
    given = "--image-normalization half --image-interpolation bicubic --image-resize 224"
    options = parse_options([*weights, *given.split()])
    assert (options.image_mean, options.image_std) == NORMALIZATIONS["half"]
    assert (options.image_interpolation, options.image_resize) == ("bicubic", 224)
    options = parse_options(["--image-mean", "0.1,0.2,0.3", "--image-std", "0.4,0.5,0.6"])
    assert (options.image_mean, options.image_std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert Preprocessing.from_options(vars(parse_options([]))) == CLIP  # from scratch


def test_what_makes_no_sense_is_refused(capsys):
    for arguments, words in (
        ("--image-mean 0.1,0.2,0.3", "it goes together with --image-std"),
        ("--image-mean 0.1,0.2", "is not three numbers"),
        ("--image-mean a,b,c", "invalid list of numbers value"),
        ("--image-mean 0,0,0 --image-std 0,1,1", "must be above 0"),
        (
            "--image-normalization half --image-mean 0,0,0 --image-std 1,1,1",
            "give one of them",
        ),
        ("--image-resize 60", "--image-resize: 60 is below --image-size 64"),
        ("--image-normalization imagnet", "invalid choice: 'imagnet'"),
    ):
        with pytest.raises(SystemExit):
            parse_options(arguments.split())
        assert words in capsys.readouterr().err


def test_transformers_files_are_read(tmp_path):
    cropped = {"size": {"shortest_edge": 256}, "crop_size": 224, "resample": 2}
    cropped |= {"image_mean": [0.485, 0.456, 0.406]}
    imagenet = Preprocessing(NORMALIZATIONS["imagenet"][0], CLIP.std, "bilinear", 224 / 256)
    for name, processor, expected in (
        ("clip", CLIPImageProcessor(), (CLIP, 224)),
        ("vit", ViTImageProcessor(), (Preprocessing(*NORMALIZATIONS["half"], "bilinear"), 224)),
        ("cropped", CLIPImageProcessor(**cropped), (imagenet, 224)),
    ):
        processor.save_pretrained(tmp_path / name)
        assert trained_with(str(tmp_path / name), "resnet50") == expected
    # transformers 5 writes a whole processor, its old versions another key
    half, as_text = tmp_path / "half", '{"image_processor": %s}'
    half.mkdir()
    written = (tmp_path / "vit" / "preprocessor_config.json").read_text()
    (half / "processor_config.json").write_text(as_text % written)
    (tmp_path / "clip" / "preprocessor_config.json").write_text(
        json.dumps({**json.loads(written), "feature_extractor_type": "ViTFeatureExtractor"})
    )
    assert trained_with(str(half), "resnet50") == trained_with(str(tmp_path / "vit"), "resnet50")
    assert trained_with(str(half), "resnet50") == trained_with(str(tmp_path / "clip"), "resnet50")
    (tmp_path / "vit" / "weights.pth").touch()  # beside it
    found, _ = trained_with(str(tmp_path / "vit" / "weights.pth"), "resnet50")
    assert found.mean == NORMALIZATIONS["half"][0]
    (tmp_path / "clip" / "preprocessor_config.json").write_text('{"size": 224}')
    with pytest.raises(ValueError, match="does not describe .* give --image-normalization"):
        trained_with(str(tmp_path / "clip"), "resnet50")


def test_the_first_lines_say_which_pixels_are_used(tmp_path):
    def said(*words):
        return describe_pixels(parse_options(["--data", "jsonl:x", "--image-weights", *words]))

    assert "mean 0.485, 0.456, 0.406; std 0.229" in said("DEFAULT")
    trained = "bilinear; shorter side 232, centre 224 (as --image-weights DEFAULT was trained)"
    assert trained in said("DEFAULT")
    assert "not as --image-weights" in said("DEFAULT", "--image-normalization", "clip")
    (tmp_path / "mine.pth").touch()
    assert "so CLIP's values are assumed" in said(str(tmp_path / "mine.pth"))


def test_the_pixels_of_timms_weights(tmp_path):
    """By tag, as timm's own transform would prepare them; by the hub's name; of a folder."""
    import timm

    for name, where, known in (
        ("timm:vit_tiny_patch16_224", "DEFAULT", "vit_tiny_patch16_224"),
        ("vit_tiny_patch16_224.augreg_in21k", "DEFAULT", "vit_tiny_patch16_224.augreg_in21k"),
        ("timm:vit_tiny_patch16_224", "augreg_in21k", "vit_tiny_patch16_224.augreg_in21k"),
        ("timm:convnext_atto", "timm/convnext_atto.d2_in1k", "convnext_atto.d2_in1k"),
    ):
        config = timm.get_pretrained_cfg(known).to_dict()
        config = timm.data.resolve_data_config(pretrained_cfg=config)
        found, size = trained_with(where, name)
        for key in ("mean", "std", "interpolation", "crop_pct"):
            assert getattr(found, key) == config[key], (name, where, key)
        assert size == config["input_size"][-1]
    own = {"input_size": [3, 160, 160], "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.2, 0.2]}
    own |= {"interpolation": "bilinear", "crop_pct": 0.95}
    config = {"architecture": "test_vit", "pretrained_cfg": own}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = Preprocessing((0.5, 0.4, 0.3), (0.2, 0.2, 0.2), "bilinear", 0.95), 160
    assert trained_with(str(tmp_path), "timm:test_vit") == expected
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert trained_with(str(tmp_path / "model.safetensors"), "timm:test_vit") == expected


def test_the_pixels_of_transformers_weights_on_the_hub(tmp_path, monkeypatch):
    """By id and as DEFAULT, read from the hub's cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "models--google--vit-base-patch16-224"
    ViTImageProcessor().save_pretrained(kept / "snapshots" / "0123")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0123")
    half = Preprocessing(*NORMALIZATIONS["half"], "bilinear"), 224
    for where in ("google/vit-base-patch16-224", "DEFAULT", "vit-base-patch16-224"):
        assert trained_with(where, "hf:vit-base-patch16-224") == half
    for where in ("someone/model", "nothing"):  # not to be had: the weights' own error says so
        assert trained_with(where, "hf:vit-base-patch16-224") is None


def test_the_pixels_of_openclips_weights(tmp_path):
    assert trained_with("laion2b_s34b_b79k", "ViT-B/32") == (CLIP, 224)
    half = Preprocessing(*NORMALIZATIONS["half"])
    squashed = replace(half, resize_mode="squash")  # as OpenCLIP evaluates SigLIP
    assert trained_with("DEFAULT", "open_clip:ViT-B-16-SigLIP") == (squashed, 224)
    assert trained_with("nothing", "open_clip:ViT-B-32") is None
    config = {
        "model_cfg": {"vision_cfg": {"image_size": 336}},
        "preprocess_cfg": {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]},
    }
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    assert trained_with(str(tmp_path), "open_clip:ViT-B-32") == (half, 336)


def test_the_size_of_the_weights_is_the_runs(tmp_path):
    given = ["--image-tower", "timm:convnext_atto", "--image-weights", "d2_in1k"]
    options = parse_options(given)
    assert (options.image_size, options.image_resize) == (224, 256)
    assert options.image_mean == NORMALIZATIONS["imagenet"][0]
    assert parse_options([*given, "--image-size", "96"]).image_size == 96
