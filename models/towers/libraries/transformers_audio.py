"""Audio towers of transformers, `hf:WHERE`: AST, CLAP's HTSAT and Whisper's encoder, cut into
layers.

B micro-batch, T frames of a spectrogram, F mel bins, N tokens, D width.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    ASTConfig,
    AutoFeatureExtractor,
    ClapAudioConfig,
    PreTrainedConfig,
    PreTrainedModel,
    WhisperConfig,
)
from transformers.models.clap.modeling_clap import ClapAudioEncoder
from transformers.models.whisper.modeling_whisper import WhisperEncoder, sinusoids

from common.model_sizes import read_model_config
from models.towers.layers import Layer, Tower, cut
from models.towers.libraries.configurations import (
    Catalogue,
    Chosen,
    Family,
    Preset,
    initialise,
    remade,
    saved_state,
)
from models.towers.libraries.layers import INPUTS, Block, Named, Pool, Start
from models.towers.names import HF, split_name
from models.towers.pooling import pooling
from models.towers.tracing.precision import with_exact_statistics

READS = INPUTS["audio"]

# -- layers


class WhisperStart(Start):
    """`input_features` [B, F, T] -> `audio_hidden` [B, T/2, D]: two convolutions and sinusoidal
    positions, which do not learn."""

    def __init__(self, encoder: WhisperEncoder) -> None:
        super().__init__("audio", nn.ModuleList([encoder.conv1, encoder.conv2]))
        self.embed_positions, self.dropout = encoder.embed_positions, encoder.dropout
        # the library's parameter without a gradient; as a buffer nothing waits for one
        fixed = self.embed_positions.weight.data
        del self.embed_positions.weight
        self.embed_positions.register_buffer("weight", fixed)

    def embedded(self, given: Tensor) -> Tensor:
        for convolution in self.embeddings:
            given = functional.gelu(convolution(given))
        made = given.permute(0, 2, 1)
        positions = torch.arange(self.embed_positions.num_embeddings, device=made.device)
        made = made + self.embed_positions(positions).to(made.dtype)
        return functional.dropout(made, p=self.dropout, training=self.training)


class HTSATStart(Start):
    """`input_features` [B, 1, T, F] -> `audio_hidden` [B, N, D]: batch normalisation by mel bin,
    the spectrogram folded into a square, patches."""

    def __init__(self, encoder: ClapAudioEncoder) -> None:
        super().__init__("audio", encoder.patch_embed)
        self.batch_norm = encoder.batch_norm
        # what the library's method that folds reads of its `self`
        self.spec_size, self.freq_ratio = encoder.spec_size, encoder.freq_ratio

    def embedded(self, given: Tensor) -> Tensor:
        normal = self.batch_norm(given.transpose(1, 3)).transpose(1, 3)
        return self.embeddings(ClapAudioEncoder.reshape_mel2img(self, normal))


class TwoTokens(nn.Module):
    """AST's pooling: the mean of its class token and its distillation token."""

    def forward(self, tokens: Tensor) -> Tensor:
        return (tokens[:, 0] + tokens[:, 1]) / 2


