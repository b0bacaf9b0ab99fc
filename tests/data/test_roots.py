"""Where images may lie: below the data file's own folder and below the roots that are named, and
nowhere else."""

import csv
import io
import json
import os
import re
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data.bad_samples import BadSample
from data.cache import __main__ as cache_command
from data.decoding.images import decode_bytes
from data.formats.rows import Roots
from data.formats.specs import split_options
from data.index.roots import add_root_flag, from_anywhere, given_roots, with_roots
from data.index.sources import open_format, open_source
from data.inspect import main as inspect_command
from data.options import DataOptions
from data.prepare import prepare_data

sys.path.insert(0, str(Path(__file__).parent))
from bad_sets import encoded_image  # noqa: E402
from test_bad_samples import READ_ALL  # noqa: E402

KINDS = ("csv", "tsv", "jsonl", "coco", "parquet")
REMEDY = "allow its folder with --data-root DIR, or ?root=DIR in the data spec"


@pytest.fixture
def here(tmp_path) -> Path:
    """Without links in its path: `set` for the data file, `a`, `b` and `outside` beside it, each
    with its own image 1.png."""
    for number, name in enumerate(("set", "a", "b", "outside")):
        (tmp_path.resolve() / name).mkdir()
        (tmp_path.resolve() / name / "1.png").write_bytes(encoded_image(number))
    return tmp_path.resolve()


def write(kind: str, folder: Path, *paths: object) -> str:
    """A set that names these images, with the ids 0, 1, …; its spec."""
    rows = [(str(number), str(path), f"what is at {path}") for number, path in enumerate(paths)]
    file = folder / f"pairs.{kind}"
    if kind in ("csv", "tsv"):
        with file.open("w", newline="", encoding="utf-8") as out:
            csv.writer(out, delimiter="\t" if kind == "tsv" else ",").writerows(
                [("id", "filepath", "title"), *rows]
            )
    elif kind == "jsonl":
        file.write_text(
            "".join(
                json.dumps({"id": i, "image_path": path, "text": text}) + "\n"
                for i, path, text in rows
            )
        )
    elif kind == "coco":
        images = [{"id": i, "file_name": path} for i, path, _ in rows]
        file.write_text(
            json.dumps(
                {
                    "images": images,
                    "annotations": [{"image_id": i, "caption": text} for i, _, text in rows],
                }
            )
        )
        return f"coco:{folder}:{file}"
    else:
        pq.write_table(
            pa.table(dict(zip(("id", "filepath", "title"), map(list, zip(*rows))))), file
        )
    return f"{kind}:{file}"


def rooted(spec: str, *roots: Path) -> str:
    return with_roots(spec, [str(root) for root in roots])


def problems(source) -> dict[str, tuple[str, str]]:
    return {identity: (reason, detail) for identity, _, reason, detail in source.bad_samples()}


def refused(source, i: int) -> BadSample:
    with pytest.raises(BadSample) as error:
        source.value("image", i)
    return error.value


# -- what is read and what is not, in every format that names files


@pytest.mark.parametrize("kind", KINDS)
def test_an_absolute_path_below_the_own_folder(here, kind):
    (here / "set" / "a name").mkdir()
    (here / "set" / "a name" / "~ä%20.png").write_bytes(encoded_image(7))
    (here / "another name").symlink_to(here / "set")
    paths = [
        here / "set" / "1.png",
        here / "set" / "a name" / "~ä%20.png",
        here / "another name" / "1.png",
        f"/{here}/./set//1.png",
    ]
    (here / "set" / "inside.png").symlink_to(here / "set" / "1.png")
    source = open_source(write(kind, here / "set", *paths, here / "set" / "inside.png"))
    assert source.usable().tolist() == [0, 1, 2, 3, 4]
    images = [encoded_image(n) for n in (0, 7, 0, 0, 0)]
    assert [source.value("image", i) for i in range(5)] == images
    # the file itself is reached by the other name
    by_link = write(kind, here / "another name", *paths)
    assert open_source(by_link).usable().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_outside_is_refused_and_the_message_names_the_option(here, kind):
    (here / "set" / "link.png").symlink_to(here / "a" / "1.png")
    (here / "set" / "linked").symlink_to(here / "a")
    beside = here / "set beside"  # begins with the root's name, and is not below it
    beside.mkdir()
    (beside / "1.png").write_bytes(encoded_image())
    dots = "../a/1.png", here / "set" / ".." / "a" / "1.png", here / "set" / ".." / "set" / "1.png"
    links = "link.png", "linked/1.png", here / "set" / "link.png"
    paths = ["1.png", here / "a" / "1.png", beside / "1.png", here / "none.png", *dots, *links]
    source = open_source(write(kind, here / "set", *paths))
    found = problems(source)
    assert source.usable().tolist() == [0]
    assert {reason for reason, _ in found.values()} == {"outside-root"}
    for i in range(1, len(paths)):
        detail = found[str(i)][1]
        assert str(paths[i]) in detail and str(here / "set") in detail and detail.endswith(REMEDY)
        assert f"leads to {here / 'a' / '1.png'}" in detail or paths[i] not in links
        assert refused(source, i).reason == "outside-root"


