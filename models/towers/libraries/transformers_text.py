"""Text towers of transformers: BERT and its kin, T5, XLM, and the text sides of CLIP, SigLIP,
Chinese-CLIP and CLAP; how each is cut, and published ones by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CLIPTextConfig, PreTrainedConfig
from transformers.models.clip.modeling_clip import CLIPEncoderLayer, CLIPTextEmbeddings
from transformers.models.xlm.modeling_xlm import create_sinusoidal_embeddings

from models.towers.layers import Layer, LayerSpec, Tower, cut, reset
from models.towers.libraries.configurations import (
    Catalogue,
    Family,
    Preset,
    initialise,
    remade,
    saved_state,
)
from models.towers.libraries.layers import Named
from models.towers.libraries.text_layers import (
    BiasedBlock,
    BiasedEmbeddings,
    Block,
    CausalBlock,
    EotEmbeddings,
    EotPool,
    FullLengthEmbeddings,
    RotaryBlock,
    TextBlock,
    TextEmbeddings,
    TextPool,
    TwoLayers,
    XLMBlock,
    XLMEmbeddings,
)
from models.towers.names import TWO_LAYERS
from models.towers.pooling import FirstPool, pooling

# -- where each model is cut

POOLS = ("mean", "first", "last", "eos", "max", "attention")


def _embeddings(model: Any) -> Layer:
    return TextEmbeddings(model.embeddings)


def _block(model: Any, number: int, block: nn.Module) -> Layer:
    return TextBlock(block, model.config)


@dataclass(frozen=True, kw_only=True)
class TextFamily(Family):
    """`blocks`: where the model keeps them; `start`, `block`, `norm`: the first layer, each block
    as a layer, and what follows the last one. `contrastive`: it is the tower of a published
    image-text model, whose pooling belongs to it and whose positions grow with the texts."""

    blocks: str = "encoder.layer"
    start: Callable[[Any], Layer] = _embeddings
    block: Callable[[Any, int, nn.Module], Layer] = _block
    norm: Callable[[Any], nn.Module | None] = lambda model: None
    contrastive: bool = False

    def layers(
        self, model: Any, pool: str, eos_token_id: int | None, max_text_tokens: int
    ) -> Named:
        """Names and layers, in order."""
        start, norm = self.start(model), self.norm(model)
        last: Layer
        if pool == "eos":
            start, last = EotEmbeddings(start, eos_token_id), EotPool(norm)
        elif pool == "head":
            length, pad = max_text_tokens, model.config.pad_token_id or 0
            start = FullLengthEmbeddings(model.embeddings, length, pad)
            last = TextPool(LastThrough(model.head), norm)
        else:
            own = {"pooler": lambda: FirstPool(model.pooler)}
            last = TextPool(pooling(pool, model.config.hidden_size, **own), norm)
        blocks = [
            (f"{self.blocks}.{i}", self.block(model, i, block))
            for i, block in enumerate(model.get_submodule(self.blocks))
        ]
        if isinstance(start, FullLengthEmbeddings):
            for _, block in blocks:
                if isinstance(block, Block):
                    block.padded = False
        return [("embeddings", start), *blocks, ("pooler", last)]


class LastThrough(nn.Module):
    """The last token, padding or not, through SigLIP's `head`."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, tokens: Tensor, kept: Tensor | None = None) -> Tensor:
        return self.head(tokens[:, -1])


def _causal_block(model: Any, number: int, block: nn.Module) -> Layer:
    return CausalBlock(block, model.config)


def _biased_block(model: Any, number: int, block: nn.Module) -> Layer:
    return BiasedBlock(block, model.config, last=number == model.config.num_hidden_layers - 1)


def _t5_block(model: Any, number: int, block: nn.Module) -> Layer:
    last = number == model.config.num_layers - 1
    return BiasedBlock(block, model.config, last=last, makes_bias=number == 0)


def _electra(model: Any) -> Layer:
    return TextEmbeddings(model.embeddings, getattr(model, "embeddings_project", None))


def _t5(model: Any) -> Layer:
    return TextEmbeddings(model.encoder.embed_tokens, model.encoder.dropout)


def _t5_norm(model: Any) -> nn.Module:
    return nn.Sequential(model.encoder.final_layer_norm, model.encoder.dropout)


