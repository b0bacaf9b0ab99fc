"""What each format reads beyond what all have in common, and what it refuses."""

import json
import random
import re
import subprocess
import sys
import tarfile
import uuid
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.formats.webdataset import _key_of
from data.index.sources import open_source

sys.path.insert(0, str(Path(__file__).parent))
from bad_sets import add, encoded_image  # noqa: E402


def identities(source) -> list[str]:
    return [source.identity(i) for i in range(len(source))]


def write_shard(file: Path, keys: list[str], form: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(file, "w", format=form) as tar:
        for number, key in enumerate(keys):
            add(tar, f"{key}.png", encoded_image(number))
            add(tar, f"{key}.txt", f"words of {key}\n".encode())
    return file


# -- csv and tsv


def test_csv_with_other_columns_and_separator(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded_image())
    file = tmp_path / "set.csv"
    # with a byte order mark
    file.write_text('\ufefftext;nr;photo\n"one; two\nthree";7;a.png\n', encoding="utf-8")
    source = open_source(f"csv:{file}?image=photo&text=text&id=nr&separator=;")
    assert identities(source) == ["7"] and source.captions(0) == ["one; two\nthree"]
    assert source.where(0) == f"{file}:2"
    for options, words in (
        ("?image=phot&separator=;", "no column phot; there are: text, nr, photo; did you mean 'ph"),
        ("", "no column filepath; there are: text;nr;photo.*name it: .image=COLUMN"),
        ("?separator=ab", "separator 'ab': one character is needed"),
    ):
        with pytest.raises(ValueError, match=words):
            open_source(f"csv:{file}{options}")


@pytest.mark.parametrize("limit", [1000, 1 << 20])
@pytest.mark.parametrize("end", ["a.png,fine", 'a.png,"a quoted, fine one"'])
def test_a_quote_that_is_never_closed_costs_no_other_row(tmp_path, monkeypatch, limit, end):
    """Whether the reader gives up, comes to another quote, or to the end of the file."""
    monkeypatch.setattr("data.formats.tables.FIELD_LIMIT", limit)
    (tmp_path / "a.png").write_bytes(encoded_image())
    rows = ["a.png,fine"] * 3 + ['a.png,"open'] + ["a.png,fine"] * 300 + [end]
    (tmp_path / "set.csv").write_text("filepath,title\n" + "\n".join(rows) + "\n")
    source = open_source(f"csv:{tmp_path}/set.csv")
    ((_, where, reason, detail),) = source.bad_samples()
    assert where == f"{tmp_path}/set.csv:5" and "a quote" in detail and "not closed" in detail
    assert reason == ("huge-caption" if limit == 1000 else "invalid-row")
    assert source.column("row").tolist() == list(range(2, 307)) and len(source.usable()) == 304
    assert source.captions(304) == [end.partition(",")[2].strip('"')]


def test_a_text_of_several_lines_is_one_row(tmp_path):
    """Also if some of its lines would be rows, but for their image."""
    (tmp_path / "a.png").write_bytes(encoded_image())
    text = "first, one\nb.png,second\nsaid x, last"
    (tmp_path / "set.csv").write_text(f'title,filepath\n"{text}",a.png\n')
    source = open_source(f"csv:{tmp_path}/set.csv")
    assert len(source) == 1 and source.captions(0)[0].splitlines()[1:2] == ["b.png,second"]


def test_a_row_may_end_before_its_language_and_not_go_on_after_the_columns(tmp_path):
    """A text with a separator that is not in quotes would lose its end. Empty ones are no text."""
    (tmp_path / "a.png").write_bytes(encoded_image())
    rows = ["a.png,a red,de, round apple", "a.png,fine,de,,", "a.png,fine"]
    (tmp_path / "set.csv").write_text("filepath,title,language\n" + "\n".join(rows) + "\n")
    source = open_source(f"csv:{tmp_path}/set.csv")
    ((_, _, reason, detail),) = source.bad_samples()
    assert reason == "invalid-row" and "4 columns, but the first line names 3" in detail
    assert [source.language(i) for i in source.usable()] == ["de", None]


# -- coco


def test_coco_keeps_all_captions_of_an_image(tmp_path):
    """One that is null costs no other."""
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "1.jpg").write_bytes(encoded_image(kind="JPEG"))
    captions = [*(f"caption {n}" for n in range(4)), None]
    content = {
        "info": {},
        "images": [{"id": 42, "file_name": "1.jpg"}],
        "annotations": [{"image_id": 42, "caption": caption} for caption in captions],
    }
    (tmp_path / "captions.json").write_text(json.dumps(content))
    source = open_source(f"coco:{tmp_path / 'val'}:{tmp_path / 'captions.json'}")
    assert identities(source) == ["42"] and source.captions(0) == captions[:-1]
    assert source.unused()["captions without text"][0] == 1
    assert source.value("image", 0) == (tmp_path / "val" / "1.jpg").read_bytes()


