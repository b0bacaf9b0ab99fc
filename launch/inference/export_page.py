"""The README.md of an exported folder: what the model is, and code that loads it with public
libraries alone."""

from __future__ import annotations

from launch.inference.export_code import adapted
from launch.inference.trained import Trained
from launch.run.records import FUSION, OPEN_CLIP
from models.towers.layers import Tower
from models.towers.libraries import transformers_image, transformers_text
from models.towers.libraries.transformers_image import PlacePool
from models.towers.pooling import num_heads

PIXELS = '''```python
import numpy as np
import torch
from PIL import Image, ImageOps
from torchvision.transforms.v2 import functional

SIZE, RESIZE = {size}, {resize}
MEAN, STD = {mean}, {std}


def pixel_values(file):
    """[3, SIZE, SIZE]."""
    image = ImageOps.exif_transpose(Image.open(file))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(image, mask=image.getchannel("A"))
        image = white
    image = image.convert("RGB")
    image = image.resize({sides}, Image.Resampling.{interpolation})
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    top, left = (round((side - SIZE) / 2) for side in pixels.shape[1:])
    return functional.normalize(pixels[:, top : top + SIZE, left : left + SIZE] / 255, MEAN, STD)
```'''

WHOLE_MODEL = """```python
import torch
from transformers import AutoTokenizer, {kind}

model = {kind}.from_pretrained(".").eval()
tokenizer = AutoTokenizer.from_pretrained(".")


def embed(pixel_values, texts):
    \"\"\"image_embeds, text_embeds: of length 1.\"\"\"
    tokens = tokenizer(texts, padding={padding}, truncation=True, return_tensors="pt")
{images}    with torch.no_grad():
        output = model(input_ids=tokens["input_ids"], {given})
    return output.image_embeds, output.text_embeds
```"""

# as SigLIP 2's own image processor makes them
PATCHES = """    rows, columns = (length // {side} for length in pixel_values.shape[2:])
    patches = pixel_values[..., : rows * {side}, : columns * {side}].unflatten(3, (columns, {side}))
    patches = patches.unflatten(2, (rows, {side})).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
    seen = torch.ones(patches.shape[:2], dtype=torch.int64)
    shapes = torch.tensor([[rows, columns]] * len(patches))
"""

STATE_DICT = """```python
import torch{imports}
from safetensors.torch import load_file
from transformers import {architectures}

tensors = load_file("model.safetensors")
of = lambda prefix: {{name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}}{attention}
{constructor}
{text}
image.eval(), text.eval()
tokenizer = AutoTokenizer.from_pretrained(".")


def embed(pixel_values, texts):
    \"\"\"image_embeds, text_embeds: of length 1.\"\"\"
    tokens = tokenizer(texts, padding={padding}, truncation=True, return_tensors="pt")
    ids, mask = tokens["input_ids"], tokens["attention_mask"]
    with torch.no_grad():
        image_features = {image_features}
{text_output}        text_features = {text_features}
    image_embeds = image_features @ tensors["head.image_projection.weight"].T
    text_embeds = text_features @ tensors["head.text_projection.weight"].T
    return torch.nn.functional.normalize(image_embeds), torch.nn.functional.normalize(text_embeds)
```"""


FROM_TRANSFORMERS = """{branch} = {architecture}.from_pretrained(
    None, config=AutoConfig.from_pretrained("{branch}"), state_dict=of("{branch}."){no_pooler}
)"""

IN_PATCHES = """


def in_patches(pixel_values, side={side}):
    \"\"\"What Siglip2VisionModel takes: patches with their channels last, which of them to attend to, and
    their rows and columns.\"\"\"
    rows, columns = (length // side for length in pixel_values.shape[2:])
    cropped = pixel_values[..., : rows * side, : columns * side]
    patches = cropped.unflatten(3, (columns, side)).unflatten(2, (rows, side)).permute(0, 2, 4, 3, 5, 1)
    patches = patches.flatten(3).flatten(1, 2)
    return patches, torch.ones(patches.shape[:2]), torch.tensor([[rows, columns]] * len(patches))


"""

