"""How tensors travel between ranks: NCCL, from device to device, or gloo, through host memory. Plain
Python.

Through host memory several ranks may share a GPU. That is slow, and shows on one GPU whether a
layout for eight works.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.checks import AUTO

DEVICE, HOST = "device", "host"
COMMUNICATION = (AUTO, DEVICE, HOST)  # what `branches.communication` may say


def choose_communication(
    asked: str,
    device: str,
    *,
    node: str,
    ranks_on_node: int,
    num_devices: int,
    sharing: Sequence[int],
    several_nodes: bool,
) -> str:
    """How the ranks communicate: "device" or "host". `device`: its kind; `sharing`: the ranks of
    one device that several ranks take, or none; `node`: where they are, with so many ranks that see
    so many devices.

    With "auto" through host memory on a CPU, and where the only node has fewer GPUs than ranks,
    since NCCL refuses ranks that share one. Over several nodes it must be asked for. Errors:
    ValueError for no GPU, and for a GPU that would be shared by ranks which communicate from device
    to device.
    """
    if device == "cpu":
        return HOST
    if num_devices == 0:
        raise ValueError(
            f"DS_ACCELERATOR asks for {device}, but no such device is visible on the node {node}; "
            "unset it, or look at CUDA_VISIBLE_DEVICES and the driver"
        )
    if asked == HOST:
        return HOST
    if not sharing:
        return DEVICE
    too_many = ranks_on_node > num_devices
    if asked == AUTO and not several_nodes and too_many:
        return HOST
    what_to_do = (
        f"start `deepspeed --num_gpus {num_devices} train.py ...`, with a layout for that many"
        if too_many
        else "set LOCAL_RANK to each process's number on its node, from 0, or give each one its own"
    )
    raise ValueError(
        f"ranks {' and '.join(map(str, sharing[:2]))} take the same GPU ({device}): the node {node} "
        f"has {ranks_on_node} process{'es' if ranks_on_node > 1 else ''}, which see "
        f"{num_devices} GPU{'s' if num_devices > 1 else ''}. NCCL needs a GPU for each process: "
        f'{what_to_do}, or let them share GPUs with "communication": "host" in the "branches" '
        "block, which is slow"
    )
