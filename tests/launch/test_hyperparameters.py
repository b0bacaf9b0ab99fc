"""What is left open is decided once, by the way to train, and a run that goes on keeps it."""

import json
from pathlib import Path

import pytest
from cost_models import BRANCHES

from engine.config.reading import check_config, read_config
from launch.config.hyperparameters import LEAST_WARMUP, LONG, PRESETS, as_begun, settle
from launch.config.options import parse_options
from launch.modalities import MODALITIES

FILE = Path(__file__).parents[2] / "ds_configs" / "cpu_fork_fp32.json"
SAID = {"lr": 3e-4, "betas": [0.8, 0.9], "eps": 1e-8, "weight_decay": 0.0, "torch_adam": True}


def settled(*arguments, total_steps=200, config=None):
    return settle(
        parse_options(list(arguments)),
        *(read_config(FILE, BRANCHES) if config is None else check_config(config, BRANCHES)),
        total_steps,
    )


def given(**branches):
    """What is in the file, with these keys of its `branches`."""
    config = json.loads(FILE.read_text())
    config["branches"] |= branches
    return config


def test_everything_open_comes_from_the_preset():
    options, config, block, said = settled()
    preset, neither = PRESETS["short"], {"image": False, "text": False}
    values = preset.values(config["train_batch_size"], 200, neither)
    assert "auto" not in json.dumps(config["optimizer"])
    assert config["optimizer"]["params"]["lr"] == values["optimizer.params.lr"]
    scheduler = config["scheduler"]["params"]
    assert scheduler["warmup_num_steps"] == values["scheduler.params.warmup_num_steps"]
    assert scheduler["total_num_steps"] == "auto", "the engine's, which knows a run's length"
    assert block.gradient_clipping == values["branches.gradient_clipping"]
    assert options.augmentation == preset.augmentation
    assert options.label_smoothing == preset.label_smoothing
    assert said.startswith("from scratch, short, 200 steps of 120 samples: lr ")
    assert settled("--loss", "sigmoid")[0].label_smoothing == 0.0  # which it does not have


def test_the_way_to_train():
    imported = ["--import", __file__, "--tokenizer", "x"]
    for arguments, block, total_steps, name in (
        ([], {}, LONG - 1, "from scratch, short"),
        ([], {}, LONG, "from scratch, long"),
        (["--image-weights", "DEFAULT"], {}, 10, "pretrained tower"),
        (["--text-weights", "bert-mini"], {}, LONG, "pretrained tower"),
        (imported, {}, 10, "fine-tuning"),
        (["--text-weights", "bert-mini"], {"locked": {"text": True}}, 10, "locked"),
    ):
        said = settled(*arguments, total_steps=total_steps, config=given(**block))[3]
        assert said.startswith(f"{name}, "), said


# a run with each modality, and one of a module's own
FOUR = ["--pairs", "image:text,audio:text,video:text,palette:text"]
FOUR += ["--import-module", "examples.modality"]
WEIGHTS = {
    "image": ["--image-weights", "DEFAULT"],
    "text": ["--text-weights", "bert-mini"],
    "audio": ["--audio-weights", "DEFAULT"],
    "video": ["--video-weights", "DEFAULT"],
    "palette": ["--weights", "palette=DEFAULT"],
}


def test_the_weights_of_every_branch_count_as_pretrained(registries):
    """The preset is that of a pretrained tower, and each tower with weights has a tenth of the
    rate, whichever modality it is of."""
    branches = ("image", "text", "audio", "video", "palette")
    config = read_config(FILE, branches)
    for given in [[branch] for branch in branches] + [branches[2:], branches]:
        options = parse_options([*FOUR, *(word for branch in given for word in WEIGHTS[branch])])
        _, found, block, said = settle(options, *config, 200)
        assert said.startswith("pretrained tower, "), said
        lr = found["optimizer"]["params"]["lr"]
        tenth = {"lr": pytest.approx(lr * PRESETS["pretrained"].pretrained_lr, rel=0.01)}
        assert block.optimizer_groups == dict.fromkeys(given, tenth), given
    assert set(WEIGHTS) == set(MODALITIES)


def test_adapters_have_a_rate_of_their_own():
    imported = ["--import", __file__, "--tokenizer", "x"]
    weights = ["--image-weights", "DEFAULT", "--text-weights", "bert-mini"]
    for arguments, lr, rates in (
        (imported, "auto", {"image": 5e-4}),
        (imported, 1e-4, {"image": 1e-3}),
        (weights, 1e-3, {"image": 5e-4, "text": 1e-4}),
    ):
        config = given(train={"image": {"lora": {"r": 4}}})
        config["optimizer"]["params"]["lr"] = lr
        _, _, block, said = settled(*arguments, config=config)
        assert block.optimizer_groups == {branch: {"lr": rate} for branch, rate in rates.items()}
        assert f"image lr {rates['image']:g}" in said


