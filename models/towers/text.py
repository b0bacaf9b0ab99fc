"""Text towers: transformers' BERT, RoBERTa, DistilBERT and CLIP text encoders, cut into layers.

B micro-batch, L tokens, W width.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    BertConfig,
    BertModel,
    CLIPTextConfig,
    CLIPTextModel,
    DistilBertConfig,
    DistilBertModel,
    PreTrainedConfig,
    RobertaConfig,
    RobertaModel,
    XLMRobertaModel,
)
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.models.clip.modeling_clip import CLIPEncoderLayer, CLIPTextEmbeddings

from models.towers.layers import Layer, Tower, cut
from models.towers.libraries import open_clip
from models.towers.names import alike, join_name, nearest, parse_overrides, refuse, split_name
from models.towers.pooling import ADDED, AttentionPool, FirstPool, LastPool, MaxPool, MeanPool

# -- layers


class TextEmbeddings(Layer):
    """`input_ids` [B, L] -> `text_hidden` [B, L, W]."""

    reads, makes, drops = ("input_ids",), ("text_hidden",), ("input_ids",)

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def compute(self, input_ids: Tensor) -> Tensor:
        return self.embeddings(input_ids=input_ids)


class EotEmbeddings(TextEmbeddings):
    """Also makes `text_pool_position` [B] int64, where the text ends: the ids do not travel to the
    layer that pools there.

    `eos_token_id` None: the place of the highest id, which is the rule of CLIP's first release and
    of every configuration with `eos_token_id` 2 in transformers (it was wrong in the published
    files).
    """

    makes = ("text_hidden", "text_pool_position")

    def __init__(self, embeddings: nn.Module, eos_token_id: int | None) -> None:
        super().__init__(embeddings)
        self.eos_token_id = eos_token_id

    def compute(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        marks = input_ids if self.eos_token_id is None else (input_ids == self.eos_token_id).int()
        return super().compute(input_ids), marks.argmax(dim=-1)  # [B, L, W], [B]


class TextBlock(Layer):
    """`text_hidden` [B, L, W] -> `text_hidden`; `attention_mask` [B, L] becomes what the library's
    block wants of it."""

    reads, makes = ("text_hidden", "attention_mask"), ("text_hidden",)

    def __init__(self, block: nn.Module, config: PreTrainedConfig, causal: bool = False) -> None:
        super().__init__()
        self.block, self.config, self.causal = block, config, causal

    def compute(self, text_hidden: Tensor, attention_mask: Tensor) -> Tensor:
        # the library reads the mask to leave it out where nothing is padded; meta tensors have
        # nothing to read
        padding = None if attention_mask.is_meta else attention_mask
        if self.causal:
            mask = create_causal_mask(
                config=self.config,
                inputs_embeds=text_hidden,
                attention_mask=padding,
                past_key_values=None,
            )
            return self.block(text_hidden, mask, is_causal=True)
        return self.block(
            text_hidden,
            create_bidirectional_mask(
                config=self.config, inputs_embeds=text_hidden, attention_mask=padding
            ),
        )


class TextPool(Layer):
    """`text_hidden` [B, L, W] -> `text_features` [B, W]: `pool` of the tokens that `attention_mask`
    [B, L] keeps, behind the final norm if there is one."""

    reads, makes = ("text_hidden", "attention_mask"), ("text_features",)
    drops = reads

    def __init__(self, pool: nn.Module, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.pool, self.norm = pool, nn.Identity() if norm is None else norm
        self.added = ADDED if isinstance(pool, AttentionPool) else None

    def compute(self, text_hidden: Tensor, attention_mask: Tensor) -> Tensor:
        return self.pool(self.norm(text_hidden), attention_mask)


class EotPool(Layer):
    """`text_hidden` [B, L, W] -> `text_features` [B, W]: the token at `text_pool_position` [B],
    behind the final norm if there is one."""

    reads, makes = ("text_hidden", "attention_mask", "text_pool_position"), ("text_features",)
    drops = reads

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = nn.Identity() if norm is None else norm

    def compute(
        self, text_hidden: Tensor, attention_mask: Tensor, text_pool_position: Tensor
    ) -> Tensor:
        return self.norm(text_hidden)[
            torch.arange(text_hidden.shape[0], device=text_hidden.device), text_pool_position
        ]


# -- architectures


def _cut_bert(model: nn.Module, pool: str, eos_token_id: int | None) -> list[tuple[str, Layer]]:
    blocks = [
        (f"encoder.layer.{i}", TextBlock(block, model.config))
        for i, block in enumerate(model.encoder.layer)
    ]
    return _ends(model, blocks, pool, eos_token_id, pooler=model.pooler)


def _cut_distilbert(
    model: nn.Module, pool: str, eos_token_id: int | None
) -> list[tuple[str, Layer]]:
    blocks = [
        (f"transformer.layer.{i}", TextBlock(block, model.config))
        for i, block in enumerate(model.transformer.layer)
    ]
    return _ends(model, blocks, pool, eos_token_id)


def _cut_clip(model: nn.Module, pool: str, eos_token_id: int | None) -> list[tuple[str, Layer]]:
    if eos_token_id is None and model.config.eos_token_id != 2:  # 2: see EotEmbeddings
        eos_token_id = model.config.eos_token_id
    if (
        pool == "eos"
        and eos_token_id is not None
        and not (isinstance(eos_token_id, int) and eos_token_id < model.config.vocab_size)
    ):
        raise ValueError(
            f"eos_token_id={eos_token_id} must be one id below "
            f"vocab_size={model.config.vocab_size}, for CLIP pools there; give the tokenizer's own"
        )
    blocks = [
        (f"encoder.layers.{i}", TextBlock(block, model.config, causal=True))
        for i, block in enumerate(model.encoder.layers)
    ]
    return _ends(model, blocks, pool, eos_token_id, norm=model.final_layer_norm)


def _ends(
    model: nn.Module,
    blocks: list[tuple[str, Layer]],
    pool: str,
    eos_token_id: int | None,
    pooler: nn.Module | None = None,
    norm: nn.Module | None = None,
) -> list[tuple[str, Layer]]:
    """The blocks between the embeddings and the layer that pools."""
    if pool == "eos":
        return [
            ("embeddings", EotEmbeddings(model.embeddings, eos_token_id)),
            *blocks,
            ("pooler", EotPool(norm)),
        ]
    modules = {
        "mean": MeanPool,
        "max": MaxPool,
        "first": FirstPool,
        "last": LastPool,
        "pooler": lambda: FirstPool(pooler),
        "attention": lambda: AttentionPool(model.config.hidden_size),
    }
    return [
        ("embeddings", TextEmbeddings(model.embeddings)),
        *blocks,
        ("pooler", TextPool(modules[pool](), norm)),
    ]


_BERT_KEYS = {
    "hidden_size": int,
    "num_hidden_layers": int,
    "num_attention_heads": int,
    "intermediate_size": int,
    "hidden_act": str,
    "hidden_dropout_prob": float,
    "attention_probs_dropout_prob": float,
    "max_position_embeddings": int,
    "type_vocab_size": int,
    "initializer_range": float,
    "layer_norm_eps": float,
}
_DISTILBERT_KEYS = {
    "dim": int,
    "n_layers": int,
    "n_heads": int,
    "hidden_dim": int,
    "activation": str,
    "dropout": float,
    "attention_dropout": float,
    "max_position_embeddings": int,
    "sinusoidal_pos_embds": bool,
    "initializer_range": float,
}
_CLIP_KEYS = {
    "hidden_size": int,
    "num_hidden_layers": int,
    "num_attention_heads": int,
    "intermediate_size": int,
    "hidden_act": str,
    "attention_dropout": float,
    "max_position_embeddings": int,
    "initializer_range": float,
    "initializer_factor": float,
    "layer_norm_eps": float,
}


@dataclass(frozen=True)
class Family:
    """An architecture of transformers: its model, where it is cut, which configuration keys a user
    may override, how the library pools."""

    model: type[nn.Module]
    cut: Callable[[Any, str, int | None], list[tuple[str, Layer]]]
    keys: dict[str, type]
    pool: str

    @property
    def pools(self) -> tuple[str, ...]:
        """All that it can be pooled by."""
        return (*POOLS, "pooler") if self.pool == "pooler" else POOLS


POOLS = ("mean", "first", "last", "eos", "max", "attention")
FAMILIES = {  # by the model_type of the configuration
    "bert": Family(BertModel, _cut_bert, _BERT_KEYS, "pooler"),
    "roberta": Family(RobertaModel, _cut_bert, _BERT_KEYS, "pooler"),
    "xlm-roberta": Family(XLMRobertaModel, _cut_bert, _BERT_KEYS, "pooler"),
    "distilbert": Family(DistilBertModel, _cut_distilbert, _DISTILBERT_KEYS, "first"),
    "clip_text_model": Family(CLIPTextModel, _cut_clip, _CLIP_KEYS, "eos"),
}


@dataclass(frozen=True)
class Preset:
    """A published model: the configuration without asking the hub, and where its weights are."""

    hub_id: str
    config: type[PreTrainedConfig]
    values: dict[str, Any] = field(default_factory=dict)


def _bert(layers: int, width: int, heads: int, vocab_size: int = 30522) -> dict[str, int]:
    """A BERT-shaped encoder; the inner layer of its blocks is four times as wide."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "vocab_size": vocab_size,
    }


