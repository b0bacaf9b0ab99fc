"""transformers' ClapModel, in and out: bit for bit the library's, trained in a fork, and loaded by
the library alone."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from exports import CAPTIONS, TOKENS, assert_same, embed_by_pages, started_from, texts
from launched import ROOT, fork_flags, run_to_end
from safetensors.torch import load_file, save_file
from transformers import (
    ClapAudioConfig,
    ClapConfig,
    ClapFeatureExtractor,
    ClapModel,
    ClapProcessor,
    ClapTextConfig,
)

sys.path.insert(0, str(ROOT / "tests/data"))
from bad_audio import tone, wav  # noqa: E402

from data.modalities.audio.modality import AudioModality  # noqa: E402
from data.modalities.tokenizer import batch_tokens, load_tokenizer, train_tokenizer  # noqa: E402
from launch.config.options import parse_options  # noqa: E402
from launch.exporting.writing import write_export  # noqa: E402
from launch.inference.trained import Trained, open_model_folder, with_named_towers  # noqa: E402
from launch.modalities import audio_features  # noqa: E402
from launch.setup.model import RunModel  # noqa: E402
from models.weights.clap import SCALES, clap_pairs  # noqa: E402

HTSAT = {
    "patch_embeds_hidden_size": 16,
    "hidden_size": 32,
    "depths": [2, 2],
    "num_attention_heads": [2, 4],
    "window_size": 4,
    "spec_size": 64,
    "num_mel_bins": 16,
}
RATE, SECONDS = 8000, 2
SOUND_FILE = wav(tone(2.6, rate=11025), rate=11025)  # longer than a clip, at another rate
SOUND = {
    "feature_size": 16,
    "sampling_rate": RATE,
    "hop_length": 80,
    "max_length_s": SECONDS,
    "fft_window_size": 256,
    "frequency_max": RATE // 2,
    "truncation": "rand_trunc",
}


def clap(tokenizer, activation="relu", **audio):
    text = ClapTextConfig(**texts(tokenizer))
    config = ClapConfig(
        text_config=text.to_dict(),
        audio_config=ClapAudioConfig(**{**HTSAT, **audio}).to_dict(),
        projection_dim=24,
        projection_hidden_act=activation,
    )
    return ClapModel(config)


def saved(folder, model, tokenizer, extractor=True):
    """As the library writes a model with all that goes with it."""
    for parameter in model.parameters():  # no bias is zero
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    model.logit_scale_t.data.copy_(model.logit_scale_a)
    model.save_pretrained(folder)
    tokenizer.model_max_length = TOKENS
    if extractor:
        ClapProcessor(ClapFeatureExtractor(**SOUND), tokenizer).save_pretrained(folder)
    else:
        tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def folders(module_folder):
    """By the activation of the projections: the folder of a model."""
    made = {}
    for activation in ("relu", "gelu"):
        torch.manual_seed(3)
        tokenizer = train_tokenizer(CAPTIONS)
        made[activation] = module_folder("clap") / activation
        saved(made[activation], clap(tokenizer, activation), tokenizer)
    return made


def run_model(folder, *flags):
    options = with_named_towers(started_from(folder, *flags), None)
    return options, RunModel.of(options, load_tokenizer(options.tokenizer))


def test_embeddings_and_every_gradient_are_the_librarys(folders, subtests):
    """In training, with dropout and batch normalisation, whose statistics are compared too."""
    for activation, folder in folders.items():
        with subtests.test(activation):
            check_gradients(folder)


def check_gradients(folder):
    _, model = run_model(folder)
    layers = [model.build_layer(spec).train() for specs in model.layers.values() for spec in specs]
    theirs = ClapModel.from_pretrained(folder).train()
    tokenizer = load_tokenizer(str(folder))
    tensors = {"input_features": torch.randn(4, 1, RATE * SECONDS // 80 + 1, 16)}
    tensors |= batch_tokens(tokenizer, CAPTIONS, TOKENS)[0]
    torch.manual_seed(11)
    expected = theirs(**tensors)
    torch.manual_seed(11)
    for layer in layers:
        tensors = layer(tensors)
    embeds = [(tensors[name], getattr(expected, name)) for name in ("audio_embeds", "text_embeds")]
    for own, other in embeds:
        assert torch.equal(own, other)
        above = torch.randn_like(own)
        own.backward(above, retain_graph=True)
        other.backward(above, retain_graph=True)
    ours = {
        layer.canonical_names[local]: tensor
        for layer in layers
        for local, tensor in layer.state_dict(keep_vars=True).items()
    }
    state = theirs.state_dict(keep_vars=True)
    compared = 0
    for pair in clap_pairs(*model.towers):
        if pair.theirs == SCALES:
            continue
        (own,), (other,) = pair.ours, pair.theirs
        assert torch.equal(ours[own], state[other]), own
        assert (ours[own].grad is None) == (state[other].grad is None), own
        if state[other].grad is not None:
            assert torch.equal(ours[own].grad, state[other].grad), own
            compared += 1
    learned = [name for name, _ in theirs.named_parameters() if name not in SCALES]
    assert compared == len(learned)
    assert tensors["audio_text_logit_scale"] == theirs.logit_scale_a


def test_a_run_takes_from_the_model_what_is_not_given(folders):
    options, model = run_model(folders["gelu"])
    assert options.pairs == "audio:text" and options.loss == "infonce"
    assert options.projection == "mlp:hidden_act=gelu"
    assert (options.embed_dim, options.max_text_tokens) == (24, TOKENS)
    assert (options.audio_seconds, options.tokenizer) == (SECONDS, str(folders["gelu"]))
    reads = model.towers[0].config["audio_input"]
    assert reads["num_samples"] == RATE * SECONDS and reads["shape"] == [1, 201, 16]
    assert {key: reads["values"][key] for key in SOUND} == SOUND


def same_as_ours(trained, found):
    """What a page made of a sound and of the captions is what the model does."""
    keys = ("audio_tower", "audio_seconds", "audio_size")
    features = audio_features(*(trained.options[key] for key in keys), ())
    own = AudioModality(features).encode(SOUND_FILE, None)["input_features"]
    torch.testing.assert_close(found["input_features"][0], own, rtol=0, atol=1e-4)  # decibels
    assert_same(trained, found)


TINY = "hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=48"
SPECTROGRAM = ["--audio-seconds", "0.75", "--audio-size", "64"]
BERT = f"bert-tiny:{TINY},pool=mean"
OTHERS = {  # flags of the model, what its record must say of how it is loaded
    "htsat from scratch": (
        [
            "--audio-tower", "hf:clap:patch_embeds_hidden_size=16,depths=2-2,num_attention_heads=2-4,window_size=4,spec_size=64,num_mel_bins=16",
            "--text-tower", f"clap-text-base:{TINY},pool=pooler", "--projection", "mlp", "--audio-seconds", "0.5",
        ],
        "ClapModel",
    ),
    "ast": (
        ["--audio-tower", f"hf:ast:{TINY},num_mel_bins=16", "--audio-seconds", "0.5", "--text-tower", BERT],
        "ASTModel",
    ),
    "whisper, max": (
        [
            "--audio-tower", "hf:whisper-tiny:encoder_layers=1,d_model=32,encoder_attention_heads=2,encoder_ffn_dim=48,pool=max",
            "--audio-seconds", "1", "--text-tower", BERT, "--projection", "mlp:hidden_act=gelu",
        ],
        "WhisperEncoder",
    ),
    "resnet": (["--audio-tower", "resnet18:layers=1-1-1-1", *SPECTROGRAM, "--text-tower", BERT], "BasicBlock"),
    "timm, attention": (
        ["--audio-tower", "timm:resnet10t:pool=attention", *SPECTROGRAM, "--text-tower", BERT], "attention",
    ),
    "three branches": (
        [
            "--pairs", "image:text,audio:text:0.5", "--image-size", "32", "--audio-tower", f"hf:ast:{TINY},num_mel_bins=16,pool=avg",
            "--audio-seconds", "0.5", "--image-tower", f"hf:clip-vit-base-patch16:{TINY}",
            "--text-tower", f"clip-text-base:{TINY}",
        ],
        "CLIPModel",
    ),
    "three branches of three libraries": (
        [
            "--pairs", "image:text,audio:text", "--image-size", "32", "--audio-tower", "timm:resnet10t", *SPECTROGRAM,
            "--image-tower", "vit_b_32:patch_size=16,num_layers=1,num_heads=2,hidden_dim=32,mlp_dim=64",
            "--text-tower", f"bert-tiny:{TINY},pool=pooler",
        ],
        "VisionTransformer",
    ),
}  # fmt: skip


def trained_by(flags):
    """As a run with these flags leaves it; no value is what it begins with."""
    pairs = [] if "--pairs" in flags else ["--pairs", "audio:text"]
    options = parse_options(["--data", "demo", *pairs, *flags, "--embed-dim", "24"])
    options = replace(options, label_smoothing=0.0, max_text_tokens=TOKENS)
    tokenizer = train_tokenizer(CAPTIONS)
    tokenizer.eos_token = "[SEP]"  # where CLIP pools
    model = RunModel.of(options, tokenizer)
    layers = [model.build_layer(spec).eval() for specs in model.layers.values() for spec in specs]
    draw = torch.Generator().manual_seed(0)
    for layer in layers:
        for tensor in layer.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape, generator=draw).abs() * 0.05)
    record = {"options": options.record()}
    del record["options"]["data"]  # there is no run whose page could be written
    return Trained(
        record, Path("run/checkpoints/step-00000007"), 7, tokenizer, tuple(model.towers), layers
    )


@pytest.fixture(scope="module")
def exports(folders, module_folder):
    """By name: what was exported, its folder, what the export said, and what a fresh process made by
    the folder's page."""
    pytest.importorskip("soundfile", reason="pip install -r requirements-audio.txt")
    root, made = module_folder("exports"), {"the library's": open_model_folder(folders["gelu"])}
    made |= {name: trained_by(flags) for name, (flags, _) in OTHERS.items()}
    differences = [write_export(trained, root / name) for name, trained in made.items()]
    found = embed_by_pages(root, [root / name for name in made], SOUND_FILE)
    return {
        name: (trained, root / name, *own)
        for (name, trained), *own in zip(made.items(), differences, found)
    }


