"""Both towers as transformers' `VisionTextDualEncoderModel`: whether it can be them, its
configuration, and its names.

torchvision's ViT is transformers' `Dinov2Model` with a layer scale of 1: normalised before each
part, the class token behind the final norm as pooled output. (`ViTModel` sends that through a tanh;
`CLIPVisionModel` has a norm before the blocks.) torchvision's ConvNeXt is `ConvNextModel`. The
pooled output of transformers' ResNet keeps two dimensions of size 1, which the dual encoder's
projection refuses. Image towers that are transformers' own (`hf:`) are themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import ConvNextConfig, Dinov2Config, PreTrainedConfig, VisionTextDualEncoderConfig

from models.towers.layers import Tower
from models.towers.libraries.torchvision_by_hand import ARCHITECTURES
from models.towers.libraries.transformers_image import FAMILIES
from models.towers.names import TWO_LAYERS
from models.weights.translation import Pair, pairs_of

# and how
POOLED_TEXT = {
    "BertModel": "pooler",
    "RobertaModel": "pooler",
    "XLMRobertaModel": "pooler",
    "MPNetModel": "pooler",
    "CLIPTextModel": "eos",
}
POOLED_IMAGE = {"vit": "cls", "convnext": "avg"}
OF_TRANSFORMERS = "transformers"
THERE = "vision_model."
EPS = 1e-6  # of torchvision's layer norms in ViT and ConvNeXt


def what_differs(image: Tower, text: Tower) -> list[str]:
    """Why the dual encoder cannot be these towers with their heads and scalars, a reason each;
    none: it can."""
    no_bias = (
        ["transformers' dual encoder has no logit_bias"]
        if "logit_bias" in image.specs[-1].template.scalars
        else []
    )
    projection = image.config.get("projection", "linear")
    other_heads = (
        [f"transformers' dual encoder has projections of one layer, not --projection {projection}"]
        if projection != "linear"
        else []
    )
    return towers_differ(image, text) + no_bias + other_heads


def towers_differ(image: Tower, text: Tower) -> list[str]:
    """The same of the towers alone."""
    others = [
        f"transformers has no tower that is {tower.config['architecture']} of "
        f"{tower.config['library']}"
        for tower in (image, text)
        if not _may_be_of_transformers(tower)
    ]
    if others:
        return others
    reasons, kind = [], _kind(image)
    if kind == "resnet":
        reasons.append(
            "the pooled output of transformers' ResNet has shape [b, c, 1, 1], which the dual "
            "encoder's projection does not take"
        )
    if kind == "vit" and image.config["mlp_dim"] % image.config["hidden_dim"]:
        reasons.append(
            "transformers' Dinov2Model has an inner layer of whole multiples of "
            f"{image.config['hidden_dim']}, not {image.config['mlp_dim']}"
        )
    if image.config["architecture"] == "Siglip2VisionModel":
        reasons.append("transformers' Siglip2VisionModel takes images in patches")
    for tower in (image, text):
        if tower.config["architecture"].startswith("ChineseCLIP"):
            reasons.append(
                f"transformers has {tower.config['architecture']} in its ChineseCLIPModel only"
            )
    own = (
        FAMILIES[image.config["config"]["model_type"]].pools[0]
        if kind == OF_TRANSFORMERS
        else POOLED_IMAGE.get(kind, image.config["pool"])
    )
    if image.config["pool"] != own:
        reasons.append(f"transformers pools the images by pool={own}, not {image.config['pool']}")
    architecture = text.config["architecture"]
    if TWO_LAYERS in text.config:
        reasons.append(f"transformers has no {TWO_LAYERS} behind {architecture}")
    if text.config["pool"] == "head":
        reasons.append(
            f"transformers' {architecture} pools the last token of the padding, which the dual "
            "encoder masks"
        )
    elif architecture not in POOLED_TEXT:
        reasons.append(f"transformers' {architecture} has no pooled output")
    elif text.config["pool"] != POOLED_TEXT[architecture]:
        reasons.append(
            f"the pooled output of transformers' {architecture} is that of "
            f"pool={POOLED_TEXT[architecture]}, not {text.config['pool']}"
        )
    if architecture == "CLIPTextModel" and text.config["eos_token_id"] == 2:
        reasons.append(
            "transformers' CLIPTextModel takes eos_token_id 2 for 'the highest id of the text'"
        )
    return reasons


def _may_be_of_transformers(tower: Tower) -> bool:
    """Is it transformers' own, or one of torchvision's that are looked at one by one here?"""
    if tower.config["library"] == OF_TRANSFORMERS:
        return True
    by_hand = tower.config["library"] == "torchvision" and "arguments" not in tower.config
    return by_hand and tower.config["architecture"] in ARCHITECTURES


def dual_encoder_config(
    image: Tower, text: Tower, logit_scale: float
) -> VisionTextDualEncoderConfig:
    """Of towers of which nothing differs."""
    return VisionTextDualEncoderConfig(
        vision_config=_vision_config(image),
        text_config=library_config(text),
        projection_dim=image.config["embed_dim"],
        logit_scale_init_value=logit_scale,
        architectures=["VisionTextDualEncoderModel"],
        dtype="float32",
    )


def library_config(tower: Tower) -> dict[str, Any]:
    """The configuration of transformers' model that is the tower."""
    config = {
        key: value
        for key, value in tower.config["config"].items()
        if key not in ("dtype", "transformers_version", "_name_or_path")
    }
    eos_token_id = tower.config.get("eos_token_id")
    return {**config, "architectures": [tower.config["architecture"]]} | (
        {"eos_token_id": eos_token_id} if eos_token_id is not None else {}
    )