_ROBERTA = {
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}  # 514: positions begin after the pad id, 1

PRESETS = {
    "bert-base-uncased": Preset("google-bert/bert-base-uncased", BertConfig),
    "bert-large-uncased": Preset("google-bert/bert-large-uncased", BertConfig, _bert(24, 1024, 16)),
    "bert-tiny": Preset("google/bert_uncased_L-2_H-128_A-2", BertConfig, _bert(2, 128, 2)),
    "bert-mini": Preset("google/bert_uncased_L-4_H-256_A-4", BertConfig, _bert(4, 256, 4)),
    "bert-small": Preset("google/bert_uncased_L-4_H-512_A-8", BertConfig, _bert(4, 512, 8)),
    "bert-medium": Preset("google/bert_uncased_L-8_H-512_A-8", BertConfig, _bert(8, 512, 8)),
    "distilbert-base-uncased": Preset("distilbert/distilbert-base-uncased", DistilBertConfig),
    "roberta-base": Preset("FacebookAI/roberta-base", RobertaConfig, _ROBERTA),
    "roberta-large": Preset(
        "FacebookAI/roberta-large", RobertaConfig, {**_ROBERTA, **_bert(24, 1024, 16, 50265)}
    ),
    "minilm-l6": Preset("nreimers/MiniLM-L6-H384-uncased", BertConfig, _bert(6, 384, 12)),
    "minilm-l12": Preset("microsoft/MiniLM-L12-H384-uncased", BertConfig, _bert(12, 384, 12)),
    "clip-text-base": Preset("openai/clip-vit-base-patch32", CLIPTextConfig),
    "clip-text-large": Preset(
        "openai/clip-vit-large-patch14",
        CLIPTextConfig,
        {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
    ),
}

# -- the tower


OWN: dict[str, Callable[[str, int, int], Tower]] = {}
"""Towers of one's own: how names begin -> from a whole name, the size of the vocabulary and the
most tokens to a tower without a head."""


LIBRARIES = {open_clip.PREFIX: open_clip.text_tower}
"""How names begin -> from the arguments of `text_tower` to a tower without a head."""


def full_name(name: str) -> str:
    """The name with its library, for those that people type without: `ViT-B/32` is
    `open_clip:ViT-B-32`."""
    base, overrides = split_name(name)
    if base in OWN or base in PRESETS or Path(base).expanduser().exists():
        return name
    found = alike(base, open_clip.names())
    return join_name(open_clip.PREFIX + found[0], overrides) if len(found) == 1 else name


def text_tower(
    name: str,
    vocab_size: int | None,
    max_text_tokens: int,
    pad_token_id: int | None = None,
    eos_token_id: int | None = None,
) -> Tower:
    """The tower of `name` = PRESET, local folder with a config.json, Hugging Face id, or
    open_clip:MODEL for the text side of one of OpenCLIP's models, each with [:key=value,...];
    without a head.

    `vocab_size`, `pad_token_id`, `eos_token_id` are the tokenizer's; None keeps the
    configuration's. `eos_token_id` is read with `pool=eos` only. Without `pool` the features are
    the library's pooled output (BERT, RoBERTa: pooler_output; DistilBERT: the first token; CLIP:
    the final norm at the end of the text).
    """
    name = full_name(name)
    base, overrides = split_name(name)
    if base in OWN:
        return OWN[base](name, vocab_size, max_text_tokens)
    for prefix, tower in LIBRARIES.items():
        if base.startswith(prefix):
            return tower(name, vocab_size, max_text_tokens, pad_token_id, eos_token_id)
    config, hub_id = _find_config(base)
    family = _family(base, config)
    values = parse_overrides(name, overrides, {**family.keys, "pool": str})
    pool = values.pop("pool", family.pool)
    if pool not in family.pools:
        raise refuse(f"text tower {name!r}: pool", pool, family.pools)
    if pool == "eos" and family.pool != "eos" and eos_token_id is None:
        raise ValueError(
            f"text tower {name!r}: the tokenizer has no token that ends a text; give pool=last, or "
            "another tokenizer"
        )
    given = {"vocab_size": vocab_size, "pad_token_id": pad_token_id}
    config = _changed(
        config, {**values, **{key: value for key, value in given.items() if value is not None}}
    )
    _check(name, config, max_text_tokens)
    with torch.device("meta"):
        model = family.model(config)
        layers = family.cut(model, pool, eos_token_id)
    unused = ("pooler.",) if family.pool == "pooler" != pool else ()
    specs = cut("text", model, layers, partial(_initialise, model=model), unused)
    width = model.config.hidden_size  # DistilBERT maps it to dim
    record = {
        "library": "transformers",
        "architecture": family.model.__name__,
        "pool": pool,
        "max_text_tokens": max_text_tokens,
        "hub_id": hub_id,
        "eos_token_id": eos_token_id,
        "config": config.to_dict(),
    }
    return Tower("text", name, width, specs, record)


def of_library(base: str) -> tuple[str, str | None]:
    """How the library pools the tower that `base` names (the name without its overrides), and its
    id on the hub if there is one."""
    config, hub_id = _find_config(base)
    return _family(base, config).pool, hub_id


def _family(base: str, config: PreTrainedConfig) -> Family:
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"text tower {base!r} is of type {config.model_type!r}; supported types: "
            f"{', '.join(sorted(FAMILIES))}, clip"
        )
    return FAMILIES[config.model_type]


