"""The report of a run, without a browser: what is read, what is drawn, and what is missing."""

import base64
import json
import math
import re
import sys
import time
from html.parser import HTMLParser

import numpy as np
import torch
from torch.nn import functional as F

from common import __version__
from launch.journal import Journal
from launch.reporting.charts import MOST_POINTS, thin, trend
from launch.reporting.page import render_page
from launch.reporting.reading import labels, read_folder, read_runs
from launch.reporting.sections import build_sections
from launch.run.folder import RunFolder
from launch.run.queries import query_rows
from launch.tools.report import run
from models.metrics.retrieval import Relevance, first_answers, nearest

RECORD = {
    "version": __version__,
    "training": {"options": {"seed": 0}, "deepspeed_config": {}, "branches": {}},
    "options": {"data": ["jsonl:a.jsonl"], "seed": 0, "loss": "infonce"},
    "total_steps": 10,
    "stage_graph": [{"name": "image 0", "ranks": [0]}],
    "data": {"train_samples": 100, "held_out_samples": {"validation": 40}},
}


def make_run(folder, number=10, seed=0, **changes):
    """A run whose loss is 5 / step."""
    folder.mkdir()
    record = RECORD | {"options": {**RECORD["options"], "seed": seed}} | changes
    (folder / "config.json").write_text(json.dumps(record))
    with (folder / "metrics.jsonl").open("w") as lines:
        for step in range(1, number + 1):
            lines.write(json.dumps(step_line(step)) + "\n")
    return folder


def step_line(step):
    shares = {f"{kind}/image {i}": 0.25 + i for i in range(8) for kind in ("idle", "busy_s")}
    return {"step": step, "loss": 5 / step, "step_s": 0.5, "samples_per_s": 80.0, **shares}


def charts(runs):
    return {
        part.name: part
        for section in build_sections(runs)
        for part in section.parts
        if hasattr(part, "figure")
    }


def test_a_chart_shows_the_numbers_of_the_run_and_its_table_too(tmp_path):
    loss = charts([read_folder(make_run(tmp_path / "a"), "a")])["loss"]
    assert np.allclose(loss.figure.data[0].y, [5 / step for step in range(1, 11)])
    assert loss.table.rows[-1] == ["10", "0.5"] and loss.table.rows[0] == ["1", "5"]
    assert "loss: 5 at step 1, 0.5 at step 10." in loss.summary


def test_several_runs_lie_over_one_another_and_only_options_that_differ_are_listed(tmp_path):
    folders = [make_run(tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 7))]
    runs = read_runs(folders)
    loss = charts(runs)["loss"]
    shown = {trace.name: trace for trace in loss.figure.data if trace.showlegend is not False}
    assert list(shown) == ["a", "b"] and shown["a"].line.color != shown["b"].line.color
    sections = {section.name: section for section in build_sections(runs)}
    (table,) = sections["differences"].parts
    assert table.header == ["option", "a", "b"] and table.rows == [["seed", "0", "7"]]


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    assert labels([tmp_path / "x" / "run", tmp_path / "y" / "run"]) == ["x/run", "y/run"]


def test_thinning_keeps_the_extremes_the_ends_and_the_gaps():
    y = np.sin(np.arange(100_000) / 5000)
    y[54_321], y[77_777], y[90_000:91_000] = 9.0, -9.0, np.nan
    kept = thin(y)
    assert len(kept) <= MOST_POINTS + 4 and (np.diff(kept) > 0).all()
    assert {0, 54_321, 77_777, 99_999} <= set(kept.tolist())
    assert np.isnan(y[kept]).any()
    assert thin(y[:100]).tolist() == list(range(100))


def test_a_trend_of_a_constant_is_the_constant_from_the_first_step_on():
    y = np.full(1000, 3.0)
    y[10] = np.nan
    found = trend(y)
    assert np.isnan(found[10]) and np.allclose(np.delete(found, 10), 3.0)