class FoldedMean(nn.Module):
    """HTSAT's pooling: the mean of all places of the map, in the order in which the library adds
    them up."""

    def __init__(self, encoder: ClapAudioEncoder) -> None:
        super().__init__()
        times = 2 ** (encoder.num_layers - 1)
        self.size = tuple(encoder.spec_size // times // step for step in encoder.patch_stride)
        self.freq_ratio = encoder.freq_ratio

    def forward(self, tokens: Tensor) -> Tensor:
        maps = tokens.transpose(1, 2).unflatten(2, self.size)  # [B, D, frequencies, times]
        bins = self.size[0] // self.freq_ratio
        grouped = maps.unflatten(2, (self.size[0] // bins, bins)).transpose(2, 3)
        return functional.adaptive_avg_pool1d(grouped.flatten(2).contiguous(), 1).flatten(1)


# -- where each model is cut, and what it reads


@dataclass(frozen=True)
class AudioInput:
    """What a tower reads: by the class `extractor` of transformers with the arguments `values`, of
    a clip of `num_samples`; `shape` of one sample's `input_features`."""

    extractor: str
    values: Mapping[str, Any]
    num_samples: int
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class AudioFamily(Family):
    """`layers`: how it is cut, of the model and a pool. `seconds`: to the keys of the configuration
    that follow the length of a clip. `reads`: of a configuration, the values of a published
    extractor and the length of a clip."""

    layers: Callable[[Any, str], Named]
    width: Callable[[Any], int] = lambda config: config.hidden_size
    seconds: Callable[[float], Mapping[str, Any]] = lambda seconds: {}
    reads: Callable[[Any, Mapping[str, Any], float | None], AudioInput]

    def made(self, config: PreTrainedConfig) -> Any:
        return WhisperEncoder(config) if self.model == "WhisperEncoder" else super().made(config)


EXTRACTORS = ("preprocessor_config.json", "processor_config.json")  # files of a folder


def _ast(model: Any, pool: str) -> Named:
    skipped = 2 if pool in ("avg", "max") else 0
    own = pooling(pool, model.config.hidden_size, pooler=TwoTokens)
    last = Pool("audio", own, norm=model.layernorm, skipped=skipped)
    blocks = [(f"encoder.layer.{i}", Block("audio", each)) for i, each in enumerate(model.layers)]
    return [("embeddings", Start("audio", model.embeddings)), *blocks, ("pool", last)]


def _whisper(model: WhisperEncoder, pool: str) -> Named:
    last = Pool("audio", pooling(pool, model.config.d_model), norm=model.layer_norm)
    blocks = [(f"layers.{i}", Block("audio", block)) for i, block in enumerate(model.layers)]
    return [("embeddings", WhisperStart(model)), *blocks, ("pool", last)]


def _htsat(model: Any, pool: str) -> Named:
    encoder = model.audio_encoder
    layers: Named = [("audio_encoder.patch_embed", HTSATStart(encoder))]
    for i, (stage, size) in enumerate(zip(encoder.layers, encoder.input_resolutions)):
        name = f"audio_encoder.layers.{i}"
        of_map = partial(Block, "audio", input_dimensions=size)
        layers += [(f"{name}.blocks.{j}", of_map(block)) for j, block in enumerate(stage.blocks)]
        if stage.downsample is not None:
            layers.append((f"{name}.downsample", of_map(stage.downsample)))
    return [*layers, ("pool", Pool("audio", FoldedMean(encoder), norm=encoder.norm))]


AST_HOP, AST_WINDOW = 160, 400  # samples, which ASTFeatureExtractor has no arguments for


def _ast_reads(config: ASTConfig, values: Mapping[str, Any], seconds: float | None) -> AudioInput:
    values = {**values, "num_mel_bins": config.num_mel_bins, "max_length": config.max_length}
    samples = (config.max_length - 1) * AST_HOP + AST_WINDOW
    shape = (config.max_length, config.num_mel_bins)
    return AudioInput("ASTFeatureExtractor", values, samples, shape)


def _whisper_reads(
    config: WhisperConfig, values: Mapping[str, Any], seconds: float | None
) -> AudioInput:
    hop, rate = values.get("hop_length", 160), values.get("sampling_rate", 16_000)
    frames = 2 * config.max_source_positions
    values = {**values, "feature_size": config.num_mel_bins, "chunk_length": frames * hop // rate}
    shape = (config.num_mel_bins, frames)
    return AudioInput("WhisperFeatureExtractor", values, frames * hop, shape)


def _clap_reads(
    config: ClapAudioConfig, values: Mapping[str, Any], seconds: float | None
) -> AudioInput:
    hop, rate = values.get("hop_length", 480), values.get("sampling_rate", 48_000)
    samples = round(rate * (values.get("max_length_s", 10) if seconds is None else seconds))
    most = (config.spec_size * (config.spec_size // config.num_mel_bins) - 1) * hop
    if not hop <= samples <= most:
        raise ValueError(
            f"a clip of {samples / rate:g} seconds; HTSAT with spec_size={config.spec_size} and "
            f"num_mel_bins={config.num_mel_bins} takes {hop / rate:g} to {most / rate:.4g}; give "
            "--audio-seconds"
        )
    values = {**values, "feature_size": config.num_mel_bins, "truncation": "rand_trunc"}
    shape = (1, samples // hop + 1, config.num_mel_bins)
    return AudioInput("ClapFeatureExtractor", values, samples, shape)


def _whisper_seconds(seconds: float) -> Mapping[str, Any]:
    if seconds != round(seconds):
        raise ValueError(
            f"--audio-seconds {seconds:g}: Whisper's extractor takes whole seconds; give "
            f"{math.ceil(seconds)}"
        )
    return {"max_source_positions": 50 * round(seconds)}


FAMILIES = {  # by the model_type of the configuration
    "audio-spectrogram-transformer": AudioFamily(
        "ASTModel",
        ("pooler", "avg", "max", "attention"),
        layers=_ast,
        seconds=lambda seconds: {"max_length": round(100 * seconds)},
        reads=_ast_reads,
    ),
    "clap_audio_model": AudioFamily(
        "ClapAudioModel",
        ("avg",),
        not_keys=("hidden_size", "num_hidden_layers"),
        layers=_htsat,
        width=lambda config: config.patch_embeds_hidden_size * 2 ** (len(config.depths) - 1),
        reads=_clap_reads,
    ),
    "whisper": AudioFamily(
        "WhisperEncoder",
        ("avg", "max", "attention"),
        layers=_whisper,
        seconds=_whisper_seconds,
        reads=_whisper_reads,
    ),
}

# -- published models


def _whisper_preset(size: str, layers: int, width: int, heads: int, bins: int = 80) -> Preset:
    sizes = {"encoder_layers": layers, "encoder_attention_heads": heads, "num_mel_bins": bins}
    widths = {"d_model": width, "encoder_ffn_dim": 4 * width}
    return Preset(f"openai/whisper-{size}", "whisper", {**sizes, **widths})


PRESETS = {
    "ast-finetuned-audioset-10-10-0.4593": Preset(
        "MIT/ast-finetuned-audioset-10-10-0.4593", "audio-spectrogram-transformer"
    ),
    "clap-htsat-unfused": Preset("laion/clap-htsat-unfused", "clap_audio_model"),
    "whisper-tiny": _whisper_preset("tiny", 4, 384, 6),
    "whisper-base": _whisper_preset("base", 6, 512, 8),
    "whisper-small": _whisper_preset("small", 12, 768, 12),
    "whisper-medium": _whisper_preset("medium", 24, 1024, 16),
    "whisper-large-v3": _whisper_preset("large-v3", 32, 1280, 20, 128),
}
ALIASES = {  # what people type -> the preset; in small letters
    "ast": "ast-finetuned-audioset-10-10-0.4593",
    "clap": "clap-htsat-unfused",
    "htsat": "clap-htsat-unfused",
}
CATALOGUE = Catalogue(
    "audio", "audio_config", FAMILIES, PRESETS, ALIASES, example="laion/clap-htsat-unfused"
)

# -- the tower


def audio_tower(name: str, seconds: float | None = None) -> Tower:
    """The tower of `name` = hf:WHERE[:key=value,...] for clips of `seconds`; None: as long as the
    model was made for. It has no head yet.

    WHERE: a preset, a local folder with a config.json, or a Hugging Face id, of AST, of Whisper, or
    of CLAP. Without `pool` its features are the library's pooled output; Whisper has none, and
    takes the mean. `config["audio_input"]` has the fields of `AudioInput`. Errors: ValueError,
    FileNotFoundError.
    """
    (config, hub_id, family, pool, _), found, reads = _configured(name, seconds)
    with torch.device("meta"):
        model = with_exact_statistics(family.made(config))
        layers = family.layers(model, pool)
    specs = cut(
        "audio",
        model,
        layers,
        initialise=partial(_initialise, model=model),
        state=saved_state(model),
    )
    record = {
        "library": "transformers",
        "architecture": family.model,
        "pool": pool,
        "hub_id": hub_id,
        "audio_input": reads,
        "extractor_found": found,
        "config": config.to_dict(),
    }
    inputs = partial(example, reads["shape"])
    return Tower("audio", name, family.width(config), specs, record, inputs)


def audio_input(name: str, seconds: float | None = None) -> dict[str, Any]:
    """The `config["audio_input"]` of the tower that `audio_tower` makes of the same arguments,
    without building it. Errors: as there."""
    return _configured(name, seconds)[2]


def _configured(name: str, seconds: float | None) -> tuple[Chosen, bool, dict[str, Any]]:
    """What a tower's name says, with the configuration for clips of `seconds`; whether an extractor
    was found; and the fields of `AudioInput`."""
    chosen = CATALOGUE.read(name)
    family, values = chosen.family, chosen.values
    if seconds is not None:
        values = {**values, **family.seconds(seconds)}
    config = remade(name, chosen.config, values)
    _check(name, config)
    published = _published(split_name(name)[0].removeprefix(HF))
    reads = family.reads(config, published or {}, seconds)
    fields = {**vars(reads), "shape": list(reads.shape)}
    return chosen._replace(config=config), published is not None, fields


def is_audio(base: str) -> bool:
    """Is what `hf:` names (without overrides) one of these, and no model of images?"""
    return CATALOGUE.find(base)[0].model_type in FAMILIES


def _published(where: str) -> dict[str, Any] | None:
    """The arguments of the extractor in the model's folder; None where there is none; none of a
    preset, whose extractor is the library's default."""
    return {} if CATALOGUE.preset_of(where) else extractor_values(where)


def extractor_values(where: str) -> dict[str, Any] | None:
    """The arguments of the feature extractor in a folder of transformers or on the hub; None where
    it has none. Errors: ValueError for sizes that no extractor has."""
    for file in (Path(where) / name for name in EXTRACTORS):
        if file.is_file():
            read_model_config(file)
    try:
        made = AutoFeatureExtractor.from_pretrained(where, trust_remote_code=False)
    except (OSError, ValueError, KeyError):
        return None
    derived = ("feature_extractor_type", "processor_class", "nb_max_samples", "nb_max_frames")
    return {
        key: value
        for key, value in made.to_dict().items()
        if key not in derived and isinstance(value, (bool, int, float, str))
    }


def refuse_fusion(what: str, config: PreTrainedConfig) -> None:
    """Raise ValueError for CLAP's audio model with feature fusion; `what` has this
    configuration."""
    if getattr(config, "enable_fusion", False):
        raise ValueError(
            f"{what} fuses four spectrograms of a sound (enable_fusion), and which sounds it does "
            "so for depends on their lengths; give a model without, such as "
            "laion/clap-htsat-unfused"
        )


def _check(name: str, config: PreTrainedConfig) -> None:
    refuse_fusion(f"audio tower {name!r}", config)
    if getattr(config, "encoder_layerdrop", 0):
        raise ValueError(
            f"audio tower {name!r} leaves out whole blocks at random (encoder_layerdrop); stages "
            "cannot agree on them: set it to 0 in its config.json"
        )
    size = getattr(config, "patch_size", 1)
    if not isinstance(size, int):
        raise ValueError(f"audio tower {name!r}: patch_size={size} must be an integer")
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(heads, (list, tuple)) and len(heads) != len(config.depths):
        raise ValueError(
            f"audio tower {name!r}: num_attention_heads and depths must be equally many integers, "
            f"not {list(heads)} and {list(config.depths)}"
        )


def example(shape: Sequence[int], samples: int) -> dict[str, Tensor]:
    """So many inputs of one `shape` on the meta device, as `Tower.example`."""
    return {READS: torch.empty(samples, *shape, device="meta")}


def _initialise(layer: Layer, model: PreTrainedModel) -> None:
    initialise(layer, model)
    if isinstance(layer, WhisperStart):  # the library's rule is of the whole encoder
        layer.embed_positions.weight.copy_(sinusoids(*layer.embed_positions.weight.shape))
