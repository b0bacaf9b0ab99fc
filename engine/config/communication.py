"""How tensors travel between ranks: NCCL, from device to device, or gloo, through host memory. Plain
Python.

Through host memory several ranks may share a GPU. That is slow, and shows on one GPU whether a
layout for eight works.
"""

from __future__ import annotations

from engine.config.checks import AUTO

DEVICE, HOST = "device", "host"
COMMUNICATION = (AUTO, DEVICE, HOST)  # what `branches.communication` may say


def choose_communication(
    asked: str, ranks_on_node: int, num_devices: int, device: str, several_nodes: bool
) -> str:
    """How the ranks of this node communicate: "device" or "host". `device`: its kind.

    With "auto" through host memory on a CPU, and where several ranks of the only node share a GPU,
    which NCCL refuses. Over several nodes it must be asked for: all nodes must choose the same, and
    none knows the GPUs of another before there is a process group. Errors: ValueError for no GPU,
    and for a GPU that would be shared by ranks which communicate from device to device.
    """
    if device == "cpu":
        return HOST
    if num_devices == 0:
        raise ValueError(
            f"DS_ACCELERATOR asks for {device}, but no such device is visible on this node; unset "
            "it, or look at CUDA_VISIBLE_DEVICES and the driver"
        )
    if asked != AUTO and (asked == HOST or ranks_on_node <= num_devices):
        return asked
    if ranks_on_node <= num_devices:
        return DEVICE
    if asked == AUTO and not several_nodes:
        return HOST
    raise ValueError(
        f"{ranks_on_node} processes on this node, but {num_devices} "
        f"GPU{'s' if num_devices > 1 else ''} ({device}): NCCL needs a GPU for each process; start "
        f"`deepspeed --num_gpus {num_devices} train.py ...`, with a layout for that many, or let them "
        'share GPUs with "communication": "host" in the "branches" block, which is slow'
    )
