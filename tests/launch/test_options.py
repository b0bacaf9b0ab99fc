"""The command line of train.py: a frozen list of flags, defaults for the demo and for real data,
one message per mistake."""

import argparse
import json
import re

import pytest
from cost_models import BRANCHES, proportional

from common import __version__
from common.options import flags_of
from data.options import DataOptions
from engine.config.reading import BranchesBlock, read_config
from engine.planning.planner import check_world, plan_run
from launch.config.configuration import default_config
from launch.config.groups import GROUPS
from launch.config.options import ROOT, default_of, free_options, make_parser, parse_options

FLAGS = {
    f"--{flag.name or name.replace('_', '-')}": (name, default, flag)
    for kind in GROUPS
    for name, default, flag in flags_of(kind)
}
SIZES = {"embed_dim": 256, "image_size": 64, "max_text_tokens": 32, "epochs": 12}  # of the demo


def actions() -> dict[str, argparse.Action]:
    shown = [action for action in make_parser()._actions if action.help is not argparse.SUPPRESS]
    return {action.option_strings[-1]: action for action in shown if action.dest != "help"}


def refusal(capsys, *arguments: str) -> str:
    """What goes to stderr; nothing goes to stdout, and the exit status is 2."""
    with pytest.raises(SystemExit) as exit:
        parse_options(list(arguments))
    out, err = capsys.readouterr()
    assert exit.value.code == 2 and out == ""
    return err


def test_every_option_is_a_flag_and_its_help_says_the_default():
    assert list(actions()) == list(FLAGS)
    text = make_parser().format_help()
    for written, (name, default, flag) in FLAGS.items():
        shown = actions()[written].help
        assert written in text and len(flag.help) > 5 and "(default: " in shown
        demo = default_of(name, is_demo=True)
        if demo != default and name != "epochs":
            assert "demo: " in shown, written


def test_what_is_trained_may_not_change_when_a_run_goes_on():
    """All other options may; one that is added here is compared with the run's record."""
    compared = """audio_augmentation audio_seconds audio_size audio_tower audio_weights augmentation
    data data_adapt data_floors data_root data_temperature data_weights duplicates embed_dim epochs
    fusion fusion_heads fusion_scales fusion_width image_buckets image_interpolation image_mean
    image_resize image_resize_mode image_size image_std image_tower image_weights imported index_check
    label_smoothing leak_bits limit_samples loss loss_weights loss_weights_every matching_weight
    max_audio_seconds max_text_tokens on_leak pairs projection seed steps text_tower text_weights
    tokenizer tower val_data val_fraction"""
    assert set(parse_options([]).record()) - set(free_options()) == set(compared.split())


def test_help_points_to_the_json_and_keeps_the_launchers_flag_to_itself():
    text = make_parser().format_help()
    assert "ds_configs/README.md" in text and "--local_rank" not in text
    assert max(map(len, text.splitlines())) <= 120
    assert (
        parse_options(["--local_rank", "3"])
        == parse_options([])
        == parse_options(["--local_rank=3"])
    )


def test_the_demo_is_the_default():
    options = parse_options([])
    assert options.data == ("demo",) and {key: getattr(options, key) for key in SIZES} == SIZES
    assert (options.resume, options.workers, options.seed) == (
        "auto",
        "auto",
        0,
    )
    assert (options.wandb, options.val_fraction, options.steps, options.run_dir) == (
        "auto",
        0.1,
        None,
        None,
    )
    assert parse_options(["--data", "demo:de+ja"]).image_tower == default_of("image_tower", True)
    assert options.part(DataOptions) == DataOptions()


def test_real_data_has_real_towers():
    options = parse_options(["--data", "jsonl:pairs.jsonl"])
    assert (options.image_tower, options.text_tower) == ("resnet50", "bert-base-uncased")
    assert (options.embed_dim, options.image_size, options.epochs) == (512, 224, 30)


