"""Small towers of every family beside the library's own model, made by the library's own
constructors."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.models.vision_transformer import VisionTransformer
from transformers import (
    ASTConfig,
    ASTModel,
    BertConfig,
    BertModel,
    ChineseCLIPTextConfig,
    ChineseCLIPTextModel,
    ClapAudioConfig,
    ClapAudioModel,
    ClapTextConfig,
    ClapTextModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    ConvNextConfig,
    ConvNextModel,
    ConvNextV2Config,
    ConvNextV2Model,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
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
    PreTrainedModel,
    RobertaConfig,
    RobertaModel,
    Siglip2VisionConfig,
    Siglip2VisionModel,
    SiglipTextConfig,
    SiglipTextModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    SwinConfig,
    SwinModel,
    T5Config,
    T5EncoderModel,
    ViTConfig,
    ViTModel,
    WhisperConfig,
    XLMConfig,
    XLMModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)
from transformers.models.siglip2.image_processing_siglip2 import convert_image_to_patches
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from models.towers.audio import audio_tower
from models.towers.image import image_tower
from models.towers.layers import Layer, Tower
from models.towers.libraries.configurations import saved_state
from models.towers.text import text_tower

os.environ.setdefault("HF_HUB_OFFLINE", "1")

SIZE, VOCAB, TOKENS, EOS = 32, 120, 12, 7
VIT = {"patch_size": 8, "num_layers": 2, "num_heads": 3, "hidden_dim": 96, "mlp_dim": 160}
HF_VIT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 144,
    "patch_size": 8,
}
DINO = {key: value for key, value in HF_VIT.items() if key != "intermediate_size"}
HF_CONVNEXT = {"hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 2, 1]}
SWIN = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
AST = {"num_mel_bins": 16, "max_length": 40, "frequency_stride": 4, "time_stride": 8}
HTSAT = {
    "patch_embeds_hidden_size": 16,
    "depths": [2, 2],
    "num_attention_heads": [2, 4],
    "window_size": 4,
    "spec_size": 64,
    "num_mel_bins": 16,
}
WHISPER = {
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 144,
    "num_mel_bins": 16,
    "max_source_positions": 50,
}
BERT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 144,
    "max_position_embeddings": 20,
}
DISTILBERT = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 144,
    "max_position_embeddings": 20,
}
XLM = {"emb_dim": 64, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 20}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 144, "num_layers": 3, "num_heads": 4}


def spell(base: str, overrides: dict) -> str:
    words = {
        key: "-".join(map(str, value)) if isinstance(value, list) else value
        for key, value in overrides.items()
    }
    return f"{base}:{','.join(f'{key}={value}' for key, value in words.items())}"


def first_token(output) -> Tensor:
    return output.last_hidden_state[:, 0]


def pooled(output) -> Tensor:
    return output.pooler_output


def mean_token(output, attention_mask: Tensor) -> Tensor:
    kept = attention_mask.unsqueeze(-1).to(output.last_hidden_state.dtype)
    return (output.last_hidden_state * kept).sum(1) / kept.sum(1)


def without_mask(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """As SigLIP reads texts: padded to the full length, of which nothing is masked."""
    return model(inputs["input_ids"]).pooler_output


def in_patches(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """As SigLIP 2's own preprocessing hands images to it."""
    patches = [convert_image_to_patches(image, 8) for image in inputs["pixel_values"]]
    shapes = torch.tensor([[side // 8 for side in inputs["pixel_values"].shape[2:]]] * len(patches))
    patches = torch.stack(patches)
    return model(patches, torch.ones(patches.shape[:2]), shapes).pooler_output


def with_mean(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return mean_token(model(**inputs), inputs["attention_mask"])


def with_languages(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    ids, languages = inputs["input_ids"], inputs["language_ids"]
    output = model(
        ids, inputs["attention_mask"], langs=languages[:, None].expand_as(ids).contiguous()
    )
    return first_token(output)


@dataclass(frozen=True)
class Case:
    """A family: our tower with its random draws (`dropout`) or without, and the library's model for
    the same sizes."""

    branch: str
    name: str
    dropout: dict[str, float]  # the keys that make its training forward draw
    library: Callable[[dict[str, float]], nn.Module]  # with these values for them
    classifier: str | None = None  # the last linear, which the tower does not have
    classifier_prefix: str = "\0"  # every tensor of the dropped part begins so
    features: Callable = pooled
    # of the library's model and the inputs, where more is to do than to call it
    call: Callable[[nn.Module, dict[str, Tensor]], Tensor] | None = None
    languages: int = 0  # how many there are
    seconds: float | None = None  # of a sound
    # tensors whose gradients are sums in another order: equal to rounding
    rounded: tuple[str, ...] = ()
    pad_token_id: int | None = 0
    authors: Callable[[dict[str, Tensor]], dict[str, Tensor]] = (
        lambda state: {}
    )  # first values that are not the library's

    def tower(self, dropout: bool = False) -> Tower:
        values = self.dropout if dropout else dict.fromkeys(self.dropout, 0.0)
        name = (
            self.name + ("," if "=" in self.name else ":") + spell("", values)[1:]
            if values
            else self.name
        )
        if self.branch == "image":
            return image_tower(name, SIZE)
        if self.branch == "audio":
            return audio_tower(name, self.seconds)
        return text_tower(name, VOCAB, TOKENS, self.pad_token_id, EOS)

    def reference(self, layers: list[Layer], dropout: bool = False) -> nn.Module:
        """The library's model with the weights of our layers."""
        model = self.library(self.dropout if dropout else dict.fromkeys(self.dropout, 0.0))
        if self.classifier:
            model.set_submodule(self.classifier, nn.Identity())
        state = {
            layer.canonical_names[local].split(".", 1)[1]: tensor
            for layer in layers
            for local, tensor in layer.state_dict().items()
        }
        theirs = self.named(model)
        assert set(state) == {
            name for name in theirs if not name.startswith(self.classifier_prefix)
        }
        with torch.no_grad():
            for name, tensor in state.items():
                theirs[name].copy_(tensor)
        return model

    @staticmethod
    def named(model: nn.Module) -> dict[str, Tensor]:
        """The library's tensors by the names under which it saves them."""
        if isinstance(model, PreTrainedModel):
            return saved_state(model)
        return model.state_dict(keep_vars=True)

    def first_values(self) -> dict[str, Tensor]:
        """By the library's names: the library's own, or those of the authors of the architecture
        where these are other."""
        state = self.named(self.library(dict.fromkeys(self.dropout, 0.0)))
        return {**state, **self.authors(state)}

    def inputs(self, seed: int = 0) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(seed)
        if self.branch == "image":
            return {"pixel_values": torch.randn(4, 3, SIZE, SIZE, generator=draw)}
        if self.branch == "audio":
            shape = self.tower().config["audio_input"]["shape"]
            return {"input_features": torch.randn(4, *shape, generator=draw)}
        ids = torch.randint(10, VOCAB, (4, TOKENS), generator=draw)
        mask = torch.ones_like(ids)
        for row, length in enumerate((TOKENS, 5, 9, 3)):  # one row without padding
            ids[row, length - 1] = EOS
            ids[row, length:] = 0 if self.pad_token_id is None else self.pad_token_id
            mask[row, length:] = 0
        found = {"input_ids": ids, "attention_mask": mask}
        if self.languages:
            found["language_ids"] = torch.arange(len(ids)) % self.languages
        return found

    def run_reference(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        if self.call is not None:
            return self.call(model, inputs)
        output = model(**inputs) if self.branch == "text" else model(*inputs.values())
        return output if isinstance(output, Tensor) else self.features(output)


def _text_dropout(p: float) -> dict[str, float]:
    return {"hidden_dropout_prob": p, "attention_probs_dropout_prob": p}


def _open_clips(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of OpenCLIP's text transformer, which starts as OpenAI's, under the names of
    `state`."""
    from open_clip.transformer import TextTransformer

    sizes = BERT["hidden_size"], BERT["num_attention_heads"], BERT["num_hidden_layers"]
    ratio = BERT["intermediate_size"] / BERT["hidden_size"]
    theirs = TextTransformer(
        BERT["max_position_embeddings"], VOCAB, *sizes, mlp_ratio=ratio
    ).state_dict()
    found = {"embeddings.position_embedding.weight": theirs["positional_embedding"]}
    for i in range(sizes[2]):
        ours, block = f"encoder.layers.{i}.", f"transformer.resblocks.{i}."
        for part, weight in zip("qkv", theirs[f"{block}attn.in_proj_weight"].chunk(3)):
            found[f"{ours}self_attn.{part}_proj.weight"] = weight
        found[f"{ours}self_attn.out_proj.weight"] = theirs[f"{block}attn.out_proj.weight"]
        found[f"{ours}mlp.fc1.weight"] = theirs[f"{block}mlp.c_fc.weight"]
        found[f"{ours}mlp.fc2.weight"] = theirs[f"{block}mlp.c_proj.weight"]
    assert set(found) <= set(state)
    return found


CASES = {
    "resnet-basic": Case(
        "image",
        "resnet18:layers=1-1-2-1",
        {},
        lambda d: ResNet(BasicBlock, [1, 1, 2, 1]),
        "fc",
        "fc.",
    ),
    "resnet-bottleneck": Case(
        "image",
        "resnet50:layers=1-1-1-1,width_per_group=16,zero_init_residual=true",
        {},
        lambda d: ResNet(Bottleneck, [1, 1, 1, 1], width_per_group=16, zero_init_residual=True),
        "fc",
        "fc.",
    ),
    "vit": Case(
        "image",
        spell("vit_b_16", VIT),
        {"dropout": 0.1, "attention_dropout": 0.2},
        lambda d: VisionTransformer(SIZE, **VIT, **d),
        "heads.head",
        "heads.",
    ),
    "convnext": Case(
        "image",
        "convnext_tiny:dims=16-24-32-48,depths=1-1-2-1",
        {"stochastic_depth_prob": 0.5},
        lambda d: ConvNeXt(
            [
                CNBlockConfig(16, 24, 1),
                CNBlockConfig(24, 32, 1),
                CNBlockConfig(32, 48, 2),
                CNBlockConfig(48, None, 1),
            ],
            layer_scale=1e-6,
            **d,
        ),
        "classifier.2",
        "classifier.2.",
    ),
    "hf-clip": Case(
        "image",
        spell("hf:clip-vit-base-patch32", HF_VIT),
        {"attention_dropout": 0.1},
        lambda d: CLIPVisionModel(CLIPVisionConfig(image_size=SIZE, **HF_VIT, **d)),
    ),
    "hf-siglip": Case(
        "image",
        spell("hf:siglip-base-patch16-224", HF_VIT),
        {"attention_dropout": 0.1},
        lambda d: SiglipVisionModel(SiglipVisionConfig(image_size=SIZE, **HF_VIT, **d)),
    ),
    "hf-siglip2": Case(
        "image",
        "hf:siglip2-base-patch16-naflex:" + spell("", {**HF_VIT, "num_patches": 9})[1:],
        {"attention_dropout": 0.1},
        lambda d: Siglip2VisionModel(Siglip2VisionConfig(num_patches=9, **HF_VIT, **d)),
        call=in_patches,
        rounded=("embeddings.position_embedding.weight",),  # of one image, not of each by itself
    ),
    "hf-vit": Case(
        "image",
        spell("hf:vit-base-patch16-224", HF_VIT),
        _text_dropout(0.1),
        lambda d: ViTModel(ViTConfig(image_size=SIZE, **HF_VIT, **d)),
    ),
    "hf-dinov2": Case(
        "image",
        spell("hf:dinov2-base", DINO),
        {**_text_dropout(0.1), "drop_path_rate": 0.3},
        lambda d: Dinov2Model(Dinov2Config(image_size=SIZE, **DINO, **d)),
        classifier_prefix="embeddings.mask_token",
    ),
    "hf-dinov2-registers": Case(
        "image",
        spell("hf:dinov2-with-registers-base", {**DINO, "num_register_tokens": 3}),
        {**_text_dropout(0.1), "drop_path_rate": 0.3},
        lambda d: Dinov2WithRegistersModel(
            Dinov2WithRegistersConfig(image_size=SIZE, num_register_tokens=3, **DINO, **d)
        ),
        classifier_prefix="embeddings.mask_token",
    ),
    "hf-convnext": Case(
        "image",
        spell("hf:convnext-tiny-224", HF_CONVNEXT),
        {"drop_path_rate": 0.3},
        lambda d: ConvNextModel(ConvNextConfig(image_size=SIZE, **HF_CONVNEXT, **d)),
    ),
    "hf-convnextv2": Case(
        "image",
        spell("hf:convnextv2-tiny-1k-224", HF_CONVNEXT),
        {"drop_path_rate": 0.3},
        lambda d: ConvNextV2Model(ConvNextV2Config(image_size=SIZE, **HF_CONVNEXT, **d)),
    ),
    "hf-swin": Case(
        "image",
        spell("hf:swin-tiny-patch4-window7-224", SWIN),
        {**_text_dropout(0.1), "drop_path_rate": 0.3},
        lambda d: SwinModel(SwinConfig(image_size=SIZE, **SWIN, **d)),
    ),
    "hf-ast": Case(
        "audio",
        spell("hf:ast", {**HF_VIT, **AST}),
        _text_dropout(0.1),
        lambda d: ASTModel(ASTConfig(**HF_VIT, **AST, **d)),
    ),
    "hf-htsat": Case(
        "audio",
        spell("hf:clap-htsat-unfused", HTSAT),
        {**_text_dropout(0.1), "drop_path_rate": 0.3},
        lambda d: ClapAudioModel(ClapAudioConfig(**HTSAT, **d)),
        seconds=1.0,
    ),
    "hf-whisper": Case(
        "audio",
        spell("hf:whisper-tiny", WHISPER),
        {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1},
        lambda d: WhisperEncoder(WhisperConfig(**WHISPER, **d)),
        features=lambda output: output.last_hidden_state.mean(1),
    ),
    "bert": Case(
        "text",
        spell("bert-base-uncased", BERT),
        _text_dropout(0.1),
        lambda d: BertModel(BertConfig(vocab_size=VOCAB, pad_token_id=0, **BERT, **d)),
    ),
    "minilm": Case(
        "text",
        spell("minilm-l6", {**BERT, "num_attention_heads": 8}),
        _text_dropout(0.1),
        lambda d: BertModel(
            BertConfig(vocab_size=VOCAB, pad_token_id=0, **{**BERT, "num_attention_heads": 8}, **d)
        ),
    ),
    "roberta": Case(
        "text",
        spell("roberta-base", BERT),
        _text_dropout(0.1),
        lambda d: RobertaModel(
            RobertaConfig(vocab_size=VOCAB, type_vocab_size=1, layer_norm_eps=1e-5, **BERT, **d)
        ),
        pad_token_id=1,
    ),
    "clap-text": Case(
        "text",
        spell("clap-text-base", BERT),
        _text_dropout(0.1),
        lambda d: ClapTextModel(ClapTextConfig(vocab_size=VOCAB, type_vocab_size=1, **BERT, **d)),
        pad_token_id=1,
    ),
    "distilbert": Case(
        "text",
        spell("distilbert-base-uncased", DISTILBERT),
        {"dropout": 0.1, "attention_dropout": 0.1},
        lambda d: DistilBertModel(DistilBertConfig(vocab_size=VOCAB, **DISTILBERT, **d)),
        features=first_token,
    ),
    "clip": Case(
        "text",
        spell("clip-text-base", BERT),
        {"attention_dropout": 0.1},
        lambda d: CLIPTextModel(CLIPTextConfig(vocab_size=VOCAB, eos_token_id=EOS, **BERT, **d)),
        pad_token_id=None,
        authors=_open_clips,
    ),
    "xlm-roberta": Case(
        "text",
        spell("xlm-roberta-base", BERT),
        _text_dropout(0.1),
        lambda d: XLMRobertaModel(
            XLMRobertaConfig(vocab_size=VOCAB, type_vocab_size=1, layer_norm_eps=1e-5, **BERT, **d)
        ),
        pad_token_id=1,
    ),
    "siglip": Case(
        "text",
        spell("siglip-text-base", BERT),
        {"attention_dropout": 0.1},
        lambda d: SiglipTextModel(
            SiglipTextConfig(vocab_size=VOCAB, bos_token_id=None, eos_token_id=1, **BERT, **d)
        ),
        call=without_mask,
        pad_token_id=1,
    ),
    "chinese-clip": Case(
        "text",
        spell("chinese-clip-text-base", BERT),
        _text_dropout(0.1),
        lambda d: ChineseCLIPTextModel(
            ChineseCLIPTextConfig(vocab_size=VOCAB, **BERT, **d), add_pooling_layer=False
        ),
        features=first_token,
    ),
    "mpnet": Case(
        "text",
        spell("mpnet-base", BERT),
        _text_dropout(0.1),
        lambda d: MPNetModel(MPNetConfig(vocab_size=VOCAB, layer_norm_eps=1e-5, **BERT, **d)),
        pad_token_id=1,
    ),
    "electra": Case(
        "text",
        spell("electra-small", {**BERT, "embedding_size": 32}),
        _text_dropout(0.1),
        lambda d: ElectraModel(ElectraConfig(vocab_size=VOCAB, **BERT, embedding_size=32, **d)),
        features=first_token,
    ),
    "modernbert": Case(
        "text",
        spell("modernbert-base", {**BERT, "num_hidden_layers": 4, "local_attention": 6}),
        {"embedding_dropout": 0.1, "mlp_dropout": 0.1, "attention_dropout": 0.1},
        lambda d: ModernBertModel(
            ModernBertConfig(
                vocab_size=VOCAB,
                pad_token_id=0,
                local_attention=6,
                **{**BERT, "num_hidden_layers": 4},
                **d,
            )
        ),
        features=first_token,
    ),
    "xlm": Case(
        "text",
        spell("xlm-mlm-en-2048", {**XLM, "n_langs": 3}),
        {"dropout": 0.1, "attention_dropout": 0.1},
        lambda d: XLMModel(XLMConfig(vocab_size=VOCAB, n_langs=3, **XLM, **d)),
        call=with_languages,
        languages=3,
        pad_token_id=2,
    ),
    "t5": Case(
        "text",
        spell("t5-small", T5),
        {"dropout_rate": 0.1},
        lambda d: T5EncoderModel(T5Config(vocab_size=VOCAB, **T5, **d)),
        call=with_mean,
    ),
    "mt5": Case(
        "text",
        spell("mt5-small", T5),
        {"dropout_rate": 0.1},
        lambda d: MT5EncoderModel(MT5Config(vocab_size=VOCAB, **T5, **d)),
        call=with_mean,
    ),
}


@pytest.fixture(params=CASES, ids=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    """Each family in turn."""
    return CASES[request.param]


@pytest.fixture
def cases() -> dict[str, Case]:
    """All families by name."""
    return CASES


@pytest.fixture
def forward() -> Callable[[list[Layer], dict[str, Tensor]], dict[str, Tensor]]:
    """Run layers one after the other."""

    def run(layers: list[Layer], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for layer in layers:
            tensors = layer(tensors)
        return tensors

    return run
