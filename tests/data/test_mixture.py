"""Several data sets as one, and the share of each in an epoch."""

import json
import pickle
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.batching.mixture import mixed, open_sources, source_names
from data.batching.sampler import GlobalOrder
from data.index.sources import open_source


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
        assert mixture.content_hash(i) == source.content_hash(own) and mixture.where(
            i
        ) == source.where(own)
    assert mixture.usable().tolist() == list(range(11))
    assert mixture.column("width").tolist() == [72] * 11 + [0]
    assert [
        (where.rpartition("/")[2], reason) for _, where, reason, _ in mixture.bad_samples()
    ] == [("few.jsonl:4", "invalid-row")]
    assert (
        len({mixture.identity(i) for i in range(11)}) == 11
    )  # lines of the same number in two files
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


# -- shares of an epoch


def shares(parts):
    visits = np.array([round(count * weight) for count, weight in parts])
    return visits / visits.sum()


PARTS = ((80_000, 1.0), (15_000, 1.0), (5_000, 1.0))


def test_without_temperature_and_floors_the_weights_stay_as_they_are():
    for parts in (PARTS, ((7, 0.3), (11, 2.7), (5, 0.0)), ((0, 1.0), (10, 1.0))):
        assert mixed(parts) == parts == mixed(parts, floors=[0.0] * len(parts))
    assert mixed(PARTS, floors=(0.5, 0.1, 0.05)) == PARTS  # floors that hold already


@pytest.mark.parametrize("temperature", [0.5, 1.5, 1 / 0.7, 1 / 0.3, 100])
def test_shares_go_with_the_root_of_the_sizes_and_an_epoch_stays_as_long(temperature):
    sizes = np.array([80_000, 2 * 15_000, 5_000])
    found = mixed(((80_000, 1.0), (15_000, 2.0), (5_000, 1.0)), temperature)
    assert sum(round(count * weight) for count, weight in found) == sizes.sum()
    assert shares(found) == pytest.approx(
        sizes ** (1 / temperature) / (sizes ** (1 / temperature)).sum(), abs=1e-5
    )
    assert [count for count, _ in found] == [80_000, 15_000, 5_000]


def test_a_large_temperature_makes_shares_equal_and_leaves_out_what_has_weight_0():
    assert shares(mixed(PARTS, 1e9)) == pytest.approx([1 / 3] * 3, abs=1e-5)
    assert shares(mixed(((80_000, 1.0), (15_000, 0.0), (5_000, 1.0)), 1e9)) == pytest.approx(
        [0.5, 0, 0.5], abs=1e-5
    )


@pytest.mark.parametrize(
    "floors, expected",
    [
        ((0, 0, 0.2), (0.8 * 80 / 95, 0.8 * 15 / 95, 0.2)),  # the others give up in proportion
        ((0, 0.14, 0.2), (0.66, 0.14, 0.2)),  # which brings the second below its own floor
        ((0.8, 0.1, 0.1), (0.8, 0.1, 0.1)),
        ((0.1, 0.1, 0.1), (0.9 * 80 / 95, 0.9 * 15 / 95, 0.1)),
    ],
)
def test_floors_hold(floors, expected):
    found = shares(mixed(PARTS, floors=floors))
    assert found == pytest.approx(expected, abs=1e-5) and (found >= np.array(floors) - 1e-5).all()


def test_floors_hold_for_any_sizes_and_temperatures():
    rng = np.random.default_rng(0)
    for _ in range(300):
        number = int(rng.integers(2, 7))
        parts = tuple(
            (int(count), float(weight))
            for count, weight in zip(rng.integers(50, 3000, number), rng.uniform(0.2, 3, number))
        )
        floors = rng.dirichlet(np.ones(number)) * rng.uniform(0.2, 0.9)
        temperature = float(rng.uniform(0.8, 5))
        found = mixed(parts, temperature, floors)
        total = sum(round(count * weight) for count, weight in parts)
        assert sum(round(count * weight) for count, weight in found) == total
        assert (shares(found) >= floors - 1 / total).all()
        free = shares(found) > floors + 2 / total  # those above their floor keep their proportions
        natural = np.array([count * weight for count, weight in parts])[free] ** (1 / temperature)
        assert shares(found)[free] / shares(found)[free].sum() == pytest.approx(
            natural / natural.sum(), abs=number / total / free.sum() * 20
        )


def test_the_order_visits_as_the_shares_say_and_says_how_often():
    parts = mixed(((90, 1.0), (20, 1.0), (10, 1.0)), 1e9, (0, 0, 0.5))
    order = GlobalOrder(120, 10, seed=2, parts=parts)
    assert order.epoch_samples == 120 and order.steps_per_epoch == 12
    counts = np.zeros(120, int)
    for step in range(36):
        np.add.at(counts, order.batch(step), 1)
        if step % 12 == 11:
            assert order.visits(step + 1) == pytest.approx(
                [counts[:90].mean(), counts[90:110].mean(), counts[110:].mean()]
            )
    assert (
        counts[110:].tolist() == [18] * 10
    )  # half of each epoch, 60 visits of 10 samples, is noticed
    assert order.visits(6)[2] == pytest.approx(3) and order.visits(0) == (0, 0, 0)
    assert GlobalOrder(120, 10, seed=2).visits(5) == ()
    assert GlobalOrder(120, 50, seed=2, parts=parts).visits(2)[2] == pytest.approx(
        6 * 100 / 120
    )  # a last partial global batch is dropped