def test_several_data_sets():
    options = parse_options(
        [
            "--data",
            "demo",
            "--data",
            "coco:a:b.json",
            "--data-weights",
            "1,0.5",
            "--val-data",
            "csv:v.csv",
            "--on-leak",
            "drop",
        ]
    )
    assert (
        options.data == ("demo", "coco:a:b.json")
        and options.data_weights == (1.0, 0.5)
        and options.image_tower == default_of("image_tower")
    )
    made = options
    assert (made.data, made.data_weights, made.val_data, made.on_leak) == (
        options.data,
        (1.0, 0.5),
        "csv:v.csv",
        "drop",
    )
    assert (made.data_temperature, made.data_floors) == (1.0, None)
    options = parse_options(
        [
            "--data",
            "demo",
            "--data",
            "demo:de",
            "--data-temperature",
            "3",
            "--data-floors",
            "0,0.25",
        ]
    )
    made = options
    assert (made.data_temperature, made.data_floors) == (3.0, (0.0, 0.25))
    assert (
        options.data_adapt == 0
        and parse_options(["--data", "demo", "--data", "demo:de", "--data-adapt", "0.2"]).data_adapt
        == 0.2
    )
    assert DataOptions.from_record(json.loads(json.dumps(options.record()))) == options.part(
        DataOptions
    )  # as config.json gives it back


def test_an_average_that_is_not_kept_is_not_evaluated():
    parse_options(["--eval-ema"]).refuse_beside(BranchesBlock(ema={"decay": 0.99}))
    parse_options([]).refuse_beside(BranchesBlock())
    with pytest.raises(ValueError, match='--eval-ema: .*add "ema"'):
        parse_options(["--eval-ema"]).refuse_beside(BranchesBlock())
    with pytest.raises(ValueError, match='--fusion 2: it would not learn; set "head"'):
        parse_options(["--fusion", "2"]).refuse_beside(
            BranchesBlock(locked={"image": True, "head": True})
        )
    parse_options(["--fusion", "2"]).refuse_beside(BranchesBlock(locked={"image": True}))


def test_the_strongest_of_those_that_say_a_value_wins(tmp_path):
    """--set, the command line, a recipe, the run that goes on, defaults: in this order."""
    begun = {
        "version": __version__,
        "options": {"embed_dim": 96, "image_size": 48, "epochs": 5, "seed": 3, "data": ["x"]},
    }
    (tmp_path / "config.json").write_text(json.dumps(begun))
    own = json.loads((ROOT / "ds_configs" / "recipes" / "clip_vit_b32.json").read_text())
    own["recipe"]["flags"] = {"embed-dim": 32, "epochs": 7, "image-size": 40, "fusion": 0}
    (tmp_path / "own.json").write_text(json.dumps(own))
    run, recipe = ["--run-dir", str(tmp_path)], ["--recipe", str(tmp_path / "own.json")]

    def value(name, *arguments):
        options = parse_options([*arguments])
        return getattr(options, name), options.sources[name]

    by_recipe, going_on = f"recipe {tmp_path / 'own.json'}", "the run that goes on"
    assert value("embed_dim") == (256, "default")
    assert value("embed_dim", *run) == (96, going_on)
    assert value("embed_dim", *run, *recipe) == (32, by_recipe)
    assert value("embed_dim", *run, *recipe, "--embed-dim", "16") == (16, "command line")
    given = [*run, *recipe, "--embed-dim", "16", "--set", "embed_dim=8"]
    assert value("embed_dim", *given) == (8, "--set")
    assert value("image_size", *run) == (48, going_on)
    # only what has a default of its own kind is kept: the rest must be said again
    assert value("seed", *run) == (0, "default") and value("data", *run) == (("demo",), "default")
    assert value("epochs", *run, *recipe) == (7, by_recipe)
    # steps and epochs are two words for one choice
    assert value("epochs", *run, *recipe, "--steps", "4") == (None, "command line")
    assert value("steps", *run, *recipe, "--set", "steps=4") == (4, "--set")


def test_a_switch_is_put_off_by_set():
    """As a sweep does, whose parameters are true or false."""
    assert parse_options(["--eval-ema"]).eval_ema
    for arguments in (["--eval-ema", "--set", "eval_ema=false"], ["--set", "eval_ema=False"]):
        options = parse_options(arguments)
        assert options.eval_ema is False and options.sources["eval_ema"] == "--set"


