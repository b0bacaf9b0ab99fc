"""OpenCLIP's state dicts: for towers `open_clip:MODEL` any of them, and for towers of torchvision
and transformers those that these libraries have too, which are timm's ConvNeXt beside CLIP's text
tower.

Its own image networks are others than torchvision's of similar names, and are refused with what
differs.
"""

from collections.abc import Collection, Iterable
from functools import partial

import torch
from torch import Tensor

from models.towers.layers import Tower
from models.towers.libraries.open_clip import SIDE_PREFIXES
from models.towers.names import TWO_LAYERS
from models.weights.dual_encoder import ConvNeXtNames
from models.weights.of_transformers import SCALE
from models.weights.translation import Pair, pairs_of

SIDES = ("open_clip", "timm")  # the libraries of image towers that OpenCLIP has as they are
TIMM, HF_TEXT = "visual.trunk.", "text.transformer."
MT5 = "MT5EncoderModel"
# how a side ends inside of its tower: SigLIP's texts, CLIP's ResNets, a projection of timm's towers
# with a bias or of two layers, the classifier of a tower of timm, two layers behind one of
# transformers
LAST_LINEARS: tuple[str, ...]
LAST_LINEARS = ("text_projection", "attnpool.c_proj", "head.proj", "head.mlp.fc2")
LAST_LINEARS += ("trunk.head", "trunk.fc", "trunk.head.fc", "trunk.classifier", "proj.2")
OTHERS = {  # a name that tells, what it belongs to, how it differs
    "visual.ln_pre.weight": "its ViT has a norm before the blocks (visual.ln_pre) and patches "
    "without a bias; torchvision's has neither",
    "visual.attnpool.positional_embedding": "its ResNet has three convolutions in its stem, pools "
    "by averages before each stride and by attention at the end (visual.attnpool); torchvision's "
    "does not",
    "visual.trunk.patch_embed.proj.weight": "its image tower is one of timm's ViTs, which is cut "
    "off and pooled in another way than torchvision's",
    "visual.conv1.weight": "its ViT has patches without a bias; torchvision's has one",
    "visual.head.mlp.fc1.weight": "its image head has two layers; ours is one linear",
    "text.transformer.embeddings.word_embeddings.weight": "its text tower takes the mean over the "
    "tokens; ours the first one's pooled output",
}


def is_open_clip(names: Iterable[str]) -> bool:
    return any(name.startswith(("visual.", "module.visual.")) for name in names)


def refuse_other_architecture(
    where: str, names: Collection[str], image: Tower, text: Tower
) -> None:
    """Raise ValueError unless both the file and the towers are of the architectures that are the
    same in both."""
    libraries = [tower.config.get("library") for tower in (image, text)]
    # an image tower of timm is in OpenCLIP's `TimmModel`, a text tower of transformers in its
    # `HFTextEncoder`; the file says whether its towers are these
    is_side = (
        libraries[0] == "open_clip"
        or (libraries[0] == "timm" and any(name.startswith(TIMM) for name in names)),
        libraries[1] == "open_clip"
        or (libraries[1] == "transformers" and any(name.startswith(HF_TEXT) for name in names)),
    )
    if all(is_side):
        _refuse_other_width(where, image, text)
        return
    if "open_clip" in libraries:
        raise ValueError(
            f"--import {where}: OpenCLIP weights, but the towers are {image.name} and {text.name}; "
            "give --image-tower and --text-tower the same open_clip:MODEL"
        )
    for telling, difference in OTHERS.items():
        if telling in names:
            raise ValueError(
                f"--import {where}: OpenCLIP weights of another architecture than ours: "
                f"{difference}. Give --image-tower and --text-tower the open_clip:MODEL that it "
                "is of; with other towers, OpenCLIP's convnext_* models with CLIP's text tower are "
                "read"
            )
    if not image.config["architecture"].startswith("convnext"):
        raise ValueError(
            f"--import {where}: OpenCLIP weights of a ConvNeXt, but the image tower is "
            f"{image.name}; give --image-tower convnext_..."
        )
    if (
        text.config["architecture"] != "CLIPTextModel"
        or text.config["config"]["hidden_act"] != "gelu"
    ):
        raise ValueError(
            f"--import {where}: OpenCLIP's ConvNeXt models have CLIP's text tower with gelu, but "
            f"the text tower is {text.name} ({text.config['architecture']}, "
            f"{text.config['config'].get('hidden_act')}); give --text-tower "
            "clip-text-base:hidden_act=gelu"
        )


def _refuse_other_width(where: str, image: Tower, text: Tower) -> None:
    """A side whose projection stays in the tower makes what is compared: its head must be able to
    leave that as it is."""
    for tower in (image, text):
        config = tower.config
        projected = config.get("projection") != "none"
        if projected and projection_of(tower) is None and config["embed_dim"] != tower.width:
            raise ValueError(
                f"--import {where}: the projection of {tower.name} is a part of the tower, which "
                f"makes {tower.width} numbers; give --embed-dim {tower.width}, and --projection "
                "none where that holds for both towers"
            )


