"""Sounds from files to spectrograms: every format, everything that can be wrong, and the same
numbers as the libraries' own extractors."""

import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from plain_requests import request_of
from transformers import ASTFeatureExtractor, ClapFeatureExtractor, WhisperFeatureExtractor

sys.path.insert(0, str(Path(__file__).parent))
from bad_audio import BAD_AUDIO, RATE, film, m4a, tone, wav  # noqa: E402
from bad_sets import encoded_image  # noqa: E402

from data.bad_samples import BadSample
from data.bad_tables import count_bad, refuse_too_many_bad, write_bad_samples
from data.batching.mixture import open_sources
from data.decoding import sounds as decoding
from data.decoding.sounds import decode_audio, describe_audio, resampled
from data.index.leaks import find_leaks
from data.index.mapped import index_folder
from data.index.sources import open_format, open_source
from data.index.splits import split_source
from data.loader import MicroBatchDataset
from data.modalities.audio.features import AudioFeatures
from data.modalities.audio.modality import AudioModality

soundfile = pytest.importorskip("soundfile", reason="pip install -r requirements-audio.txt")
pytest.importorskip("av", reason="pip install -r requirements-audio.txt")

AUDIO_TEXT = (("audio", "text"),)
THREE = (("image", "text"), ("audio", "text"))
GOOD = {"good": wav(tone()), "many": wav(np.repeat(tone(0.2, 300)[:, None], 24, 1))}
CLAP = {"feature_size": 16, "sampling_rate": 16_000, "hop_length": 160, "truncation": "rand_trunc"}


def encoded(samples, kind, subtype, rate=RATE):
    with io.BytesIO() as file:
        soundfile.write(file, samples, rate, format=kind, subtype=subtype)
        return file.getvalue()


@pytest.fixture(scope="module")
def sounds():
    """Name -> (reason or None, content): all that can be wrong, two good ones."""
    broken = bytearray(encoded(tone(3), "MP3", "MPEG_LAYER_III"))
    middle = len(broken) // 2
    broken[middle : middle + 600] = np.random.default_rng(0).bytes(600)
    found = {name: (None, content) for name, content in GOOD.items()}
    made = {"film": ("no-sound", film()), "frame": ("?", bytes(broken))}
    # one file behind the other: what is at 16 kHz must not pass for 8 kHz
    slow, fast = (encoded(tone(1, rate=rate), "MP3", None, rate) for rate in (8_000, 16_000))
    return found | BAD_AUDIO | made | {"rates": ("unreadable", slow + fast)}


def fill_folder(folder, sounds):
    (folder / "outside").mkdir()
    (folder / "outside/secret.wav").write_bytes(wav(tone()))
    root = folder / "set"
    root.mkdir()
    for name, (_, content) in sounds.items():
        (root / f"{name}.wav").write_bytes(content)
    (root / "link.wav").symlink_to(folder / "outside/secret.wav")
    rows = [(name, f"{name}.wav") for name in sounds]
    rows += [("link", "link.wav"), ("dots", "../outside/secret.wav"), ("absent", "none.wav")]
    outside = {"link": "outside-root", "dots": "outside-root", "absent": "missing-file"}
    return root, rows, outside


