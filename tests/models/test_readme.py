"""The snippets of models/README.md run."""

import re
from pathlib import Path


def test_snippets():
    text = (Path(__file__).parents[2] / "models/README.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, "models/README.md", "exec"), {})