def _find_config(base: str) -> tuple[PreTrainedConfig, str | None]:
    """The configuration of a preset, a local folder or a hub id, and the id on the hub if there is
    one."""
    if base in PRESETS:
        return PRESETS[base].config(**PRESETS[base].values), PRESETS[base].hub_id
    folder = Path(base).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(
                f"text tower {base!r} is a folder without config.json; give a Hugging Face model "
                "folder"
            )
        return _auto_config(str(folder)), None
    if "/" not in base:
        raise ValueError(
            f"text tower {base!r} is not known; did you mean {nearest(base, PRESETS)!r}? Known: "
            f"{', '.join(PRESETS)}, a local folder with a config.json, or a Hugging Face id such "
            "as google-bert/bert-base-uncased"
        )
    if base.count("/") > 1 or base.startswith((".", "/", "~")):
        raise FileNotFoundError(
            f"text tower {base!r} looks like a path but is no folder; give an existing one, or "
            "ORGANISATION/MODEL"
        )
    try:
        return _auto_config(base), base
    except OSError as error:
        raise FileNotFoundError(
            f"text tower {base!r}: its configuration could not be had from the Hugging Face hub; "
            "check the id and the network, or download the model and give its folder"
        ) from error


def _auto_config(where: str) -> PreTrainedConfig:
    """Code that a model brings along is never run: only architectures of transformers itself."""
    config = AutoConfig.from_pretrained(where, trust_remote_code=False)
    return config.text_config if config.model_type == "clip" else config


