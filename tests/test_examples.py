"""The other examples of what a user adds without editing a file: a tower, a loss, a data format,
data sets.

`examples/schedule.py` and `examples/modality.py` have tests of their own.
"""

import json

import pytest
from launched import ROOT, metrics, run_to_end, words
from PIL import Image

from data.index.sources import open_source
from launch.config.options import parse_options

MODULES = ["examples.tower", "examples.loss", "examples.format"]
BERT = "bert-tiny:hidden_dropout_prob=0,attention_probs_dropout_prob=0"
FORK = {
    "layout": "fork",
    "stages": {"image": 2, "text": 1},
    "micro_batch_size": {"image": 4, "text": 12},
    "schedule": "replay",
}
SPLITS = {1: {"layout": "merged", "stages": {"merged": 1}, "micro_batch_size": 24}, 3: FORK}
RELATIVE = 1e-5  # fp32, whose sums come in another order


pytestmark = pytest.mark.usefixtures("registries")


def how(branches):
    config = json.loads((ROOT / "ds_configs" / "cpu_fp32.json").read_text())
    config["train_batch_size"] = 24
    config["branches"] |= branches | {"balance": {"strategy": "off"}}
    return config


def test_a_tower_a_loss_and_a_format_of_ones_own_train_split_as_they_do_on_one_rank(tmp_path):
    folder = tmp_path / "named images"
    folder.mkdir()
    for i in range(48):
        Image.new("RGB", (20, 20), (5 * i, 255 - 5 * i, 90)).save(
            folder / f"a_{'dark bright'.split()[i % 2]}_colour_{i}.png"
        )
    flags = ["--import-module", ",".join(MODULES), "--data", f"named:{folder}"]
    flags += ["--loss", "alignment+uniformity", "--text-tower", BERT]
    flags += words("--image-tower mixer:width=16,depth=3 --val-fraction 0.2 --image-size 32")
    flags += words("--embed-dim 16 --workers 0 --max-text-tokens 12 --steps 2")
    seen = {}
    for ranks, branches in SPLITS.items():
        (tmp_path / f"{ranks}.json").write_text(json.dumps(how(branches)))
        run_dir = tmp_path / f"run{ranks}"
        own = ["--deepspeed_config", tmp_path / f"{ranks}.json", "--run-dir", run_dir]
        status, output = run_to_end("train.py", *flags, *own, ranks=ranks)
        assert status == 0, output[-3000:]
        seen[ranks] = metrics(run_dir)
        if ranks == 1:
            status, output = run_to_end("evaluate.py", run_dir)
            assert status == 2 and "or --trust-run for all that it names" in output
            status, output = run_to_end("evaluate.py", run_dir, "--trust-run")
            assert status == 0 and "text → image" in output, output[-3000:]
            status, output = run_to_end("export.py", run_dir, tmp_path / "out", "--trust-run")
            assert status == 2 and "was trained with --loss alignment+uniformity" in output
    for step in (1, 2):
        compared = [
            name for name in seen[1][step] if name == "loss" or name.startswith("grad_norm/")
        ]
        assert {name: seen[3][step][name] for name in compared} == pytest.approx(
            {name: seen[1][step][name] for name in compared}, rel=RELATIVE
        )
    assert seen[1][1]["loss"] != seen[1][2]["loss"]


def test_examples_are_short_and_their_commands_are_understood():
    for file in (ROOT / "examples").glob("*.py"):
        text = file.read_text()
        assert len(text.splitlines()) < 60, file
        command = text.partition("train.py ")[2].partition("\n\n")[0].partition('"""')[0]
        given = command.replace("\\\n", " ").split()
        left = [word for word in given if word not in ("--deepspeed_config", "how.json")]
        options = parse_options(left)
        of_data = options.data[0].startswith(f"python:examples.{file.stem}:")
        assert options.import_module or of_data or file.name == "__init__.py", file


def test_a_data_set_with_boxes_of_ones_own_trains(tmp_path):
    spec = "python:examples.regions:Sheets"
    source = open_source(spec, (("image", "text"), ("image", "region")))
    first, second = source.value("region", 3)[:2]
    assert (first.extent, second.extent) == ((0, 0, 0.5, 0.5), (0.5, 0, 1, 0.5))
    assert second.negatives == first.phrases[:1] != second.phrases[:1]
    (tmp_path / "how.json").write_text(json.dumps(how(SPLITS[1])))
    flags = ["--data", spec, "--pairs", "image:text,region:text", "--text-tower", BERT]
    flags += ["--deepspeed_config", tmp_path / "how.json", "--run-dir", tmp_path / "run"]
    flags += words("--image-tower resnet18:layers=1-1-1-1 --image-size 32 --embed-dim 16 --steps 2")
    flags += words("--workers 0 --max-text-tokens 12 --limit-samples 60")
    status, output = run_to_end("train.py", *flags, ranks=1)
    assert status == 0, output[-3000:]
    steps = metrics(tmp_path / "run")
    assert 0 < steps[2]["contrastive_loss/region_phrase"] < float("inf")


def test_a_loss_that_nobody_registered_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse_options(["--loss", "infonec"])
    assert (
        "there is no loss 'infonec'; there are infonce, sigmoid, milnce; did you mean 'infonce'?"
        in capsys.readouterr().err
    )
