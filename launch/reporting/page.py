"""One HTML file that holds all of a report: text, tables, pictures, figures and what draws them."""

from __future__ import annotations

import base64
import gzip
import json
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.io import to_json
from plotly.offline import get_plotlyjs

from common.files import write_text
from launch.reporting.charts import MOST_POINTS, thin_curves
from launch.reporting.parts import Section
from launch.reporting.reading import RunData, read_runs
from launch.reporting.sections import build_sections, charts_of

TEMPLATES = Path(__file__).resolve().parent / "template"
MOST_BYTES = 5_000_000
# of these bytes, beside 2 MB of library and the pictures, see `tables.MOST_PICTURE_BYTES`
MOST_FIGURE_BYTES = 1_900_000
FEWEST_POINTS = 25


def write_report(folders: Sequence[Path], output: Path) -> None:
    """The report of the runs in `folders`. Errors: FileNotFoundError, ValueError for a folder that
    holds no run; OSError where `output` cannot be written."""
    text = render_page(read_runs(folders))
    # as whole as it is there: a browser may be reading the page of before
    write_text(output, text)


def render_page(runs: Sequence[RunData], live: bool = False) -> str:
    """The whole page. `live`: one that asks for `update.json` again and again."""
    sections = build_sections(runs)
    environment = _environment()
    return environment.get_template("page.html").render(
        title=title_of(runs),
        sections=sections,
        live=live,
        written=time.strftime("%Y-%m-%d %H:%M"),
        style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        script=Markup((TEMPLATES / "page.js").read_text(encoding="utf-8")),
        library=Markup(packed_library()),
        figures=Markup(_figures(sections)),
        render_section=_render_section,
    )


def render_update(runs: Sequence[RunData]) -> str:
    """What a live page asks for: JSON with `figures`, `sections` by name, and `nav`."""
    sections = build_sections(runs)
    links = Markup().join(
        Markup('<li><a href="#{}">{}</a></li>').format(section.name, section.title)
        for section in sections
    )
    parts = json.dumps({section.name: _render_section(section) for section in sections})
    return f'{{"figures": {_figures(sections)}, "sections": {parts}, "nav": {json.dumps(links)}}}'


def title_of(runs: Sequence[RunData]) -> str:
    if len(runs) == 1:
        return f"Run {runs[0].label}"
    return f"{len(runs)} runs: {', '.join(run.label for run in runs)}"


@lru_cache(maxsize=1)
def packed_library() -> str:
    """plotly.js as base64 of gzip: 2 MB instead of 4.8, unpacked by the browser."""
    packed = gzip.compress(get_plotlyjs().encode(), compresslevel=9, mtime=0)
    return base64.b64encode(packed).decode()


def _render_section(section: Section) -> Markup:
    template = _environment().get_template("section.html")
    text = template.render(section=section, kind=lambda part: type(part).__name__)
    return Markup(text.strip())


@lru_cache(maxsize=1)
def _environment() -> Environment:
    """Everything that a run wrote is escaped; only the files of `template/` are markup."""
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _figures(sections: Sequence[Section]) -> str:
    """JSON of {name: figure} that may stand in a script element: a caption that says </script>
    does not end it."""
    figures, most_points = {chart.name: chart.figure for chart in charts_of(sections)}, MOST_POINTS
    while True:
        parts = (f"{json.dumps(k)}: {to_json(v, validate=False)}" for k, v in figures.items())
        text = f"{{{', '.join(parts)}}}".replace("<", "\\u003c").replace("\u2028", "\\u2028")
        if len(text) <= MOST_FIGURE_BYTES or most_points <= FEWEST_POINTS:
            return text
        # many runs, or many stages: coarser curves until the page is small enough to send
        most_points //= 2
        for figure in figures.values():
            thin_curves(figure, most_points)