def test_coco_refuses_another_json(tmp_path):
    for content in ("[]", "{", '{"images": []}', '{"images": {}, "annotations": []}'):
        (tmp_path / "captions.json").write_text(content)
        with pytest.raises(ValueError, match="no COCO captions"):
            open_source(f"coco:{tmp_path}:{tmp_path / 'captions.json'}")


# -- imagefolder


@pytest.fixture
def classes(tmp_path):
    for name in ("n01", "n02_big_cat"):
        (tmp_path / "set" / name).mkdir(parents=True)
        (tmp_path / "set" / name / "1.JPEG").write_bytes(encoded_image(kind="JPEG"))
    return tmp_path / "set"


def test_imagefolder_makes_captions_of_the_folders_names(classes):
    source = open_source(f"imagefolder:{classes}")
    assert identities(source) == ["n01/1.JPEG", "n02_big_cat/1.JPEG"]
    assert source.captions(1)[0] == "a photo of a n02 big cat" and len(source.captions(1)) == 5
    assert source.where(1) == str(classes.resolve() / "n02_big_cat/1.JPEG")


@pytest.mark.parametrize("file", ["names.txt", "names.json", "set/classnames.txt"])
def test_imagefolder_with_names_and_templates(classes, tmp_path, file):
    names = {"n01": "tench, Tinca tinca", "n02_big_cat": "tiger", "n03": "not here"}
    lines = "\n".join(map(" ".join, names.items()))
    (tmp_path / file).write_text(json.dumps(names) if file.endswith("json") else lines)
    templates = tmp_path / "templates.txt"
    templates.write_text("look: {}!\n\n{} is it\n")
    options = f"templates={templates}"
    options += "" if "/" in file else f"&names={tmp_path}/{file}"  # in its folder it is found
    source = open_source(f"imagefolder:{classes}?{options}")
    assert source.captions(0) == ["look: tench, Tinca tinca!", "tench, Tinca tinca is it"]
    assert source.captions(1)[0] == "look: tiger!"


def test_imagefolder_counts_what_it_does_not_use(classes):
    """What would have been a sample is bad, with a reason; other files are counted by ending, and
    what systems leave is passed over."""
    jpg, deep = encoded_image(kind="JPEG"), "n01/" + "/".join(["deep" * 50] * 6)
    for name in (f"{deep}/2.pgm", "n01/3.heic", "top.jpg", "n03/x.dat", ".git/1.jpg"):
        (classes / name).parent.mkdir(parents=True, exist_ok=True)
        (classes / name).write_bytes(jpg)
    (classes / "n04").mkdir()
    for name in ("n01/1.xml", "n02_big_cat/1.xml", "n01/list", "labels.csv", "classnames.txt"):
        (classes / name).write_text("n01 a\nn02_big_cat b\nn03 c\nn04 d\n")
    for name in ("n01/.DS_Store", "n01/._1.JPEG", "__MACOSX/n01/._1.JPEG", "README.md"):
        (classes / name).parent.mkdir(parents=True, exist_ok=True)
        (classes / name).write_bytes(b"Mac OS X")
    source = open_source(f"imagefolder:{classes}")
    assert [row[0] for row in map(list, source.bad_samples())] == [
        *("top.jpg", "n01/3.heic", "n03", "n04")
    ]
    assert [row[2] for row in source.bad_samples()] == [
        *("orphan-member", "not-an-image", "orphan-member", "orphan-member")
    ]
    assert [source.identity(int(i)) for i in source.usable()] == [
        *("n01/1.JPEG", f"{deep}/2.pgm", "n02_big_cat/1.JPEG")
    ]
    root = classes.resolve()
    assert source.unused() == {
        "files .csv": (1, f"{root}/labels.csv"),
        "files .dat": (1, f"{root}/n03/x.dat"),
        "files .xml": (2, f"{root}/n01/1.xml"),
        "files without an ending": (1, f"{root}/n01/list"),
        "hidden files": (1, f"{root}/.git"),
    }


def test_imagefolder_refusals(classes, tmp_path):
    (tmp_path / "names.txt").write_text("n01 tench\nn02_bigcat tiger\n")
    (tmp_path / "templates.txt").write_text("a photo\n")
    for where, error, words in (
        (f"{classes}?names={tmp_path}/names.txt", ValueError, "1 of 2 .* mean 'n02_bigcat'"),
        (f"{classes}?templates={tmp_path}/templates.txt", ValueError, "'a photo'; each line is a"),
        (f"{classes}/n01", ValueError, "has no folder in it; a folder per class is needed"),
        (f"{tmp_path}/none", FileNotFoundError, "does not exist; give a folder"),
    ):
        with pytest.raises(error, match=words):
            open_source(f"imagefolder:{where}")


