"""What MkDocs does for this site beyond its settings in mkdocs.yml: gathers the pages from the
repository, makes the reference from the code, and gives Chinese pages their own language.

A page is known by its path in the repository, so a relative link works on the site and in the
repository. A link to a source file leads to a page that shows the file.
"""

from __future__ import annotations

import copy
import json
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).parent))

import reference

CHINESE = "中文"  # the section of mkdocs.yml's nav with the pages in Chinese
# Where a page of the repository is on the site, if not at its own path.
PLACES = (("docs/guide/", "guide/"), ("docs/zh/", "zh/guide/"), ("README.zh-CN.md", "zh/README.md"))
PICTURES = (".svg", ".png", ".jpg", ".gif")
HAN, MARKS = "一-鿿", "，。；：、）”"  # Chinese characters; their punctuation that may end a line
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
COMMAND = re.compile(
    r"(deepspeed|python3?|bash|pip|source|export|train\.py|git|#SBATCH|[A-Z_]+=)\b"
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Instead of what is in docs/: the pages that `nav` names, what they link to, the reference."""
    gathered = Files([file for file in files if file.src_dir != config.docs_dir])
    written = {"reference/flags.md": reference.flags, "reference/keys.md": reference.keys}
    in_nav = list(pages_of(config.nav))
    for path, make in written.items():
        gathered.append(File.generated(config, path, content=make()))
    waiting = [path for path in in_nav if (ROOT / path).is_file()] + config.extra_css
    while waiting:
        path = waiting.pop()
        if path in gathered.src_uris or f"{path}.md" in gathered.src_uris:
            continue
        if path.endswith((".md", ".css", *PICTURES)):
            file = _file(path, config)
        else:
            file = File.generated(config, f"{path}.md", content=source_page(path))
        if path not in in_nav:
            file.inclusion = InclusionLevel.NOT_IN_NAV
        gathered.append(file)
        waiting += files_linked(path) if path.endswith(".md") else []
    return gathered


def pages_of(nav: Any) -> Iterator[str]:
    """The paths in `nav` of mkdocs.yml, in order."""
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_of(item)


def _file(path: str, config: MkDocsConfig) -> File:
    file = File(path, str(ROOT), config.site_dir, config.use_directory_urls)
    for prefix, place in PLACES:
        if path.startswith(prefix):
            moved = File(path.replace(prefix, place, 1), None, config.site_dir, True)
            file.dest_uri = moved.dest_uri
    return file


def files_linked(path: str) -> Iterator[str]:
    """The files of the repository that a page links to."""
    for link in LINK.findall((ROOT / path).read_text(encoding="utf-8")):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
        if (ROOT / target).is_file():
            yield target


def source_page(path: str) -> str:
    """A page that shows a file; of a notebook its cells."""
    text = (ROOT / path).read_text(encoding="utf-8").rstrip()
    suffix = path.rpartition(".")[2]
    if suffix == "ipynb":
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
        return "\n\n".join(
            f"```python\n{source}\n```" if kind == "code" else source for kind, source in cells
        )
    kind = {"py": "python", "sh": "bash"}.get(suffix, suffix)
    return f"# `{path}`\n\n````{kind}\n{text}\n````\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to source files lead to their pages; indented commands are coloured as such."""
    folder = posixpath.dirname(page.file.src_uri)

    def to_page(link: re.Match) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        return f"{link[1]}.md" if f"{target}.md" in files.src_uris else link[1]

    markdown = LINK.sub(to_page, markdown)
    if is_chinese(page):  # a line break is no space between Chinese characters
        markdown = re.sub(
            rf"(?<=[{HAN}{MARKS}])\n(?=[{HAN}（“`])|(?<=[{MARKS}])\n(?=\w)", "", markdown
        )
    return coloured(markdown)


def coloured(markdown: str) -> str:
    """An indented block that begins with a command becomes a fenced block of bash."""

    def fenced(block: re.Match) -> str:
        lines = [line[4:] for line in block[0].strip("\n").split("\n")]
        return (
            "\n\n```bash\n" + "\n".join(lines) + "\n```\n" if COMMAND.match(lines[0]) else block[0]
        )

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    # Every other part lies between fenced blocks. An indented block follows an empty line.
    parts[::2] = [re.sub(r"\n\n(?:    .*\n)+", fenced, part) for part in parts[::2]]
    return "".join(parts)


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Takes the Chinese pages out; `on_page_context` gives them a navigation of their own."""
    chinese = [item for item in nav.items if item.title == CHINESE]
    nav.items = [item for item in nav.items if item.title != CHINESE]
    config.extra["chinese"] = chinese[0].children if chinese else []
    for item in config.extra["chinese"]:
        item.parent = None
    for page in nav.pages:  # "next" and "previous" stay in the language
        if page.next_page and is_chinese(page.next_page) != is_chinese(page):
            page.next_page.previous_page = page.next_page = None
    return nav


def is_chinese(page: Page) -> bool:
    return page.url.startswith("zh/")


def on_page_context(
    context: dict[str, Any], page: Page, config: MkDocsConfig, nav: Navigation
) -> dict[str, Any]:
    """The same page in the other language, and for a Chinese page the words and the navigation of
    that language."""
    chinese = config.extra["chinese"]
    if not chinese:
        return context
    urls = {other.url for other in nav.pages}
    english = page.url.removeprefix("zh/") if is_chinese(page) else page.url
    both = {"en": english or "./", "zh": f"zh/{english.removeprefix('./')}"}
    homes = {"en": "./", "zh": "zh/"}
    own = copy.copy(config)
    own["extra"] = {
        **config.extra,
        "alternate": [
            {"name": name, "lang": code, "link": both[code] if both[code] in urls else homes[code]}
            for code, name in (("en", "English"), ("zh", CHINESE))
        ],
    }
    if is_chinese(page):
        own["theme"] = {**config.theme, "language": "zh"}
        own["extra"]["homepage"] = "zh/"
        context["nav"] = copy.copy(nav)
        context["nav"].items = chinese
    context["config"] = own
    return context


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Without the links to other languages in the head: the theme's script would look for a site map
    beside each of them. The choice of the language in the header has its own links."""
    return re.sub(r'\s*<link rel="alternate"[^>]*hreflang[^>]*>', "", output)


def on_post_build(config: MkDocsConfig) -> None:
    """Chinese has no spaces between words: in the search index every character is a word of its
    own, as the search cuts a query."""
    index = Path(config.site_dir) / "search" / "search_index.json"
    content = json.loads(index.read_text(encoding="utf-8"))
    for entry in content["docs"]:
        for key in ("title", "text"):
            entry[key] = re.sub(rf"(?<=[{HAN}])(?=[{HAN}])", "\u200b", entry[key])
    index.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