@pytest.mark.parametrize("kind", KINDS)
def test_roots_let_images_lie_elsewhere(here, kind):
    """By both kinds of paths, through links into a root and from one root into another; what leaves
    them all stays refused."""
    (here / "b" / "2.png").write_bytes(encoded_image(12))
    (here / "b" / "from b to a.png").symlink_to(here / "a" / "1.png")
    (here / "b" / "to outside.png").symlink_to(here / "outside" / "1.png")
    (here / "set" / "linked").symlink_to(here / "a")
    (here / "alias").symlink_to(here / "b")
    allowed = {
        here / "a" / "1.png": 1, here / "b" / "1.png": 2, here / "set" / "1.png": 0, here / "b" / "from b to a.png": 1,
        here / "alias" / "2.png": 12, "1.png": 0, "2.png": 12, "linked/1.png": 1, "from b to a.png": 1,
    }  # fmt: skip
    outside = [
        here / "outside" / "1.png",
        "to outside.png",
        here / "b" / "to outside.png",
        "../a/1.png",
        here / "a" / ".." / "a" / "1.png",
    ]
    spec = rooted(write(kind, here / "set", *allowed, *outside), here / "a", here / "b")
    source = open_source(spec)
    assert source.usable().tolist() == list(range(len(allowed))) and source.spec == spec
    assert [source.value("image", i) for i in range(len(allowed))] == list(
        map(encoded_image, allowed.values())
    )
    assert [reason for reason, _ in problems(source).values()] == ["outside-root"] * len(outside)
    for i, (_, detail) in enumerate(problems(source).values(), len(allowed)):
        assert ", ".join(
            str(here / name) for name in ("set", "a", "b")
        ) in detail and detail.endswith(REMEDY)
        assert refused(source, i).reason == "outside-root"


def test_one_root_of_several_is_enough_to_leave_the_others(here):
    """A link from the own folder is followed into a root, and refused when that root is not
    named."""
    (here / "set" / "link.png").symlink_to(here / "b" / "1.png")
    spec = write("jsonl", here / "set", "1.png", "link.png")
    assert open_source(rooted(spec, here / "a")).usable().tolist() == [0]
    assert open_source(rooted(spec, here / "b")).usable().tolist() == [0, 1]


def test_relative_paths_count_from_the_own_folder_first_and_then_from_each_root_in_order(here):
    for folder, number in (("a", 21), ("b", 22)):
        (here / folder / "2.png").write_bytes(encoded_image(number))
    (here / "b" / "3.png").write_bytes(encoded_image(23))
    # what leads nowhere does not exist
    (here / "set" / "gone.png").symlink_to(here / "set" / "nothing")
    (here / "b" / "gone.png").write_bytes(encoded_image(24))
    spec = write("jsonl", here / "set", "1.png", "2.png", "3.png", "gone.png", "4.png")
    forward, backward = (
        open_source(rooted(spec, *roots))
        for roots in ((here / "a", here / "b"), (here / "b", here / "a"))
    )
    for source, second in ((forward, 21), (backward, 22)):
        assert [source.value("image", i) for i in range(4)] == [
            encoded_image(n) for n in (0, second, 23, 24)
        ]
    reason, detail = problems(forward)["4"]
    assert reason == "missing-file"
    assert f"'4.png' does not exist; paths count from {here}/set, {here}/a, {here}/b" in detail


