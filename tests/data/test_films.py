"""Films from files to frames: the frames that PyAV decodes one after another, at any times, and
everything that can be wrong with a film."""

import ctypes
import gc
import io
import os
import pickle
import struct
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))
from bad_films import bad_films, film, numbers_in, with_bad_frame  # noqa: E402

from data import bad_samples
from data.bad_samples import BadSample
from data.decoding import films
from data.decoding.films import FilmReader, describe_film, even_times

av = pytest.importorskip("av", reason="pip install -r requirements-audio.txt")

VARIABLE = np.cumsum(np.random.default_rng(1).integers(1, 9, 30)).tolist()
FILMS = {
    "mpeg4": {},
    "h264": {"codec": "libx264"},
    "h264 with B-frames": {"codec": "libx264", "b_frames": 2},
    "vp9": {"codec": "libvpx-vp9", "kind": "webm"},
    "webm without a table": {"codec": "libvpx-vp9", "kind": "webm", "live": "1"},
    "mpeg2 in mkv": {"codec": "mpeg2video", "kind": "matroska", "b_frames": 2},
    "mkv": {"codec": "libx264", "kind": "matroska", "b_frames": 2},
    "variable rate": {"pts": VARIABLE, "codec": "libx264", "b_frames": 2},
    "variable rate in mkv": {"pts": VARIABLE, "kind": "matroska"},
    "first pts 300": {"first": 300, "b_frames": 2},
    "first pts 300 in mkv": {"first": 300, "kind": "matroska"},
    "edit list": {"first": -7, "codec": "libx264", "b_frames": 2},
    "fragments": {"movflags": "frag_keyframe+empty_moov", "b_frames": 2},
    "longer sound": {"sound_s": 3.0, "kind": "matroska"},
    "turned": {"rotation": 90},
    "turned in mkv": {"rotation": -90, "kind": "matroska", "codec": "libx264"},
    "upside down": {"rotation": 180},
    "avi": {"kind": "avi"},
    "avi with B-frames": {"kind": "avi", "codec": "libx264", "b_frames": 2},
    "mpeg": {"kind": "mpegts", "codec": "mpeg2video", "b_frames": 2},
    "one frame": {"number": 1},
    "odd size": {"size": (101, 77), "codec": "libvpx-vp9", "kind": "webm"},
}


@pytest.fixture(params=("av", "torchcodec"))
def decoder(request, monkeypatch):
    if request.param == "torchcodec":
        try:
            import torchcodec.decoders  # noqa: F401
        except (ImportError, OSError, RuntimeError) as error:
            pytest.skip(f"no torchcodec: {error}"[:80])
    monkeypatch.setenv(films.SWITCH, request.param)


