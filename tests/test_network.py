"""A run on one node, and somebody who reaches its machine: what listens, and what writing to the
store does."""

import ast
import socket
import sys
import tempfile
import time
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist
from forked_script import ROOT
from launched import (
    SMALL,
    command,
    finish,
    fork_flags,
    metrics,
    reached,
    start,
    wait_for,
    write_pairs,
)
from listeners import listening, listening_unix

from engine.processes.start import free_port
from engine.processes.watchdog import BEAT_S

UNPICKLE = {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"}
UNPICKLE |= {"send_object_list", "recv_object_list"}


def test_a_stranger_reaches_nothing_and_ends_no_run(tmp_path, monkeypatch):
    """Torch's own store listens on all interfaces, and with the key that ranks used before, or all
    that can be guessed, anybody on this machine could end the run, with status 0, and no cause."""
    monkeypatch.setenv("HOLD_AFTER", "2")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    (tmp_path / "hold").touch()
    length = ["--max-text-tokens", 16, "--steps", 4, "--eval-every", 100, "--workers", 1]
    arguments = [*SMALL, *fork_flags(tmp_path), "--data", write_pairs(tmp_path / "data", 96)]
    run = start("tests/held_training.py", *arguments, *length, "--run-dir", tmp_path, ranks=2)
    wait_for(reached(tmp_path, 2), run)

    open_to = listening(run)
    assert int(run.port) in {place.port for place in open_to}
    assert {place.ip for place in open_to} <= {"127.0.0.1", "::1"}
    for address in own_addresses():
        with socket.socket() as stranger:
            assert stranger.connect_ex((address, int(run.port))) != 0, address

    store = dist.TCPStore(
        "127.0.0.1", int(run.port), is_master=False, timeout=timedelta(seconds=30)
    )
    for key in ("wye/failure", "failure", "wye-/failure", "default_pg/0//wye/failure"):
        store.set(key, "1 0 written from outside")
        store.set(key.replace("failure", "stall"), "1")
    time.sleep(3 * BEAT_S)  # both watchdogs look twice
    (tmp_path / "hold").unlink()
    status, output = finish(run)
    assert status == 0 and "written from outside" not in output, output[-5000:]
    assert sorted(metrics(tmp_path)) == [1, 2, 3, 4]


LOOPBACK = {"127.0.0.1", "::1"}


@pytest.mark.all("starts every program")
def test_programs_that_look_at_data_or_a_run_listen_nowhere(tmp_path, monkeypatch):
    """The other rows of the table in SECURITY.md that need no cluster: where they listen, and the
    Unix sockets of their loader processes."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    temporary = tempfile.gettempdir()
    data, folder = write_pairs(tmp_path / "data", 48), tmp_path / "run"
    by_itself = ["--data", data, "--max-text-tokens", 16, "--steps", 1, "--wandb", "offline"]
    places, sockets = watched(
        start(
            *["train.py", *SMALL, *by_itself, "--workers", 1],
            *["--set", "train_batch_size=24", "--run-dir", folder],
        )
    )
    assert {place.ip for place in places} <= LOOPBACK
    assert sockets and all(each.startswith(temporary) for each in sockets)
    for words in (
        ("data/inspect.py", data, "--sheet", tmp_path / "sheet.png"),
        ("evaluate.py", folder, "--workers", 1),
        ("export.py", folder, tmp_path / "export"),
        ("launch/tools/report.py", folder, "--out", tmp_path / "report.html"),
        # the port that the launcher takes by itself may be another run's
        ("launch/tools/doctor.py", "--run-dir", folder, "--port", free_port()),
    ):
        places, sockets = watched(start(*words))
        assert not places, words
        loads = words[0] == "evaluate.py"
        assert bool(sockets) == loads and all(each.startswith(temporary) for each in sockets)


def test_ranks_whose_links_the_doctor_measures_listen_on_loopback(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    module, of_one_host = "launch.tools.link_checks", ["here", "0", "2", "2", "127.0.0.1"]
    run = command(lambda port: [sys.executable, "-m", module, *of_one_host, port])
    places, _ = watched(run)
    assert int(run.port) in {place.port for place in places}
    assert {place.ip for place in places} <= LOOPBACK


def watched(run):
    """Where the processes of a run listen until it has ended well: addresses, and the names of Unix
    sockets."""
    places, sockets = set(), set()
    while run.poll() is None:
        places |= listening(run)
        sockets |= listening_unix(run)
        time.sleep(0.05)
    status, output = finish(run)
    assert status == 0, output[-5000:]
    return places, sockets


def own_addresses():
    """Of this machine, as others see it."""
    everywhere = [one for found in psutil.net_if_addrs().values() for one in found]
    return [
        one.address
        for one in everywhere
        if one.family == socket.AF_INET and not one.address.startswith("127.")
    ]


def test_nothing_that_ranks_tell_each_other_is_unpickled():
    """Files of weights are read by torch with `weights_only`, of which models/ handles the error.
    RefCOCO's references are published as a pickle, which is read without any class."""
    for file, names in names_in("engine", "launch", "data"):
        allowed = {"pickle"} if file == ROOT / "data/formats/boxes.py" else set()
        assert not names & (UNPICKLE | {"pickle"}) - allowed, file


def test_nothing_that_ranks_do_together_lets_torch_guess_a_gpu():
    """A barrier without a tensor does, by the rank's number: where hosts have unequal numbers of
    GPUs or ranks it is another one's, and all wait."""
    for file, names in names_in("engine", "launch", "train.py"):
        assert not names & {"barrier", "monitored_barrier"}, f"{file}: take wait_for_all"


def names_in(*places):
    """The names that the code of each file uses."""
    for place in map(ROOT.joinpath, places):
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            yield (
                file,
                {
                    node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
                    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
                },
            )
