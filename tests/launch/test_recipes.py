"""The recipe files: the planner says of each what it says itself, and each is dry-run on a small
stand-in for its data and weights."""

import importlib.util
import itertools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from launched import ROOT, write_pairs
from transformers import CLIPConfig, CLIPModel

sys.path.insert(0, str(ROOT / "tests/data"))
from bad_audio import tone, wav  # noqa: E402
from bad_films import film  # noqa: E402

from common.sizes import GIB
from data.modalities.tokenizer import train_tokenizer
from engine.objective import scalars_of
from engine.planning.devices import find_device
from engine.planning.planner import plan_run
from launch.config.configuration import Abilities, read_configuration
from launch.config.options import parse_options
from launch.config.recipe_files import RECIPES, RecipeFile
from launch.inference.trained import with_named_towers
from launch.modalities import Vocabulary, tower_of
from launch.objective import losses_of, pairs_of
from launch.setup.dry_run import dry_run
from launch.setup.estimates import estimated_costs
from launch.terminal.tables import duration

FILES = sorted(RECIPES.glob("*.json"))
ONE_OF_EACH_KIND = {"clip_vit_b32", "finetune_regions", "image_text_audio", "image_text_video"}
EVERY_FILE = [
    pytest.param(
        file, marks=[pytest.mark.all("more recipes")] * (file.stem not in ONE_OF_EACH_KIND)
    )
    for file in FILES
]
PAGE = (RECIPES / "README.md").read_text(encoding="utf-8").splitlines()
ROWS = [row for row in PAGE if row.startswith("| `")]
FILMS = importlib.util.find_spec("av") is not None
NUMBER = 120  # samples of a stand-in
BATCH, MOST_RANKS = 64, 8  # of a dry run


def storeless(tensors, file):
    """A file of torch.save in which each tensor is one number: names and shapes as published."""
    torch.save({name: torch.zeros(()).expand(shape) for name, shape in tensors.items()}, file)


@pytest.fixture(scope="module")
def clip(module_folder):
    """In place of openai/clip-vit-base-patch32, whose sizes are the defaults of CLIPConfig."""
    return stored_clip(module_folder("clip"), 32)


@pytest.fixture(scope="module")
def clip16(module_folder):
    return stored_clip(module_folder("clip16"), 16)


