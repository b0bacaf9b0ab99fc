"""`branches.train`: what is read of it, and what is refused with its key before anything is built."""

from dataclasses import replace

import pytest
from cost_models import BRANCHES

from data.modalities.tokenizer import train_tokenizer
from engine.config.reading import check_config
from launch.config.blocks import READERS, adapting
from launch.config.options import parse_options
from launch.setup.model import RunModel
from models.towers.adapters.lora import LoRA

CONFIG = {"train_batch_size": 8, "optimizer": {"type": "AdamW"}}


def read(train, **more):
    return check_config({**CONFIG, "branches": {"train": train, **more}}, BRANCHES, READERS)[1]


def test_the_defaults_are_those_of_peft():
    peft = pytest.importorskip("peft", reason="adapters are made by peft")
    assert adapting(read(None)) == {} and adapting(read({})) == {}
    assert adapting(read({"image": {"lora": {}}})) == {"image": LoRA()}
    ours, theirs = LoRA().config(["q"]), peft.LoraConfig(target_modules=["q"])
    for key in ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "init_lora_weights"):
        assert getattr(ours, key) == getattr(theirs, key), key


def test_what_is_wrong_is_refused_with_its_key():
    for train, words in (
        ([], ["branches.train", "it is an object such as"]),
        ({"imgae": {"lora": {}}}, ["imgae", "did you mean 'image'?"]),
        ({"image": {}}, ["branches.train.image", "lora"]),
        ({"image": {"loar": {}}}, ["branches.train.image.loar", "did you mean 'lora'?"]),
        ({"image": {"lora": 8}}, ["branches.train.image.lora", "it is an object such as"]),
        ({"image": {"lora": {"rank": 8}}}, ["branches.train.image.lora.rank", "valid keys: r,"]),
        ({"image": {"lora": {"use_dora": True}}}, ["use_dora", "did you mean 'use_rslora'?"]),
        ({"image": {"lora": {"r": 0}}}, ["branches.train.image.lora.r: got 0"]),
        ({"image": {"lora": {"r": True}}}, ["lora.r: got True"]),
        ({"text": {"lora": {"alpha": -1}}}, ["branches.train.text.lora.alpha: got -1"]),
        ({"text": {"lora": {"dropout": 1}}}, ["lora.dropout: got 1"]),
        ({"text": {"lora": {"use_rslora": 1}}}, ["lora.use_rslora: got 1"]),
        ({"text": {"lora": {"target": "atention"}}}, ["target", "did you mean 'attention'?"]),
        ({"text": {"lora": {"target": []}}}, ["lora.target: got []"]),
        ({"text": {"lora": {"target": [3]}}}, ["lora.target: got [3]"]),
    ):
        with pytest.raises(ValueError) as error:
            read(train)
        assert all(word in str(error.value) for word in words), error.value


def test_a_tower_is_locked_or_has_adapters():
    read({"image": {"lora": {}}}, locked={"text": True, "batch_norm": "locked"})
    with pytest.raises(ValueError, match="branches.locked.image: with branches.train.image"):
        read({"image": {"lora": {}}}, locked={"image": True})


def test_adapters_of_random_weights_are_refused():
    options = parse_options(["--data", "demo", "--image-tower", "vit_b_32"])
    options = replace(options, label_smoothing=0.0)
    with pytest.raises(ValueError, match="branches.train.image.lora: .* starts from random ones"):
        RunModel.of(options, train_tokenizer(["a red apple"]), {"image": LoRA()})
