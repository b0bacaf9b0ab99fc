"""Captions by line, and classes of tar shards as CLIP_benchmark lays its data sets out."""

import json
import sys
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stores import http_server

from data.index.sources import open_source
from data.streams.bloom import CAPTION, key_of, write_unseen
from data.streams.opening import open_stream

sys.path.insert(0, str(Path(__file__).parent))
from bad_sets import add, encoded_image  # noqa: E402

TEMPLATES = "a square of {c}.\nthe colour {c}.\n"


def shard(file: Path, *samples: dict[str, bytes]) -> Path:
    """Samples of an image and members by their endings."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as tar:
        for n, members in enumerate(samples):
            add(tar, f"{n}.png", encoded_image(n))
            for ending, content in members.items():
                add(tar, f"{n}.{ending}", content)
    return file


def captions_of(source) -> list[list[str]]:
    return [source.captions(i) for i in range(len(source))]


# -- captions by line


def test_each_line_is_a_caption(tmp_path):
    """CLIP_benchmark#67: the same lines that `str.splitlines` gives; an empty one is counted."""
    texts = ["one\ntwo\r\nthree", "four\n\nfive\n", "six", " \n"]
    file = shard(tmp_path / "0.tar", *({"txt": text.encode()} for text in texts))
    source = open_source(f"webdataset:{file}?captions=lines")
    assert captions_of(source) == [["one", "two", "three"], ["four", "five"], ["six"], []]
    assert source.unused()["captions without text"][0] == 1 and not source.hints()
    assert source.bad_counts() == {"empty-caption": 1}
    stream = open_stream(f"stream:{file}?captions=lines&mixed=1")[0]
    assert [stream.captions(i) for i in range(3)] == captions_of(source)[:3]
    plain = open_source(f"webdataset:{file}")
    (hint,) = plain.hints()
    assert "2 of 4 samples have a caption of several lines" in hint and "?captions=lines" in hint
    assert open_stream(f"stream:{file}")[0].captions(1) == plain.captions(1) == ["four\n\nfive"]


def test_captions_by_line_of_every_kind_with_texts(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded_image())
    text, lines = "one\ntwo", [["one", "two"]]
    (tmp_path / "a.jsonl").write_text(json.dumps({"image_path": "a.png", "text": text}))
    (tmp_path / "a.csv").write_text(f'filepath,title\na.png,"{text}"\n')
    table = pa.table({"image": [encoded_image()], "text": [[text]]})
    pq.write_table(table, tmp_path / "a.parquet")
    for kind in ("jsonl", "csv", "parquet"):
        spec = f"{kind}:{tmp_path}/a.{kind}"
        assert captions_of(open_source(spec)) == [[text]] and open_source(spec).hints()
        assert captions_of(open_source(f"{spec}?captions=lines")) == lines, kind
        with pytest.raises(ValueError, match="captions=words; one of lines.* is needed"):
            open_source(f"{spec}?captions=words")
    stream = open_stream(f"stream:{tmp_path}/a.parquet?captions=lines")[0]
    assert stream.captions(0) == lines[0]


def test_a_filter_of_captions_sees_lines(tmp_path):
    pytest.importorskip("rbloom")
    file = shard(tmp_path / "0.tar", {"txt": b"one\ntwo"}, {"txt": b"three\nfour"})
    write_unseen(tmp_path / "seen", CAPTION, [key_of(CAPTION, "two")], 1e-6)
    for options, count in (("", 2), ("&captions=lines", 1)):
        stream = open_stream(f"stream:{file}?unseen={tmp_path}/seen{options}")[0]
        assert len(stream) == count
    assert stream.captions(0) == ["three", "four"]


# -- classes


def laid_out(root: Path, *classes: bytes, names="red\nviolet\nblue\n", templates=TEMPLATES) -> str:
    """As CLIP_benchmark does: the shards in a folder of the split, the names above it."""
    shard(root / "test" / "0.tar", *({"cls": each} for each in classes))
    for name, text in (("classnames", names), ("zeroshot_classification_templates", templates)):
        if text is not None:
            (root / f"{name}.txt").write_text(text)
    return f"webdataset:{root}/test/{{0..0}}.tar"


RED, BLUE = (["a square of {}.".format(n), "the colour {}.".format(n)] for n in ("red", "blue"))


