"""The first hour on GPUs: what fails or hangs loses its own line only, and what was found is compared
with what the same step found before. The commands are tried by `bash bench/first_hour.sh one --dry`."""

import json
import sys
import time

import pytest

from bench import first_hour
from bench.first_hour import COURSES, NO_GPU, Place, Step, environment, main


def says(words, after_s=0.0):
    return lambda place: [sys.executable, "-c", f"import time; time.sleep({after_s}); {words}"]


def figures(value):
    return says(f"print('noise'); print('{{\"figures\": {{\"rate\": {value}}}}}')")


@pytest.fixture
def course(monkeypatch, tmp_path):
    """Runs these steps as a course of one rank; gives the status, the lines and what is kept."""

    def run(capsys, *steps, only=""):
        monkeypatch.setitem(COURSES, "one", (1, steps))
        status = main(["one", "--dry", "--out", str(tmp_path), "--only", only])
        *lines, _ = capsys.readouterr().out.splitlines()
        return status, lines, json.loads((tmp_path / "one-dry.json").read_text())

    return run


def test_each_step_has_its_line_and_a_failure_no_other(course, capsys):
    steps = (
        Step("works", figures(2.0), 60),
        Step("fails", says("raise SystemExit('the reason')"), 60),
        Step("hangs", says("0", 60), 0.5),
        Step("finds nothing", says("0"), 60, first_hour.predicted),
        Step("also works", figures(1.0), 60),
    )
    status, lines, kept = course(capsys, *steps)
    assert status == 1
    assert [line.split()[0] for line in lines] == ["ok", "failed", "failed", "failed", "ok"]
    assert "rate 2" in lines[0] and "status 1: the reason" in lines[1]
    assert "took too long" in lines[2] and kept["hangs"]["seconds"] < 30
    assert kept["works"]["figures"] == {"rate": 2.0}
    # what failed alone, and then one that found another number before
    assert course(capsys, Step("fails", figures(3.0), 60), only="fails")[0] == 0
    status, lines, kept = course(capsys, Step("works", figures(2.5), 60), steps[-1])
    assert status == 0 and "rate 2.5 (before: 2)" in lines[0] and "before" not in lines[1]
    assert kept["fails"]["figures"] == {"rate": 3.0}


def test_what_needs_no_gpu_runs_beside_the_step_before(course, capsys):
    start = time.time()
    stamp = 'import time; print(\'{"figures": {"at": %r}}\' % time.time())'.replace("%r", "%f")
    slow, beside = says(stamp, 1.0), Step("beside", says(stamp), 60, beside=True)
    _, _, kept = course(capsys, Step("slow", slow, 60), beside, Step("after", says(stamp), 60))
    at = {name: record["figures"]["at"] for name, record in kept.items()}
    assert start < at["beside"] < at["slow"] < at["after"]


def test_what_programs_say_is_read(tmp_path):
    place = Place(8, True, tmp_path)
    table = "| | s |\n|---|---|\n| infonce, plain | 1,234.5 (1 – 2) | 3 |\n| none | – |"
    assert first_hour.rows(place, table) == {"infonce, plain": 1234.5}
    assert first_hour.tests(place, "3 passed, 1 skipped in 2 s") == {"passed": 3, "skipped": 1}
    assert first_hour.predicted(place, "  predicted 5.23 ms a step, 4%") == {"a step, s": 0.00523}
    said = "a:0 NCCL INFO comm 0x1 rank 0 Init COMPLETE\n" * 16
    assert first_hour.communicators(place, said) == {"communicators a rank": 2}
    line = "Batch (t): 2.310, 110.8/s, 55.4/s/gpu LR: 0.000025"
    assert first_hour.open_clip_rate(place, line) == {"samples/s": 110.8}
    (tmp_path / "run").mkdir()
    lines = [{"step_s": 2.0, "samples_per_s": 10.0, "data_wait_s/image": w} for w in (0, 1.0)]
    text = "\n".join(map(json.dumps, [*lines, {"held_out": "validation"}]))
    (tmp_path / "run" / "metrics.jsonl").write_text(text)
    assert first_hour.steps(place, "") == {"samples/s": 20.0, "waits for data, s": 1.0}


def test_a_trial_sees_no_gpu_and_the_real_one_does(tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    step = Step("a step", says("0"), 1, environment={"NCCL_DEBUG": "INFO"})
    trial = environment(Place(1, True, tmp_path), step)
    assert trial.items() >= {**NO_GPU, "NCCL_DEBUG": "INFO"}.items()
    assert environment(Place(1, False, tmp_path), step)["DS_ACCELERATOR"] == "cuda"
    for _, steps in COURSES.values():
        assert len({step.name for step in steps}) == len(steps)