def jsonl(folder, sounds, images=False):
    root, rows, more = fill_folder(folder, sounds)
    lines = [{"id": i, "audio_path": path, "text": f"words {i}"} for i, path in rows]
    for n, line in enumerate(lines if images else ()):
        (root / f"{n}.png").write_bytes(encoded_image(n))
        line["image_path"] = f"{n}.png"
    (root / "set.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"jsonl:{root}/set.jsonl", more


def csv(folder, sounds):
    root, rows, more = fill_folder(folder, sounds)
    lines = [f"{i},{path},words {i}" for i, path in rows]
    (root / "set.csv").write_text("\n".join(["id,audio,title", *lines]) + "\n")
    return f"csv:{root}/set.csv", more


def parquet_paths(folder, sounds):
    root, rows, more = fill_folder(folder, sounds)
    names, paths = zip(*rows)
    table = pa.table({"id": names, "audio_path": paths, "text": [f"words {n}" for n in names]})
    pq.write_table(table, root / "set.parquet")
    return f"parquet:{root}/set.parquet", more


def parquet_of_hugging_face(folder, sounds, images=False):
    names = list(sounds)
    structs = [{"bytes": content, "path": f"{n}.wav"} for n, (_, content) in sounds.items()]
    columns = {"id": names, "audio": structs, "text": [f"words {n}" for n in names]}
    if images:
        columns["image"] = [encoded_image(n) for n in range(len(names))]
    pq.write_table(pa.table(columns), folder / "set.parquet", row_group_size=3)
    return f"parquet:{folder}/set.parquet", {}


def webdataset(folder, sounds, images=False):
    with tarfile.open(folder / "set.tar", "w") as tar:
        for n, (name, (_, content)) in enumerate(sounds.items()):
            members = {"png": encoded_image(n)} if images else {}
            members |= {"wav": content, "txt": f"words {name}".encode()}
            for ending, data in members.items():
                member = tarfile.TarInfo(f"{name}.{ending}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return f"webdataset:{folder}/set.tar", {}


def audiofolder(folder, sounds):
    root, _, _ = fill_folder(folder, sounds)
    for file in root.glob("*.wav"):
        (root / file.stem).mkdir()
        file.rename(root / file.stem / file.name)
    return f"audiofolder:{root}", {"link": "outside-root"}


SETS = (jsonl, csv, parquet_paths, parquet_of_hugging_face, webdataset, audiofolder)


@pytest.mark.parametrize("make", SETS, ids=lambda make: make.__name__)
def test_each_bad_sound_gets_its_reason_in_every_format(make, tmp_path, sounds):
    spec, more = make(tmp_path, sounds)
    source = open_source(spec, AUDIO_TEXT)
    named = lambda identity: identity.split("/")[-1].removesuffix(".wav")  # noqa: E731
    found = {named(identity): reason for identity, _, reason, _ in source.bad_samples()}
    expected = {name: reason for name, (reason, _) in sounds.items() if reason} | more
    # which frame of an MP3 is broken decides what its decoder says
    assert found.pop("frame") in ("truncated-audio", "unreadable")
    del expected["frame"]
    assert found == expected
    assert [named(source.identity(int(i))) for i in source.usable()] == ["good", "many"]
    assert [source.column("audio_channels")[i] for i in source.usable()] == [1, 24]
    assert [source.column("audio_rate")[i] for i in source.usable()] == [RATE, RATE]
    seconds = [source.column("audio_seconds")[i] for i in source.usable()]
    assert seconds == pytest.approx([0.5, 0.2])
    for i in source.usable():
        assert source.value("audio", int(i)) == GOOD[named(source.identity(int(i)))]
        assert source.captions(int(i))


def test_a_sound_that_was_cut_off_is_not_taken_for_a_shorter_one():
    formats = {"WAV": "PCM_16", "FLAC": "PCM_16", "OGG": "VORBIS", "MP3": None}
    for kind, subtype in formats.items():
        whole = encoded(tone(2), kind, subtype)
        assert decode_audio(whole, strict=True).seconds == pytest.approx(2, abs=0.01)
        with pytest.raises(BadSample) as error:
            decode_audio(whole[: 2 * len(whole) // 3])
        assert error.value.reason == "truncated-audio", kind


def with_number(data, at, size, order="little"):
    return data[:at] + size.to_bytes(4, order) + data[at + 4 :]


def with_frames(flac, number):
    """Of FLAC: another number of samples in its header."""
    word = int.from_bytes(flac[18:26], "big") >> 36 << 36 | number
    return flac[:18] + word.to_bytes(8, "big") + flac[26:]


def headers_that_lie():
    """Name -> sounds of 2 seconds, as programs write them that do not know the length yet."""
    made = {kind: encoded(tone(2), kind, "PCM_16") for kind in ("WAV", "AIFF", "AU", "FLAC")}
    for size in (0, 2_000_000_000, 0x7FFFF000, 0x7FFFFFFF, 0xFFFFFFFF):
        streamed = with_number(made["WAV"], made["WAV"].index(b"data") + 4, size)
        for whole in (len(made["WAV"]) - 8, 0, 0xFFFFFFFF):
            yield f"wav {size:x} {whole:x}", with_number(streamed, 4, whole)
        at = made["AIFF"].index(b"SSND") + 4
        yield f"aiff {size:x}", with_number(made["AIFF"], at, size, "big")
    for size in (0, 0xFFFFFFFF):
        yield f"au {size:x}", with_number(made["AU"], 8, size, "big")
    for number in (0, (1 << 36) - 1):
        yield f"flac {number:x}", with_frames(made["FLAC"], number)


def test_a_sound_whose_header_does_not_know_its_length_is_read_to_its_end():
    for name, data in headers_that_lie():
        assert describe_audio(data) == (2.0, RATE, 1), name
        sound = decode_audio(data, strict=True)
        assert len(sound.samples) == 2 * RATE, name
        np.testing.assert_allclose(sound.samples, tone(2), atol=2**-14, err_msg=name)  # of 16 bits


def test_an_unknown_length_hides_no_cut_and_no_limit(monkeypatch):
    flac = encoded(tone(30), "FLAC", "PCM_16")
    whole = encoded(tone(2), "WAV", "PCM_16")
    size = whole.index(b"data") + 4
    nothing = whole[: size - 4] + b"data" + bytes(4)
    cases = {
        "truncated-audio": with_frames(flac, 30 * RATE + 500),
        "unreadable": with_frames(flac, 0)[: len(flac) // 2],  # within a frame
        "huge-audio": with_frames(flac, 3_000 * RATE),
        "empty-audio": nothing + b"LIST" + (4).to_bytes(4, "little") + b"INFO",
    }
    for reason, data in cases.items():
        with pytest.raises(BadSample) as error:
            decode_audio(data)
        assert error.value.reason == reason
    monkeypatch.setattr("data.bad_samples.SECONDS_LIMIT", 20)
    for data in (with_frames(flac, 0), with_number(whole * 20, size, 0)):
        for read in (decode_audio, describe_audio):
            with pytest.raises(BadSample, match="huge-audio"):
                read(data)


# soundfile shows what went wrong in its own callbacks, and goes on
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["WAV", "AIFF", "FLAC", "OGG", "MP3"])
def test_whatever_the_bytes_a_sound_comes_out_or_a_reason(kind):
    """Cut off at every kind of place, and with bytes changed at random."""
    file = io.BytesIO()
    soundfile.write(file, tone(0.2), RATE, format=kind)
    whole, random, seen = file.getvalue(), np.random.default_rng(0), {"read": 0, "refused": 0}
    broken = [whole[:cut] for cut in (*range(60), *range(60, len(whole), 61), len(whole))]
    for n in range(60):
        data = bytearray(whole)
        for place in random.integers(0, min(len(data), 100) if n % 2 else len(data), 2):
            data[place] = random.integers(0, 256)
        broken.append(bytes(data))
    for data in broken:
        for read in (decode_audio, describe_audio):
            try:
                read(data)
                seen["read"] += 1
            except BadSample as problem:
                assert problem.detail
                seen["refused"] += 1
    assert min(seen.values()) > 1, seen


def test_ffmpeg_reads_what_libsndfile_does_not():
    made = decode_audio(m4a(tone(1, rate=16_000), 16_000))
    assert made.rate == 16_000 and made.channels == 1
    assert made.seconds == pytest.approx(1, abs=0.2)  # AAC comes in frames of 1,024 samples


def test_a_playlist_opens_no_other_file(tmp_path, monkeypatch):
    (tmp_path / "secret.wav").write_bytes(wav(tone()))
    monkeypatch.chdir(tmp_path)
    for words in ("ffconcat version 1.0\nfile secret.wav\n", "#EXTM3U\n#EXTINF:1,\nsecret.wav\n"):
        with pytest.raises(BadSample) as error:
            decode_audio(words.encode())
        assert error.value.reason == "not-audio", words


def test_without_a_decoder_the_error_names_the_command(monkeypatch):
    monkeypatch.setattr(decoding, "_library", lambda name: None)
    with pytest.raises(ImportError, match="pip install -r requirements-audio.txt"):
        decode_audio(GOOD["good"])


def test_channels_are_averaged_and_the_rate_is_brought_to_the_towers():
    both = np.stack([tone(), 0.5 * tone(pitch=700)], 1)
    sound = decode_audio(wav(both))
    np.testing.assert_array_equal(sound.samples, both.mean(1, dtype=np.float32))
    made = resampled(tone(1, 440, 44_100), 44_100, 16_000)
    assert len(made) == 16_000
    # the same tone at the other rate, away from the ends, where the filter has no neighbours
    np.testing.assert_allclose(made[800:-800], tone(1, 440, 16_000)[800:-800], atol=2e-3)
    low = resampled(tone(1, 5_000, 44_100), 44_100, 8_000)  # above half of the rate: gone
    assert np.abs(low[800:-800]).max() < 2e-3


def test_evaluation_is_the_librarys_own_extractor():
    """A short sound as it pads it; of a long one the middle."""
    long = np.random.default_rng(0).standard_normal(24_000, np.float32)  # no part like another
    short = tone(0.4, rate=16_000)
    for extractor, values in (
        (ClapFeatureExtractor, {**CLAP, "max_length_s": 1}),
        (ASTFeatureExtractor, {"num_mel_bins": 16, "max_length": 98}),
        (WhisperFeatureExtractor, {"feature_size": 16, "chunk_length": 1}),
    ):
        features, theirs = AudioFeatures(extractor.__name__, values, 16_000), extractor(**values)
        for samples, seen in ((short, short), (long, long[4_000:20_000])):
            expected = theirs(seen, sampling_rate=16_000, return_tensors="pt")
            expected = expected[theirs.model_input_names[0]][0].float()
            assert torch.equal(features(samples, None), expected), extractor
        blip = features(tone(0.005, rate=16_000), None)  # shorter than a frame
        assert blip.shape == expected.shape and torch.isfinite(blip).all()


def test_training_augments_by_the_seed_alone(tmp_path):
    spec, _ = jsonl(tmp_path, {"a": (None, wav(tone(3))), "b": (None, wav(tone(1, 300)))})
    source = open_source(spec, AUDIO_TEXT)
    index = source.usable()

    def load(augmentation, training=True, epoch=0, rows=slice(None)):
        features = AudioFeatures("ClapFeatureExtractor", CLAP, 16_000, augmentation)
        dataset = MicroBatchDataset(source, [AudioModality(features)], seed=5)
        request = request_of(index[rows], epoch, training)
        meta = dataset.meta_batch(request)["input_features"]
        made = dataset[request]["input_features"]
        assert meta.shape == made.shape and meta.dtype == made.dtype == torch.float32
        return made

    plain = load((), training=False)
    assert torch.equal(load(()), plain) and plain.shape == (2, 1, 101, 16)
    for augmentation in (("crop",), ("spec",), ("noise",)):
        made = load(augmentation)
        assert torch.equal(made, load(augmentation))
        assert torch.equal(made[1:], load(augmentation, rows=slice(1, 2)))  # alone as with others
        assert not torch.equal(made, load(augmentation, epoch=1))
        assert torch.equal(load(augmentation, training=False), plain)


def test_a_mixed_run_of_two_sets_and_samples_that_lack_a_modality(tmp_path):
    """Images with texts, and sounds with texts; what has no value is absent, not bad."""
    (tmp_path / "a.png").write_bytes(encoded_image(1))
    (tmp_path / "a.wav").write_bytes(wav(tone()))
    (tmp_path / "page.wav").write_bytes(b"<html>")
    rows = [
        {"image_path": "a.png", "text": "an image"},
        {"audio": "a.wav", "text": "a sound"},
        {"audio_path": "a.wav", "image_path": "a.png", "text": "both"},
        {"audio_path": "page.wav", "image_path": "a.png", "text": "a broken sound"},
        {"audio_path": "page.wav", "text": "nothing but a broken sound"},
        {"text": "words alone"},
    ]
    (tmp_path / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "old.jsonl").write_text(json.dumps(rows[0]) + "\n")
    source = open_sources(
        [f"jsonl:{tmp_path}/set.jsonl", f"jsonl:{tmp_path}/old.jsonl"], pairs=THREE
    )
    assert source.usable().tolist() == [0, 1, 2, 3, 6]
    assert [reason for _, _, reason, _ in source.bad_samples()] == ["not-audio", "no-value"]
    ((_, where, reason, detail),) = source.broken_values()  # what is not there is not broken
    assert where == f"{tmp_path}/set.jsonl:4" and reason == "not-audio"
    assert detail.endswith("the sample is used without its audio")
    assert count_bad(source) == {"not-audio": 2, "no-value": 1}
    assert source.lacking("audio")[source.usable()].tolist() == [True, False, False, True, True]
    assert source.lacking("image")[source.usable()].tolist() == [False, True, False, False, False]
    features = AudioFeatures("ClapFeatureExtractor", CLAP, 16_000)
    dataset = MicroBatchDataset(source, [AudioModality(features)])
    loaded, report = dataset.load(request_of(source.usable(), training=False))
    assert loaded["audio_index"].tolist() == [-1, 1, 2, -4, -7] and not report.bad
    # images and texts alone are what they were, whatever sounds lie beside them
    assert open_source(f"jsonl:{tmp_path}/set.jsonl").usable().tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    "make", (jsonl, parquet_of_hugging_face, webdataset), ids=lambda make: make.__name__
)
def test_a_bad_sound_beside_a_good_image_is_listed_and_counted(make, tmp_path, sounds):
    """The sample is used without its sound, and that is not silent."""
    spec, more = make(tmp_path, sounds, images=True)
    source = open_source(spec, THREE)
    assert len(source.usable()) == len(source) and not list(source.bad_samples())
    found = {
        identity.split("/")[-1]: (where, reason)
        for identity, where, reason, _ in source.broken_values()
    }
    expected = {name: reason for name, (reason, _) in sounds.items() if reason} | more
    assert found.pop("frame")[1] in ("truncated-audio", "unreadable")
    del expected["frame"]
    assert {name: reason for name, (_, reason) in found.items()} == expected
    if make is webdataset:  # the sound's member, not the image's
        assert found["page"][0].endswith("set.tar#page.wav")
        assert source.where(0).endswith(".png") and source.where(0, "audio").endswith(".wav")
    assert sum(count_bad(source).values()) == len(expected) + 1
    with pytest.raises(ValueError, match="not-audio .*no known audio format"):
        refuse_too_many_bad(source, 0.01)
    write_bad_samples(tmp_path / "bad.jsonl", [source])
    lines = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert len(lines) == len(expected) + 1


def test_a_limit_of_length_is_one_that_can_be_given(tmp_path):
    """And each limit has an index of its own; images and texts alone have the same."""
    spec, _ = jsonl(tmp_path, {n: (None, wav(tone(float(n)))) for n in ("0.5", "1", "1.5", "3")})
    found = {}
    for limit in (None, 1, 2.5, 1, None):
        source = open_source(spec, AUDIO_TEXT, max_audio_seconds=limit)
        found[limit] = [source.identity(int(i)) for i in source.usable()]
        if limit == 2.5:
            (bad,) = [row for row in source.bad_samples() if row[2] == "huge-audio"]
            assert bad[0] == "3" and "3.00 seconds; --max-audio-seconds is 2.5" in bad[3]
    assert found == {None: ["0.5", "1", "1.5", "3"], 1: ["0.5", "1"], 2.5: ["0.5", "1", "1.5"]}
    format = open_format(spec, AUDIO_TEXT)
    assert index_folder(format, max_audio_seconds=1) != index_folder(format)
    format.pairs = (("image", "text"),)
    assert index_folder(format, max_audio_seconds=1) == index_folder(format)


def test_a_sound_that_comes_later_is_heard(tmp_path, monkeypatch):
    """Or what decodes it."""
    two = {"a": (None, wav(tone())), "b": (None, wav(tone(0.3)))}
    spec, _ = jsonl(tmp_path, two, images=True)
    (tmp_path / "set/b.wav").rename(tmp_path / "b.wav")
    source = open_source(spec, THREE)
    assert source.lacking("audio").tolist()[:2] == [False, True]
    (tmp_path / "set/b.wav").write_bytes(m4a(tone(0.3), RATE))
    with monkeypatch.context() as patch:
        patch.setattr(decoding, "_library", {"soundfile": soundfile}.get)
        assert open_source(spec, THREE).lacking("audio").tolist()[:2] == [False, True]
    assert open_source(spec, THREE).lacking("audio").tolist()[:2] == [False, False]


def test_no_sound_is_on_both_sides_and_a_leak_is_found(tmp_path):
    """Equal once decoded: as WAV and as FLAC."""
    samples = (20_000 * tone()).astype(np.int16)
    pairs = {
        f"{n}": (None, wav((9_000 * tone(0.2, 200 + 9 * n)).astype(np.int16))) for n in range(20)
    }
    pairs |= {"same": (None, wav(samples))}
    spec, _ = jsonl(tmp_path, pairs)
    with io.BytesIO() as file:
        soundfile.write(file, samples, RATE, format="FLAC")
        (tmp_path / "set/0.wav").write_bytes(file.getvalue())  # read by content, not by name
    source = open_source(spec, AUDIO_TEXT)
    names = {source.identity(int(i)): int(i) for i in source.usable()}
    keys = source.keys("audio")
    assert keys[names["0"]] == keys[names["same"]] and len(np.unique(keys[source.usable()])) == 20
    for seed in range(5):
        splits = split_source(source, 0.2, seed)
        sides = [
            names["0"] in side and names["same"] in side
            for side in (splits.train, *splits.held_out.values())
        ]
        assert any(sides)
    (leak,) = find_leaks(
        source, np.array([names["0"]]), source, np.array([names["same"], names["5"]])
    )
    assert leak.kind == "audio" and leak.held_out.tolist() == [names["same"]]


def test_only_what_changed_is_heard_again(tmp_path, monkeypatch):
    """And what was broken."""
    made = {n: (None, wav(tone(0.2, 300 + 50 * i))) for i, n in enumerate("abc")}
    spec, _ = jsonl(tmp_path, made | {"page": BAD_AUDIO["page"]})
    pairs = (("audio", "text"),)
    assert len(open_source(spec, pairs).usable()) == 3
    (tmp_path / "set/b.wav").write_bytes(wav(tone(0.3, 900)))
    heard = []
    monkeypatch.setattr(
        "data.stored.audio.decode_audio",
        lambda data, strict: heard.append(data) or decode_audio(data, strict),
    )
    source = open_source(spec, pairs)
    assert heard == [(tmp_path / f"set/{name}").read_bytes() for name in ("b.wav", "page.wav")]
    assert source.column("audio_seconds").max() == pytest.approx(0.3)
    assert open_source(spec, pairs).index.folder == source.index.folder  # nothing changed since
    (tmp_path / "set/b.wav").write_bytes(wav(tone(0.4, 900)))
    with pytest.raises(BadSample, match="has changed since it was checked"):
        source.value("audio", 1)


def test_a_data_set_without_sounds_is_refused_by_name(tmp_path):
    (tmp_path / "a.csv").write_text("filepath,title\na.png,words\n")
    with pytest.raises(
        ValueError, match="it holds image and text, and --pairs compares audio:text"
    ):
        open_format(f"csv:{tmp_path}/a.csv", AUDIO_TEXT)
    # named for sounds, it is no image's
    with pytest.raises(
        ValueError, match="it holds text and audio, and --pairs compares image:text"
    ):
        open_format(f"csv:{tmp_path}/a.csv?audio=filepath")


@pytest.mark.parametrize(
    "value",
    [GOOD["good"], {"bytes": GOOD["good"], "path": None}, {"array": tone(), "sampling_rate": RATE}],
    ids=["bytes", "structure", "decoded"],
)
def test_a_python_data_set_gives_sounds_in_the_usual_ways(value, monkeypatch):
    module = type(sys)("spoken")
    module.Items = type(
        "Items",
        (),
        {"__len__": lambda self: 1, "__getitem__": lambda self, i: {"audio": value, "text": "a"}},
    )
    monkeypatch.setitem(sys.modules, "spoken", module)
    source = open_source("python:spoken:Items", AUDIO_TEXT, refresh=True)
    made = decode_audio(source.value("audio", 0))
    np.testing.assert_array_equal(made.samples, tone())
    assert made.rate == RATE