def one_after_another(content):
    """When each frame begins, in seconds since the first, and all frames, as PyAV decodes them."""
    with av.open(io.BytesIO(content)) as file:
        is_avi, stream = file.format.name == "avi", file.streams.video[0]
        found = list(file.decode(stream))
        # FFmpeg guesses the times of AVI, which has a constant rate
        pts = range(len(found)) if is_avi else [frame.pts - found[0].pts for frame in found]
        images = [np.rot90(f.to_ndarray(format="rgb24"), f.rotation // 90 % 4) for f in found]
        times = np.array([float(i * stream.time_base) for i in pts])
    return times, np.stack(images).transpose(0, 3, 1, 2)


def reason_of(file, times_s=None):
    with pytest.raises(BadSample) as error, FilmReader() as reader:
        describe_film(file) if times_s is None else reader.frames(file, times_s)
    return error.value.reason


@pytest.mark.parametrize("name", FILMS)
def test_frames_are_those_that_pyav_decodes_one_after_another(name, decoder):
    content, random = film(**FILMS[name]), np.random.default_rng(0)
    begins, wanted = one_after_another(content)
    seconds = describe_film(content).seconds
    last = 5 / 30 if "pts" in FILMS[name] else 2e-3  # how long its last frame is shown, at most
    assert 0 <= seconds - begins[-1] - 1 / 30 + 1e-3 <= last
    with FilmReader() as reader:
        np.testing.assert_array_equal(reader.frames(content, begins), wanted)
        for number in (1, 2, 3, 6):
            for _ in range(4):
                chosen = random.integers(0, len(begins), number)  # in any order, also twice
                times = begins[chosen]
                np.testing.assert_array_equal(reader.frames(content, times), wanted[chosen])
                until = np.append(begins, seconds)[chosen + 1]
                times = times + 0.9 * (until - times)  # as long as it is shown
                np.testing.assert_array_equal(reader.frames(content, times), wanted[chosen])
        np.testing.assert_array_equal(reader.frames(content, [-1.0]), wanted[:1])
    assert reason_of(content, [0.1, 30.0]) == reason_of(content, [1e30]) == "outside-film"


def test_a_time_is_when_a_frame_is_shown_and_not_its_number(decoder):
    numbers = [10, 11, 12, 13, 14]
    with FilmReader() as reader:
        # 2, 4, 6 and 8 ticks of 0.1 s after the first; then 92
        content = film(5, rate=10, pts=(3, 5, 7, 9, 95), group=2)
        assert numbers_in(reader.frames(content, (0, 0.19, 0.2, 0.6, 9.1, 9.2))) == [
            *(0, 0, 1, 3, 3, 4)
        ]
        shown = [
            (*numbers_in(image[None]), rows.tolist())
            for image, rows in reader.shown(content, (9.2, 0, 0.6, 0.19, 9.1, 0.2))
        ]
        assert shown == [(0, [1, 3]), (1, [5]), (3, [2, 4]), (4, [0])]
        assert describe_film(content).seconds == pytest.approx(9.3)
        for kind in ("mp4", "matroska"):  # i / 30 s is the i-th frame, though mkv rounds it
            content = film(kind=kind)
            assert numbers_in(reader.frames(content, np.array(numbers) / 30)) == numbers


def test_what_the_header_says():
    found = describe_film(film(codec="libx264", rotation=90))
    assert found == films.Film(1.0, 30.0, 48, 64, "h264", 30, 0.0)
    assert describe_film(film(kind="matroska", sound_s=3.0)).seconds == pytest.approx(1, abs=2e-3)


LATE = {
    "mp4": {"codec": "libx264", "b_frames": 2},
    "fragments": {"kind": "mp4", "movflags": "frag_keyframe+empty_moov+delay_moov"},
    "matroska": {},
    "webm": {"codec": "libvpx-vp9", "sound_codec": "libopus"},
    "mpegts": {"codec": "mpeg2video"},
}


@pytest.mark.parametrize("name", LATE)
def test_times_count_from_the_beginning_of_the_sound_where_that_is_first(name, decoder):
    """As `ffmpeg -ss` and players count; before its first picture a film shows that one."""
    options = {"kind": name, "first": 60, "sound_s": 3.0} | LATE[name]
    content = film(**options)
    begins, wanted = one_after_another(content)
    with av.open(io.BytesIO(content)) as file:
        stream = file.streams.video[0]
        first_s = float(next(file.decode(stream)).pts * stream.time_base)
        first_s -= max(file.start_time, 0) / 1e6  # before 0 is what the decoder of sounds needs
    assert first_s == pytest.approx(2, abs=0.07)  # a packet of sound
    found = describe_film(content)
    assert found.first_s == pytest.approx(first_s, abs=1e-3)
    assert found.seconds == pytest.approx(first_s + 1, abs=2e-3)
    with FilmReader() as reader:
        np.testing.assert_array_equal(reader.frames(content, first_s + begins), wanted)
        for order in (slice(None), slice(None, None, -1)):
            times = np.array([0.0, 0.5, first_s - 0.01, first_s, first_s + 0.5])[order]
            numbers = np.array([0, 0, 0, 0, 15])[order].tolist()
            assert numbers_in(reader.frames(content, times)) == numbers
    assert reason_of(content, [first_s + 1.2]) == "outside-film"


MIRRORED = {
    (1, 0, 0, 1): lambda image: image,
    (-1, 0, 0, 1): lambda image: image[:, ::-1],
    (1, 0, 0, -1): lambda image: image[::-1],
    (-1, 0, 0, -1): lambda image: image[::-1, ::-1],
    (0, 1, -1, 0): lambda image: np.rot90(image, 3),  # clockwise
    (0, -1, 1, 0): np.rot90,
    (0, 1, 1, 0): lambda image: image.transpose(1, 0, 2),
    (0, -1, -1, 0): lambda image: image[::-1, ::-1].transpose(1, 0, 2),
}


@pytest.mark.parametrize("matrix", MIRRORED)
def test_films_are_shown_mirrored_and_with_square_pixels(matrix, decoder):
    """As players show them: first as wide as they are to be, then turned and mirrored."""
    options = {"codec": "libx264", "size": (60, 48), "matrix": matrix}
    content = film(2, **options, aspect=Fraction(16, 15))
    with av.open(io.BytesIO(film(2, **options))) as file:
        stored = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    wide = [np.asarray(Image.fromarray(image).resize((64, 48))) for image in stored]
    wanted = np.stack([MIRRORED[matrix](image).transpose(2, 0, 1) for image in wide])
    with FilmReader() as reader:
        np.testing.assert_array_equal(reader.frames(content, (0.0, 1 / 30)), wanted)
    found = describe_film(content)
    assert (found.height, found.width) == wanted.shape[2:]


@pytest.mark.parametrize("kind", ["matroska", "avi"])
def test_other_containers_say_how_wide_pixels_are(kind):
    with FilmReader() as reader:
        content = film(kind=kind, size=(60, 48), aspect=Fraction(16, 15))
        frames = reader.frames(content, (0.1, 0.5))
        assert frames.shape[2:] == (48, 64) and numbers_in(frames) == [3, 15]


def with_rate(content, ns):
    """A WebM or Matroska whose header says that a frame takes so long; None: says nothing."""
    at = content.index(b"\x23\xe3\x83\x84")
    element = b"\x23\xe3\x83\x84" + ns.to_bytes(4, "big") if ns else b"\xec\x86" + bytes(6)
    return content[:at] + element + content[at + 8 :]


def test_a_rate_that_its_packets_contradict_is_theirs():
    """Browsers write WebM without a rate, and FFmpeg takes its ticks for one: 1,000 frames/s."""
    content = film(120, codec="libvpx", kind="webm", live="1")
    for ns in (None, 1_000_000, 5_000_000, 400_000_000):
        lying = with_rate(content, ns)
        found = describe_film(lying)
        assert found.rate == pytest.approx(30, rel=0.01), ns  # times are rounded to 1 ms
        assert found.seconds == pytest.approx(4, abs=0.5 if ns == 400_000_000 else 0.04)
        with FilmReader() as reader:
            assert numbers_in(reader.frames(lying, (0.1, 0.5, 3.9))) == [3, 15, 117]
    with av.open(io.BytesIO(with_rate(content, 1_000_000))) as file:
        assert file.streams.video[0].average_rate == 1000


@pytest.mark.parametrize("seconds", [0.2, 1e9])
def test_a_length_that_cannot_be_is_that_of_the_packets(seconds):
    content = film(codec="libvpx", kind="webm")
    at = content.index(b"\x44\x89\x88") + 3
    lying = content[:at] + struct.pack(">d", 1000 * seconds) + content[at + 8 :]
    assert describe_film(lying).seconds == pytest.approx(1, abs=0.01)


def test_the_film_of_before_is_not_opened_anew(tmp_path):
    paths = [tmp_path / name for name in ("a.mp4", "b.mp4")]
    for path in paths:
        path.write_bytes(film())
    a, b = map(str, paths)
    with FilmReader() as reader:
        reader.frames(a, [0.5])
        before = reader._film
        assert numbers_in(reader.frames(a, [0.1, 0.9])) == [3, 27] and reader._film is before
        assert numbers_in(reader.frames(b, [0.2])) == [6] and reader._film is not before
        paths[1].write_bytes(film(pts=range(0, 60, 2)))
        os.utime(b, (1, 1))
        assert numbers_in(reader.frames(b, [0.2])) == [3]
    assert reader._film is None


def test_only_what_is_needed_is_decoded(monkeypatch):
    monkeypatch.setattr(films, "FRAMES_LIMIT", 21)
    times = np.array([0.1, 19.5, 19.6, 6.0])
    for options in ({}, {"kind": "matroska"}, {"kind": "matroska", "live": "1"}):
        with FilmReader() as reader:
            found = [
                numbers_in(reader.frames(film(600, group=20, **options), [time])) for time in times
            ]
        assert found == [[3], [585], [588], [180]]
    assert reason_of(film(300, group=300), times) == "too-slow"
    monkeypatch.setattr(bad_samples, "DECODE_LIMIT_S", -1.0)
    assert reason_of(film()) == reason_of(film(), [0.5]) == "too-slow"
    monkeypatch.undo()
    with FilmReader() as reader:
        for limit_s in (20.0, -1.0, 20.0):
            monkeypatch.setattr(bad_samples, "DECODE_LIMIT_S", limit_s)
            if limit_s > 0:
                assert numbers_in(reader.frames(film(), [0.5, 0.6])) == [15, 18]
            else:
                with pytest.raises(BadSample, match="too-slow"):
                    reader.frames(film(), [0.9])


def test_each_bad_film_has_its_reason(tmp_path):
    found = {}
    wanted = bad_films(tmp_path)
    for name, (reason, content) in wanted.items():
        path = tmp_path / f"{name}.mp4"
        path.write_bytes(content)
        found[name] = {reason_of(content), reason_of(str(path))}
    assert found == {name: {reason} for name, (reason, _) in wanted.items()}
    os.mkfifo(tmp_path / "pipe")
    assert reason_of(str(tmp_path / "pipe")) == reason_of(str(tmp_path)) == "not-a-film"
    assert reason_of(str(tmp_path / "none.mp4")) == "missing-file"


def test_a_bad_frame_costs_only_the_clips_that_need_it():
    for options in ({}, {"codec": "libx264"}, {"codec": "libx264", "b_frames": 2}):
        for bad in (20, 22, 23, 24):
            content, found = with_bad_frame(film(40, **options), bad), []
            describe_film(content)
            with FilmReader() as reader:
                for i in range(40):
                    try:
                        found += numbers_in(reader.frames(content, [i / 30]))
                    except BadSample as error:
                        found.append(error.reason)
                        assert "the frame at" in error.detail
            assert found[:20] + found[30:] == [*range(20), *range(30, 40)]
            assert all(found[i] in (i, "unreadable") for i in range(40))
            assert found[29] == "unreadable"
            assert bad > 20 or found.count("unreadable") == 10


def test_damage_is_refused_or_concealed_and_nothing_else_happens():
    random = np.random.default_rng(0)
    for kind in ("mp4", "matroska", "avi"):
        whole = film(kind=kind)
        for _ in range(25):
            content = bytearray(whole)
            at = int(random.integers(len(content)))
            content[at : at + 8] = random.bytes(8)
            with FilmReader() as reader:
                for do in (describe_film, lambda file: reader.frames(file, [0, 0.4, 0.9])):
                    try:
                        do(bytes(content))
                    except BadSample as error:
                        assert error.detail


class MallInfo(ctypes.Structure):
    """`mallinfo2` of glibc; the eighth number is what is in use."""

    _fields_ = [(f"number_{i}", ctypes.c_size_t) for i in range(10)]


def bytes_in_use():
    """Of memory that C asked for."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return 0
    library.mallinfo2.restype = MallInfo
    gc.collect()
    return library.mallinfo2().number_7


def test_no_descriptor_no_thread_and_no_memory_is_left(tmp_path):
    content, bad = film(codec="libx264", size=(320, 240)), film()[:1000]
    gc.collect()  # what the tests before have left would be closed while this one counts
    before, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    with FilmReader() as reader:
        for i in range(200):
            path = tmp_path / f"{i}.mp4"
            path.write_bytes(bad if i % 5 == 4 else content)
            try:
                reader.frames(str(path), [0.2, 0.9])
                assert i % 5 < 4
            except BadSample:
                assert i % 5 == 4
            assert len(os.listdir("/proc/self/task")) == threads
            if i == 99:
                bytes_before = bytes_in_use()
        assert bytes_in_use() - bytes_before < 100 * 100  # PyAV's generators leave 300 a film
        assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert len(os.listdir("/proc/self/fd")) <= before


def test_another_process_opens_the_film_for_itself(tmp_path):
    path = tmp_path / "film.avi"  # which is read from its beginning to its end
    path.write_bytes(film(1020, kind="avi", group=1))
    assert path.stat().st_size > 100_000  # more than is read at once
    with FilmReader() as reader:
        assert numbers_in(reader.frames(str(path), [1.0])) == [30]
        child = os.fork()
        if not child:
            try:
                os._exit(numbers_in(reader.frames(str(path), [30.0])) != [900])
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert numbers_in(reader.frames(str(path), [1.1, 33.0])) == [33, 990]
        assert numbers_in(pickle.loads(pickle.dumps(reader)).frames(str(path), [2.0])) == [60]


def test_an_unknown_decoder_is_refused(monkeypatch):
    monkeypatch.setenv(films.SWITCH, "decord")
    with pytest.raises(ValueError, match="torchcodec"):
        FilmReader()


def test_segments():
    np.testing.assert_allclose(even_times(2, 4, 4), (2.25, 2.75, 3.25, 3.75))
    for start_s, end_s in ((1, 1), (2, 1), (-1, 2), (float("nan"), 2), (0, float("nan"))):
        with pytest.raises(BadSample, match="empty-segment"):
            even_times(start_s, end_s, 8)
    with FilmReader() as reader, pytest.raises(ValueError, match="finite"):
        reader.frames(film(), [float("nan")])
