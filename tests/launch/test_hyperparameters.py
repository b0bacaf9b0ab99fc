"""What is left open is decided once, by the way to train, and a run that goes on keeps it."""

import json
from pathlib import Path

import pytest
from cost_models import BRANCHES

from engine.config.reading import check_config, read_config
from launch.config.hyperparameters import LEAST_WARMUP, LONG, PRESETS, as_begun, settle
from launch.config.options import parse_options

FILE = Path(__file__).parents[2] / "ds_configs" / "cpu_fork_fp32.json"
SAID = {"lr": 3e-4, "betas": [0.8, 0.9], "eps": 1e-8, "weight_decay": 0.0, "torch_adam": True}


def settled(*arguments, total_steps=200, config=None):
    return settle(
        parse_options(list(arguments)),
        *(read_config(FILE, BRANCHES) if config is None else check_config(config, BRANCHES)),
        total_steps,
    )


def test_everything_open_comes_from_the_recipe():
    options, config, block, said = settled()
    values = PRESETS["short"].values(
        config["train_batch_size"], 200, {"image": False, "text": False}
    )
    assert "auto" not in json.dumps(config["optimizer"])
    assert config["optimizer"]["params"]["lr"] == values["optimizer.params.lr"]
    assert (
        config["scheduler"]["params"]["warmup_num_steps"]
        == values["scheduler.params.warmup_num_steps"]
    )
    assert config["scheduler"]["params"]["total_num_steps"] == "auto", (
        "the engine's, which knows a run's length"
    )
    assert block.gradient_clipping == values["branches.gradient_clipping"]
    assert (
        options.augmentation == PRESETS["short"].augmentation
        and options.label_smoothing == PRESETS["short"].label_smoothing
    )
    assert said.startswith("from scratch, short, 200 steps of 120 samples: lr ")


@pytest.mark.parametrize(
    ("arguments", "block", "total_steps", "name"),
    [
        ([], {}, LONG - 1, "from scratch, short"),
        ([], {}, LONG, "from scratch, long"),
        (["--image-weights", "DEFAULT"], {}, 10, "pretrained tower"),
        (["--text-weights", "bert-mini"], {}, LONG, "pretrained tower"),
        (["--import", __file__, "--tokenizer", "x"], {}, 10, "fine-tuning"),
        (["--text-weights", "bert-mini"], {"locked": {"text": True}}, 10, "locked"),
    ],
)
def test_the_way_to_train(arguments, block, total_steps, name):
    config = json.loads(FILE.read_text())
    config["branches"] |= block
    assert settled(*arguments, total_steps=total_steps, config=config)[3].startswith(f"{name}, ")


@pytest.mark.parametrize(
    ("arguments", "lr", "rates"),
    [
        (["--import", __file__, "--tokenizer", "x"], None, {"image": 5e-4}),
        (["--import", __file__, "--tokenizer", "x"], 1e-4, {"image": 1e-3}),
        (["--image-weights", "DEFAULT", "--text-weights", "bert-mini"], 1e-3, {"image": 5e-4, "text": 1e-4}),
    ],
)  # fmt: skip
def test_adapters_have_a_rate_of_their_own(arguments, lr, rates):
    config = json.loads(FILE.read_text())
    config["branches"]["train"] = {"image": {"lora": {"r": 4}}}
    if lr is not None:
        config["optimizer"]["params"]["lr"] = lr
    _, _, block, said = settled(*arguments, config=config)
    assert block.optimizer_groups == {branch: {"lr": rate} for branch, rate in rates.items()}
    assert f"image lr {rates['image']:g}" in said


def test_what_is_given_stays():
    config = json.loads(FILE.read_text())
    config["optimizer"]["params"] = SAID
    config["branches"]["gradient_clipping"] = {"text": 0.5}
    options, found, block, said = settled(
        "--augmentation", "crop+flip", "--label-smoothing", "0.2", config=config
    )
    assert found["optimizer"]["params"] == SAID and block.gradient_clipping == {"text": 0.5}
    assert options.augmentation == ("crop", "flip") and options.label_smoothing == 0.2
    assert (
        "lr" not in said
        and "clipping" not in said
        and "augmentation" not in said
        and "steps of warm-up" in said
    )


