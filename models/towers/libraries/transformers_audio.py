"""Audio towers of transformers, `hf:WHERE`: AST, CLAP's HTSAT and Whisper's encoder, cut into
layers.

B micro-batch, T frames of a spectrogram, F mel bins, N tokens, D width.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    ASTConfig,
    ASTModel,
    AutoFeatureExtractor,
    ClapAudioConfig,
    ClapAudioModel,
    PreTrainedConfig,
    PreTrainedModel,
    WhisperConfig,
)
from transformers.models.clap.modeling_clap import ClapAudioEncoder
from transformers.models.whisper.modeling_whisper import WhisperEncoder, sinusoids

from models.towers.layers import Layer, Tower, cut
from models.towers.libraries.configurations import (
    Preset,
    find_config,
    initialise,
    preset_of,
    saved_state,
)
from models.towers.names import parse_overrides, refuse, split_name
from models.towers.pooling import ADDED, AttentionPool, MaxPool, MeanPool
from models.towers.recording.precision import with_exact_statistics

HF = "hf:"  # how the names of these towers begin
READS = "input_features"

# -- layers


class ASTStart(Layer):
    """`input_features` [B, T, F] -> `audio_hidden` [B, N, D], of which the first two tokens are
    none of patches."""

    reads, makes, drops = (READS,), ("audio_hidden",), (READS,)

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def compute(self, input_features: Tensor) -> Tensor:
        return self.embeddings(input_features.to(next(self.embeddings.parameters()).dtype))


class WhisperStart(Layer):
    """`input_features` [B, F, T] -> `audio_hidden` [B, T/2, D]: two convolutions and sinusoidal
    positions, which do not learn."""

    reads, makes, drops = (READS,), ("audio_hidden",), (READS,)

    def __init__(self, encoder: WhisperEncoder) -> None:
        super().__init__()
        self.conv1, self.conv2 = encoder.conv1, encoder.conv2
        self.embed_positions, self.dropout = encoder.embed_positions, encoder.dropout
        # the library's parameter without a gradient; as a buffer nothing waits for one
        fixed = self.embed_positions.weight.data
        del self.embed_positions.weight
        self.embed_positions.register_buffer("weight", fixed)

    def compute(self, input_features: Tensor) -> Tensor:
        made = functional.gelu(self.conv1(input_features.to(self.conv1.weight.dtype)))
        made = functional.gelu(self.conv2(made)).permute(0, 2, 1)
        positions = torch.arange(self.embed_positions.num_embeddings, device=made.device)
        made = made + self.embed_positions(positions).to(made.dtype)
        return functional.dropout(made, p=self.dropout, training=self.training)


class AudioBlock(Layer):
    """`audio_hidden` [B, N, D] -> `audio_hidden`: one block of the library, which masks nothing."""

    reads = makes = ("audio_hidden",)

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def compute(self, audio_hidden: Tensor) -> Tensor:
        return self.block(audio_hidden, None)


class HTSATStart(Layer):
    """`input_features` [B, 1, T, F] -> `audio_hidden` [B, N, D]: batch normalisation by mel bin,
    the spectrogram folded into a square, patches."""

    reads, makes, drops = (READS,), ("audio_hidden",), (READS,)

    def __init__(self, encoder: ClapAudioEncoder) -> None:
        super().__init__()
        self.batch_norm, self.patch_embed = encoder.batch_norm, encoder.patch_embed
        # what the library's method that folds reads of its `self`
        self.spec_size, self.freq_ratio = encoder.spec_size, encoder.freq_ratio

    def compute(self, input_features: Tensor) -> Tensor:
        by_bin = input_features.to(self.patch_embed.proj.weight.dtype).transpose(1, 3)
        normal = self.batch_norm(by_bin).transpose(1, 3)
        return self.patch_embed(ClapAudioEncoder.reshape_mel2img(self, normal))


class HTSATBlock(Layer):
    """`audio_hidden` [B, N, D] -> `audio_hidden`: one block of HTSAT, or what merges its patches
    two by two; `size`: of the map of tokens."""

    reads = makes = ("audio_hidden",)

    def __init__(self, block: nn.Module, size: tuple[int, int]) -> None:
        super().__init__()
        self.block, self.size = block, size

    def compute(self, audio_hidden: Tensor) -> Tensor:
        made = self.block(audio_hidden, self.size)
        return made if isinstance(made, Tensor) else made[0]


class AudioPool(Layer):
    """`audio_hidden` [B, N, D] -> `audio_features` [B, D]: `norm`, then `pool` of the tokens behind
    the first `skipped`."""

    reads, makes, drops = ("audio_hidden",), ("audio_features",), ("audio_hidden",)

    def __init__(self, norm: nn.Module, pool: nn.Module, skipped: int = 0) -> None:
        super().__init__()
        self.norm, self.pool, self.skipped = norm, pool, skipped
        self.added = ADDED if isinstance(pool, AttentionPool) else None

    def compute(self, audio_hidden: Tensor) -> Tensor:
        return self.pool(self.norm(audio_hidden)[:, self.skipped :])


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

Named = list[tuple[str, Layer]]


@dataclass(frozen=True)
class AudioInput:
    """What a tower reads: by the class `extractor` of transformers with the arguments `values`, of
    a clip of `num_samples`; `shape` of one sample's `input_features`."""

    extractor: str
    values: Mapping[str, Any]
    num_samples: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Family:
    """An audio model of transformers: which configuration keys a user may override, what its
    features can be pooled by (the library's own first), how it is cut, and what it reads.

    `seconds`: to the keys of the configuration that follow the length of a clip.
    `reads`: of a configuration, the values of a published extractor and the length of a clip.
    """

    model: Callable[[Any], PreTrainedModel]
    keys: Mapping[str, type]
    pools: tuple[str, ...]
    layers: Callable[[Any, str], Named]
    width: Callable[[Any], int]
    seconds: Callable[[float], Mapping[str, Any]]
    reads: Callable[[Any, Mapping[str, Any], float | None], AudioInput]


