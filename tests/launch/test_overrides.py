"""--set: keys of the JSON file and flags on the command line, as sweeps give them."""

import pytest
import yaml
from forked_script import ROOT

from data.options import IMAGE_TEXT
from engine.config.reading import read_config
from launch.config.blocks import READERS
from launch.config.configuration import with_file
from launch.config.options import make_parser, parse_options
from launch.config.settings import parsed, with_settings

FILE = ROOT / "ds_configs" / "cpu_fp32.json"
SWEEP = ROOT / "examples" / "sweep.yaml"


def test_a_key_of_the_json_file_is_changed_where_it_stands():
    words = "--set optimizer.params.lr=3e-4 branches.layout=merged --set train_batch_size=8"
    options = parse_options(words.split())
    config, block = with_file(options, FILE)
    before, _ = read_config(FILE, ("image", "text"), READERS)
    assert config["optimizer"]["params"].pop("lr") == 3e-4 and config["train_batch_size"] == 8
    assert block.layout == "merged" and before["optimizer"]["params"].pop("lr") == "auto"
    assert config == before | {"train_batch_size": 8}
    assert options.record()["set"] == list(options.set)  # which config.json keeps


def test_a_flag_takes_the_place_of_its_own():
    words = f"--seed 1 --set seed=2 image-size=48 eval_ema=True pairs={IMAGE_TEXT}"
    options = parse_options(words.split())
    assert (options.seed, options.image_size, options.eval_ema, options.set) == (2, 48, True, ())
    # a switch is put off
    off = parse_options("--eval-ema --set eval_ema=False wandb=offline".split())
    assert off.eval_ema is False and off.sources["eval_ema"] == "--set" and off.wandb == "offline"
    # the flag and the block of the JSON file have one name
    assert parse_options(["--set", 'wandb={"team": "vision"}']).set == ('wandb={"team": "vision"}',)


def test_values_are_json_or_words():
    for value, meant in (
        *(("3e-4", 3e-4), ("true", True), ("True", True), ("None", None), ("[1, 2]", [1, 2])),
        *(("merged", "merged"), ('{"a": 1}', {"a": 1}), ("", "")),
    ):
        assert parsed(value) == meant and type(parsed(value)) is type(meant), value
    config = {"a": {"b": 1}}  # objects on the way are made, and nothing else is touched
    assert with_settings(config, ["a.c.d=2"]) == {"a": {"b": 1, "c": {"d": 2}}}
    assert config == {"a": {"b": 1}}


def test_what_the_file_may_not_say_may_not_be_set():
    for setting, words in (
        ("optimizer.params.rl=1", ["unknown key 'optimizer.params.rl'", "did you mean 'lr'?"]),
        ("lr=1", ["with --set lr=1", "unknown key 'lr'"]),
        ("branches.layuot=fork", ["'branches.layuot'", "did you mean 'layout'?"]),
        ("train_batch_size.x=1", ["which has no keys", "--set 'train_batch"]),
    ):
        with pytest.raises(ValueError) as error:
            with_file(parse_options(["--set", setting]), FILE)
        assert all(word in str(error.value) for word in words), error.value


# -- a sweep


def expanded(values: dict) -> list[str]:
    """The command of the sweep file with these values, as W&B's agent makes it
    (wandb_agent.Agent._command_run)."""
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils", reason="W&B's agent is looked at")
    sweep = yaml.safe_load(SWEEP.read_text())
    words = utils.create_sweep_command(sweep["command"])
    given = utils.create_sweep_command_args({"args": {k: {"value": v} for k, v in values.items()}})
    given |= {"program": [sweep["program"]], "env": ["/usr/bin/env"]}
    command = []
    for word in words:
        macro = word.startswith("${") and word.endswith("}")
        command += given[word[2:-1]] if macro else [word]
    return command


def first_values() -> dict:
    """One value of each parameter of the sweep file."""
    parameters = yaml.safe_load(SWEEP.read_text())["parameters"]
    return {
        name: spec.get("value", spec.get("values", [spec.get("min")])[0])
        for name, spec in parameters.items()
    }


def test_every_parameter_of_the_sweep_file_is_a_key_or_a_flag():
    values = first_values()
    command = expanded(values)
    assert command[:4] == ["/usr/bin/env", "deepspeed", "train.py", "--set"]
    options = parse_options(command[3:])
    config, block = with_file(options, FILE)
    assert config["optimizer"]["params"]["lr"] == values["optimizer.params.lr"]
    assert block.layout == values["branches.layout"] and options.steps == values["steps"]
    assert options.label_smoothing == 0.0 and options.eval_ema is False
    flags = {action.dest for action in make_parser()._actions}
    assert {key for key in values if "." not in key} <= flags