def test_the_first_that_exists_wins_whatever_it_is(here):
    """A name is not looked for elsewhere because what it names is no image, or leads out."""
    (here / "set" / "folder.png").mkdir()
    (here / "set" / "link.png").symlink_to(here / "outside" / "1.png")
    os.mkfifo(here / "set" / "pipe.png")
    for name in ("folder.png", "link.png", "pipe.png"):
        (here / "a" / name).write_bytes(encoded_image())
    spec = rooted(
        write("jsonl", here / "set", "1.png", "folder.png", "link.png", "pipe.png"), here / "a"
    )
    found = problems(open_source(spec))
    assert {identity: reason for identity, (reason, _) in found.items()} == {
        "1": "not-an-image",
        "2": "outside-root",
        "3": "not-an-image",
    }


def test_faulty_absolute_paths(here):
    os.mkfifo(here / "a" / "pipe.png")
    (here / "a" / "loop.png").symlink_to(here / "a" / "loop.png")
    roots = Roots.of(str(here / "set"), [str(here / "a")])
    faulty = [
        ("none.png", "missing-file"),
        ("1.png/2.png", "missing-file"),
        ("", "not-an-image"),
        ("pipe.png", "not-an-image"),
        ("loop.png", "unreadable"),
        ("\0.png", "nul-character"),
        ("\ud800.png", "invalid-utf8"),
        ("\udce9.png", "invalid-utf8"),
    ]
    for name, reason in faulty:
        with pytest.raises(BadSample) as error:
            roots.find(f"{here}/a/{name}")
        assert error.value.reason == reason, name
    for each in (roots, Roots.of("/")):
        assert each.find(f"{here}/a/1.png")[0] == f"{here}/a/1.png"
    many = Roots.of("/usr", ["/usr/lib", "/usr/include", str(here / "a"), str(here / "b")])
    with pytest.raises(BadSample, match="/usr, /usr/lib, /usr/include and 2 more"):
        many.find(f"{here}/set/1.png")