def test_what_is_given_wins_over_the_defaults():
    options = parse_options(
        ["--image-tower", "vit_b_16", "--embed-dim", "96", "--steps", "7", "--workers", "3"]
    )
    assert (options.image_tower, options.embed_dim, options.steps, options.workers) == (
        "vit_b_16",
        96,
        7,
        3,
    )
    assert options.epochs is None  # --steps replaces it
    assert options.text_tower == default_of("text_tower", True)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--epoch-s", "3"], ["unrecognized arguments", "--epoch-s"]),
        (["--epochs", "3", "--steps", "4"], ["--steps", "not allowed with", "--epochs"]),
        (["--epochs", "0"], ["--epochs", "0 is below 1"]),
        (["--augmentation", "flip"], ["--augmentation", "'flip'", "crop comes first"]),
        (["--augmentation", "crop+crop"], ["--augmentation", "crop+crop"]),
        (
            ["--matching-weight", "2"],
            ["--matching-weight", "2.0 is for a run with --fusion", "--fusion N"],
        ),
        (["--loss-weights", "measured"], ["--loss-weights", "measured", "--fusion"]),
        (
            ["--loss-weights", "alignment"],
            ["--loss-weights", "need two pairs, and this run has one; give fixed"],
        ),
        (
            ["--loss-weights", "alignment", "--fusion", "1"],
            ["--loss-weights", "need two pairs", "beside matching, of which no alignment"],
        ),
        (["--fusion", "2", "--fusion-heads", "7"], ["--fusion-width", "512", "multiple", "7"]),
        (["--steps", "many"], ["--steps", "whole number", "'many'"]),
        (["--max-text-tokens", "3"], ["--max-text-tokens", "3 is below 4"]),
        (["--seed", "-1"], ["--seed", "-1 is below 0"]),
        (["--workers", "some"], ["--workers", "'some'", "neither 'auto' nor a whole number"]),
        (["--workers", "-1"], ["--workers", "'-1'", "neither 'auto' nor a whole number"]),
        (["--val-fraction", "1"], ["--val-fraction", "1 is not in 0 <= F < 1"]),
        (["--val-fraction", "-0.1"], ["--val-fraction", "-0.1 is not in 0 <= F < 1"]),
        (["--val-fraction", "nan"], ["--val-fraction", "nan is not in 0 <= F < 1"]),
        (["--keep-checkpoints", "0"], ["--keep-checkpoints", "0 is below 1"]),
        (["--max-bad-fraction", "2"], ["--max-bad-fraction", "2 is not in 0 <= F < 1"]),
        (["--data-weights", "1,2"], ["--data-weights", "'1,2'", "1 --data need 1 numbers"]),
        (
            ["--data", "demo", "--data", "demo:de", "--data-weights", "1,-2"],
            ["--data-weights", "2 --data need 2 numbers >= 0"],
        ),
        (
            ["--data", "demo", "--data", "demo:de", "--data-weights", "0,0"],
            ["--data-weights", "not all 0"],
        ),
        (["--loss", "siglip"], ["--loss", "'siglip'", "infonce", "sigmoid"]),
        (["--label-smoothing", "1"], ["--label-smoothing", "1 is not in 0 <= F < 1"]),
        (
            ["--loss", "sigmoid", "--label-smoothing", "0.1"],
            ["--label-smoothing", "0.1 is for --loss infonce", "leave it out"],
        ),
        (
            ["--data", "demo", "--data", "demo:de", "--data-temperature", "0"],
            ["--data-temperature", "0 is not above 0"],
        ),
        (
            ["--data", "demo", "--data", "demo:de", "--data-temperature", "inf"],
            ["--data-temperature", "inf is not above 0"],
        ),
        (
            ["--data-temperature", "2"],
            ["--data-temperature", "2", "one --data has nothing to share"],
        ),
        (["--data-floors", "1"], ["--data-floors", "1", "one --data has nothing to share"]),
        (
            ["--data", "demo", "--data", "demo:de", "--data-floors", "0.5"],
            ["--data-floors", "2 --data need 2 numbers from 0 to 1"],
        ),
        (
            ["--data", "demo", "--data", "demo:de", "--data-floors", "0.7,0.4"],
            ["--data-floors", "'0.7,0.4'", "together at most 1"],
        ),
        (
            ["--data", "demo", "--data", "demo:de", "--data-floors", "half,0"],
            ["--data-floors", "list of numbers", "'half,0'"],
        ),
        (["--data-adapt", "0.1"], ["--data-adapt", "0.1", "one --data has nothing to share"]),
        (
            ["--data", "demo", "--data", "demo:de", "--data-adapt", "1.5"],
            ["--data-adapt", "1.5 is not in 0 <= RATE <= 1"],
        ),
        (
            ["--data", "demo", "--data", "demo:de", "--data-adapt", "nan"],
            ["--data-adapt", "nan is not in 0 <= RATE <= 1"],
        ),
        (["--on-leak", "keep"], ["--on-leak", "'keep'", "refuse", "drop"]),
        (["--wandb", "on"], ["--wandb", "'on'", "auto", "online", "offline", "disabled"]),
        (["--data"], ["--data", "expected one argument"]),
        (
            ["--data", "jsonl:x", "--data-root", "/nowhere"],
            ["--data-root", "'/nowhere' does not exist", "give a folder"],
        ),
        (
            ["--data", "jsonl:x", "--data-root", __file__],
            ["--data-root", "test_options.py' is not a folder"],
        ),
        (
            ["--data-root", "/"],
            ["--data-root", "data specs of the kinds jsonl, csv", "none is given", "leave it out"],
        ),
    ],
)
def test_mistakes(capsys, arguments, words):
    err = refusal(capsys, *arguments)
    assert re.search("(?s)train.py: error: .*" + ".*".join(map(re.escape, words)), err)
    assert err.rstrip().endswith("(see train.py --help)")


