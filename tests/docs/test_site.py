"""The site builds without a warning, has every page, and its reference has every flag and key."""

import argparse
import dataclasses
import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config.deepspeed_keys import DEEPSPEED_KEYS
from engine.config.reading import BranchesBlock
from launch.config.blocks import BalanceBlock

pytest.importorskip("material", reason="pip install -r requirements-docs.txt")
import reference

pytestmark = pytest.mark.all("builds the site")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(module_folder) -> Path:
    """The folder of the built site; `--strict` makes a broken link or anchor an error."""
    folder = module_folder("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def text_of(page: Path) -> str:
    """What a reader sees of a page's article."""
    (article,) = re.findall(r"<article.*?</article>", page.read_text(encoding="utf-8"), re.DOTALL)
    return html.unescape(re.sub(r"<[^>]+>", "", article))


def test_every_document_is_a_page(site):
    documents = [*ROOT.glob("*.md"), *ROOT.glob("[!.]*/README.md"), *ROOT.glob("docs/*/*.md")]
    shown = {text_of(page).split("¶")[0].strip() for page in site.glob("**/index.html")}
    for document in documents:
        title = document.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        assert title.replace("`", "") in shown, document


def test_figures_and_source_files_are_there(site):
    assert (site / "docs" / "step.svg").is_file() and (site / "docs" / "learning.svg").is_file()
    shown = text_of(site / "examples" / "loss.py" / "index.html")
    assert all(
        line.strip() in shown for line in (ROOT / "examples/loss.py").read_text().split("\n")
    )


def test_every_flag_is_in_the_reference(site):
    page = text_of(site / "reference" / "flags" / "index.html")
    parsers = reference.parsers()
    assert {parser.prog for parser in parsers} >= {
        "train.py",
        "evaluate.py",
        "export.py",
        "python -m data.inspect",
        "python -m launch.tools.plan",
    }
    for parser in parsers:
        _, _, section = page.partition(f"\n{parser.prog}¶")
        shown = [action for action in parser._actions if action.help is not argparse.SUPPRESS]
        for option in (option for action in shown for option in action.option_strings[-1:]):
            assert option == "--help" or option in section, f"{parser.prog} {option}"


def test_every_key_is_in_the_reference(site):
    page = text_of(site / "reference" / "keys" / "index.html")
    names = [field.name for field in dataclasses.fields(BranchesBlock)] + DEEPSPEED_KEYS
    assert all(re.search(rf"^{name}$", page, re.MULTILINE) for name in names)
    blocks = dict(reference.blocks())
    assert blocks["balance"] is BalanceBlock
    assert {"ema", "locked", "gradient_clipping.GROUP", "optimizer_groups.GROUP"} <= set(blocks)
    for key, block in blocks.items():
        section = page.partition(f"\nbranches.{key}¶")[2].partition("\nbranches.")[0]
        for field in dataclasses.fields(block):
            assert re.search(rf"^{field.name}$", section, re.MULTILINE), f"{key}.{field.name}"


def test_a_chinese_page_is_in_chinese(site):
    page = (site / "zh" / "guide" / "resume" / "index.html").read_text(encoding="utf-8")
    assert '<html lang="zh"' in page
    # the navigation of that language only, and the same page in the other one
    assert "运行演示" in page and "Run the demo" not in page
    assert '<a href="../../../guide/resume/" hreflang="en"' in page
    english = (site / "guide" / "resume" / "index.html").read_text(encoding="utf-8")
    assert '<a href="../../zh/guide/resume/" hreflang="zh"' in english and "运行演示" not in english