@pytest.mark.all("more models of a kind")
def test_a_model_comes_out_as_it_went_in(folders, exports):
    _, out, differences, _ = exports["the library's"]
    assert differences == []
    before, after = (load_file(where / "model.safetensors") for where in (folders["gelu"], out))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "zero-shot-audio-classification" in (out / "README.md").read_text()
    # whoever may read the one may read the other
    assert (out / "model.safetensors").stat().st_mode == (out / "README.md").stat().st_mode


def test_public_libraries_alone_have_the_embeddings(exports, subtests):
    """And so has what is opened again from the export."""
    of_class = ("the library's", "htsat from scratch", "three branches")
    for name, (trained, out, differences, found) in exports.items():
        with subtests.test(name):
            assert bool(differences) == (name not in of_class)
            if name in OTHERS:
                record = json.loads((out / "wye.json").read_text())["loading"]
                assert f'"{OTHERS[name][1]}"' in json.dumps(record)
            same_as_ours(trained, found)
            again = open_model_folder(out)
            assert again.options["pairs"] == trained.options["pairs"]
            assert len(again.layers) == len(trained.layers)
            same_as_ours(again, found)


def test_the_scale_is_written_under_both_names(exports):
    trained, out, *_ = exports["htsat from scratch"]
    scale = trained.layers[len(trained.towers[0].specs) - 1].audio_text_logit_scale
    model = ClapModel.from_pretrained(out)
    assert model.logit_scale_a == model.logit_scale_t == scale
    assert model.config.logit_scale_init_value == pytest.approx(scale.exp().item())