def test_first_answers_of_all_ranks_add_up_to_those_of_one():
    draw = torch.Generator().manual_seed(0)
    own, other = (F.normalize(torch.randn(9, 8, generator=draw), dim=1) for _ in range(2))
    rows, queries = torch.arange(9), torch.from_numpy(query_rows(9))
    relevance = Relevance.of(rows, rows, rows, rows)
    parts = [
        first_answers(own, other, relevance, mine, queries, 5)
        for mine in (rows[:4], rows[4:], rows[:0])
    ]
    total = sum(parts)
    index, similarity = nearest(own[queries], other, 5)
    assert torch.equal(total[..., 0].long() - 1, index)
    assert torch.equal(total[..., 2] > 0, index == queries[:, None])
    torch.testing.assert_close(total[..., 1], similarity.double())
    few = Relevance.of(rows, rows[:3], rows, rows % 3)
    found = first_answers(own, other[:3], few, rows, queries, 5)
    assert (found[:, 3:] == 0).all() and (found[:, :3, 0] > 0).all()


def test_a_run_that_has_just_begun_has_a_page(tmp_path):
    """What is no part of a sample is in the table of what is left out."""
    data = RECORD["data"] | {"unused": {"members .cls": [1200, "a.tar#1.cls"]}}
    folder = make_run(tmp_path / "a", 0, data=data)
    (folder / "metrics.jsonl").unlink()
    page = render_page(read_runs([folder]))
    assert "trace.json: no such file; the run has traced no step yet" in page
    assert "at step 0 of 10" in page
    assert "members .cls" in page and "1,200, for example a.tar#1.cls" in page


def test_what_is_damaged_is_left_out_and_said(tmp_path):
    folder = make_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": \n{"step": 11, "loss": null, "step_s": 1.0}\n{"step": 12, "lo')
    for name in ("queries.json", "trace.json"):
        (folder / name).write_text("{")
    page = render_page(read_runs([folder]))
    assert "metrics.jsonl: 1 lines cannot be read" in page
    assert "queries.json is damaged" in page and "trace.json: not a trace" in page
    loss = read_folder(folder, "a").steps["loss"]
    assert len(loss) == 11 and math.isnan(loss[-1])


ANSWER = {"sample": "2", "similarity": 0.5, "right": True}
ASKED = [{"query": "1", "place": 1, "answers": [ANSWER]}]
SAMPLES = {"1": {"id": "a", "text": "a"}, "2": {"id": "b", "text": "b"}}
QUERIES = {"image_to_text": ASKED, "samples": SAMPLES}
RECALLS = {f"image_to_text_R@{k}": None for k in (1, 5, 10)}


HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='hacked = 2'>&lt;b"


