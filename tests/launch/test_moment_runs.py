"""A run that compares moments of films with phrases: trained, resumed on other ranks, evaluated, searched,
exported and gone on with."""

import json
import sys

import numpy as np
import pytest
import torch
from launched import ROOT, metrics, run_to_end
from safetensors.torch import load_file

import evaluate
from data.index.sources import open_source
from data.stored.derived import MOMENTS
from launch.inference.embedding import Embedder
from launch.inference.trained import open_run

pytest.importorskip("av", reason="pip install -r requirements-audio.txt")

PAIRS = "video:text,moment:text"
# no batch normalisation and no dropout, which see the split
VIDEO = (
    "vit_b_32:patch_size=16,num_layers=2,hidden_dim=32,num_heads=2,mlp_dim=64,dropout=0,"
    "attention_dropout=0,time=mean"
)
TEXT = "bert-tiny:hidden_dropout_prob=0,attention_probs_dropout_prob=0"
SMALL = ["--video-tower", VIDEO, "--image-size", 32, "--video-frames", 4, "--workers", "0"]
SMALL += ["--embed-dim", 32, "--data", "demo:clips:40"]
SPLITS = {
    1: {
        "layout": "merged",
        "stages": {"merged": 1},
        "schedule": "batch_sync",
        "micro_batch_size": 24,
    },
    3: {
        "layout": "fork",
        "stages": {"video": 2, "text": 1},
        "schedule": "replay",
        "micro_batch_size": 6,
    },
}


def train(folder, ranks, run_dir, *more):
    config = json.loads((ROOT / "ds_configs" / "cpu_fp32.json").read_text())
    config["train_batch_size"] = 24
    config["branches"] |= SPLITS[ranks]
    (folder / f"{ranks}.json").write_text(json.dumps(config))
    words = ["--deepspeed_config", folder / f"{ranks}.json", "--run-dir", run_dir, *SMALL, *more]
    status, output = run_to_end("train.py", *words, "--pairs", PAIRS, ranks=ranks)
    assert status == 0, output[-3000:]
    return output


@pytest.fixture(scope="module")
def runs(module_folder):
    """Ranks -> run."""
    folder, found = module_folder("moments"), {}
    for ranks in SPLITS:
        found[ranks] = folder / str(ranks)
        said = train(
            folder, ranks, found[ranks], "--steps", "2", "--max-moments", "2", "--text-tower", TEXT
        )
        said = " ".join(said.split())
        assert "at most 2 of one in a step" in said and "the phrases of" in said
    return found


@pytest.fixture(scope="module")
def run(runs):
    return runs[3]


def evaluated(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, words), "--workers", "0"])
    evaluate.main(evaluate.parse())


def test_a_fork_trains_as_one_rank_does(runs):
    whole, split = map(metrics, runs.values())
    for step in (1, 2):
        for name in (
            "contrastive_loss/moment_phrase",
            "contrastive_loss/video_text",
            "grad_norm/head",
        ):
            assert split[step][name] == pytest.approx(whole[step][name], rel=1e-4), name
    last = [*metrics(runs[3], "held_out").values()][-1]
    assert last["phrase_to_span_queries"] > 4 and last["num_moments_beyond_max"] > 0


def test_evaluate_asks_for_all_and_finds_them(run, monkeypatch, capfd, tmp_path):
    evaluated(monkeypatch, run, "--json", tmp_path / "a.json")
    said = " ".join(capfd.readouterr().out.split())
    found = json.loads((tmp_path / "a.json").read_text())
    assert "Moments of films" in said and "phrase → span, IoU >= 0.5" in said
    assert "among those given for its video" in found["protocol_of_moments"]
    assert (
        found["composition/num_moments"] > 6 and found["composition/num_moments_not_in_view"] == 0
    )
    # events of a half do not overlap
    assert (
        found["composition/phrase_to_span_iou_0.5_right"]
        == found["composition/phrase_to_span_same_right"]
    )
    find = (run, "--val-data", "demo:clips:10", "--find", "moment", "--query", "a lion grows")
    evaluated(monkeypatch, run, "--val-data", "demo:clips:10", "--embeddings", tmp_path / "out")
    capfd.readouterr()
    evaluated(monkeypatch, *find, "--picture", tmp_path / "found.png", "--number", "3")
    assert (tmp_path / "found.png").stat().st_size > 1000
    lines = [json.loads(line) for line in (tmp_path / "out/moment.jsonl").read_text().splitlines()]
    assert len(lines) == len(np.load(tmp_path / "out/moment.npy"))
    source = open_source("demo:clips:10", open_run(run).read)
    for line in lines:
        moment = source.value("moment", line["index"])[line["moment"]]
        assert line["span"] == [*moment.extent] and line["text"] == moment.phrases[0]
    first = capfd.readouterr().out
    evaluated(monkeypatch, *find, "--number", "999")  # all of each film
    assert capfd.readouterr().out.count("demo:clips#") == len(lines) > 40
    evaluated(monkeypatch, *find, "--embeddings", tmp_path / "out", "--number", "3")
    again = capfd.readouterr().out
    assert [*filter(str.strip, again.splitlines())][1:] and again in first


def test_what_asks_for_other_annotations_is_refused(run, monkeypatch):
    with pytest.raises(ValueError, match="compares moment:text, and annotations of one kind"):
        evaluated(monkeypatch, run, "--regions")


def test_an_export_keeps_their_head_and_a_run_goes_on_with_it(run, tmp_path):
    status, output = run_to_end("export.py", run, tmp_path / "out")
    assert status == 0 and "moments.safetensors: for Wye alone" in output, output[-3000:]
    kept, trained = load_file(tmp_path / "out/moments.safetensors"), open_run(run)
    state = {
        name: t for layer in trained.layers_of("video") for name, t in layer.state_dict().items()
    }
    assert torch.equal(kept["head.moment_projection.1.weight"], state["moment_projection.1.weight"])
    out, still = tmp_path / "out", ["--set", "optimizer.params.lr=1e-12"]
    train(tmp_path, 1, tmp_path / "next", "--steps", "1", "--import", out, *still)
    source, found = open_source("demo:clips:10", trained.read), []
    for folder in (run, tmp_path / "next"):
        embedder = Embedder(open_run(folder), "cpu", 16, 0)
        found.append(embedder.annotated(MOMENTS, source, source.usable())[1].rows.embeds)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ("moment:text,region:text", "annotations of one kind"),
        ("video:text,moment:audio", "moment"),
    ],
)
def test_pairs_that_cannot_be(pairs, said, capfd):
    from launch.config.options import parse_options

    with pytest.raises(SystemExit):
        parse_options(["--pairs", pairs])
    assert said in capfd.readouterr().err