# -- parquet


def test_parquet_reads_any_row_in_any_order(tmp_path):
    images = [encoded_image(n) for n in range(23)]
    structures = [{"bytes": image, "path": None} for image in images]
    rows = pa.table({"image": structures, "caption": [[f"text {n}", "more"] for n in range(23)]})
    for number, part in enumerate((rows.slice(0, 10), rows.slice(10))):
        pq.write_table(part, tmp_path / f"{number}.parquet", row_group_size=4)
    source = open_source(f"parquet:{tmp_path}/*.parquet")
    assert identities(source)[9:12] == ["0.parquet/9", "1.parquet/0", "1.parquet/1"]
    assert source.captions(22) == ["text 22", "more"]
    assert source.where(22) == f"{tmp_path}/1.parquet#row 12"
    for i in np.random.default_rng(0).permutation(23).tolist():
        assert source.value("image", i) == images[i]


STRING_LISTS = {
    "list": pa.list_(pa.string()),
    "large_list": pa.large_list(pa.large_string()),  # polars
    "fixed_size_list": pa.list_(pa.string(), 2),  # polars' Array
}
TEXTS = {
    "string_view": pa.string_view(),
    "large_string": pa.large_string(),  # pandas, polars
    "dictionary": pa.dictionary(pa.int8(), pa.string()),  # pandas' category, polars' Categorical
    "binary": pa.binary(),  # DuckDB's BLOB, and what does not say that it is text
}


def test_parquet_texts_of_any_type(tmp_path):
    """As public tools write them, and each one's null. In a list it takes no good caption along,
    and neither does one that is no UTF-8."""
    plain = pa.array(["a", "ü", None], pa.string())
    lists = [["a", "b"], ["ü", None], None]
    texts = {name: (plain.cast(kind), ["a"], {}) for name, kind in TEXTS.items()}
    for name, kind in STRING_LISTS.items():
        empty = {"captions without text": (1, f"{tmp_path}/{name}.parquet#row 1")}
        texts[name] = (pa.array(lists, kind), ["a", "b"], empty)
    images = pa.array([encoded_image(n) for n in range(3)], pa.large_binary())
    for name, (column, first, unused) in texts.items():
        pq.write_table(pa.table({"image": images, "text": column}), tmp_path / f"{name}.parquet")
        source = open_source(f"parquet:{tmp_path}/{name}.parquet")
        assert [source.captions(i) for i in (0, 1)] == [first, ["ü"]], name
        assert [reason for _, _, reason, _ in source.bad_samples()] == ["no-caption"], name
        assert source.unused() == unused, name
    broken = pa.array([[b"good", b"caf\xe9"]], pa.list_(pa.binary()))
    broken = pa.ListArray.from_arrays(broken.offsets, broken.values.view(pa.string()))
    pq.write_table(pa.table({"image": images[:1], "text": broken}), tmp_path / "broken.parquet")
    source = open_source(f"parquet:{tmp_path}/broken.parquet")
    assert source.captions(0) == ["good"]
    assert [reason for *_, reason, _ in source.broken_values()] == ["invalid-utf8"]


def test_parquet_texts_of_a_type_that_is_none_are_bad_samples(tmp_path):
    for n, text in enumerate(("words", 5, [5], [{"a": "b"}])):
        table = pa.table({"image": [encoded_image()], "text": [text]})
        pq.write_table(table, tmp_path / f"{n}.parquet")
    found = [*open_source(f"parquet:{tmp_path}/*.parquet").bad_samples()]
    assert [(reason, "the text is" in detail) for *_, reason, detail in found] == [
        ("invalid-row", True)
    ] * 3


@pytest.mark.parametrize(
    ("string", "binary"), [(pa.string(), pa.binary()), (pa.large_string(), pa.large_binary())]
)
def test_parquet_reads_bytes_or_else_the_path(tmp_path, string, binary):
    """As Hugging Face writes images (datasets#4187), and DuckDB and polars structures."""
    folder, away = tmp_path.resolve() / "set", tmp_path.resolve() / "away"
    for place, number in ((folder / "img", 0), (away, 1)):
        place.mkdir(parents=True)
        (place / f"{number}.png").write_bytes(encoded_image(number))
    rows = [
        {"bytes": None, "path": f"{folder}/img/0.png"},  # by an absolute path
        {"bytes": None, "path": "img/0.png"},
        {"bytes": encoded_image(2), "path": "2.png"},  # which need not exist
        {"bytes": encoded_image(3), "path": None},
        {"bytes": None, "path": f"{away}/1.png"},
        {"bytes": None, "path": "img/none.png"},
        {"bytes": None, "path": None},
        None,
    ]
    kind = pa.struct([("bytes", binary), ("path", string)])
    table = pa.table({"image": pa.array(rows, kind), "text": [f"row {n}" for n in range(8)]})
    pq.write_table(table, folder / "a.parquet", row_group_size=3)
    spec = f"parquet:{folder}/a.parquet"
    source = open_source(spec)
    images = [encoded_image(n) for n in (0, 0, 2, 3)]
    assert [source.value("image", int(i)) for i in source.usable()] == images
    reasons = ["outside-root", "missing-file", "missing-file", "missing-file"]
    assert [reason for _, _, reason, _ in source.bad_samples()] == reasons
    rooted = open_source(f"{spec}?root={away}")
    assert rooted.value("image", 4) == encoded_image(1) and len(rooted.usable()) == 5
    # as long as nothing changes, the index stays; a file that changes is read again
    assert open_source(spec).index.folder == source.index.folder
    (folder / "img" / "0.png").write_bytes(encoded_image(9))
    assert open_source(spec).value("image", 1) == encoded_image(9)