def _pool(pool: str, width: int, own: Callable[[], nn.Module]) -> nn.Module:
    made: dict[str, Callable[[], nn.Module]] = {
        "max": MaxPool,
        "avg": MeanPool,
        "attention": partial(AttentionPool, width),
    }
    return made[pool]() if pool in made else own()


def _ast(model: ASTModel, pool: str) -> Named:
    skipped = 2 if pool in ("avg", "max") else 0
    last = AudioPool(
        model.layernorm, _pool(pool, model.config.hidden_size, TwoTokens), skipped=skipped
    )
    blocks = [(f"encoder.layer.{i}", AudioBlock(block)) for i, block in enumerate(model.layers)]
    return [("embeddings", ASTStart(model.embeddings)), *blocks, ("pool", last)]


def _whisper(model: WhisperEncoder, pool: str) -> Named:
    last = AudioPool(model.layer_norm, _pool(pool, model.config.d_model, MeanPool))
    blocks = [(f"layers.{i}", AudioBlock(block)) for i, block in enumerate(model.layers)]
    return [("embeddings", WhisperStart(model)), *blocks, ("pool", last)]


def _htsat(model: ClapAudioModel, pool: str) -> Named:
    encoder = model.audio_encoder
    layers: Named = [("audio_encoder.patch_embed", HTSATStart(encoder))]
    for i, (stage, size) in enumerate(zip(encoder.layers, encoder.input_resolutions)):
        name = f"audio_encoder.layers.{i}"
        layers += [
            (f"{name}.blocks.{j}", HTSATBlock(block, size)) for j, block in enumerate(stage.blocks)
        ]
        if stage.downsample is not None:
            layers.append((f"{name}.downsample", HTSATBlock(stage.downsample, size)))
    return [*layers, ("pool", AudioPool(encoder.norm, FoldedMean(encoder)))]


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


def _whisper_model(config: WhisperConfig) -> WhisperEncoder:
    return WhisperEncoder(config)


_DROPOUTS = {"hidden_dropout_prob": float, "attention_probs_dropout_prob": float}

