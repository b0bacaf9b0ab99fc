"""Audio towers: any image tower over a spectrogram, weights from files, what is refused."""

import pytest
import torch
from torch import nn
from transformers import (
    ASTConfig,
    ASTFeatureExtractor,
    ASTForAudioClassification,
    ClapAudioConfig,
    ClapConfig,
    ClapFeatureExtractor,
    ClapModel,
    ClapTextConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from models.towers.audio import QUIET_DB, SPREAD_DB, audio_input, audio_tower
from models.towers.image import image_tower
from models.towers.layers import library_models_kept
from models.towers.libraries.transformers_audio import FAMILIES
from models.weights.audio import open_audio_weights

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 48}
HTSAT = {"patch_embeds_hidden_size": 16, "hidden_size": 32, "depths": [2, 2]}
HTSAT |= {"num_attention_heads": [2, 4], "window_size": 4, "spec_size": 64, "num_mel_bins": 16}
WHISPER = {"d_model": 32, "num_mel_bins": 16, "max_source_positions": 50, "vocab_size": 60}
WHISPER |= {f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")}
WHISPER |= {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
WHISPER |= {"encoder_layers": 2, "decoder_layers": 1, "max_target_positions": 8}
WHISPER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
WHISPER |= {"suppress_tokens": None, "begin_suppress_tokens": None}


def clap():
    text = ClapTextConfig(**SMALL, vocab_size=50, max_position_embeddings=20).to_dict()
    audio = ClapAudioConfig(**HTSAT).to_dict()
    return ClapModel(ClapConfig(text_config=text, audio_config=audio, projection_dim=24))


def ast():
    return ASTForAudioClassification(ASTConfig(**SMALL, num_mel_bins=16, max_length=40))


def whisper():
    return WhisperForConditionalGeneration(WhisperConfig(**WHISPER))


OF_FOLDERS = {  # model, seconds, feature extractor, the library's own features of the inputs
    "clap": (clap, 1.0, ClapFeatureExtractor, lambda m, x: m.audio_model(x).pooler_output),
    "ast": (
        ast,
        None,
        ASTFeatureExtractor,
        lambda m, x: m.audio_spectrogram_transformer(x).pooler_output,
    ),
    "whisper": (
        whisper,
        None,
        WhisperFeatureExtractor,
        lambda m, x: m.model.encoder(x).last_hidden_state.mean(1),
    ),
}

OF_FAMILIES = {  # a tower of each
    "audio-spectrogram-transformer": "hf:ast",
    "clap_audio_model": "hf:clap",
    "whisper": "hf:whisper-tiny",
}


def features(tower, layers, inputs):
    tensors = {"input_features": inputs}
    for layer in layers:
        tensors = layer(tensors)
    return tensors["audio_features"]


@pytest.mark.parametrize("kind", OF_FOLDERS)
def test_tower_and_weights_of_a_folder_are_the_librarys(kind, tmp_path):
    """Of a whole model, whose audio side is taken; saved by the library, in its own file format."""
    make, seconds, extractor, theirs = OF_FOLDERS[kind]
    torch.manual_seed(0)
    model = make().eval()
    for parameter in model.parameters():  # AST's two tokens and its positions begin with zeros
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(tmp_path)
    tower = audio_tower(f"hf:{tmp_path}", seconds)
    with pytest.raises(ValueError, match="no feature extractor.*preprocessor_config.json"):
        open_audio_weights(str(tmp_path), tower)
    extractor(feature_size=16).save_pretrained(tmp_path)
    tower = audio_tower(f"hf:{tmp_path}", seconds)
    reader = open_audio_weights(str(tmp_path), tower)
    layers = [spec.build(0, reader).eval() for spec in tower.specs]
    inputs = torch.randn(3, *tower.config["audio_input"]["shape"])
    with torch.no_grad():
        assert torch.equal(features(tower, layers, inputs), theirs(model, inputs))


def refuse_modules(monkeypatch):
    def init(self):
        raise AssertionError(f"{type(self).__name__} is built")

    monkeypatch.setattr(nn.Module, "__init__", init)


@pytest.mark.parametrize("seconds", [None, 2.0])
@pytest.mark.parametrize("name", [*OF_FAMILIES.values(), "hf:vit-base-patch16-224", "resnet18"])
def test_the_input_follows_from_the_configuration_alone(name, seconds, monkeypatch):
    assert {*OF_FAMILIES} == {*FAMILIES}
    with monkeypatch.context() as patched:
        refuse_modules(patched)
        reads = audio_input(name, seconds, 32)
        with pytest.raises(AssertionError, match="is built"):
            audio_tower(name, seconds, 32)
    tower = audio_tower(name, seconds, 32)
    assert reads == tower.config["audio_input"]
    assert reads["shape"] == [*tower.example(3)["input_features"].shape[1:]]


@pytest.mark.parametrize("kind", OF_FOLDERS)
def test_the_input_of_a_folder_is_that_of_its_extractor(kind, tmp_path, monkeypatch):
    make, seconds, extractor, _ = OF_FOLDERS[kind]
    make().config.save_pretrained(tmp_path)
    rate = 8_000
    extractor(feature_size=16, sampling_rate=rate).save_pretrained(tmp_path)
    with monkeypatch.context() as patched:
        refuse_modules(patched)
        reads = audio_input(f"hf:{tmp_path}", seconds)
    assert reads["values"]["sampling_rate"] == rate
    assert reads == audio_tower(f"hf:{tmp_path}", seconds).config["audio_input"]


@pytest.mark.parametrize(
    "name",
    [
        "resnet18:layers=1-1-1-1",
        "efficientnet_b0",
        "hf:swin-tiny-patch4-window7-224:embed_dim=16,depths=2-2,num_heads=2-4,window_size=4",
    ],
)
def test_an_image_tower_sees_the_spectrogram_as_a_grey_image(name):
    size = 64
    tower, of_images = audio_tower(name, 1.0, size), image_tower(name, size)
    assert tower.inputs == ("input_features",) and tower.branch == "audio"
    with library_models_kept():
        ours = [spec.build(0).eval() for spec in tower.specs]
        theirs = [spec.build(0).eval() for spec in of_images.specs]
    for own, other in zip(ours, theirs, strict=True):
        assert {own.canonical_names[key] for key in own.state_dict()} == {
            "audio." + name.split(".", 1)[1] for name in other.canonical_names.values()
        }
        own.inner.load_state_dict(other.state_dict())  # other names are other seeds
    decibel = 40 * torch.randn(2, 1, size, size)
    grey = ((decibel.transpose(2, 3) - QUIET_DB) / SPREAD_DB).expand(-1, 3, -1, -1)
    tensors = {"pixel_values": grey}
    with torch.no_grad():
        for layer in theirs:
            tensors = layer(tensors)
        assert torch.equal(features(tower, ours, decibel), tensors["image_features"])


def test_an_image_tower_has_first_values_and_takes_weights(tmp_path):
    name = "resnet18:layers=1-1-1-1"
    tower = audio_tower(name, 1.0, 64)
    layers = [spec.build(3) for spec in tower.specs]
    assert all(torch.isfinite(p).all() for layer in layers for p in layer.parameters())
    of_images = [spec.build(5) for spec in image_tower(name, 64).specs]
    state = {
        layer.canonical_names[key].split(".", 1)[1]: tensor
        for layer in of_images
        for key, tensor in layer.state_dict().items()
    }
    torch.save(state, tmp_path / "model.pth")
    reader = open_audio_weights(str(tmp_path / "model.pth"), tower)
    for spec, other in zip(tower.specs, of_images, strict=True):
        filled = spec.build(3, reader).inner.state_dict()
        assert all(torch.equal(filled[key], tensor) for key, tensor in other.state_dict().items())


def test_first_values_of_whisper_are_the_librarys_sinusoids():
    name = (
        "hf:whisper-tiny:encoder_layers=1,d_model=32,encoder_attention_heads=2,encoder_ffn_dim=48"
    )
    start = audio_tower(name, 1.0).specs[0].build(0)
    theirs = whisper().model.encoder.embed_positions.weight
    assert torch.equal(start.embed_positions.weight, theirs)
    assert not any("embed_positions" in name for name, _ in start.named_parameters())


def test_what_a_tower_cannot_be(subtests):
    for name, seconds, words in (
        ("hf:clap-htsat-unfused", 11.0, "takes 0.01 to 10.23; give --audio-seconds"),
        ("hf:whisper-tiny", 2.5, "takes whole seconds; give 3"),
        ("hf:bert-base-uncased", None, "is not known"),
        ("hf:clap-htsat-unfused:pool=max", None, "pool"),
    ):
        with subtests.test(name), pytest.raises(ValueError, match=words):
            audio_tower(name, seconds)


def test_a_tower_that_fuses_is_refused(tmp_path):
    ClapAudioConfig(**HTSAT, enable_fusion=True).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="laion/clap-htsat-unfused"):
        audio_tower(f"hf:{tmp_path}")
