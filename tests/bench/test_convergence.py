"""The experiments of bench/convergence.py are understood by train.py, and its table says what the
runs' metrics say."""

import json

import pytest

from bench.common import Seen, report, train_arguments
from bench.convergence import EXPERIMENTS, complete, experiment, result
from launch.config.configuration import with_file
from launch.config.options import parse_options


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_settings_of_all_variants_are_accepted(name):
    seen = set()
    for way in experiment(name)(epochs=2, set=["data=demo:de"]).ways.values():
        variant, *given = way.measure.args
        run = complete(variant.replace("{minilm}", "/weights"), *given, 1)
        assert run.pop("ranks") in ("1", 2)
        options = parse_options(train_arguments(run))
        assert (options.data, options.seed, options.epochs) == (("demo:de",), 1, 2)
        seen.add(json.dumps([str(options), str(with_file(options, options.deepspeed_config))]))
    assert len(seen) == len(EXPERIMENTS[name])


def lines(losses, recall):
    recalls = {"text_to_image_R@10": recall, "text_to_image_R@1": 0.1}
    last = [{"step": 2, "held_out": name, **recalls} for name in ("family", "composition")]
    steps = [
        {"step": n, "loss": loss, "step_s": 0.5, "sent_bytes": 2**20, "peak_memory_bytes": 2**30}
        for n, loss in enumerate(losses, 1)
    ]
    return [{**last[0], "step": 0, "text_to_image_R@10": 0.0}, *steps, *last]


def test_the_table_says_whether_the_seeds_hold_a_difference(tmp_path):
    seen = Seen(experiment("precision")())
    for name, runs in {"fp32": [0.2, 0.3], "bf16": [0.3, 0.3]}.items():
        for seed, recall in enumerate(runs):
            folder = tmp_path / f"{name}{seed}"
            folder.mkdir()
            (folder / "done").touch()
            text = "\n".join(map(json.dumps, lines([4.0, 2.02 if name == "bf16" else 2.0], recall)))
            (folder / "metrics.jsonl").write_text(text)
            seen.rounds.setdefault(name, []).append(result(folder))
    text = report(seen)
    assert "| fp32 | 2 | 25.0 (20.0 – 30.0) | 10.0 | 25.0 (20.0 – 30.0) | 10.0 | 3.000 |" in text
    assert "| bf16 | 2 | 30.0 | 10.0 | 30.0 | 10.0 | 3.010 | 0.50 | 1,024 | 1.0 |" in text
    assert "- the first 5 losses of bf16 and fp32 differ by 1.0e-02 at most" in text
    assert "- R@10 family %: bf16 − fp32 = +5.0, within the spread (10.0)" in text
    seen.rounds["fp32"][1]["family/text_to_image_R@10"] = 0.21
    assert "- R@10 family %: bf16 − fp32 = +9.5, beyond the spread (1.0)" in report(seen)
