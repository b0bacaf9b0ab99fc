"""Weights & Biases without a network: each case is a process of its own with a home of its own, as
W&B keeps state per process."""

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import wandb
from deepspeed.monitor.config import WandbConfig
from wandb_files import pieces

from launch.tracking import wandb_run
from launch.tracking.destination import where, where_recorded
from launch.tracking.login import HOW_TO_SWITCH_IT_ON, choose_mode
from launch.tracking.wandb_run import log_export

ROOT = Path(__file__).resolve().parents[2]
# the discard port: refuses at once, so nothing leaves this machine and nothing waits
NOWHERE = "http://127.0.0.1:9"
KEY = "0" * 40

SCRIPT = """
import sys
from pathlib import Path
from launch.tracking import wandb_run
from launch.tracking.alerts import Alert

wandb_run.INIT_TIMEOUT_S = 1
WHERE = {"project": "wye", "group": None}
mode, folder = sys.argv[1], Path(sys.argv[2])
run = wandb_run.WandbRun(mode, folder, WHERE, {"options": {"data": sys.argv[3:]}})
run.log({"loss/total": 2.5, "clipping/grad_norm/image": 0.1}, 1, 8)
run.log({"retrieval/validation/image_to_text/R@1": 0.5}, 1, None)
run.note("balance/decisions", "texts take longer", 1)
run.note("balance/decisions", "images take longer", 2)
run.alert(Alert("Loss or gradients not finite", "Step 2 was skipped.", "ERROR"), 2)
run.finish(0)
"""


@pytest.fixture
def start(tmp_path):
    """Makes a W&B run with `mode` in a folder `run`; returns the lines of stderr without the
    client's own `wandb:` lines; of a failure, the last of them."""
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "home").mkdir()

    def start(mode: str, *data: str, **environment: str):
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "NETRC"))}
        kept |= {"HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
        kept |= {"WANDB_BASE_URL": NOWHERE, "WANDB_ERROR_REPORTING": "false", **environment}
        call = [sys.executable, "-c", SCRIPT, mode, str(folder), *data]
        how = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 300}
        done = subprocess.run(call, env=kept, **how)
        said = [line for line in done.stderr.splitlines() if not line.startswith("wandb:")]
        return said[-1] if done.returncode else list(filter(None, said))

    start.folder = folder
    start.elsewhere = lambda: [p for p in tmp_path.iterdir() if p.name not in ("run", "home")]
    return start


def runs(folder: Path) -> list[Path]:
    return sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))


def test_offline_writes_below_the_run_folder_and_goes_on_as_the_same_run(start):
    data = "webdataset:https://user:pa55word@host/a.tar?Signature=s1gnature"
    assert start("offline", data) == [] and start.elsewhere() == []
    identity = (start.folder / "wandb_run_id").read_text().strip()
    (first,) = runs(start.folder)
    assert first.name == f"run-{identity}.wandb"
    for name in (b"clipping/grad_norm/image", b"retrieval/validation/image_to_text/R@1"):
        assert name in first.read_bytes()
    (piece,) = pieces(start.folder)
    assert piece.alerts == [("Loss or gradients not finite", "Step 2 was skipped.", "ERROR")]
    *_, decisions = map(piece.file, piece.logged("balance/decisions"))
    assert json.loads(decisions.read_text())["data"][-1] == [2, "images take longer"]
    # no file of it holds the credentials of an address
    kept = [file.read_bytes() for file in start.folder.rglob("*") if file.is_file()]
    assert any(b"https://***@host/a.tar?Signature=***" in content for content in kept)
    assert not any(b"pa55word" in content or b"s1gnature" in content for content in kept)
    start("offline")
    assert (start.folder / "wandb_run_id").read_text().strip() == identity
    assert [file.name for file in runs(start.folder)] == [f"run-{identity}.wandb"] * 2


