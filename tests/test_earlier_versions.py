"""Runs and exports of an earlier version: the present one resumes them and evaluates them alike."""

import io
import json
import math
import subprocess
import sys
import tarfile

import pytest
from earlier_version import SAVED, STEPS
from forked_script import ROOT
from launched import SMALL, command, finish, fork_flags, run_to_end, write_pairs
from PIL import Image

# The commit before the objective of a run became records of branches and pairs, the names of its
# losses followed from those, and the modules moved into folders.
BEFORE_OBJECTIVES = "e23d955"
OF_THE_MACHINE = (
    "samples_per_s",
    "step_s",
    "idle/",
    "busy_s/",
    "data_wait_s/",
    "peak_memory_bytes",
    "sent_bytes",  # earlier code counted those of all steps in the first one after a resume
)
OF_THE_MACHINE += ("images_per_s", "text_tokens_per_s")


@pytest.fixture
def source(tmp_path):
    """The code of BEFORE_OBJECTIVES."""
    archive = ["git", "-C", str(ROOT), "archive", BEFORE_OBJECTIVES]
    try:
        packed = subprocess.run(archive, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(
            f"needs the code of commit {BEFORE_OBJECTIVES}: git, and the history of this repository"
        )
    folder = tmp_path / "source"
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


def logged(run_dir):
    """The lines of metrics.jsonl and loss_weights.jsonl: up to step SAVED, and of later steps what
    does not depend on the speed of the machine."""
    text = "".join((run_dir / f"{name}.jsonl").read_text() for name in ("metrics", "loss_weights"))
    lines = list(map(json.loads, text.splitlines()))
    later = [line for line in lines if line["step"] > SAVED]
    later = [{k: v for k, v in line.items() if not k.startswith(OF_THE_MACHINE)} for line in later]
    return [line for line in lines if line["step"] <= SAVED], later


def evaluated(file):
    values = json.loads(file.read_text())
    assert any("_R@1" in key and math.isfinite(value) for key, value in values.items())
    return values


def test_a_run_and_an_export_from_before_objectives_were_records(tmp_path, source):
    """Trained for SAVED steps by the earlier version on two ranks, and for the others by either:
    every metric and every figure of the evaluations has the same name and is equal, up to step
    SAVED to the last bit. Dropout, augmentation, batch normalisation, clipping, averaged weights, matching, and loss
    weights that follow the losses are all on.

    The layout is a fork, since other layouts deal texts to micro-batches in another way than the
    earlier version did. The rate and the warm-up that the JSON leaves "auto" are others now; the
    run keeps those with which it began.
    """
    data = write_pairs(tmp_path, 96)
    for image in (tmp_path / "images").iterdir():  # of others, evaluation now has other pixels
        Image.open(image).convert("RGBA").resize((32, 32)).save(image)
    flag, file = fork_flags(tmp_path)
    config = json.loads(file.read_text())
    config["optimizer"]["params"]["fused"] = False  # as AdamW was; the default rounds otherwise
    file.write_text(json.dumps(config))
    how = [*SMALL, flag, file, "--data", data, "--val-fraction", 0.25, "--workers", 0]
    how += ["--fusion", 1, "--fusion-width", 16, "--fusion-heads", 2, "--max-text-tokens", 16]
    how += ["--loss-weights", "measured", "--loss-weights-every", 1, "--eval-ema"]
    how += ["--steps", STEPS, "--save-every", SAVED, "--eval-every", SAVED]
    work = tmp_path / "work"
    work.mkdir()
    earlier = [sys.executable, ROOT / "tests" / "earlier_version.py", source, work, *how]
    status, output = finish(command(lambda port: earlier))
    assert status == 0, output[-5000:]
    checkpoints = work / "present" / "checkpoints"
    assert [path.name for path in checkpoints.glob("step-*")] == [f"step-{SAVED:08}"]

    for name, flags in (("whole", ["--rerank", 4]), ("export", ["--val-data", data])):
        file = work / f"{name}-present.json"
        how_evaluated = [work / name, *flags, "--workers", 0, "--json", file]
        status, output = run_to_end("evaluate.py", *how_evaluated)
        assert status == 0, output[-5000:]
        earlier_figures = evaluated(work / f"{name}-earlier.json")
        present = evaluated(file)
        # names were added since
        assert {key: present[key] for key in earlier_figures} == earlier_figures

    status, output = run_to_end("train.py", *how, "--run-dir", work / "present", ranks=2)
    assert status == 0, output[-5000:]
    before, later = logged(work / "earlier")
    assert {line["step"] for line in later if "loss" in line} == set(range(SAVED + 1, STEPS + 1))
    evaluations = {line["held_out"] for line in later if "held_out" in line}
    assert evaluations == {"validation", "ema/validation"}
    resumed = logged(work / "present")
    assert resumed[0] == before, "it went on from step SAVED, with the seconds of the steps before"
    # norms are added up in another order since, which clips the gradients differently in a last bit
    assert len(resumed[1]) == len(later)
    for line, expected in zip(resumed[1], later):
        assert line.keys() == expected.keys()
        for key, value in expected.items():
            number = isinstance(value, float)
            assert line[key] == (pytest.approx(value, rel=1e-4) if number else value), key
