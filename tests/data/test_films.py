"""Films from files to frames: the frames that PyAV decodes one after another, at any times, and
everything that can be wrong with a film."""

import ctypes
import gc
import io
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

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
        assert describe_film(content).seconds == pytest.approx(9.3)
        for kind in ("mp4", "matroska"):  # i / 30 s is the i-th frame, though mkv rounds it
            content = film(kind=kind)
            assert numbers_in(reader.frames(content, np.array(numbers) / 30)) == numbers


def test_what_the_header_says():
    found = describe_film(film(codec="libx264", rotation=90))
    assert found == films.Film(1.0, 30.0, 48, 64, "h264", 30)
    assert describe_film(film(kind="matroska", sound_s=3.0)).seconds == pytest.approx(1, abs=2e-3)


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
    assert len(os.listdir("/proc/self/fd")) == before


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
