"""Starting processes: how they communicate, and what is refused before a GPU is touched."""

import re
import socket
from datetime import timedelta

import pytest

from engine.config.communication import choose_communication
from engine.processes.ops import _check_path
from engine.processes.start import _meet_on_loopback


@pytest.mark.parametrize(
    ("asked", "ranks_on_node", "num_devices", "several_nodes", "words"),
    [
        (
            "device",
            2,
            1,
            False,
            "2 processes on this node, but 1 GPU (cuda): NCCL needs a GPU for each process; start "
            "`deepspeed --num_gpus 1 train.py",
        ),
        (
            "auto",
            9,
            8,
            True,
            "9 processes on this node, but 8 GPUs (cuda): NCCL needs a GPU for each process; start "
            "`deepspeed --num_gpus 8 train.py",
        ),
        ("host", 1, 0, False, "DS_ACCELERATOR asks for cuda, but no such device is visible on"),
    ],
)
def test_ranks_that_may_not_share_gpus_are_refused(
    asked, ranks_on_node, num_devices, several_nodes, words
):
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        choose_communication(asked, ranks_on_node, num_devices, "cuda", several_nodes)
    assert ('"communication": "host"' in str(caught.value)) == (num_devices > 0)


@pytest.mark.parametrize(
    ("asked", "ranks_on_node", "num_devices", "device", "several_nodes", "chosen"),
    [
        ("auto", 8, 8, "cuda", True, "device"),
        ("device", 1, 8, "cuda", False, "device"),
        ("auto", 2, 1, "cuda", False, "host"),
        ("host", 9, 8, "cuda", True, "host"),
        ("host", 8, 8, "cuda", False, "host"),
        ("auto", 8, 1, "cpu", False, "host"),
        ("device", 8, 1, "cpu", True, "host"),
        ("auto", 1, 0, "cpu", False, "host"),
    ],
)
def test_ranks_communicate_from_device_to_device_where_each_has_its_own(
    asked, ranks_on_node, num_devices, device, several_nodes, chosen
):
    found = choose_communication(asked, ranks_on_node, num_devices, device, several_nodes)
    assert found == chosen


def test_an_environment_below_a_path_with_a_space_is_answered(tmp_path):
    _check_path(tmp_path / "env" / "torch")
    with pytest.raises(
        ValueError, match="the path holds a space, .* use an environment whose path has none"
    ):
        _check_path(tmp_path / "my env" / "torch")


def test_a_port_that_is_taken_is_named(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(OSError, match=f"port {port} is taken .*--master_port"):
            next(_meet_on_loopback("", timedelta(seconds=10)))
