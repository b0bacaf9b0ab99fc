"""Nothing outside of a folder is written or removed through what lies in it."""

import ast
import json
import os
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from common.files import (
    append_text,
    first_bytes,
    make_folder,
    read_json,
    refuse_links_in,
    remove,
    remove_folder,
    replacing,
    replacing_folder,
    write_text,
)
from data.bad_tables import write_bad_samples
from engine.checkpoint.layout import replace_text
from engine.checkpoint.writing import make_folder as make_checkpoint_folder
from launch.inference.evaluation import write_numbers
from launch.inference.folders import forget_embeddings
from launch.run.failures import _keep
from launch.run.folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("common", "data", "models", "engine", "launch", "train.py", "evaluate.py", "export.py")
WRITES = {"write_text", "write_bytes", "savefig", "unlink", "rmdir", "rmtree", "rename", "touch"}
WRITES |= {"symlink_to", "hardlink_to", "removedirs", "copytree", "copyfile", "move", "tofile"}
WRITES |= {"extract", "extractall", "unpack_archive"}
OF_OS = {"replace", "remove", "open", "link", "symlink", "truncate", "mkfifo"}
# What else writes, and why it cannot be led elsewhere.
EXCEPTIONS = {
    "engine/processes/start.py": "the system's shared memory",
    "engine/processes/ops.py": "the user's own cache",
    "launch/setup/ranks.py": "copies into a temporary folder",
    "engine/checkpoint/together.py": "an empty folder that was just made",
    "launch/inference/gallery.py": "into the new file that `replacing` gives",
    "launch/tools/kept_code.py": "code into the new folder that `replacing_folder` gives",
    "data/inspect.py": "into the new file that `replacing` gives",
    "data/formats/clips.py": "a film in memory",
    "data/formats/speech.py": "sounds into the new folder that `replacing_folder` gives",
    "engine/checkpoint/layout.py": "opens to read, and to flush",
    "common/output.py": "the system's null device",
    "launch/run/supervise.py": "opens to read",
}


def _writes(tree: ast.AST) -> list[str]:
    """Calls that open for writing, remove or rename, as `name:line`."""
    found = []
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        function = call.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        owner = getattr(function, "value", None)
        of_os = isinstance(owner, ast.Name) and owner.id == "os"
        modes = [
            argument.value
            for argument in [*call.args, *(word.value for word in call.keywords)]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
        ]
        opens = name == "open" and any(
            set(mode) <= set("rwabt+") and set(mode) & set("wa+") for mode in modes
        )
        # a new file of `replacing`, and the module common/files.py
        safe = isinstance(owner, ast.Name) and owner.id in ("beside", "files")
        if not safe and (
            opens
            or (isinstance(function, ast.Attribute) and name in WRITES)
            or (of_os and name in OF_OS)
        ):
            found.append(f"{name}:{call.lineno}")
    return found


def test_one_place_writes_and_removes():
    files = [
        file
        for name in PRODUCT
        for file in ([ROOT / name] if name.endswith(".py") else sorted((ROOT / name).rglob("*.py")))
    ]
    places = {
        name: found
        for file in files
        if (name := str(file.relative_to(ROOT))) != "common/files.py"
        and (found := _writes(ast.parse(file.read_text(encoding="utf-8"))))
    }
    assert {name: places[name] for name in places.keys() - EXCEPTIONS.keys()} == {}


@pytest.fixture
def victim(tmp_path):
    file = tmp_path / "home" / ".bashrc"
    file.parent.mkdir()
    file.write_text("own\n")
    return file


@pytest.fixture
def trap(tmp_path, victim):
    """A folder whose entries lead to a file and a folder elsewhere."""
    folder = tmp_path / "trap"
    folder.mkdir()
    for name in ("metrics.jsonl", "a.json", "a.json.writing", "lock", "about.json"):
        (folder / name).symlink_to(victim)
    (folder / "inner").symlink_to(victim.parent)
    yield folder
    assert victim.read_text() == "own\n"
    assert [file.name for file in victim.parent.iterdir()] == [".bashrc"]


@pytest.mark.parametrize("write", [write_text, replace_text])
def test_a_link_is_replaced_and_not_followed(trap, write):
    write(trap / "a.json", "new")
    assert (trap / "a.json").read_text() == "new" and not (trap / "a.json").is_symlink()


def test_a_file_grows_only_where_it_is_one_of_its_own(trap, tmp_path, victim):
    with pytest.raises(OSError, match="is a link"):
        append_text(trap / "metrics.jsonl", "x")
    os.link(victim, tmp_path / "second")
    with pytest.raises(OSError, match="no ordinary file"):
        append_text(tmp_path / "second", "x")
    os.unlink(tmp_path / "second")
    append_text(trap / "new", "1\n")
    append_text(trap / "new", "2\n")
    assert (trap / "new").read_text() == "1\n2\n"


