"""The text encoders of transformers that are built, how each is cut, and published ones by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    ChineseCLIPTextConfig,
    ChineseCLIPTextModel,
    ClapTextConfig,
    ClapTextModel,
    CLIPTextConfig,
    CLIPTextModel,
    DistilBertConfig,
    DistilBertModel,
    ElectraConfig,
    ElectraModel,
    ModernBertConfig,
    ModernBertModel,
    MPNetConfig,
    MPNetModel,
    MT5Config,
    MT5EncoderModel,
    PreTrainedConfig,
    PreTrainedModel,
    RobertaConfig,
    RobertaModel,
    Siglip2TextModel,
    SiglipTextConfig,
    SiglipTextModel,
    T5Config,
    T5EncoderModel,
    XLMConfig,
    XLMModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)
from transformers.models.clip.modeling_clip import CLIPEncoderLayer, CLIPTextEmbeddings
from transformers.models.xlm.modeling_xlm import create_sinusoidal_embeddings

from models.towers.layers import Layer
from models.towers.libraries.configurations import Preset, initialise
from models.towers.libraries.text_layers import (
    BiasedBlock,
    BiasedEmbeddings,
    BiasingBlock,
    Block,
    CausalBlock,
    EotEmbeddings,
    EotPool,
    FullLengthEmbeddings,
    RotaryBlock,
    TableEmbeddings,
    TextBlock,
    TextEmbeddings,
    TextPool,
    XLMBlock,
    XLMEmbeddings,
)
from models.towers.pooling import AttentionPool, FirstPool, LastPool, MaxPool, MeanPool

# -- where each model is cut


def _embeddings(model: Any) -> Layer:
    return TextEmbeddings(model.embeddings)


def _block(model: Any, number: int, block: nn.Module) -> Layer:
    return TextBlock(block, model.config)


@dataclass(frozen=True)
class Family:
    """An architecture of transformers: its model, where it is cut, which configuration keys a user
    may override, how the library pools.

    `blocks`: where the model keeps them; `start`, `block`, `norm`: the first layer, each block as a
    layer, and what follows the last one. `pooled_by`: the module with which the library pools, one
    way among `pools`. `contrastive`: it is the tower of a published image-text model, whose pooling
    belongs to it and whose positions grow with the texts.
    """

    model: type[PreTrainedModel]
    keys: Mapping[str, type]
    pool: str
    blocks: str = "encoder.layer"
    start: Callable[[Any], Layer] = _embeddings
    block: Callable[[Any, int, nn.Module], Layer] = _block
    norm: Callable[[Any], nn.Module | None] = lambda model: None
    pooled_by: str | None = None
    contrastive: bool = False

    @property
    def pools(self) -> tuple[str, ...]:
        """All that it can be pooled by."""
        return POOLS if self.pooled_by is None else (*POOLS, self.pooled_by)

    def unused(self, pool: str) -> tuple[str, ...]:
        """How the names of tensors begin that the library's model has and this tower does not."""
        return () if self.pooled_by in (None, pool) else (f"{self.pooled_by}.",)

    def layers(
        self, model: Any, pool: str, eos_token_id: int | None, max_text_tokens: int
    ) -> list[tuple[str, Layer]]:
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
            modules: dict[str, Callable[[], nn.Module]] = {
                "mean": MeanPool,
                "max": MaxPool,
                "first": FirstPool,
                "last": LastPool,
                "pooler": lambda: FirstPool(model.pooler),
                "attention": lambda: AttentionPool(model.config.hidden_size),
            }
            last = TextPool(modules[pool](), norm)
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
    if number:
        return _biased_block(model, number, block)
    return BiasingBlock(block, model.config, last=model.config.num_layers == 1)


def _electra(model: Any) -> Layer:
    return TextEmbeddings(model.embeddings, getattr(model, "embeddings_project", None))


def _t5(model: Any) -> Layer:
    return TableEmbeddings(model.encoder.embed_tokens, model.encoder.dropout)


def _t5_norm(model: Any) -> nn.Module:
    return nn.Sequential(model.encoder.final_layer_norm, model.encoder.dropout)


# -- keys

_SIZES = {
    "hidden_size": int,
    "num_hidden_layers": int,
    "num_attention_heads": int,
    "intermediate_size": int,
    "max_position_embeddings": int,
    "initializer_range": float,
}
_BERT_KEYS = {
    **_SIZES,
    "hidden_act": str,
    "hidden_dropout_prob": float,
    "attention_probs_dropout_prob": float,
    "type_vocab_size": int,
    "layer_norm_eps": float,
}
_MPNET_KEYS = {key: kind for key, kind in _BERT_KEYS.items() if key != "type_vocab_size"}
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
    **_SIZES,
    "hidden_act": str,
    "attention_dropout": float,
    "initializer_factor": float,
    "layer_norm_eps": float,
}
_SIGLIP_KEYS = {
    key: kind
    for key, kind in _CLIP_KEYS.items()
    if key not in ("initializer_range", "initializer_factor")
}
_MODERNBERT_KEYS = {
    **_SIZES,
    "hidden_activation": str,
    "embedding_dropout": float,
    "mlp_dropout": float,
    "attention_dropout": float,
    "local_attention": int,
    "norm_eps": float,
}
_T5_KEYS = {
    "d_model": int,
    "d_kv": int,
    "d_ff": int,
    "num_layers": int,
    "num_heads": int,
    "dropout_rate": float,
    "relative_attention_num_buckets": int,
    "relative_attention_max_distance": int,
    "initializer_factor": float,
    "layer_norm_epsilon": float,
}
_XLM_KEYS = {
    "emb_dim": int,
    "n_layers": int,
    "n_heads": int,
    "dropout": float,
    "attention_dropout": float,
    "max_position_embeddings": int,
    "n_langs": int,
    "sinusoidal_embeddings": bool,
    "embed_init_std": float,
    "init_std": float,
    "layer_norm_eps": float,
}

