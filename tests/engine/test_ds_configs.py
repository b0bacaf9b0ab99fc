"""Every file of ds_configs/ trains as it stands, small towers on two ranks without a GPU; and a
slip in any of its blocks is answered."""

import copy
import json
from pathlib import Path

import pytest
from config_cases import train_by_file
from cost_models import BRANCHES
from ranks import about, run_cases

from engine.config.reading import check_config, read_config
from launch.config.blocks import READERS

FILES = sorted((Path(__file__).parents[2] / "ds_configs").glob("*.json"))
DTYPES = {"fp16": "torch.float16", "bf16": "torch.bfloat16", "fp32": "torch.float32"}


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_file_trains(ranks):
    files = [file for file in FILES if (file.name == "pipeline_bf16.json") == (ranks == 3)]
    trained = run_cases(ranks, train_by_file, [(str(file), 6) for file in files])
    for file, results in zip(files, trained, strict=True):
        with about(file.name):
            check_training(file, results)


def check_training(file, results):
    losses = results[0]["losses"]
    precision = next(p for p in DTYPES if p in file.stem)
    assert all(result["losses"] == losses for result in results)
    assert results[0]["dtype"] == DTYPES[precision]
    assert losses[-1] < losses[0], "the batch it sees again and again is learned"
    rates, previewed = results[0]["rates"], results[0]["previewed"]
    assert len(set(rates)) > 2, "the schedule of the file moves the rate"
    assert "betas {:g} and {:g}, eps {:g}".format(*results[0]["settings"]) in previewed
    assert f"lr {rates[0]:.4g} at step 1" in previewed and f"{rates[-1]:.4g} at step 6" in previewed
    assert f"{max(rates):.4g} at step {rates.index(max(rates)) + 1}" in previewed


def paths_of_blocks(written, path=()):
    yield path
    for key, value in written.items():
        if isinstance(value, dict):
            yield from paths_of_blocks(value, (*path, key))


def test_a_misspelt_key_in_any_block_is_answered_with_the_nearest():
    """A letter left out of each key, at the top and in every block inside."""
    for file in FILES:
        written = json.loads(file.read_text())
        read_config(file, BRANCHES, READERS)
        for path in paths_of_blocks(written):
            # one letter cannot lose one
            for key in (key for key in inside(written, path) if len(key) > 1):
                slip = copy.deepcopy(written)
                inner = inside(slip, path)
                inner[key[:-2] + key[-1]] = inner.pop(key)
                with pytest.raises(ValueError) as error:
                    check_config(slip, BRANCHES, READERS)
                    pytest.fail(f"{file.name} without a letter of {path} {key}")
                said = str(error.value)
                assert f"{key!r}" in said or f'"{key}"' in said, (file.name, key, said)


def inside(written, path):
    for key in path:
        written = written[key]
    return written
