"""An accelerator that is not CUDA's: a stand-in that notes what is asked of it."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from engine.communication import Channel, MessageKey, signature_of

CLOCK = itertools.count()  # a second passes between two events


class Event:
    def __init__(self, log: list, name: str = "event") -> None:
        self.log, self.name, self.at_s = log, name, 0

    def record(self) -> None:
        self.at_s = next(CLOCK)

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")

    def elapsed_time(self, other: "Event") -> float:
        return 1000 * (other.at_s - self.at_s)


class Stream:
    def __init__(self, log: list, name: str) -> None:
        self.log, self.name, self.events = log, name, 0

    def record_event(self) -> Event:
        self.events += 1
        return Event(self.log, f"place {self.events} of {self.name}")

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for {event.name}")

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class Accelerator(CPU_Accelerator):
    """A CPU that has streams, as other devices do."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.computing, self.streams = Stream(self.log, "computing"), 0

    def is_synchronized_device(self) -> bool:
        return False

    def Stream(self) -> Stream:
        self.streams += 1
        return Stream(self.log, f"stream {self.streams}")

    def Event(self, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self.log)

    def current_stream(self, device_index: int | None = None) -> Stream:
        return self.computing

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.log.append(f"in {stream.name}")
        yield
        self.log.append(f"out of {stream.name}")


def send_over_streams() -> tuple[list[float], list[str]]:
    """Rank 0 sends two messages to rank 1. (what came, what was asked of the accelerator)."""
    set_accelerator(Accelerator())
    first = dist.get_rank() == 0
    channel = Channel(int(first), dist.group.WORLD, torch.device("cpu"), sends=first)
    channel.posts_ahead = False
    values = {"values": torch.ones(3)}
    known, came = signature_of(values), []
    keys = [MessageKey(stage_slice=0, micro_batch=m) for m in range(2)]
    for number, key in enumerate(keys, start=1):
        if first:
            channel.send(key, {"values": number * values["values"]}, known)
        else:
            channel.expect(key, known)
    for key in keys:
        came += [] if first else channel.receive(key)["values"].tolist()
    channel.drain()
    return came, get_accelerator().log