POOLS = ("mean", "first", "last", "eos", "max", "attention")
_POOLER: dict[str, Any] = {"pool": "pooler", "pooled_by": "pooler"}
_NORM: dict[str, Any] = {
    "blocks": "encoder.layers",
    "norm": attrgetter("final_layer_norm"),
    "contrastive": True,
}
_SIGLIP: dict[str, Any] = {"pool": "head", "pooled_by": "head", **_NORM}
_T5: dict[str, Any] = {
    "pool": "mean",
    "blocks": "encoder.block",
    "start": _t5,
    "block": _t5_block,
    "norm": _t5_norm,
}
FAMILIES = {  # by the model_type of the configuration
    "bert": Family(BertModel, _BERT_KEYS, **_POOLER),
    "roberta": Family(RobertaModel, _BERT_KEYS, **_POOLER),
    "xlm-roberta": Family(XLMRobertaModel, _BERT_KEYS, **_POOLER),
    "clap_text_model": Family(ClapTextModel, _BERT_KEYS, **_POOLER),
    "distilbert": Family(
        DistilBertModel, _DISTILBERT_KEYS, pool="first", blocks="transformer.layer"
    ),
    "clip_text_model": Family(CLIPTextModel, _CLIP_KEYS, "eos", block=_causal_block, **_NORM),
    "siglip_text_model": Family(SiglipTextModel, _SIGLIP_KEYS, **_SIGLIP),
    "siglip2_text_model": Family(Siglip2TextModel, _SIGLIP_KEYS, **_SIGLIP),
    # the dual model reads the first token and has no pooler
    "chinese_clip_text_model": Family(
        ChineseCLIPTextModel, _BERT_KEYS, pool="first", pooled_by="pooler", contrastive=True
    ),
    "mpnet": Family(
        MPNetModel,
        _MPNET_KEYS,
        start=lambda model: BiasedEmbeddings(
            model.embeddings, model.encoder.relative_attention_bias
        ),
        block=_biased_block,
        **_POOLER,
    ),
    "electra": Family(ElectraModel, {**_BERT_KEYS, "embedding_size": int}, "first", start=_electra),
    "modernbert": Family(
        ModernBertModel,
        _MODERNBERT_KEYS,
        pool="first",
        blocks="layers",
        block=lambda model, number, block: RotaryBlock(block, model.config, model.rotary_emb),
        norm=attrgetter("final_norm"),
    ),
    "t5": Family(T5EncoderModel, _T5_KEYS, **_T5),
    "mt5": Family(MT5EncoderModel, _T5_KEYS, **_T5),
    "xlm": Family(
        XLMModel,
        _XLM_KEYS,
        pool="first",
        blocks="attentions",
        start=XLMEmbeddings,
        block=lambda model, number, block: XLMBlock(model, number),
    ),
}


