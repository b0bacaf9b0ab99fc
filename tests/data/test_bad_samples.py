"""Bad input of every kind in every format: each sample gets its reason, the others are read,
nothing outside is opened."""

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

from data.bad_samples import CODES, REASONS, BadSample, check_size, refusing
from data.batching.requests import MicroBatchRequest
from data.index.sources import open_source
from data.loader import MicroBatchDataset
from data.modalities.image import ImageModality
from data.modalities.transforms import EvalTransform, Views

sys.path.insert(0, str(Path(__file__).parent))
from bad_audio import BAD_AUDIO  # noqa: E402
from bad_sets import SETS  # noqa: E402


@pytest.mark.parametrize("kind", SETS)
def test_each_bad_sample_gets_its_reason(kind, tmp_path):
    spec, expected, good = SETS[kind](tmp_path)
    source = open_source(spec)
    found = [(identity, reason) for identity, _, reason, _ in source.bad_samples()]
    assert sorted(found) == sorted(expected)
    assert sorted(source.identity(int(i)) for i in source.usable()) == sorted(good)
    assert len(source) == len(expected) + len(good)
    for i in range(len(source)):
        assert str(tmp_path) in source.where(i)
        if i in source.usable():
            assert all(map(str.strip, source.captions(i) or [""])) and source.value("image", i)
        else:
            with pytest.raises(BadSample) as error:
                source.value("image", i)
            assert CODES[error.value.reason] == source.column("bad")[i] and error.value.detail


def test_every_reason_is_reported_by_some_format(tmp_path):
    reasons = set()
    for name, make in SETS.items():
        (tmp_path / name).mkdir()
        reasons |= {reason for _, reason in make(tmp_path / name)[1]}
    # "no-value" is of python:, tests/data/test_python_format.py; sounds: tests/data/test_audio.py;
    # regions: tests/data/test_regions.py
    heard = {reason for reason, _ in BAD_AUDIO.values()} | {"no-sound"}
    of_regions = {reason for reason, code in CODES.items() if code > CODES["too-slow"]}
    assert reasons | {"no-value"} | heard | of_regions == set(REASONS)


def test_a_bad_sample_survives_the_way_between_processes():
    problem = pickle.loads(pickle.dumps(BadSample("missing-file", "a.png")))
    assert (problem.reason, str(problem)) == ("missing-file", "missing-file: a.png")
    with pytest.raises(ValueError, match="reason 'missing' is none of missing-file"):
        BadSample("missing")


def test_codes_never_change():
    """They are on disk: in an index of before, 1 must still be what it was."""
    known = {
        "missing-file": 1,
        "no-caption": 9,
        "truncated-archive": 17,
        "too-slow": 27,
        "too-many-regions": 34,
        "empty-segment": 41,
    }
    assert {reason: CODES[reason] for reason in known} == known


def test_sizes():
    for size, reason in (
        ((0, 5), "impossible-size"),
        ((65_536, 1000), "impossible-size"),
        ((101, 1), "impossible-size"),
        ((10_001, 10_000), "too-many-pixels"),
    ):
        for width, height in (size, size[::-1]):
            with pytest.raises(BadSample) as error:
                check_size(width, height)
            assert error.value.reason == reason
    check_size(100, 1)
    check_size(10_000, 10_000)


def test_no_usable_sample_says_why(tmp_path):
    file = tmp_path / "set.jsonl"
    file.write_text('{"image_path": "none.png", "text": "a"}\n' * 3 + "oops\n" * 5)
    counted = r"none of 8 samples can be used \(invalid-row 5, missing-file 3\)"
    with pytest.raises(ValueError, match=f"(?s){counted}.*:1: missing-file.*and 3 more"):
        open_source(f"jsonl:{file}")


def test_what_a_library_raises_is_a_bad_sample_and_what_ends_a_process_is_not():
    for error in (ValueError("mode"), KeyError("tag"), EOFError()):
        with pytest.raises(BadSample, match=f"unreadable: {type(error).__name__}"), refusing():
            raise error
    for error in (MemoryError(), KeyboardInterrupt(), BadSample("empty-file")):
        with pytest.raises(type(error)) as raised, refusing():
            raise error
        assert raised.value is error


def test_an_error_of_our_own_in_making_a_tensor_ends_the_run(demo):
    class Faulty(EvalTransform):
        def view(self, image, generator=None):
            raise KeyError("ours")

    images = ImageModality(Views(Faulty((8, 8)), Faulty((8, 8))))
    rows = MicroBatchRequest(0, 0, np.arange(2), np.arange(2), training=True)
    with pytest.raises(KeyError, match="ours"):
        MicroBatchDataset(demo, [images]).load(rows)
