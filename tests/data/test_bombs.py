"""Small files that stand for gigabytes, or for minutes: each is opened as a stranger's data set would
be, where memory matters in a process that may not have more of it."""

import io
import json
import os
import resource
import struct
import subprocess
import sys
import tarfile
import zlib
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

from data import bad_samples
from data.bad_samples import BadSample
from data.decoding import images as decoding
from data.decoding.images import decode_bytes
from data.decoding.sounds import decode_audio
from data.formats.folders import json_lists
from data.formats.prompts import read_text
from data.formats.rows import Roots
from data.formats.shards import expand
from data.formats.tables import list_entries
from data.index.sources import open_source
from data.modalities.tokenizer import batch_tokens, load_tokenizer
from data.streams import counts, metadata
from data.streams.bloom import write_unseen
from data.streams.opening import open_stream

sys.path.insert(0, str(Path(__file__).parent))
from bad_films import of_many_streams  # noqa: E402
from bad_sets import encoded_image, png_chunk  # noqa: E402

ROOT = Path(__file__).parents[2]
MEMORY = 3 << 30  # of addresses; importing what a data set needs takes 1.5 GB of them
MB = 1 << 20


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WYE_CACHE", str(tmp_path / "cache"))


def run(code: str, memory: int = resource.RLIM_INFINITY) -> subprocess.CompletedProcess:
    """Python in a process of its own, with at most so many bytes of addresses."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (memory, memory)),
    )


def opened(*specs: str) -> list[list[tuple[str, str]]]:
    """[(id, reason)] of the bad samples of each data set, opened with little memory."""
    done = run(
        "import json; from data.index.sources import open_source\n"
        f"sources = [open_source(spec, workers=1) for spec in {specs!r}]\n"
        "print(json.dumps([[bad[::2][:2] for bad in each.bad_samples()] for each in sources]))",
        MEMORY,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [[(identity, reason) for identity, reason in each] for each in json.loads(done.stdout)]


# -- parquet


def repeated(value: object, rows: int) -> pa.Array:
    """One value in all rows, which a file keeps once."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([value]))


def write_parquet(file: Path, **columns: object) -> str:
    options = {"compression": "zstd", "store_schema": False, "dictionary_pagesize_limit": 1 << 30}
    pq.write_table(pa.table(columns), file, **options)
    return f"parquet:{file}"


def padded_image(size: int) -> bytes:
    return encoded_image() + bytes(size)


def test_a_row_group_is_kept_by_what_it_decodes_to_and_not_by_its_footer(tmp_path, monkeypatch):
    monkeypatch.setattr("data.formats.parquet_files.KEPT_LIMIT", 10 * MB)
    columns = {"image": repeated(padded_image(MB), 20), "text": ["a text"] * 20}
    source = open_source(write_parquet(tmp_path / "a.parquet", **columns), workers=1)
    assert pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(0).total_byte_size < 2 * MB
    assert source.value("image", 15) == padded_image(MB)
    assert source.format._kept["image"][1] is None


def test_a_table_of_ever_the_same_short_row_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("data.formats.parquet.FILE_LIMIT", 1000 * 1024)
    monkeypatch.setattr("data.formats.parquet.DECODED_FACTOR", 0)
    columns = {"image": repeated(encoded_image(), 1200), "text": repeated("a text", 1200)}
    source = open_source(write_parquet(tmp_path / "a.parquet", **columns), workers=1)
    (bad,) = source.bad_samples()
    assert len(source) == 1001 and bad[2] == "unreadable" and "1,000 rows" in bad[3]


# -- metadata of streams


