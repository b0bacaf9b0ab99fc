"""Several data sets as one."""

import json
import pickle
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.batching.mixture import open_sources, source_names
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
        assert mixture.value("image", i) == source.value("image", own)
        assert mixture.content_hash("image", i) == source.content_hash(
            "image", own
        ) and mixture.where(i) == source.where(own)
    assert mixture.usable().tolist() == list(range(11))
    assert mixture.column("width").tolist() == [72] * 11 + [0]
    assert [
        (where.rpartition("/")[2], reason) for _, where, reason, _ in mixture.bad_samples()
    ] == [("few.jsonl:4", "invalid-row")]
    # lines of the same number in two files
    assert len({mixture.identity(i) for i in range(11)}) == 11
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
        (f"csv:{folder}/images.csv", "no column title; there are: filepath"),
        (f"tsv:{folder}/texts.tsv", "no column filepath; there are: title"),
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