def test_the_folder_of_wandb_is_inside_of_the_run(start, tmp_path):
    (tmp_path / "run" / "wandb").symlink_to(tmp_path / "home")
    errors = start("offline")
    assert "leads out of" in errors and list((tmp_path / "home").iterdir()) == []
    (tmp_path / "run" / "wandb").unlink()
    (tmp_path / "run" / "wandb").mkdir()
    (tmp_path / "run" / "wandb" / "data").symlink_to(tmp_path / "home")
    errors = start("offline")
    assert "data: leads out of" in errors and list((tmp_path / "home").iterdir()) == []


def test_online_without_a_login_goes_on_offline_with_one_line(start):
    (said,) = start("online", WANDB_RUN_ID="run45678")  # as the agent of a sweep has chosen
    assert said.startswith("no W&B login was found") and "tracking goes on offline" in said
    assert [file.name for file in runs(start.folder)] == ["run-run45678.wandb"]
    assert start.elsewhere() == []


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


@pytest.mark.parametrize(
    "key, server, said",
    [
        pytest.param(KEY, False, "W&B could not be reached", id="no network"),
        pytest.param(KEY, True, "W&B could not be reached", id="broken server"),
        pytest.param("short", False, "API key", id="broken login"),
    ],
)
def test_online_goes_on_offline_as_the_run_that_it_is(start, broken_server, key, server, said):
    (start.folder / "wandb_run_id").write_text("abcd1234\n")
    errors = start("online", WANDB_API_KEY=key, WANDB_BASE_URL=broken_server if server else NOWHERE)
    assert said in errors[0] and "tracking goes on offline" in errors[-1]
    (file,) = runs(start.folder)
    assert file.name == "run-abcd1234.wandb"
    assert (start.folder / "wandb_run_id").read_text() == "abcd1234\n"


def test_a_picture_that_cannot_be_drawn_is_left_out(tmp_path, caplog):
    class Kept(wandb_run.WandbRun):
        def __init__(self):
            self.lines = []

        def log(self, values, step, samples):
            self.lines.append(values)

    def failing():
        raise ValueError("no such step")

    run = Kept()
    run.media("timeline/step", failing, 1)
    run.log({"loss/total": 2.5}, 1, 8)
    assert run.lines == [{"loss/total": 2.5}]
    assert "timeline/step is not shown in W&B (ValueError: no such step)" in caplog.messages


# -- whether it is used at all