def write_sounds(folder, number):
    """The spec of a JSONL set of tones, each with its own name."""
    lines = []
    for i in range(number):
        (folder / f"{i}.wav").write_bytes(wav(tone(0.5 + i % 7 / 3, 150 + 20 * i)))
        row = {"id": str(i), "audio_path": f"{i}.wav", "text": f"{CAPTIONS[i % 4]} number {i}"}
        lines.append(json.dumps(row) + "\n")
    (folder / "sounds.jsonl").write_text("".join(lines))
    return f"jsonl:{folder / 'sounds.jsonl'}"


@pytest.mark.slow
@pytest.mark.all("trains from more models")
def test_a_model_is_trained_in_a_fork_and_loaded_by_its_library(folders, tmp_path):
    pytest.importorskip("soundfile", reason="pip install -r requirements-audio.txt")
    folder, run, out = folders["relu"], tmp_path / "run", tmp_path / "out"
    how = ["--data", write_sounds(tmp_path, 96), "--val-fraction", 0.25, "--workers", 0]
    how += ["--steps", 2, "--save-every", 2, *fork_flags(tmp_path)]
    config = tmp_path / "fork.json"
    config.write_text(config.read_text().replace('"image"', '"audio"'))
    how += ["--import", folder, "--run-dir", run]
    status, output = run_to_end("train.py", *how, ranks=2)
    assert status == 0, output[-5000:]
    status, output = run_to_end("export.py", run, out, "--format", "transformers")
    assert status == 0, output[-5000:]
    before, after = (load_file(where / "model.safetensors") for where in (folder, out))
    assert before.keys() == after.keys()
    assert not torch.equal(before["logit_scale_a"], after["logit_scale_a"])
    assert torch.equal(after["logit_scale_a"], after["logit_scale_t"])
    projections = [name for name in after if name.startswith("audio_projection")]
    assert len(projections) == 4
    assert not any(torch.equal(before[name], after[name]) for name in projections)
    (found,) = embed_by_pages(tmp_path, [out], SOUND_FILE)
    same_as_ours(open_model_folder(run), found)


