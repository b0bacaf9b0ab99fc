"""The report of real runs in a real browser: every chart is drawn, nothing overflows, nothing that
a data set says becomes markup, and the keyboard is enough."""

import json
import shutil

import pytest
import torch
from launched import SMALL, fork_flags, metrics, run_to_end, write_pairs

from data.options import DataOptions
from data.prepare import prepare_data
from launch.inference.embedding import Embedder
from launch.inference.trained import open_run
from launch.reporting.page import write_report
from launch.tools.report import run as report
from models.metrics.retrieval import nearest

pytestmark = pytest.mark.all("starts a browser")

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
WIDTHS = {"phone": 390, "desktop": 1280}
STEPS = 6


@pytest.fixture(scope="module")
def runs(module_folder):
    """Two runs that differ in seed and layout; the second has no prediction. All captions and a
    name of a folder are hostile."""
    folder = module_folder("report")
    spec = write_pairs(folder / "data", 120)
    file = folder / "data" / "pairs.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    texts = [{**line, "text": [f"{HOSTILE} {t}" for t in line["text"]]} for line in lines]
    file.write_text("".join(json.dumps(line) + "\n" for line in texts))
    config = json.loads(fork_flags(folder)[1].read_text())
    # "auto" measures the layers: this run has a prediction
    config["branches"] |= {"layout": "auto", "stages": "auto"}
    (folder / "auto.json").write_text(json.dumps(config))
    length = ["--steps", STEPS, "--eval-every", 3, "--save-every", 100, "--trace-every", 2]
    flags = [*SMALL, "--data", spec, "--val-fraction", 0.2, "--max-text-tokens", 16, *length]
    own = {
        "<b>auto": ["--deepspeed_config", folder / "auto.json"],
        "fork": [*fork_flags(folder), "--seed", 1],
    }
    for name, how in own.items():
        words = [*flags, *how, "--workers", 0, "--run-dir", folder / name]
        status, output = run_to_end("train.py", *words, ranks=2)
        assert status == 0, output[-3000:]
        assert f"report {folder / name / 'report.html'}" in output
    return [folder / name for name in own]


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium is installed")
    with playwright.sync_playwright() as started:
        # as root, which containers are, Chromium has no sandbox
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser):
    """Opens an address with all charts drawn. The end of the test asks for no error and no
    network."""
    complaints, asked, contexts = [], [], []

    def open_page(address, width="desktop", scheme="light"):
        size = {"width": WIDTHS[width], "height": 900}
        context = browser.new_context(viewport=size, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(address)
        page.wait_for_selector("html[data-drawn]", timeout=120_000, state="attached")
        return page

    yield open_page
    for context in contexts:
        context.close()
    own = ("file://", "data:", "blob:")
    assert not complaints and all(url.startswith(own) for url in asked)


def address_of(path):
    return path.as_uri()


DRAWN = """() => [...document.querySelectorAll('.chart')].map((chart) => [chart.id,
    chart.querySelectorAll('.main-svg .trace path[d], .main-svg .bars path[d]').length])"""
OVERFLOW = "document.documentElement.scrollWidth - window.innerWidth"
LUMINANCE = """(selector) => {
    const of = (css) => { const [r, g, b] = css.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255)
        .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const style = (place) => getComputedStyle(place);
    const tick = document.querySelector('#chart-loss .xtick text');
    return {page: of(style(document.body).backgroundColor), text: of(style(document.body).color),
            card: of(style(document.querySelector('.part')).backgroundColor),
            tick: of(style(tick).fill)}; }"""


@pytest.mark.parametrize("width, scheme", [("desktop", "light"), ("phone", "dark")])
def test_every_chart_is_drawn_and_can_be_read(runs, opened, width, scheme):
    page = opened(address_of(runs[0] / "report.html"), width, scheme)
    drawn = page.evaluate(DRAWN)
    assert len(drawn) >= 15 and all(number > 0 for _, number in drawn), drawn
    assert {"chart-loss", "chart-timeline-0", "chart-memory", "chart-norms"} <= dict(drawn).keys()
    assert page.evaluate(OVERFLOW) <= 0
    light = page.evaluate(LUMINANCE)
    assert (light["page"] > 0.5) == (scheme == "light")
    for dark_or_bright, behind in (("text", "page"), ("tick", "card")):
        low, high = sorted((light[dark_or_bright], light[behind]))
        assert (high + 0.05) / (low + 0.05) > 4.5  # WCAG 2.1, 1.4.3


def test_the_curve_is_that_of_the_run_and_the_prediction_is_above_the_measurement(runs, opened):
    page = opened(address_of(runs[0] / "report.html"))
    drawn = page.evaluate("document.getElementById('chart-loss').calcdata[0].map((p) => p.y)")
    assert drawn == pytest.approx([line["loss"] for line in metrics(runs[0]).values()], rel=1e-6)
    titles = page.locator("#chart-timeline-0 .annotation-text").all_text_contents()
    assert titles[0].startswith("Predicted") and titles[1].startswith(f"Measured, step {STEPS}")


def test_two_runs_lie_over_one_another(runs, opened, tmp_path):
    output = tmp_path / "both.html"
    assert report([*map(str, runs), "--out", str(output)]) == 0
    for width in WIDTHS:
        page = opened(address_of(output), width)
        assert page.evaluate(OVERFLOW) <= 0
        assert all(number > 0 for _, number in page.evaluate(DRAWN))
    names = page.locator("#chart-loss .legendtext").all_text_contents()
    assert names == ["<b>auto", "fork"]
    differing = page.locator("#differences tbody th").all_text_contents()
    assert "seed" in differing and "loss" not in differing


def test_what_captions_say_is_text(runs, opened):
    page = opened(address_of(runs[0] / "report.html"))
    captions = page.locator("#queries .caption").all_text_contents()
    assert len(captions) >= 8 and all(text.startswith(HOSTILE) for text in captions)
    assert page.evaluate("window.hacked") is None
    assert page.locator("h1").text_content() == "Run <b>auto"
    assert page.locator("#queries img").count() > 0
    broken = "[...document.images].filter((i) => i.complete && !i.naturalWidth).length"
    assert page.evaluate(broken) == 0


def test_the_answers_shown_are_those_of_the_newest_checkpoint(runs):
    """By the towers on one device, from the checkpoint that the evaluation stands behind."""
    record = json.loads((runs[1] / "queries.json").read_text())
    assert record["step"] == STEPS
    trained = open_run(runs[1])
    embedder = Embedder(trained, "cpu", 16, 0)
    options = DataOptions.from_record(trained.options)
    held_out = prepare_data(options, trained.record["tokenizer"], runs[1]).held_out["validation"]
    embedded = embedder.embedded(held_out.source, held_out.subset)
    image, text = (embedded.rows[name].embeds for name in ("image", "text"))
    samples = embedded.rows["image"].sample.tolist()
    for direction, own, other in (("image_to_text", image, text), ("text_to_image", text, image)):
        asked = record["sets"]["validation"][direction]
        assert len(asked) == 4
        for query in asked:
            row = samples.index(int(query["query"]))
            _, similarity = nearest(own[row : row + 1], other, 5)
            shown = [answer["similarity"] for answer in query["answers"]]
            assert shown == pytest.approx(similarity[0].tolist(), abs=2e-4)
            found = [samples.index(int(a["sample"])) for a in query["answers"]]
            alike = (other[found] @ own[row]).double()
            torch.testing.assert_close(alike, similarity[0], atol=2e-4, rtol=0)


def test_the_keyboard_is_enough(runs, opened):
    page = opened(address_of(runs[0] / "report.html"))
    for landmark in ("header", "nav[aria-label]", "main", "footer"):
        assert page.locator(f"body {landmark}").count() == 1
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    for chart in page.locator(".chart").all():
        assert len(chart.get_attribute("aria-label")) > 20
    width = "(([low, high]) => high - low)(document.getElementById('chart-loss')._fullLayout.xaxis.range)"
    whole = page.evaluate(width)
    page.locator("#chart-loss").focus()
    page.keyboard.press("+")
    page.wait_for_function(f"{width} < {0.9 * whole}")
    page.keyboard.press("0")
    page.wait_for_function(f"Math.abs({width} - {whole}) < 1e-6 * {whole}")
    page.locator("#loss summary").first.focus()
    page.keyboard.press("Enter")
    rows = page.locator("#loss table").first.locator("tbody tr")
    assert rows.first.is_visible() and rows.count() == STEPS


def test_the_switch_changes_the_theme_of_page_and_charts(runs, opened):
    page = opened(address_of(runs[0] / "report.html"))
    before = page.evaluate(LUMINANCE)
    page.select_option("#theme", "dark")
    fill = "getComputedStyle(document.querySelector('#chart-norms .xtick text')).fill"
    page.wait_for_function(f"parseInt({fill}.match(/\\d+/)[0]) > 150")
    after = page.evaluate(LUMINANCE)
    assert before["page"] > 0.5 > after["page"] and after["tick"] > 0.5


def test_the_page_of_a_run_that_goes_on_loads_itself_anew(runs, opened, tmp_path, monkeypatch):
    folder = shutil.copytree(runs[1], tmp_path / "live", ignore=shutil.ignore_patterns("check*"))
    monkeypatch.setattr("launch.reporting.page.REFRESH_S", 0.2)  # quicker than it is drawn
    write_report([folder], folder / "report.html", next_s=3600)
    page = opened(address_of(folder / "report.html"))
    with (folder / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps({**metrics(folder)[STEPS], "step": 500, "loss": 0.125}) + "\n")
    write_report([folder], folder / "report.html")
    page.wait_for_function(
        "document.querySelector('html[data-drawn] #chart-loss')"
        "?.getAttribute('aria-label').includes('0.125 at step 500')",
        timeout=120_000,
    )


def test_the_page_of_a_run_that_was_killed_says_so_and_stays(runs, opened, tmp_path, monkeypatch):
    monkeypatch.setattr("launch.reporting.page.REFRESH_S", 0)
    write_report([runs[1]], tmp_path / "report.html", next_s=-1)
    page = opened(address_of(tmp_path / "report.html"))
    page.evaluate("window.stays = true")
    said = page.locator(".when")
    said.filter(has_text="may have stopped").wait_for()
    page.wait_for_timeout(300)
    assert page.evaluate("window.stays") and "goes on" not in said.text_content()
