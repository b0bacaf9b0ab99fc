"""What a rank records of a step: spans in order, waiting apart from computing."""

import time

import pytest
import torch

from engine.trace import COMPUTE, WAIT, Recorder


def record(body) -> Recorder:
    recorder = Recorder(torch.device("cpu"))
    recorder.start()
    body(recorder)
    recorder.finish()
    return recorder


def test_waiting_inside_an_instruction_is_not_computing():
    def body(recorder):
        with recorder.span("RecvActivation", 0):
            time.sleep(0.03)
        with recorder.span("ComputeLoss"):
            time.sleep(0.02)
            with recorder.span(WAIT):
                time.sleep(0.05)

    recorder = record(body)
    seconds = recorder.seconds()
    assert set(seconds) == {"RecvActivation", "ComputeLoss", WAIT}
    assert recorder.busy_s() == pytest.approx(seconds["ComputeLoss"] - seconds[WAIT]) and recorder.busy_s() >= 0.02
    assert recorder.step_s >= 0.1 > 0.05 <= seconds[WAIT] < seconds["ComputeLoss"]
    assert [(s.name, s.micro_batch) for s in recorder.spans] == [("RecvActivation", 0), (WAIT, None), ("ComputeLoss", None)]
    assert recorder.spans[0].end_s <= recorder.spans[2].start_s <= recorder.spans[1].start_s


def test_nothing_is_recorded_between_steps():
    recorder = record(lambda r: None)
    with recorder.span("ForwardPass", 3):
        pass
    assert recorder.spans == [] and recorder.busy_s() == 0.0


def test_a_new_step_forgets_the_last():
    recorder = record(lambda r: r.span("ForwardPass", 0).__enter__())
    recorder.start()
    with recorder.span("BackwardPass", 1):
        pass
    recorder.finish()
    assert [s.name for s in recorder.spans] == ["BackwardPass"] and recorder.spans[0].start_s >= 0


def test_a_span_ends_when_its_instruction_fails():
    recorder = Recorder(torch.device("cpu"))
    recorder.start()
    with pytest.raises(KeyError), recorder.span("ForwardPass", 0):
        raise KeyError
    recorder.finish()
    assert [s.name for s in recorder.spans] == ["ForwardPass"]


def test_every_instruction_of_the_executor_computes_or_waits():
    from engine.executor import ForkEngine

    names = {kind.__name__ for kind in ForkEngine._INSTRUCTION_MAP}
    assert set(COMPUTE) <= names
    assert names - set(COMPUTE) == {"LoadMicroBatch", "ReloadMicroBatch", "RecvActivation", "SendActivation", "RecvGrad", "SendGrad"}