def test_only_the_first_rank_speaks(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert refusal(capsys, "--epochs", "0") == ""
    with pytest.raises(SystemExit) as exit:
        parse_options(["--help"])
    assert exit.value.code == 0 and capsys.readouterr() == ("", "")


def test_the_record_is_json():
    record = parse_options(["--run-dir", "runs/a", "--deepspeed_config", "own.json"]).record()
    assert json.loads(json.dumps(record)) == record
    assert (record["run_dir"], record["deepspeed_config"], record["steps"]) == (
        "runs/a",
        "own.json",
        None,
    )


@pytest.mark.parametrize(
    "on_gpu, bf16, world_size, name",
    [
        (False, False, 1, "cpu_fp32.json"),
        (False, True, 2, "cpu_fork_fp32.json"),
        (True, True, 8, "zero1_bf16.json"),
        (True, False, 1, "zero1_fp16.json"),
    ],
)
def test_the_default_file_suits_the_hardware(on_gpu, bf16, world_size, name):
    file = default_config(on_gpu, bf16, world_size)
    assert file.name == name and file.is_file()


@pytest.mark.parametrize("world_size", range(2, 17))
def test_the_default_file_runs_with_any_number_of_processes(world_size):
    config, block = read_config(default_config(False, False, world_size), BRANCHES)
    check_world(config, block, world_size, BRANCHES)
    plan = plan_run(
        config, block, world_size, proportional({"image": [2.0] * 3, "text": [1.0] * 3})
    )
    assert plan.graph.layout == "fork" and plan.graph.world_size == world_size


# -- where the tokenizer comes from


@pytest.fixture
def folders(tmp_path):
    """with: holds a tokenizer; without: holds something else."""
    for name, file in (
        ("with", "tokenizer.json"),
        ("words", "vocab.txt"),
        ("without", "config.json"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ([], None),  # trained on the captions
        (
            ["--tokenizer", "someone/tokenizer", "--text-weights", "{with}"],
            "someone/tokenizer",
        ),  # what is asked for wins
        (["--text-weights", "{with}"], "{with}"),
        (["--text-weights", "{words}"], "{words}"),
        (
            ["--text-weights", "{with}", "--text-tower", "{words}"],
            "{with}",
        ),  # the weights' before the architecture's
        (["--text-tower", "{with}"], "{with}"),
        (["--text-weights", "{with}/tokenizer.json"], "{with}"),  # a file beside it
        (["--text-weights", "someone/model"], "someone/model"),  # a Hugging Face id brings its own
        (["--text-weights", "DEFAULT"], "google/bert_uncased_L-4_H-256_A-4"),
        (["--text-weights", "minilm-l6"], "nreimers/MiniLM-L6-H384-uncased"),
        (["--text-tower", "ViT-B/32", "--text-weights", "openai"], "open_clip:ViT-B-32"),
    ],
)
def test_tokenizer_source(folders, arguments, expected):
    names = {name: str(folders / name) for name in ("with", "words", "without")}
    options = parse_options([argument.format(**names) for argument in arguments])
    assert options.tokenizer_source() == (expected and expected.format(**names))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--text-weights", "{without}"], "there is no tokenizer beside these weights"),
        (["--tokenizer", "{without}"], "has no vocabulary"),
    ],
)
def test_a_tokenizer_that_lacks_is_refused(folders, capsys, arguments, words):
    """One trained on the captions would number its words otherwise than pretrained weights."""
    with pytest.raises(SystemExit) as end:
        parse_options([argument.format(without=folders / "without") for argument in arguments])
    said = capsys.readouterr().err
    assert end.value.code == 2 and words in said and "--tokenizer" in said


