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

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data.bad_samples import BadSample
from data.cache import __main__ as cache_command
from data.formats.rows import Roots
from data.formats.specs import split_options
from data.index.roots import add_root_flag, from_anywhere, given_roots, with_roots
from data.index.sources import open_format, open_source
from data.inspect import main as inspect_command
from data.options import DataOptions
from data.prepare import prepare_data

sys.path.insert(0, str(Path(__file__).parent))
from bad_sets import SETS, encoded_image  # noqa: E402

# Lists every set of argv[1] (a JSON list of specs), reads every sample, and prints what was opened
# on the way.
READ_ALL = """
import json, os, sys
opened = set()
def note(event, arguments):
    if event in ("open", "os.listdir", "os.scandir", "os.open") and arguments and isinstance(arguments[0], (str, bytes)):
        opened.add(os.path.realpath(os.fsdecode(arguments[0])))
sys.addaudithook(note)
from data.index.sources import open_source
from data.bad_samples import BadSample
for spec in json.loads(sys.argv[1]):
    source = open_source(spec, workers=1)
    for i in range(len(source)):
        try:
            source.value("image", i)
        except BadSample:
            pass
print(json.dumps(sorted(opened)))
"""

KINDS = ("csv", "jsonl", "coco", "parquet")
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
    if kind == "csv":
        with file.open("w", newline="", encoding="utf-8") as out:
            csv.writer(out).writerows([("id", "filepath", "title"), *rows])
    elif kind == "jsonl":
        lines = [{"id": i, "image_path": path, "text": text} for i, path, text in rows]
        file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    elif kind == "coco":
        images = [{"id": i, "file_name": path} for i, path, _ in rows]
        texts = [{"image_id": i, "caption": text} for i, _, text in rows]
        file.write_text(json.dumps({"images": images, "annotations": texts}))
        return f"coco:{folder}:{file}"
    else:
        columns = dict(zip(("id", "filepath", "title"), map(list, zip(*rows))))
        pq.write_table(pa.table(columns), file)
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
    (here / "set" / "inside.png").symlink_to(here / "set" / "1.png")
    names = ["set/1.png", "set/a name/~ä%20.png", "another name/1.png", "set/inside.png"]
    paths = [f"/{here}/./set//1.png", *(here / name for name in names)]
    for own in ("set", "another name"):  # the file itself is reached by another name
        source = open_source(write(kind, here / own, *paths))
        images = [source.value("image", int(i)) for i in source.usable()]
        assert images == [encoded_image(n) for n in (0, 0, 7, 0, 0)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_outside_is_refused_and_the_message_names_the_option(here, kind):
    (here / "set" / "link.png").symlink_to(here / "a" / "1.png")
    (here / "set" / "linked").symlink_to(here / "a")
    beside = here / "set beside"  # begins with the root's name, and is not below it
    beside.mkdir()
    (beside / "1.png").write_bytes(encoded_image())
    dots = "../a/1.png", here / "set" / ".." / "a" / "1.png", "../set/../set beside/1.png"
    links = "link.png", "linked/1.png", here / "set" / "link.png"
    paths = ["1.png", here / "a" / "1.png", beside / "1.png", here / "none.png", *dots, *links]
    source = open_source(write(kind, here / "set", *paths))
    found = problems(source)
    assert source.usable().tolist() == [0] and len(found) == len(paths) - 1
    for i, (reason, detail) in found.items():
        path = paths[int(i)]
        assert reason == refused(source, int(i)).reason == "outside-root"
        assert str(path) in detail and str(here / "set") in detail and detail.endswith(REMEDY)
        assert f"leads to {here / 'a' / '1.png'}" in detail or path not in links


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
        "../a/1.png": 1, here / "set" / ".." / "a" / "1.png": 1, "../set/1.png": 0, "../alias/2.png": 12,
        here / "a" / "1.png": 1, here / "b" / "1.png": 2, here / "set" / "1.png": 0, here / "b" / "from b to a.png": 1,
        here / "alias" / "2.png": 12, "1.png": 0, "2.png": 12, "linked/1.png": 1, "from b to a.png": 1,
    }  # fmt: skip
    outside = [here / "outside" / "1.png", "to outside.png", here / "b" / "to outside.png"]
    outside += ["../outside/1.png", here / "a" / ".." / "outside" / "1.png"]
    plain = write(kind, here / "set", *allowed, *outside)
    source = open_source(rooted(plain, here / "a", here / "b"))
    assert source.usable().tolist() == list(range(len(allowed)))
    assert source.spec == rooted(plain, here / "a", here / "b")
    images = [source.value("image", i) for i in range(len(allowed))]
    assert images == [encoded_image(n) for n in allowed.values()]
    named = ", ".join(str(here / name) for name in ("set", "a", "b"))
    for i, (reason, detail) in problems(source).items():
        assert reason == refused(source, int(i)).reason == "outside-root"
        assert named in detail and detail.endswith(REMEDY)
    # a link is followed into a root only where that root is named
    without_a = open_source(rooted(plain, here / "b")).usable().tolist()
    assert without_a == [2, 3, 5, 6, 8, 9, 10]


