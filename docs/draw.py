"""The figures of README.md: `step.svg`, one traced step of a run, and `learning.svg`, Wye beside OpenCLIP.

python docs/draw.py RUN_DIR                            the newest step of RUN_DIR/trace.json; both files to docs/
python docs/draw.py RUN_DIR --step 200 --folder OUT --format png    step 200, as PNG files in OUT
"""

import argparse
import json
import re
import sys
from pathlib import Path
from shutil import which
from urllib.request import urlopen

from matplotlib import rc_context
from matplotlib.figure import Figure
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from launch.reporting.timelines import measured_step, timeline_figure
from launch.tools.timeline import choose_step

# Variants of the table "open_clip.py" of bench/EVIDENCE.md -> label and colour (Okabe and Ito's).
VARIANTS = {
    "OpenCLIP": ("OpenCLIP 3.3.0", "#6E6E6E"),
    "ours, merged × 2": ("Wye, same optimizer settings", "#56B4E9"),
    "ours, merged × 2, shipped recipe": ("Wye, its default recipe", "#D55E00"),
}
RANGE = r"([\d.]+) \(([\d.]+) – ([\d.]+)\)"  # mean (least – most) of the seeds
ROW = re.compile(rf"^\| (\d+) \| ([^|]+) \| {RANGE} \| {RANGE} \| {RANGE} \|", re.MULTILINE)


def draw_step(run_dir: Path, wish: int | None, path: Path) -> None:
    """What each rank did in one step, and when. Drawn by a browser, as the report's timelines are:
    it needs playwright and Chromium."""
    record = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    step, ranks = choose_step(run_dir / "trace.json", wish)
    stages = {stage["name"]: stage["ranks"] for stage in record["stage_graph"]}
    figure = timeline_figure([measured_step(step, stages, ranks)])
    figure.update_layout(template="plotly_white", paper_bgcolor="white", width=990)
    wanted = {"format": path.suffix[1:], "width": 990, "height": figure.layout.height}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page()
        page.set_content(figure.to_html())
        drawn = f"Plotly.toImage(document.querySelector('.js-plotly-plot'), {json.dumps(wanted)})"
        with urlopen(page.evaluate(drawn)) as data:
            path.write_bytes(data.read())
        browser.close()


def draw_learning() -> Figure:
    """R@10 by step: means of three seeds as lines, their ranges as bands."""
    rows = ROW.findall((ROOT / "bench" / "EVIDENCE.md").read_text(encoding="utf-8"))
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, first, direction in zip(panels, (5, 8), ("image → text", "text → image")):
        for name, (label, colour) in VARIANTS.items():
            points = [
                [float(row[0]), *map(float, row[first : first + 3])]
                for row in rows
                if row[1].strip() == name
            ]
            steps, mean, least, most = zip(*points)
            axes.plot(steps, mean, color=colour, marker="o", label=label)
            axes.fill_between(steps, least, most, color=colour, alpha=0.15, linewidth=0)
        # of 394 held-out samples
        axes.axhline(100 * 10 / 394, color="black", linewidth=0.8, linestyle=":", label="chance")
        axes.set(title=direction, xlabel="optimizer steps of 256 samples", xticks=steps)
        axes.grid(color="#DDDDDD", linewidth=0.6)
    panels[0].set_ylabel("R@10 of held-out samples (%)")
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        fontsize=8,
        frameon=False,
    )
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw the figures of README.md.")
    parser.add_argument(
        "run_dir",
        type=Path,
        metavar="RUN_DIR",
        help="folder of a run of train.py that has a trace.json",
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="a step of trace.json (default: the newest)"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "docs",
        metavar="DIR",
        help="where to write (default: docs)",
    )
    parser.add_argument("--format", choices=("svg", "png"), default="svg", help="(default: svg)")
    given = parser.parse_args()
    # equal input gives equal files; text stays text, which is smaller
    with rc_context({"svg.hashsalt": "wye", "svg.fonttype": "none"}):
        draw_step(given.run_dir, given.step, given.folder / f"step.{given.format}")
        dated = {"metadata": {"Date": None}} if given.format == "svg" else {}
        learning = given.folder / f"learning.{given.format}"
        draw_learning().savefig(learning, dpi=110, facecolor="white", **dated)
