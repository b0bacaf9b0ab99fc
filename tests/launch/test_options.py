"""The command line of train.py: a frozen list of flags, defaults for the demo and for real data,
one message per mistake."""

import argparse
import json
import re
import subprocess
import sys
from importlib.metadata import packages_distributions

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
    f"--{flag.name or name.replace('_', '-')}": (name, flag)
    for kind in GROUPS
    for name, flag in flags_of(kind)
}
SIZES = {"embed_dim": 256, "image_size": 64, "max_text_tokens": 32, "epochs": 12}  # of the demo


def parsed(words=""):
    return parse_options(words.split())


def refusal(capsys, words):
    """What goes to stderr; nothing goes to stdout, and the exit status is 2."""
    with pytest.raises(SystemExit) as exit:
        parsed(words)
    out, err = capsys.readouterr()
    assert exit.value.code == 2 and out == "", words
    return err


def test_every_option_is_a_flag_and_its_help_says_the_default():
    shown = [action for action in make_parser()._actions if action.help is not argparse.SUPPRESS]
    actions = {action.option_strings[-1]: action for action in shown if action.dest != "help"}
    assert list(actions) == list(FLAGS)
    text = make_parser().format_help()
    for written, (name, flag) in FLAGS.items():
        help = actions[written].help
        assert written in text and len(flag.help) > 5 and "(default: " in help
        demo = default_of(name, "")
        if demo != flag.default:
            assert "demo: " in help, written
        for which, value in flag.demos.items():
            assert default_of(name, which) == value and which in help and str(value) in help
        assert default_of(name, "voices") == demo


def test_what_is_trained_may_not_change_when_a_run_goes_on():
    """All other options may; one that is added here is compared with the run's record."""
    compared = """audio_augmentation audio_seconds audio_size audio_tower audio_weights augmentation
    data data_adapt data_floors data_root data_temperature data_weights duplicates embed_dim epochs
    film_clips fusion fusion_heads fusion_scales fusion_width image_buckets image_interpolation
    image_mean image_resize image_resize_mode image_size image_std image_tower
    image_train_resize_mode image_weights imported index_check label_smoothing leak_bits limit_samples loss loss_weights
    loss_weights_every matching_weight max_audio_seconds max_moments max_negatives max_regions max_text_tokens
    on_leak pairs prefixes projection seed steps terms text_tower text_weights tokenizer tower val_data
    val_fraction video_frames video_rate video_tower video_weights views_per_image weights"""
    assert set(parsed().record()) - set(free_options()) == set(compared.split())


def test_help_points_to_the_json_and_keeps_the_launchers_flag_to_itself():
    text = make_parser().format_help()
    assert "ds_configs/README.md" in text and "--local_rank" not in text
    assert max(map(len, text.splitlines())) <= 120
    assert parsed("--local_rank 3") == parsed() == parsed("--local_rank=3")


