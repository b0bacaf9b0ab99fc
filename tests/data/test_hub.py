"""Folders as data sets lie on Hugging Face's hub, and in its cache."""

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stream_shards import write_tar

from data.index.sources import open_source
from data.streams.opening import open_stream

NAMES = ["tench", "gold fish", "great_white_shark"]
FEATURES = {"image": {"_type": "Image"}, "label": {"names": NAMES, "_type": "ClassLabel"}}


METADATA = {b"huggingface": json.dumps({"info": {"features": FEATURES}}).encode()}


def rows(number, first=0):
    image = open_source("demo").value("image", 0)
    return [
        {"id": f"{n}", "image": {"bytes": image, "path": f"{n}.png"}, "text": f"sample {n}"}
        for n in range(first, first + number)
    ]


def write(file, number=2, first=0):
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".tar":
        write_tar(file, [{**row, "image": row["image"]["bytes"]} for row in rows(number, first)])
    else:
        table = pa.Table.from_pylist(rows(number, first))
        pq.write_table(table.drop_columns("id"), file)


def opened(spec):
    kind, _, where = spec.partition(":")
    return open_stream(spec)[0] if kind == "stream" else open_source(spec)


def captions(source):
    return [source.captions(k)[0] for k in range(len(source))]


def pushed(folder):
    """As push_to_hub writes it."""
    for split, first, of in (("train", 0, 3), ("validation", 10, 1), ("test_2", 20, 2)):
        for n in range(of):
            write(folder / "data" / f"{split}-{n:05d}-of-{of:05d}.parquet", 2, first + 2 * n)
    (folder / "README.md").write_text("---\n---\n")
    write(folder / ".cache" / "train-00000-of-00001.parquet")


def downloaded(folder):
    """As huggingface_hub lays its cache out: links to blobs without an ending."""
    blobs, snapshot = folder / "blobs", folder / "snapshots" / "1a2b"
    pushed(folder / "made")
    blobs.mkdir()
    for n, file in enumerate(sorted((folder / "made").rglob("data/*.parquet"))):
        (link := snapshot / "data" / file.name).parent.mkdir(parents=True, exist_ok=True)
        file.rename(blobs / f"{n:x}")
        link.symlink_to(os.path.relpath(blobs / f"{n:x}", link.parent))
    (folder / "snapshots" / "0old").mkdir()
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("1a2b")


@pytest.mark.parametrize("kind", ["parquet", "stream"])
@pytest.mark.parametrize("laid", [pushed, downloaded])
def test_a_split_of_a_folder_is_its_shards(laid, kind, tmp_path):
    laid(tmp_path)
    for split, numbers in (
        ("train", range(6)),
        ("val", (10, 11)),
        ("test_2", range(20, 24)),
        ("test_2+train", (*range(20, 24), *range(6))),
    ):
        found = opened(f"{kind}:{tmp_path}?split={split}")
        assert captions(found) == [f"sample {n}" for n in numbers], split
        assert len(found.value("image", 0)) > 100
    for given, said in (
        ("", "several splits: test_2 \\(2 files\\), train \\(3 files\\), validation.*split=train"),
        ("?split=tran", "no split 'tran'; did you mean 'train'"),
        ("/*?split=train", "no split|names files|no file is named"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=said):
            opened(f"{kind}:{tmp_path}{given}")


@pytest.mark.parametrize(
    "names",
    [
        ["imagenet1k-train-0000.tar", "imagenet1k-train-0001.tar", "imagenet1k-validation-00.tar"],
        ["wds/train/0.tar", "wds/train/1.tar", "wds/test/0.tar"],
        ["cc3m-training-00000-of-00002.tar", "cc3m-training-00001-of-00002.tar", "dev.tar"],
    ],
)
def test_tars_are_of_the_split_of_their_name_or_folder(names, tmp_path):
    for n, name in enumerate(names):
        write(tmp_path / name, 2, 2 * n)
    for kind in ("webdataset", "stream"):
        found = captions(opened(f"{kind}:{tmp_path}?split=train"))
        assert found == [f"sample {n}" for n in range(4)]
        with pytest.raises(ValueError, match="several splits"):
            opened(f"{kind}:{tmp_path}")
    (tmp_path / names[2]).unlink()
    assert len(opened(f"webdataset:{tmp_path}")) == 4  # one split goes without saying


def test_other_layouts_are_refused_with_what_is_there(tmp_path):
    def said(spec):
        with pytest.raises((ValueError, OSError)) as caught:
            opened(spec)
        return str(caught.value)

    write(tmp_path / "plain" / "0.parquet")
    assert len(opened(f"parquet:{tmp_path}/plain")) == 2  # no split at all
    assert "no split 'train'; it has 1 files of none, such as 0.parquet" in said(
        f"parquet:{tmp_path}/plain?split=train"
    )
    write(tmp_path / "plain" / "0.tar")
    assert "has .parquet and .tar files" in said(f"stream:{tmp_path}/plain")
    for n in (0, 1, 3):
        write(tmp_path / "part" / f"train-{n:05d}-of-00004.parquet")
    assert "has 3 of 4 shards of 'train'; download" in said(f"parquet:{tmp_path}/part")
    assert "there are .parquet files: give parquet:DIR" in said(f"webdataset:{tmp_path}/part")
    for n in (0, 1):
        write(tmp_path / "twice" / f"train-{n:05d}-of-00002.parquet")
    write(tmp_path / "twice" / "train-00000-of-00001.parquet")
    assert "has shards of 'train' of 1 and of 2" in said(f"parquet:{tmp_path}/twice")
    for name in ("de", "en"):
        write(tmp_path / "several" / name / "train-00000-of-00001.parquet")
    assert "in 2 folders: de, en; give one" in said(f"parquet:{tmp_path}/several?split=train")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "data-00000-of-00001.arrow").touch()
    assert "save_to_disk" in said(f"stream:{tmp_path}/saved")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "train-00000-of-00001.parquet").symlink_to("../blobs/1")
    assert "no such file" in said(f"parquet:{tmp_path}/broken")


