"""The page of data/ tells the truth: its Python snippet runs."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "data" / "README.md"


def test_snippets_run(emoji_set, monkeypatch):
    monkeypatch.chdir(emoji_set(4).parent)
    snippets = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, str(README), "exec"), {})
