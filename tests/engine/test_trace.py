"""What a rank records of a step by a clock that the test sets: spans in order, waiting apart from
computing."""

import pytest
import torch

from engine.trace import COMPUTE, WAIT, Recorder, Span


class Clock:
    """Stands still until it is advanced by the time that has passed."""

    now_s, reads = 1000.0, 0

    def __call__(self) -> float:
        self.reads += 1
        return self.now_s

    def passes(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recorder(clock) -> Recorder:
    return Recorder(torch.device("cpu"), clock)


def test_waiting_inside_an_instruction_is_not_computing(clock, recorder):
    recorder.start()
    clock.passes(0.5)
    with recorder.span("RecvActivation", 0):
        clock.passes(3.0)
    with recorder.span("ComputeLoss"):
        clock.passes(2.0)
        with recorder.span(WAIT):
            clock.passes(5.0)
        clock.passes(0.25)
    recorder.finish()
    assert recorder.spans == [
        Span("RecvActivation", 0, 0.5, 3.5),
        Span(WAIT, None, 5.5, 10.5),
        Span("ComputeLoss", None, 3.5, 10.75),
    ]
    assert recorder.seconds() == {"RecvActivation": 3.0, "ComputeLoss": 7.25, WAIT: 5.0}
    assert (recorder.busy_s(), recorder.step_s) == (2.25, 10.75)


def test_nothing_is_recorded_between_steps(clock, recorder):
    recorder.start()
    recorder.finish()
    reads = clock.reads
    with recorder.span("ForwardPass", 3):
        clock.passes(1.0)
    assert recorder.spans == [] and recorder.busy_s() == recorder.step_s == 0.0
    assert clock.reads == reads


def test_a_new_step_forgets_the_last(clock, recorder):
    recorder.start()
    with recorder.span("ForwardPass", 0):
        clock.passes(1.0)
    recorder.finish()
    clock.passes(1.0)
    recorder.start()
    with recorder.span("BackwardPass", 1):
        clock.passes(2.0)
    recorder.finish()
    assert recorder.spans == [Span("BackwardPass", 1, 0.0, 2.0)] and recorder.step_s == 2.0


def test_a_span_ends_when_its_instruction_fails(clock, recorder):
    recorder.start()
    with pytest.raises(KeyError), recorder.span("ForwardPass", 0):
        clock.passes(1.0)
        raise KeyError
    recorder.finish()
    assert recorder.spans == [Span("ForwardPass", 0, 0.0, 1.0)]


def test_without_a_clock_of_its_own_it_is_the_host_s():
    recorder = Recorder(torch.device("cpu"))
    recorder.start()
    with recorder.span("ForwardPass", 0):
        pass
    recorder.finish()
    (span,) = recorder.spans
    assert 0 <= span.start_s <= span.end_s <= recorder.step_s


def test_every_instruction_of_the_executor_computes_or_waits():
    from engine.stage_runner import INSTRUCTIONS

    names = {kind.__name__ for kind in INSTRUCTIONS}
    assert set(COMPUTE) <= names
    moves = {f"{way}{what}" for way in ("Recv", "Send") for what in ("Activation", "Grad")}
    assert names - set(COMPUTE) == moves | {"LoadMicroBatch", "ReloadMicroBatch"}


def test_waiting_between_instructions_is_not_taken_from_computing(clock, recorder):
    """Running statistics are averaged after the last instruction."""
    recorder.start()
    with recorder.span("ForwardPass", 0):
        clock.passes(1.0)
        with recorder.span(WAIT):
            clock.passes(0.25)
    with recorder.span(WAIT):
        clock.passes(0.6)
    recorder.finish()
    assert recorder.busy_s() == pytest.approx(1.0)
    assert recorder.seconds()[WAIT] == pytest.approx(0.85)


def test_waiting_that_others_report_is_added_to_its_instruction(clock, recorder):
    recorder.start()
    with recorder.span("ForwardPass", 0):
        clock.passes(1.0)
    with recorder.span("OptimizerStep"):
        clock.passes(4.0)
    recorder.finish()
    assert recorder.start_of("OptimizerStep") == 1.0 and recorder.start_of("ReduceGrads") == 0.0
    recorder.add_wait("OptimizerStep", 0.0)
    recorder.add_wait("ReduceGrads", 2.0)
    assert recorder.busy_s() == 5.0
    recorder.add_wait("OptimizerStep", 3.5)
    assert recorder.spans[-1] == Span(WAIT, None, 1.0, 4.5) and recorder.busy_s() == 1.5


def test_no_more_waiting_is_added_than_the_instruction_took(clock, recorder):
    recorder.start()
    with recorder.span("OptimizerStep"):
        clock.passes(2.0)
    recorder.finish()
    recorder.add_wait("OptimizerStep", 9.0)
    assert recorder.busy_s() == 0.0
