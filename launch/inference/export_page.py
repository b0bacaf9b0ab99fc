"""The README.md of an exported folder: what the model is, and code that loads it with public
libraries alone."""

from __future__ import annotations

from dataclasses import replace

from data.modalities.transforms import KEPT, SHRUNK
from launch.inference.export_code import TowerCode, adapted
from launch.inference.trained import Trained
from models.towers.layers import Tower
from models.towers.libraries import transformers_image, transformers_text
from models.towers.libraries.transformers_image import PlacePool
from models.towers.pooling import num_heads

PIXELS = '''```python
import numpy as np
import torch
from PIL import Image, ImageOps
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

SIZE, RESIZE = {size}, {resize}
MEAN, STD = {mean}, {std}


def pixel_values(file):
    """[3, SIZE, SIZE]."""
    image = Image.open(file)
    image.draft(None, (RESIZE, RESIZE))  # a large JPEG is decoded at a smaller scale
    image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(image, mask=image.getchannel("A"))
        image = white
    pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    larger = min(pixels.shape[1:]) / RESIZE
    if larger > {kept}:  # in two steps, as the images of a cache
        pixels = resized(pixels, [round(side * {shrunk} / larger) for side in pixels.shape[1:]])
    pixels = resized(pixels, [RESIZE * side // min(pixels.shape[1:]) for side in pixels.shape[1:]])
    top, left = (round((side - SIZE) / 2) for side in pixels.shape[1:])
    return functional.normalize(pixels[:, top : top + SIZE, left : left + SIZE] / 255, MEAN, STD)


def resized(pixels, size):
    return functional.resize(pixels, size, InterpolationMode.{interpolation}, antialias=True)
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
from transformers import {of_transformers}AutoTokenizer

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
{run}        text_features = {text_features}
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


def export_page(trained: Trained, kind: str, differences: list[str]) -> str:
    """Markdown. Its code, in order, defines `embed` and `pixel_values`, run in the exported
    folder."""
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
        _intro(differences, image, text),
        _state_dict_example(image, text)
        if differences
        else _whole_model_example(kind, image, text),
        "## Images",
        "`preprocessor_config.json` is for transformers' `CLIPImageProcessor`, which gives the "
        f"very pixels of training for opaque images between {resize} and {int(KEPT * resize)} "
        "pixels on their shorter side, but for those whose margin around the centre is rounded "
        "the other way. For all others it is near; this is what the model was evaluated with:",
        PIXELS.format(
            size=options["image_size"],
            resize=resize,
            mean=pixels.mean,
            std=pixels.std,
            interpolation=pixels.interpolation.upper(),
            kept=KEPT,
            shrunk=SHRUNK,
        ),
    ]
    return "\n\n".join(parts) + "\n"


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
    folders = [f"`{t.branch}/config.json`" for t in (image, text) if _of_transformers(t)]
    configurations = (
        f"; {' and '.join(folders)} {'are' if len(folders) > 1 else 'is'} transformers'"
        if folders
        else ""
    )
    return (
        "transformers has no model that is this one as a whole:\n\n"
        + "\n".join(f"- {difference}" for difference in differences)
        + f"\n\n`model.safetensors` has the tensors of the image tower under {_names_of(image)} behind `image.`, those of the text tower under "
        f"{_names_of(text)} behind `text.`, and the projections and scalars behind `head.`"
        f"{configurations}."
    )


def _names_of(tower: Tower) -> str:
    library = {"open_clip": "OpenCLIP"}.get(tower.config["library"], tower.config["library"])
    return f"{library}' names" if library.endswith("s") else f"{library}'s names"


def _of_transformers(image: Tower) -> bool:
    return image.config["library"] == "transformers"


def _state_dict_example(image: Tower, text: Tower) -> str:
    learned = [tower for tower in (image, text) if tower.config["pool"] == "attention"]
    pools = "".join(
        ATTENTION_OF.format(branch=tower.branch, width=tower.width, heads=num_heads(tower.width))
        for tower in learned
    )
    codes = _code(image), _code(text)
    own = [tower.config["architecture"] for tower in (text, image) if _of_transformers(tower)]
    of_transformers = ["AutoConfig", *own] if own else []
    full_length = text.config["pool"] == "head"  # where padding is read as any other token
    most = text.config["max_text_tokens"]
    imports = dict.fromkeys(code.imports for code in codes if code.imports)
    return STATE_DICT.format(
        imports="".join(f"\n{line}" for line in imports),
        of_transformers="".join(f"{name}, " for name in dict.fromkeys(of_transformers)),
        constructor=codes[0].constructor,
        text=codes[1].constructor,
        padding=f'"max_length", max_length={most}' if full_length else True,
        attention=(ATTENTION + pools if learned else "") + _patches(image),
        image_features=codes[0].features,
        run=f"        {codes[1].run}\n" if codes[1].run else "",
        text_features=codes[1].features,
    )


def _code(tower: Tower) -> TowerCode:
    """With the lines that load its weights."""
    code = adapted(tower)
    if code is not None:
        others = "" if code.strict else ", strict=False"
        loaded = f'{tower.branch}.load_state_dict(of("{tower.branch}."){others})'
        return replace(code, constructor=f"{code.constructor}\n{loaded}")
    if tower.branch == "image":
        return TowerCode(*_constructor(tower), _image_features(tower))
    mask = "" if tower.config["pool"] == "head" else f", attention_mask=mask{_languages(tower)}"
    run = f"output = text(input_ids=ids{mask})"
    return TowerCode("", _from_transformers(tower), _text_features(tower), run=run)


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