def test_what_is_here_is_known_by_its_absolute_path(tmp_path, monkeypatch):
    """A run is evaluated from other folders than it was started in."""
    monkeypatch.chdir(tmp_path)
    for name in ("words", "bert-tiny"):
        (tmp_path / name).mkdir()
    (tmp_path / "words" / "vocab.txt").touch()
    plain = parse_options(
        ["--tokenizer", "words", "--text-tower", "bert-tiny", "--text-weights", "google/bert"]
    )
    assert (plain.tokenizer, plain.text_tower, plain.text_weights) == (
        str(tmp_path / "words"),
        "bert-tiny",
        "google/bert",
    )
    assert parse_options(["--text-tower", "./bert-tiny"]).text_tower == str(tmp_path / "bert-tiny")


def test_roots_are_known_by_their_absolute_paths(tmp_path, monkeypatch):
    (tmp_path / "a b").mkdir()
    monkeypatch.chdir(tmp_path)
    options = parse_options(
        [
            "--data",
            "demo",
            "--data",
            "csv:x.csv?root=a b&separator=;",
            "--val-data",
            "tsv:y.tsv?root=a b/",
            "--data-root",
            "a b",
        ]
    )
    assert (
        options.data == ("demo", f"csv:x.csv?root={tmp_path}/a b&separator=;")
        and options.val_data == f"tsv:y.tsv?root={tmp_path}/a b"
    )
    assert options.data_root == (f"{tmp_path}/a b",)
    assert DataOptions.from_record(json.loads(json.dumps(options.record()))) == options.part(
        DataOptions
    )
    assert parse_options(["--val-data", "coco:a:b.json", "--data-root", "."]).data_root == (
        str(tmp_path),
    )
    assert parse_options(["--data", "csv:x.csv"]).data_root is None


# -- flags of branches that the pairs do not have


@pytest.mark.parametrize(
    ("pairs", "arguments", "words"),
    [
        ("palette:text", ["--image-weights", "DEFAULT"], "--image-weights: it is of the image"),
        ("palette:text", ["--image-buckets", "3"], "--image-buckets: it is of the image branch"),
        ("palette:text", ["--import", __file__], "--import: it is of the image branch"),
        ("image:palette", ["--text-weights", "x"], "--text-weights: it is of the text branch"),
        ("image:palette", ["--tokenizer", "x"], "no pair of --pairs image:palette has 'text'"),
        (
            "image:text,palette:text",
            ["--tower", "palette=24", "--tower", "palette=48"],
            "--tower: 'palette' is given twice",
        ),
        (
            "image:text,palette:text",
            ["--loss-weights-every", "7"],
            "--loss-weights-every: 7 is for --loss-weights uncertainty or measured",
        ),
        ("image:text,text:image", [], "a pair is of two different modalities, and is named once"),
    ],
)
def test_a_flag_that_would_do_nothing_is_refused(pairs, arguments, words, capsys, registries):
    with pytest.raises(SystemExit):
        parse_options(["--import-module", "examples.modality", "--pairs", pairs, *arguments])
    assert words in capsys.readouterr().err


def test_images_and_texts_are_one_pair_in_either_order():
    options = parse_options(["--pairs", "text:image", "--fusion", "1"])
    assert options.pairs == "image:text" and options.branches == ("image", "text")
    assert parse_options(["--pairs", "text:image:0.5"]).pairs == "image:text:0.5"