def test_a_path_with_dots_counts_from_the_roots_from_which_it_stays_inside(here):
    """Not from the own folder alone; a link before the dots is not followed, wherever it leads."""
    (here / "moved" / "set").mkdir(parents=True)
    (here / "b" / "deep").mkdir()
    for link, target in (("out", "outside"), ("in", "b/deep")):
        (here / "set" / link).symlink_to(here / target)
    paths = ["../a/1.png", "../b/1.png", "out/../a/1.png", "in/../1.png", "out/../set/1.png"]
    paths += [here / "set" / "in" / ".." / "1.png", "../b/deep/../1.png", "./../a/./1.png"]
    roots = [here / name for name in ("set", "a", "b")]
    source = open_source(rooted(write("jsonl", here / "moved" / "set", *paths), *roots))
    assert source.usable().tolist() == [0, 1, 6, 7]
    images = [source.value("image", i) for i in source.usable().tolist()]
    assert images == [encoded_image(n) for n in (1, 2, 2, 1)]
    behind = {i: detail for i, (_, detail) in problems(source).items()}
    assert [*behind] == ["2", "3", "4", "5"]
    assert all("'..' behind a link; write the path" in detail for detail in behind.values())
    (here / "b" / "1.png").unlink()
    (here / "b" / "1.png").symlink_to(here / "outside" / "1.png")
    assert refused(source, 1).reason == "outside-root"


def test_relative_paths_count_from_the_own_folder_first_and_then_from_each_root_in_order(here):
    for file, number in (("a/2", 21), ("b/2", 22), ("b/3", 23), ("b/gone", 24)):
        (here / f"{file}.png").write_bytes(encoded_image(number))
    # what leads nowhere does not exist
    (here / "set" / "gone.png").symlink_to(here / "set" / "nothing")
    spec = write("jsonl", here / "set", "1.png", "2.png", "3.png", "gone.png", "4.png")
    for roots, second in ((("a", "b"), 21), (("b", "a"), 22)):
        source = open_source(rooted(spec, *(here / root for root in roots)))
        images = [encoded_image(n) for n in (0, second, 23, 24)]
        assert [source.value("image", i) for i in range(4)] == images
        reason, detail = problems(source)["4"]
        assert reason == "missing-file"
        assert f"paths count from {here}/set, {here}/{roots[0]}, {here}/{roots[1]}" in detail