def open_clip_pairs(image: Tower, text: Tower) -> list[Pair]:
    """Our names and OpenCLIP's, without the `text.` that stands before those of a
    `TextTransformer` where the text side is a module of its own."""
    if image.config["library"] in SIDES:
        return [*side_pairs(image), *side_pairs(text), *scalar_pairs()]
    pairs = [*CONVNEXT.pairs(image.config["depths"], TIMM), *pairs_of(TEXTS)]
    for i in range(text.config["config"]["num_hidden_layers"]):
        pairs += pairs_of(TEXT_BLOCK, f"text.encoder.layers.{i}.", f"transformer.resblocks.{i}.")
    return pairs


CONVNEXT = ConvNeXtNames(  # timm's
    ends="""
features.0.0.* = stem.0.*
features.0.1.* = stem.1.*
classifier.0.* = head.norm.*
""",
    stages="stages",
    between="""
0.* = downsample.0.*
1.* = downsample.1.*
""",
    blocks="blocks",
    block="""
block.0.* = conv_dw.*
block.2.* = norm.*
block.3.* = mlp.fc1.*
block.5.* = mlp.fc2.*
layer_scale = gamma | of places
""",
)
TEXTS = f"""
text.embeddings.token_embedding.weight = token_embedding.weight
text.embeddings.position_embedding.weight = positional_embedding
text.final_layer_norm.* = ln_final.*
head.image_projection.weight = visual.head.proj.weight
head.text_projection.weight = text_projection | transposed
{SCALE}
"""
TEXT_BLOCK = """
layer_norm1.* = ln_1.*
layer_norm2.* = ln_2.*
mlp.fc1.* = mlp.c_fc.*
mlp.fc2.* = mlp.c_proj.*
self_attn.out_proj.* = attn.out_proj.*
self_attn.{q_proj,k_proj,v_proj}.* = attn.in_proj_* | parted
"""


def side_pairs(tower: Tower) -> list[Pair]:
    """The names of an adapter's tower are those of its library. The head is the projection that was
    taken off, or leaves the features as they are where it stays in the tower."""
    theirs = {
        name: _their_name(tower, name.split(".", 1)[1])
        for spec in tower.specs[:-1]
        for name in spec.template.canonical_names.values()
    }
    same = {ours: Pair((ours,), (there,)) for ours, there in theirs.items()}
    if tower.config.get("projection") == "none":
        return [*same.values()]
    head, projection = f"head.{tower.branch}_projection.weight", projection_of(tower)
    if projection is not None:
        how = "" if projection.endswith(".weight") else " | transposed"  # there [W, D]
        return [*same.values(), *pairs_of(f"{head} = {projection}{how}")]
    last = last_linear(tower)
    others = [pair for ours, pair in same.items() if ours not in last]
    there = tuple(theirs[name] for name in last)
    identity = partial(torch.eye, tower.width)
    return [*others, Pair((head, *last), there, lambda *own: (identity(), *own), _joined)]


def _their_name(tower: Tower, name: str) -> str:
    if TWO_LAYERS in tower.config and name.startswith("proj."):
        return f"text.{name}"
    return _prefix(tower) + _own_name(tower, name)


def _own_name(tower: Tower, name: str) -> str:
    """OpenCLIP keeps the encoder of mT5 alone, whose table of tokens then has another name."""
    if tower.config["architecture"] != MT5:
        return name
    return name.replace("shared.", "embed_tokens.", 1).removeprefix("encoder.")


def last_linear(tower: Tower) -> tuple[str, ...]:
    """Our names of the weight and the bias of the linear that a side ends with inside of its
    tower; none: it ends with something else."""
    names = {name for spec in tower.specs for name in spec.template.canonical_names.values()}
    for linear in LAST_LINEARS:
        weight, bias = (f"{tower.branch}.{linear}.{end}" for end in ("weight", "bias"))
        if weight in names:
            return (weight, bias) if bias in names else (weight,)
    return ()


def projection_of(tower: Tower) -> str | None:
    """OpenCLIP's name of the projection that our head is; None: it is a part of the tower."""
    if TWO_LAYERS in tower.config:
        return None
    of_library = {"timm": "visual.head.proj.weight", "transformers": "text.proj.weight"}
    return of_library.get(tower.config["library"]) or tower.config["library_projection"]


def _prefix(tower: Tower) -> str:
    if tower.config["library"] == "timm":
        return TIMM
    if tower.config["library"] == "transformers":
        return HF_TEXT
    return SIDE_PREFIXES[tower.branch]


def _joined(head: Tensor, *last: Tensor) -> tuple[Tensor, ...]:
    """A head [D, W] behind a linear with `last` = weight [W, …] and bias [W]: one linear, exactly
    the same where the head is still the identity that an import begins with."""
    if is_identity(head):
        return last
    return tuple((head.double() @ tensor.double()).to(tensor.dtype) for tensor in last)


def is_identity(matrix: Tensor) -> bool:
    return matrix.shape[0] == matrix.shape[1] and torch.equal(matrix, torch.eye(len(matrix)))


def scalar_pairs() -> list[Pair]:
    return pairs_of(f"{SCALE}\nhead.logit_bias = logit_bias | number")
