"""Several data sets as one."""

import pickle

import numpy as np
import pytest

from data.mixture import open_sources
from data.sources import open_source


@pytest.fixture
def mixture(emoji_set):
    file = emoji_set(8)
    few = file.parent / "few.jsonl"
    few.write_text("".join(file.read_text().splitlines(keepends=True)[:3]) + "not json\n")
    return open_sources([f"jsonl:{file}", f"jsonl:{few}"])


def test_samples_of_both_in_a_row(mixture):
    first, second = mixture.sources
    assert len(mixture) == 12 and mixture.spec == f"{first.spec} + {second.spec}"
    for i, (source, own) in {0: (first, 0), 7: (first, 7), 8: (second, 0), 10: (second, 2)}.items():
        assert mixture.captions(i) == source.captions(own)
        assert mixture.image_bytes(i) == source.image_bytes(own)
        assert mixture.content_hash(i) == source.content_hash(own) and mixture.where(i) == source.where(own)
    assert mixture.usable().tolist() == list(range(11))
    assert mixture.column("width").tolist() == [72] * 11 + [0]
    assert [(where.rpartition("/")[2], reason) for _, where, reason, _ in mixture.bad_samples()] == [("few.jsonl:4", "invalid-row")]
    assert len({mixture.identity(i) for i in range(11)}) == 11  # lines of the same number in two files
    assert np.array_equal(mixture.keys("content")[[0, 1, 2]], mixture.keys("content")[[8, 9, 10]])
    with pytest.raises(IndexError, match="there are 0..11"):
        mixture.captions(12)


def test_parts_of_a_subset(mixture):
    assert mixture.parts(np.array([0, 3, 7, 8, 10]), (1, 2.5)) == ((3, 1.0), (2, 2.5))
    assert mixture.parts(np.array([9]), (1, 1)) == ((0, 1.0), (1, 1.0))


def test_it_travels_small(mixture):
    mixture.column("width")
    sent = pickle.dumps(mixture)
    assert len(sent) < 4000 and pickle.loads(sent).captions(9) == mixture.captions(9)


def test_one_data_set_is_not_wrapped(emoji_set):
    spec = f"jsonl:{emoji_set(3)}"
    assert type(open_sources([spec])) is type(open_source(spec))
