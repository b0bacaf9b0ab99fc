"""What a run leaves with its trackers: W&B offline, TensorBoard, CSV files and Comet, through a stop
and a resume."""

import csv
import json

import pytest
from launched import SMALL, fork_flags, metrics, run_to_end, write_pairs
from wandb_files import pieces

from launch.run.stopping import STOPPED

STEPS = 4
PANELS = {
    *("loss", "retrieval", "alignment", "throughput", "idle", "busy_s", "padding", "memory"),
    *("utilisation", "data_wait", "clipping", "optimizer", "data", "timeline", "queries"),
}
MONITORS = {
    "wandb": {"enabled": True, "project": "birds", "group": "ablation", "team": "vision"},
    "tensorboard": {"enabled": True, "job_name": "run"},
    "csv_monitor": {"enabled": True, "job_name": "run"},
    "comet": {"enabled": True, "online": False, "samples_log_interval": 1, "project": "birds"},
}


@pytest.fixture(scope="module")
def run_dir(module_folder):
    """A fork on two ranks, stopped after its first step and resumed to its end."""
    pytest.importorskip("tensorboard", reason="the JSON's tensorboard block needs it")
    pytest.importorskip("comet_ml", reason="the JSON's comet block needs it")
    folder = module_folder("tracked")
    _, file = fork_flags(folder)
    config = json.loads(file.read_text()) | MONITORS
    for block in ("tensorboard", "csv_monitor"):
        config[block]["output_path"] = str(folder / block)
    file.write_text(json.dumps(config))
    arguments = [
        *SMALL,
        *("--data", write_pairs(folder / "pairs", 120), "--val-fraction", 0.2, "--workers", 0),
        *("--deepspeed_config", file, "--wandb", "offline", "--run-dir", folder / "run"),
        *("--steps", STEPS, "--eval-every", 2, "--trace-every", 100),
    ]
    status, output = run_to_end("train.py", *arguments, "--max-hours", 1e-6, ranks=2)
    assert status == STOPPED, output[-3000:]
    status, output = run_to_end("train.py", *arguments, ranks=2)
    assert status == 0, output[-3000:]
    assert "tracking ends" not in output and "failed (" not in output, output[-3000:]
    return folder / "run"


@pytest.fixture(scope="module")
def wandb_pieces(run_dir):
    return pieces(run_dir)


def test_a_resumed_run_is_one_run_in_wandb(run_dir, wandb_pieces):
    assert len(wandb_pieces) == 2
    assert {piece.run_id for piece in wandb_pieces} == {
        (run_dir / "wandb_run_id").read_text().strip()
    }
    for piece in wandb_pieces:
        assert (piece.run.project, piece.run.run_group, piece.run.entity) == (
            *("birds", "ablation", "vision"),
        )
    steps = [
        line["step"] for piece in wandb_pieces for line in piece.history if "loss/total" in line
    ]
    assert steps == [1, 2, 3, 4]  # each once, in the pieces' order


def test_every_panel_is_there(run_dir, wandb_pieces):
    keys = set().union(*(piece.keys() for piece in wandb_pieces)) - {"step"}
    own = {key for key in keys if not key.startswith("_")}
    assert {key.partition("/")[0] for key in own} == PANELS
    assert {
        *("loss/total", "idle/image 0", "idle/text 0", "padding/text", "data_wait/text 0"),
        *("throughput/image/samples_per_s", "throughput/text/tokens_per_s"),
        *("throughput/image/possible_samples_per_s", "throughput/text/possible_samples_per_s"),
        *(f"{panel}/rank_{rank}{unit}" for panel, unit in (("memory", "_bytes"), ("utilisation", ""))
          for rank in (0, 1)),
        *(f"clipping/{kind}/{group}" for kind in ("grad_norm", "coefficient", "share")
          for group in ("image", "text", "head")),
        *(f"retrieval/validation/{way}/R@{k}" for k in (1, 5, 10)
          for way in ("image_to_text", "text_to_image")),
    } <= own  # fmt: skip
    # the axis of all of them
    globs = {metric.glob_name: metric.step_metric for metric in wandb_pieces[0].metrics}
    assert globs["*"] == "step"
    # and metrics.jsonl keeps its names
    line = metrics(run_dir)[2]
    assert "loss" in line and "idle/image 0" in line and not any("panel" in key for key in line)
    assert not set(line) & {"loss/total", "padding/text", "memory/rank_0_bytes"}


def test_memory_and_utilisation_are_of_each_rank(run_dir, wandb_pieces):
    history = [line for piece in wandb_pieces for line in piece.history if "loss/total" in line]
    for line in history:
        both = [line[f"memory/rank_{rank}_bytes"] for rank in (0, 1)]
        assert max(both) == metrics(run_dir)[line["step"]]["peak_memory_bytes"]
        for rank, stage in enumerate(("image 0", "text 0")):
            assert line[f"utilisation/rank_{rank}"] == pytest.approx(
                1 - line[f"idle/{stage}"], abs=1e-3
            )