def test_parquet_paths_of_any_type(tmp_path):
    (tmp_path / "0.png").write_bytes(encoded_image())
    for kind in ("string_view", "large_string", "dictionary"):
        paths = pa.array(["0.png", None], pa.string()).cast(TEXTS[kind])
        table = pa.table({"image_path": paths, "text": ["a", "b"]})
        pq.write_table(table, tmp_path / f"{kind}.parquet")
        source = open_source(f"parquet:{tmp_path}/{kind}.parquet")
        assert source.value("image", 0) == encoded_image(), kind
        assert [reason for _, _, reason, _ in source.bad_samples()] == ["missing-file"], kind


def test_parquet_without_a_folder_to_look_in_reads_bytes(tmp_path):
    """Files in several folders: nothing says which one a path would count from."""
    for n, image in enumerate(({"bytes": encoded_image(), "path": "0.png"}, {"path": "0.png"})):
        (tmp_path / f"{n}").mkdir()
        (tmp_path / f"{n}" / "0.png").write_bytes(encoded_image(n))
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        table = pa.table({"image": pa.array([image], kind), "text": ["a"]})
        pq.write_table(table, tmp_path / f"{n}" / "a.parquet")
    spec = f"parquet:{tmp_path}/*/a.parquet"
    assert [reason for _, _, reason, _ in open_source(spec).bad_samples()] == ["missing-file"]
    assert open_source(f"{spec}?root={tmp_path}/1").value("image", 1) == encoded_image(1)


def test_parquet_ids_of_duckdb_and_pandas(tmp_path):
    """A number beside a null is a float in pandas; DuckDB and Spark have types for UUIDs, decimals
    and dates, and DuckDB writes its HUGEINT as a double."""
    uuids = [b"0" * 16, b"1" * 16]
    columns = {
        "float": pa.array([7.0, None]),
        "uuid": pa.array(uuids, pa.uuid()),
        "category": pa.array(["x", "y"]).dictionary_encode(),
        "view": pa.array(["x", "y"], pa.string_view()),
        "decimal": pa.array([Decimal(7), Decimal(10**30)], pa.decimal128(38, 0)),
        "scaled": pa.array([Decimal("7.00"), Decimal("-8.00")], pa.decimal128(9, 2)),
        "decimals": pa.array([Decimal(7), Decimal(8)], pa.decimal128(9, 0)).dictionary_encode(),
        "date": pa.array([date(2024, 1, 2), date(2024, 1, 3)]),
        "time": pa.array([datetime(2024, 1, 2, 3, 4, 5), None], pa.timestamp("us", "UTC")),
    }
    images = [encoded_image(n) for n in range(2)]
    found = {}
    for kind, ids in columns.items():
        table = pa.table({"image": images, "text": ["a", "b"], "id": ids})
        pq.write_table(table, tmp_path / f"{kind}.parquet")
        found[kind] = identities(open_source(f"parquet:{tmp_path}/{kind}.parquet"))
    assert found == {
        "float": ["7", "float.parquet/1"],
        "uuid": [str(uuid.UUID(bytes=each)) for each in uuids],
        "category": ["x", "y"],
        "view": ["x", "y"],
        "decimal": ["7", str(10**30)],
        "scaled": ["7", "-8"],
        "decimals": ["7", "8"],
        "date": ["2024-01-02", "2024-01-03"],
        "time": ["2024-01-02T03:04:05+00:00", "time.parquet/1"],
    }


def test_parquet_values_that_are_neither_numbers_nor_texts_name_column_type_and_remedy(tmp_path):
    """A double that is too large to be exact is no id: its digits would be made up."""
    image = [encoded_image()]
    for column, value, words in (
        ("id", pa.array([1e20]), "the id is 1e.20; column 'id' is double: .*CAST.id AS VARCHAR"),
        ("id", pa.array([Decimal("7.5")]), "column 'id' is decimal128.* AS VARCHAR"),
        ("text", pa.array([Decimal(5)]), "the text is 5; column 'text' is decimal128.*VARCHAR"),
        ("text", pa.array([[5]]), "the text is 5; column 'text' is list<.*int64.*CAST.text AS VA"),
    ):
        table = {"image": image, "text": ["a"], "id": ["a"]} | {column: value}
        pq.write_table(pa.table(table), tmp_path / "a.parquet")
        with pytest.raises(ValueError, match=f"(?s)invalid-row.*{words}"):
            open_source(f"parquet:{tmp_path}/a.parquet")