def _changed(config: PreTrainedConfig, values: dict[str, object]) -> PreTrainedConfig:
    config = copy.deepcopy(config)
    for key, value in values.items():
        setattr(config, key, value)
    return config


def _check(name: str, config: PreTrainedConfig, max_text_tokens: int) -> None:
    if getattr(config, "is_decoder", False):
        raise ValueError(
            f"text tower {name!r} is configured as a decoder (is_decoder); give an encoder"
        )
    if getattr(config, "position_embedding_type", "absolute") != "absolute":
        raise ValueError(
            f"text tower {name!r} has position_embedding_type {config.position_embedding_type!r}; "
            "only 'absolute' is built"
        )
    pad = config.pad_token_id
    if (
        pad is not None
        and config.model_type != "clip_text_model"
        and not 0 <= pad < config.vocab_size
    ):
        raise ValueError(
            f"text tower {name!r}: pad_token_id={pad} must be below "
            f"vocab_size={config.vocab_size}; give the tokenizer's own"
        )
    positions = config.max_position_embeddings
    if config.model_type in ("roberta", "xlm-roberta"):
        positions -= pad + 1  # they count positions from pad + 1
    if not 1 <= max_text_tokens <= positions:
        raise ValueError(
            f"text tower {name!r} has {positions} positions, so max_text_tokens={max_text_tokens} "
            f"must be from 1 to {positions}; lower --max-text-tokens"
            + (
                ""
                if "max_position_embeddings" in name
                else ", or override max_position_embeddings and train from scratch"
            )
        )


