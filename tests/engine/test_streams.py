"""What runs beside the computing stream, on an accelerator that is not CUDA's."""

from collections.abc import Iterator

import pytest
import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from ranks import run_ranks
from stream_cases import Accelerator, Stream, send_over_streams

from engine.streams import DeviceCopies, SideStream
from engine.trace import Recorder, Span

CPU = torch.device("cpu")


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    before = get_accelerator()
    set_accelerator(Accelerator())
    yield get_accelerator()
    set_accelerator(before)


class Loaded:
    """A tensor, as far as a copy to a device asks it."""

    def to(self, device: torch.device, non_blocking: bool) -> "Loaded":
        assert non_blocking
        return self

    def record_stream(self, stream: Stream) -> None:
        stream.log.append("kept until the computing is done with it")


def test_a_receive_starts_where_its_memory_was_free(accelerator):
    beside = SideStream(CPU)
    ready = beside.here()
    accelerator.computing.record_event()  # a pass
    with beside.after(ready):
        accelerator.log.append("receive")
    assert accelerator.log == [
        "stream 1 waits for place 1 of computing",
        "in stream 1",
        "receive",
        "out of stream 1",
    ]


def test_copies_run_two_micro_batches_ahead(accelerator):
    copies = DeviceCopies(CPU)
    for _ in range(4):
        copies.take({"values": Loaded()})
        accelerator.log.append("forward")
    waits = [each for each in accelerator.log if each == "forward" or each.startswith("host")]
    assert waits == [
        "forward",
        "host waits for place 1 of computing",
        "forward",
        "host waits for place 2 of computing",
        "forward",
        "host waits for place 3 of computing",
        "forward",
    ]


def test_spans_are_between_events(accelerator):
    recorder = Recorder(CPU, clock=lambda: pytest.fail("the device has a clock of its own"))
    recorder.start()
    with recorder.span("ForwardPass", 0):
        pass
    recorder.finish()
    assert recorder.spans == [Span("ForwardPass", 0, 1.0, 2.0)] and recorder.step_s == 3.0


def test_a_channel_receives_in_its_own_stream():
    """Each message from where its memory was free."""
    _, (came, log) = run_ranks(2, send_over_streams)
    assert came == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    assert log == [
        asked
        for number in (1, 2)
        for asked in (
            f"stream 1 waits for place {number} of computing",
            "in stream 1",
            "out of stream 1",
        )
    ]
