"""Small towers of every family beside the library's own model, made by the library's own
constructors."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import transformers
from torch import Tensor, nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.models.vision_transformer import VisionTransformer
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
DINO = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 8}
HF_VIT = {**DINO, "intermediate_size": 144}
HF_CONVNEXT = {"hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 2, 1]}
WINDOWS = {"depths": [2, 2], "num_attention_heads": [2, 4], "window_size": 4}
SWIN = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
AST = {**HF_VIT, "num_mel_bins": 16, "max_length": 40, "frequency_stride": 4, "time_stride": 8}
HTSAT = {"patch_embeds_hidden_size": 16, **WINDOWS, "spec_size": 64, "num_mel_bins": 16}
WHISPER = {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4}
WHISPER |= {"encoder_ffn_dim": 144, "num_mel_bins": 16, "max_source_positions": 50}
POSITIONS = {"max_position_embeddings": 20}
BERT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT |= {"intermediate_size": 144, **POSITIONS}
DISTILBERT = {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 144, **POSITIONS}
XLM = {"emb_dim": 64, "n_layers": 2, "n_heads": 4, **POSITIONS}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 144, "num_layers": 3, "num_heads": 4}
# what makes a training forward draw
PLAIN = {"dropout": 0.1, "attention_dropout": 0.1}
HIDDEN = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
PATHS = {**HIDDEN, "drop_path_rate": 0.3}


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
    # patterns of tensors whose gradients are sums in another order: equal to rounding
    rounded: tuple[str, ...] = ()
    pad_token_id: int | None = 0
    # first values that are not the library's
    authors: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda state: {}

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
        if isinstance(model, transformers.PreTrainedModel):
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


def hugging_face(
    branch: str,
    name: str,
    kind: str,
    sizes: dict,
    dropout: dict[str, float],
    fixed: dict | None = None,
    model: Callable[..., nn.Module] | None = None,
    **more,
) -> Case:
    """A model of transformers. `kind`: what its class and that of its configuration begin with;
    `fixed`: what the configuration has beside the sizes in our tower's name."""
    make = model or getattr(transformers, f"{kind}Model")
    configuration = getattr(transformers, f"{kind.removesuffix('Encoder')}Config")
    of_branch = {"image": {"image_size": SIZE}, "text": {"vocab_size": VOCAB}, "audio": {}}[branch]

    def library(dropout: dict[str, float]) -> nn.Module:
        return make(configuration(**of_branch, **dict(fixed or {}), **sizes, **dropout))

    return Case(branch, spell(name, sizes), dropout, library, **more)


def torchvisions(name: str, library, classifier: str, dropout=(), prefix: str = "") -> Case:
    prefix = prefix or f"{classifier}."
    return Case("image", name, dict(dropout), library, classifier, prefix)


def _convnext(dropout: dict[str, float]) -> nn.Module:
    sizes = ((16, 24, 1), (24, 32, 1), (32, 48, 2), (48, None, 1))
    return ConvNeXt([CNBlockConfig(*each) for each in sizes], layer_scale=1e-6, **dropout)


IMAGES = {
    "hf-clip": ("clip-vit-base-patch32", "CLIPVision", HF_VIT, {"attention_dropout": 0.1}),
    "hf-siglip": ("siglip-base-patch16-224", "SiglipVision", HF_VIT, {"attention_dropout": 0.1}),
    "hf-vit": ("vit-base-patch16-224", "ViT", HF_VIT, HIDDEN),
    "hf-convnext": ("convnext-tiny-224", "ConvNext", HF_CONVNEXT, {"drop_path_rate": 0.3}),
    "hf-convnextv2": ("convnextv2-tiny-1k-224", "ConvNextV2", HF_CONVNEXT, {"drop_path_rate": 0.3}),
    "hf-swin": ("swin-tiny-patch4-window7-224", "Swin", SWIN, PATHS),
}
NO_MASK_TOKEN = {"classifier_prefix": "embeddings.mask_token"}
OF_ROBERTA = {"type_vocab_size": 1, "layer_norm_eps": 1e-5}
OF_MINILM = {**BERT, "num_attention_heads": 8}
OF_MODERN = {**BERT, "num_hidden_layers": 4, "local_attention": 6}
DROPS_OF_MODERN = {"embedding_dropout": 0.1, "mlp_dropout": 0.1, "attention_dropout": 0.1}
OF_SIGLIP = {"bos_token_id": None, "eos_token_id": 1}