def broken(folder, source, remove=(), **changed):
    """A copy of a model's folder without some files, its configuration changed."""
    shutil.copytree(source, folder)
    for name in remove:
        (folder / name).unlink()
    config = json.loads((folder / "config.json").read_text())
    config["audio_config"] |= changed
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_what_cannot_be_is_refused_on_the_command_line(folders, tmp_path, capsys):
    other = {"enable_fusion": True}, {"remove": ("processor_config.json",)}
    for number, (what, flags, words) in enumerate(
        (
            (other[0], "", "fuses four spectrograms"),
            (other[1], "", "the rate of its sounds"),
            ({}, "--pairs image:text", "--import: it is of the audio branch"),
            ({}, "--pairs image:audio", "--import: it is of the text branch"),
            ({}, "--audio-weights x", "holds the audio tower; leave out --audio-weights"),
            ({}, "--projection mlp:act=gelu", "write mlp, or mlp:hidden_act=NAME"),
            ({}, "--projection mlp:hidden_act=prelu", "'prelu' is not known"),
            ({}, "--projection none:hidden_act=gelu", "none has no activation"),
            ({}, "--projection two", "'two' is not known; did you mean"),
        )
    ):
        folder = broken(tmp_path / str(number), folders["relu"], **what)
        with pytest.raises(SystemExit):
            parse_options(["--data", "demo", "--import", str(folder), *flags.split()])
        assert words in capsys.readouterr().err, words


def test_what_the_weights_are_not_is_refused(folders, tmp_path):
    flags = ["--projection", "linear"]
    with pytest.raises(ValueError, match="Leave --projection to what the model has"):
        run_model(folders["relu"], *flags)
    with pytest.raises(ValueError, match="takes 0.01 to 2.55; give --audio-seconds"):
        run_model(folders["relu"], "--audio-seconds", "9")
    state = load_file(folders["relu"] / "model.safetensors")
    other = broken(tmp_path / "other", folders["relu"])
    save_file(
        {name: state[name] for name in state if not name.endswith("linear2.bias")},
        other / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(ValueError, match="no tensor for head.audio_projection.linear2.bias"):
        run_model(other)


def test_scales_that_differ_are_said(folders, tmp_path, caplog):
    other = broken(tmp_path / "other", folders["relu"])
    state = load_file(other / "model.safetensors")
    state["logit_scale_t"] += 1
    save_file(state, other / "model.safetensors", metadata={"format": "pt"})
    _, model = run_model(other)
    head = model.build_layer(model.layers["audio"][-1])
    assert torch.equal(head.audio_text_logit_scale, state["logit_scale_a"].reshape(1))
    assert "training goes on with the first" in caplog.text


def test_forms_that_a_model_with_sounds_cannot_have(tmp_path):
    for name, form, words in (
        ("ast", "transformers", "ClapModel has no audio tower hf:ast"),
        ("ast", "open_clip", "OpenCLIP has no models of sounds and texts"),
        ("three branches", "open_clip", "or --format state_dict"),
    ):
        with pytest.raises(ValueError, match=words):
            write_export(trained_by(OTHERS[name][0]), tmp_path / "out", form=form)
        assert not (tmp_path / "out").exists()
