"""Sets of benchmarks as they lie on disk: found, told apart, read whole, and refused where something
is missing."""

import os
import shutil

import numpy as np
import pytest
from wds_sets import (
    NAMES,
    caption,
    class_files,
    of_captions,
    of_classes,
    of_several,
    picture,
    saved,
    write_set,
    write_shard,
)

from data.benchmarks import find_sets as found_in
from data.benchmarks import read_samples, set_of
from data.index.sources import open_source
from data.streams.opening import open_stream


def find_sets(where):
    return [set_of(found) for found in found_in(where)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WYE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def sets(tmp_path):
    root = tmp_path / "sets"
    of_classes(root / "wds_vtab-things_test")
    of_several(root / "wds_several_test")
    of_captions(root / "wds_captions")
    return root


def test_sets_of_a_folder(sets):
    found = find_sets(str(sets))
    assert {each.name: each.kind.name for each in found} == {
        "wds_captions": "retrieval",
        "wds_several_test": "multilabel",
        "wds_vtab-things_test": "classification",
    }
    captions, several, classes = map(read_samples, found)
    assert [len(each) for each in (captions, several, classes)] == [20, 30, 30]
    # one shard behind the other, in which every second sample lies
    order = [*range(0, 20, 2), *range(1, 20, 2)]
    assert [each[0] for each in captions.judged_by] == [caption(i, 0) for i in order]
    assert {len(each) for each in captions.judged_by} == {5}
    assert classes.judged_by == [i % 9 for i in [*range(0, 30, 2), *range(1, 30, 2)]]
    assert classes.value("image", 1) == picture(2)
    assert classes.content_hash("image", 1) != classes.content_hash("image", 2)
    assert classes.where(15) == f"{sets}/wds_vtab-things_test/test/1.tar#s0000000.png"
    assert found[2].classes.names == tuple(NAMES) and not found[2].notes
    assert found[1].classes.templates[0] == "a square of {}."
    assert np.stack(several.judged_by).shape == (30, 10) and not several.judged_by[0].any()


def test_a_set_by_itself_its_shards_and_the_cache_of_the_hub(sets, tmp_path):
    own = sets / "wds_vtab-things_test"
    shutil.copytree(own / "test", own / "train")
    flat = tmp_path / "flat"
    shutil.copytree(own / "test", flat)
    for name in class_files():
        shutil.copy(own / f"{name}.txt", flat)
    by_name = {f"{own}": "test", f"{own}/train": "train", f"{own}/test/{{0..1}}.tar": "test"}
    for where, split in {**by_name, str(flat): "flat"}.items():
        (found,) = find_sets(where)
        assert os.path.basename(found.folder) == split and len(read_samples(found)) == 30
        assert found.name == ("flat" if split == "flat" else own.name)
    # links to blobs, as huggingface_hub lays them out
    repository = tmp_path / "hub" / "datasets--org--wds_things_test"
    revision = repository / "snapshots" / "abc"
    for file in (path for path in own.rglob("*") if path.is_file()):
        link, blob = revision / file.relative_to(own), repository / "blobs" / file.name
        blob.parent.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    for where in (tmp_path / "hub", repository):
        (found,) = find_sets(str(where))
        assert found.name == "wds_things_test" and found.classes.names == tuple(NAMES)


def test_more_than_ten_shards_are_in_order(tmp_path):
    samples = [{"png": picture(i), "cls": str(i % 9).encode()} for i in range(12)]
    root = write_set(tmp_path / "set", samples, shards=12, **class_files())
    for is_counted in (True, False):
        (found,) = find_sets(str(root))
        assert [os.path.basename(each) for each in found.shards] == [f"{n}.tar" for n in range(12)]
        assert bool(found.notes) != is_counted
        (root / "test" / "nshards.txt").unlink(missing_ok=True)


def test_layouts_that_do_not_fit(sets, tmp_path):
    """Each is refused before a model is loaded, with the file to mend."""
    root, n = sets / "wds_vtab-things_test", "nshards.txt"
    count, names = root / "test" / n, root / "classnames.txt"
    templates = root / "zeroshot_classification_templates.txt"

    def refused(pattern, where=sets):
        with pytest.raises((ValueError, OSError), match=pattern):
            for each in find_sets(str(where)):
                read_samples(each)

    def with_text(file, text, pattern):
        before = file.read_text()
        file.write_text(text)
        refused(pattern)
        file.write_text(before)

    with_text(
        count, "4", r"nshards.txt counts 4 shards, and 2 of them are not there: 2.tar, 3.tar;"
    )
    with_text(count, "many", "nshards.txt: 'many'; the number of shards is needed")
    with_text(templates, "a photo", "'a photo'; each line is a sentence with one {}, for the class")
    with_text(names, "\n".join(NAMES[:5]), r"s0000003: .cls: class 6, and .*classnames.txt has 5")
    with_text(names, "a\n\nb", "classnames.txt: line 2 is empty")
    mark = sets / "wds_captions" / "dataset_type.txt"
    with_text(mark, "retreival", "'retreival'; one of .* is needed; did you mean 'retrieval'?")
    mark.unlink()
    refused(
        "wds_captions/test has no classnames.txt and no zeroshot.*; if it is of captions, write"
    )
    mark.write_text("retrieval")
    write_shard(root / "test" / "2.tar", [])
    assert find_sets(str(root))[0].notes == ("2.tar is not counted by nshards.txt",)
    templates.unlink()
    refused("has no zeroshot_classification_templates.txt beside it or one folder above")
    (root / "test").rename(root / "train")
    refused("wds_vtab-things_test has no test/, but train; give the folder of one")
    (tmp_path / "empty").mkdir()
    refused("no .tar file is in it or below it", tmp_path / "empty")
    refused("copy the sets to this machine", "https://host/sets")
    refused("no such file", tmp_path / "nowhere.tar")


@pytest.mark.parametrize(
    "members, pattern",
    [
        ({"png": picture(0)}, r"has .png and not .cls, which a set of classification needs$"),
        (
            {"png": picture(0), "txt": b"a"},
            r"not .cls, .*; is retrieval missing in dataset_type.txt",
        ),
        ({"cls": b"1"}, "has .cls and not an image"),
        ({"png": picture(0), "cls": b"red"}, ".cls: 'red'; the number of a class is needed"),
        ({"png": picture(0), "cls": b"10"}, ".cls: class 10, and .*has 10 names, .* 0 to 9"),
        ({"png": picture(0), "cls": b"-1"}, ".cls: class -1"),
        ({"png": picture(0), "cls": b"1", "npy": saved([[1]])}, r".npy: an array \[1, 1\]; a row"),
        ({"png": picture(0), "cls": b"1", "npy": saved([1])}, "1 of 3 samples have .npy"),
    ],
)
def test_samples_that_do_not_fit(tmp_path, members, pattern):
    good = {"png": picture(1), "cls": b"1"}
    root = write_set(tmp_path / "set", [good, members, good], shards=1, **class_files())
    with pytest.raises(ValueError, match=pattern):
        read_samples(find_sets(str(root))[0])


def test_targets_and_captions_that_do_not_fit(tmp_path):
    def refused(pattern, members, **files):
        shutil.rmtree(tmp_path / "set", ignore_errors=True)
        write_set(tmp_path / "set", [{"png": picture(0), **members}], shards=1, **files)
        with pytest.raises(ValueError, match=pattern):
            read_samples(find_sets(str(tmp_path / "set"))[0])

    several = {"dataset_type": "multilabel", **class_files()}
    refused(
        r"npy: \[9\]; a 0 or a 1 is needed for each of the 10", {"npy": saved([0] * 9)}, **several
    )
    refused("npy: other numbers; a 0 or a 1", {"npy": saved([0] * 9 + [2])}, **several)
    refused("no array of numbers as numpy.save writes it", {"npy": b"\x93NUMPY"}, **several)
    claimed = saved([0] * 10).replace(b"(10,), }", b"(1000000000000,), }")
    refused("no array of numbers", {"npy": claimed}, **several)
    refused("no array of numbers.*numbers are needed", {"npy": saved(["a"] * 10)}, **several)
    refused("txt: no caption; a line", {"txt": b" \n"}, dataset_type="retrieval")
    refused("txt: not UTF-8 at byte 1", {"txt": b"a\xff"}, dataset_type="retrieval")


def test_a_shard_that_ends_early_is_refused(sets):
    file = sets / "wds_captions" / "test" / "1.tar"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ValueError, match="1.tar is cut off .*; get it again"):
        read_samples(find_sets(str(sets / "wds_captions"))[0])