class Machine:
    def __init__(self, home, monkeypatch):
        self.home, self._monkeypatch = home, monkeypatch

    def told(self, environment, settings):
        """Set what W&B's client reads; returns its file of settings."""
        for name, value in environment.items():
            self._monkeypatch.setenv(name, value)
        file = self.home / ".config" / "wandb" / "settings"
        if settings:
            file.parent.mkdir(parents=True)
            lines = (f"{name} = {value}\n" for name, value in settings.items())
            file.write_text("[default]\n" + "".join(lines))
        return file


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Without a login, a setting or a word in the environment. W&B's client forgets what it has
    read before and after."""
    for name in [name for name in os.environ if name.startswith(("WANDB", "NETRC"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    wandb.teardown()
    yield Machine(tmp_path, monkeypatch)
    wandb.teardown()


def test_without_a_login_auto_says_how_to_switch_it_on_and_leaves_no_process(machine):
    assert choose_mode("auto", WandbConfig()) == ("disabled", HOW_TO_SWITCH_IT_ON)
    assert "wandb-core" not in [each.name() for each in psutil.Process().children()]
    assert "wandb login" in HOW_TO_SWITCH_IT_ON and "--wandb offline" in HOW_TO_SWITCH_IT_ON


@pytest.mark.parametrize(
    "environment, settings, server",
    [
        ({"WANDB_API_KEY": KEY}, {}, None),
        ({"WANDB_API_KEY": "too short, which the start of the run says"}, {}, None),
        ({}, {"api_key": KEY}, None),
        ({}, {"base_url": "https://wandb.example:8080"}, "wandb.example:8080"),
    ],
)
def test_with_a_login_auto_is_online(machine, environment, settings, server):
    machine.told(environment, settings)
    if server:
        (machine.home / ".netrc").write_text(f"machine {server} login user password {KEY}\n")
    assert choose_mode("auto", WandbConfig()) == ("online", "")


def test_what_is_damaged_is_no_login(machine):
    (machine.home / ".netrc").write_text("machine\n")
    assert choose_mode("auto", WandbConfig())[0] == "disabled"
    machine.told({}, {"mode": "online"}).write_bytes(b"\xff[")
    wandb.teardown()
    mode, notice = choose_mode("auto", WandbConfig())
    assert mode == "disabled" and "its client does not start" in notice


@pytest.mark.parametrize(
    "environment, settings, mode",
    [
        ({"WANDB_MODE": "offline"}, {}, "offline"),
        ({"WANDB_MODE": "dryrun"}, {}, "offline"),
        ({"WANDB_MODE": ""}, {}, "online"),
        ({"WANDB_DISABLED": "true"}, {}, "disabled"),
        ({}, {"mode": "disabled"}, "disabled"),
    ],
)
def test_what_the_user_told_wandb_decides_where_no_flag_does(machine, environment, settings, mode):
    machine.told({"WANDB_API_KEY": KEY} | environment, settings)
    assert choose_mode("auto", WandbConfig(enabled=True)) == (mode, "")
    assert choose_mode("online", WandbConfig()) == ("online", "")


def test_a_mode_that_has_no_meaning_here_is_one_line(machine, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_MODE", "shared")
    mode, notice = choose_mode("auto", WandbConfig())
    assert mode == "online" and "shared" in notice
    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "of\nline")
    log_export(None, machine.home, machine.home, averaged=False, place={})
    (said,) = [each.getMessage() for each in caplog.records if each.name == "wye"]
    assert "the export is not in W&B" in said and "WANDB_MODE" in said and "\n" not in said
    monkeypatch.setenv("WANDB_MODE", "banana")
    assert choose_mode("offline", WandbConfig()) == ("offline", "")
    wandb.setup()  # does not fail for it


def test_the_json_block_switches_it_on_and_off_and_says_where(machine, monkeypatch):
    assert choose_mode("auto", WandbConfig(enabled=True)) == ("online", "")
    assert choose_mode("auto", WandbConfig(enabled=False)) == ("disabled", "")
    assert choose_mode("disabled", WandbConfig(enabled=True)) == ("disabled", "")
    block = WandbConfig(team="vision", group="ablation", project="birds")
    assert where(None, block) == {"project": "birds", "group": "ablation", "entity": "vision"}
    assert where("plants", block)["project"] == "plants"
    assert where(None, WandbConfig(enabled=True))["project"] == "wye"
    monkeypatch.setenv("WANDB_PROJECT", "trees")
    assert where(None, WandbConfig())["project"] == "trees"


def test_a_folder_of_a_stranger_sends_an_export_nowhere(monkeypatch, tmp_path):
    """Keys of `wandb.init` other than the three, such as save_code, are passed over."""
    for name in ("WANDB_PROJECT", "WANDB_ENTITY"):
        monkeypatch.delenv(name, raising=False)
    theirs = {"project": "birds", "group": "g", "entity": "their team", "save_code": True}
    record = {"tracking": theirs}
    with pytest.raises(ValueError, match="WANDB_PROJECT=birds WANDB_ENTITY='their team'.*--trust"):
        where_recorded(record, tmp_path, trusts=False)
    asked = {"project": "birds", "group": "g", "entity": "their team"}
    assert where_recorded(record, tmp_path, trusts=True) == asked
    monkeypatch.setenv("WANDB_PROJECT", "birds")
    with pytest.raises(ValueError, match=r"elsewhere \(WANDB_ENTITY='their team'\)"):
        where_recorded(record, tmp_path, trusts=False)
    monkeypatch.setenv("WANDB_ENTITY", "their team")
    assert where_recorded(record, tmp_path, trusts=False) == asked
    monkeypatch.undo()
    usual = {"tracking": where(None, WandbConfig())}
    assert where_recorded(usual, tmp_path, trusts=False) == usual["tracking"]
    assert not any(where_recorded({"tracking": None}, tmp_path, trusts=False).values())
    with pytest.raises(ValueError, match="tracking.entity is"):
        where_recorded({"tracking": {"entity": ["x"]}}, tmp_path, trusts=True)
