"""How tensors travel between ranks: NCCL, from device to device, or gloo, through host memory.

Through host memory several ranks may share a GPU. That is slow, and shows on one GPU whether a
layout for eight works.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.checks import AUTO
from engine.processes.agreement import refuse_different
from engine.processes.places import Place, Places, name_of_host

DEVICE, HOST = "device", "host"
COMMUNICATION = (AUTO, DEVICE, HOST)  # what `branches.communication` may say


def communication_of(asked: str, kind: str, told: Sequence[Place]) -> str:
    """How the ranks at these places, whose devices are of that kind, communicate: "device" or
    "host".

    With "auto" through host memory on a CPU, and where the only node has fewer GPUs than ranks,
    since NCCL refuses ranks that share one. Over several nodes it must be asked for. Errors:
    ValueError for ranks that are not alike, for no GPU, and, where several ranks communicate from
    device to device, for a GPU that they would share and for a host that waits for each kernel.
    """
    refuse_different([place.alike for place in told])
    if kind == "cpu":
        return HOST
    for place in told:
        if not place.device:
            raise ValueError(
                f"DS_ACCELERATOR asks for {kind}, but no such device is visible on the node "
                f"{name_of_host(place)}; unset it, or look at CUDA_VISIBLE_DEVICES and the driver"
            )
    if asked == HOST:
        return HOST
    places = Places.of(told)
    of_devices: dict[int, list[int]] = {}
    for rank, device in enumerate(places.devices):
        of_devices.setdefault(device, []).append(rank)
    sharing = next((ranks for ranks in of_devices.values() if len(ranks) > 1), None)
    if sharing is None:
        _refuse_launch_blocking(told)
        return DEVICE
    first = told[sharing[0]]
    number, devices = len(places.beside(sharing[0])), first.num_devices
    if asked == AUTO and places.num_nodes == 1 and number > devices:
        return HOST
    what_to_do = "set LOCAL_RANK to each process's number on its node, from 0, or give each its own"
    if number > devices:
        what_to_do = (
            f"start `deepspeed --num_gpus {devices} train.py ...`, with a layout for that many"
        )
    raise ValueError(
        f"ranks {' and '.join(map(str, sharing[:2]))} take the same GPU ({kind}): the node "
        f"{name_of_host(first)} has {number} process{'es' * (number > 1)}, which see {devices} "
        f"GPU{'s' * (devices > 1)}. NCCL needs a GPU for each process: {what_to_do}, or let them "
        'share GPUs with "communication": "host" in the "branches" block, which is slow'
    )


def _refuse_launch_blocking(told: Sequence[Place]) -> None:
    """For any layout: the plan is found by trying some."""
    blocking = [rank for rank, place in enumerate(told) if place.launch_blocking]
    if blocking and len(told) > 1:
        raise ValueError(
            f"CUDA_LAUNCH_BLOCKING is set for rank {blocking[0]} of {len(told)}: its process waits "
            "for the end of each kernel, also of one that waits for another rank, which may wait "
            "for what this rank would do next. Unset it; to look for a fault with it, use one rank, "
            'or "communication": "host" in the "branches" block'
        )