@pytest.mark.parametrize(
    "act",
    [
        lambda trap: make_folder(trap / "inner" / "x", within=trap),
        lambda trap: remove(trap / "inner" / ".bashrc", trap),
        lambda trap: remove(trap / ".." / "home" / ".bashrc", trap),
        lambda trap: remove_folder(trap / "inner" / "..", trap),
        lambda trap: refuse_links_in(trap),
    ],
)
def test_what_leads_out_of_a_folder_is_refused(trap, act):
    with pytest.raises(OSError):
        act(trap)


def test_of_a_link_to_a_folder_the_link_is_removed(trap):
    remove_folder(trap / "inner", trap)
    assert not (trap / "inner").is_symlink()


def test_a_broken_writer_leaves_what_was_there(tmp_path):
    write_text(tmp_path / "a", "old")
    with pytest.raises(KeyError):
        with replacing(tmp_path / "a") as beside:
            beside.write_text("ne")
            raise KeyError
    with pytest.raises(KeyError):
        with replacing_folder(tmp_path / "b") as inner:
            write_text(inner / "x", "x")
            raise KeyError
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"a": "old"}


def test_files_have_the_rights_that_the_user_gives(tmp_path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "a", "x")
        with replacing_folder(tmp_path / "b"):
            pass
    finally:
        os.umask(before)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in "ab"]
    assert modes == [0o640, 0o750]


def test_a_run_folder_with_links_is_refused_before_work(trap):
    with pytest.raises(OSError, match="metrics.jsonl: is a link"):
        RunFolder(trap, first_rank=True).claim()
    (trap / "metrics.jsonl").unlink()
    with pytest.raises(OSError, match="lock: is a link"):
        RunFolder(trap, first_rank=True).claim()
    with pytest.raises(OSError, match="leads out of"):
        make_checkpoint_folder(trap / "inner", 1)


@pytest.mark.parametrize("names", [["../home/.bashrc"], ["..", "image"], [1], "image/x"])
def test_embeddings_name_modalities_and_no_paths(trap, names):
    (trap / "about.json").unlink()
    (trap / "about.json").write_text(json.dumps({"modalities": names}))
    with pytest.raises(ValueError, match="names of modalities"):
        forget_embeddings(trap)


def test_evaluating_a_strangers_run_writes_in_it_alone(trap, victim):
    """The files that training, evaluation and plots write, each of them a link elsewhere."""
    for name in ("config.json", "timeline.png", "error-rank0.txt", "done", "out.npy", "bad.jsonl"):
        (trap / name).symlink_to(victim)
    (trap / "about.json").unlink()
    (trap / "about.json").symlink_to(victim)
    folder = RunFolder(trap, first_rank=True)
    folder.mark_done(True)
    folder.mark_done(False)
    folder.write_costs({"a": 1})
    write_numbers(trap / "a.json", {"recall": 0.5})
    _keep("details", trap, 0)
    write_bad_samples(trap / "bad.jsonl", [])
    with replacing(trap / "timeline.png") as beside:
        plt.figure().savefig(beside, format="png")
    for name in ("bad_samples.jsonl", "loss_weights.jsonl"):
        (trap / name).symlink_to(victim)
    with pytest.raises(OSError, match="is a link"):
        folder.note_bad_sample("data", "id; touch ~/owned", "where", "unreadable", "")
    with pytest.raises(OSError, match="link"):
        folder.append(folder.metrics, {"loss": 1.0})


def test_an_export_removes_no_folder_that_it_did_not_make(tmp_path):
    own = tmp_path / "out.writing"
    own.mkdir()
    (own / "mine").write_text("x")
    with replacing_folder(tmp_path / "out") as beside:
        write_text(beside / "a", "x")
    assert (own / "mine").read_text() == "x" and (tmp_path / "out" / "a").is_file()


def test_json_without_an_end_of_its_depth_is_an_error(tmp_path):
    (tmp_path / "config.json").write_text("[" * 200_000)
    with pytest.raises(ValueError, match="config.json: its JSON is nested too deeply"):
        read_json(tmp_path / "config.json")


def test_of_what_has_no_end_no_more_is_taken_than_asked_for():
    def pieces():
        for _ in range(5):
            yield b"ab"
        raise AssertionError("more was taken")

    assert first_bytes(pieces(), 9) == b"ab" * 5 and first_bytes(pieces(), 3) == b"abab"
    assert first_bytes([b"ab"], 9) == b"ab"