def test_a_split_is_a_data_set_of_its_own(tmp_path):
    """Its index is none of the others'."""
    pushed(tmp_path)
    specs = [f"parquet:{tmp_path}?split={split}" for split in ("train", "validation")]
    for _ in range(2):
        sources = [open_source(spec) for spec in specs]
        assert [len(source) for source in sources] == [6, 2]
        assert sources[0].index.folder.parent != sources[1].index.folder.parent


def classified(file, labels, metadata=METADATA, **more):
    file.parent.mkdir(parents=True, exist_ok=True)
    images = [row["image"] for row in rows(len(labels))]
    table = pa.table({"image": images, "label": labels, **more})
    pq.write_table(table.replace_schema_metadata(metadata), file)


@pytest.mark.parametrize("kind", ["parquet", "stream"])
def test_captions_are_made_of_the_names_of_classes(kind, tmp_path):
    """As `datasets` writes them into the file."""
    for n in range(2):
        classified(tmp_path / "data" / f"train-{n:05d}-of-00002.parquet", [2, n, 1])
    source = opened(f"{kind}:{tmp_path}")
    names = ["great white shark", "tench", "gold fish", "great white shark", *["gold fish"] * 2]
    assert captions(source) == [f"a photo of a {name}" for name in names]
    assert len(source.captions(0)) == 5
    source = opened(f"{kind}:{tmp_path}?templates=a {{}}!")
    assert source.captions(0) == ["a great white shark!"]
    (tmp_path / "names.txt").write_text("one\ntwo\nthree\n")
    for words in ("names", "label=label&names"):
        source = opened(f"{kind}:{tmp_path}?{words}={tmp_path}/names.txt&templates={{}}")
        assert captions(source) == ["three", "one", "two", "three", "two", "two"]
    (tmp_path / "names.txt").write_text("one\ntwo\nfour\n")  # is read anew
    source = opened(f"{kind}:{tmp_path}?names={tmp_path}/names.txt&templates={{}}")
    assert captions(source) == ["four", "one", "two", "four", "two", "two"]


def test_classes_of_a_column(tmp_path):
    classified(file := tmp_path / "0.parquet", [0, -1, None, 7])
    source = open_source(f"parquet:{file}")
    assert source.label(0) == "000000 tench" and source.usable().tolist() == [0]
    reasons = {where[-1]: (reason, detail) for _, where, reason, detail in source.bad_samples()}
    assert (
        reasons["1"][0] == "invalid-row"
        and "'-1' is none of the 3 classes of column" in reasons["1"][1]
    )
    assert reasons["2"][0] == "no-caption" and reasons["3"][0] == "invalid-row"
    assert source.format.made_of == ("column 'label'", None)
    # where there are texts, these are read
    classified(file, [0, 2], text=["a fish", "a shark"])
    assert captions(open_source(f"parquet:{file}")) == ["a fish", "a shark"]
    source = open_source(f"parquet:{file}?captions=classes")
    assert captions(source) == ["a photo of a tench", "a photo of a great white shark"]
    # names instead of numbers
    classified(file, ["cat", "dog"], None)
    assert captions(open_source(f"parquet:{file}?label=label&templates={{}}")) == ["cat", "dog"]
    for metadata, said in (
        (None, "no column text"),
        ({b"huggingface": b"[" * 100_000}, "no column text"),
        ({b"huggingface": b'{"info": {"features": {"label": {"names": 3}}}}'}, "no column text"),
        ({b"huggingface": b'{"info": {"features": []}}'}, "no column text"),
    ):
        classified(file, [0, 1], metadata)
        with pytest.raises(ValueError, match=said):
            open_source(f"parquet:{file}")
    several = {"info": {"features": {name: FEATURES["label"] for name in ("fine", "coarse")}}}
    classified(
        file, [0, 1], {b"huggingface": json.dumps(several).encode()}, fine=[0, 1], coarse=[1, 1]
    )
    with pytest.raises(ValueError, match="not clear.*image, label, fine, coarse.*label=COLUMN"):
        open_source(f"parquet:{file}")
    source = open_source(f"parquet:{file}?label=coarse&templates={{}}")
    assert captions(source) == ["gold fish", "gold fish"]