def _initialise(layer: Layer, model: Any) -> None:
    """The library's own rules, inner modules first, as its `initialize_weights` does; for CLIP
    those of its authors."""
    layer.apply(model._init_weights)
    for module in layer.modules():
        if isinstance(module, AttentionPool):  # which the library's model does not have
            module.reset_parameters()
        elif isinstance(module, CLIPEncoderLayer):
            _initialise_clip_block(module, model.config)
        elif isinstance(module, CLIPTextEmbeddings):
            nn.init.normal_(
                module.position_embedding.weight, std=0.01 * model.config.initializer_factor
            )


def _initialise_clip_block(block: CLIPEncoderLayer, config: CLIPTextConfig) -> None:
    """What each block adds is smaller the more blocks there are: openai/CLIP,
    `CLIP.initialize_parameters`, which transformers follows but for the attention (it makes
    queries, keys and values smaller instead of the output) and the positions (twice as large)."""
    width, factor = config.hidden_size**-0.5, config.initializer_factor
    output = width * (2 * config.num_hidden_layers) ** -0.5
    attention = block.self_attn
    for linear, std in (
        *((linear, width) for linear in (attention.q_proj, attention.k_proj, attention.v_proj)),
        (attention.out_proj, output),
        (block.mlp.fc1, (2 * config.hidden_size) ** -0.5),
        (block.mlp.fc2, output),
    ):
        nn.init.normal_(linear.weight, std=std * factor)
