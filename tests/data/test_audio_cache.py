"""Sounds out of the cache are the same numbers as without it, and the vectorised extractors the
same as the library's."""

import json
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import transformers
from plain_requests import request_of
from scipy.signal import resample_poly

sys.path.insert(0, str(Path(__file__).parent))
from bad_audio import RATE, tone, wav  # noqa: E402

from data.cache import SampleCache
from data.decoding.sounds import decode_audio, resampled
from data.index.sources import open_source
from data.loader import MicroBatchDataset
from data.modalities.audio import extractors
from data.modalities.audio import modality as audio
from data.modalities.audio.features import AudioFeatures
from data.modalities.audio.modality import AudioModality

pytest.importorskip("soundfile", reason="pip install -r requirements-audio.txt")

AUDIO_TEXT = (("audio", "text"),)
CLAP = {"feature_size": 16, "sampling_rate": 16_000, "hop_length": 160, "truncation": "rand_trunc"}
EXTRACTORS = {
    "ClapFeatureExtractor": {"truncation": "rand_trunc"},
    "ASTFeatureExtractor": {"max_length": 200},
}


@pytest.mark.parametrize("name", EXTRACTORS)
def test_frames_in_one_array_give_the_librarys_numbers(name, monkeypatch):
    theirs = getattr(transformers, name)(**EXTRACTORS[name])
    ours = extractors.feature_extractor(name, EXTRACTORS[name])
    assert type(ours) is extractors.EXTRACTORS[name].faster
    generator = np.random.default_rng(1)
    for seconds in (0.05, 1.0, 2.5):  # of the last AST sees the first 200 frames
        samples = generator.normal(0, 0.2, round(seconds * ours.sampling_rate)).astype(np.float32)
        made = [extractors.extracted(each, samples, len(samples)) for each in (ours, theirs)]
        np.testing.assert_array_equal(*made)
        assert made[0].dtype == made[1].dtype == np.float32
    # a library that gives other numbers is asked itself
    for floor in ("CLAP_FLOOR", "AST_FLOOR"):
        monkeypatch.setattr(extractors, floor, 1e3)
    assert type(extractors.feature_extractor(name, EXTRACTORS[name])) is type(theirs)


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100])
def test_a_filter_that_is_kept_is_the_one_that_scipy_designs(rate):
    samples, common = tone(0.3, rate=rate), np.gcd(rate, 16_000)
    expected = resample_poly(samples, 16_000 // common, rate // common)
    np.testing.assert_array_equal(resampled(samples, rate, 16_000), expected)


@pytest.fixture
def spoken(tmp_path):
    """Short and long sounds, at the rate of the tower and at another, of 16 bits and of floats."""
    root = tmp_path / "set"
    root.mkdir()
    sounds = {
        "short": wav(tone(0.4)),
        "short16": wav((9_000 * tone(0.6, 300, 16_000)).astype(np.int16), 16_000),
        "long": wav(tone(2.5)),
        "long16": wav((9_000 * tone(1.9, 300, 16_000)).astype(np.int16), 16_000),
        "page": b"<html>",
    }
    for name, content in sounds.items():
        (root / f"{name}.wav").write_bytes(content)
    lines = [{"id": name, "audio": f"{name}.wav", "text": name} for name in sounds]
    (root / "set.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


def datasets(source, cache, augmentation):
    features = AudioFeatures("ClapFeatureExtractor", CLAP, 16_000, augmentation)
    plain = MicroBatchDataset(source, [AudioModality(features)], seed=3)
    return plain, MicroBatchDataset(source, [AudioModality(features, cache)], seed=3)


def count_decoded(monkeypatch):
    decoded = []
    monkeypatch.setattr(audio, "decode_audio", lambda data: decoded.append(1) or decode_audio(data))
    return decoded


@pytest.mark.parametrize("augmentation", [(), ("crop", "spec"), ("crop", "spec", "noise")])
def test_the_cache_changes_no_value_and_each_sound_is_decoded_once(
    spoken, tmp_path, monkeypatch, augmentation
):
    source = open_source(f"jsonl:{spoken}/set.jsonl", AUDIO_TEXT)
    cache = SampleCache(tmp_path / "cache")
    plain, cached = datasets(source, cache, augmentation)
    index = source.usable()
    decoded = count_decoded(monkeypatch)
    counted = []
    for training, epoch in ((True, 0), (True, 1), (False, 0), (True, 2), (False, 0)):
        request = request_of(index, epoch, training)
        expected = plain[request]["input_features"]
        decoded.clear()
        assert cached[request]["input_features"].equal(expected)
        counted.append(len(decoded))
        cache.close(60)  # what waits is written
    # what a clip is cut from at random is kept as samples, of which evaluation makes its own
    assert counted == [4, 0, 0, 0, 0]


def test_what_fills_up_short_sounds_is_counted(spoken):
    source = open_source(f"jsonl:{spoken}/set.jsonl", AUDIO_TEXT)
    dataset, _ = datasets(source, None, ())
    index = np.arange(len(source))  # clips of a second; of the page nothing is counted
    request = request_of(index)
    counts = dataset.load(request)[1].counts
    assert counts["audio_seconds"] == pytest.approx(0.4 + 0.6 + 1 + 1)
    assert counts["padded_audio_seconds"] == pytest.approx(4)


def test_a_file_that_changed_is_decoded_again(spoken, tmp_path):
    cache = SampleCache(tmp_path / "cache")

    def load():
        source = open_source(f"jsonl:{spoken}/set.jsonl", AUDIO_TEXT)
        plain, cached = datasets(source, cache, ("crop",))
        index = source.usable()
        request = request_of(index)
        made = cached[request]["input_features"]
        assert made.equal(plain[request]["input_features"])
        cache.close(60)
        return made

    before = load()
    (spoken / "short.wav").write_bytes(wav(tone(0.4, 900)))
    assert not load()[0].equal(before[0])


def test_settings_of_the_tower_have_their_own_values(spoken, tmp_path):
    source = open_source(f"jsonl:{spoken}/set.jsonl", AUDIO_TEXT)
    cache = SampleCache(tmp_path / "cache")
    request = request_of(source.usable()[:2], training=False)
    for values, samples in (
        (CLAP, 16_000),
        ({**CLAP, "hop_length": 320}, 16_000),
        ({**CLAP, "sampling_rate": RATE}, 16_000),
        (CLAP, 8_000),
    ):
        features = AudioFeatures("ClapFeatureExtractor", values, samples)
        plain, cached = (
            MicroBatchDataset(source, [AudioModality(features, each)])[request]["input_features"]
            for each in (None, cache)
        )
        assert cached.equal(plain)
        cache.close(60)


def test_a_full_cache_and_a_bad_sound_are_what_they_are_without(spoken, tmp_path):
    """A bad sound stays bad where the cache knows its bytes, by another data set."""
    source = open_source(f"jsonl:{spoken}/set.jsonl", AUDIO_TEXT)
    cache = SampleCache(tmp_path / "cache", limit_bytes=20_000)
    plain, cached = datasets(source, cache, ("crop",))
    index = source.usable()
    request = request_of(index)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is full
        for _ in range(2):
            assert cached[request]["input_features"].equal(plain[request]["input_features"])
            cache.close(60)
    bad = next(i for i in range(len(source)) if i not in index)
    roomy = SampleCache(tmp_path / "roomy")
    plain, cached = datasets(source, roomy, ())
    features = plain.modalities[0].features
    blank = plain.modalities[0].blank()["input_features"].numpy()
    key = source.content_hash("audio", bad) + f"{features.name}:0".encode()
    roomy.put(key, blank)
    roomy.store()
    assert roomy.has(key)
    request = request_of([0, bad], training=False)
    for dataset in (plain, cached):
        loaded, _ = dataset.load(request)
        assert loaded["audio_index"].tolist() == [0, -1 - bad]
    roomy.close(60)