CASES = {
    "resnet-basic": torchvisions(
        "resnet18:layers=1-1-2-1", lambda d: ResNet(BasicBlock, [1, 1, 2, 1]), "fc"
    ),
    "resnet-bottleneck": torchvisions(
        "resnet50:layers=1-1-1-1,width_per_group=16,zero_init_residual=true",
        lambda d: ResNet(Bottleneck, [1, 1, 1, 1], width_per_group=16, zero_init_residual=True),
        "fc",
    ),
    "vit": replace(
        torchvisions(
            spell("vit_b_16", VIT),
            lambda d: VisionTransformer(SIZE, **VIT, **d),
            "heads.head",
            {"dropout": 0.1, "attention_dropout": 0.2},
            "heads.",
        ),
        rounded=("*",),
    ),
    "convnext": torchvisions(
        "convnext_tiny:dims=16-24-32-48,depths=1-1-2-1",
        _convnext,
        "classifier.2",
        {"stochastic_depth_prob": 0.5},
    ),
    **{name: hugging_face("image", f"hf:{ours}", *rest) for name, (ours, *rest) in IMAGES.items()},
    "hf-siglip2": hugging_face(
        "image",
        "hf:siglip2-base-patch16-naflex",
        "Siglip2Vision",
        {**HF_VIT, "num_patches": 9},
        {"attention_dropout": 0.1},
        call=in_patches,
        rounded=("embeddings.position_embedding.weight",),  # of one image, not of each by itself
    ),
    "hf-dinov2": hugging_face("image", "hf:dinov2-base", "Dinov2", DINO, PATHS, **NO_MASK_TOKEN),
    "hf-dinov2-registers": hugging_face(
        "image",
        "hf:dinov2-with-registers-base",
        "Dinov2WithRegisters",
        {**DINO, "num_register_tokens": 3},
        PATHS,
        **NO_MASK_TOKEN,
    ),
    "hf-ast": hugging_face("audio", "hf:ast", "AST", AST, HIDDEN),
    "hf-htsat": hugging_face(
        "audio", "hf:clap-htsat-unfused", "ClapAudio", HTSAT, PATHS, seconds=1.0
    ),
    "hf-whisper": hugging_face(
        "audio",
        "hf:whisper-tiny",
        "Whisper",
        WHISPER,
        {**PLAIN, "activation_dropout": 0.1},
        model=WhisperEncoder,
        features=lambda output: output.last_hidden_state.mean(1),
    ),
    "bert": hugging_face("text", "bert-base-uncased", "Bert", BERT, HIDDEN),
    "minilm": hugging_face("text", "minilm-l6", "Bert", OF_MINILM, HIDDEN),
    "roberta": hugging_face(
        "text", "roberta-base", "Roberta", BERT, HIDDEN, OF_ROBERTA, pad_token_id=1
    ),
    "clap-text": hugging_face(
        "text", "clap-text-base", "ClapText", BERT, HIDDEN, {"type_vocab_size": 1}, pad_token_id=1
    ),
    "distilbert": hugging_face(
        "text", "distilbert-base-uncased", "DistilBert", DISTILBERT, PLAIN, features=first_token
    ),
    "clip": hugging_face(
        "text",
        "clip-text-base",
        "CLIPText",
        BERT,
        {"attention_dropout": 0.1},
        {"eos_token_id": EOS},
        pad_token_id=None,
        authors=_open_clips,
    ),
    "xlm-roberta": hugging_face(
        "text", "xlm-roberta-base", "XLMRoberta", BERT, HIDDEN, OF_ROBERTA, pad_token_id=1
    ),
    "siglip": hugging_face(
        "text",
        "siglip-text-base",
        "SiglipText",
        BERT,
        {"attention_dropout": 0.1},
        OF_SIGLIP,
        call=without_mask,
        pad_token_id=1,
    ),
    "chinese-clip": hugging_face(
        "text",
        "chinese-clip-text-base",
        "ChineseCLIPText",
        BERT,
        HIDDEN,
        model=partial(transformers.ChineseCLIPTextModel, add_pooling_layer=False),
        features=first_token,
    ),
    "mpnet": hugging_face(
        "text", "mpnet-base", "MPNet", BERT, HIDDEN, {"layer_norm_eps": 1e-5}, pad_token_id=1
    ),
    "electra": hugging_face(
        "text",
        "electra-small",
        "Electra",
        {**BERT, "embedding_size": 32},
        HIDDEN,
        features=first_token,
    ),
    "modernbert": hugging_face(
        "text",
        "modernbert-base",
        "ModernBert",
        OF_MODERN,
        DROPS_OF_MODERN,
        {"pad_token_id": 0},
        features=first_token,
    ),
    "xlm": hugging_face(
        "text",
        "xlm-mlm-en-2048",
        "XLM",
        {**XLM, "n_langs": 3},
        PLAIN,
        call=with_languages,
        languages=3,
        pad_token_id=2,
    ),
    "t5": hugging_face("text", "t5-small", "T5Encoder", T5, {"dropout_rate": 0.1}, call=with_mean),
    "mt5": hugging_face(
        "text", "mt5-small", "MT5Encoder", T5, {"dropout_rate": 0.1}, call=with_mean
    ),
}


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