def test_parquet_texts_of_categories_and_dates(tmp_path):
    """Also in lists, as Spark nests them."""
    texts = pa.array(["a", "b"]).dictionary_encode()
    listed = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), texts)
    dates = pa.array([date(2024, 1, 2), date(2024, 1, 3)])
    for column, first in ((texts, "a"), (listed, "a"), (dates, "2024-01-02")):
        images = [encoded_image(n) for n in range(2)]
        pq.write_table(pa.table({"image": images, "text": column}), tmp_path / "a.parquet")
        source = open_source(f"parquet:{tmp_path}/a.parquet")
        assert source.captions(0) == [first] and len(source.usable()) == 2


def test_parquet_files_that_are_joined_are_not_read_as_one_of_them(tmp_path):
    """By the last footer, rows of the first file would be read. Indexes of pages and Bloom filters
    stand before a footer as well."""
    images = [encoded_image(n) for n in range(6)]
    tables = [
        pa.table({"image": images[:count], "text": [f"{name} {n}" for n in range(count)]})
        for name, count in (("a", 3), ("b", 3), ("c", 6))
    ]
    wholes = []
    for table, indexed in zip(tables, (False, True, True)):
        pq.write_table(table, tmp_path / "whole.parquet", write_page_index=indexed)
        assert len(open_source(f"parquet:{tmp_path}/whole.parquet").usable()) == len(table)
        wholes.append((tmp_path / "whole.parquet").read_bytes())
    for joined in ((0, 1), (1, 0), (0, 2), (2, 1), (0, 1, 2)):
        (tmp_path / "joined.parquet").write_bytes(b"".join(wholes[n] for n in joined))
        source = open_source(f"parquet:{tmp_path}/{{joined,whole}}.parquet")
        assert source.usable().tolist() == [1, 2, 3, 4, 5, 6], joined
        ((_, _, reason, detail),) = source.bad_samples()
        assert reason == "truncated-archive" and "several parquet files one behind" in detail


