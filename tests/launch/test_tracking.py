"""Weights & Biases without a network: each case is a process of its own with a home of its own, as
W&B keeps state per process."""

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from launch.run import tracking

ROOT = Path(__file__).resolve().parents[2]
# the discard port: refuses at once, so nothing leaves this machine and nothing waits
NOWHERE = "http://127.0.0.1:9"

SCRIPT = """
import json, sys
from pathlib import Path
from launch.run import tracking

tracking.INIT_TIMEOUT_S = 1
mode, folder, first_rank = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "True"
tracker = tracking.Tracker(mode, "wye", folder, {"options": {"seed": 0}}, first_rank)
tracker.log({"step": 1, "loss": 2.5, "grad_norm/image": 0.1})
tracker.log({"step": 1, "validation/image_to_text_R@1": 0.5})
tracker.finish()
print(json.dumps({"imported": "wandb" in sys.modules}))
"""


@pytest.fixture
def start(tmp_path):
    """Runs a Tracker with `mode` in a folder `run`; returns (what it printed, stderr without the
    client's own `wandb:` lines)."""
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "home").mkdir()

    def start(mode: str, first_rank: bool = True, **environment: str):
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("WANDB", "NETRC"))
        }
        kept |= {
            "HOME": str(tmp_path / "home"),
            "PYTHONPATH": str(ROOT),
            "WANDB_BASE_URL": NOWHERE,
            "WANDB_ERROR_REPORTING": "false",
            **environment,
        }
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, mode, str(folder), str(first_rank)],
            env=kept,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1]), [
            line for line in done.stderr.splitlines() if line and not line.startswith("wandb:")
        ]

    start.folder = folder
    start.elsewhere = lambda: [p for p in tmp_path.iterdir() if p.name not in ("run", "home")]
    return start


def runs(folder: Path) -> list[Path]:
    return sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))


@pytest.mark.parametrize(
    "mode, first_rank", [("disabled", True), ("online", False), ("offline", False)]
)
def test_disabled_and_other_ranks_do_nothing(start, mode, first_rank):
    printed, errors = start(mode, first_rank)
    assert printed == {"imported": False} and errors == []  # not even the import
    assert list(start.folder.iterdir()) == []


def test_offline_writes_below_the_run_folder_and_goes_on_as_the_same_run(start):
    _, errors = start("offline")
    identity = (start.folder / "wandb_run_id").read_text().strip()
    (first,) = runs(start.folder)
    assert first.name == f"run-{identity}.wandb" and first.stat().st_size > 0
    assert (
        b"grad_norm/image" in first.read_bytes()
        and b"validation/image_to_text_R@1" in first.read_bytes()
    )
    assert errors == [] and start.elsewhere() == []
    start("offline")
    assert (start.folder / "wandb_run_id").read_text().strip() == identity
    assert len(runs(start.folder)) == 2 and {file.name for file in runs(start.folder)} == {
        f"run-{identity}.wandb"
    }


def test_online_without_a_login_goes_on_offline_with_one_line(start):
    _, errors = start("online")
    assert errors == [
        "no W&B login was found (run `wandb login`): tracking goes on offline; `wandb sync` "
        "uploads it later"
    ]
    assert len(runs(start.folder)) == 1 and start.elsewhere() == []


def test_online_without_a_network_goes_on_offline(start):
    _, errors = start("online", WANDB_API_KEY="0" * 40)
    assert "W&B could not be reached" in errors[0] and "tracking goes on offline" in errors[-1]
    assert len(runs(start.folder)) == 1
    assert (start.folder / "wandb_run_id").read_text().strip() in runs(start.folder)[0].name


@pytest.fixture
def broken_server():
    """The address of a server that answers everything with 500, which makes W&B's client try again
    and again."""

    class Broken(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(500)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Broken) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_online_with_a_broken_server_goes_on_offline(start, broken_server):
    _, errors = start("online", WANDB_API_KEY="0" * 40, WANDB_BASE_URL=broken_server)
    assert "W&B could not be reached" in errors[0] and "tracking goes on offline" in errors[-1]
    assert len(runs(start.folder)) == 1


def test_any_answer_counts_and_silence_has_a_limit(broken_server):
    tracking._reach(broken_server, 120)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(ConnectionError, match=r"no answer from http://127"),
    ):
        tracking._reach(f"http://127.0.0.1:{silent.getsockname()[1]}", 0.2)


def test_a_broken_login_goes_on_offline(start):
    _, errors = start("online", WANDB_API_KEY="short")
    assert (
        "API key" in errors[0]
        and "tracking goes on offline" in errors[-1]
        and len(runs(start.folder)) == 1
    )


def test_a_start_without_a_network_does_not_forget_which_run_it_is(start):
    (start.folder / "wandb_run_id").write_text("abcd1234\n")
    start("online", WANDB_API_KEY="short")
    assert (start.folder / "wandb_run_id").read_text() == "abcd1234\n"


def test_a_client_that_fails_while_training_ends_tracking_alone(tmp_path, caplog):
    class Broken:
        def log(self, *_, **__):
            raise ConnectionResetError("the service is gone")

    tracker = tracking.Tracker("disabled", "wye", tmp_path, {}, True)
    tracker._run = Broken()
    tracker.log({"step": 1, "loss": 2.5})
    tracker.log({"step": 2, "loss": 2.4})
    tracker.finish()
    assert [record.getMessage() for record in caplog.records] == [
        "W&B failed (ConnectionResetError: the service is gone): tracking ends, metrics.jsonl goes "
        "on"
    ]
