"""The experiments of bench/convergence.py are understood by train.py, and its table says what the
runs' metrics say."""

import argparse
import json

import pytest

from bench.convergence import EXPERIMENTS, complete, report, result
from bench.runs import train_arguments
from launch.config.configuration import with_file
from launch.config.options import parse_options


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_settings_of_all_variants_are_accepted(experiment):
    arguments = argparse.Namespace(epochs=2, set=["data=demo:de"])
    seen = set()
    for variant in EXPERIMENTS[experiment].values():
        run = complete(variant.replace("{minilm}", "/weights"), arguments, seed=1)
        assert run.pop("ranks") in ("1", 2)
        options = parse_options(train_arguments(run))
        assert (options.data, options.seed, options.epochs) == (("demo:de",), 1, 2)
        seen.add(json.dumps([str(options), str(with_file(options, options.deepspeed_config))]))
    assert len(seen) == len(EXPERIMENTS[experiment])


def lines(losses, recall):
    held_out = {"held_out": "family", "text_to_image_R@10": recall, "text_to_image_R@1": 0.1}
    steps = [
        {"step": n, "loss": loss, "step_s": 0.5, "sent_bytes": 2**20, "peak_memory_bytes": 2**30}
        for n, loss in enumerate(losses, 1)
    ]
    return [{"step": 0, **held_out, "text_to_image_R@10": 0.0}, *steps, {"step": 2, **held_out}]


def test_the_table_says_whether_the_seeds_hold_a_difference(tmp_path):
    found = {}
    for name, runs in {"a": [0.2, 0.3], "b": [0.3, 0.3]}.items():
        for seed, recall in enumerate(runs):
            folder = tmp_path / f"{name}{seed}"
            folder.mkdir()
            (folder / "done").touch()
            text = "\n".join(map(json.dumps, lines([4.0, 2.0 if name == "a" else 2.02], recall)))
            (folder / "metrics.jsonl").write_text(text)
            found.setdefault(name, []).append(result(folder))
    text = report(found, timed=True)
    row = "| b | 2 | 30.0 (30.0 – 30.0) | 10.0 (10.0 – 10.0) | 3.010 (3.010 – 3.010) | 1.0e-02 |"
    assert f"{row} 0.50 (0.50 – 0.50) | 1,024 | 1.0 |" in text
    assert "R@10 family %: b − a = +5.0, within the spread of the seeds (10.0)" in text