FAMILIES = {  # by the model_type of the configuration
    "audio-spectrogram-transformer": Family(
        model=ASTModel,
        keys={
            **dict.fromkeys(
                ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
                int,
            ),
            **dict.fromkeys(
                ("patch_size", "frequency_stride", "time_stride", "max_length", "num_mel_bins"), int
            ),
            **_DROPOUTS,
            "hidden_act": str,
            "layer_norm_eps": float,
        },
        pools=("pooler", "avg", "max", "attention"),
        layers=_ast,
        width=lambda config: config.hidden_size,
        seconds=lambda seconds: {"max_length": round(100 * seconds)},
        reads=_ast_reads,
    ),
    "clap_audio_model": Family(
        model=ClapAudioModel,
        keys={
            **dict.fromkeys(("patch_embeds_hidden_size", "window_size", "patch_size"), int),
            **dict.fromkeys(("spec_size", "num_mel_bins", "patch_stride"), int),
            **dict.fromkeys(("depths", "num_attention_heads"), tuple),
            **_DROPOUTS,
            "drop_path_rate": float,
            "mlp_ratio": float,
        },
        pools=("avg",),
        layers=_htsat,
        width=lambda config: config.patch_embeds_hidden_size * 2 ** (len(config.depths) - 1),
        seconds=lambda seconds: {},
        reads=_clap_reads,
    ),
    "whisper": Family(
        model=_whisper_model,
        keys={
            **dict.fromkeys(
                ("d_model", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"), int
            ),
            **dict.fromkeys(("num_mel_bins", "max_source_positions"), int),
            **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), float),
            "activation_function": str,
        },
        pools=("avg", "max", "attention"),
        layers=_whisper,
        width=lambda config: config.d_model,
        seconds=_whisper_seconds,
        reads=_whisper_reads,
    ),
}

# -- published models


def _whisper_sizes(layers: int, width: int, heads: int, bins: int = 80) -> dict[str, int]:
    return {
        "encoder_layers": layers,
        "d_model": width,
        "encoder_attention_heads": heads,
        "encoder_ffn_dim": 4 * width,
        "num_mel_bins": bins,
    }


PRESETS = {
    "ast-finetuned-audioset-10-10-0.4593": Preset(
        "MIT/ast-finetuned-audioset-10-10-0.4593", ASTConfig
    ),
    "clap-htsat-unfused": Preset("laion/clap-htsat-unfused", ClapAudioConfig),
    "whisper-tiny": Preset("openai/whisper-tiny", WhisperConfig, _whisper_sizes(4, 384, 6)),
    "whisper-base": Preset("openai/whisper-base", WhisperConfig, _whisper_sizes(6, 512, 8)),
    "whisper-small": Preset("openai/whisper-small", WhisperConfig, _whisper_sizes(12, 768, 12)),
    "whisper-medium": Preset("openai/whisper-medium", WhisperConfig, _whisper_sizes(24, 1024, 16)),
    "whisper-large-v3": Preset(
        "openai/whisper-large-v3", WhisperConfig, _whisper_sizes(32, 1280, 20, 128)
    ),
}
ALIASES = {  # what people type -> the preset; in small letters
    "ast": "ast-finetuned-audioset-10-10-0.4593",
    "clap": "clap-htsat-unfused",
    "htsat": "clap-htsat-unfused",
}

# -- the tower