def test_what_is_given_stays():
    config = given(gradient_clipping={"text": 0.5})
    config["optimizer"]["params"] = SAID
    flags = ["--augmentation", "crop+flip", "--label-smoothing", "0.2"]
    options, found, block, said = settled(*flags, config=config)
    assert found["optimizer"]["params"] == SAID and block.gradient_clipping == {"text": 0.5}
    assert options.augmentation == ("crop", "flip") and options.label_smoothing == 0.2
    assert not any(word in said for word in ("lr", "clipping", "augmentation"))
    assert "steps of warm-up" in said


def test_what_follows_from_a_number_follows_from_the_one_that_is_given():
    config = given()
    config["optimizer"]["params"] |= {"lr": 1e-4}
    config["scheduler"]["params"] |= {"warmup_num_steps": 7}
    _, found, block, _ = settled("--text-weights", "bert-mini", config=config)
    assert found["optimizer"]["params"]["lr"] == 1e-4
    assert block.optimizer_groups == {"text": {"lr": 1e-5}}
    clipping = settled(total_steps=LONG, config=config)[2].gradient_clipping
    assert clipping["image"] == {"kind": "adaptive", "warmup_steps": 7}


def test_nothing_open_nothing_said_and_another_optimizer_is_given_numbers():
    config = {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    flags = ["--augmentation", "none", "--label-smoothing", "0"]
    _, found, block, said = settled(*flags, config=config)
    assert said == "" and found["optimizer"] == config["optimizer"]
    assert block == check_config(config, BRANCHES)[1]
    config["optimizer"]["params"]["lr"] = "auto"
    with pytest.raises(
        ValueError, match='params.lr: "auto" is measured for AdamW, .* is SGD; give'
    ):
        settled(config=config)


def test_muon_has_the_numbers_of_adamw():
    auto = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    found = []
    for kind in ("AdamW", "Muon"):
        config = {"train_batch_size": 8, "optimizer": {"type": kind, "params": auto}}
        found.append(settled(config=config)[1]["optimizer"]["params"])
    assert found[0] == found[1] and "auto" not in found[0].values()


def test_the_rate_falls_with_the_root_of_the_batch_and_is_lower_for_pretrained_towers():
    preset, lr = PRESETS["pretrained"], "optimizer.params.lr"
    quarter = preset.values(32, 100, {"image": False, "text": True})
    assert quarter[lr] == pytest.approx(preset.lr / 2, rel=0.05)
    rate = pytest.approx(quarter[lr] * preset.pretrained_lr, rel=0.05)
    assert quarter["branches.optimizer_groups"] == {"text": {"lr": rate}}
    neither = {"image": False, "text": False}
    assert preset.values(65_536, 100, neither)[lr] == preset.lr
    long = [PRESETS["long"].values(size, 10**5, neither) for size in (256, 65_536)]
    assert long[0] == long[1] and long[0][lr] == 5e-4
    clipping = {"kind": "adaptive", "warmup_steps": 2_000}
    assert long[0]["branches.gradient_clipping"]["text"] == clipping
    # the warm-up is a tenth, but never short
    for total, steps in (
        (1, 1),
        (2, 1),
        (10, 5),
        (30, 15),
        (52, LEAST_WARMUP),
        (208, 21),
        (4_000, 400),
    ):
        values = PRESETS["short"].values(256, total, neither)
        assert values["scheduler.params.warmup_num_steps"] == steps, total


def test_a_run_that_goes_on_keeps_its_numbers():
    """Also where what the file leaves open has changed since, and is said by other keys."""
    begun = given() | {"optimizer": {"type": "AdamW", "params": SAID}}
    begun["scheduler"] = {"params": {"warmup_num_steps": 7}}
    branches = {"gradient_clipping": {"image": 2.0}, "optimizer_groups": None}
    previous = {"training": {"deepspeed_config": begun, "branches": branches}}
    config, block = as_begun(*read_config(FILE, BRANCHES), previous, BRANCHES)
    assert config["optimizer"]["params"] == SAID
    scheduler = config["scheduler"]["params"]
    assert scheduler["warmup_num_steps"] == 7 and "warmup_type" not in scheduler
    assert block.gradient_clipping == {"image": 2.0} and block.optimizer_groups is None
    assert as_begun(*read_config(FILE, BRANCHES), None, BRANCHES) == read_config(FILE, BRANCHES)
