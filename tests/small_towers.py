"""Towers that are small enough to train in a test on several ranks: of images and texts as libraries
have them, of sounds also a toy that the engine has never heard of, of clips.

Their sizes are such that a block is cut, masks and padding matter, and no two widths are equal by
chance.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.towers.audio import audio_tower
from models.towers.image import image_tower
from models.towers.layers import Layer, LayerSpec, Tower, reset
from models.towers.text import text_tower
from models.towers.video import video_tower

VOCAB, MAX_TOKENS, EMBED_DIM = 128, 16, 24

TOWERS = {
    "resnet+bert": (
        "resnet50:layers=1-1-1-1,width_per_group=8",
        "bert-tiny:hidden_size=48,intermediate_size=64,num_hidden_layers=3",
        64,
    ),
    "vit+clip": (
        "vit_b_16:hidden_dim=48,num_heads=4,num_layers=3,mlp_dim=64,patch_size=8",
        "clip-text-base:hidden_size=48,intermediate_size=64,num_hidden_layers=3,num_attention_heads=4",
        32,
    ),
}
TOWERS |= {
    "resnet, max+bert, mean": (
        f"{TOWERS['resnet+bert'][0]},pool=max",
        f"{TOWERS['resnet+bert'][1]},pool=mean",
        64,
    ),
    "vit, attention+clip, attention": (
        f"{TOWERS['vit+clip'][0]},pool=attention",
        f"{TOWERS['vit+clip'][1]},pool=attention",
        32,
    ),
    "resnet18+bert, mean": ("resnet18", f"{TOWERS['resnet+bert'][1]},pool=mean", 64),
    "vit, avg+bert, last": (
        f"{TOWERS['vit+clip'][0]},pool=avg",
        f"{TOWERS['resnet+bert'][1]},pool=last",
        32,
    ),
}
_SMALL = "hidden_size=48,num_attention_heads=4,num_hidden_layers=3"
TOWERS |= {  # what blocks share, texts of full length, maps and registers, by transformers
    "swin+mpnet": (
        "hf:swin-tiny:embed_dim=16,depths=2-2,num_heads=2-4,window_size=4,drop_path_rate=0",
        f"mpnet-base:{_SMALL},intermediate_size=64",
        32,
    ),
    "siglip+t5": (
        f"hf:siglip-base-patch16-224:{_SMALL},intermediate_size=64,patch_size=8",
        "t5-small:d_model=48,d_kv=16,d_ff=64,num_layers=3,num_heads=3,dropout_rate=0",
        32,
    ),
}
TOWERS |= {  # recorded: two tensors between blocks, angles of positions, masks that travel
    "tnt+coca": (
        "timm:tnt_s_patch16_224:depth=3,embed_dim=48,inner_dim=8",
        "open_clip:coca_ViT-B-32:layers=3,width=48,heads=3,context_length=16",
        32,
    ),
    "dinov3+open_clip": (
        "timm:vit_small_patch16_dinov3:depth=3,embed_dim=48,num_heads=3",
        "open_clip:ViT-B-16-SigLIP:layers=3,width=48,heads=3,context_length=16",
        32,
    ),
    "swin_t+open_clip": (
        "timm:swin_tiny_patch4_window7_224:embed_dim=24,depths=2-2,num_heads=2-4",
        "open_clip:ViT-B-32-quickgelu:layers=2,width=48,heads=3,context_length=16,pool=last",
        32,
    ),
}
# no batch normalisation, which sees the split, and so without HTSAT; "toy": `toy_sound_tower`
SOUND_TOWERS = {
    "whisper": "hf:whisper-tiny:d_model=32,encoder_layers=2,encoder_attention_heads=2,"
    "encoder_ffn_dim=48,num_mel_bins=8,max_source_positions=50,dropout=0.1",
    "ast": "hf:ast:hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=48,"
    "num_mel_bins=16,max_length=40,attention_probs_dropout_prob=0.1",
    "vit": "vit_b_32:patch_size=8,num_layers=2,hidden_dim=32,num_heads=2,mlp_dim=48,dropout=0.1",
}
VIDEO_TOWER = (
    "vit_b_32:patch_size=8,num_layers=2,hidden_dim=32,num_heads=2,mlp_dim=48,dropout=0.1,"
    "time=transformer,time_layers=2"
)
SOUND_WIDTH, MOST_FRAMES, FRAME_SIDE = 12, 3, 16


def image_and_text_towers(name: str, dropout: float) -> dict[str, Tower]:
    """Without heads. `dropout`: of the text tower."""
    image, text, image_size = TOWERS[name]
    if dropout:
        key = "hidden_dropout_prob" if "bert" in text else "attention_dropout"
        text += f",{key}={dropout}"
    elif text.startswith("bert"):
        text += ",hidden_dropout_prob=0,attention_probs_dropout_prob=0"
    return {
        "image": image_tower(image, image_size),
        "text": text_tower(text, VOCAB, MAX_TOKENS, pad_token_id=0, eos_token_id=2),
    }


def sound_tower(name: str) -> Tower:
    return toy_sound_tower() if name == "toy" else audio_tower(SOUND_TOWERS[name], size=32)


def clip_tower() -> Tower:
    """What begins as zeros, and would leave others without a gradient, does not here."""
    tower = video_tower(VIDEO_TOWER, FRAME_SIDE, MOST_FRAMES)
    specs = [
        replace(spec, initialise=reset) if spec.name.startswith("video.time.") else spec
        for spec in tower.specs
    ]
    return replace(tower, specs=tuple(specs))


def with_lora(tower: Tower, written: dict[str, Any] | None) -> Tower:
    """The tower with adapters, of which B starts at random: at zero nothing of A would be seen."""
    if written is None:
        return tower
    from models.towers.adapters.layers import AdaptedSpec, adapted_tower
    from models.towers.adapters.lora import LoRA

    class Drawn(AdaptedSpec):
        def build(self, seed, weights=None):
            layer = super().build(seed, weights)
            draw = torch.Generator().manual_seed(len(self.name))
            for name, tensor in layer.state_dict().items():
                if ".lora_B." in name:
                    tensor.copy_(0.1 * torch.randn(tensor.shape, generator=draw))
            return layer

    tower = adapted_tower(tower, LoRA(**written))
    specs = [Drawn(**vars(spec)) for spec in tower.specs[:-1]]
    return replace(tower, specs=(*specs, tower.specs[-1]))


# -- a modality that the engine has never heard of


class SoundStem(Layer):
    reads, makes, drops = ("samples",), ("audio_hidden",), ("samples",)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SOUND_WIDTH, 16)

    def compute(self, samples: Tensor) -> Tensor:
        return torch.tanh(self.linear(samples))


class SoundBlock(Layer):
    reads = makes = ("audio_hidden",)

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(16), nn.Linear(16, 16), nn.Dropout(0.1)

    def compute(self, sound_hidden: Tensor) -> Tensor:
        return sound_hidden + self.dropout(F.gelu(self.linear(self.norm(sound_hidden))))


class SoundPool(Layer):
    reads, makes, drops = ("audio_hidden",), ("audio_features",), ("audio_hidden",)

    def compute(self, sound_hidden: Tensor) -> Tensor:
        return sound_hidden * 1


def toy_sound_tower() -> Tower:
    specs = []
    with torch.device("meta"):
        for name, layer in (
            ("stem", SoundStem()),
            ("block0", SoundBlock()),
            ("block1", SoundBlock()),
            ("pool", SoundPool()),
        ):
            layer.canonical_names = {own: f"audio.{name}.{own}" for own in layer.state_dict()}
            specs.append(LayerSpec(f"audio.{name}", "audio", layer, reset))
    return Tower("audio", "toy", 16, tuple(specs), {})
