"""Files that somebody else made: nothing that they name runs as a program unless the command line
says so."""

import argparse
import ast
import inspect
import json
import sys

import pytest
import timm
import torchvision
from forked_script import ROOT
from transformers import BertConfig, ViTConfig

from common import __version__
from data import modules
from data.modules import add_trust_flags, import_named
from launch.config.imported import HERE, fusion_of_export, options_of_export
from launch.config.options import parse_options
from launch.config.recipe_files import MONITORS, RECIPES, RecipeFile
from launch.exporting import modeling_export
from launch.exporting.page import _training
from launch.inference.querying import _searched
from launch.inference.samples import held_out
from launch.inference.trained import Trained, towers_of
from launch.reporting.timelines import prediction
from models.towers.libraries import transformers_audio, transformers_image, transformers_text

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


def test_a_configuration_names_no_code_of_the_hub(tmp_path):
    kinds = {"image": ViTConfig, "text": BertConfig}
    for branch, kind in kinds.items():
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = kind(**sizes, intermediate_size=32, image_size=32).to_dict()
        (tmp_path / branch).mkdir()
        keys = ("attn_implementation", "_attn_implementation")
        text = json.dumps({**config, **dict.fromkeys(keys, "organisation/kernel")})
        (tmp_path / branch / "config.json").write_text(text, encoding="utf-8")
    names = {"image_tower": f"hf:{tmp_path}/image", "text_tower": f"{tmp_path}/text"}
    sizes = {"image_size": 32, "max_text_tokens": 8, "embed_dim": 16, "fusion": 0}
    assert len(towers_of({**TOWERS, **names, **sizes}, None)) == 2


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


def test_a_recipe_cannot_set_what_only_the_command_line_may(tmp_path):
    text = next(RECIPES.glob("*.json")).read_text(encoding="utf-8")
    for flag in ("import-module", "data", "run-dir", "set", "deepspeed_config"):
        written = json.loads(text)
        written["recipe"]["flags"][flag] = "trap_module"
        (tmp_path / "recipe.json").write_text(json.dumps(written), encoding="utf-8")
        with pytest.raises(ValueError, match=f"cannot set --{flag}"):
            RecipeFile.read(tmp_path / "recipe.json")
    places = {
        "tensorboard": {"enabled": True, "output_path": str(tmp_path)},
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path)},
        "comet": {"enabled": True, "api_key": "theirs", "workspace": "theirs"},
        "wandb": {"team": "theirs"},
    }
    assert places.keys() == set(MONITORS)
    for name, block in places.items():
        (tmp_path / "recipe.json").write_text(json.dumps({**json.loads(text), name: block}))
        with pytest.raises(ValueError, match=f"a recipe cannot set {name}, .*--set"):
            RecipeFile.read(tmp_path / "recipe.json")


MODEL = {**TOWERS, "text_tower": f"{HERE}/text", "tokenizer": HERE}


@pytest.fixture
def export(tmp_path):
    """Writes the record of an export; returns its folder."""
    folder = tmp_path / "export"
    (folder / "text").mkdir(parents=True)
    (folder / "vocab.txt").write_text("a\nb\n")

    def write(fusion=(), **options):
        record = {"format": 1, "options": {**MODEL, **options}, "fusion": dict(fusion)}
        (folder / "wye.json").write_text(json.dumps(record), encoding="utf-8")
        return folder

    return write


def test_an_export_decides_nothing_but_its_model(trap, export, tmp_path, caplog):
    """What else it says is named and passed over, so that those of another program can be used."""
    others = {
        "data": ["python:trap_module:Items"],
        "val_data": "python:trap_module:Items",
        "import_module": ["trap_module"],
        "run_dir": str(tmp_path / "run"),
        "deepspeed_config": str(tmp_path / "mine.json"),
        "wandb_project": "theirs",
        "seed": 5,
        "colour": "red",
    }
    folder = export({"fusion": 1, "run_dir": str(tmp_path)}, **others)
    plain = parse_options(["--import", str(export())])
    assert parse_options(["--import", str(export(**others))]) == plain
    assert all(name in caplog.text for name in others) and not trap.exists()
    export({"fusion": 1, "run_dir": str(tmp_path)}, **others)
    assert fusion_of_export(folder) == {"fusion": 1}


def test_what_an_export_says_is_read_as_on_the_command_line(export):
    for name, value in (
        ("embed_dim", "wide"),
        ("embed_dim", {"a": 1}),
        ("image_size", 0),
        ("image_mean", [1, "a", 2]),
        ("image_interpolation", "trap_module"),
        ("pairs", "image"),
        ("text_tower", None),
    ):
        with pytest.raises(ValueError, match=f"options.{name} is .*export again"):
            options_of_export(export(**{name: value}))


