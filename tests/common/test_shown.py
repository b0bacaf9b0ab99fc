"""What is shown, recorded or put into a document: no command to a terminal, no credentials, no
markup of others."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.markdown import code, fenced, words
from common.output import brief, shown
from common.secrets import redact, redacted

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("common", "data", "models", "engine", "launch")


def test_a_terminal_gets_no_command_of_others():
    for said, expected in (
        ("a\x1b]0;title\x07b", r"a\x1b]0;title\x07b"),
        ("\x1b[8mhidden", r"\x1b[8mhidden"),
        ("\x1b[1;8;31mhidden", r"\x1b[1;8;31mhidden"),
        ("\x1b[2J", r"\x1b[2J"),
        ("good\rbad", r"good\rbad"),
        ("\x9b31m\u202egpj.exe", r"\x9b31m\u202egpj.exe"),
        ("\x1b[1;31mred\x1b[0m", "\x1b[1;31mred\x1b[0m"),
        ("\r 10%|## |", "\r 10%|## |"),
        ("\n\x1b[A", "\n\x1b[A"),
        ("图像 – naïve\n", "图像 – naïve\n"),
    ):
        assert shown(said) == expected


def test_no_more_of_a_value_is_made_than_is_shown():
    itself: list = []
    itself.append(itself)
    shared: list = [1]
    for _ in range(60):
        shared = [shared, shared]
    assert brief(itself) == "[" * 100
    assert brief(shared, 62) == "[" * 61 + "1"
    assert brief(10**100_000) == "<a number of 332,193 bits>"
    mixed = {"a": [1, -2.5, None, True], "b": ("it's", b"\0"), "": {}}
    assert brief(mixed) == repr(mixed)
    for long in ("x" * 10**6, "it's " * 10**5, b"\0" * 10**6, [*range(10**6)], {0: [0] * 10**6}):
        assert brief(long, 50) == repr(long)[:50]


def test_values_of_others_are_shown_by_brief():
    """`{value!r:.100}` makes all of it, however long, and then cuts it."""
    for file in sorted(each for name in PRODUCT for each in (ROOT / name).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FormattedValue) and node.conversion == ord("r"):
                assert node.format_spec is None, f"{file}:{node.lineno}: use common.output.brief"


MORE = pytest.mark.all("starts more programs")


@pytest.mark.parametrize(
    "program",
    [
        "train.py",
        *(pytest.param(name, marks=MORE) for name in ("data.inspect", "launch.tools.plan")),
    ],
)
def test_a_program_shows_what_it_is_given_escaped(program):
    """All write through the same streams (`test_every_program_outlives_its_output`)."""
    call = [program] if program.endswith(".py") else ["-m", program]
    hostile = "x\x1b]0;owned\x07\x9b\u202e"
    words = [sys.executable, *call, hostile, f"--no-such-{hostile}"]
    env = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    given = subprocess.run(words, cwd=ROOT, capture_output=True, timeout=120, env=env)
    assert given.returncode == 2
    for command in ("\x1b", "\x07", "\x9b", "\u202e"):
        assert command not in (given.stdout + given.stderr).decode()


def test_addresses_lose_their_credentials():
    for said, expected in (
        ("s3://key:pass@word@bucket/a.tar", "s3://***@bucket/a.tar"),
        (
            "webdataset:https://h/a.tar?X-Sig=1&e=2::gs://b/c.tar",
            "webdataset:https://h/a.tar?X-Sig=***&e=***::gs://b/c.tar",
        ),
        (
            "parquet:https://u@h/p.parquet?image=a&text=b",
            "parquet:https://***@h/p.parquet?image=a&text=b",
        ),
        ("csv:a.csv?image=x", "csv:a.csv?image=x"),
        ("https://h/part-?.parquet", "https://h/part-?.parquet"),
        (
            "mail me@here.org, see https://docs.org/a#b?",
            "mail me@here.org, see https://docs.org/a#b?",
        ),
    ):
        assert redact(said) == redact(redact(said)) == expected
        assert json.loads(redact(json.dumps({"data": [said]}))) == {"data": [expected]}


def test_a_record_keeps_its_numbers():
    record = {"data": ["https://u:p@h/a?k=v"], "steps": 12345678, "pair": ("a", None), "on": True}
    assert redacted(record) == {**record, "data": ["https://***@h/a?k=***"], "pair": ["a", None]}


def test_values_of_secrets_in_the_environment_are_not_shown():
    names = ("STORE_SECRET", "wandb_api_key", "SIGNING_KEY", "HF_TOKEN", "DB_PASSWORD", "KEYBOARD")
    secrets = {name: f"s3cr3t-value-{n}" for n, name in enumerate(names)}
    said = " ".join(secrets.values())
    script = f"import common.output as o; o.outlive_output(); print({said!r})"
    environment = {**os.environ, **secrets}
    said = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert said.stdout == "*** *** *** *** *** s3cr3t-value-5\n"


def test_text_stays_in_its_place_of_a_document():
    from markdown_it import MarkdownIt

    hostile = "a`b``c\n```\n# x\n<script>alert(1)</script> | [l](http://e) **b** \x1b[2J"
    page = f"# {words(hostile)}\n\n| a | b |\n|---|---|\n| {code(hostile)} | {words(hostile)} |\n\n"
    page += fenced(hostile + "\n````") + "\n\nend\n"
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(page)
    kinds = [token.type for token in tokens]
    assert kinds.count("heading_open") == 1 and kinds.count("fence") == 1
    assert kinds.count("td_open") == 2 and kinds[-3:] == [
        "paragraph_open",
        "inline",
        "paragraph_close",
    ]
    inner = [child.type for token in tokens for child in token.children or []]
    assert not {"link_open", "html_inline", "strong_open", "image"} & set(inner)
    assert "html_block" not in kinds and "\x1b" not in page
