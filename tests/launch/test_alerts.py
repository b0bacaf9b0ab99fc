"""When a person who is not looking is told something."""

import math
from dataclasses import fields

from data.modalities.modality import Modality
from data.stored.kinds import stored
from data.stored.record import Stored
from data.streams.source import COUNTS as STREAM_COUNTS
from engine.step_metrics import StepMetrics
from launch.modalities import MODALITIES
from launch.tracking.alerts import COUNTS, LEFT_OUT, SKIPPED, UNUSABLE, WINDOW, Alarms, count_of
from launch.tracking.names import step_names


def line(step, loss=1.0, idle=0.1, wait_s=0.0, **others):
    own = {"step": step, "loss": loss, "step_s": 1.0}
    return {**own, "idle/text 0": idle, "data_wait_s/text 0": wait_s, **others}


def titles(alarms, lines, **others):
    return [(each["step"], a.title) for each in lines for a in alarms.after_step(each, **others)]


def test_a_run_that_goes_well_tells_nothing():
    """Nor do slow first steps, one slow step, and a stage that has always waited."""
    for lines in (
        [line(step) for step in range(1, 200)],
        [line(s, idle=0.9 if s <= SKIPPED or s == 60 else 0.1) for s in range(1, 100)],
        [line(s, idle=0.6) for s in range(1, 100)],
    ):
        assert titles(Alarms(), lines) == []


def test_a_loss_that_is_not_finite_is_told_when_it_begins_and_when_it_begins_again():
    alarms = Alarms()
    told = titles(alarms, [line(1), line(2, math.nan), line(3, None), line(4), line(5, math.inf)])
    assert told == [(2, "Loss or gradients not finite"), (5, "Loss or gradients not finite")]
    (alert,) = Alarms().after_step(line(1), not_finite=True)  # of the gradients alone
    assert alert.level == "ERROR" and "bad_steps.jsonl" in alert.text


def test_a_stage_that_starts_to_wait_is_told_once():
    before, after = SKIPPED + WINDOW, 3 * WINDOW
    lines = [line(s, idle=0.1 if s <= before else 0.5) for s in range(1, before + after)]
    ((step, title),) = titles(Alarms(), lines)
    # from 10 % by more than 20 points: when over half of the window is at 50 %
    assert title == "Stage text 0 waits" and step == before + WINDOW // 2 + 1


def test_data_that_runs_dry_is_told_with_the_stage_that_loads_it():
    told = titles(Alarms(), [line(s, wait_s=0.3) for s in range(1, 100)])
    assert told == [(SKIPPED + WINDOW, "Data for stage text 0 runs dry")]
    for waited_s, advice in (
        (0.0, "more --workers, --cache"),
        (0.4, "the store had not delivered"),
    ):
        alarms = Alarms()
        lines = [line(s, wait_s=0.3, stream_wait_s=waited_s) for s in range(1, 100)]
        (alert,) = [alert for each in lines for alert in alarms.after_step(each)]
        assert advice in alert.text


def test_a_rank_that_computes_longer_than_its_replicas_is_told_with_who_waits():
    def at(step, ratio, rank=3):
        return line(step, idle=0.5) | {"slowest_ratio/image 0": ratio, "slowest_rank/image 0": rank}

    alarms = Alarms("rank {} on node7".format)
    for step in range(1, 100):
        told = alarms.after_step(at(step, 2.0))
        assert bool(told) == (step == SKIPPED + WINDOW)
        if told:
            assert told[0].title == "Rank 3 on node7 is slow"
            assert "2.0 times" in told[0].text and "text 0 waits most, 50%" in told[0].text
    for lines in (
        [at(step, 1.4) for step in range(1, 100)],
        [at(step, 2.0, rank=step % 4) for step in range(1, 100)],  # each in its turn
    ):
        assert titles(Alarms(), lines) == []


def test_samples_that_cannot_be_used_are_told_once():
    """Also where each pair leaves them out, in a later step than they were loaded for."""
    lines = [line(1), line(2, unreadable_pictures=2.0), line(3), line(4, left_out_samples=1)]
    assert titles(Alarms(), lines) == [(2, UNUSABLE)]
    pairs = {"left_out_samples/image_text": 1, "left_out_samples/image_audio": 1}
    lines = [line(1, unreadable_pictures=1.0), line(2, **pairs), line(3, unreadable_films=1.0)]
    assert titles(Alarms(), lines) == [(1, UNUSABLE)]
    for key in ("unreadable_films", "unreadable_sounds", "unreadable_depths"):
        (alert,) = Alarms().after_step(line(1, **{key: 1.0}))
        assert alert.title == UNUSABLE and alert.text.startswith(f"{key} 1 in step 1; ")


def test_samples_that_a_pair_leaves_out_are_told_once_and_not_as_unreadable():
    pairs = {"left_out_samples/image_text": 2, "left_out_samples/audio_text": 3}
    alarms = Alarms()
    (alert,) = alarms.after_step(line(1, **pairs))
    assert alert.title == LEFT_OUT and alert.level == "INFO"
    assert "left_out_samples/image_text 2, left_out_samples/audio_text 3 in step 1" in alert.text
    assert titles(alarms, [line(2), line(3, **pairs)]) == []
    # what cannot be read is still told, and what is left out beside it too
    assert titles(alarms, [line(4, unreadable_pictures=1.0)]) == [(4, UNUSABLE)]
    lines = [line(1, unreadable_pictures=1.0, left_out_samples=1), line(2, left_out_samples=2)]
    assert titles(Alarms(), lines) == [(1, UNUSABLE), (2, LEFT_OUT)]


def modalities(parent=Modality):
    return [parent, *(each for child in parent.__subclasses__() for each in modalities(child))]


def counts_by_pair():
    """The keys that a step's line has because something was counted in its pairs."""
    blank = dict.fromkeys((field.name for field in fields(StepMetrics)), 0)
    numbers = dict.fromkeys(("loss", "lr", "loss_scale"), 1.0)
    empty = {
        name: {}
        for name in StepMetrics.__annotations__
        if "Mapping" in str(StepMetrics.__annotations__[name])
    }
    counted = {"left_out": {"a_b": 1, "c_d": 1}, "duplicates": {"a_b": 1, "c_d": 1}}
    lines = [
        StepMetrics(**{**blank, **numbers, **empty, "rank_memory_bytes": (), **own}).record(
            1, 0, 1, 1
        )
        for own in ({}, counted)
    ]
    return lines[1].keys() - lines[0].keys()


def test_every_count_has_its_rule_and_its_panel():
    """A count that is new rings an alert or is said here to be no news."""
    assert MODALITIES, "its module has defined every modality"
    own = [each for each in modalities() if each.__module__.startswith("data.")]
    counts = {name for each in own for name in each.count_names}
    kinds = [*map(stored, (*MODALITIES, "depth")), Stored("mask", several="two words")]
    unreadable = {kind.unreadable for kind in kinds}
    assert {"unreadable_pictures", "unreadable_films", "unreadable_two_words"} <= unreadable
    by_pair = counts_by_pair()
    assert "left_out_samples/c_d" in by_pair and len(by_pair) == 4
    for key in (*counts, *unreadable, *STREAM_COUNTS, *by_pair):
        assert count_of(key) in COUNTS, f"{key}: give it an entry in launch/tracking/alerts.py"
        (name,) = step_names({key: 1})
        assert name != key, f"{key}: give it a panel in launch/tracking/names.py"
    assert {COUNTS[str(count_of(key))] for key in unreadable} == {UNUSABLE}
    assert count_of("something_new") is count_of("loss") is count_of("left_outs") is None
