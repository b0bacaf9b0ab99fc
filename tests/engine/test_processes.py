"""Starting processes: more of them on a node than it has GPUs are refused before a GPU is
touched."""

import re

import pytest

from engine.processes.start import _check_path, check_devices


@pytest.mark.parametrize(
    ("ranks_on_node", "num_devices", "words"),
    [
        (
            2,
            1,
            "2 processes on this node, but 1 GPU (cuda): each process needs its own; start "
            "`deepspeed --num_gpus 1 train.py",
        ),
        (
            9,
            8,
            "9 processes on this node, but 8 GPUs (cuda): each process needs its own; start "
            "`deepspeed --num_gpus 8 train.py",
        ),
        (1, 0, "DS_ACCELERATOR asks for cuda, but no such device is visible on this node"),
    ],
)
def test_more_processes_than_gpus_are_refused(ranks_on_node, num_devices, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        check_devices(ranks_on_node, num_devices, "cuda")


@pytest.mark.parametrize(
    ("ranks_on_node", "num_devices", "device"),
    [(8, 8, "cuda"), (1, 8, "cuda"), (8, 1, "cpu"), (1, 0, "cpu")],
)
def test_as_many_processes_as_gpus_and_any_number_on_a_cpu_are_fine(
    ranks_on_node, num_devices, device
):
    check_devices(ranks_on_node, num_devices, device)


def test_an_environment_below_a_path_with_a_space_is_answered(tmp_path):
    _check_path(tmp_path / "env" / "torch")
    with pytest.raises(
        ValueError, match="the path holds a space, .* use an environment whose path has none"
    ):
        _check_path(tmp_path / "my env" / "torch")
