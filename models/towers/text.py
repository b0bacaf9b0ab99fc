"""Text towers by name: those of transformers, cut into layers, OpenCLIP's (`libraries/open_clip.py`),
and towers of one's own.

The architectures are in `libraries/transformers_text.py`, their layers in `libraries/text_layers.py`.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from models.towers.layers import LayerSpec, Tower, cut, reset
from models.towers.libraries import open_clip
from models.towers.libraries.configurations import changed, find_config, preset_of, saved_state
from models.towers.libraries.text_layers import TwoLayers
from models.towers.libraries.transformers_text import (
    ALIASES,
    FAMILIES,
    PRESETS,
    Family,
    derived,
    first_position,
    initialise_text,
)
from models.towers.names import (
    HF,
    TWO_LAYERS,
    alike,
    join_name,
    parse_overrides,
    refuse,
    split_name,
)

OWN: dict[str, Callable[[str, int, int], Tower]] = {}
"""Towers of one's own: how names begin -> from a whole name, the size of the vocabulary and the
most tokens to a tower without a head."""

LIBRARIES = {open_clip.PREFIX: open_clip.text_tower}
"""How names begin -> from the arguments of `text_tower` to a tower without a head."""


def full_name(name: str) -> str:
    """The name with its library, for those that people type without: `ViT-B/32` is
    `open_clip:ViT-B-32`; without the `hf:` that image towers of transformers have."""
    base, overrides = split_name(name.removeprefix(HF))
    name = join_name(base, overrides)
    if base in OWN or preset_of(base, PRESETS, ALIASES) or Path(base).expanduser().exists():
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
    the final norm at the end of the text; `Family.pool` of the others). With `mlp_proj=D` they go
    through OpenCLIP's projection of two layers, to D. The towers of published image-text models
    have as many positions as the texts need.
    """
    name = full_name(name)
    base, overrides = split_name(name)
    if base in OWN:
        if vocab_size is None:
            raise ValueError(
                f"text tower {name!r}: it has no configuration that says how many tokens there are; "
                "give vocab_size"
            )
        return OWN[base](name, vocab_size, max_text_tokens)
    for prefix, tower in LIBRARIES.items():
        if base.startswith(prefix):
            return tower(name, vocab_size, max_text_tokens, pad_token_id, eos_token_id)
    config, hub_id = _find(base)
    family = _family(base, config)
    values = parse_overrides(name, overrides, {**family.keys, "pool": str, TWO_LAYERS: int})
    pool, projected = values.pop("pool", family.pool), values.pop(TWO_LAYERS, None)
    if projected is not None and projected < 1:
        raise ValueError(f"text tower {name!r}: {TWO_LAYERS}={projected} must be at least 1")
    if pool not in family.pools:
        raise refuse(f"text tower {name!r}: pool", pool, family.pools)
    end = _end(name, family, config, vocab_size, eos_token_id) if pool == "eos" else None
    given = {"vocab_size": vocab_size, "pad_token_id": pad_token_id}
    values |= {key: value for key, value in given.items() if value is not None}
    if family.contrastive and "max_position_embeddings" not in values:
        values["max_position_embeddings"] = max(config.max_position_embeddings, max_text_tokens)
    config = changed(config, {**derived(config, values), **values})
    _check(name, config, max_text_tokens)
    with torch.device("meta"):
        model = family.model(config)
        layers = family.layers(model, pool, end, max_text_tokens)
    specs = cut(
        "text",
        model,
        layers,
        initialise=partial(initialise_text, model=model),
        dropped=family.unused(pool),
        state=saved_state(model),
    )
    # DistilBERT and others map hidden_size to a name of their own
    width = config.projection_size if pool == "head" else config.hidden_size
    record = {
        "library": "transformers",
        "architecture": family.model.__name__,
        "pool": pool,
        "max_text_tokens": max_text_tokens,
        "hub_id": hub_id,
        "eos_token_id": eos_token_id,
        "config": config.to_dict(),
    }
    if projected is not None:
        with torch.device("meta"):
            added = TwoLayers(width, projected)
        specs, width = (*specs, LayerSpec("text.proj", "text", added, reset)), projected
        record[TWO_LAYERS] = projected
    if any("language_ids" in layer.reads_if_given for _, layer in layers):
        record["languages"] = {
            "names": getattr(config, "lang2id", {}),
            "number": config.n_langs,
            "default": config.lang_id,
        }
    return Tower("text", name, width, specs, record)


def of_library(base: str) -> tuple[Family, str | None]:
    """The architecture of the tower that `base` names (the name without its overrides), and its id
    on the hub if there is one."""
    config, hub_id = _find(base)
    return _family(base, config), hub_id


def hub_id_of(name: str) -> str | None:
    """The id on the hub of a preset that is named in any of its ways; None: it is no preset."""
    known = preset_of(name.removeprefix(HF), PRESETS, ALIASES)
    return PRESETS[known].hub_id if known else None


def _find(base: str) -> tuple[PreTrainedConfig, str | None]:
    return find_config(
        "text tower",
        base,
        "text_config",
        presets=PRESETS,
        aliases=ALIASES,
        example="google-bert/bert-base-uncased",
    )


def _family(base: str, config: PreTrainedConfig) -> Family:
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"text tower {base!r} is of type {config.model_type!r}; supported types: "
            f"{', '.join(sorted(FAMILIES))}, and models of images and texts that hold one of them"
        )
    return FAMILIES[config.model_type]


def _end(
    name: str,
    family: Family,
    config: PreTrainedConfig,
    vocab_size: int | None,
    eos_token_id: int | None,
) -> int | None:
    """The token that ends a text; None: the one with the highest id (`EotEmbeddings`)."""
    if family.pool != "eos":
        if eos_token_id is None:
            raise ValueError(
                f"text tower {name!r}: the tokenizer has no token that ends a text; give "
                "pool=last, or another tokenizer"
            )
        return eos_token_id
    if eos_token_id is None and config.eos_token_id != 2:  # 2: see EotEmbeddings
        eos_token_id = config.eos_token_id
    size = config.vocab_size if vocab_size is None else vocab_size
    if eos_token_id is not None and not (isinstance(eos_token_id, int) and eos_token_id < size):
        raise ValueError(
            f"eos_token_id={eos_token_id} must be one id below vocab_size={size}, for CLIP pools "
            "there; give the tokenizer's own"
        )
    return eos_token_id


def _check(name: str, config: PreTrainedConfig, max_text_tokens: int) -> None:
    if getattr(config, "is_decoder", False) or getattr(config, "causal", False):
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
    if not hasattr(config, "max_position_embeddings"):  # T5 knows distances only
        return
    positions = config.max_position_embeddings - first_position(config.to_dict())
    if not 1 <= max_text_tokens <= positions:
        raise ValueError(
            f"text tower {name!r} has {positions} positions, so max_text_tokens={max_text_tokens} "
            f"must be from 1 to {positions}; lower --max-text-tokens"
            + (
                ""
                if "max_position_embeddings" in name
                else ", or override max_position_embeddings: positions of weights are stretched"
            )
        )
