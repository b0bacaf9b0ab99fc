"""transformers' `VisionTextDualEncoderModel` in towers of torchvision, beside a text tower of
transformers: whether they can be filled from it, and its names. Version 0.1 exported such towers as
one. Towers that are all of transformers are read as `whole_models.py` reads its models.

torchvision's ViT is read from a `Dinov2Model`, whose layer scale is multiplied into the linear
before it, and its ConvNeXt from a `ConvNextModel`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from models.towers.layers import Tower
from models.towers.names import TWO_LAYERS
from models.weights.of_transformers import HEADS, OF_TRANSFORMERS, same_pairs
from models.weights.translation import Pair, pairs_of

POOLED_TEXT = {  # and how
    "BertModel": "pooler",
    "RobertaModel": "pooler",
    "XLMRobertaModel": "pooler",
    "MPNetModel": "pooler",
    "CLIPTextModel": "eos",
}
POOLED_IMAGE = {"vit": "cls", "convnext": "avg"}
THERE = "vision_model."


def what_differs(image: Tower, text: Tower) -> list[str]:
    """Why the towers are not filled from a dual encoder, a reason each; none: they are."""
    pools = POOLED_IMAGE.get(_kind(image)), POOLED_TEXT.get(_architecture(text))
    reasons = []
    for tower, pool in zip((image, text), pools):
        name = tower.config.get("architecture", tower.name)
        if pool is None:
            reasons.append(f"it has no {name} of {tower.config.get('library', 'your own')}")
        elif tower.config["pool"] != pool:
            reasons.append(f"it pools by pool={pool}, not {tower.config['pool']}")
    if TWO_LAYERS in text.config:
        reasons.append(f"it has no {TWO_LAYERS} behind its text tower")
    return reasons


def dual_encoder_pairs(image: Tower, text: Tower) -> list[Pair]:
    """Our names and those in a folder of the dual encoder, as transformers writes them to disk."""
    if _kind(image) == "vit":
        pairs = _vit_pairs(image.config["num_layers"])
    else:
        pairs = CONVNEXT.pairs(image.config["depths"], THERE)
    return [*pairs, *same_pairs(text, "text_model"), *pairs_of(HEADS)]


def _architecture(text: Tower) -> str:
    own = text.config.get("library") == OF_TRANSFORMERS
    return text.config["architecture"] if own else ""


def _kind(image: Tower) -> str:
    """`vit` or `convnext` of torchvision; anything else is none of these."""
    by_hand = image.config.get("library") == "torchvision" and "arguments" not in image.config
    return image.config["architecture"].partition("_")[0] if by_hand else ""


VIT = """
class_token = embeddings.cls_token
encoder.pos_embedding = embeddings.position_embeddings
conv_proj.* = embeddings.patch_embeddings.projection.*
encoder.ln.* = layernorm.*
"""
VIT_BLOCK = """
ln_1.* = norm1.*
ln_2.* = norm2.*
self_attention.in_proj_* = attention.attention.{query,key,value}.* | joined
self_attention.out_proj.{weight,bias} = \
    attention.output.dense.{weight,bias} layer_scale1.lambda1 | scaled
mlp.0.* = mlp.fc1.*
mlp.3.{weight,bias} = \
    mlp.fc2.{weight,bias} layer_scale2.lambda1 | scaled
"""


def _vit_pairs(num_layers: int) -> list[Pair]:
    pairs = pairs_of(VIT, "image.", THERE)
    for i in range(num_layers):
        ours, theirs = f"image.encoder.layers.encoder_layer_{i}.", f"{THERE}encoder.layer.{i}."
        pairs += pairs_of(VIT_BLOCK, ours, theirs)
    return pairs


@dataclass(frozen=True)
class ConvNeXtNames:
    """How another library calls what torchvision's ConvNeXt has: tables for `pairs_of`, with
    `blocks` of `stage` and what lies `between` stages below `stages`."""

    ends: str
    stages: str
    between: str
    blocks: str
    block: str

    def pairs(self, depths: Sequence[int], there: str) -> list[Pair]:
        """torchvision's `features.1` and on are blocks and what lies between, in turns."""
        pairs = pairs_of(self.ends, "image.", there)
        for stage, depth in enumerate(depths):
            theirs = f"{there}{self.stages}.{stage}."
            if stage:
                pairs += pairs_of(self.between, f"image.features.{2 * stage}.", theirs)
            for i in range(depth):
                ours = f"image.features.{2 * stage + 1}.{i}."
                pairs += pairs_of(self.block, ours, f"{theirs}{self.blocks}.{i}.")
        return pairs


CONVNEXT = ConvNeXtNames(
    ends="""
features.0.0.* = embeddings.patch_embeddings.*
features.0.1.* = embeddings.layernorm.*
classifier.0.* = layernorm.*
""",
    stages="encoder.stages",
    between="""
0.* = downsampling_layer.0.*
1.* = downsampling_layer.1.*
""",
    blocks="layers",
    block="""
block.0.* = dwconv.*
block.2.* = layernorm.*
block.3.* = pwconv1.*
block.5.* = pwconv2.*
layer_scale = layer_scale_parameter | of places
""",
)