def test_towers_and_tokenizers_of_an_export_lie_in_it(trap, export, tmp_path):
    places = ["/etc", "~", "..", "./text", f"{HERE}/../other", f"{HERE}/link", f"{HERE}s", "a/b"]
    places += ["hf:/etc:pool=cls", "hf:organisation/model", "open_clip:/etc", "open_clip:.."]
    places += ["open_clip:hf-hub:organisation/model", "open_clip:local-dir:x", "python:trap_module"]
    (export() / "link").symlink_to(tmp_path)
    for name in ("tokenizer", "text_tower", "image_tower", "audio_tower"):
        for place in places:
            with pytest.raises(ValueError, match=f"options.{name} is .*lie in the folder"):
                options_of_export(export(**{name: place}))
                pytest.fail(f"{name} {place}")
    assert not trap.exists()


# -- modeling_export.py, which an export of a stranger is opened with


@pytest.fixture
def custom(tmp_path, trap):
    """A folder whose configuration, tokenizer and extractor ask for the code beside them."""
    folder = tmp_path / "custom"
    folder.mkdir()
    kinds = {"AutoConfig": "Config", "AutoModel": "Model", "AutoFeatureExtractor": "Extractor"}
    map_of = {name: f"trap.{kind}" for name, kind in kinds.items()}
    (folder / "vocab.txt").write_text("a\nb\n")
    (folder / "trap.py").write_text((tmp_path / "trap_module.py").read_text())
    config = {"model_type": "trap", "auto_map": map_of, "feature_extractor_type": "Trap"}
    for name in ("config.json", "preprocessor_config.json"):
        (folder / name).write_text(json.dumps(config))
    tokens = {"tokenizer_class": "Trap", "auto_map": {"AutoTokenizer": ["trap.Slow", "trap.Fast"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    return folder


TRUSTS = {"trust_remote_code": True}
THEIRS = {  # of a tower -> what it names that it cannot
    "architecture names 'AutoModel'": {"architecture": "AutoModel", "arguments": TRUSTS},
    "arguments names 'trust_remote_code'": {"architecture": "BertModel", "arguments": TRUSTS},
    "architecture names 'local-dir:/etc'": {"library": "timm", "architecture": "local-dir:/etc"},
    "arguments names 'checkpoint_path'": {
        **{"library": "timm", "architecture": "resnet18"},
        "arguments": {"checkpoint_path": "/etc/passwd"},
    },
    "arguments names 'weights'": {
        **{"library": "torchvision", "architecture": "resnet18"},
        "arguments": {"weights": "DEFAULT"},
    },
    "architecture names 'fcn_resnet50'": {"library": "torchvision", "architecture": "fcn_resnet50"},
    "block names 'Weights'": {
        **{"library": "torchvision", "architecture": "ResNet"},
        "arguments": {"block": "Weights"},
    },
    "architecture names 'create_model'": {
        **{"library": "open_clip", "architecture": "create_model"},
        "arguments": {"vision_cfg": {}, "text_cfg": {}},
    },
    "text_cfg names 'organisation/model'": {
        **{"library": "open_clip", "architecture": "CustomTextCLIP"},
        "arguments": {"vision_cfg": {}, "text_cfg": {"hf_model_name": "organisation/model"}},
    },
    "vision_cfg names 'hf-hub:'": {
        **{"library": "open_clip", "architecture": "CLIP"},
        "arguments": {"vision_cfg": {"timm_model_name": "hf-hub:a/b"}, "text_cfg": {}},
    },
    "replaced names 'Module'": {
        **{"library": "timm", "architecture": "resnet18"},
        "replaced": {"fc": "Module"},
    },
}


def test_the_loader_of_exports_makes_no_class_that_the_record_alone_names(custom, trap):
    for message, written in THEIRS.items():
        record = {"library": "transformers", "unused": [], **written}
        with pytest.raises(ValueError, match=message):
            modeling_export._module(custom, record, {})
    record = {"model": None, "file": "model.safetensors", "towers": {}}
    for message, written in {
        "model names 'AutoModel'": {"model": "AutoModel"},
        "model names 'pipeline'": {"model": "pipeline"},
        "trust_remote_code": {"model": "CLIPModel"},  # of the tokenizer
    }.items():
        (custom / "wye.json").write_text(json.dumps({"loading": record | written, "options": {}}))
        with pytest.raises(ValueError, match=message):
            modeling_export.load(custom)
    with pytest.raises(ValueError, match="trust_remote_code"):
        modeling_export._config(custom)
    assert not trap.exists()


def test_the_loader_of_exports_calls_nothing_that_the_record_alone_names(custom, trap, monkeypatch):
    model = modeling_export.ExportedModel
    monkeypatch.setattr(modeling_export, "_whole_model", lambda *_: (None, None))
    for message, written in {
        "file names '../model.safetensors'": {"file": "../model.safetensors"},
        "towers names '../image'": {"towers": {"../image": {}}},
    }.items():
        record = {"model": None, "file": modeling_export.FILES[0], "towers": {}, **written}
        monkeypatch.setattr(modeling_export, "load_file", lambda _: {})
        with pytest.raises(ValueError, match=message):
            model(custom, record, {})
    tower = modeling_export.Tower.__new__(modeling_export.Tower)
    for key, value in (("method", "save_pretrained"), ("output", "__class__")):
        tower.__dict__.update(record={key: value}, module=lambda values: values, _modules={})
        tower.__dict__["module"].__dict__["forward"] = lambda values: values
        with pytest.raises(ValueError, match=f"{key} names '{value}'"):
            tower.forward(custom, None)
    (custom / "audio").symlink_to(custom)
    sounds = {"sounds": {"num_samples": 1, "arguments": TRUSTS}}
    opened = argparse.Namespace(record=sounds, folder=custom)
    with pytest.raises(ValueError, match="arguments names 'trust_remote_code'"):
        model.input_features(opened, "sound.wav")
    sounds["sounds"]["arguments"] = {}
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.input_features(opened, "sound.wav")
    assert not trap.exists()


def test_the_lists_of_the_loader_are_those_of_the_libraries():
    families = (transformers_audio.FAMILIES, transformers_image.FAMILIES)
    families += (transformers_text.FAMILIES,)
    towers = {family.model for each in families for family in each.values()}
    assert set(modeling_export.TOWERS) == towers
    functions = [timm.create_model, timm.models.build_model_with_cfg]
    functions += [
        torchvision.models.get_model_builder(name)
        for name in torchvision.models.list_models(module=torchvision.models)
    ]
    own = {name for each in functions for name in inspect.signature(each).parameters} - {"kwargs"}
    assert own <= set(modeling_export.LOADING)


# what a call has to say -> how the names of such calls end
SAYS = {
    ("trust_remote_code", False): (
        *("AutoConfig.from_pretrained", "AutoTokenizer.from_pretrained"),
        *("AutoModel.from_pretrained", "AutoFeatureExtractor.from_pretrained"),
    ),
    ("weights_only", True): ("torch.load",),
}


def test_every_call_that_could_run_code_of_a_file_says_that_it_does_not():
    found = set()
    for folder in ("common", "data", "models", "engine", "launch"):
        for file in (ROOT / folder).rglob("*.py"):
            for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
                for (key, value), ends in SAYS.items():
                    if name.endswith(ends):
                        given = {k.arg: getattr(k.value, "value", None) for k in call.keywords}
                        assert given.get(key, None) is value, f"{file}:{call.lineno}: {name}"
                        found.add(key)
    assert found == {key for key, _ in SAYS}


# -- pages


def test_a_page_of_an_export_shows_what_a_run_says_as_text(tmp_path):
    """Of the run's options, command and evaluations."""
    from markdown_it import MarkdownIt

    hostile = "a`b``c\n```\n# x\n<script>alert(1)</script> | [l](http://e) **b** \x1b[2J"
    checkpoint = tmp_path / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True)
    figures = {f"{hostile}/image_to_text_R@{k}": 0.5 for k in (1, 5, 10)}
    found = {"num_samples": {hostile: 30}, **figures}
    (tmp_path / "evaluation-step-00000002.json").write_text(json.dumps(found))
    record = {
        "options": {"data": [hostile, hostile], "val_data": hostile, "imported": hostile},
        "batches": {"image": {"replicas": 1, "micro_batch_size": 2, "num_micro_batches": 1}},
        "total_steps": 2,
        "command": hostile,
        "version": __version__,
    }
    (tmp_path / "config.json").write_text(json.dumps(record))
    pages = _training(Trained(record, checkpoint, 2, None, (), ()), averaged=False)
    page = "\n\n".join(pages)
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(page)
    kinds = [token.type for token in tokens]
    assert kinds.count("heading_open") == kinds.count("table_open") == 2
    assert kinds.count("fence") == 1 and "html_block" not in kinds and page.count("alert(1)") == 6
    inner = {child.type for token in tokens for child in token.children or []}
    assert inner == {"text", "code_inline"} and "\x1b" not in page
