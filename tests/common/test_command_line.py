"""Command lines: flags, files of arguments, and commands that a shell has cut."""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from deepspeed.launcher.multinode_runner import PDSHRunner

from common.command_line import CommandParser, InFile

ROOT = Path(__file__).resolve().parents[2]
SPEC = "stream:/d/{000..999}.parquet?mixed=16&text=caption&where=similarity>=0.5 and x != 'a;b'"
STAGES = 'branches.stages={"image":1,"text": 1}'
PROGRAM = """
import json, sys
from common.command_line import CommandParser
parser = CommandParser(prog="train.py")
parser.add_argument("--data", action="append")
parser.add_argument("--set", nargs="+")
parser.add_argument("--steps", type=int)
print(json.dumps(vars(parser.parse_args())), file=sys.stderr)
"""
# what DeepSpeed's launcher of a host is, as far as this concerns: it starts the ranks
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[2:]])"


@pytest.fixture
def parser():
    parser = CommandParser(prog="train.py")
    for flag, how in (
        ("--data", {"action": "append"}),
        ("--set", {"nargs": "+", "action": "extend"}),
        ("--steps", {"type": int}),
        ("--image-size", {"type": int}),
        ("--deterministic", {"action": "store_true"}),
        ("--local_rank", {"help": argparse.SUPPRESS}),
    ):
        parser.add_argument(flag, **how)
    return parser


@pytest.fixture
def refused(parser, capsys):
    def refused(*words):
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(words)
        out, err = capsys.readouterr()
        assert ended.value.code == 2 and not out and err.count("\n") == 1
        return err

    return refused


def test_a_file_has_an_argument_on_each_line_as_it_stands(parser, tmp_path, monkeypatch):
    lines = "# the run", "", f"--data {SPEC}", f"--data={SPEC}", "--set", STAGES, "seed=1"
    (tmp_path / "a run.args").write_text("\n".join([*lines, "  --deterministic  "]))
    found = parser.parse_args(["--image-size", "3", f"@{tmp_path}/a run.args", "--steps", "2"])
    assert found.data == [SPEC, SPEC] and found.set == [STAGES, "seed=1"]
    assert (found.steps, found.image_size, found.deterministic) == (2, 3, True)
    # records have what the file says
    monkeypatch.setattr(sys, "argv", ["train.py", f"@{tmp_path}/a run.args"])
    parser.parse_args()
    assert sys.argv == ["train.py", "--data", SPEC, *lines[3:], "--deterministic"]


def test_a_value_that_begins_with_the_sign_is_a_value(parser, tmp_path):
    (tmp_path / "args").write_text("--data\n@home\n")
    written = ["--data", "@home", "--da", "@home", "--data=@home", f"@{tmp_path}/args"]
    assert parser.parse_args(written).data == ["@home"] * 4
    # what follows -- is another program's
    parser.add_argument("options", nargs="*")
    assert parser.parse_args(["--", f"@{tmp_path}/args"]).options == [f"@{tmp_path}/args"]


def test_a_value_may_be_in_a_file(parser, refused, tmp_path):
    def read(file):
        return file.read_text().split()

    parser.add_argument("--sets", type=InFile(read, (".yaml",)), action="append")
    parser.add_argument("--valid", type=InFile(read, (".yaml",)))
    parser.add_argument("word", type=InFile(read, (".yaml",)), nargs="?")
    two, one = tmp_path / "two.yaml", tmp_path / "one.yaml"
    two.write_text("a b")
    one.write_text("c")
    (tmp_path / "run.args").write_text(f"--sets @{two}\n--valid=@{one}\n@{one}")
    for words in (
        ["--sets", f"@{two}", "--valid", f"@{one}", f"@{one}"],
        [f"@{one}", f"--sets=@{two}", "--val", f"@{one}"],
        [f"@{tmp_path}/run.args"],
    ):
        found = parser.parse_args(words)
        assert (found.sets, found.valid, found.word) == (["a", "b"], "c", "c"), words
    assert parser.parse_args(["--sets", "x", "--data", f"@{two}"]).data == [f"@{two}"]
    assert parser.words(["x", "--", "--sets", f"@{two}"]) == ["x", "--", "--sets", f"@{two}"]
    for words in (["--valid", f"@{two}"], [f"--valid=@{two}"]):
        assert f"@{two} holds 2 of --valid, which takes one" in refused(*words)
    assert f"@{two} holds 2 of word" in refused(f"@{two}")