def _family(model: str, own: str, pooled_by: str | None = None, **more: Any) -> TextFamily:
    """`own`: the library's pooling."""
    others = (*POOLS, *([pooled_by] if pooled_by else []))
    pools = (own, *(pool for pool in others if pool != own))
    return TextFamily(model, pools, pooled_by, **more)


_pooling = partial(_family, own="pooler", pooled_by="pooler")
_of_vision = partial(
    _family, blocks="encoder.layers", norm=attrgetter("final_layer_norm"), contrastive=True
)
_of_siglip = partial(_of_vision, own="head", pooled_by="head")
_of_t5 = partial(
    _family, own="mean", blocks="encoder.block", start=_t5, block=_t5_block, norm=_t5_norm
)

FAMILIES = {  # by the model_type of the configuration
    "bert": _pooling("BertModel"),
    "roberta": _pooling("RobertaModel"),
    "xlm-roberta": _pooling("XLMRobertaModel"),
    "clap_text_model": _pooling("ClapTextModel"),
    "distilbert": _family("DistilBertModel", "first", blocks="transformer.layer"),
    "clip_text_model": _of_vision("CLIPTextModel", "eos", block=_causal_block),
    "siglip_text_model": _of_siglip("SiglipTextModel"),
    "siglip2_text_model": _of_siglip("Siglip2TextModel"),
    # the dual model reads the first token and has no pooler
    "chinese_clip_text_model": _family("ChineseCLIPTextModel", "first", "pooler", contrastive=True),
    "mpnet": _pooling(
        "MPNetModel",
        not_keys=("relative_attention_num_buckets",),
        start=lambda model: BiasedEmbeddings(
            model.embeddings, model.encoder.relative_attention_bias
        ),
        block=_biased_block,
    ),
    "electra": _family("ElectraModel", "first", start=_electra),
    "modernbert": _family(
        "ModernBertModel",
        "first",
        blocks="layers",
        block=lambda model, number, block: RotaryBlock(block, model.config, model.rotary_emb),
        norm=attrgetter("final_norm"),
    ),
    "t5": _of_t5("T5EncoderModel"),
    "mt5": _of_t5("MT5EncoderModel"),
    "xlm": _family(
        "XLMModel",
        "first",
        blocks="attentions",
        start=XLMEmbeddings,
        block=lambda model, number, block: XLMBlock(model, number),
    ),
}

# -- positions

# they count positions from the pad id on
_BEHIND_PADDING = {"roberta", "xlm-roberta", "mpnet", "clap_text_model"}


def first_position(config: Mapping[str, Any]) -> int:
    """The row of the first token in the table of positions, of a configuration as a dictionary."""
    if config["model_type"] not in _BEHIND_PADDING:
        return 0
    pad = 1 if config["model_type"] == "mpnet" else config["pad_token_id"]  # MPNet's is fixed
    return pad + 1


# -- first values


def initialise_text(layer: Layer, model: Any) -> None:
    """The library's own rules; for CLIP those of its authors."""
    initialise(layer, model)
    config = model.config
    for module in layer.modules():
        if isinstance(module, CLIPEncoderLayer):
            _initialise_clip_block(module, config)
        elif isinstance(module, CLIPTextEmbeddings):
            nn.init.normal_(module.position_embedding.weight, std=0.01 * config.initializer_factor)
        # what the library does for the model as a whole, which a part of it does not have
        elif isinstance(module, TextEmbeddings) and isinstance(module.embeddings, nn.Embedding):
            nn.init.normal_(module.embeddings.weight, std=config.initializer_factor)
        elif isinstance(module, XLMEmbeddings) and config.sinusoidal_embeddings:
            positions = module.position_embeddings.weight
            positions.copy_(create_sinusoidal_embeddings(*positions.shape, positions.clone()))


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


# -- published models


