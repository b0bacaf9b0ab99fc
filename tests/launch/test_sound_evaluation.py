"""evaluate.py of a model of sounds and texts, without images: embeddings, classes and queries of
towers that were built, not trained."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from launched import ROOT
from rounding import assert_equal_rows

sys.path.insert(0, str(ROOT / "tests/data"))
from bad_audio import tone, wav  # noqa: E402

from data.decoding.sounds import decode_audio, resampled  # noqa: E402
from data.index.sources import open_source  # noqa: E402
from data.modalities.audio.picture import spectrogram_of  # noqa: E402
from data.modalities.tokenizer import train_tokenizer  # noqa: E402
from launch.inference.classes import class_embeddings, classification  # noqa: E402
from launch.inference.embedding import Embedder  # noqa: E402
from launch.inference.evaluation import examples, retrieval  # noqa: E402
from launch.inference.gallery import draw_rows  # noqa: E402
from launch.inference.querying import answers_of, embedded_query, read_query  # noqa: E402
from launch.inference.samples import opened  # noqa: E402
from launch.inference.trained import Trained  # noqa: E402
from launch.modalities import Vocabulary, audio_features, tower_of  # noqa: E402
from launch.views import SoundView  # noqa: E402

pytest.importorskip("soundfile", reason="pip install -r requirements-audio.txt")

OPTIONS = {
    "pairs": "audio:text",
    "audio_tower": "resnet18:layers=1-1-1-1",
    "audio_seconds": 0.5,
    "audio_size": 32,
    "text_tower": "bert-tiny:hidden_size=32,num_attention_heads=2,intermediate_size=32",
    "max_text_tokens": 12,
    "embed_dim": 16,
    "seed": 0,
}
NUMBER = 20


@pytest.fixture(scope="module")
def embedder():
    tokenizer = train_tokenizer(["the sound of a low tone", "a high tone"])
    towers = tuple(
        tower_of(branch, OPTIONS, Vocabulary.of(tokenizer), {}) for branch in ("audio", "text")
    )
    layers = [spec.build(1).eval() for tower in towers for spec in tower.specs]
    trained = Trained({"options": OPTIONS}, Path("step-00000001"), 1, tokenizer, towers, layers)
    return Embedder(trained, "cpu", 7, 0)


@pytest.fixture
def sounds(tmp_path):
    """Tones with texts, two of each; the last one has no text."""
    lines = []
    for n in range(NUMBER + 1):
        (tmp_path / f"{n}.wav").write_bytes(wav(tone(0.2 + n / 40, 150 + 60 * n)))
        texts = {"text": [f"tone {n}", f"a tone of {n} steps"]} if n < NUMBER else {}
        lines.append(json.dumps({"audio_path": f"{n}.wav", **texts}) + "\n")
    (tmp_path / "sounds.jsonl").write_text("".join(lines))
    return f"jsonl:{tmp_path}/sounds.jsonl"


def test_retrieval_is_that_of_the_towers(embedder, sounds, tmp_path):
    part = opened(sounds, embedder.trained)
    embedded = embedder.embedded(part.source, part.subset, all_captions=True)
    sound, text = embedded.rows["audio"], embedded.rows["text"]
    assert sound.sample.tolist() == [*range(NUMBER)] and len(text.sample) == 2 * NUMBER
    features = audio_features(
        *(OPTIONS[f"audio_{key}"] for key in ("tower", "seconds", "size")), ()
    )
    heard = decode_audio(part.source.value("audio", 5))
    tensors = {
        "input_features": features(resampled(heard.samples, heard.rate, features.rate), None)[None]
    }
    for layer in embedder.trained.layers[: len(embedder.trained.towers[0].specs)]:
        tensors = layer(tensors)
    assert_equal_rows(sound.embeds[5], tensors["audio_embeds"][0])
    similarity, right = sound.embeds @ text.embeds.T, text.sample == sound.sample[:, None]
    best = similarity.masked_fill(~right, -2).amax(1)
    ranks = ((similarity >= best[:, None]) & ~right).sum(1)
    values = retrieval(embedded)
    assert values["audio_to_text_R@5"] == pytest.approx(float((ranks < 5).double().mean()))
    assert values["audio_to_text_median_rank"] == pytest.approx(float(np.median(ranks)) + 1)
    rows = examples(embedded, part.source, 4)
    assert [row[0].value is None for row in rows] == [True, True, False, False]
    assert isinstance(rows[0][1].value, SoundView)
    draw_rows(rows, "tones", tmp_path / "rows.png")
    assert (tmp_path / "rows.png").stat().st_size > 20_000


def test_classes_of_sounds_are_the_nearest_prompts(embedder, tmp_path):
    for name, pitch in (("low", 200), ("high", 2000), ("middle", 700)):
        (tmp_path / name).mkdir()
        for i in range(4):
            (tmp_path / name / f"{i}.wav").write_bytes(wav(tone(0.4, pitch + 9 * i)))
    test = opened(f"audiofolder:{tmp_path}?templates=the sound of {{}}", embedder.trained)
    values = classification(embedder, test, test)
    names = sorted(("low", "high", "middle"))
    classes, _ = class_embeddings(embedder, [(f"the sound of {name}",) for name in names])
    found = (embedder.rows("audio", test.source, test.subset).embeds @ classes.T).argmax(1)
    right = [names[n] == test.source.label(i) for i, n in enumerate(found.tolist())]
    assert values["zero_shot_top_1"] == pytest.approx(np.mean(right))
    assert values["num_classes"] == 3 and values["neighbours_top_1"] == 1.0


def test_a_query_is_what_its_content_is(embedder, sounds, tmp_path):
    part = opened(sounds, embedder.trained)
    (tmp_path / "heard").write_bytes((tmp_path / "3.wav").read_bytes())
    query = read_query(str(tmp_path / "heard"), embedder.branches)
    assert query.modality == "audio" and answers_of(query, embedder, None) == "text"
    own = embedder.rows("audio", part.source, np.array([3])).embeds
    torch.testing.assert_close(embedded_query(query, embedder), own)
    text = read_query("a low tone", embedder.branches)
    assert text.value is None and answers_of(text, embedder, None) == "audio"
    demo = open_source("demo")
    (tmp_path / "emoji.wav").write_bytes(demo.value("image", 0))
    (tmp_path / "cut.wav").write_bytes((tmp_path / "3.wav").read_bytes()[:-100])
    for given, said in (
        (
            "emoji.wav",
            "is no file of a modality of this model, which has audio, text; tried: audio",
        ),
        ("cut.wav", "cannot be read as audio: truncated-audio"),
        ("none.wav", "there is no such file"),
    ):
        with pytest.raises(ValueError, match=said):
            read_query(str(tmp_path / given), embedder.branches)
    with pytest.raises(
        ValueError, match="is a text, and this model was trained with image and aud"
    ):
        read_query("a low tone", ("image", "audio"))
    with pytest.raises(ValueError, match="--find image: this model has audio, text"):
        answers_of(query, embedder, "image")
    without = replace(embedder.trained, record={"options": {**OPTIONS, "pairs": "image:audio"}})
    with pytest.raises(ValueError, match="it holds image and text, and --pairs compares"):
        opened("demo", without)


def test_a_spectrogram_shows_the_pitch():
    """The loudest mel bin lies where the axis says that 1,000 Hz is; above the file's own limit
    there is nothing to show."""
    sound = decode_audio(wav(np.sin(2 * np.pi * 1000 * np.arange(8000) / 8000).astype("f4")))
    found = spectrogram_of(sound)
    assert found.seconds == 1.0 and [hz for _, hz in found.ticks] == [250, 500, 1000, 2000]
    loudest = (found.decibels[:, 10:-10].mean(1).argmax() + 0.5) / len(found.decibels)
    assert loudest == pytest.approx(dict((hz, at) for at, hz in found.ticks)[1000], abs=0.02)
    value = SoundView(wav(tone(0.4)))
    assert value.small_picture().size == (180, 120)
    again = decode_audio(value.played())
    assert again.rate == 16_000 and again.seconds == pytest.approx(0.4, abs=0.1)
    assert SoundView(wav(tone(11.0))).played() is None  # too long to go into a page
    SoundView(wav(tone(0.001))).small_picture()  # a frame is longer than that