@pytest.mark.parametrize(
    "parts, temperature, floors, words",
    [
        (PARTS, 0, None, "temperature 0: a number above 0"),
        (PARTS, float("inf"), None, "temperature inf: a number above 0"),
        (PARTS, 1, (0.5, 0.4, 0.2), "floors .* together at most 1"),
        (PARTS, 1, (-0.1, 0, 0), "floors .* at least 0"),
        (
            ((9, 1.0), (0, 1.0)),
            1,
            (0, 0.1),
            "data set 2 has no training samples, and a floor of 0.1; give it the floor 0, or take "
            "it out",
        ),
        (((9, 1.0), (9, 0.0)), 1, (0, 0.1), "data set 2 has weight 0, and a floor of 0.1"),
        (
            PARTS,
            1,
            (0, 0.5, 0.5),
            "data set 1 has 80000 training samples with a share .* less than one of them",
        ),
        (
            ((9000, 1.0), (9, 0.01)),
            1,
            None,
            "data set 2 has 9 training samples with a share .* less than one of them; give it more",
        ),
    ],
)
def test_what_no_shares_can_keep_is_refused(parts, temperature, floors, words):
    with pytest.raises(ValueError, match=words):
        mixed(parts, temperature, floors)


def test_names_of_sources_are_short_and_different():
    specs = (
        "demo",
        "demo:de+ja",
        "jsonl:/a/train set.jsonl",
        "csv:/b/x.csv?image=a/b",
        "jsonl:/c/train set.jsonl",
        "imagefolder:/d/e/",
    )
    assert source_names(specs) == (
        "demo", "demo:de+ja", "jsonl:train set.jsonl", "csv:x.csv", "jsonl:train set.jsonl 2", "imagefolder:e",
    )  # fmt: skip
    assert source_names(("coco:/i/val2017:/c/val2017.json", "webdataset:/w/{00..09}.tar")) == (
        "coco:val2017.json",
        "webdataset:{00..09}.tar",
    )


# -- sources of one modality


def test_a_source_without_texts_or_without_images_is_refused_with_what_is_missing(emoji_set):
    file = emoji_set(3)
    folder = file.parent
    (folder / "images.csv").write_text("filepath\nimages of emoji/0.png\n")
    (folder / "texts.tsv").write_text("title\na red apple\n")
    (folder / "no titles.csv").write_text(
        "filepath,title\nimages of emoji/0.png,\nimages of emoji/1.png,\n"
    )
    (folder / "images.jsonl").write_text('{"image_path": "images of emoji/0.png"}\n')
    (folder / "texts.jsonl").write_text('{"text": "a red apple"}\n{"text": "a pear"}\n')
    coco = {"images": [{"id": 1, "file_name": "0.png"}], "annotations": []}
    (folder / "images.json").write_text(json.dumps(coco))
    pq.write_table(pa.table({"text": ["a red apple"]}), folder / "texts.parquet")
    pq.write_table(pa.table({"image_path": ["images of emoji/0.png"]}), folder / "images.parquet")
    for name, member in (("images", "a.png"), ("texts", "a.txt")):
        with tarfile.open(folder / f"{name}.tar", "w") as tar:
            tar.add(folder / "images of emoji" / "0.png" if name == "images" else file, member)
    for spec, words in (
        (f"csv:{folder}/images.csv", "no column 'title'; the first line names: filepath"),
        (f"tsv:{folder}/texts.tsv", "no column 'filepath'; the first line names: title"),
        (f"csv:{folder}/no titles.csv", "none of 2 samples can be used .empty-caption 2."),
        (
            f"jsonl:{folder}/images.jsonl",
            "none of 1 samples can be used.*no key 'text'; given: image_path",
        ),
        (
            f"jsonl:{folder}/texts.jsonl",
            "none of 2 samples can be used.*no key 'image_path'; given: text",
        ),
        (
            f"coco:{folder}/images of emoji:{folder}/images.json",
            "none of 1 samples can be used.*no-caption",
        ),
        (
            f"parquet:{folder}/texts.parquet",
            "no column image or image_path or filepath; there are: text",
        ),
        (
            f"parquet:{folder}/images.parquet",
            "no column text or caption or title; there are: image_path",
        ),
        (f"webdataset:{folder}/images.tar", "none of 1 samples can be used.*orphan-member"),
        (f"webdataset:{folder}/texts.tar", "none of 1 samples can be used.*orphan-member"),
    ):
        with pytest.raises(ValueError, match=f"(?s){words}"):
            open_sources([f"jsonl:{file}", spec])