def test_classes_of_clip_benchmark(tmp_path):
    spec = laid_out(tmp_path / "set", b"0", b"2\n", b"0")
    source = open_source(spec)
    assert captions_of(source) == [RED, BLUE, RED] and not source.unused()
    assert [source.label(i) for i in range(3)] == ["000000 red", "000002 blue", "000000 red"]
    files = tuple(
        f"{tmp_path}/set/{name}.txt" for name in ("classnames", "zeroshot_classification_templates")
    )
    assert source.format.made_of == files
    # beside the shards before above, and read again when they change
    (tmp_path / "set" / "test" / "classnames.txt").write_text("rot\nlila\nblau\n")
    assert open_source(spec).captions(1)[0] == "a square of blau."
    (tmp_path / "set" / "test" / "classnames.txt").write_text("rot\nlila\ncyan\n")
    assert open_source(spec).captions(1)[0] == "a square of cyan."
    (tmp_path / "names").write_text("x\ny\nz\n")
    named = open_source(f"{spec}?names={tmp_path}/names&templates=one {{}}")
    assert captions_of(named) == [["one x"], ["one z"], ["one x"]]
    address = spec.removeprefix("webdataset:")
    assert (
        open_stream(f"stream:{address}?names={tmp_path}/names")[0].captions(1)[0]
        == "a square of z."
    )


def test_classes_at_an_address(tmp_path):
    laid_out(tmp_path, b"0", b"2")
    with http_server(tmp_path) as url:
        source = open_source(f"webdataset:{url}/test/0.tar")
        assert captions_of(source) == [RED, BLUE]
        assert source.format.made_of[0] == f"{url}/classnames.txt"
        assert open_stream(f"stream:{url}/test/0.tar")[0].captions(1) == BLUE


def test_classes_by_name_and_bad_ones(tmp_path):
    source = open_source(laid_out(tmp_path / "a", b"blue", b" red "))
    assert captions_of(source) == [BLUE, RED] and source.label(0) == "000002 blue"
    unnamed = open_source(laid_out(tmp_path / "b", b"a cat", b"a dog", names=None, templates=None))
    assert unnamed.label(1) == "a dog" and unnamed.captions(1)[0] == "a photo of a a dog"
    assert unnamed.format.made_of == (None, None) and len(unnamed.captions(1)) == 5
    bad = (b"3", b"-1", b"bleu", b"", b"caf\xe9", b"0\n1")
    source = open_source(laid_out(tmp_path / "c", b"1", *bad))
    found = [(reason, said) for _, _, reason, said in source.bad_samples()]
    invalid = "invalid-row"
    assert [reason for reason, _ in found] == [invalid] * 3 + [
        "empty-caption",
        "invalid-utf8",
        invalid,
    ]
    assert "class '3' is none of the 3 classes of" in found[0][1] and "0 to 2" in found[0][1]
    assert "did you mean 'blue'" in found[2][1]
    with pytest.raises(
        ValueError, match="(?s)class 1 has no name: write classnames.txt.*names=FILE"
    ):
        open_source(laid_out(tmp_path / "d", b"1", names=None))
    with pytest.raises(ValueError, match="classnames.txt: line 2 is empty"):
        open_source(laid_out(tmp_path / "e", b"1", names="red\n\nblue\n"))
    with pytest.raises(ValueError, match="each line is a sentence with one {}"):
        open_source(laid_out(tmp_path / "f", b"1", templates="no class\n"))


def test_a_text_beside_a_class_stays_the_caption(tmp_path):
    file = shard(tmp_path / "0.tar", {"txt": b"words", "cls": b"1"})
    (tmp_path / "classnames.txt").write_text("red\nblue\n")
    source = open_source(f"webdataset:{file}")
    assert captions_of(source) == [["words"]] and source.label(0) is None
    assert source.unused()["members .cls"][0] == 1
    classes = open_source(f"webdataset:{file}?captions=classes")
    assert classes.captions(0)[0] == "a photo of a blue" and classes.label(0) == "000001 blue"


def test_a_list_of_names_is_not_read_through_a_link_that_leads_out(tmp_path):
    spec = laid_out(tmp_path / "set", b"1", names=None)
    (tmp_path / "secret").write_text("a\nb\n")
    (tmp_path / "set" / "test" / "classnames.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match="class 1 has no name"):
        open_source(spec)


def test_options_beside_question_marks_that_are_none(tmp_path):
    shard(tmp_path / "a-1.tar", {"txt": b"one\ntwo"})
    assert captions_of(open_source(f"webdataset:{tmp_path}/a-?.tar")) == [["one\ntwo"]]
    spec = f"webdataset:{tmp_path}/a-?.tar?captions=lines"
    assert captions_of(open_source(spec)) == [["one", "two"]]
    with pytest.raises(ValueError, match="unknown option 'caption'.*did you mean 'captions'"):
        open_source(f"webdataset:{tmp_path}/a-1.tar?caption=lines")
    with http_server(tmp_path) as url:
        signed = open_source(f"webdataset:{url}/a-1.tar?signature=abc")
        assert captions_of(signed) == [["one\ntwo"]]
        both = open_source(f"webdataset:{url}/a-1.tar?signature=abc?captions=lines")
        assert captions_of(both) == [["one", "two"]]
    with pytest.raises(ValueError, match="only .parquet has columns"):
        open_stream(f"stream:{tmp_path}/a-1.tar?label=class")
