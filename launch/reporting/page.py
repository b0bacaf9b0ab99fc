"""One HTML file that holds all of a report: text, tables, pictures, figures and what draws them."""

from __future__ import annotations

import base64
import gzip
import json
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.io import to_json
from plotly.offline import get_plotlyjs

from common.files import write_text
from launch.reporting.charts import MOST_POINTS, thin
from launch.reporting.parts import Chart
from launch.reporting.reading import RunData, read_runs
from launch.reporting.sections import build_sections, charts_of

TEMPLATES = Path(__file__).resolve().parent / "template"
REFRESH_S = 30
# of the page, beside 2 MB of library and the pictures, see `tables.MOST_PICTURE_BYTES`
MOST_FIGURE_BYTES = 1_900_000
FEWEST_POINTS = 25


def write_report(folders: Sequence[Path], output: Path, next_s: float | None = None) -> None:
    """The report of the runs in `folders`. `next_s`: the page is written again within so many
    seconds, so it loads itself anew every `REFRESH_S`; after them it says that the run may have
    stopped. Errors: FileNotFoundError, ValueError for a folder that holds no run; OSError where
    `output` cannot be written."""
    # whole, in place of the page of before: a browser may be reading that one
    write_text(output, render_page(read_runs(folders), next_s))


def render_page(runs: Sequence[RunData], next_s: float | None = None) -> str:
    """The whole page."""
    sections = build_sections(runs)
    labels = [run.label for run in runs]
    # everything that a run wrote is escaped; only the files of `template/` are markup
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        title=f"Run {labels[0]}" if len(runs) == 1 else f"{len(runs)} runs: {', '.join(labels)}",
        sections=sections,
        kind=lambda part: type(part).__name__,
        refresh_s=REFRESH_S,
        next_s=next_s,
        now_s=time.time(),
        written=time.strftime("%Y-%m-%d %H:%M"),
        style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        script=Markup((TEMPLATES / "page.js").read_text(encoding="utf-8")),
        library=Markup(packed_library()),
        figures=Markup(_figures(charts_of(sections))),
    )


@lru_cache(maxsize=1)
def packed_library() -> str:
    """plotly.js as base64 of gzip: 2 MB instead of 4.8, unpacked by the browser."""
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def _figures(charts: Sequence[Chart]) -> str:
    """JSON of {name: figure} that may stand in a script element: a caption that says </script>
    does not end it."""
    most_points = MOST_POINTS
    while True:
        parts = [f"{json.dumps(c.name)}: {to_json(c.figure, validate=False)}" for c in charts]
        text = f"{{{', '.join(parts)}}}".replace("<", "\\u003c").replace("\u2028", "\\u2028")
        if len(text) <= MOST_FIGURE_BYTES or most_points <= FEWEST_POINTS:
            return text
        # many runs, or many stages: coarser curves until the page is small enough to send
        most_points //= 2
        for trace in (trace for chart in charts for trace in chart.figure.data):
            if trace.type == "scatter" and len(trace.y) > most_points:
                kept = thin(np.asarray(trace.y), most_points)
                trace.update(x=np.asarray(trace.x)[kept], y=np.asarray(trace.y)[kept])