def test_parquet_refusals(tmp_path):
    pq.write_table(pa.table({"img": [b""], "txt": ["a"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"image": [1.5], "text": ["a"]}), tmp_path / "b.parquet")
    (tmp_path / "c.parquet").write_bytes(b"hello")
    for name, words in (
        ("a", "no column image or image_path or filepath; there are: img, txt.*: .image=COLUMN"),
        ("b", "column 'image' is double; bytes, {bytes, path} or a path is needed"),
        ("c", "no file of it is a parquet file"),
    ):
        with pytest.raises(ValueError, match=words):
            open_source(f"parquet:{tmp_path}/{name}.parquet")


# -- webdataset


def test_webdataset_reads_every_tar_format(tmp_path):
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        keys = ["a", "b" if form == tarfile.USTAR_FORMAT else "b/" + "long" * 30, "c"]
        write_shard(tmp_path / f"{form}.tar", keys, form)
        source = open_source(f"webdataset:{tmp_path}/{form}.tar")
        assert identities(source) == [f"{form}.tar/{key}" for key in keys]
        assert all(source.value("image", i) == encoded_image(i) for i in (2, 0, 1))
        assert source.captions(1) == [f"words of {keys[1]}"]
        assert source.where(0) == f"{tmp_path}/{form}.tar#a.png"


def test_webdataset_finds_what_webdataset_finds(tmp_path):
    """The library reads the same samples, in the same order."""
    import webdataset

    write_shard(
        tmp_path / "000.tar", ["x/1", "x.y/2", "x/.hidden", "__meta__/a", "__meta__", "./4"]
    )
    write_shard(tmp_path / "001.tar", ["3", "x__/__y", "with space", "\u00fc/\U0001f34e"])
    every = webdataset.WebDataset(f"{tmp_path}/{{000..001}}.tar", shardshuffle=False)
    # it also gives what has neither image nor text
    theirs = [sample for sample in every if "png" in sample]
    ours = open_source(f"webdataset:{tmp_path}/{{000..001}}.tar")
    assert [identity.split("/", 1)[1] for identity in identities(ours)] == [
        sample["__key__"] for sample in theirs
    ]
    assert len(ours) == len(ours.usable()) == 8
    assert [ours.value("image", i) for i in range(8)] == [sample["png"] for sample in theirs]


@pytest.mark.parametrize(
    ("names", "keys", "bad", "unused"),
    [
        # webdataset/webdataset#237: a name with dots of its own
        ("./1 Track 2.0 (Clean).png, ./1 Track 2.0 (Clean).txt", "./1 Track 2.0 (Clean)", "", ""),
        ("v1.20.png, v1.20.txt, v1.21.png, v1.21.json", "v1.20, v1.21", "", ""),
        ("v1.1.png, v1.2.png, v1.2.txt, v1.1.txt", "v1.1, v1.2", "", ""),  # sorted by ending
        ("x.y/22.0/3.PNG, x.y/22.0/3.TXT", "x.y/22.0/3", "", ""),  # huggingface/datasets#7150
        ("What now...png, What now...txt, ...So.png, ...So.txt", "What now.., ...So", "", ""),
        # what webdataset reads as one sample stays one
        ("a.png, a.seg.png, a.cls, a.txt", "a", "", "members .seg.png, members .cls"),
        ("a.seg.png, a.png, a.json, a.seg.json", "a", "", "members .seg.png, members .seg.json"),
        ("a.png, a.txt, a.json, a.blip.txt", "a", "", "members .json, members .blip.txt"),
        # beside a plain sample, an image with its own text is one too
        ("p.1.png, p.1.txt, p.png, p.txt", "p, p.1", "", ""),
        # nothing is lost in silence
        ("a.png, a.txt, b.cls, b.npy", "a", "b", ""),
        ("a.png, a.txt, v1.20.heic, v1.20.txt, v1.21.png, v1.21.txt", "a, v1.21", "v1.20", ""),
        ("a.png, a.txt, v1.20.png, v1.20.txt, v1.cls", "a, v1.20", "", "members .cls"),
        ("a.png, a.txt, b.seg.png, b.txt", "a", "b", ""),
        ("a.png, a.txt, a.png, a.txt", "a", "a", ""),  # the same again
        ("a.png, a.txt, 000001, b/.hidden.png", "a", "000001", "hidden members"),
        # what is no data
        ("a.png, __MACOSX/a.png, ._a.png, a.txt, x/.DS_Store, README.md", "a", "", ""),
    ],
)
def test_webdataset_uses_or_counts_every_member(tmp_path, names, keys, bad, unused):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in names.split(", "):
            stem, _, ending = name.rpartition(".")
            content = {"txt": f"words of {stem}", "json": json.dumps({"text": f"words of {stem}"})}
            text = content.get(ending.lower())
            add(tar, name, text.encode() if text else encoded_image(len(stem)))
    source = open_source(f"webdataset:{tmp_path}/a.tar")
    good = {source.identity(int(i)).partition("/")[2]: int(i) for i in source.usable()}
    assert ", ".join(good) == keys
    for key, i in good.items():
        assert source.captions(i) == [f"words of {key}"]
        assert source.value("image", i) == encoded_image(len(key))
    reasons = {"a": "duplicate-id"}
    assert [(identity, reason) for identity, _, reason, _ in source.bad_samples()] == [
        (f"a.tar/{key}", reasons.get(key, "orphan-member")) for key in bad.split()
    ]
    assert ", ".join(source.unused()) == unused


def test_a_second_caption_is_counted(tmp_path):
    """Of a column, and of a key of a tar's .json; in a table the same column may come twice."""
    image = encoded_image()
    both = {"image": [image], "caption": ["used"], "title": ["other"], "text": pa.nulls(1)}
    pq.write_table(pa.table(both), tmp_path / "a.parquet")
    pq.write_table(pa.table(both | {"text": ["used"]}), tmp_path / "b.parquet")
    (tmp_path / "a.png").write_bytes(image)
    (tmp_path / "a.csv").write_text("filepath,title,title\na.png,used,other\na.png,used, \n")
    texts = [{"caption": "used", "text": "other"}, {"caption": None, "text": "used"}]
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for n, each in enumerate(texts):
            add(tar, f"{n}.png", encoded_image(n))
            add(tar, f"{n}.json", json.dumps(each).encode())
    for spec, place, counted in [
        (
            "parquet:{}/b.parquet",
            "#row 0",
            ["columns 'caption' beside 'text'", "columns 'title' beside 'text'"],
        ),
        ("parquet:{}/a.parquet?text=caption", "", []),
        ("csv:{}/a.csv", ":2", ["values of a column 'title' beside 'title'"]),
        ("webdataset:{}/a.tar", "#0.json", ["values of a key 'text' beside 'caption'"]),
    ]:
        source = open_source(spec.format(tmp_path))
        assert {text for i in source.usable() for text in source.captions(int(i))} == {"used"}
        file = spec.format(tmp_path).partition(":")[2]
        assert source.unused() == {what: (1, f"{file}{place}") for what in counted}, spec


def test_webdataset_takes_the_first_good_text(tmp_path):
    for n, (members, broken) in enumerate(
        [
            ({"json": b'{"caption": null, "text": "good"}'}, []),
            ({"json": b'{"caption": " ", "text": ["", "good"]}'}, []),
            ({"txt": b"\n", "json": b'{"caption": null, "text": "good"}'}, []),
            ({"txt": b"caf\xe9", "json": b'{"caption": "good"}'}, ["invalid-utf8"]),
            ({"txt": b"good", "json": b"{"}, []),
        ]
    ):
        with tarfile.open(tmp_path / f"{n}.tar", "w") as tar:
            add(tar, "a.png", encoded_image())
            for ending, content in members.items():
                add(tar, f"a.{ending}", content)
        source = open_source(f"webdataset:{tmp_path}/{n}.tar")
        assert source.captions(0) == ["good"], members
        assert [reason for *_, reason, _ in source.broken_values()] == broken, members


def test_webdataset_shards_of_one_name_are_distinguished_by_their_folders(tmp_path):
    """Also the first of them, which was read when it was alone."""
    for name, ids in (("a", ["0.tar/k"]), ("b", ["a/0.tar/k", "b/0.tar/k"])):
        (tmp_path / name).mkdir()
        write_shard(tmp_path / name / "0.tar", ["k"])
        source = open_source(f"webdataset:{tmp_path}/*/0.tar")
        assert identities(source) == ids and len(source.usable()) == len(ids)


def test_webdataset_shards_cut_off_anywhere(tmp_path):
    """What comes before the cut remains, and one row tells of it, not two."""
    whole = write_shard(tmp_path / "whole.tar", ["a", "b"]).read_bytes()
    with tarfile.open(tmp_path / "whole.tar") as tar:
        members = tar.getmembers()
        texts = [
            member.offset_data + member.size for member in members if member.name[1:] == ".txt"
        ]
        end = tar.offset + 512
    for cut in range(512, len(whole), 256):
        (tmp_path / "cut.tar").write_bytes(whole[:cut])
        complete = sum(cut >= text for text in texts)
        spec = f"webdataset:{tmp_path}/cut.tar"
        if not complete:
            with pytest.raises(ValueError, match=r"none of 1 samples .*truncated-archive 1"):
                open_source(spec)
            continue
        bad = ["cut.tar/end of shard"] if cut < end else []
        assert identities(open_source(spec)) == [f"cut.tar/{k}" for k in "ab"[:complete]] + bad, cut


def test_webdataset_reads_all_archives_of_a_joined_file(tmp_path):
    """As tarfile does with `ignore_zeros` (systemd/systemd#16930, borgbackup/borg#7432), and each
    as webdataset does."""
    import webdataset

    parts = [["a", "b"], ["c"], [], ["d", "e"]]
    forms = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.PAX_FORMAT)
    files = [
        write_shard(tmp_path / f"{n}.tar", keys, form)
        for n, (keys, form) in enumerate(zip(parts, forms))
    ]
    # of the first one block ends it, of the third many do
    with tarfile.open(files[0]) as tar:
        first = files[0].read_bytes()[: tar.getmembers()[-1].offset_data + 2 * 512]
    pieces = [first, *(file.read_bytes() for file in files[1:])]
    joined = b"".join([pieces[0], pieces[1], bytes(3 << 20), *pieces[2:]])
    (tmp_path / "joined.tar").write_bytes(joined)
    with tarfile.open(tmp_path / "joined.tar", ignore_zeros=True) as tar:
        names = tar.getnames()
    source = open_source(f"webdataset:{tmp_path}/joined.tar")
    keys = [each.removeprefix("joined.tar/") for each in identities(source)]
    assert [f"{key}{end}" for key in keys for end in (".png", ".txt")] == names
    theirs = [*webdataset.WebDataset(list(map(str, files)), shardshuffle=False, empty_check=False)]
    assert [sample["__key__"] for sample in theirs] == keys == [*"abcde"]
    assert [source.value("image", i) for i in range(5)] == [sample["png"] for sample in theirs]
    # cut off anywhere in the second, what is before stays, and one row says so
    with tarfile.open(files[1]) as tar:
        last = tar.getmembers()[-1]
        text, end = last.offset_data + last.size, tar.offset + 512
    for cut in range(256, len(pieces[1]), 256):
        (tmp_path / "cut.tar").write_bytes(joined[: len(first) + cut])
        found = identities(open_source(f"webdataset:{tmp_path}/cut.tar"))
        there = [
            "a",
            "b",
            *(["c"] if cut >= text else []),
            *(["end of shard"] if cut < end else []),
        ]
        assert found == [f"cut.tar/{each}" for each in there], cut
    # what is behind the end and no archive is named
    for behind in (b"signed", b"x" * 5000, joined[:256]):
        (tmp_path / "behind.tar").write_bytes(first + bytes(1024) + behind)
        source = open_source(f"webdataset:{tmp_path}/behind.tar")
        assert source.usable().tolist() == [0, 1]
        ((identity, _, reason, detail),) = source.bad_samples()
        assert (identity, reason) == ("behind.tar/end of shard", "truncated-archive")
        assert f"{len(behind):,} bytes from byte {len(first) + 1024} on, behind the end" in detail