def dual_encoder_pairs(image: Tower, text: Tower) -> list[Pair]:
    """Our names and those in a folder of the dual encoder, as transformers writes them to disk."""
    if _kind(image) == OF_TRANSFORMERS:
        pairs = same_pairs(image, "vision_model")
    elif _kind(image) == "vit":
        pairs = _vit_pairs(image.config["num_layers"])
    else:
        pairs = CONVNEXT.pairs(image.config["depths"], THERE)
    pairs += same_pairs(text, "text_model")
    return [*pairs, *pairs_of(HEADS)]


# the scale has one dimension of size 1 here and none elsewhere
SCALE = "head.logit_scale = logit_scale | number"
HEADS = f"""
head.image_projection.weight = visual_projection.weight
head.text_projection.weight = text_projection.weight
{SCALE}
"""


def same_pairs(tower: Tower, there: str) -> list[Pair]:
    """Of a tower that is called as in transformers' files."""
    return [
        Pair((name,), (f"{there}.{name.removeprefix(f'{tower.branch}.')}",))
        for spec in tower.specs[:-1]
        for name in spec.template.canonical_names.values()
    ]


def _kind(image: Tower) -> str:
    if image.config["library"] == "transformers":
        return OF_TRANSFORMERS
    return image.config["architecture"].split("_")[0].rstrip("0123456789")  # resnet, vit, convnext


def _vision_config(image: Tower) -> dict[str, Any]:
    if _kind(image) == OF_TRANSFORMERS:
        # ConvNeXt has no such key; the dual encoder asks for it
        return {**library_config(image), "hidden_size": image.width}
    return _config_of_torchvision(image).to_dict()


def _config_of_torchvision(image: Tower) -> PreTrainedConfig:
    sizes = image.config
    if _kind(image) == "convnext":
        return ConvNextConfig(
            hidden_sizes=list(sizes["dims"]),
            depths=list(sizes["depths"]),
            num_stages=len(sizes["dims"]),
            layer_scale_init_value=sizes["layer_scale"],
            drop_path_rate=sizes["stochastic_depth_prob"],
            layer_norm_eps=EPS,
            image_size=sizes["image_size"],
            # ConvNeXt itself has no such key; the dual encoder asks for it
            hidden_size=image.width,
        )
    return Dinov2Config(
        hidden_size=sizes["hidden_dim"],
        num_hidden_layers=sizes["num_layers"],
        num_attention_heads=sizes["num_heads"],
        mlp_ratio=sizes["mlp_dim"] // sizes["hidden_dim"],
        hidden_dropout_prob=sizes["dropout"],
        attention_probs_dropout_prob=sizes["attention_dropout"],
        layer_norm_eps=EPS,
        image_size=sizes["image_size"],
        patch_size=sizes["patch_size"],
        use_mask_token=False,
    )


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