def test_nothing_outside_the_roots_is_opened(here):
    (here / "b" / "link.png").symlink_to(here / "outside" / "1.png")
    (here / "set" / "linked").symlink_to(here / "outside")
    paths = [
        here / "b" / "1.png",
        here / "outside" / "1.png",
        "link.png",
        here / "b" / "link.png",
        "linked/1.png",
        "../outside/1.png",
    ]
    specs = [rooted(write(kind, here / "set", *paths), here / "a", here / "b") for kind in KINDS]
    run = subprocess.run(
        [sys.executable, "-c", READ_ALL, json.dumps(specs)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    opened = json.loads(run.stdout.splitlines()[-1])
    assert str(here / "b" / "1.png") in opened  # the hook sees what is opened
    assert [path for path in opened if "/outside" in path] == []


# -- as OpenCLIP has it


def test_a_file_of_openclip_is_read_as_openclip_reads_it(here):
    """Tab separated, `filepath` and `title`, absolute paths; the images are not where the file
    is."""
    titles = [
        "a red apple",
        'he said "no", twice',
        "two\nlines",
        "Äpfel, 苹果 🍎",
        "0.5",
        "  spaces  ",
        "a\ttab",
    ]
    for number in range(len(titles)):
        (here / "a" / f"image {number}.png").write_bytes(encoded_image(30 + number))
    file = here / "set" / "train.csv"
    with file.open("w", newline="", encoding="utf-8") as out:
        rows = csv.writer(out, delimiter="\t")
        rows.writerows(
            [
                ("filepath", "title"),
                *((here / "a" / f"image {n}.png", title) for n, title in enumerate(titles)),
            ]
        )
    by_file, by_spec = f"tsv:{file}?root={here}/a", f"csv:{file}?separator=%09&root={here}/a"
    theirs = paths_and_captions(file)
    for source in (open_source(by_file), open_source(by_spec)):
        assert source.usable().tolist() == list(range(len(titles)))
        assert [source.index.text("image_path", i) for i in range(len(source))] == [
            path for path, _ in theirs
        ]
        assert [source.captions(i) for i in range(len(source))] == [
            [caption] for _, caption in theirs
        ]
        for i, (path, _) in enumerate(theirs):
            assert np.array_equal(
                decode_bytes(source.value("image", i)), decode_bytes(Path(path).read_bytes())
            )


def paths_and_captions(file: Path) -> list[tuple[str, str]]:
    """As `open_clip_train.data.CsvDataset` has them, where it can be imported (it needs pandas);
    else as Python's csv module reads them."""
    try:
        from open_clip_train.data import CsvDataset
    except ImportError:
        with file.open(newline="", encoding="utf-8") as opened:
            return [
                (row["filepath"], row["title"]) for row in csv.DictReader(opened, delimiter="\t")
            ]
    dataset = CsvDataset(
        str(file), lambda image: image, "filepath", "title", sep="\t", tokenizer=lambda texts: texts
    )
    return [(path, dataset[i][1]) for i, path in enumerate(dataset.images)]


# -- the index


def test_an_index_belongs_to_its_roots(here):
    spec = write("jsonl", here / "set", "1.png")
    (here / "alias").symlink_to(here / "a")
    own = open_source(spec).index.folder
    others = [
        open_source(rooted(spec, *roots)).index.folder
        for roots in (
            (here / "a",),
            (here / "b",),
            (here / "a", here / "b"),
            (here / "b", here / "a"),
        )
    ]
    assert len({own, *others}) == 5
    # these name no folder that was not there
    same = [
        (here / "a", here / "a"),
        (here / "set", here / "a"),
        (here / "alias",),
    ]
    assert {open_source(rooted(spec, *roots)).index.folder for roots in same} == {others[0]}
    assert open_source(rooted(spec, here / "set")).index.folder == own


def test_an_image_that_appears_in_an_earlier_root_takes_the_place_of_the_later_one(here):
    (here / "b" / "2.png").write_bytes(encoded_image(12))
    spec = rooted(write("jsonl", here / "set", "1.png", "2.png"), here / "a", here / "b")
    before = open_source(spec)
    assert before.value("image", 1) == encoded_image(12)
    (here / "a" / "2.png").write_bytes(encoded_image(11))
    assert "has changed since it was checked; start again" in refused(before, 1).detail
    assert open_source(spec).value("image", 1) == encoded_image(11)
    (here / "a" / "2.png").unlink()
    assert open_source(spec).value("image", 1) == encoded_image(12)


def test_what_is_known_of_an_image_is_not_taken_for_another_of_that_name_in_another_root(here):
    """Equal names, sizes and times: the index of before must not answer for the other file."""
    one, other = bitmap(1), bitmap(2)
    assert len(one) == len(other) and one != other
    (here / "b" / "2.png").write_bytes(one)
    spec = rooted(write("jsonl", here / "set", "1.png", "2.png"), here / "a", here / "b")
    assert open_source(spec).value("image", 1) == one
    (here / "a" / "2.png").write_bytes(other)
    status = (here / "b" / "2.png").stat()
    os.utime(here / "a" / "2.png", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert open_source(spec, refresh=True).value("image", 1) == other


def bitmap(red: int) -> bytes:
    """Not compressed: of one length, whatever it shows."""
    out = io.BytesIO()
    Image.new("RGB", (9, 9), (red, 0, 0)).save(out, "BMP")
    return out.getvalue()


def test_images_in_roots_are_compared_when_the_index_is_opened(here):
    (here / "a" / "3.png").write_bytes(encoded_image(3))
    spec = rooted(write("jsonl", here / "set", here / "a" / "1.png", "2.png", "3.png"), here / "a")
    first = open_source(spec)
    assert (
        first.usable().tolist() == [0, 2] and open_source(spec).index.folder == first.index.folder
    )
    (here / "a" / "1.png").write_bytes(b"hello")
    assert problems(open_source(spec))["0"][0] == "not-an-image"
    (here / "a" / "2.png").write_bytes(encoded_image())
    assert open_source(spec).usable().tolist() == [1, 2]
    (here / "a" / "3.png").unlink()
    assert open_source(spec).usable().tolist() == [1]


@pytest.mark.parametrize("path", ["2.png", "{here}/a/2.png", "own.png"])
def test_a_path_is_checked_again_when_it_is_read(here, path):
    """In a root and in the own folder."""
    file = here / "set" / path if path == "own.png" else here / "a" / "2.png"
    file.write_bytes(encoded_image(3))
    source = open_source(rooted(write("csv", here / "set", path.format(here=here)), here / "a"))
    assert source.value("image", 0) == encoded_image(3)
    file.unlink()
    # the same bytes: only the path tells
    (here / "outside" / "2.png").write_bytes(encoded_image(3))
    file.symlink_to(here / "outside" / "2.png")
    assert refused(source, 0).reason == "outside-root"


def test_roots_change_nothing_where_the_images_are_in_the_files(here):
    pq.write_table(
        pa.table({"image": [encoded_image()], "text": ["words"]}), here / "set" / "bytes.parquet"
    )
    spec = f"parquet:{here}/set/bytes.parquet"
    source = open_source(rooted(spec, here / "a"))
    assert (
        source.value("image", 0) == encoded_image()
        and source.index.folder == open_source(spec).index.folder
    )


# -- how roots are written


@pytest.mark.parametrize(
    "name", ["a folder", "50%", "%20", "this&that", "what?", "a:b", "~", "x=y", "ünï"]
)
def test_any_folder_can_be_named(here, name, monkeypatch):
    folder = here / name
    folder.mkdir()
    (folder / "2.png").write_bytes(encoded_image(5))
    monkeypatch.chdir(here)
    for kind in KINDS:
        spec = write(kind, here / "set", "2.png", folder / "2.png")
        for given in (str(folder), f"./{name}", f"file://{folder}"):
            source = open_source(with_roots(spec, [given]))
            assert source.value("image", 0) == source.value("image", 1) == encoded_image(5)
    by_hand = name.replace("%", "%25").replace("&", "%26").replace("?", "%3F")
    assert open_source(f"{write('jsonl', here / 'set', '2.png')}?root={here}/{by_hand}").value(
        "image", 0
    ) == encoded_image(5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_root_that_is_no_folder_is_refused_at_once(here, kind):
    spec = write(kind, here / "set", "1.png")
    for root, error, words in (
        (f"{here}/none", FileNotFoundError, f"root '{here}/none' does not exist; give a folder"),
        (f"{here}/a/1.png", FileNotFoundError, "1.png' is not a folder; give a folder"),
        ("s3://images", ValueError, "root 's3://images' is remote"),
        ("", ValueError, "option 'root' has no value; write root=VALUE"),
        (f"{here}/a&roots=x", ValueError, "unknown option 'roots'"),
        ("%00", FileNotFoundError, "does not exist"),
    ):
        with pytest.raises(error, match=re.escape(words)) as refusal:
            open_format(f"{spec}?root={root}")
        assert f"data spec '{spec}?root=" in str(refusal.value)


@pytest.mark.parametrize("kind", ["imagefolder", "webdataset", "demo"])
def test_kinds_without_paths_take_no_roots(here, kind):
    (here / "set" / "class").mkdir()
    spec = {
        "imagefolder": f"imagefolder:{here}/set",
        "webdataset": f"webdataset:{here}/none.tar",
        "demo": "demo",
    }[kind]
    assert rooted(spec, here / "a") == spec == from_anywhere(spec)
    with pytest.raises((ValueError, FileNotFoundError)):
        open_format(f"{spec}{'' if ':' in spec else ':'}?root={here}/a")


def test_the_words_of_a_spec(here, monkeypatch):
    monkeypatch.chdir(here)
    for spec, roots, expected in (
        ("csv:x.csv", None, "csv:x.csv"),
        ("csv:x.csv", (), "csv:x.csv"),
        ("csv:x.csv", ["a", "/b c"], f"csv:x.csv?root={here}/a&root=/b c"),
        ("csv:x.csv?separator=;&root=/0", ["/1"], "csv:x.csv?separator=;&root=/0&root=/1"),
        ("coco:a:b.json", ["/1"], "coco:a:b.json?root=/1"),
        # a question mark of a pattern begins no option
        ("parquet:/part-?.parquet", ["/1"], "parquet:/part-?.parquet?root=/1"),
    ):
        assert with_roots(spec, roots) == expected
    for words, expected in (
        ("", ""),
        ("?separator=;&root=a&root=~", f"?separator=;&root={here}/a&root={Path.home()}"),
        ("?root=50%25%26&root=s3://x", f"?root={here}/50%25%26&root=s3://x"),
        ("?root=a%3Fb", f"?root={here}/a%3Fb"),
        (f"?root={here}/a%3Fb", f"?root={here}/a%3Fb"),
    ):
        assert from_anywhere(f"csv:x.csv{words}") == f"csv:x.csv{expected}"
    pattern = "/data/part-?.parquet"
    assert split_options("parquet", pattern, ("image", "root")) == (pattern, {}, ())


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_whose_name_looks_like_options_takes_roots(here, kind):
    folder = here / "is it?root=this"
    folder.mkdir()
    (folder / "1.png").write_bytes(encoded_image())
    spec = write(kind, folder, "1.png", here / "a" / "1.png")
    assert from_anywhere(spec) == spec
    assert open_source(spec).usable().tolist() == [0]
    assert open_source(rooted(spec, here / "a")).usable().tolist() == [0, 1]


# -- the flag


def test_the_flag_and_the_spec_say_the_same(here, monkeypatch):
    monkeypatch.chdir(here)
    spec = write("csv", here / "set", here / "a" / "1.png", "1.png", here / "b" / "1.png")
    parser = ArgumentParser()
    add_root_flag(parser, "SPEC")
    given = parser.parse_args(
        ["--data-root", "a", "--data-root", "b", "--data-root", f"{here}/a"]
    ).data_root
    roots = given_roots(parser, given, [spec])
    assert roots == (f"{here}/a", f"{here}/b")
    by_flag, by_spec = open_source(with_roots(spec, roots)), open_source(f"{spec}?root=a&root=b")
    assert by_flag.index.folder == by_spec.index.folder and by_flag.usable().tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("spec", "root", "words"),
    [
        ("demo", "{here}", ".* it is for data specs of the kinds jsonl, csv"),
        ("jsonl:x", "{here}/none", "folder '.*/none' does not exist; give a folder"),
        ("jsonl:x", "{here}/a/1.png", "folder '.*1.png' is not a folder; give a folder"),
        ("jsonl:x", "s3://x", "folder 's3://x' is remote"),
        ("jsonl:x", "", "folder names no folder"),
        ("jsonl:x", "\udcff", "folder .* the name is not UTF-8"),
    ],
)
def test_the_flag_is_refused_where_it_does_nothing_or_names_no_folder(
    here, capsys, spec, root, words
):
    for command, more in ((inspect_command, []), (cache_command.main, ["--image-size", "32"])):
        with pytest.raises(SystemExit) as end:
            command([spec, "--data-root", root.format(here=here), *more])
        said = capsys.readouterr().err.replace("\n", " ")
        assert end.value.code == 2 and re.search(f"argument --data-root: {words}", said), said


def test_the_commands_find_images_in_roots(here, capsys):
    spec = write("jsonl", here / "set", here / "a" / "1.png", here / "b" / "1.png")
    for given in ([spec, "--data-root", str(here / "a")], [f"{spec}?root={here}/a"]):
        assert inspect_command([*given, "--count", "0"]) == 0
        assert "outside-root" in capsys.readouterr().out
    assert (
        inspect_command([f"{spec}?root={here}/a", "--data-root", str(here / "b"), "--count", "0"])
        == 0
    )
    assert "outside-root" not in capsys.readouterr().out
    words = [spec, "--data-root", str(here / "a"), "--image-size", "32", "--workers", "0"]
    words += ["--cache", str(here / "cache")]
    assert cache_command.main(words) == 0
    assert "1 images stored, 0 were there" in capsys.readouterr().out


# -- a run


def test_what_a_run_trains_on_depends_on_its_roots(here):
    spec = write("jsonl", here / "set", "1.png", here / "a" / "1.png", here / "b" / "1.png")
    run, roots = here / "run", (str(here / "a"), str(here / "b"))
    run.mkdir()
    options = {"val_fraction": 0.0, "max_bad_fraction": 0.9}
    prepared = prepare_data(DataOptions(data=(spec,), data_root=roots, **options), None, run)
    assert prepared.train.tolist() == [0, 1, 2] and prepared.source.spec == rooted(
        spec, here / "a", here / "b"
    )
    assert prepare_data(
        DataOptions(data=(spec,), data_root=roots, **options), None, run
    ).train.tolist() == [0, 1, 2]
    for other in (None, roots[:1], roots[::-1]):
        with pytest.raises(
            ValueError,
            match=r"holds other samples than are asked for \(data_root changed: there .*give another --run-dir",
        ):
            prepare_data(DataOptions(data=(spec,), data_root=other, **options), None, run)


def test_roots_are_those_of_the_held_out_samples_too(here):
    spec, held = (
        write("jsonl", here / "set", "1.png"),
        write("csv", here / "set", here / "a" / "1.png"),
    )
    (here / "run").mkdir()
    prepared = prepare_data(
        DataOptions(data=(spec,), val_data=held, data_root=(str(here / "a"),)), None, here / "run"
    )
    assert prepared.held_out["validation"].source.value("image", 0) == encoded_image(1)