def test_webdataset_refusals(tmp_path):
    (tmp_path / "a.tar.gz").write_bytes(b"")
    with tarfile.open(tmp_path / "b.tar", "w:gz") as tar:
        add(tar, "a.txt", b"")
    write_shard(tmp_path / "0.tar", ["a"])
    for pattern, error, words in (
        ("a.tar.gz", ValueError, r"a.tar.gz is compressed.*decompress it first"),
        ("b.tar", ValueError, r"b.tar is compressed.*decompress it first"),
        ("{0..2}.tar", FileNotFoundError, r"no such file: .*/1.tar, .*/2.tar$"),
        ("x*.tar", FileNotFoundError, r"no file is named like .*/x\*.tar"),
        (f"0.tar::{tmp_path}/0.tar", ValueError, "names .*0.tar twice; name each file once"),
    ):
        with pytest.raises(error, match=words):
            open_source(f"webdataset:{tmp_path}/{pattern}")


# -- files elsewhere


def test_remote_shards_are_copied_once(tmp_path, cache_folder):
    memory = fsspec.filesystem("memory")
    for n in range(2):
        shard = write_shard(tmp_path / f"{n}.tar", [f"key{n}"])
        memory.pipe(f"/{tmp_path.name}/{n}.tar", shard.read_bytes())
    spec = f"webdataset:memory://{tmp_path.name}/{{0..1}}.tar"
    source = open_source(spec)
    assert identities(source) == ["0.tar/key0", "1.tar/key1"]
    assert source.value("image", 1) == encoded_image(0)
    assert source.where(0) == f"memory://{tmp_path.name}/0.tar#key0.png"
    memory.rm(f"/{tmp_path.name}", recursive=True)
    # what is here is not asked for again
    assert identities(open_source(spec)) == identities(source)
    with pytest.raises(OSError, match="memory://.*/2.tar: .*check the address"):
        open_source(f"webdataset:memory://{tmp_path.name}/2.tar")
    assert not [*(cache_folder / "copies").rglob("*.part*")]