def stored_clip(folder, patch_size):
    config = CLIPConfig(architectures=["CLIPModel"], vision_config={"patch_size": patch_size})
    with torch.device("meta"):
        model = CLIPModel(config)
    config.save_pretrained(folder)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    storeless(shapes, folder / "pytorch_model.bin")
    train_tokenizer(["a red apple", "two dogs"]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def vit(module_folder):
    """In place of torchvision's weights of a ViT-B/16."""
    import torchvision

    file = module_folder("vit") / "vit_b_16.pth"
    with torch.device("meta"):
        model = torchvision.models.vit_b_16()
    storeless({name: tensor.shape for name, tensor in model.state_dict().items()}, file)
    return file


@pytest.fixture(scope="module")
def data(module_folder):
    """Emoji with a sound, a region and a film each."""
    folder = module_folder("data")
    write_pairs(folder, NUMBER)
    file = folder / "pairs.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for i, row in enumerate(rows):
        row["audio_path"] = f"{i}.wav"
        row["regions"] = [{"box": [0, 0, 1, 1], "unit": "relative", "text": row["text"]}]
        (folder / row["audio_path"]).write_bytes(wav(tone(0.3, 200 + i)))
        row["video_path"] = f"{i}.mp4"
        (folder / row["video_path"]).write_bytes(film(number=4 + i) if FILMS else b"")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"jsonl:{file}"


@pytest.fixture
def stand_ins(request):
    """The flags in place of what a recipe downloads."""

    def of(recipe):
        own = {
            "openai/clip-vit-base-patch32": "clip",
            "openai/clip-vit-base-patch16": "clip16",
            "DEFAULT": "vit",
        }
        used = [(flag, own[name]) for flag, name in recipe.flags.items() if name in own]
        words = [(f"--{flag}", str(request.getfixturevalue(name))) for flag, name in used]
        return list(itertools.chain(*words))

    return of


def planned(file, recipe, flags):
    """The plan for the towers with a vocabulary of their own, at full size."""
    options = parse_options(["--recipe", str(file), "--data", "jsonl:none.jsonl", *flags])
    options = with_named_towers(options, None)
    _, config, block, _ = read_configuration(options, recipe.ranks, Abilities("cuda"))
    pairs = pairs_of(options.pairs, losses_of(options.pairs, options.loss))
    towers = [
        tower_of(branch, vars(options), Vocabulary(None), scalars_of(pairs, branch), None)
        for branch in options.branches
    ]
    costs = estimated_costs(
        towers,
        config,
        options.embed_dim,
        find_device(recipe.device),
        compared=[pair.branches for pair in pairs],
    )
    return plan_run(config, block, recipe.ranks, costs)


@pytest.mark.parametrize("file", EVERY_FILE, ids=lambda file: file.stem)
def test_the_planner_says_of_a_recipe_what_the_file_says(file, stand_ins):
    recipe = RecipeFile.read(file)
    plan = planned(file, recipe, stand_ins(recipe))
    peak = max(stage.peak_bytes for stage in plan.predicted) / GIB
    predicted = f"{duration(plan.predicted_step_s)} a step, at most {peak:.1f} GiB a rank"
    assert (plan.describe(), predicted) == (recipe.plan, recipe.predicted)


@pytest.mark.parametrize("file", EVERY_FILE, ids=lambda file: file.stem)
def test_a_recipe_is_dry_run(file, data, stand_ins, tmp_path, monkeypatch, capsys):
    """With all its flags and keys, but for a batch and ranks that a small stand-in can fill."""
    monkeypatch.chdir(tmp_path)
    written = json.loads(file.read_text()) | {"train_batch_size": BATCH}
    (tmp_path / file.name).write_text(json.dumps(written))
    recipe = RecipeFile.read(file)
    if "audio" in recipe.flags.get("pairs", ""):
        pytest.importorskip("soundfile", reason="pip install -r requirements-audio.txt")
    if "video" in recipe.flags.get("pairs", "") and not FILMS:
        pytest.skip("pip install -r requirements-audio.txt")
    words = ["--recipe", tmp_path / file.name, "--data", data, "--val-fraction", 0.2]
    words += ["--dry-run", "--ranks", min(recipe.ranks, MOST_RANKS), *stand_ins(recipe)]
    assert dry_run(parse_options(list(map(str, words)))) == 0
    said = capsys.readouterr().out
    assert "samples to train on" in said and f"steps of {BATCH} samples" in said, said
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_the_arithmetic_of_a_recipe_adds_up_and_the_page_has_what_is_predicted():
    """Each `a ÷ b a step = c` and `a × b = c` in it."""
    cells = [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in ROWS]
    page = {name: rest for name, *rest in (row for row in cells if len(row) == 4)}
    assert list(page) == [file.stem for file in FILES]
    for file in FILES:
        recipe = RecipeFile.read(file)
        task, _, predicted = page[file.stem]
        assert (task, predicted) == (recipe.task, recipe.predicted)
        text = " ".join(recipe.arithmetic).replace(",", "")
        batch = json.loads(file.read_text())["train_batch_size"]
        step = r"(\d+)(?: training samples)? ÷ (\d+) a step = (\d+) steps an epoch"
        steps = re.findall(step, text)
        for samples, size, number in steps:
            assert int(size) == batch and int(samples) // batch == int(number), file
        epochs = re.findall(r"× (\d+) epochs = (\d+) steps", text)
        for (_, _, number), (times, total) in zip(steps, epochs, strict=True):
            assert int(times) == recipe.flags["epochs"], file
            assert int(number) * int(times) == int(total), file
        assert len(epochs) <= 1
        for ranks, share in re.findall(r"÷ (\d+) ranks = (\d+) a rank", text):
            assert int(ranks) == recipe.ranks and batch // recipe.ranks == int(share), file


def test_flags_on_the_command_line_take_precedence():
    options = parse_options(["--recipe", "clip_vit_b32", "--data", "jsonl:x", "--steps", "9"])
    assert (options.steps, options.epochs, options.max_text_tokens) == (9, None, 77)
    assert options.deepspeed_config == RECIPES / "clip_vit_b32.json"
    assert options == replace(options, ranks=None, device=None)
    options = parse_options(["--recipe=clip_vit_b32", "--epochs", "2", "--dry-run"])
    assert (options.epochs, options.ranks, options.device) == (2, 8, "A100")


def test_a_misspelt_key_of_a_recipe_is_answered_with_the_nearest(tmp_path):
    written = json.loads(FILES[0].read_text())
    written["recipe"]["flag"] = written["recipe"].pop("flags")
    (tmp_path / "mine.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match="'recipe.flag'; did you mean 'flags'"):
        RecipeFile.read(Path(tmp_path / "mine.json"))


@pytest.mark.parametrize("flag", ["data", "run-dir", "import-module", "token"])
def test_a_recipe_sets_what_trains_and_nothing_else(flag, tmp_path):
    """It may come from somebody else: it says neither what is read nor what is run or written."""
    written = json.loads(FILES[0].read_text())
    written["recipe"]["flags"][flag] = "theirs"
    (tmp_path / "mine.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match=f"mine.json: .*a recipe cannot set --{flag}; give it on"):
        RecipeFile.read(tmp_path / "mine.json")
