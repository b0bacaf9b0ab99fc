"""Bad data and train.py: a run goes on with what is good and says what was bad; what it cannot go
on with is one message."""

import io
import json
import os
import signal
import sys
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
from forked_script import ROOT
from launched import SMALL, finish, metrics, ranks_of, reached, start, wait_for
from PIL import Image

from data.bad_samples import REASONS
from data.formats.demo import DemoFormat
from data.index.sources import open_source

sys.path.insert(0, str(Path(__file__).parent / "data"))
from bad_sets import SETS, add  # noqa: E402

GOOD, G = 32, 8


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WYE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def fork(tmp_path):
    """Images on rank 0, texts on rank 1; nothing is measured."""
    config = json.loads((ROOT / "ds_configs" / "cpu_fp32.json").read_text())
    how = {"layout": "fork", "stages": {"image": 1, "text": 1}, "schedule": "batch_sync"}
    config["branches"] |= how | {"micro_batch_size": 4}
    (tmp_path / "fork.json").write_text(json.dumps(config | {"train_batch_size": G}))
    return [*SMALL, "--max-text-tokens", "16", "--deepspeed_config", tmp_path / "fork.json"]


def train(fork, *arguments):
    return start("train.py", *fork, "--workers", 0, *arguments, ranks=2)


@pytest.fixture(scope="module")
def emoji():
    """GOOD real images as JPEG, and their names."""
    demo, samples = DemoFormat(""), []
    rows = [row.values for part in demo.parts() for row in demo.rows(part)]
    for row in rows[:: len(rows) // GOOD][:GOOD]:
        out = io.BytesIO()
        image = Image.open(io.BytesIO(demo.roots.read(row["image"]))).convert("RGBA")
        Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB").save(
            out, "JPEG"
        )
        samples.append((out.getvalue(), row["text"][0]))
    return samples


def write_jsonl(file: Path, samples) -> str:
    (file.parent / "emoji").mkdir(parents=True)
    with file.open("a", encoding="utf-8") as lines:
        for n, (image, caption) in enumerate(samples):
            (file.parent / "emoji" / f"{n}.jpg").write_bytes(image)
            row = {"id": f"emoji-{n}", "image_path": f"emoji/{n}.jpg", "text": caption}
            lines.write(json.dumps(row) + "\n")
    return f"jsonl:{file}"


def write_shard(file: Path, samples) -> str:
    with tarfile.open(file, "w") as tar:
        for n, (image, caption) in enumerate(samples):
            add(tar, f"{n}.jpg", image)
            add(tar, f"{n}.txt", caption.encode())
    return f"webdataset:{file}"


