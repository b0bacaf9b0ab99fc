"""Text towers by name: those of transformers (`libraries/transformers_text.py`), OpenCLIP's
(`libraries/open_clip.py`), and towers of one's own."""

from collections.abc import Callable
from pathlib import Path

from models.towers.layers import Tower
from models.towers.libraries import open_clip, transformers_text
from models.towers.libraries.transformers_text import CATALOGUE
from models.towers.names import HF, alike, join_name, split_name

hub_id_of = CATALOGUE.hub_id_of

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
    if base in OWN or CATALOGUE.preset_of(base) or Path(base).expanduser().exists():
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
    the final norm at the end of the text; the first of `Family.pools` of the others). With
    `mlp_proj=D` they go through OpenCLIP's projection of two layers, to D. The towers of published
    image-text models have as many positions as the texts need.
    """
    name = full_name(name)
    base, overrides = split_name(name)
    if base in OWN:
        if vocab_size is None:
            raise ValueError(
                f"text tower {name!r}: it has no configuration that says how many tokens there "
                "are; give vocab_size"
            )
        return OWN[base](name, vocab_size, max_text_tokens)
    for prefix, tower in LIBRARIES.items():
        if base.startswith(prefix):
            return tower(name, vocab_size, max_text_tokens, pad_token_id, eos_token_id)
    return transformers_text.text_tower(
        name, vocab_size, max_text_tokens, pad_token_id, eos_token_id
    )
