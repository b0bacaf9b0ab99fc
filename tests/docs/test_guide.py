"""The commands of the guide and of README.md are understood by the programs that they start, the
files that they name exist, and the Python of the guide runs."""

import json
import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("material", reason="pip install -r requirements-docs.txt")
import reference

from engine.config.reading import check_config
from launch.config.blocks import READERS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
STARTS = re.compile(r"(?:python |deepspeed .*?)(train\.py|evaluate\.py|export\.py|-m [\w.]+)")


def blocks(kind: str, pages=PAGES) -> list[str]:
    """The fenced blocks of a kind; indented ones count as bash."""
    texts = [page.read_text(encoding="utf-8") for page in pages]
    found = [
        block
        for text in texts
        for block in re.findall(rf"^```{kind}\n(.*?)^```", text, re.M | re.S)
    ]
    if kind == "bash":
        found += [block for text in texts for block in re.findall(r"(?:^    .*\n)+", text, re.M)]
    return found


def commands() -> list[str]:
    """Each command of the pages on one line, without its comment."""
    joined = [re.sub(r"\\\n\s*", "", block) for block in blocks("bash")]
    lines = [line.strip() for block in joined for line in block.splitlines()]
    return list(dict.fromkeys(line for line in lines if STARTS.search(line)))


def test_commands_are_understood(subtests, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in re.findall(
        r"^cat > (\S+) <<'END'\n(.*?)^END$", "".join(blocks("bash")), re.M | re.S
    ):
        Path(name).write_text(text)
    parsers = {parser.prog.removeprefix("python "): parser for parser in reference.parsers()}
    assert len(commands()) > 30
    for command in commands():
        program = STARTS.search(command)[1]
        arguments = shlex.split(command[STARTS.search(command).end() :], comments=True)
        arguments = arguments[: arguments.index("&")] if "&" in arguments else arguments
        with subtests.test(command):
            try:
                parsers[program].parse_args(arguments)
            except SystemExit:
                pytest.fail(f"{program} refuses {arguments}")
            for word in arguments:
                if re.match(r"(ds_configs|examples)/", word):
                    assert (ROOT / word).is_file(), word


def test_json_files_are_accepted(subtests):
    minimal = {"optimizer": {"type": "AdamW", "params": {"lr": 5e-4}}}
    whole = [text for text in blocks("json") if "train_batch_size" in text]
    assert whole
    for text in whole:
        with subtests.test(text):
            check_config({**minimal, **json.loads(text)}, ("image", "text"), READERS)


def test_the_python_of_the_guide_runs(tmp_path, monkeypatch, registries):
    monkeypatch.chdir(tmp_path)
    for block in blocks("python"):
        exec(compile(block, "docs/guide", "exec"), {})
    lines = (tmp_path / "pairs" / "pairs.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 986 and len(list((tmp_path / "pairs" / "img").iterdir())) == 986