ATTENTION = """


class AttentionPool(torch.nn.Module):
    def __init__(self, branch, width, heads):
        super().__init__()
        self.probe = torch.nn.Parameter(torch.empty(1, 1, width))
        self.attention = torch.nn.MultiheadAttention(width, heads, batch_first=True)
        self.layernorm = torch.nn.LayerNorm(width, eps=1e-6)
        self.mlp = torch.nn.ModuleDict({"fc1": torch.nn.Linear(width, 4 * width), "fc2": torch.nn.Linear(4 * width, width)})
        self.load_state_dict({name: tensors.pop(f"{branch}.attention_pool.{name}") for name in self.state_dict()})

    def forward(self, tokens, padded=None):
        found, _ = self.attention(self.probe.expand(len(tokens), -1, -1), tokens, tokens, key_padding_mask=padded)
        inner = torch.nn.functional.gelu(self.mlp["fc1"](self.layernorm(found)), approximate="tanh")
        return (found + self.mlp["fc2"](inner))[:, 0]


"""
ATTENTION_OF = """{branch}_pool = AttentionPool("{branch}", {width}, {heads})
"""
OTHER_POOL = {
    "max": "\nimage.avgpool = torch.nn.AdaptiveMaxPool2d(1)",
    "attention": "\nimage.avgpool = torch.nn.Identity()",
}  # of maps


OPEN_CLIP_MODEL = """```python
import open_clip
import torch

model, _, preprocess = open_clip.create_model_and_transforms("local-dir:.")
tokenizer = open_clip.get_tokenizer("local-dir:.")
model.eval()


def embed(pixel_values, texts):
    \"\"\"image_embeds, text_embeds: of length 1.\"\"\"
    with torch.no_grad():
        image_embeds = model.encode_image(pixel_values, normalize=True)
        return image_embeds, model.encode_text(tokenizer(texts), normalize=True)
```"""

WITH_FUSION = """## The fusion head

`{file}` has the layers that score pairs of an image and a text: the projections of both towers'
tokens (`head.image_tokens.`, `head.text_tokens.`) and the attention between them (`head.fusion.`),
{layers} layers of width {width} with {heads} heads. They go with Wye's towers, which read this
folder:

```
python evaluate.py FOLDER --val-data SPEC --rerank 32
python train.py --import FOLDER --fusion {layers} --fusion-width {width} --fusion-heads {heads} …
```

The tensors alone: `safetensors.torch.load_file("{file}")`."""


