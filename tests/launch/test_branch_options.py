"""Each modality says which options of train.py name its tower and its weights; one of a module's own
has --tower and --weights, and nothing asks it for options that it does not have."""

import sys

import pytest
from transformers import ViTConfig, ViTModel

from data.modalities.tokenizer import train_tokenizer
from data.stored.kinds import STORED
from data.stored.record import StoredFile
from launch.config.groups import (
    FLAGS,
    OF_BRANCH,
    TowerOptions,
    first_weights,
    flag_of,
    tower_names,
)
from launch.config.options import parse_options
from launch.config.pixels import describe_pixels
from launch.inference.trained import with_named_towers
from launch.modalities import MODALITIES, ModalityEntry, Vocabulary, tower_of
from launch.setup.model import RunModel

pytestmark = pytest.mark.usefixtures("registries")
TEXT = ["--text-tower", "bert-tiny"]


def parsed(*words):
    return parse_options(list(map(str, words)))


def test_every_modality_says_its_options():
    assert {name: entry.flags for name, entry in MODALITIES.items()} == OF_BRANCH
    flags = [name for own in OF_BRANCH.values() for name in own.names]
    assert len(set(flags)) == len(flags) and {*flags} <= FLAGS.keys()
    named = {name for name in FLAGS if name.endswith(("_tower", "_weights")) and name in fields()}
    assert {name for own in OF_BRANCH.values() for name in (own.tower, own.weights)} == named
    for branch, own in OF_BRANCH.items():
        words = ["--pairs", "image:text,audio:text,video:text"]
        words += [*flag_of(branch, "tower", "resnet18").split()] if branch != "text" else TEXT
        words += flag_of(branch, "weights", "bert-tiny" if branch == "text" else "DEFAULT").split()
        options = vars(parsed(*words))
        assert options[own.weights] == first_weights(options)[branch]
        assert tower_names(options)[branch] == options[own.tower] in ("resnet18", "bert-tiny")


def fields():
    return vars(TowerOptions())


def test_one_of_a_modules_own_is_named_by_tower_and_weights(tmp_path):
    words = ["--import-module", "examples.depth.shown", "--pairs", "image:text,depth:text"]
    words += [*flag_of("depth", "tower", "48").split(), *flag_of("depth", "weights", ".").split()]
    options = parsed(*words, *TEXT, "--image-size", 32)
    assert tower_names(vars(options))["depth"] == "48"
    assert list(options.first_weights) == ["depth"]
    assert tower_of("depth", vars(options), Vocabulary(), {}).name == "depth48"
    with pytest.raises(SystemExit):
        parsed("--pairs", "image:text,depth:text", "--tower", "image=resnet18")


def test_one_that_takes_the_place_of_another_has_the_options_of_a_modules_own(capsys):

    def tower(wanted):
        raise LookupError(f"asked for '{wanted.name}'")

    image = MODALITIES["image"]
    with pytest.raises(SystemExit):
        parsed("--tower", "image=some")
    assert "image has a flag of its own, --image-tower" in capsys.readouterr().err
    MODALITIES["image"] = ModalityEntry(image.load, tower)
    for words, name in (((), ""), (("--tower", "image=some"), "some")):
        with pytest.raises(ValueError, match=f"asked for '{name}'"):
            tower_of("image", vars(parsed(*words)), Vocabulary(), {})


def test_the_weights_of_every_modality_complete_the_name_of_its_tower(tmp_path):
    """Those of a ViT without a pooler, which its towers would miss."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = ViTConfig(**sizes, intermediate_size=64, image_size=32, patch_size=16)
    ViTModel(config, add_pooling_layer=False).save_pretrained(tmp_path)
    tokenizer = train_tokenizer(["a picture"] * 8)
    for branch in ("image", "audio", "video"):
        words = f"--pairs {branch}:text {flag_of(branch, 'tower', f'hf:{tmp_path}')}"
        words += f" {flag_of(branch, 'weights', str(tmp_path))} --image-size 32"
        words += " --audio-size 32" * (branch == "audio")
        options = with_named_towers(parsed(*words.split(), *TEXT), None)
        assert tower_names(vars(options))[branch] == f"hf:{tmp_path}:pool=cls"
        model = RunModel.of(options, tokenizer)
        assert all(model.build_layer(spec) for spec in model.layers[branch])


def test_from_scratch_films_and_sounds_keep_the_librarys_own_tower():
    """What image towers have was measured of images; of films the opposite (bench/EVIDENCE.md)."""
    vit = "hf:vit-base-patch16-224"
    for name, of_image in (("resnet18", "zero_init_residual=true"), (vit, "pool=cls")):
        for branch, expected in (("image", f"{name}:{of_image}"), ("audio", name), ("video", name)):
            words = f"--pairs {branch}:text {flag_of(branch, 'tower', name)}".split()
            options = with_named_towers(parsed(*words, *TEXT), None)
            assert tower_names(vars(options))[branch] == expected


def test_one_that_is_made_of_images_takes_the_place_of_these():
    """As films are: where a run has no images, the weights of its tower may say how pixels are
    prepared. A module's own has no option of its own that could say so."""
    STORED["strip"] = StoredFile("strip", endings=("strip.png",), parts="image")
    image = MODALITIES["image"]
    MODALITIES["strip"] = ModalityEntry(image.load, image.tower)
    options = parsed("--pairs", "strip:text", *TEXT)
    assert options.image_size == 64 and describe_pixels(options) == ""
    options = parsed("--pairs", "strip:text", *TEXT, "--weights", f"strip={sys.prefix}")
    assert f"--weights strip={sys.prefix} does not say" in describe_pixels(options)