def audio_tower(name: str, seconds: float | None = None) -> Tower:
    """The tower of `name` = hf:WHERE[:key=value,...] for clips of `seconds`; None: as long as the
    model was made for. It has no head yet.

    WHERE: a preset, a local folder with a config.json, or a Hugging Face id, of AST, of Whisper, or
    of CLAP. Without `pool` its features are the library's pooled output; Whisper has none, and
    takes the mean. `config["audio_input"]` has the fields of `AudioInput`. Errors: ValueError,
    FileNotFoundError.
    """
    base, overrides = split_name(name)
    config, hub_id = _find(base)
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"audio tower {name!r} is of type {config.model_type!r}; supported types: "
            f"{', '.join(sorted(FAMILIES))}, and CLAP's models, which hold one of them"
        )
    family = FAMILIES[config.model_type]
    values = parse_overrides(name, overrides, {**family.keys, "pool": str})
    pool = values.pop("pool", family.pools[0])
    if pool not in family.pools:
        raise refuse(f"audio tower {name!r}: pool", pool, family.pools)
    values = {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}
    if seconds is not None:
        values |= family.seconds(seconds)
    config = type(config).from_dict({**config.to_dict(), **values})
    _check(name, config)
    published = _published(base)
    reads = family.reads(config, published or {}, seconds)
    with torch.device("meta"):
        model = with_exact_statistics(family.model(config))
        layers = family.layers(model, pool)
    specs = cut(
        "audio",
        model,
        layers,
        initialise=partial(_initialise, model=model),
        dropped=(),
        state=saved_state(model),
    )
    record = {
        "library": "transformers",
        "architecture": type(model).__name__,
        "pool": pool,
        "hub_id": hub_id,
        "audio_input": {**vars(reads), "shape": list(reads.shape)},
        "extractor_found": published is not None,
        "config": config.to_dict(),
    }
    example = partial(_example, reads.shape)
    return Tower(
        branch="audio",
        name=name,
        width=family.width(config),
        specs=specs,
        config=record,
        example=example,
    )


def is_audio(base: str) -> bool:
    """Is what `hf:` names (without overrides) one of these, and no model of images?"""
    return _find(base)[0].model_type in FAMILIES


def hub_id_of(name: str) -> str | None:
    """The id on the hub of a preset that is named in any of its ways; None: it is no preset."""
    known = preset_of(name.removeprefix(HF), PRESETS, ALIASES)
    return PRESETS[known].hub_id if known else None


def _find(base: str) -> tuple[PreTrainedConfig, str | None]:
    return find_config(
        f"audio tower {HF}",
        base.removeprefix(HF),
        "audio_config",
        presets=PRESETS,
        aliases=ALIASES,
        example="laion/clap-htsat-unfused",
    )


def _published(base: str) -> dict[str, Any] | None:
    """The arguments of the extractor in the model's folder; None where there is none; none of a
    preset, whose extractor is the library's default."""
    where = base.removeprefix(HF)
    if preset_of(where, PRESETS, ALIASES):
        return {}
    return extractor_values(where)


def extractor_values(where: str) -> dict[str, Any] | None:
    """The arguments of the feature extractor in a folder of transformers or on the hub; None where
    it has none."""
    try:
        made = AutoFeatureExtractor.from_pretrained(where)
    except (OSError, ValueError, KeyError):
        return None
    derived = ("feature_extractor_type", "processor_class", "nb_max_samples", "nb_max_frames")
    return {
        key: value
        for key, value in made.to_dict().items()
        if key not in derived and isinstance(value, (bool, int, float, str))
    }


def refuse_fusion(what: str, config: PreTrainedConfig) -> None:
    """Raise ValueError for CLAP's audio model with feature fusion; `what` has this configuration."""
    if getattr(config, "enable_fusion", False):
        raise ValueError(
            f"{what} fuses four spectrograms of a sound (enable_fusion), and which sounds it does so "
            "for depends on their lengths; give a model without, such as laion/clap-htsat-unfused"
        )


def _check(name: str, config: PreTrainedConfig) -> None:
    refuse_fusion(f"audio tower {name!r}", config)
    if getattr(config, "encoder_layerdrop", 0):
        raise ValueError(
            f"audio tower {name!r} leaves out whole blocks at random (encoder_layerdrop); stages "
            "cannot agree on them: set it to 0 in its config.json"
        )
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(heads, (list, tuple)) and len(heads) != len(config.depths):
        raise ValueError(
            f"audio tower {name!r}: num_attention_heads and depths must be equally many integers, "
            f"not {list(heads)} and {list(config.depths)}"
        )


def _example(shape: tuple[int, ...], samples: int) -> dict[str, Tensor]:
    return {READS: torch.empty(samples, *shape, device="meta")}


def _initialise(layer: Layer, model: PreTrainedModel) -> None:
    initialise(layer, model)
    if isinstance(layer, WhisperStart):  # the library's rule is of the whole encoder
        layer.embed_positions.weight.copy_(sinusoids(*layer.embed_positions.weight.shape))
