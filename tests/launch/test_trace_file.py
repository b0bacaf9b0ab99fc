"""trace.json: what is written can be read, by us and by the viewers."""

import json
from dataclasses import replace

from engine.trace import WAIT, Span
from launch.run.trace_file import FIRST_STEP, MAX_SAMPLES, TraceFile, is_sampled, read_trace

SPANS = [
    Span("ForwardPass", 0, 0.0, 0.25),
    Span("ComputeLoss", None, 0.25, 0.5),
    Span(WAIT, None, 0.3, 0.4),
]
RANKS = [("rank 0 (image 0, replica 0)", SPANS), ("rank 1 (text 0, replica 0)", SPANS[:1])]


def test_the_sampled_steps():
    assert [step for step in range(1, 301) if is_sampled(step, 100)] == [FIRST_STEP, 100, 200, 300]
    assert not any(is_sampled(step, 0) for step in range(1, 301))


def test_a_track_per_rank_and_microseconds(tmp_path):
    TraceFile(tmp_path / "trace.json").add(3, 1000.0, RANKS)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == [name for name, _ in RANKS]
    drawn = [(e["name"], e["tid"], e["ts"] - 1e9, e["dur"]) for e in events if e["ph"] == "X"]
    assert drawn == [
        ("ForwardPass 0", 0, 0.0, 250000.0),
        ("ComputeLoss", 0, 250000.0, 250000.0),
        ("wait", 0, 300000.0, 100000.0),
        ("ForwardPass 0", 1, 0.0, 250000.0),
    ]


def test_reading_gives_back_the_spans(tmp_path):
    TraceFile(tmp_path / "trace.json").add(3, 7.0, RANKS)
    read = read_trace(tmp_path / "trace.json")
    assert list(read) == [3] and list(read[3]) == [0, 1]
    spans = [replace(s, start_s=round(s.start_s, 6), end_s=round(s.end_s, 6)) for s in read[3][0]]
    assert spans == SPANS


def test_a_run_that_goes_on_keeps_its_samples_and_the_file_stays_small(tmp_path):
    TraceFile(tmp_path / "trace.json").add(3, 7.0, RANKS)
    again = TraceFile(tmp_path / "trace.json")
    for step in range(100, 100 + MAX_SAMPLES - 1):
        again.add(step, 8.0, RANKS)
    assert list(read_trace(tmp_path / "trace.json"))[0] == 3
    again.add(500, 9.0, RANKS)
    steps = list(read_trace(tmp_path / "trace.json"))
    assert len(steps) == MAX_SAMPLES and steps[0] == 100 and steps[-1] == 500


def test_a_damaged_file_ends_no_run(tmp_path):
    file = tmp_path / "trace.json"
    for damaged in ("", '{"traceEvents": [{"ph'):
        file.write_text(damaged)
        TraceFile(file).add(7, 0.0, [("image 0", [Span("ForwardPass", 0, 0.0, 1.0)])])
        assert list(read_trace(file)) == [7]
