"""The recipe files: the planner says of each what it says itself, and each is dry-run on a small
stand-in for its data and weights."""

import csv
import io
import json
import re
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from launched import ROOT, write_pairs
from transformers import CLIPConfig, CLIPModel

sys.path.insert(0, str(ROOT / "tests/data"))
from bad_audio import tone, wav  # noqa: E402

from data.index.sources import open_source
from data.modalities.tokenizer import train_tokenizer
from engine.objective import scalars_of
from engine.planning.devices import find_device
from engine.planning.planner import GIB, plan_run
from launch.config.configuration import Abilities, read_configuration
from launch.config.options import parse_options
from launch.config.recipe_files import RECIPES, RecipeFile
from launch.inference.trained import with_named_towers
from launch.modalities import Vocabulary, tower_of
from launch.objective import pairs_of
from launch.setup.dry_run import dry_run
from launch.setup.estimates import estimated_costs
from launch.terminal.tables import duration
from models.losses import build_loss

FILES = sorted(RECIPES.glob("*.json"))
PAGE = (RECIPES / "README.md").read_text(encoding="utf-8")
NUMBER = 120  # samples of a stand-in
BATCH, MOST_RANKS = 64, 8  # of a dry run


def storeless(tensors, file):
    """A file of torch.save in which each tensor is one number: names and shapes as published."""
    torch.save({name: torch.zeros(()).expand(shape) for name, shape in tensors.items()}, file)


