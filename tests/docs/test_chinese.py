"""The pages in Chinese say what the English pages say: under each heading the same commands and
outputs, links, tables, code and figures. A failure names the heading that differs."""

import posixpath
import re
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDE = sorted(page.name for page in (ROOT / "docs" / "guide").glob("*.md"))
PAIRS = [("README.md", "README.zh-CN.md"), *((f"docs/guide/{n}", f"docs/zh/{n}") for n in GUIDE)]
LANGUAGE = ("README.md", "README.zh-CN.md")  # the link from one to the other
BLOCK = re.compile(r"^```[^\n]*\n.*?^```$|(?<=\n\n)(?:    [^\n]*\n)+", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Section:
    """What of a section does not depend on the language. `commands`: its blocks of code, in order."""

    level: int
    commands: list[str]
    links: Counter[str]
    rows: list[int]
    code: Counter[str]
    figures: Counter[str]
    items: int


def sections(text: str, page: str) -> list[tuple[str, Section]]:
    """(heading, what is below it) in order."""
    blocks: list[str] = []

    def kept(block: re.Match) -> str:
        blocks.append(block[0])
        return f"\x00{len(blocks) - 1}\x00"

    parts = re.split(r"^(#+ .*)$", BLOCK.sub(kept, text), flags=re.MULTILINE)
    assert not parts[0].strip(), f"{page}: text before the first heading"
    return [
        (heading, _section(heading, body, blocks, page))
        for heading, body in zip(parts[1::2], parts[2::2])
    ]


def _section(heading: str, body: str, blocks: list[str], page: str) -> Section:
    prose = re.sub(r"\x00\d+\x00", "", body)
    rows = [line.count("|") for line in prose.splitlines() if line.startswith("|")]
    links = re.findall(r"\]\(([^)\s]+)\)", prose)
    prose = re.sub(r"\]\([^)\s]+\)", "]", prose)
    code = re.findall(r"`([^`\n]+)`", prose)
    figures = re.findall(
        r"(?<![\w.])\d[\d,]*(?:\.\d+)*(?:e-?\d+)?", re.sub(r"`[^`\n]+`", "", prose)
    )
    return Section(
        level=len(heading) - len(heading.lstrip("#")),
        commands=[blocks[int(number)] for number in re.findall(r"\x00(\d+)\x00", body)],
        links=Counter(_target(link, page) for link in links),
        rows=rows,
        code=Counter(code),
        figures=Counter(figure.rstrip(",") for figure in figures),
        items=len(re.findall(r"^- ", prose, re.MULTILINE)),
    )


def _target(link: str, page: str) -> str:
    """A link's target in the repository, its anchor too; that of a Chinese page is its English one,
    whose headings are not compared by name."""
    path, sharp, anchor = link.partition("#")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
    if target in LANGUAGE and page in LANGUAGE:
        return "the page in the other language"
    return (
        dict((chinese, english) for english, chinese in PAIRS).get(target, target) + sharp + anchor
    )


def differences(english: str, chinese: str, page: str, translated: str) -> list[str]:
    """A line for each heading whose section differs, with what differs."""
    first, second = sections(english, page), sections(chinese, translated)
    found = []
    for (heading, one), (title, other) in zip(first, second):
        for field in fields(Section):
            a, b = getattr(one, field.name), getattr(other, field.name)
            if a != b:
                if isinstance(a, Counter):
                    a, b = sorted((a - b).elements()), sorted((b - a).elements())
                what = f"English {a}, Chinese {b}"
                found.append(f"{translated}, “{title}” for “{heading}”, {field.name}: {what}")
    if len(first) != len(second):
        rest = [heading for heading, _ in (first + second)[2 * min(len(first), len(second)) :]]
        found.append(f"{translated}: {len(second)} headings, {page} has {len(first)}: {rest}")
    return found


def test_the_chinese_pages_are_in_step(subtests):
    for pair in PAIRS:
        with subtests.test(pair[0]):
            english, chinese = ((ROOT / each).read_text(encoding="utf-8") for each in pair)
            assert re.search(r"[一-鿿]", chinese)
            assert not (found := differences(english, chinese, *pair)), "\n".join(found)
    assert [page.name for page in sorted((ROOT / "docs" / "zh").glob("*.md"))] == GUIDE


def test_what_differs_is_named():
    english, chinese = ((ROOT / each).read_text(encoding="utf-8") for each in PAIRS[0])
    for old, new, named in (
        ("--num_gpus 8", "--num_gpus 4", "commands"),
        ("1,195.7", "1,195.9", "figures"),
        ("bench/EVIDENCE.md)", "bench/README.md)", "links"),
        ("`family`", "`other`", "code"),
        ("\n## 局限\n", "\n### 局限\n", "level"),
        ("| `steps.py memory` | 同上", "同上", "rows"),
    ):
        found = differences(english, chinese.replace(old, new), *PAIRS[0])
        assert found and all(re.search("“#+ .*[一-鿿]", line) for line in found), old
        assert any(f", {named}: " in line for line in found), old