class Elements(HTMLParser):
    """What a browser would make of a page: the names of elements and of their attributes that run
    something, the texts of scripts, and all others."""

    def __init__(self, page):
        super().__init__()
        self.inner, self.handlers, self.scripts, self.texts = "", [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.inner = tag
        self.handlers += [name for name, value in attrs if name.startswith("on")]
        self.handlers += [value for _, value in attrs if "javascript:" in (value or "")]

    def handle_endtag(self, tag):
        self.inner = ""

    def handle_data(self, data):
        (self.scripts if self.inner == "script" else self.texts).append(data)


def test_what_a_run_says_is_text_of_its_page(tmp_path):
    """Names, options, commands, captions and messages of others."""
    clean = make_run(tmp_path / "a")
    (clean / "queries.json").write_text(json.dumps({"step": 5, "sets": {"x": QUERIES}}))
    changes = {
        "command": HOSTILE,
        "data": RECORD["data"] | {"unused": {HOSTILE: [1, HOSTILE]}, "bad_samples": {HOSTILE: 2}},
        "options": {**RECORD["options"], "data": [HOSTILE], HOSTILE: HOSTILE},
    }
    folder = make_run(tmp_path / "b", **changes)
    sets = {HOSTILE: json.loads(json.dumps(QUERIES).replace('"a"', json.dumps(HOSTILE)))}
    (folder / "queries.json").write_text(json.dumps({"step": 5, "sets": sets}))
    steps = (folder / "metrics.jsonl").read_text().replace("idle/image 0", f"idle/{HOSTILE}")
    evaluation = json.dumps({"step": 5, "held_out": HOSTILE, **RECALLS}) + "\n"
    (folder / "metrics.jsonl").write_text(steps + evaluation)
    (folder / "loss_weights.jsonl").write_text(json.dumps({"step": 5, "reason": HOSTILE}) + "\n")
    folder = folder.rename(tmp_path / HOSTILE.replace("/", "-"))
    expected, found = (Elements(render_page(read_runs([each]))) for each in (clean, folder))
    assert len(found.scripts) == len(expected.scripts) and found.handlers == expected.handlers
    assert not any("window.hacked" in each and "</" in each for each in found.scripts)
    assert sum(HOSTILE in each for each in found.texts) > 4


def test_a_record_that_lacks_something_costs_no_other_part_of_the_page(tmp_path, subtests):
    damaged = (
        {"image_to_text": ASKED, "samples": {"1": SAMPLES["1"]}},
        {"image_to_text": ASKED, "samples": {**SAMPLES, "2": {"id": "b"}}},
        {
            "image_to_text": [{**ASKED[0], "answers": [{**ANSWER, "similarity": None}]}],
            "samples": SAMPLES,
        },
        {"image_to_text": ASKED},
    )
    cases = [
        ("balance.jsonl", {"step": 5}, "balance.jsonl: 1 lines cannot .*, first line 1 "),
        ("loss_weights.jsonl", {"step": "5", "reason": ""}, "loss_weights.jsonl: 1 lines .*line 1"),
        ("bad_steps.jsonl", {"step": 5, "samples": 5}, "bad_steps.jsonl is damaged or lacks"),
        ("metrics.jsonl", {"step": 5, "held_out": "validation", **RECALLS}, "<td>nan</td>"),
        ("metrics.jsonl", {"held_out": "validation"}, "metrics.jsonl: 1 lines .*first line 11 "),
        ("config.json", RECORD | {"towers": {"image": {}}}, "config.json or .* lacks .*parameters"),
    ]
    whole = {"step": 5, "sets": {"x": {"image_to_text": ASKED, "samples": SAMPLES}}}
    cases += [
        ("queries.json", {"step": 5, "sets": {"validation": found}}, "queries.json is damaged ")
        for found in damaged
    ]
    for number, (name, record, said) in enumerate(cases):
        folder = make_run(tmp_path / str(number))
        (folder / "queries.json").write_text(json.dumps(whole))
        with (folder / name).open("a" if name.endswith("l") else "w") as lines:
            lines.write(json.dumps(record) + "\n")
        with subtests.test(said):
            page = render_page(read_runs([folder]))
            assert re.search(said, page)
            assert "chart-loss" in page and "All options" in page and 'id="queries"' in page
            assert ("right answer at rank 1" in page) == (name != "queries.json")


def test_a_chart_is_left_out_only_at_the_one_value_that_says_nothing(tmp_path):
    folder = make_run(tmp_path / "a", 0)
    line = {"step": 1, "step_s": 1.0, "clip_coefficient/all": 0.5, "skipped_steps": 0}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert {"clipping", "skipped"} & charts([read_folder(folder, "a")]).keys() == {"clipping"}


def test_a_page_of_many_long_runs_is_below_the_limit_and_keeps_the_peaks(tmp_path):
    folder = make_run(tmp_path / "a", 1000)
    page = render_page([read_folder(folder, f"run {i}") for i in range(8)])
    assert 2_000_000 < len(page.encode()) < 5_000_000
    # it asks no other place for anything
    markup = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"""(?:src|href)=["'](?!#|data:)""", markup)
    assert "url(" not in markup and "@import" not in markup
    figures = json.loads(re.search(r'id="figures"[^>]*>(.*?)</script>', page).group(1))
    values = base64.b64decode(figures["loss"]["data"][0]["y"]["bdata"])
    drawn = np.frombuffer(values, np.float32)
    assert len(drawn) < 800 and drawn.max() == 5.0 and drawn.min() == np.float32(5 / 1000)