def derived(config: PreTrainedConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """What follows from the overridden `values` of a configuration that has worked it out from
    others already."""
    more = {}
    if "hidden_size" in values and hasattr(config, "projection_size"):  # SigLIP's head
        more["projection_size"] = values["hidden_size"]
    if "num_hidden_layers" in values and config.model_type == "modernbert":
        number = values["num_hidden_layers"]
        more["layer_types"] = ModernBertConfig(num_hidden_layers=number).layer_types
    return more


# -- positions

_BEHIND_PADDING = {
    "roberta",
    "xlm-roberta",
    "mpnet",
    "clap_text_model",
}  # they count positions from the pad id on


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
        elif isinstance(module, TableEmbeddings):
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


def _bert(layers: int, width: int, heads: int, vocab_size: int = 30522) -> dict[str, int]:
    """A BERT-shaped encoder; the inner layer of its blocks is four times as wide."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "vocab_size": vocab_size,
    }


def _t5_sizes(layers: int, width: int, inner: int, heads: int) -> dict[str, int]:
    return {"num_layers": layers, "d_model": width, "d_ff": inner, "num_heads": heads}


_ROBERTA = {
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}  # 514: positions begin after the pad id, 1
_MPNET = {"max_position_embeddings": 514, "layer_norm_eps": 1e-5}
_XLM_ROBERTA = _bert(12, 768, 12, 250002)
_SIGLIP_IDS = {"bos_token_id": None, "eos_token_id": 1}  # the default's are of CLIP's vocabulary
_SENTENCES = "sentence-transformers/"

PRESETS = {
    "bert-base-uncased": Preset("google-bert/bert-base-uncased", BertConfig),
    "bert-large-uncased": Preset("google-bert/bert-large-uncased", BertConfig, _bert(24, 1024, 16)),
    "bert-tiny": Preset("google/bert_uncased_L-2_H-128_A-2", BertConfig, _bert(2, 128, 2)),
    "bert-mini": Preset("google/bert_uncased_L-4_H-256_A-4", BertConfig, _bert(4, 256, 4)),
    "bert-small": Preset("google/bert_uncased_L-4_H-512_A-8", BertConfig, _bert(4, 512, 8)),
    "bert-medium": Preset("google/bert_uncased_L-8_H-512_A-8", BertConfig, _bert(8, 512, 8)),
    "bert-base-cased": Preset("google-bert/bert-base-cased", BertConfig, {"vocab_size": 28996}),
    "bert-base-chinese": Preset("google-bert/bert-base-chinese", BertConfig, {"vocab_size": 21128}),
    "bert-base-multilingual-cased": Preset(
        "google-bert/bert-base-multilingual-cased", BertConfig, {"vocab_size": 119547}
    ),
    "distilbert-base-uncased": Preset("distilbert/distilbert-base-uncased", DistilBertConfig),
    "roberta-base": Preset("FacebookAI/roberta-base", RobertaConfig, _ROBERTA),
    "roberta-large": Preset(
        "FacebookAI/roberta-large", RobertaConfig, {**_ROBERTA, **_bert(24, 1024, 16, 50265)}
    ),
    "clap-text-base": Preset("laion/clap-htsat-unfused", ClapTextConfig),
    "xlm-roberta-base": Preset(
        "FacebookAI/xlm-roberta-base", XLMRobertaConfig, {**_ROBERTA, **_XLM_ROBERTA}
    ),
    "xlm-roberta-large": Preset(
        "FacebookAI/xlm-roberta-large",
        XLMRobertaConfig,
        {**_ROBERTA, **_bert(24, 1024, 16, 250002)},
    ),
    "minilm-l6": Preset("nreimers/MiniLM-L6-H384-uncased", BertConfig, _bert(6, 384, 12)),
    "minilm-l12": Preset("microsoft/MiniLM-L12-H384-uncased", BertConfig, _bert(12, 384, 12)),
    "all-minilm-l6-v2": Preset(f"{_SENTENCES}all-MiniLM-L6-v2", BertConfig, _bert(6, 384, 12)),
    "all-minilm-l12-v2": Preset(f"{_SENTENCES}all-MiniLM-L12-v2", BertConfig, _bert(12, 384, 12)),
    "mpnet-base": Preset("microsoft/mpnet-base", MPNetConfig, _MPNET),
    "all-mpnet-base-v2": Preset(f"{_SENTENCES}all-mpnet-base-v2", MPNetConfig, _MPNET),
    "electra-small": Preset("google/electra-small-discriminator", ElectraConfig),
    "modernbert-base": Preset("answerdotai/ModernBERT-base", ModernBertConfig),
    "modernbert-large": Preset(
        "answerdotai/ModernBERT-large",
        ModernBertConfig,
        {
            "hidden_size": 1024,
            "intermediate_size": 2624,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
        },
    ),
    "t5-small": Preset("google-t5/t5-small", T5Config),
    "t5-base": Preset("google-t5/t5-base", T5Config, _t5_sizes(12, 768, 3072, 12)),
    "t5-large": Preset("google-t5/t5-large", T5Config, _t5_sizes(24, 1024, 4096, 16)),
    "mt5-small": Preset("google/mt5-small", MT5Config),
    "mt5-base": Preset("google/mt5-base", MT5Config, _t5_sizes(12, 768, 2048, 12)),
    "xlm-mlm-en-2048": Preset("FacebookAI/xlm-mlm-en-2048", XLMConfig),
    "clip-text-base": Preset("openai/clip-vit-base-patch32", CLIPTextConfig),
    "clip-text-large": Preset(
        "openai/clip-vit-large-patch14",
        CLIPTextConfig,
        {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
    ),
    "siglip-text-base": Preset("google/siglip-base-patch16-224", SiglipTextConfig, _SIGLIP_IDS),
    "siglip-text-large": Preset(
        "google/siglip-large-patch16-256",
        SiglipTextConfig,
        {**_SIGLIP_IDS, **_bert(24, 1024, 16, 32000)},
    ),
    "siglip2-text-base": Preset(
        "google/siglip2-base-patch16-224",
        SiglipTextConfig,
        {"vocab_size": 256000, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1},
    ),
    "chinese-clip-text-base": Preset(
        "OFA-Sys/chinese-clip-vit-base-patch16", ChineseCLIPTextConfig, {"vocab_size": 21128}
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
