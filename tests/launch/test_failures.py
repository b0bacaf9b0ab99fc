"""The exit status by which supervise.sh starts a run again (1) or does not (2)."""

import errno
from types import SimpleNamespace

from launched import run_to_end

from data.inspect import main as inspect
from launch.run.failures import _status
from launch.run.folder import RunFolder
from launch.tools import balance, plan, report, timeline


class FromTheHub(OSError):
    """As huggingface_hub's errors are."""

    def __init__(self, status_code):
        self.response = SimpleNamespace(status_code=status_code)


def caused(error, cause):
    error.__cause__ = cause
    return error


def test_a_wrong_input_is_status_2_and_what_may_pass_is_status_1(tmp_path):
    new, trained = (RunFolder(tmp_path / name, True) for name in ("new", "trained"))
    trained.checkpoints.mkdir()
    (trained.checkpoints / "latest").write_text("step-00000001")
    for error, status in (
        (ValueError("optimizer.params.lr"), 2),
        (FileNotFoundError("jsonl:nowhere.jsonl: no such file"), 2),
        (PermissionError(errno.EACCES, "not allowed"), 2),
        (NotADirectoryError(errno.ENOTDIR, "a file"), 2),
        (OSError(errno.ENAMETOOLONG, "too long"), 2),
        (caused(FileNotFoundError("weights 'a/b'"), FromTheHub(404)), 2),
        (caused(FileNotFoundError("weights 'a/b'"), FromTheHub(503)), 1),
        (caused(FileNotFoundError("weights 'a/b'"), ConnectionError("no network")), 1),
        (OSError(errno.ENOSPC, "full"), 1),
        (OSError(errno.ESTALE, "storage"), 1),
        (KeyError("a fault of ours"), 1),
    ):
        assert _status(error, None) == _status(error, new) == status, error
        # the names were right before: a file system that is gone may come back
        assert _status(error, trained) == (2 if isinstance(error, ValueError) else 1), error


def test_a_program_ends_with_status_2_where_a_file_is_not_there():
    for words in (
        ["evaluate.py", "nowhere"],
        ["export.py", "nowhere", "out"],
        ["data/cache/__main__.py", "jsonl:nowhere.jsonl", "--image-size", "32"],
    ):
        status, output = run_to_end(*words)
        assert status == 2, output
        assert "nowhere" in output and "Traceback" not in output


def test_a_tool_ends_with_status_2_where_a_file_is_not_there(capsys):
    plans = ["--gpus", "8", "--deepspeed_config", "nowhere"]
    for run, words in (
        (inspect, ["jsonl:nowhere"]),
        *((tool.run, ["nowhere"]) for tool in (balance, report, timeline)),
        (plan.run, plans),
    ):
        assert run(words) == 2 and "nowhere" in capsys.readouterr().err