def test_help_imports_nothing_that_takes_seconds():
    """What a program may import before it answers; its own rooms aside, small packages."""
    rooms = {"common", "data", "engine", "launch", "models"}
    light = {"annotated_types", "pydantic", "pydantic_core", "typing_extensions"}
    light |= {"typing_inspection", "_distutils_hack", *rooms, *sys.stdlib_module_names}
    for program in ("train.py", "evaluate.py", "export.py"):
        words = [sys.executable, "-X", "importtime", program, "--help"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and "--import-module" in done.stdout
        lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
        imported = {line.split("|")[2].strip().split(".")[0] for line in lines[1:]}
        heavy = imported & {each.replace("-", "_") for each in packages_distributions()}
        assert rooms & imported and not heavy - light, program


def test_processes_that_load_data_need_nothing_of_the_program():
    """Python runs its file in their server, too, which then forks them."""
    for program in ("train.py", "evaluate.py"):
        code = f"import runpy, sys; runpy.run_path({program!r}, run_name='__mp_main__')"
        words = [sys.executable, "-c", f"{code}; print(*sys.modules)"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and "common.output" in done.stdout, done.stderr
        assert not {"torch", "deepspeed", "transformers"} & {*done.stdout.split()}, program


def test_the_demo_is_the_default_and_real_data_has_real_towers():
    options = parsed()
    assert options.data == ("demo",) and {key: getattr(options, key) for key in SIZES} == SIZES
    assert (options.resume, options.workers, options.seed) == ("auto", "auto", 0)
    assert (options.wandb, options.val_fraction, options.steps) == ("auto", 0.1, None)
    assert options.part(DataOptions) == DataOptions()
    assert parsed("--data demo:de+ja").image_tower == default_of("image_tower", "")
    options = parsed("--data jsonl:pairs.jsonl")
    assert (options.image_tower, options.text_tower) == ("resnet50", "bert-base-uncased")
    assert (options.embed_dim, options.image_size, options.epochs) == (512, 224, 30)


def test_several_data_sets_come_back_from_a_record():
    words = "--data demo --data coco:a:b.json --data-weights 1,0.5 --val-data csv:v.csv"
    options = parsed(f"{words} --on-leak drop --data-temperature 3 --data-floors 0,0.25")
    assert options.data == ("demo", "coco:a:b.json") and options.data_weights == (1.0, 0.5)
    assert options.image_tower == default_of("image_tower")
    assert (options.val_data, options.on_leak) == ("csv:v.csv", "drop")
    assert (options.data_temperature, options.data_floors) == (3.0, (0.0, 0.25))
    assert (options.data_adapt, parsed(f"{words} --data-adapt 0.2").data_adapt) == (0, 0.2)
    record = json.loads(json.dumps(options.record()))  # as config.json gives it back
    assert DataOptions.from_record(record) == options.part(DataOptions)


def test_an_average_that_is_not_kept_is_not_evaluated():
    parsed("--eval-ema").refuse_beside(BranchesBlock(ema={"decay": 0.99}))
    parsed().refuse_beside(BranchesBlock())
    with pytest.raises(ValueError, match='--eval-ema: .*add "ema"'):
        parsed("--eval-ema").refuse_beside(BranchesBlock())
    with pytest.raises(ValueError, match='--fusion 2: it would not learn; set "head"'):
        parsed("--fusion 2").refuse_beside(BranchesBlock(locked={"image": True, "head": True}))
    parsed("--fusion 2").refuse_beside(BranchesBlock(locked={"image": True}))


def test_the_strongest_of_those_that_say_a_value_wins(tmp_path):
    """--set, the command line, a recipe, the run that goes on, defaults: in this order."""
    options = {"embed_dim": 96, "image_size": 48, "epochs": 5, "seed": 3, "data": ["x"]}
    begun = {"version": __version__, "options": options}
    (tmp_path / "config.json").write_text(json.dumps(begun))
    own = json.loads((ROOT / "ds_configs" / "recipes" / "clip_vit_b32.json").read_text())
    own["recipe"]["flags"] = {"embed-dim": 32, "epochs": 7, "image-size": 40, "fusion": 0}
    (tmp_path / "own.json").write_text(json.dumps(own))
    run, recipe = f"--run-dir {tmp_path}", f"--recipe {tmp_path / 'own.json'}"

    def value(name, *words):
        options = parsed(" ".join(words))
        return getattr(options, name), options.sources[name]

    by_recipe, going_on = f"recipe {tmp_path / 'own.json'}", "the run that goes on"
    assert value("embed_dim") == (256, "default")
    assert value("embed_dim", run) == (96, going_on)
    assert value("embed_dim", run, recipe) == (32, by_recipe)
    assert value("embed_dim", run, recipe, "--embed-dim 16") == (16, "command line")
    assert value("embed_dim", run, recipe, "--embed-dim 16 --set embed_dim=8") == (8, "--set")
    assert value("image_size", run) == (48, going_on)
    # only what has a default of its own kind is kept: the rest must be said again
    assert value("seed", run) == (0, "default") and value("data", run) == (("demo",), "default")
    assert value("epochs", run, recipe) == (7, by_recipe)
    # steps and epochs are two words for one choice
    assert value("epochs", run, recipe, "--steps 4") == (None, "command line")
    assert value("steps", run, recipe, "--set steps=4") == (4, "--set")


MISTAKES = """
--epoch-s 3 | unrecognized arguments | --epoch-s
--epochs 3 --steps 4 | --steps | not allowed with | --epochs
--epochs 0 | --epochs | 0 is below 1
--augmentation flip | --augmentation | 'flip' | crop comes first
--augmentation crop+crop | --augmentation | crop+crop
--matching-weight 2 | --matching-weight | 2.0 is for a run with --fusion
--loss-weights measured | --loss-weights | measured | --fusion
--loss-weights alignment | --loss-weights | need two pairs, and this run has one; give fixed
--loss-weights alignment --fusion 1 | --loss-weights | beside matching, of which no alignment
--fusion 2 --fusion-heads 7 | --fusion-width | 512 | multiple | 7
--steps many | --steps | whole number | 'many'
--max-text-tokens 3 | --max-text-tokens | 3 is below 4
--seed -1 | --seed | -1 is below 0
--workers some | --workers | 'some' | neither 'auto' nor a whole number
--workers -1 | --workers | '-1' | neither 'auto' nor a whole number
--val-fraction 1 | --val-fraction | 1 is not in 0 <= F < 1
--val-fraction -0.1 | --val-fraction | -0.1 is not in 0 <= F < 1
--val-fraction nan | --val-fraction | nan is not in 0 <= F < 1
--keep-checkpoints 0 | --keep-checkpoints | 0 is below 1
--max-bad-fraction 2 | --max-bad-fraction | 2 is not in 0 <= F < 1
--data-weights 1,2 | --data-weights | '1,2' | 1 --data need 1 numbers
TWO --data-weights 1,-2 | --data-weights | 2 --data need 2 numbers >= 0
TWO --data-weights 0,0 | --data-weights | not all 0
--loss siglip | --loss | 'siglip' | infonce | sigmoid
--terms image | --terms | 'image' is no term | A=LOSS
--terms image=infonce:0 | --terms | weight above 0
--terms image+text=infonce | --terms | two branches are a pair | --pairs
--terms image=infonce --loss-weights alignment --pairs image:text,audio:text | alignment | no term of --terms
--pairs audio:text --views-per-image 2 | --views-per-image | no pair of --pairs audio:text has 'image'
--label-smoothing 1 | --label-smoothing | 1 is not in 0 <= F < 1
--loss sigmoid --label-smoothing 0.1 | --label-smoothing | 0.1 is for --loss infonce | leave it out
TWO --data-temperature 0 | --data-temperature | 0 is not above 0
TWO --data-temperature inf | --data-temperature | inf is not above 0
--data-temperature 2 | --data-temperature | 2 | one --data has nothing to share
--data-floors 1 | --data-floors | 1 | one --data has nothing to share
TWO --data-floors 0.5 | --data-floors | 2 --data need 2 numbers from 0 to 1
TWO --data-floors 0.7,0.4 | --data-floors | '0.7,0.4' | together at most 1
TWO --data-floors half,0 | --data-floors | list of numbers | 'half,0'
--data-adapt 0.1 | --data-adapt | 0.1 | one --data has nothing to share
TWO --data-adapt 1.5 | --data-adapt | 1.5 is not in 0 <= RATE <= 1
TWO --data-adapt nan | --data-adapt | nan is not in 0 <= RATE <= 1
--max-audio-seconds 5000 | 5000 is not above 0, or above 1,200, the longest sound
--on-leak keep | --on-leak | 'keep' | refuse | drop
--wandb on | --wandb | 'on' | auto | online | offline | disabled
--data | --data | expected one argument
--data jsonl:x --data-root /nowhere | --data-root | '/nowhere' does not exist | give a folder
--data jsonl:x --data-root train.py | --data-root | train.py' is not a folder
--data-root / | --data-root | data specs of the kinds jsonl, csv | none is given | leave it out
--recipe clip_vit_b23 | --recipe | did you mean 'clip_vit_b32'
--recipe clip_vit_b32 --deepspeed_config x.json | --deepspeed_config | is one too
--recipe ds_configs/zero1_bf16.json | --recipe | holds no "recipe"
--ranks 8 | --ranks | 8 is for --dry-run
--device H100 | --device | H100 is for --dry-run
--set lr | --set | is not written KEY=VALUE
--set =1 | --set | is not written KEY=VALUE
--set a..b=1 | --set | is not written KEY=VALUE
--set a.b=1 a.b=2 | --set | a.b is given twice | a shell has made two words | @FILE
--set a.b={image:1} | --set | {image:1} is no JSON | a shell has taken its quotes | @FILE
--set a.b=[x | --set | is no JSON
--stepz 2 | unrecognized arguments: --stepz 2; did you mean '--steps'?
--data a.tar b.tar c.tar | unrecognized arguments: b.tar c.tar | a shell has made several | @FILE
--set eval_ema=often | --set | it takes true or false
--set seed=-1 | --seed | -1 is below 0
"""


def test_mistakes(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    for case in MISTAKES.strip().splitlines():
        words, *expected = case.split(" | ")
        words = words.replace("TWO", "--data demo --data demo:de")
        err = refusal(capsys, words)
        said = "(?s)train.py: error: .*" + ".*".join(map(re.escape, expected))
        assert re.search(said, err), (case, err)
        assert err.rstrip().endswith("(see train.py --help)"), case


def test_only_the_first_rank_speaks(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert refusal(capsys, "--epochs 0") == ""
    with pytest.raises(SystemExit) as exit:
        parsed("--help")
    assert exit.value.code == 0 and capsys.readouterr() == ("", "")


def test_the_record_is_json():
    record = parsed("--run-dir runs/a --deepspeed_config own.json").record()
    assert json.loads(json.dumps(record)) == record and record["steps"] is None
    assert (record["run_dir"], record["deepspeed_config"]) == ("runs/a", "own.json")


def test_the_default_file_suits_the_hardware_and_any_number_of_processes():
    for on_gpu, bf16, world_size, name in (
        (False, False, 1, "cpu_fp32.json"),
        (False, True, 2, "cpu_fork_fp32.json"),
        (True, True, 8, "zero1_bf16.json"),
        (True, False, 1, "zero1_fp16.json"),
    ):
        file = default_config(on_gpu, bf16, world_size)
        assert file.name == name and file.is_file()
    costs = proportional({"image": [2.0] * 3, "text": [1.0] * 3})
    for world_size in range(2, 17):
        config, block = read_config(default_config(False, False, world_size), BRANCHES)
        check_world(config, block, world_size, BRANCHES)
        graph = plan_run(config, block, world_size, costs).graph
        assert graph.layout == "fork" and graph.world_size == world_size


# -- where the tokenizer comes from


@pytest.fixture
def folders(tmp_path):
    """with, words: hold a tokenizer; without: holds something else."""
    files = {"with": "tokenizer.json", "words": "vocab.txt", "without": "config.json"}
    for name, file in files.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    return {name: str(tmp_path / name) for name in files}


def test_tokenizer_source(folders):
    for words, expected in (
        ("", None),  # trained on the captions
        ("--tokenizer some/one --text-weights {with}", "some/one"),  # what is asked for wins
        ("--text-weights {with}", "{with}"),
        ("--text-weights {words}", "{words}"),
        # the weights' before the architecture's
        ("--text-weights {with} --text-tower {words}", "{with}"),
        ("--text-tower {with}", "{with}"),
        ("--text-weights {with}/tokenizer.json", "{with}"),  # a file beside it
        ("--text-weights someone/model", "someone/model"),  # a Hugging Face id brings its own
        ("--text-weights DEFAULT", "google/bert_uncased_L-4_H-256_A-4"),
        ("--text-weights minilm-l6", "nreimers/MiniLM-L6-H384-uncased"),
        ("--text-tower ViT-B/32 --text-weights openai", "open_clip:ViT-B-32"),
    ):
        found = parsed(words.format(**folders)).tokenizer_source()
        assert found == (expected and expected.format(**folders)), words


def test_a_tokenizer_that_lacks_is_refused(folders, capsys):
    """One trained on the captions would number its words otherwise than pretrained weights."""
    for flag, words in (
        ("--text-weights", "there is no tokenizer beside these weights"),
        ("--tokenizer", "has no vocabulary"),
    ):
        said = refusal(capsys, f"{flag} {folders['without']}")
        assert words in said and "--tokenizer" in said


# -- paths


def test_what_is_here_is_known_by_its_absolute_path(tmp_path, monkeypatch):
    """A run is evaluated from other folders than it was started in."""
    monkeypatch.chdir(tmp_path)
    for name in ("words", "bert-tiny", "a b"):
        (tmp_path / name).mkdir()
    (tmp_path / "words" / "vocab.txt").touch()
    plain = parsed("--tokenizer words --text-tower bert-tiny --text-weights google/bert")
    assert plain.tokenizer == str(tmp_path / "words")
    assert (plain.text_tower, plain.text_weights) == ("bert-tiny", "google/bert")
    assert parsed("--text-tower ./bert-tiny").text_tower == str(tmp_path / "bert-tiny")

    specs = ["--data", "demo", "--data", "csv:x.csv?root=a b&separator=;"]
    specs += ["--val-data", "tsv:y.tsv?root=a b/", "--data-root", "a b"]
    options = parse_options(specs)
    assert options.data == ("demo", f"csv:x.csv?root={tmp_path}/a b&separator=;")
    assert options.val_data == f"tsv:y.tsv?root={tmp_path}/a b"
    assert options.data_root == (f"{tmp_path}/a b",)
    record = json.loads(json.dumps(options.record()))
    assert DataOptions.from_record(record) == options.part(DataOptions)
    elsewhere = parsed("--val-data coco:a:b.json --data-root .")
    assert elsewhere.data_root == (str(tmp_path),)
    assert parsed("--data csv:x.csv").data_root is None


# -- pairs


UNUSED = """
palette:text --image-weights DEFAULT | --image-weights | 'image'
palette:text --image-buckets 3 | --image-buckets | 'image'
palette:text --import train.py | --import: it is of the image branch
image:palette --text-weights x | --text-weights | 'text'
image:palette --tokenizer x | --tokenizer | no pair of --pairs image:palette has 'text'
image:text,palette:text --tower palette=24 --tower palette=48 | 'palette' is given twice
image:text,palette:text --loss-weights-every 7 | 7 is for --loss-weights uncertainty or measured
image:text,text:image | a pair is of two different modalities, and is named once
"""


def test_a_flag_that_would_do_nothing_is_refused(capsys, registries):
    for case in UNUSED.strip().splitlines():
        words, *expected = case.split(" | ")
        said = refusal(capsys, f"--import-module examples.modality --pairs {words}")
        assert all(each in said for each in expected), (case, said)


def test_images_and_texts_are_one_pair_in_either_order():
    options = parsed("--pairs text:image --fusion 1")
    assert options.pairs == "image:text" and options.branches == ("image", "text")
    assert parsed("--pairs text:image:0.5").pairs == "image:text:0.5"