def export_page(
    trained: Trained, kind: str, differences: list[str], training: str = "", fusion: bool = False
) -> str:
    """Markdown. Its code, in order, defines `embed` and `pixel_values`, run in the exported
    folder. `training`: the section about the run; `fusion`: there is a file of it."""
    options, (image, text), pixels = trained.options, trained.towers, trained.preprocessing
    resize = pixels.options(options["image_size"])["image_resize"]
    bias = " plus `logit_bias`" if "logit_bias" in image.specs[-1].template.scalars else ""
    parts = [
        f"# {options['image_tower']} and {options['text_tower']}",
        f"An image–text model: both towers give embeddings of length 1 in {options['embed_dim']} "
        f"dimensions. Trained with the loss `{options['loss']}` for {trained.step:,} steps; "
        f"images of {options['image_size']} pixels a side, texts of at most "
        f"{options['max_text_tokens']} tokens. Weights are in fp32. The loss read "
        f"`exp(logit_scale)` times the products of the embeddings{bias}; the scale is at most 100.",
        "## Load it",
        *_how_to_load(kind, differences, image, text),
        *([_fusion(image)] if fusion else []),
        *([training] if training else []),
        "## Images",
        "`preprocessor_config.json` is for transformers' `CLIPImageProcessor`, which gives the "
        "pixels of evaluation for opaque images up to one of the 255 levels of a channel, but for "
        "images whose margin around the centre is rounded the other way. This is what the model "
        "was evaluated with:",
        PIXELS.format(
            size=options["image_size"],
            resize=resize,
            mean=pixels.mean,
            std=pixels.std,
            interpolation=pixels.interpolation.upper(),
            sides="(RESIZE, RESIZE)"
            if pixels.resize_mode == "squash"
            else "[RESIZE * side // min(image.size) for side in image.size]",
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _how_to_load(kind: str, differences: list[str], image: Tower, text: Tower) -> tuple[str, ...]:
    if kind == OPEN_CLIP:
        return _open_clip_example(text)
    intro = _intro(differences, image, text)
    if differences:
        return intro, _state_dict_example(image, text)
    return intro, _whole_model_example(kind, image, text)


def _open_clip_example(text: Tower) -> tuple[str, ...]:
    moved = (
        "`hf_model_name` in `open_clip_config.json` is where this folder was written. After moving "
        "it, give the new place of its folder `text` there, or the id of a published model of the "
        "same configuration.",
    )
    return (
        "OpenCLIP loads this folder, and from the hub it loads `hf-hub:ORGANISATION/MODEL` when the "
        "folder has been uploaded. `preprocess` is what the images are given to.",
        OPEN_CLIP_MODEL,
        *(moved if _of_transformers(text) else ()),
    )


def _fusion(image: Tower) -> str:
    return WITH_FUSION.format(file=FUSION, **image.config["fusion"])


def _whole_model_example(kind: str, image: Tower, text: Tower) -> str:
    full_length = text.config["pool"] == "head"  # where padding is read as any other token
    most = text.config["max_text_tokens"]
    in_patches = kind == "Siglip2Model"
    given = "pixel_values=pixel_values"
    if in_patches:
        given = "pixel_values=patches, pixel_attention_mask=seen, spatial_shapes=shapes"
    if not full_length:
        given += ', attention_mask=tokens["attention_mask"]'
    return WHOLE_MODEL.format(
        kind=kind,
        # SigLIP 2's tokenizer pads on the left by itself
        padding=f'"max_length", max_length={most}, padding_side="right"' if full_length else True,
        images=PATCHES.format(side=image.config["config"]["patch_size"]) if in_patches else "",
        given=given,
    )


def _intro(differences: list[str], image: Tower, text: Tower) -> str:
    if not differences:
        return "`AutoProcessor` and `AutoTokenizer` load from this folder too."
    own = [f"`{tower.branch}/config.json`" for tower in (image, text) if _of_transformers(tower)]
    of_image, of_text = (_possessive(tower.config["library"]) for tower in (image, text))
    return (
        "transformers has no model that is this one as a whole:\n\n"
        + "\n".join(f"- {difference}" for difference in differences)
        + f"\n\n`model.safetensors` has the tensors of the image tower under {of_image} names behind `image.`, those of the text tower under "
        f"{of_text} behind `text.`, and the projections and scalars behind `head.`"
        + (f"; {' and '.join(own)} {'are' if len(own) > 1 else 'is'} transformers'" if own else "")
        + "."
    )


def _possessive(library: str) -> str:
    return {"transformers": "transformers'", "open_clip": "OpenCLIP's"}.get(library, f"{library}'s")


def _of_transformers(tower: Tower) -> bool:
    return tower.config["library"] == "transformers"


def _state_dict_example(image: Tower, text: Tower) -> str:
    imports, constructor = _constructor(image)
    of_text = adapted(text)
    learned = [tower for tower in (image, text) if tower.config["pool"] == "attention"]
    pools = "".join(
        ATTENTION_OF.format(branch=tower.branch, width=tower.width, heads=num_heads(tower.width))
        for tower in learned
    )
    own = [tower.config["architecture"] for tower in (text, image) if _of_transformers(tower)]
    full_length = text.config["pool"] == "head"  # where padding is read as any other token
    most = text.config["max_text_tokens"]
    given = "" if full_length else f", attention_mask=mask{_languages(text)}"
    lines = dict.fromkeys(filter(None, (imports, of_text.imports if of_text else "")))
    return STATE_DICT.format(
        imports="".join(f"\n{line}" for line in lines),
        constructor=constructor,
        text=of_text.constructor if of_text else _from_transformers(text),
        architectures=", ".join(
            dict.fromkeys([*(["AutoConfig"] if own else []), "AutoTokenizer", *own])
        ),
        padding=f'"max_length", max_length={most}' if full_length else True,
        text_output="" if of_text else f"        output = text(input_ids=ids{given})\n",
        attention=(ATTENTION + pools if learned else "") + _patches(image),
        image_features=_image_features(image),
        text_features=of_text.features if of_text else _text_features(text),
    )


def _from_transformers(tower: Tower) -> str:
    architecture, pool = tower.config["architecture"], tower.config["pool"]
    families = {"image": transformers_image.FAMILIES, "text": transformers_text.FAMILIES}
    has_pooler = "pooler" in families[tower.branch][tower.config["config"]["model_type"]].pools
    return FROM_TRANSFORMERS.format(
        branch=tower.branch,
        architecture=architecture,
        no_pooler=", add_pooling_layer=False" if has_pooler and pool != "pooler" else "",
    )


def _languages(text: Tower) -> str:
    if "languages" not in text.config:
        return ""
    return f", langs=torch.full_like(ids, {text.config['languages']['default']})"


def _patches(image: Tower) -> str:
    if image.config["architecture"] != "Siglip2VisionModel":
        return ""
    return IN_PATCHES.format(side=image.config["patch_size"])


def _features_of_transformers(image: Tower) -> str:
    """As `ImagePool` does: the library's pooled output, or its last states pooled otherwise."""
    last, pool = image.specs[-2].template, image.config["pool"]
    given = "*in_patches(pixel_values)" if _patches(image) else "pixel_values"
    if pool == transformers_image.FAMILIES[image.config["config"]["model_type"]].pools[0]:
        return f"image({given}).pooler_output"
    states = f"image({given}).last_hidden_state"
    norm = image.config["architecture"].startswith(("CLIP", "ChineseCLIP", "ConvNext"))
    name = "post_layernorm" if "CLIP" in image.config["architecture"] else "layernorm"
    if isinstance(last, PlacePool):
        return f"image.layernorm({states}.amax((-2, -1)))"
    if image.config["architecture"].startswith("ConvNext"):
        states = f"{states}.flatten(2).transpose(1, 2)"
    if pool == "attention":
        return f"image_pool(image.{name}({states}))" if norm else f"image_pool({states})"
    pooled = {
        "cls": f"{states}[:, 0]",
        "avg": f"{states}[:, {last.skipped}:].mean(1)",
        "max": f"{states}[:, {last.skipped}:].amax(1)",
    }[pool]
    return f"image.{name}({pooled})" if norm else pooled


def _image_features(image: Tower) -> str:
    if code := adapted(image):
        return code.features
    if _of_transformers(image):
        return _features_of_transformers(image)
    pool = image.config["pool"]
    if "patch_size" in image.config and pool != "cls":
        patches = "torch.cat([image.class_token.expand(len(pixel_values), -1, -1), image._process_input(pixel_values)], 1)"
        behind = {
            "avg": "image.encoder({})[:, 1:].mean(1)",
            "max": "image.encoder({})[:, 1:].amax(1)",
            "attention": "image_pool(image.encoder({}))",
        }
        return behind[pool].format(patches)
    if "layers" in image.config and pool == "attention":
        return f"image_pool(image(pixel_values).unflatten(1, ({image.width}, -1)).transpose(1, 2))"
    if pool == "attention":
        return "image_pool(image.classifier[0](image.features(pixel_values)).flatten(2).transpose(1, 2))"
    return "image(pixel_values)"


def _text_features(text: Tower) -> str:
    pool, eos_token_id = text.config["pool"], text.config["eos_token_id"]
    if pool == "eos" and eos_token_id is not None:
        return (
            f"output.last_hidden_state[range(len(ids)), (ids == {eos_token_id}).int().argmax(-1)]"
        )
    return {
        "mean": "(output.last_hidden_state * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)",
        "first": "output.last_hidden_state[:, 0]",
        "last": "output.last_hidden_state[range(len(ids)), ids.shape[1] - 1 - mask.flip(1).argmax(1)]",
        "max": "output.last_hidden_state.masked_fill(mask[..., None] == 0, -torch.inf).amax(1)",
        "attention": "text_pool(output.last_hidden_state, mask == 0)",
        "pooler": "output.pooler_output",
        "head": "output.pooler_output",
        "eos": "output.pooler_output",
    }[pool]


def _constructor(image: Tower) -> tuple[str, str]:
    """The import and the lines that make the library's model of these sizes, without its
    classifier, as `image`, with its weights."""
    if code := adapted(image):
        return code.imports, code.constructor
    if _of_transformers(image):
        return "", _from_transformers(image)
    imports, made = _constructor_of_torchvision(image)
    return imports, f'{made}\nimage.load_state_dict(of("image."))'


def _constructor_of_torchvision(image: Tower) -> tuple[str, str]:
    sizes = image.config
    if "layers" in sizes:
        block = "Bottleneck" if sizes["bottleneck"] else "BasicBlock"
        return (
            f"from torchvision.models.resnet import {block}, ResNet",
            f"image = ResNet({block}, {list(sizes['layers'])}, "
            f"width_per_group={sizes['width_per_group']}, groups={sizes['groups']})\n"
            "image.fc = torch.nn.Identity()" + OTHER_POOL.get(sizes["pool"], ""),
        )
    if "patch_size" in sizes:
        keys = ("image_size", "patch_size", "num_layers", "num_heads", "hidden_dim", "mlp_dim")
        arguments = ", ".join(f"{key}={sizes[key]}" for key in keys)
        return (
            "from torchvision.models import VisionTransformer",
            f"image = VisionTransformer({arguments})\nimage.heads = torch.nn.Identity()",
        )
    settings = zip(sizes["dims"], [*sizes["dims"][1:], None], sizes["depths"])
    blocks = ", ".join(f"CNBlockConfig({a}, {b}, {depth})" for a, b, depth in settings)
    return (
        "from torchvision.models.convnext import CNBlockConfig, ConvNeXt",
        f"image = ConvNeXt([{blocks}])\nimage.classifier[2] = torch.nn.Identity()"
        + OTHER_POOL.get(sizes["pool"], ""),
    )
