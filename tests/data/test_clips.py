"""`demo:clips`: films of events one after another, and what training never sees."""

import io
import itertools
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

from data.formats.clips import ACTIONS, FRAMES, LENGTHS, PAUSE, RATE, SIDES, Clip, ClipsFormat
from data.formats.drawn import COMPOSITION, CONCEPT
from data.index.sources import open_source

av = pytest.importorskip("av")


@pytest.fixture(scope="module")
def clips():
    return ClipsFormat("clips")


def decoded(film):
    with av.open(io.BytesIO(film)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def test_a_number_of_clips_that_is_none_is_refused(monkeypatch):
    for where in ("clips:", "clips:9", "clips:-20", "clips:en"):
        with pytest.raises(ValueError, match="demo:clips:N with N from 10"):
            ClipsFormat(where)
    assert ClipsFormat("clips:30").total() == 30 and ClipsFormat("clips").total() == 1000
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(FileNotFoundError, match="'av' is not installed.*requirements-audio"):
        ClipsFormat("clips")


def test_each_half_and_each_event_is_a_clip_of_its_film(clips):
    source = open_source("demo:clips:10", [("video", "text")])
    assert len(source.usable()) == len(source) > 60
    drawn = clips.clip(0)
    told = [(half[0].start, half[-1].end, drawn.caption(k)) for k, half in enumerate(drawn.halves)]
    told += [(event.start, event.end, event.text) for event in drawn.events]
    for i, (start, end, text) in enumerate(told):
        clip = source.value("video", i)
        assert source.captions(i) == [text]
        assert (clip.start_s * RATE, clip.end_s * RATE) == (start, end)
        assert clip.film == clips.read("video", "", 0, None)
    assert source.identity(len(told)).startswith("clips/00001#0")
    assert source.concept(len(source) - 1).held_out == COMPOSITION
    reverse = [source.reversed_caption(i) for i in range(len(told))]
    assert reverse[:2] == [told[1][2], told[0][2]] and not any(reverse[2:])


def test_a_film_shows_its_frames_at_their_times(clips):
    sides = set()
    for number in range(12):
        clip = clips.clip(number)
        film = clips.read("video", "", number, None)
        with av.open(io.BytesIO(film)) as container:
            (stream,) = container.streams
            assert stream.codec_context.name == "mpeg4" and stream.average_rate == RATE
            assert container.duration == FRAMES / RATE * 1e6 and stream.frames == FRAMES
            sides.add((stream.width, stream.height))
            times = [frame.time for frame in container.decode(stream)]
        assert times == [n / RATE for n in range(FRAMES)]
        for n, (found, drawn) in enumerate(zip(decoded(film), clip.frames(), strict=True)):
            difference = np.abs(found.astype(int) - np.asarray(drawn))
            assert difference.mean() < 6, (number, n)
    assert sides <= {(side, side) for side in SIDES} and len(sides) > 1


def test_an_event_is_seen_in_its_time_and_in_no_other(clips):
    seen = set()
    for number in range(150):
        clip = clips.clip(number)
        frames = np.stack([np.asarray(frame).astype(int) for frame in clip.frames()])
        change = np.abs(frames - clip.background).sum(3)
        half = clip.halves[0]
        assert len({event.emoji for event in half}) == len(half)
        shown, edge = np.zeros(FRAMES, bool), np.ones((clip.side, clip.side), bool)
        edge[1:-1, 1:-1] = False
        for event in clip.events:
            assert not shown[event.start :].any()  # one after another
            shown[event.start : event.end] = True
            shortest, longest = LENGTHS[len(half)]
            assert shortest <= event.end - event.start <= longest
            first, last = change[event.start], change[event.end - 1]
            centres = [[each.mean() for each in np.nonzero(one)] for one in (first, last)]
            down, right = np.subtract(*centres[::-1]) / clip.side
            where = {"up": -down, "down": down, "left": -right, "right": right}
            verb, *direction = event.action.split()
            case = (number, event.action, down, right)
            if verb == "move":
                assert where[direction[0]] > 0.3 and sorted(map(abs, (down, right)))[0] < 1e-6, case
                # all of it stays inside
                assert (first > 0).sum() == (last > 0).sum(), case
            else:
                assert max(abs(down), abs(right)) < 0.06, case
            if verb == "grow":
                assert (last > 0).sum() > 3 * (first > 0).sum(), case
            if verb == "shrink":
                assert (first > 0).sum() > 3 * (last > 0).sum(), case
            if verb == "appear":
                assert last.sum() > 2.5 * first.sum() > 0, case
            if verb == "turn":
                middle = change[(event.start + event.end) // 2]
                assert (middle != first).any(), case
                cut = change[event.start : event.end][:, edge] > 0
                assert cut.sum() < 10, case  # a corner may touch the edge
            seen.add(event.action)
        assert (change.any((1, 2)) == shown).all(), number
    assert seen == ACTIONS.keys()


def test_only_the_order_of_the_frames_tells_the_halves_apart(clips):
    for number in range(8):
        clip = clips.clip(number)
        first, second = clip.halves
        alike = [[event._replace(start=0, end=0) for event in half] for half in clip.halves]
        assert alike[0] == alike[1][::-1] and clip.caption(0) != clip.caption(1)
        assert second[0].start - first[-1].end >= PAUSE
        film = decoded(clip.encoded())
        one, two = (
            sorted(film[n].tobytes() for event in half for n in range(event.start, event.end))
            for half in clip.halves
        )
        assert one == two, number
    event = clip.events[0]
    there, back = (
        decoded(clip._replace(halves=([event._replace(action=f"move {way}")], [])).encoded())
        for way in ("left", "right")
    )
    part = slice(event.start, event.end)
    assert np.array_equal(there[part], back[part][::-1])


def test_a_caption_names_the_events_in_order(clips):
    found = {number: clips.clip(number) for number in range(400)}
    captions = {number: clip.caption(0) for number, clip in found.items()}
    assert len({*captions.values()}) > 390
    assert len({clip.phrasing for clip in found.values()}) == 2
    for number, caption in captions.items():
        places = [caption.index(event.text) for event in found[number].halves[0]]
        assert places == sorted(places), number
    clip = next(clip for clip in found.values() if len(clip.events) == 4)
    cat, cherries = (
        event._replace(emoji=event.emoji._replace(name=name), action=action)
        for event, name, action in zip(
            clip.halves[0], ("orangutan", "cherries"), ("move left", "grow"), strict=True
        )
    )
    halves = [cat, cherries], [cherries, cat]
    clip = clip._replace(halves=halves, phrasing=("first ", ", after that "))
    assert clip.caption(0) == "first an orangutan moves left, after that cherries grow"
    assert clip.caption(1) == "first cherries grow, after that an orangutan moves left"


def test_the_same_bytes_each_time_and_in_another_process(clips):
    numbers = range(0, 1000, 125)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
        there = [other.submit(clips.read, "video", "", n, None) for n in numbers]
        for number, found in zip(numbers, there):
            film = clips.values(number)[0]["video"]
            assert film == clips.read("video", "", number, None) == found.result()
    # a film does not depend on how many there are
    assert ClipsFormat("clips:10").values(7) == clips.values(7)


def test_concepts_and_pairs_are_held_out(clips, monkeypatch):
    monkeypatch.setattr(Clip, "encoded", lambda clip: b"")  # nobody looks at them
    kinds = {None: [], CONCEPT: [], COMPOSITION: []}
    for row in itertools.chain.from_iterable(map(clips.rows, clips.parts())):
        identity = row.values["id"]
        if identity.endswith("#0"):
            events = clips.clip(row.number).events
            kinds[clips.concept(identity).held_out].append(
                [(e.emoji.name, e.action) for e in events]
            )
    assert [*map(len, kinds.values())] == [800, 100, 100]
    trained, new, composed = ({*itertools.chain(*of)} for of in kinds.values())
    names, new_names, composed_names = ({name for name, _ in of} for of in (trained, new, composed))
    assert not names & new_names and composed_names <= names and not composed & trained
    assert 0.15 < len(new_names) / len(names | new_names) < 0.3
    assert len(trained) > 0.5 * len(names) * len(ACTIONS)
    assert {action for _, action in composed} == {action for _, action in new} == ACTIONS.keys()