@pytest.mark.parametrize("kind", ["webdataset", "parquet"])
def test_credentials_of_addresses_are_kept_nowhere(tmp_path, cache_folder, kind):
    address = f"memory://user:pa55word@{tmp_path.name}/a.{kind}"
    if kind == "webdataset":
        address += "?Signature=s1gnature"
        content = write_shard(tmp_path / "a.tar", ["key0", "key1"]).read_bytes()
    else:
        file = tmp_path / "a.parquet"
        pq.write_table(pa.table({"image": [encoded_image()], "text": ["words"]}), file)
        content = file.read_bytes()
    fsspec.filesystem("memory").pipe(address.removeprefix("memory://"), content)
    source = open_source(f"{kind}:{address}")
    said = [source.spec, source.format.spec, source.where(0), source.identity(0)]
    kept = [path.read_bytes() for path in cache_folder.rglob("*") if path.is_file()]
    kept += [str(path).encode() for path in cache_folder.rglob("*")]
    for secret in ("pa55word", "s1gnature"):
        assert secret not in "".join(said)
        assert not any(secret.encode() in content for content in kept)
    with pytest.raises(ValueError, match="credentials were not recorded; give the data's address"):
        open_source(source.spec)


def test_remote_parquet_and_file_addresses(tmp_path):
    memory = fsspec.filesystem("memory")
    for name, column, image in (("a", "image", encoded_image()), ("b", "image_path", "a.png")):
        file = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({column: [image], "text": ["words"]}), file)
        memory.pipe(f"/{tmp_path.name}/{file.name}", file.read_bytes())
    for where in (f"memory://{tmp_path.name}/a.parquet", f"file://{tmp_path}/a.parquet"):
        source = open_source(f"parquet:{where}")
        assert identities(source) == ["a.parquet/0"] and source.value("image", 0) == encoded_image()
    with pytest.raises(ValueError, match="holds paths that count .*, but memory://.* is remote"):
        open_source(f"parquet:memory://{tmp_path.name}/b.parquet")


# -- all


def test_listing_loads_neither_torch_nor_models():
    """Formats that need no shards stay light: many processes list them."""
    code = "import sys, data.index.sources; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


def test_keys_of_members_are_those_of_webdataset():
    pattern = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)$", re.DOTALL)
    rng = random.Random(0)
    for _ in range(20_000):
        name = "".join(rng.choices("a./", k=rng.randrange(9)))
        found = pattern.match(name)
        assert _key_of(name) == (found and found[1]), name