def test_the_first_that_exists_wins_whatever_it_is(here):
    """A name is not looked for elsewhere because what it names is no image, or leads out."""
    (here / "set" / "folder.png").mkdir()
    (here / "set" / "link.png").symlink_to(here / "outside" / "1.png")
    os.mkfifo(here / "set" / "pipe.png")
    expected = {
        "folder.png": "not-an-image",
        "link.png": "outside-root",
        "pipe.png": "not-an-image",
    }
    for name in expected:
        (here / "a" / name).write_bytes(encoded_image())
    source = open_source(rooted(write("jsonl", here / "set", "1.png", *expected), here / "a"))
    assert [reason for reason, _ in problems(source).values()] == [*expected.values()]


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
    """In one process: every kind of bad data set, and those with roots of their own."""
    (here / "b" / "link.png").symlink_to(here / "outside" / "1.png")
    (here / "set" / "linked").symlink_to(here / "outside")
    paths = [here / "b" / "1.png", here / "outside" / "1.png", "link.png", "linked/1.png"]
    paths += [here / "b" / "link.png", "../outside/1.png"]
    specs = [rooted(write(kind, here / "set", *paths), here / "a", here / "b") for kind in KINDS]
    for name, make in SETS.items():
        (here / name).mkdir()
        specs.append(make(here / name)[0])
    command = [sys.executable, "-c", READ_ALL, json.dumps(specs)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    opened = json.loads(run.stdout.splitlines()[-1])
    # the hook sees what is opened
    assert {f"{here}/b/1.png", f"{here}/jsonl/set/images/good.png"} <= {*opened}
    assert [path for path in opened if "/outside" in path or path == "/etc/hostname"] == []


# -- as OpenCLIP has it


def test_a_file_of_openclip_is_read_as_openclip_reads_it(here):
    """Tab separated, `filepath` and `title`, absolute paths; the images are not where the file
    is."""
    titles = ["a red apple", 'he said "no", twice', "two\nlines", "Äpfel, 苹果 🍎"]
    titles += ["0.5", "  spaces  ", "a\ttab"]
    images = [here / "a" / f"image {number}.png" for number in range(len(titles))]
    for number, image in enumerate(images):
        image.write_bytes(encoded_image(30 + number))
    file = here / "set" / "train.csv"
    with file.open("w", newline="", encoding="utf-8") as out:
        rows = [("filepath", "title"), *zip(images, titles)]
        csv.writer(out, delimiter="\t").writerows(rows)
    theirs = of_open_clip(file)
    assert theirs == [(str(image), title) for image, title in zip(images, titles)]
    for spec in (f"tsv:{file}?root={here}/a", f"csv:{file}?separator=%09&root={here}/a"):
        source = open_source(spec)
        found = [
            (source.index.text("image_path", i), *source.captions(i)) for i in range(len(source))
        ]
        assert found == theirs
        assert [source.value("image", i) for i in range(len(images))] == [
            image.read_bytes() for image in images
        ]


def of_open_clip(file: Path) -> list[tuple[str, str]]:
    dataset = pytest.importorskip("open_clip_train.data", exc_type=ImportError).CsvDataset
    as_it_is = [lambda given: given] * 2
    rows = dataset(str(file), as_it_is[0], "filepath", "title", sep="\t", tokenizer=as_it_is[1])
    return [(path, rows[i][1]) for i, path in enumerate(rows.images)]


# -- the index


def test_an_index_belongs_to_its_roots(here):
    spec = write("jsonl", here / "set", "1.png")
    (here / "alias").symlink_to(here / "a")

    def folder(*roots: str) -> Path:
        return open_source(rooted(spec, *(here / root for root in roots))).index.folder

    others = [folder(*roots) for roots in ("a", "b", "ab", "ba")]
    assert len({folder(), *others}) == 5
    # these name no folder that was not there
    assert {folder("a", "a"), folder("set", "a"), folder("alias")} == {others[0]}
    assert folder("set") == folder()


def test_an_image_that_appears_in_an_earlier_root_takes_the_place_of_the_later_one(here):
    """Also if it has the name, the size and the time of the other: the index of before must not
    answer for it."""
    one, other = bitmap(1), bitmap(2)
    assert len(one) == len(other) and one != other
    (here / "b" / "2.png").write_bytes(one)
    spec = rooted(write("jsonl", here / "set", "1.png", "2.png"), here / "a", here / "b")
    before = open_source(spec)
    assert before.value("image", 1) == one
    (here / "a" / "2.png").write_bytes(other)
    assert "has changed since it was checked; start again" in refused(before, 1).detail
    status = (here / "b" / "2.png").stat()
    os.utime(here / "a" / "2.png", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert open_source(spec, refresh=True).value("image", 1) == other
    os.utime(here / "a" / "2.png", ns=(1, 1))
    assert open_source(spec).value("image", 1) == other
    (here / "a" / "2.png").unlink()
    assert open_source(spec).value("image", 1) == one


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


def test_a_path_is_checked_again_when_it_is_read(here):
    """In a root and in the own folder."""
    paths = {"2.png": here / "a" / "2.png", f"{here}/a/3.png": here / "a" / "3.png"}
    paths["own.png"] = here / "set" / "own.png"
    for file in paths.values():
        file.write_bytes(encoded_image(3))
    source = open_source(rooted(write("csv", here / "set", *paths), here / "a"))
    # the same bytes: only the path tells
    (here / "outside" / "2.png").write_bytes(encoded_image(3))
    for i, file in enumerate(paths.values()):
        assert source.value("image", i) == encoded_image(3)
        file.unlink()
        file.symlink_to(here / "outside" / "2.png")
        assert refused(source, i).reason == "outside-root"


def test_roots_change_nothing_where_the_images_are_in_the_files(here):
    file = here / "set" / "bytes.parquet"
    pq.write_table(pa.table({"image": [encoded_image()], "text": ["words"]}), file)
    source = open_source(rooted(f"parquet:{file}", here / "a"))
    assert source.value("image", 0) == encoded_image()
    assert source.index.folder == open_source(f"parquet:{file}").index.folder


# -- how roots are written


def test_any_folder_can_be_named(here, monkeypatch):
    monkeypatch.chdir(here)
    for n, name in enumerate(["a b", "50%", "%20", "this&that", "what?", "a:b", "~", "x=y", "ünï"]):
        folder = here / name
        folder.mkdir()
        (folder / "2.png").write_bytes(encoded_image(5))
        spec = write(KINDS[n % len(KINDS)], here / "set", "2.png", folder / "2.png")
        by_hand = name.replace("%", "%25").replace("&", "%26").replace("?", "%3F")
        specs = [
            with_roots(spec, [given]) for given in (str(folder), f"./{name}", f"file://{folder}")
        ]
        for each in (*specs, f"{spec}?root={here}/{by_hand}"):
            source = open_source(each)
            assert source.value("image", 0) == source.value("image", 1) == encoded_image(5), each


def test_a_root_that_is_no_folder_is_refused_at_once(here):
    for n, (root, error, words) in enumerate(
        [
            (f"{here}/none", FileNotFoundError, f"root '{here}/none' does not exist"),
            (f"{here}/a/1.png", FileNotFoundError, "1.png' is not a folder"),
            ("s3://images", ValueError, "root 's3://images' is remote"),
            ("", ValueError, "option 'root' has no value"),
            (f"{here}/a&roots=x", ValueError, "unknown option 'roots'"),
            ("%00", FileNotFoundError, "does not exist"),
        ]
    ):
        spec = write(KINDS[n % len(KINDS)], here / "set", "1.png")
        with pytest.raises(error, match=re.escape(words)) as refusal:
            open_format(f"{spec}?root={root}")
        assert f"data spec '{spec}?root=" in str(refusal.value)


def test_kinds_without_paths_take_no_roots(here):
    (here / "set" / "class").mkdir()
    for spec in (f"imagefolder:{here}/set", f"webdataset:{here}/none.tar", "demo"):
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


def test_a_file_whose_name_looks_like_options_takes_roots(here):
    folder = here / "is it?root=this"
    folder.mkdir()
    (folder / "1.png").write_bytes(encoded_image())
    for kind in KINDS:
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
    words = ["--data-root", "a", "--data-root", "b", "--data-root", f"{here}/a"]
    roots = given_roots(parser, parser.parse_args(words).data_root, [spec])
    assert roots == (f"{here}/a", f"{here}/b")
    by_flag, by_spec = open_source(with_roots(spec, roots)), open_source(f"{spec}?root=a&root=b")
    assert by_flag.index.folder == by_spec.index.folder and by_flag.usable().tolist() == [0, 1, 2]


def test_the_flag_is_refused_where_it_does_nothing_or_names_no_folder(here, capsys):
    for spec, root, words in (
        ("demo", here, ".* it is for data specs of the kinds jsonl, csv"),
        ("jsonl:x", f"{here}/none", "folder '.*/none' does not exist"),
        ("jsonl:x", f"{here}/a/1.png", "folder '.*1.png' is not a folder"),
        ("jsonl:x", "s3://x", "folder 's3://x' is remote"),
        ("jsonl:x", "", "folder names no folder"),
        ("jsonl:x", "\udcff", "folder .* the name is not UTF-8"),
    ):
        for command, more in ((inspect_command, []), (cache_command.main, ["--image-size", "32"])):
            with pytest.raises(SystemExit) as end:
                command([spec, "--data-root", str(root), *more])
            said = capsys.readouterr().err.replace("\n", " ")
            assert end.value.code == 2 and re.search(f"argument --data-root: {words}", said), said


def test_the_commands_find_images_in_roots(here, capsys):
    spec = write("jsonl", here / "set", here / "a" / "1.png", here / "b" / "1.png")
    flag, option = ["--data-root", f"{here}/a"], f"{spec}?root={here}/a"
    every = [option, "--data-root", f"{here}/b"]
    for given, refuses in (([spec, *flag], True), ([option], True), (every, False)):
        assert inspect_command([*given, "--count", "0"]) == 0
        assert ("outside-root" in capsys.readouterr().out) == refuses
    words = ["--image-size", "32", "--workers", "0", "--cache", str(here / "cache")]
    assert cache_command.main([spec, *flag, *words]) == 0
    assert "1 images stored, 0 were there" in capsys.readouterr().out


# -- a run


def test_what_a_run_trains_on_depends_on_its_roots(here):
    spec = write("jsonl", here / "set", "1.png", here / "a" / "1.png", here / "b" / "1.png")
    run, roots = here / "run", (str(here / "a"), str(here / "b"))
    run.mkdir()

    def prepared(data_root):
        fractions = {"val_fraction": 0.0, "max_bad_fraction": 0.9}
        options = DataOptions(data=(spec,), data_root=data_root, **fractions)
        return prepare_data(options, None, run)

    for _ in range(2):
        assert prepared(roots).train.tolist() == [0, 1, 2]
        assert prepared(roots).source.spec == rooted(spec, here / "a", here / "b")
    for other in (None, roots[:1], roots[::-1]):
        with pytest.raises(ValueError, match=r"data_root changed: there .*another --run-dir"):
            prepared(other)


def test_roots_are_those_of_the_held_out_samples_too(here):
    spec = write("jsonl", here / "set", "1.png")
    held = write("csv", here / "set", here / "a" / "1.png")
    options = DataOptions(data=(spec,), val_data=held, data_root=(str(here / "a"),))
    (here / "run").mkdir()
    held_out = prepare_data(options, None, here / "run").held_out["validation"]
    assert held_out.source.value("image", 0) == encoded_image(1)