def test_training_reads_captions_by_line_where_the_set_says_so(sets):
    """Without ?captions=lines, of shards and of a stream; an option wins over the mark."""
    folder = sets / "wds_captions" / "test"
    source = open_source(f"webdataset:{folder}/{{0..1}}.tar")
    assert {len(source.captions(i)) for i in range(20)} == {5} and not source.hints()
    stream = open_stream(f"stream:{folder}/{{0..1}}.tar?mixed=1")[0]
    assert stream.captions(0) == source.captions(0) != []
    (sets / "wds_captions" / "dataset_type.txt").unlink()
    plain = open_source(f"webdataset:{folder}/{{0..1}}.tar")  # its index is made anew
    assert {len(plain.captions(i)) for i in range(20)} == {1} and plain.hints()
    (folder / "dataset_type.txt").write_text("retrieval\n")  # beside the shards, too
    assert len(open_source(f"webdataset:{folder}/0.tar").captions(0)) == 5
    other = sets / "other"
    shutil.copytree(folder, other)
    (other / "dataset_type.txt").unlink()
    with pytest.raises(ValueError, match="others of its shards do not say so; give captions=lines"):
        open_stream(f"stream:{folder}/0.tar::{other}/1.tar")
    mixed = open_source(f"webdataset:{folder}/0.tar::{other}/1.tar")
    assert [len(mixed.captions(i)) for i in (0, 10)] == [5, 1]