@pytest.fixture(scope="module")
def clip(module_folder):
    """In place of openai/clip-vit-base-patch32, whose sizes are the defaults of CLIPConfig."""
    folder = module_folder("clip")
    config = CLIPConfig(architectures=["CLIPModel"])
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
    """By kind: the same emoji in each format."""
    folder = module_folder("data")
    jsonl = write_pairs(folder, NUMBER)
    source = open_source(jsonl)
    with (folder / "pairs.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["filepath", "title"])
        for line in map(json.loads, (folder / "pairs.jsonl").read_text().splitlines()):
            writer.writerow([line["image_path"], line["text"][0]])
    with tarfile.open(folder / "000.tar", "w") as tar:
        for i in range(len(source)):
            for name, content in (
                ("png", source.value("image", i)),
                ("txt", source.captions(i)[0].encode()),
                ("wav", wav(tone(0.3, 200 + i))),
            ):
                member = tarfile.TarInfo(f"{i:04d}.{name}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return {
        "jsonl": jsonl,
        "csv": f"csv:{folder / 'pairs.csv'}",
        "webdataset": f"webdataset:{folder / '000.tar'}",
    }


@pytest.fixture
def stand_ins(request):
    """The flags in place of what a recipe downloads."""

    def of(recipe):
        words = []
        if "import" in recipe.flags:
            words += ["--import", str(request.getfixturevalue("clip"))]
        if "image-weights" in recipe.flags:
            words += ["--image-weights", str(request.getfixturevalue("vit"))]
        return words

    return of


def test_the_sizes_in_place_of_openais_are_its():
    """A published figure: 151.3 million parameters."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in CLIPModel(CLIPConfig()).parameters())
    assert round(parameters / 1e6, 1) == 151.3


def planned(file, recipe, flags):
    """The plan for the towers with a vocabulary of their own, at full size."""
    options = parse_options(["--recipe", str(file), "--data", "jsonl:none.jsonl", *flags])
    options = with_named_towers(options, None)
    _, config, block, _ = read_configuration(options, recipe.ranks, Abilities("cuda"))
    pairs = pairs_of(options.pairs, build_loss(options.loss))
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


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_planner_says_of_a_recipe_what_the_file_says(file, stand_ins):
    recipe = RecipeFile.read(file)
    plan = planned(file, recipe, stand_ins(recipe))
    peak = max(stage.peak_bytes for stage in plan.predicted) / GIB
    predicted = f"{duration(plan.predicted_step_s)} a step, at most {peak:.1f} GiB a rank"
    assert (plan.describe(), predicted) == (recipe.plan, recipe.predicted)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_is_dry_run(file, data, stand_ins, tmp_path, monkeypatch, capsys):
    """With all its flags and keys, but for a batch and ranks that a small stand-in can fill."""
    monkeypatch.chdir(tmp_path)
    written = json.loads(file.read_text()) | {"train_batch_size": BATCH}
    (tmp_path / file.name).write_text(json.dumps(written))
    recipe = RecipeFile.read(file)
    if "audio" in recipe.flags.get("pairs", ""):
        pytest.importorskip("soundfile", reason="pip install -r requirements-audio.txt")
    kind = next((kind for kind in ("csv", "webdataset") if f"{kind}:" in recipe.needs), "jsonl")
    words = ["--recipe", tmp_path / file.name, "--data", data[kind], "--val-fraction", 0.2]
    words += ["--dry-run", "--ranks", min(recipe.ranks, MOST_RANKS), *stand_ins(recipe)]
    assert dry_run(parse_options(list(map(str, words)))) == 0
    said = capsys.readouterr().out
    assert "samples to train on" in said and f"steps of {BATCH} samples" in said, said
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_arithmetic_of_a_recipe_adds_up(file):
    """Each `a ÷ b a step = c` and `a × b = c` in it."""
    recipe = RecipeFile.read(file)
    text = " ".join(recipe.arithmetic).replace(",", "")
    batch = json.loads(file.read_text())["train_batch_size"]
    steps = re.findall(r"(\d+)(?: training samples)? ÷ (\d+) a step = (\d+) steps an epoch", text)
    for samples, size, number in steps:
        assert int(size) == batch and int(samples) // batch == int(number)
    epochs = re.findall(r"× (\d+) epochs = (\d+) steps", text)
    for (_, _, number), (times, total) in zip(steps, epochs, strict=True):
        assert int(times) == recipe.flags["epochs"] and int(number) * int(times) == int(total)
    assert len(epochs) <= 1
    for ranks, share in re.findall(r"÷ (\d+) ranks = (\d+) a rank", text):
        assert int(ranks) == recipe.ranks and batch // recipe.ranks == int(share)


def test_the_page_has_every_recipe_and_what_is_predicted():
    rows = {
        cells[0]: cells[1:]
        for cells in (
            [cell.strip().strip("`") for cell in line.strip("|").split("|")]
            for line in PAGE.splitlines()
            if line.startswith("| `")
        )
        if len(cells) == 4
    }
    assert list(rows) == [file.stem for file in FILES]
    for file in FILES:
        recipe = RecipeFile.read(file)
        task, _, predicted = rows[file.stem]
        assert (task, predicted) == (recipe.task, recipe.predicted)


def test_flags_on_the_command_line_take_precedence():
    options = parse_options(["--recipe", "clip_vit_b32", "--data", "jsonl:x", "--steps", "9"])
    assert (options.steps, options.epochs, options.max_text_tokens) == (9, None, 77)
    assert options.deepspeed_config == RECIPES / "clip_vit_b32.json"
    assert options == replace(options, ranks=None, device=None)
    options = parse_options(["--recipe=clip_vit_b32", "--epochs", "2", "--dry-run"])
    assert (options.epochs, options.ranks, options.device) == (2, 8, "A100")


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--recipe", "clip_vit_b23"], "did you mean 'clip_vit_b32'"),
        (["--recipe", "clip_vit_b32", "--deepspeed_config", "x.json"], "is one too"),
        (["--recipe", str(RECIPES.parent / "zero1_bf16.json")], 'holds no "recipe"'),
    ],
)
def test_a_wrong_recipe_is_answered(flags, words, capsys):
    with pytest.raises(SystemExit) as end:
        parse_options(flags)
    assert end.value.code == 2 and words in capsys.readouterr().err


def test_a_misspelt_key_of_a_recipe_is_answered_with_the_nearest(tmp_path):
    written = json.loads(FILES[0].read_text())
    written["recipe"]["flag"] = written["recipe"].pop("flags")
    (tmp_path / "mine.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match="'recipe.flag'; did you mean 'flags'"):
        RecipeFile.read(Path(tmp_path / "mine.json"))