def _bert(layers: int, width: int, heads: int) -> dict[str, int]:
    """A BERT-shaped encoder; the inner layer of its blocks is four times as wide."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }


def _t5_sizes(layers: int, width: int, inner: int, heads: int) -> dict[str, int]:
    return {"num_layers": layers, "d_model": width, "d_ff": inner, "num_heads": heads}


# 514: positions begin after the pad id, 1
_MPNET = {"max_position_embeddings": 514, "layer_norm_eps": 1e-5}
_ROBERTA = {**_MPNET, "type_vocab_size": 1}
_XLMR = {**_ROBERTA, "vocab_size": 250002}
_SIGLIP_IDS = {"bos_token_id": None, "eos_token_id": 1}  # the default's are of CLIP's vocabulary
_SENTENCES, _ORIGINAL = "sentence-transformers/", "google/bert_uncased_L-"
_LARGE = _bert(24, 1024, 16)

_MODERN_LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 2624,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
}
_CLIP_LARGE = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
_SIGLIP2 = {"vocab_size": 256000, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}

PRESETS = {
    "bert-base-uncased": Preset("google-bert/bert-base-uncased", "bert"),
    "bert-large-uncased": Preset("google-bert/bert-large-uncased", "bert", _LARGE),
    "bert-tiny": Preset(f"{_ORIGINAL}2_H-128_A-2", "bert", _bert(2, 128, 2)),
    "bert-mini": Preset(f"{_ORIGINAL}4_H-256_A-4", "bert", _bert(4, 256, 4)),
    "bert-small": Preset(f"{_ORIGINAL}4_H-512_A-8", "bert", _bert(4, 512, 8)),
    "bert-medium": Preset(f"{_ORIGINAL}8_H-512_A-8", "bert", _bert(8, 512, 8)),
    "bert-base-cased": Preset("google-bert/bert-base-cased", "bert", {"vocab_size": 28996}),
    "bert-base-chinese": Preset("google-bert/bert-base-chinese", "bert", {"vocab_size": 21128}),
    "bert-base-multilingual-cased": Preset(
        "google-bert/bert-base-multilingual-cased", "bert", {"vocab_size": 119547}
    ),
    "distilbert-base-uncased": Preset("distilbert/distilbert-base-uncased", "distilbert"),
    "roberta-base": Preset("FacebookAI/roberta-base", "roberta", _ROBERTA),
    "roberta-large": Preset("FacebookAI/roberta-large", "roberta", {**_LARGE, **_ROBERTA}),
    "clap-text-base": Preset("laion/clap-htsat-unfused", "clap_text_model"),
    "xlm-roberta-base": Preset("FacebookAI/xlm-roberta-base", "xlm-roberta", _XLMR),
    "xlm-roberta-large": Preset("FacebookAI/xlm-roberta-large", "xlm-roberta", {**_LARGE, **_XLMR}),
    "minilm-l6": Preset("nreimers/MiniLM-L6-H384-uncased", "bert", _bert(6, 384, 12)),
    "minilm-l12": Preset("microsoft/MiniLM-L12-H384-uncased", "bert", _bert(12, 384, 12)),
    "all-minilm-l6-v2": Preset(f"{_SENTENCES}all-MiniLM-L6-v2", "bert", _bert(6, 384, 12)),
    "all-minilm-l12-v2": Preset(f"{_SENTENCES}all-MiniLM-L12-v2", "bert", _bert(12, 384, 12)),
    "mpnet-base": Preset("microsoft/mpnet-base", "mpnet", _MPNET),
    "all-mpnet-base-v2": Preset(f"{_SENTENCES}all-mpnet-base-v2", "mpnet", _MPNET),
    "electra-small": Preset("google/electra-small-discriminator", "electra"),
    "modernbert-base": Preset("answerdotai/ModernBERT-base", "modernbert"),
    "modernbert-large": Preset("answerdotai/ModernBERT-large", "modernbert", _MODERN_LARGE),
    "t5-small": Preset("google-t5/t5-small", "t5"),
    "t5-base": Preset("google-t5/t5-base", "t5", _t5_sizes(12, 768, 3072, 12)),
    "t5-large": Preset("google-t5/t5-large", "t5", _t5_sizes(24, 1024, 4096, 16)),
    "mt5-small": Preset("google/mt5-small", "mt5"),
    "mt5-base": Preset("google/mt5-base", "mt5", _t5_sizes(12, 768, 2048, 12)),
    "xlm-mlm-en-2048": Preset("FacebookAI/xlm-mlm-en-2048", "xlm"),
    "clip-text-base": Preset("openai/clip-vit-base-patch32", "clip_text_model"),
    "clip-text-large": Preset("openai/clip-vit-large-patch14", "clip_text_model", _CLIP_LARGE),
    "siglip-text-base": Preset("google/siglip-base-patch16-224", "siglip_text_model", _SIGLIP_IDS),
    "siglip-text-large": Preset(
        "google/siglip-large-patch16-256",
        "siglip_text_model",
        {**_LARGE, **_SIGLIP_IDS},
    ),
    "siglip2-text-base": Preset("google/siglip2-base-patch16-224", "siglip_text_model", _SIGLIP2),
    "chinese-clip-text-base": Preset(
        "OFA-Sys/chinese-clip-vit-base-patch16", "chinese_clip_text_model", {"vocab_size": 21128}
    ),
}

ALIASES = {  # what people type -> the preset; in small letters
    "bert": "bert-base-uncased",
    "bert-base": "bert-base-uncased",
    "bert-large": "bert-large-uncased",
    "bert-chinese": "bert-base-chinese",
    "mbert": "bert-base-multilingual-cased",
    "bert-multilingual": "bert-base-multilingual-cased",
    "distilbert": "distilbert-base-uncased",
    "distilbert-base": "distilbert-base-uncased",
    "roberta": "roberta-base",
    "xlm-r": "xlm-roberta-base",
    "xlm-roberta": "xlm-roberta-base",
    "xlm-r-base": "xlm-roberta-base",
    "xlm-r-large": "xlm-roberta-large",
    "xlmr-base": "xlm-roberta-base",
    "xlmr-large": "xlm-roberta-large",
    "minilm": "minilm-l6",
    "mpnet": "mpnet-base",
    "electra": "electra-small",
    "modernbert": "modernbert-base",
    "chinese-clip-text": "chinese-clip-text-base",
}
CATALOGUE = Catalogue(
    "text", "text_config", FAMILIES, PRESETS, ALIASES, example="google-bert/bert-base-uncased"
)

# -- the tower


def text_tower(
    name: str,
    vocab_size: int | None,
    max_text_tokens: int,
    pad_token_id: int | None = None,
    eos_token_id: int | None = None,
) -> Tower:
    """As `models.towers.text.text_tower`, of a preset, a local folder with a config.json, or a
    Hugging Face id."""
    config, hub_id, family, pool, values = CATALOGUE.read(name, **{TWO_LAYERS: int})
    projected = values.pop(TWO_LAYERS, None)
    if projected is not None and projected < 1:
        raise ValueError(f"text tower {name!r}: {TWO_LAYERS}={projected} must be at least 1")
    end = _end(name, family, config, vocab_size, eos_token_id) if pool == "eos" else None
    if family.contrastive and "max_position_embeddings" not in values:
        values["max_position_embeddings"] = max(config.max_position_embeddings, max_text_tokens)
    # what is worked out of other keys: SigLIP's head, which layers of ModernBERT see a window
    derived = {"hidden_size": "projection_size", "num_hidden_layers": "layer_types"}
    config = remade(name, config, values, [derived[key] for key in derived if key in values])
    # behind the others: transformers warns of ids of its own that a smaller vocabulary lacks
    for key, value in (("vocab_size", vocab_size), ("pad_token_id", pad_token_id)):
        if value is not None:
            setattr(config, key, value)
    _check(name, config, max_text_tokens)
    with torch.device("meta"):
        model = family.made(config)
        _learn_every_row(model)
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
        "architecture": family.model,
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


def _learn_every_row(model: nn.Module) -> None:
    """Replace the tables that keep the row of the padding token at zero, where it has no gradient.

    Masks hide padding, so the row of a token that only pads is read by nothing. But texts may have
    that token: a tokenizer without padding pads with the token that ends a text, and MPNet and XLM
    take one of fixed id for padding, whatever the tokenizer has there.
    """
    for path, table in list(model.named_modules()):
        if isinstance(table, nn.Embedding) and table.padding_idx is not None:
            sizes = table.num_embeddings, table.embedding_dim
            model.set_submodule(path, nn.Embedding(*sizes, dtype=table.weight.dtype))


def _end(
    name: str,
    family: TextFamily,
    config: PreTrainedConfig,
    vocab_size: int | None,
    eos_token_id: int | None,
) -> int | None:
    """The token that ends a text; None: the one with the highest id (`EotEmbeddings`)."""
    if family.pools[0] != "eos":
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
