"""Files that somebody else made: nothing that they name runs as a program unless the command line
says so."""

import argparse
import json
import sys

import pytest

from data import modules
from data.modules import add_trust_flags, import_named
from launch.config.recipe_files import RECIPES, RecipeFile
from launch.inference.querying import _searched
from launch.inference.samples import held_out
from launch.inference.trained import Trained, towers_of
from launch.reporting.timelines import prediction

TOWERS = {
    "image_tower": "resnet18:layers=1-1-1-1",
    "loss": "infonce",
    "text_tower": "bert-tiny",
}


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A module in the current folder that leaves a mark when it is imported; the mark."""
    mark = tmp_path / "ran"
    (tmp_path / "trap_module.py").write_text(
        f"open({str(mark)!r}, 'w').close()\nclass Items(list):\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(modules, "_named", set())
    yield mark
    sys.modules.pop("trap_module", None)


def trained(options) -> Trained:
    return Trained({"options": options, "tokenizer": None}, None, 0, None, (), ())


def test_modules_that_a_record_names_are_not_imported(trap, tmp_path):
    named = {"import_module": ["trap_module"], "data": ["python:trap_module:Items"]}
    given = argparse.Namespace(val_data=None, run_dir=tmp_path)
    calls = {
        "towers": lambda: towers_of({**TOWERS, **named, "run_dir": tmp_path}, None),
        "data": lambda: held_out(given, trained({**TOWERS, "data": named["data"]})),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match="--import-module trap_module, or --trust-run"):
            call()
        assert not trap.exists(), name


def test_a_timeline_of_a_run_imports_nothing(trap, tmp_path):
    record = {"options": {"import_module": ["trap_module"]}, "schedule": "mine"}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "costs.json").write_text("{}")
    (tmp_path / "run" / "config.json").write_text(json.dumps(record))
    _, reason = prediction(tmp_path / "run", record)
    assert reason and "launch.tools.timeline" in reason
    assert reason is not None and "trap_module" in reason
    assert not trap.exists()


@pytest.mark.parametrize("words", [["--import-module", "trap_module"], ["--trust-run"]])
def test_one_flag_allows_them(trap, words, tmp_path):
    parser = argparse.ArgumentParser()
    add_trust_flags(parser)
    import_named(parser.parse_args(words))
    modules.import_recorded(["trap_module"], tmp_path)
    assert trap.exists()


def test_embeddings_name_their_data_and_it_is_not_opened(trap, tmp_path, monkeypatch):
    import numpy as np

    found = np.zeros((1, 2)), [], ["python:trap_module:Items"]
    monkeypatch.setattr("launch.inference.querying.read_embeddings", lambda *_: found)
    given = argparse.Namespace(embeddings=tmp_path, val_data=None, picture=tmp_path / "a.png")
    with pytest.raises(ValueError, match="trap_module"):
        _searched(given, None, {}, "image")
    assert not trap.exists()


@pytest.mark.parametrize("flag", ["import-module", "data", "run-dir", "set", "deepspeed_config"])
def test_a_recipe_cannot_set_what_only_the_command_line_may(tmp_path, flag):
    written = json.loads(next(RECIPES.glob("*.json")).read_text(encoding="utf-8"))
    written["recipe"]["flags"][flag] = "trap_module"
    (tmp_path / "recipe.json").write_text(json.dumps(written), encoding="utf-8")
    with pytest.raises(ValueError, match=f"cannot set --{flag}"):
        RecipeFile.read(tmp_path / "recipe.json")