def reported(run_dir: Path) -> list[tuple[str, str]]:
    """(id, reason) of each line of bad_samples.jsonl."""
    text = (run_dir / "bad_samples.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        assert line["reason"] in REASONS and line["detail"] and line["data"] and line["where"]
    return [(line["id"], line["reason"]) for line in lines]


def bad_set(tmp_path: Path, kind: str, emoji):
    """(spec, (id, reason) of the bad samples, number of good ones): everything that can be wrong,
    and GOOD good samples more."""
    spec, expected, good = SETS[kind](tmp_path)
    if kind == "jsonl":
        write_jsonl(Path(spec.partition(":")[2]), emoji)
    else:
        spec += f"::{write_shard(tmp_path / 'emoji.tar', emoji).partition(':')[2]}"
    return spec, expected, len(good) + GOOD


@pytest.mark.parametrize("kind", ["jsonl", "webdataset"])
def test_a_data_set_with_every_kind_of_bad_input_is_trained_on(tmp_path, fork, emoji, kind):
    """Where the command says that many may be bad; otherwise they end the run with one message and
    the table of reasons."""
    spec, expected, good = bad_set(tmp_path, kind, emoji)
    run_dir, counted = tmp_path / "run", Counter(reason for _, reason in expected)
    how = ["--data", spec, "--steps", 3]
    run = train(fork, *how, "--max-bad-fraction", 0.9, "--run-dir", run_dir)
    status, output = finish(run)
    assert status == 0, output[-3000:]
    assert set(metrics(run_dir)) == {1, 2, 3} and not metrics(run_dir, "left_out_samples")
    assert sorted(reported(run_dir)) == sorted(expected)
    record = json.loads((run_dir / "config.json").read_text())["data"]
    assert record["bad_samples"] == counted and record["samples"] == len(expected) + good
    assert record["train_samples"] + sum(record["held_out_samples"].values()) == good
    if kind == "webdataset":
        return
    status, output = finish(train(fork, *how, "--run-dir", tmp_path / "refused"))
    assert status != 0 and output.count("train.py: error:") == 1, output[-3000:]
    assert "Traceback" not in output and "1.0% of --max-bad-fraction" in output
    assert f"{len(expected)} of {len(expected) + good} samples cannot be used" in output
    for reason, number in counted.items():
        assert f"{number:>8,}  {reason:<16} {REASONS[reason]}" in output


def truncated_bodies(tmp_path, emoji):
    """Broken from the start, but only the headers were read."""
    samples = [
        (image[: -300 if n < 6 else None], caption) for n, (image, caption) in enumerate(emoji)
    ]
    spec = write_jsonl(tmp_path / "set.jsonl", samples)
    return spec, ["--index-check", "header"], {f"emoji-{n}" for n in range(6)}, "truncated-image"


def rotten_shard(tmp_path, emoji):
    """Every image was decoded when the index was made; then bytes of the shard change, and
    neither its size nor its time does."""
    spec = write_shard(tmp_path / "set.tar", emoji)
    source = open_source(spec)
    before = os.stat(tmp_path / "set.tar")
    with (tmp_path / "set.tar").open("r+b") as shard:
        for i in range(6):
            shard.seek(int(source.column("image_offset")[i]) + 200)
            shard.write(bytes(100))
    os.utime(tmp_path / "set.tar", ns=(before.st_atime_ns, before.st_mtime_ns))
    return spec, [], {f"set.tar/{n}" for n in range(6)}, "unreadable"


@pytest.mark.parametrize("late", [truncated_bodies, rotten_shard])
def test_images_that_break_after_the_index_was_made_are_left_out_and_listed_once(
    tmp_path, fork, emoji, late
):
    spec, options, broken, reason = late(tmp_path, emoji)
    source = open_source(spec, check="header" if options else "decode")
    run_dir = tmp_path / "run"
    how = ["--data", spec, "--val-fraction", 0.25, "--seed", 1, "--steps", 6, "--eval-every", 3]
    how += ["--run-dir", run_dir]
    status, output = finish(train(fork, *options, *how))
    assert status == 0, output[-3000:]
    steps, evaluations = metrics(run_dir), metrics(run_dir, "held_out")
    assert set(steps) == set(range(1, 7)) and set(evaluations) == {0, 3, 6}
    assert all(isinstance(line["loss"], float) for line in steps.values())
    assert all(isinstance(line["image_to_text_R@1"], float) for line in evaluations.values())
    trained_on = [source.identity(int(i)) for i in np.load(run_dir / "samples" / "train.npy")]
    in_training = len(broken.intersection(trained_on))
    assert len(trained_on) == 24 and 0 < in_training < len(broken)  # some are held out
    for epoch in (range(1, 4), range(4, 7)):  # 24 samples in batches of 8
        assert sum(steps[step].get("left_out_samples", 0) for step in epoch) == in_training
    # met again and again, listed once
    assert sorted(reported(run_dir)) == sorted((identity, reason) for identity in broken)
    assert json.loads((run_dir / "config.json").read_text())["data"]["bad_samples"] == {}


def test_a_run_ends_where_too_many_images_break_while_it_loads_them(tmp_path, fork, emoji):
    """With the table of reasons, as where it is known before: 100 that break may be few of many."""
    samples = [(emoji[n % GOOD][0][: -300 if n % 4 else None], f"number {n}") for n in range(200)]
    spec = write_jsonl(tmp_path / "set.jsonl", samples)
    how = ["--data", spec, "--index-check", "header", "--val-fraction", 0.1, "--steps", 60]
    status, output = finish(train(fork, *how, "--eval-every", 60, "--run-dir", tmp_path / "run"))
    assert status != 0 and output.count("train.py: error:") == 1, output[-3000:]
    assert "Traceback" not in output and "1.0% of --max-bad-fraction" in output
    assert "  truncated-image  " in output and 100 <= len(reported(tmp_path / "run")) < 150
    assert 12 <= max(metrics(tmp_path / "run")) < 30  # steps of 8


@pytest.mark.all("kills processes of a run")
def test_killed_loader_workers_end_the_run_with_one_message(tmp_path, fork, emoji):
    spec = write_jsonl(tmp_path / "set.jsonl", emoji)
    length = ["--steps", 100_000, "--save-every", 100_000, "--eval-every", 100_000]
    run = train(fork, "--data", spec, "--workers", 2, *length, "--run-dir", tmp_path / "run")
    wait_for(reached(tmp_path / "run", 3), run)
    images = ranks_of(run)[0]
    workers = [
        p
        for p in images.children(recursive=True)
        if p.ppid() != images.pid and "forkserver" in " ".join(p.cmdline())
    ]
    assert len(workers) == 2, [p.cmdline() for p in images.children(recursive=True)]
    for worker in workers:
        worker.send_signal(signal.SIGKILL)
    status, output = finish(run)
    assert status != 0
    assert output.count("train.py: error:") == 1 and "Traceback" not in output, output[-3000:]
    for word in ("the loader of", "image", "SIGKILL", "--workers"):
        assert word in output
    assert any(f"process {worker.pid}" in output for worker in workers)
    assert not any(psutil.pid_exists(worker.pid) for worker in workers)