def failure(spec: str) -> str:
    done = run(
        "from data.streams.opening import open_stream\n"
        f"try: open_stream({spec!r})\n"
        "except (ValueError, OSError) as error: print(error)",
        MEMORY,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_metadata_of_all_shards_that_stand_for_gigabytes_are_not_held(tmp_path):
    """Each shard would take 3 GB, and all are read at once."""
    shards = tmp_path / "shards"
    shards.mkdir()
    images = repeated(encoded_image(), 200)
    for number in range(6):
        texts = repeated("x" * (16 * MB), 200)
        write_parquet(shards / f"{number}.parquet", image=images, language=texts, caption=texts)
    for filtered in ("where=language=='de'", f"unseen={tmp_path}/seen"):
        write_unseen(tmp_path / "seen", "caption", [bytes(16)], 0.01)
        said = failure(f"stream:{shards}/*.parquet?{filtered}")
        assert "0.parquet: the texts of 200 rows have 3,355,443,200 bytes; at most" in said


def test_a_footer_says_no_more_rows_than_can_be_there(tmp_path, monkeypatch):
    for module in (counts, metadata):
        monkeypatch.setattr(module, "SAMPLES_LIMIT", 5000)
    file = tmp_path / "0.parquet"
    write_parquet(file, image=repeated(encoded_image(), 5001), width=repeated(1, 5001))
    assert file.stat().st_size < 5000
    for spec, most in ((f"{file}", file.stat().st_size), (f"{file}?where=width>0", 5000)):
        with pytest.raises(
            ValueError, match=f"0.parquet: its footer says 5,001 rows; at most {most:,}"
        ):
            open_stream(f"stream:{spec}")


def test_a_footer_of_gigabytes_is_not_read(tmp_path):
    """A hole in a file, which takes no place on the disk."""
    file = tmp_path / "0.parquet"
    with file.open("wb") as opened:
        opened.truncate(4 << 30)
        opened.seek((4 << 30) - 8)
        opened.write(struct.pack("<I", (4 << 30) - 16) + b"PAR1")
    said = failure(f"stream:{file}?where=width>0")
    assert "0.parquet" in said and "its footer has 4,294,967,280 bytes; at most" in said
    assert failure(f"stream:{file}") == ""  # a damaged shard is a bad sample


def test_files_that_are_read_whole_are_measured_first(tmp_path):
    """Holes in files: a list of captions or of entries, names of classes, subtitles."""
    for name in ("a.json", "film.srt"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(6 << 30)
    file = str(tmp_path / "a.json")
    for read in (
        read_text,
        partial(json_lists, what="", needed=""),
        lambda f: next(list_entries(f)),
    ):
        with pytest.raises(ValueError, match="a.json: has over .*, and no more is read"):
            read(file)
    with pytest.raises(BadSample, match="film.srt has 6,442,450,944 bytes; at most 16,777,216"):
        Roots.of(str(tmp_path)).read("film.srt", "text")


# -- tar


def header(kind: bytes, size: int) -> bytes:
    member = tarfile.TarInfo("header")
    member.type, member.size = kind, size
    return member.tobuf(tarfile.GNU_FORMAT)


def globals_of(first: int, number: int) -> bytes:
    content = b"".join(b"17 k%07d=abcd\n" % key for key in range(first, first + number))
    return header(tarfile.XGLTYPE, len(content)) + content + bytes(-len(content) % 512)


SHORT_NAME = header(tarfile.GNUTYPE_LONGNAME, 4) + b"abc".ljust(512, b"\0")
TARS = {
    "long name": (header(tarfile.GNUTYPE_LONGNAME, 6 << 30), 6 << 30),
    "long pax": (header(tarfile.XHDTYPE, 6 << 30), 6 << 30),
    "chain of names": (SHORT_NAME * 3000, 0),
    "digits": (header(tarfile.XHDTYPE, 900_096) + b"9" * 900_096, 0),
    "globals": (globals_of(0, 20_000), 0),
}


def members(*numbers: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for n in numbers:
            for ending, content in (("png", encoded_image(n)), ("txt", b"a text")):
                member = tarfile.TarInfo(f"{n}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        end = tar.offset
    return out.getvalue()[:end]


def test_what_stands_for_gigabytes_is_not_held_in_memory(tmp_path):
    """Headers of tar, a dictionary of parquet, a line of a table: all in one process."""
    shards = []
    for name, (content, hole) in TARS.items():
        with (tmp_path / f"{name}.tar").open("wb") as file:
            file.write(members(0, 1) + content + (b"" if hole else members(2) + bytes(1024)))
            file.truncate(file.tell() + hole)
        shards.append(f"webdataset:{tmp_path}/{name}.tar")
    good = pa.array([encoded_image(n) for n in range(2)])
    write_parquet(tmp_path / "a.parquet", image=good, text=["one", "two"])
    # 12 GB of images, and as much of texts, within a few kilobytes
    images = repeated(padded_image(64 * MB), 200)
    write_parquet(tmp_path / "b.parquet", image=images, text=["a text"] * 200)
    texts = pa.ListArray.from_arrays(pa.array([0, 200], pa.int32()), repeated("x" * (64 * MB), 200))
    write_parquet(tmp_path / "c.parquet", image=pa.array([encoded_image(3)]), text=texts)
    assert sum(file.stat().st_size for file in tmp_path.glob("*.parquet")) < 40_000
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    with (tmp_path / "a.csv").open("wb") as file:
        file.write(b"filepath,title\na.png,a text\n")
        file.truncate(600 << 20)
    tables = f"parquet:{tmp_path}/{{a..c}}.parquet", f"csv:{tmp_path}/a.csv"
    *of_shards, of_parquet, of_lines = opened(*shards, *tables)
    for name, bad in zip(TARS, of_shards, strict=True):
        assert bad == [(f"{name}.tar/end of shard", "truncated-archive")]
    # the rows up to the limit are good, and what was not read is one bad sample
    (cut, long) = of_parquet
    assert long == ("c.parquet/0", "huge-caption")
    assert cut[1] == "unreadable" and 10 < int(cut[0].rpartition("/")[2]) < 30
    assert {reason for _, reason in of_lines} == {"huge-caption"}


def test_a_first_line_that_is_too_long_is_refused(tmp_path):
    (tmp_path / "b.csv").write_text("filepath," + "x" * 200_000)
    with pytest.raises(ValueError, match="first line cannot be read"):
        open_source(f"csv:{tmp_path}/b.csv")


# -- braces


def test_braces_are_counted_before_they_are_expanded(tmp_path):
    two = "{0..9999}{0..9999}"
    for pattern in ("{0..30000000}", two, "{{a..z}{0..99999},b}", "{,}" * 24):
        with pytest.raises(ValueError, match="names; at most 1,000,000 are read"):
            expand("webdataset", f"{tmp_path}/{pattern}.tar", "")
    nested = "{0,4" * 9 + "}" * 9  # fine, and names no file
    with pytest.raises(FileNotFoundError):
        expand("webdataset", f"{tmp_path}/{nested}.tar", "")


# -- decoding


def progressive(side: int, scans: int) -> bytes:
    """A grey JPEG with any number of scans that change nothing."""
    blocks = (side // 8) ** 2
    bits = ("0" + "1" * 14) * -(-blocks // 32767)
    bits += "1" * (-len(bits) % 8)
    scan = bytes(int(bits[i : i + 8], 2) for i in range(0, len(bits), 8))
    scan = scan.replace(b"\xff", b"\xff\0")
    table = bytes([1] + [0] * 15)
    parts = [
        b"\xff\xd8\xff\xc2" + struct.pack(">HBHHB", 11, 8, side, side, 1) + b"\1\x11\0",
        b"\xff\xdb" + struct.pack(">HB", 67, 0) + b"\1" * 64,
        b"\xff\xc4" + struct.pack(">HB", 20, 0) + table + b"\0",
        b"\xff\xc4" + struct.pack(">HB", 20, 0x10) + table + b"\xe0",
        b"\xff\xda" + struct.pack(">HB", 8, 1) + b"\1\0\0\0\0" + bytes(-(-blocks // 8)),
    ]
    for n in range(scans):
        place = 1 + n % 63
        parts.append(b"\xff\xda" + struct.pack(">HB", 8, 1) + bytes([1, 0, place, place, 0]) + scan)
    return b"".join([*parts, b"\xff\xd9"])


def test_an_image_that_takes_too_long_is_too_slow(monkeypatch):
    png, chunk = encoded_image(), png_chunk(b"tEXt", b"a\0b")
    many_chunks = png[:33] + chunk * 400_000 + png[33:]
    comment = b"P6\n#" + b"c" * 3_000_000 + b"\n2 2\n255\n" + bytes(12)
    for data in (progressive(2000, 6000), comment, many_chunks):
        with monkeypatch.context() as patch:
            patch.setattr(bad_samples, "DECODE_LIMIT_S", 0.1)
            with pytest.raises(BadSample, match="too-slow"):
                decode_bytes(data)
        assert decode_bytes(data).size  # nothing else is wrong with it


def tiff(strips: int, big: bool = False) -> bytes:
    """Raw rows of one image, the same for each strip."""
    number, offset = ("<HHQQ", 16 + 8 + 20 * 7 + 8) if big else ("<HHII", 8 + 2 + 12 * 7 + 4)
    where = offset + 4 * strips
    tags = [(256, 4, 1, 100), (257, 4, 1, 100), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1)]
    tags += [(273, 4, strips, offset), (278, 4, 1, 1)]
    entries = b"".join(struct.pack(number, *tag) for tag in tags)
    start = b"II+\0\x08\0\0\0" + struct.pack("<QQ", 16, len(tags)) if big else None
    start = start or b"II*\0" + struct.pack("<IH", 8, len(tags))
    return start + entries + bytes(8 if big else 4) + struct.pack("<I", where) * strips + bytes(100)


def test_a_tiff_of_millions_of_strips_is_not_unpacked(monkeypatch):
    for big in (False, True):
        assert decode_bytes(tiff(100, big)).size == (100, 100)
    monkeypatch.setattr(decoding, "STRIP_LIMIT", 1000)
    for big in (False, True):
        with pytest.raises(BadSample, match="too-slow.*1,001 strips"):
            decode_bytes(tiff(1001, big))


def test_a_sound_is_limited_in_samples_and_in_seconds_of_decoding(monkeypatch):
    soundfile = pytest.importorskip("soundfile")
    out = io.BytesIO()
    soundfile.write(out, [0.5, *[0.0] * 400_000], 96_000, format="FLAC")
    assert decode_audio(out.getvalue()).rate == 96_000
    monkeypatch.setattr(bad_samples, "SAMPLES_LIMIT", 400_000)
    with pytest.raises(BadSample, match="huge-audio.*400,001 samples"):
        decode_audio(out.getvalue())
    monkeypatch.undo()
    monkeypatch.setattr(bad_samples, "DECODE_LIMIT_S", 0.0)
    with pytest.raises(BadSample, match="too-slow"):
        decode_audio(out.getvalue())


def test_texts_of_an_image_are_limited(tmp_path):
    """Pillow's own limit holds: 64 MB of compressed comments in a few KB."""
    out = encoded_image()
    comment = png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1_000_000)))
    with pytest.raises(BadSample, match="unreadable"):
        decode_bytes(out[:33] + comment * 70 + out[33:])


def test_no_picture_is_decoded_before_a_stream_is_chosen(tmp_path):
    """FFmpeg would take a picture of each stream to learn what they are: 100 of 25 MB each."""
    pytest.importorskip("av")
    (tmp_path / "many.mkv").write_bytes(of_many_streams(100, 4096, "matroska"))
    (tmp_path / "more.mp4").write_bytes(of_many_streams(101, 64, "mp4"))
    assert (tmp_path / "many.mkv").stat().st_size < 10 * MB
    done = run(
        "from data.bad_samples import BadSample\n"
        "from data.decoding.films import describe_film\n"
        "from data.decoding.sounds import decode_audio\n"
        f"print(describe_film('{tmp_path}/many.mkv'))\n"
        f"for read, given in ((decode_audio, open('{tmp_path}/many.mkv', 'rb').read()),\n"
        f"                    (describe_film, '{tmp_path}/more.mp4')):\n"
        "    try: read(given)\n"
        "    except BadSample as error: print(error)",
        MEMORY,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    film, sound, more = done.stdout.splitlines()
    assert "width=4096" in film and sound.startswith("no-sound")
    assert more.startswith("unreadable: it has over 100 streams")


# -- folders


def test_links_to_themselves_and_folders_without_end_are_bad_samples(tmp_path):
    root = tmp_path / "set"
    deep = [root / "a" / "/".join(["d"] * depth) for depth in range(1100)]
    for folder in deep:
        folder.mkdir(parents=folder == deep[0])
    Image.new("RGB", (8, 8)).save(root / "a" / "good.png")
    for link in (root / "loop", root / "a" / "loop.png"):
        link.symlink_to(link.name)
    (root / "a" / "up").symlink_to("..")
    source = open_source(f"imagefolder:{root}", workers=1)
    for folder in deep[:0:-1]:  # too deep for shutil.rmtree as well
        folder.rmdir()
    bad = {identity: reason for identity, _, reason, _ in source.bad_samples()}
    too_deep = next(identity for identity in bad if identity.endswith("/d"))
    assert bad.pop(too_deep) == "not-an-image" and too_deep.count("/") == 100
    assert bad == {"a/loop.png": "unreadable", "a/up": "not-an-image"} and len(source.usable()) == 1


# -- tokenizers


def tokenizer_with(folder: Path, pattern: str) -> Path:
    words = models.WordLevel({"[UNK]": 0, "[PAD]": 1, "a": 2, "b": 3}, unk_token="[UNK]")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.Split("x", "isolated")
    content = json.loads(tokenizer.to_str())
    content["pre_tokenizer"]["pattern"] = {"Regex": pattern}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def test_a_pattern_that_gives_up_or_is_none_names_the_tokenizer(tmp_path):
    tokenizer = load_tokenizer(str(tokenizer_with(tmp_path, "(a+)+$")))
    with pytest.raises(ValueError, match=f"tokenizer '{tmp_path}' gives up"):
        batch_tokens(tokenizer, ["a" * 40 + "b"], 8)[0]
    with pytest.raises(ValueError, match=f"tokenizer '{tmp_path}' holds no tokenizer"):
        load_tokenizer(str(tokenizer_with(tmp_path, "(a")))


def test_a_pattern_without_an_end_ends_the_process_with_the_name_of_the_tokenizer(tmp_path):
    tokenizer_with(tmp_path, "(x+x+)+y")  # 20 seconds for the text below
    done = run(
        "from data.modalities import tokenizer\n"
        "tokenizer.TOKENIZE_LIMIT_S = 0.5\n"
        f"made = tokenizer.load_tokenizer({str(tmp_path)!r})\n"
        "tokenizer.batch_tokens(made, [('x' * 22 + ' ') * 400], 8)[0]\n"
        "print('made')"
    )
    assert done.returncode == 2 and "made" not in done.stdout
    assert f"error: tokenizer '{tmp_path}' takes over 0.5 seconds" in done.stderr