def test_what_follows_from_a_number_follows_from_the_one_that_is_given():
    config = json.loads(FILE.read_text())
    config["optimizer"]["params"] |= {"lr": 1e-4}
    config["scheduler"]["params"] |= {"warmup_num_steps": 7}
    _, found, block, _ = settled("--text-weights", "bert-mini", config=config)
    assert found["optimizer"]["params"]["lr"] == 1e-4 and block.optimizer_groups == {
        "text": {"lr": 1e-5}
    }
    assert settled(total_steps=LONG, config=config)[2].gradient_clipping["image"] == {
        "kind": "adaptive",
        "warmup_steps": 7,
    }


def test_nothing_open_nothing_said():
    config = {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    options, found, block, said = settled(
        "--augmentation", "none", "--label-smoothing", "0", config=config
    )
    assert said == "" and found["optimizer"] == config["optimizer"]
    assert settled("--augmentation", "none", "--label-smoothing", "0", config=config)[2] == block


def test_no_recipe_is_for_another_optimizer():
    config = {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": "auto"}}}
    with pytest.raises(
        ValueError,
        match='optimizer.params.lr: "auto" is measured for AdamW, and the optimizer is SGD; give numbers',
    ):
        settled(config=config)


def test_the_rate_falls_with_the_root_of_the_batch_and_is_lower_for_pretrained_towers():
    recipe = PRESETS["pretrained"]
    quarter = recipe.values(32, 100, {"image": False, "text": True})
    assert quarter["optimizer.params.lr"] == pytest.approx(recipe.lr / 2, rel=0.05)
    assert set(quarter["branches.optimizer_groups"]) == {"text"}
    assert quarter["branches.optimizer_groups"]["text"]["lr"] == pytest.approx(
        quarter["optimizer.params.lr"] * recipe.pretrained_lr, rel=0.05
    )
    neither = {"image": False, "text": False}
    assert recipe.values(65_536, 100, neither)["optimizer.params.lr"] == recipe.lr
    long = [PRESETS["long"].values(size, 10**5, neither) for size in (256, 65_536)]
    assert long[0] == long[1] and long[0]["optimizer.params.lr"] == 5e-4
    assert long[0]["branches.gradient_clipping"]["text"] == {
        "kind": "adaptive",
        "warmup_steps": 2_000,
    }


@pytest.mark.parametrize(
    ("total_steps", "steps"),
    [(1, 2), (10, 5), (30, 15), (52, LEAST_WARMUP), (208, 21), (4_000, 400), (100_000, 2_000)],
)
def test_the_warm_up_is_a_tenth_but_never_short(total_steps, steps):
    values = PRESETS["short"].values(256, total_steps, {"image": False, "text": False})
    assert values["scheduler.params.warmup_num_steps"] == steps


def test_the_sigmoid_loss_has_no_smoothing():
    assert settled("--loss", "sigmoid")[0].label_smoothing == 0.0


def test_a_run_that_goes_on_keeps_its_numbers():
    """Also one that began before there were recipes, whose configuration had other keys."""
    written = json.loads(FILE.read_text())
    before = {
        "deepspeed_config": {
            **written,
            "optimizer": {"type": "AdamW", "params": SAID},
            "scheduler": {"params": {"warmup_num_steps": 7}},
        },
        "branches": {"gradient_clipping": {"image": 2.0}, "optimizer_groups": None},
    }
    config, block = as_begun(*read_config(FILE, BRANCHES), {"training": before}, BRANCHES)
    assert (
        config["optimizer"]["params"] == SAID
        and config["scheduler"]["params"]["warmup_num_steps"] == 7
    )
    assert "warmup_type" not in config["scheduler"]["params"]
    assert block.gradient_clipping == {"image": 2.0} and block.optimizer_groups is None
    assert as_begun(*read_config(FILE, BRANCHES), None, BRANCHES) == read_config(FILE, BRANCHES)