def test_what_was_written_for_a_shell_is_refused_in_a_file(refused, tmp_path):
    for text, words in (
        ("--data 'x?a=b'", "leave out the quotes"),
        ('--data="x"', "leave out the quotes"),
        ("--steps 2 \\", "leave out the quotes"),
        ("\n--data x --steps 2", "line 2: x --steps 2: give --steps a line of its own"),
        ("--steps two", "argument --steps: invalid int value: 'two'"),
    ):
        (tmp_path / "args").write_text(text)
        assert words in refused(f"@{tmp_path}/args"), text
    assert "No such file" in refused("@nowhere") and "./@…" in refused("@nowhere")
    (tmp_path / "args").write_bytes(b"\xff")
    assert "no text in UTF-8" in refused(f"@{tmp_path}/args")


def test_a_mistyped_flag_is_answered_with_the_one_that_was_meant(refused):
    for written, meant in (("--stepz", "--steps"), ("--image_size=3", "--image-size")):
        assert f"unrecognized arguments: {written}; did you mean '{meant}'?" in refused(written)
    assert "did you mean" not in refused("--xyz", "2")
    assert "did you mean" not in refused("--local_rnk", "2")  # of launchers, not shown


def test_words_that_a_shell_has_made_of_one_are_refused(refused):
    err = refused("--data", *(f"{i}.tar" for i in range(9)), "--steps", "2")
    assert "unrecognized arguments: 1.tar 2.tar 3.tar 4.tar … (8 words)" in err
    assert "a shell has made several of one argument" in err and "@FILE" in err


def sent(arguments, folder, over_ssh=True):
    """The program behind a shell on another host, as DeepSpeed's launcher writes the command."""
    given = SimpleNamespace(args=SimpleNamespace(user_args=arguments))
    words = PDSHRunner.parse_user_args(given)
    (folder / "train.py").write_text(PROGRAM)
    (folder / "launch.py").write_text(LAUNCHER)
    launch = [sys.executable, "launch.py", "deepspeed.launcher.launch", "train.py"]
    text = " ".join([*launch, *words]) + ";echo XXRETCODE:$?"
    env = {**os.environ, "PYTHONPATH": str(ROOT)} | ({"SSH_CONNECTION": "x"} if over_ssh else {})
    done = subprocess.run(
        ["bash", "-c", text],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGQUIT, signal.SIG_DFL),  # as sshd does
    )
    return done.stderr, sorted(file.name for file in folder.iterdir())


def test_a_file_of_arguments_arrives_on_other_hosts_as_it_was_typed(tmp_path):
    (tmp_path / "run.args").write_text(f"--data {SPEC}\n--set {STAGES}\n--steps 2\n")
    said, _ = sent(["@run.args"], tmp_path)
    assert json.loads(said) == {"data": [SPEC], "set": [STAGES], "steps": 2}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("x?mixed=16&text=caption", "ended the command at the & of an argument"),
        ("x?where=similarity>=0.5", "has taken the > of an argument that has >=0.5 in it"),
        ("x?where=similarity>0.5", "the > of an argument for `write to the file 0.5`"),
        ("x;y", "ended the command at the ; of an argument"),
        ("{0..2}.tar", "unrecognized arguments: 1.tar 2.tar"),
    ],
)
def test_a_command_that_a_shell_has_cut_on_another_host_is_refused(spec, words, tmp_path):
    said, files = sent(["--data", spec, "--steps", "2"], tmp_path)
    assert words in said and "@FILE" in said and "{" not in said.partition("error:")[0]
    assert files == ["launch.py", "train.py"]


def test_a_command_without_signs_of_a_shell_is_taken(tmp_path):
    said, _ = sent(["--data", "x?text=caption", "--set", STAGES, "--steps", "2"], tmp_path)
    assert json.loads(said)["set"] == [STAGES]
    # where it was typed, it may run in the background
    said, _ = sent(["--data", "x", "&", "true"], tmp_path, over_ssh=False)
    assert json.loads(said)["data"] == ["x"]