def test_the_plan_and_sampled_steps_are_figures(wandb_pieces):
    for piece in wandb_pieces:
        assert piece.summary["plan"].startswith("fork: image 0 ×1 | text 0 ×1")
        (plan,) = piece.logged("timeline/plan")
        (title,) = titles(piece.file(plan))
        assert title.startswith("Predicted: ") and "; fork, image 1 × 1 | text 1 × 1" in title
    (step,) = wandb_pieces[1].logged("timeline/step")
    predicted, measured = titles(wandb_pieces[1].file(step))
    assert predicted.startswith("Predicted") and measured.startswith("Measured, step 3: ")


def titles(figure):
    annotations = json.loads(figure.read_text())["layout"]["annotations"]
    return [annotation["text"] for annotation in annotations]


def test_queries_are_shown_at_every_evaluation_with_what_was_found(run_dir, wandb_pieces):
    for direction in ("image_to_text", "text_to_image"):
        logged = [
            piece.table(table)
            for piece in wandb_pieces
            for table in piece.logged(f"queries/validation/{direction}")
        ]
        assert len(logged) == 3  # steps 0, 2 and 4
        for table, files in logged:
            assert table["columns"] == ["query", "place of the right one", "1", "2", "3", "4", "5"]
            assert len(table["data"]) == 4
            for row in table["data"]:
                check_row(direction, files, *row)
        # of four queries shown, at most as many are right as of all 24
        right = sum(place != "after 5" for _, place, *_ in table["data"])
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        last = json.loads([line for line in lines if "held_out" in line][-1])
        of_all = round(last[f"{direction}_R@5"] * 24)
        assert right <= of_all <= right + 20


def check_row(direction, files, query, place, *answers):
    pictures, texts = [query], answers
    if direction == "text_to_image":
        pictures, texts = texts, pictures
    for picture in pictures:
        content = files[picture["path"]].read_bytes()
        assert picture["_type"] == "image-file" and content[:4] == b"\x89PNG"
    assert all(isinstance(text, str) for text in texts)
    shown = [answer["caption"] if isinstance(answer, dict) else answer for answer in answers]
    marks = [text.split()[0] for text in shown]
    assert marks.count("right") == (0 if place == "after 5" else 1)
    assert place == "after 5" or marks[int(place) - 1] == "right"


def test_tensorboard_has_every_metric_at_every_step_once(run_dir):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="it reads the file back"
    )
    events = accumulator.EventAccumulator(str(run_dir.parent / "tensorboard" / "run"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {tag.partition("/")[0] for tag in tags} == PANELS - {"timeline", "queries"}
    losses = {event.step: event.value for event in events.Scalars("loss/total")}
    assert [event.step for event in events.Scalars("loss/total")] == [1, 2, 3, 4]
    assert losses == pytest.approx({s: line["loss"] for s, line in metrics(run_dir).items()})


def test_csv_files_go_on_below_one_heading(run_dir):
    with (run_dir.parent / "csv_monitor" / "run" / "loss_total.csv").open() as file:
        heading, *rows = csv.reader(file)
    losses = {step: line["loss"] for step, line in metrics(run_dir).items()}
    assert heading == ["step", "total"] and [int(step) for step, _ in rows] == [1, 2, 3, 4]
    assert {int(step): float(value) for step, value in rows} == pytest.approx(losses)


def test_comet_is_one_experiment_offline(run_dir):
    import zipfile

    key = (run_dir / "comet_experiment_key").read_text().strip()
    archives = sorted((run_dir / "comet").glob("*.zip"))
    assert len(archives) == 2 and all(key in archive.name for archive in archives)
    text = b""
    for archive in archives:
        with zipfile.ZipFile(archive) as content:
            text += b"".join(content.read(name) for name in content.namelist())
    assert b"loss/total" in text and b"memory/rank_1_bytes" in text


def test_no_block_of_a_monitor_reaches_deepspeed_or_the_record(run_dir):
    record = json.loads((run_dir / "config.json").read_text())
    assert not set(MONITORS) & set(record["training"]["deepspeed_config"])
    assert record["tracking"] == {"project": "birds", "group": "ablation", "entity": "vision"}


def test_an_export_is_an_artifact_of_the_run(run_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "birds")
    status, output = run_to_end("export.py", run_dir, tmp_path / "model", "--wandb")
    assert status == 2 and "WANDB_ENTITY=vision" in output and not (tmp_path / "model").exists()
    monkeypatch.setenv("WANDB_ENTITY", "vision")
    status, output = run_to_end("export.py", run_dir, tmp_path / "model", "--wandb")
    assert status == 0, output[-3000:]
    piece = pieces(run_dir)[-1]
    assert piece.run_id == (run_dir / "wandb_run_id").read_text().strip()
    (artifact,) = piece.artifacts
    assert (artifact.name, artifact.type) == ("run", "model")
    assert set(artifact.aliases) == {"latest", f"step-{STEPS}"}
    assert {entry.path for entry in artifact.manifest.contents} >= {
        "README.md",
        "model.safetensors",
    }