def test_the_tool_writes_beside_the_run_or_where_it_is_told(tmp_path, monkeypatch, capsys):
    """What cannot be shown is one line."""
    for name in "ab":
        make_run(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    for words, written in (
        ("a", "a/report.html"),
        ("a b", "a/comparison.html"),
        ("a --out own.html", "own.html"),
    ):
        assert run(words.split()) == 0 and capsys.readouterr().out == f"{written}\n"
        assert (tmp_path / written).stat().st_size > 10**6
    for words, message in (
        ("nowhere", "nowhere: no such folder"),
        (".", "holds no config.json; give the folder of a run of train.py"),
        ("a a", "a run is given twice"),
        ("a --out no/where.html", "--out no/where.html: give the name of a file"),
        ("a --live 8000", "--live: reports are not served any more; open RUN_DIR/report"),
    ):
        assert run(words.split()) == 2, words
        out, err = capsys.readouterr()
        assert out == "" and message in err and err.count("\n") == 1, words


def test_a_page_that_cannot_be_written_is_one_warning_and_the_run_goes_on(tmp_path, caplog):
    folder = make_run(tmp_path / "a")
    (folder / "report.html").mkdir()
    journal = Journal(RunFolder(folder, first_rank=True), 0)
    for step in range(3):
        evaluate(journal, step, 0.5)
    (line,) = [record.getMessage() for record in caplog.records]  # once, not at every evaluation
    assert "report.html is not written" in line
    journal.report()


def evaluate(journal, step, recall):
    figures = {"image_to_text_R@1": recall, "image_to_text_R@5": 0.5, "image_to_text_R@10": 0.75}
    journal.evaluation(step, 1.0, {"validation": figures}, {})


def test_every_evaluation_writes_the_page_which_loads_itself_anew_until_the_run_ends(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("launch.journal.PAGE_SHARE", math.inf)  # however long it takes
    folder = make_run(tmp_path / "a")
    journal = Journal(RunFolder(folder, first_rank=True), 0)
    for step, recall in ((0, 0.125), (10, 0.25), (20, 0.375)):
        evaluate(journal, step, recall)
        page = (folder / "report.html").read_text()
        assert 'data-refresh-s="30"' in page and f"{100 * recall:.1f}" in page
    assert "12.5 → 37.5" in page and "37.5 → " not in page
    journal.report()
    assert "data-refresh-s" not in (folder / "report.html").read_text()


def test_the_page_takes_a_small_share_of_the_time_of_a_run(tmp_path, monkeypatch):
    """It takes 10 s of a clock of its own here, so it is not written again for 500 s. What imports
    take is no time of the page."""
    monkeypatch.delattr("launch.reporting.page")
    monkeypatch.delitem(sys.modules, "launch.reporting.page")
    times, imported = iter([0, 0, 10, 499, 501, 501, 511]), []  # is it due, began, ended

    def clock():
        imported.append("launch.reporting.page" in sys.modules)
        return next(times)

    monkeypatch.setattr("launch.journal.time.monotonic", clock)
    folder = make_run(tmp_path / "a")
    journal = Journal(RunFolder(folder, first_rank=True), 0)
    written, due_in_s = [], []
    for step in range(3):
        evaluate(journal, step, 0.5)
        written.append((folder / "report.html").stat().st_ino)  # another file each time
        due_s = re.search(r'data-due-s="(.*?)"', (folder / "report.html").read_text())
        due_in_s.append(float(due_s[1]) - time.time())
    assert due_in_s[0] > 10_000 and 1000 < due_in_s[2] < 2000  # three times 501
    assert written[0] == written[1] != written[2] and imported[:2] == [False, True]
