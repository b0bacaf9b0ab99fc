"""Load the model of this folder with public libraries alone.

    from modeling_export import load

    model = load(".")
    pixel_values = model.pixel_values("apple.jpg")[None]  # [1, 3, H, W]
    image_embeds = model.embed_images(pixel_values)  # [1, D], of length 1
    text_embeds = model.embed_texts(["a red apple"])  # [1, D], of length 1

`wye.json` beside this file says, under "loading", of which libraries the towers are, how their
outputs are pooled, and how texts and sounds are prepared; under "options", how images are.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

# of DINOv2, which makes it in any case; no tower reads it
OF_PRETRAINING = "embeddings.mask_token"

# What `wye.json` may name, which may come from somebody else: among the classes and arguments of the
# libraries are some that run code of a folder, read other files or ask a server.
MODELS = (
    *("CLIPModel", "SiglipModel", "Siglip2Model", "ChineseCLIPModel", "ClapModel"),
    "VisionTextDualEncoderModel",  # of exports of version 0.1
)
TOWERS = (
    *("CLIPVisionModel", "ChineseCLIPVisionModel", "SiglipVisionModel", "Siglip2VisionModel"),
    *("ViTModel", "Dinov2Model", "Dinov2WithRegistersModel", "ConvNextModel", "ConvNextV2Model"),
    *("SwinModel", "BertModel", "RobertaModel", "XLMRobertaModel", "ClapTextModel"),
    *("DistilBertModel", "CLIPTextModel", "ChineseCLIPTextModel", "SiglipTextModel"),
    *("Siglip2TextModel", "MPNetModel", "ElectraModel", "ModernBertModel", "T5EncoderModel"),
    *("MT5EncoderModel", "XLMModel", "ASTModel", "ClapAudioModel", "WhisperEncoder"),
)
FILES = ("model.safetensors", "audio.safetensors")
MODALITIES = ("image", "text", "audio")
METHODS, OUTPUTS = ("forward", "forward_features"), ("pooler_output", "last_hidden_state")
REPLACEMENTS = ("Identity", "AdaptiveMaxPool2d")  # of torch.nn
OF_TRANSFORMERS = ("add_pooling_layer",)
OF_OPEN_CLIP = ("embed_dim", "quick_gelu", "vision_cfg", "text_cfg")
OF_TEXTS, OF_SOUNDS = ("padding", "max_length", "padding_side"), ("max_length", "truncation")
# arguments of timm's and torchvision's functions that are not for the model
LOADING = (
    *(
        "pretrained",
        "pretrained_model_args",
        "pretrained_cfg",
        "pretrained_cfg_overlay",
        "checkpoint_path",
        "cache_dir",
    ),
    *("model_name", "model_cls", "model_cfg", "variant", "pretrained_strict", "kwargs_filter"),
    *("pretrained_filter_fn", "feature_cfg", "scriptable", "exportable", "no_jit"),
    *("weights", "weights_backbone", "pretrained_backbone", "progress"),
)

# how names of numbers of layers end, of what is squared in a layer, and of other sizes
LAYERS = re.compile(r"(layers|depths?|stages)$")
WIDTHS = re.compile(r"(hidden_sizes?|width|d_model|dims?|embedding_size)$")
SIZES = re.compile(
    r"(sizes?|heads|d_ff|d_kv|embeddings|positions|labels|classes|patches|resize|^length)$"
)
MOST_LAYERS, MOST_SIZE = 1000, 1 << 16  # and as many as the weights have tensors, or rows
# less of what becomes a square, or a factor
MOST = {"context_length": 1 << 13, "mlp_ratio": 64, "image_size": 1 << 14, "image_resize": 1 << 14}
SPARE = 1 << 24  # values that a library makes and weights may lack: a classifier
VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")


def load(folder: str | Path = ".") -> ExportedModel:
    """The model of an exported folder, ready to embed."""
    folder = Path(folder).absolute()
    record = json.loads((folder / "wye.json").read_text(encoding="utf-8"))
    return ExportedModel(folder, record["loading"], record["options"]).eval()


class ExportedModel(nn.Module):
    """Embeds images, texts and sounds: those that the folder has towers of.

    `whole`: the model of transformers or OpenCLIP that the folder holds, if it is one; `towers`: by
    modality, those that have no place in such a model.
    """

    def __init__(self, folder: Path, record: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        super().__init__()
        self.folder, self.record, self.options = folder, record, options
        _check_sizes("wye.json", {"loading": record, "options": options}, _shapes(folder))
        self.whole, self.tokenizer = _whole_model(folder, record["model"])
        file = folder / _one_of("file", record["file"], FILES)
        tensors = load_file(file) if record["towers"] else {}
        _known("towers", record["towers"], MODALITIES)
        towers = {
            modality: Tower(folder / modality, modality, tower, tensors)
            for modality, tower in record["towers"].items()
        }
        self.towers = nn.ModuleDict(towers)

    def embed_images(self, pixel_values: Tensor) -> Tensor:
        """[B, 3, H, W], as `pixel_values` prepares them -> [B, D], of length 1."""
        return F.normalize(self.image_features(pixel_values), dim=-1)

    def image_features(self, pixel_values: Tensor) -> Tensor:
        """As `embed_images`, not brought to the length 1."""
        if side := self.record["images"]["patch_size"]:
            in_patches = patches(pixel_values, side)
            return self._features("image", in_patches.pop("pixel_values"), **in_patches)
        return self._features("image", pixel_values)

    def embed_sounds(self, input_features: Tensor) -> Tensor:
        """[B, …], as `input_features` prepares them -> [B, D], of length 1."""
        grey = self.record["sounds"]["grey"]
        if grey:  # decibels [B, 1, T, F] become an image [B, 3, F, T]
            scaled = (input_features.transpose(2, 3) - grey["quiet_db"]) / grey["spread_db"]
            input_features = scaled.expand(-1, 3, -1, -1)
        return F.normalize(self._features("audio", input_features), dim=-1)

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """-> [B, D], of length 1."""
        how, device = self.record["texts"], next(self.parameters()).device
        if how is None:  # OpenCLIP's tokenizer makes all that its model reads
            ids = self.tokenizer(list(texts)).to(device)
            return F.normalize(self._features("text", ids), dim=-1)
        # the mask is asked for: of a tower that reads padding, the tokenizer's files name none
        padding = _known("padding", how["padding"], OF_TEXTS)
        given = {"truncation": True, "return_attention_mask": True, **padding}
        tokens = self.tokenizer(list(texts), return_tensors="pt", **given)
        ids, mask = (tokens[name].to(device) for name in ("input_ids", "attention_mask"))
        if "length" in how:  # OpenCLIP's towers read texts of their whole length
            ids = ids.masked_fill(mask == 0, how["pad_id"])
            ids = F.pad(ids, (0, how["length"] - ids.shape[1]), value=how["pad_id"])
        more = {"attention_mask": mask} if how.get("masked") else {}
        if "language" in how:
            more["langs"] = torch.full_like(ids, how["language"])
        return F.normalize(self._features("text", ids, mask, **more), dim=-1)

    @torch.no_grad()
    def _features(
        self, modality: str, values: Tensor, mask: Tensor | None = None, **more: Tensor
    ) -> Tensor:
        """[B, D] of what a tower reads; `more` of that goes by name. `mask` [B, L]: which tokens of
        a text count."""
        if modality in self.towers:
            return self.towers[modality](values, mask, **more)
        if hasattr(self.whole, "encode_image"):  # OpenCLIP's
            return getattr(self.whole, f"encode_{modality}")(values)
        output = getattr(self.whole, f"get_{modality}_features")(values, **more)
        # of transformers before 5 it is a tensor
        return getattr(output, "pooler_output", output)

    def pixel_values(self, file: str | Path | IO[bytes]) -> Tensor:
        """[3, size, size] of an image file, as the model was evaluated: upright, on white where it
        is transparent, resized, and the centre cut out, on black where the image is smaller."""
        from PIL import Image, ImageOps

        return self.prepared(ImageOps.exif_transpose(Image.open(file)))

    def prepared(self, image: Any) -> Tensor:
        """As `pixel_values`, of an image of Pillow's that is upright."""
        from PIL import Image

        how = self.options
        resize, size = how["image_resize"], how["image_size"]
        image = _in_8_bits(image)
        if image.has_transparency_data:
            image = image.convert("RGBA")
            page = Image.new("RGB", image.size, "white")
            page.paste(image, mask=image.getchannel("A"))
            image = page
        shorter, longer = min(image.size), max(image.size)
        width, height = {
            "shortest": [resize * side // shorter for side in image.size],
            "longest": [max(1, round(side * resize / longer)) for side in image.size],
            "squash": [resize, resize],
        }[how["image_resize_mode"]]
        resampling = Image.Resampling[how["image_interpolation"].upper()]
        image = image.convert("RGB").resize((width, height), resampling)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        pixels = pixels.view(height, width, 3).permute(2, 0, 1)
        if min(height, width) < size:
            left, top = (max(0, size - side) for side in (width, height))
            around = (left // 2, left - left // 2, top // 2, top - top // 2)
            pixels = F.pad(pixels, around)
            height, width = pixels.shape[1:]
        top, left = round((height - size) / 2), round((width - size) / 2)
        mean, std = (torch.tensor(how[f"image_{name}"]).view(3, 1, 1) for name in ("mean", "std"))
        return (pixels[:, top : top + size, left : left + size] / 255 - mean) / std

    def input_features(self, file: str | Path | IO[bytes]) -> Tensor:
        """What the audio tower reads of a sound file; of a sound longer than a clip, the middle."""
        import soundfile
        from scipy.signal import resample_poly
        from transformers import AutoFeatureExtractor

        how = self.record["sounds"]
        own, arguments = self.folder / "audio", _known("arguments", how["arguments"], OF_SOUNDS)
        extractor = AutoFeatureExtractor.from_pretrained(own, trust_remote_code=False)
        wanted = extractor.sampling_rate
        samples, rate = soundfile.read(file, dtype="float32", always_2d=True)
        common = math.gcd(rate, wanted)
        samples = resample_poly(samples.mean(1), wanted // common, rate // common)
        start = max(0, len(samples) - how["num_samples"]) // 2
        clip = samples[start : start + how["num_samples"]].astype("float32")
        made = extractor(clip, sampling_rate=wanted, return_tensors="pt", **arguments)
        return made[extractor.model_input_names[0]][0]


def _in_8_bits(image: Any) -> Any:
    """Grey of 16 bits by its upper 8, and grey of real numbers as 0..1 or 0..255, as in training;
    Pillow would clip them at 255. All others as they are."""
    import numpy as np
    from PIL import Image

    transparent = image.info.get("transparency")
    if image.mode == "I" or image.mode.startswith("I;16"):
        values = np.asarray(image).clip(0, 65535)
        grey = Image.fromarray((values // 256).astype(np.uint8))
        if isinstance(transparent, int):
            grey.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
        return grey
    if image.mode == "F":
        values = np.nan_to_num(np.asarray(image))
        scale = 255.0 if values.max() <= 1.0 else 1.0
        return Image.fromarray((values * scale).clip(0, 255).astype(np.uint8))
    return image.convert("LA") if image.mode == "La" else image


class Tower(nn.Module):
    """A library's module, the pooling of its output, and what projects that to an embedding."""

    def __init__(
        self, folder: Path, modality: str, record: Mapping[str, Any], tensors: dict[str, Tensor]
    ) -> None:
        """`tensors`: of the whole file, by name; those of this tower are taken out of it."""
        super().__init__()
        self.record = record
        self.projection = nn.Sequential(*(_step(name, tensors) for name in record["projection"]))
        if record.get("pool") == "attention":
            self.attention_pool = AttentionPool(record["width"], record["heads"])
            self.attention_pool.load_state_dict(_taken(tensors, f"{modality}.attention_pool."))
        self.module = _module(folder, record, _taken(tensors, f"{modality}."))
        self.inner: Tensor | None = None  # the output of the module that is pooled, if it is inside
        if "inner" in record:
            self.module.get_submodule(record["inner"]).register_forward_hook(self._keep_inner)

    def _keep_inner(self, module: nn.Module, given: Any, output: Tensor) -> None:
        self.inner = output

    def forward(self, values: Tensor, mask: Tensor | None, **more: Tensor) -> Tensor:
        """-> [B, D]"""
        method = _one_of("method", self.record.get("method", "forward"), METHODS)
        output = getattr(self.module, method)(values, **more)
        if "inner" in self.record:
            output, self.inner = self.inner, None
        if "output" in self.record:
            output = getattr(output, _one_of("output", self.record["output"], OUTPUTS))
        if "pool" in self.record:
            output = self._pooled(output, values, mask)
        return self.projection(output)

    def _pooled(self, output: Tensor, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Tokens, or the places of a map, as one vector [B, W]."""
        record = self.record
        tokens = output.movedim(record.get("channels", -1), -1).flatten(1, -2)
        tokens = tokens[:, record.get("skipped", 0) :]
        norm = self.module.get_submodule(record["norm"]) if record.get("norm") else nn.Identity()
        # images' words for what texts' are called
        pool = {"cls": "first", "avg": "mean"}.get(record["pool"], record["pool"])
        if pool == "attention":
            return self.attention_pool(norm(tokens), None if mask is None else mask == 0)
        mask = tokens.new_ones(tokens.shape[:2]) if mask is None else mask
        if pool == "mean":
            return norm((tokens * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
        if pool == "max":
            return norm(tokens.masked_fill(mask[..., None] == 0, -torch.inf).amax(1))
        chosen = {  # one token of each
            "first": lambda: torch.zeros_like(mask[:, 0], dtype=torch.int64),
            "last": lambda: tokens.shape[1] - 1 - mask.flip(1).argmax(1),
            "eos": lambda: (ids == record["eos_token_id"]).int().argmax(1),
        }[pool]()
        return norm(tokens[torch.arange(len(tokens), device=tokens.device), chosen])


class AttentionPool(nn.Module):
    """What a learned query finds among tokens, and a network of two layers behind it: the head of
    SigLIP's image towers (Zhai et al. 2023)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.empty(1, 1, width))
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.layernorm = nn.LayerNorm(width, eps=1e-6)
        layers = {"fc1": nn.Linear(width, 4 * width), "fc2": nn.Linear(4 * width, width)}
        self.mlp = nn.ModuleDict(layers)

    def forward(self, tokens: Tensor, padded: Tensor | None) -> Tensor:
        """[B, N, W], True where there is nothing [B, N] -> [B, W]."""
        query = self.probe.expand(len(tokens), -1, -1)
        found, _ = self.attention(query, tokens, tokens, key_padding_mask=padded)
        inner = F.gelu(self.mlp["fc1"](self.layernorm(found)), approximate="tanh")
        return (found + self.mlp["fc2"](inner))[:, 0]


def patches(pixel_values: Tensor, side: int) -> dict[str, Tensor]:
    """What SigLIP 2's image towers read: patches with their channels last, which of them count, and
    how many rows and columns there are."""
    rows, columns = (length // side for length in pixel_values.shape[2:])
    whole = pixel_values[..., : rows * side, : columns * side]
    cut = whole.unflatten(3, (columns, side)).unflatten(2, (rows, side))
    cut = cut.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
    return {
        "pixel_values": cut,
        "pixel_attention_mask": torch.ones_like(cut[..., 0], dtype=torch.int64),
        "spatial_shapes": torch.tensor([[rows, columns]] * len(cut), device=cut.device),
    }


# -- the libraries' modules, with their weights


def _whole_model(folder: Path, name: str | None) -> tuple[Any, Any]:
    """The model of both towers, if the folder is one, and the tokenizer."""
    if name == "open_clip":
        import open_clip

        where, config = f"local-dir:{folder}", (folder / "open_clip_config.json").read_text("utf-8")
        sizes = json.loads(config)["model_cfg"]
        _check_open_clip(sizes)
        _check_sizes("open_clip_config.json", sizes, _shapes(folder))
        texts, given = sizes["text_cfg"], {}
        if "hf_model_name" in texts:  # which OpenCLIP looks for in the current folder
            _config(folder / "text")
            own = {"hf_model_name": str(folder / "text"), "hf_model_pretrained": False}
            given = {"text_cfg": {**texts, **own}}
        model = open_clip.create_model_and_transforms(where, **given)[0]
        # it passes what the file says about the tokenizer to transformers
        trust = {"trust_remote_code": False} if texts.get("hf_tokenizer_name") else {}
        return model, open_clip.get_tokenizer(where, **trust)
    import transformers

    kind = name and getattr(transformers, _one_of("model", name, MODELS))
    _check_config(folder)
    if not any(file for pattern in VOCABULARIES for file in folder.glob(pattern)):
        raise ValueError(f"{folder}: holds no tokenizer, none of {', '.join(VOCABULARIES)}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if kind is None:
        return None, tokenizer
    return _loaded(kind, folder, config=_config(folder)), tokenizer


def _config(folder: Path) -> Any:
    """transformers' configuration in a folder. Errors: ValueError where it asks for code."""
    from transformers import AutoConfig

    _check_config(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    for each in (config, *(getattr(config, part) for part in config.sub_configs)):
        attention = getattr(each, "_attn_implementation", None)
        if "/" in str(attention):
            raise ValueError(
                f"{folder / 'config.json'}: computes attention by {attention}, whose code would be "
                "downloaded and run; take that key out"
            )
    return config


def _check_config(folder: Path) -> None:
    """Raise ValueError as `_check_sizes`, before transformers reads the file: some configurations
    list their layers."""
    if (folder / "config.json").is_file():
        config = json.loads((folder / "config.json").read_text("utf-8"))
        _check_sizes(str(folder / "config.json"), config, _shapes(folder) or _shapes(folder.parent))


def _shapes(folder: Path) -> list[list[int]]:
    """Of all tensors in a folder, as the headers of its files say."""
    shapes = []
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            shapes += [opened.get_slice(name).get_shape() for name in opened.keys()]
    return shapes


def _check_sizes(what: str, said: Mapping[str, Any], shapes: Sequence[Sequence[int]]) -> None:
    """Raise ValueError for sizes that no model has, or none with weights of these `shapes`: libraries
    make a model before they compare it with its weights."""
    longest = max((side for shape in shapes for side in shape), default=0)
    layers: list[float] = [0]
    widths: list[float] = []
    for key, value in said.items():
        if isinstance(value, Mapping) and not key.endswith("2id"):
            _check_sizes(f"{what}: {key}", value, shapes)
        several = value if isinstance(value, list) else [value]
        numbers = [n for n in several if isinstance(n, (int, float)) and not isinstance(n, bool)]
        if numbers and LAYERS.search(key):
            layers.append(sum(max(n, 1) for n in numbers))
            _in_bounds(what, key, [layers[-1]], 0, min(MOST_LAYERS, len(shapes) or MOST_LAYERS))
        elif numbers and (key in MOST or WIDTHS.search(key) or SIZES.search(key)):
            least = 1 if key.endswith(("heads", "hidden_size", "width")) else -1
            _in_bounds(what, key, numbers, least, MOST.get(key) or max(longest, MOST_SIZE))
            widths += numbers if WIDTHS.search(key) else []
        elif key == "blocks":  # of torchvision's ConvNeXt: width, the next one's, depth
            _check_sizes(f"{what}: blocks", {"depths": [each[2] for each in value]}, shapes)
    if isinstance(said.get("image_size"), int) and isinstance(said.get("patch_size"), int):
        rows = (said["image_size"] // max(said["patch_size"], 1)) ** 2
        _in_bounds(what, "image_size by patch_size", [rows], 0, max(longest, MOST_SIZE))
    values = max(layers) * min(widths, default=0) ** 2
    if shapes and values > sum(math.prod(shape) for shape in shapes):
        raise ValueError(
            f"{what}: {max(layers)} layers as wide as {min(widths)} are not in its weights"
        )


def _in_bounds(what: str, key: str, numbers: Sequence[float], least: int, most: int) -> None:
    for number in numbers:
        if not least <= number <= most:
            raise ValueError(
                f"{what}: {key} is {str(number)[:30]}, and can be from {least} to {most} with these "
                "weights; copy the folder again"
            )


def _module(folder: Path, record: Mapping[str, Any], tensors: dict[str, Tensor]) -> Any:
    """The module of one tower. `folder`: of its configuration, where it is of transformers."""
    name, arguments = record["architecture"], record.get("arguments", {})
    if record["library"] == "transformers":
        import transformers
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        _one_of("architecture", name, TOWERS)
        kind = WhisperEncoder if name == "WhisperEncoder" else getattr(transformers, name)
        _known("arguments", arguments, OF_TRANSFORMERS)
        given = {"config": _config(folder), "state_dict": tensors, **arguments}
        return _loaded(kind, None, tuple(record["unused"]), **given)
    # JSON has lists only, and constructors may want tuples
    given = {
        key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()
    }
    try:
        with torch.device("meta"):
            made = _made(record["library"], name, dict(given))
    except NotImplementedError:  # torch's, of a library that computes with what it makes
        made = nn.Identity()
    wanted = sum(parameter.numel() for parameter in made.parameters())
    if wanted > SPARE + 2 * sum(tensor.numel() for tensor in tensors.values()):
        raise ValueError(f"wye.json: {name} has {wanted} values, which its weights are not")
    module = _made(record["library"], name, given)
    for path, replacement in record.get("replaced", {}).items():
        parent, _, last = path.rpartition(".")
        kind = replacement and _one_of("replaced", replacement, REPLACEMENTS)
        new = getattr(nn, kind)(1) if kind else None
        setattr(module.get_submodule(parent), last, new)
    module.load_state_dict(tensors, strict=record.get("strict", True))
    return module


def _loaded(kind: Any, folder: Path | None, unused: tuple[str, ...] = (), **given: Any) -> Any:
    """A model of transformers, which would fill what its files lack with random values. `unused`:
    how the names begin of what may be lacking. Errors: ValueError."""
    model, found = kind.from_pretrained(folder, output_loading_info=True, **given)
    lacking = [
        name
        for name in found["missing_keys"]
        if not name.startswith(unused or ("\0",)) and not name.endswith(OF_PRETRAINING)
    ]
    if lacking:
        raise ValueError(
            f"the weights of {kind.__name__} lack {', '.join(sorted(lacking))}; export again, or "
            "copy the folder again"
        )
    return model


def _made(library: str, name: str, arguments: dict[str, Any]) -> Any:
    """The library's whole module, with values of its own."""
    if library == "timm":
        import timm

        _one_of("architecture", name, timm.list_models())
        return timm.create_model(name, num_classes=0, **_known("arguments", arguments))
    if library == "open_clip":
        import open_clip

        _one_of("text_cfg", arguments["text_cfg"].get("hf_model_name"), (None,))
        _check_open_clip(_known("arguments", arguments, OF_OPEN_CLIP))
        model = getattr(open_clip, _one_of("architecture", name, ("CLIP", "CustomTextCLIP")))
        return model(**arguments).visual if name == "CLIP" else model(**arguments).text
    from torchvision import models
    from torchvision.models import convnext, resnet, vision_transformer

    if name == "ResNet":
        block = _one_of("block", arguments.pop("block"), ("BasicBlock", "Bottleneck"))
        return resnet.ResNet(getattr(resnet, block), **arguments)
    if name == "ConvNeXt":
        return convnext.ConvNeXt([convnext.CNBlockConfig(*each) for each in arguments["blocks"]])
    if name == "VisionTransformer":
        return vision_transformer.VisionTransformer(**arguments)
    _one_of("architecture", name, models.list_models(module=models))
    return models.get_model(name, **_known("arguments", arguments))


def _check_open_clip(config: Mapping[str, Any]) -> None:
    """Raise ValueError for an image tower that timm would look for elsewhere."""
    images = config["vision_cfg"]
    place, colon, _ = str(images.get("timm_model_name")).partition(":")
    _one_of("vision_cfg", f"{place}{colon}", (place,))
    _one_of("vision_cfg", images.get("timm_model_pretrained", False), (False,))


def _one_of(what: str, said: Any, allowed: Collection[Any]) -> Any:
    """`said`. Errors: ValueError where it is none of `allowed`."""
    if said in allowed:
        return said
    some = [str(each) for each in allowed]
    listed = ", ".join(some[:12]) + f" and {len(some) - 12} more" * (len(some) > 12)
    raise ValueError(
        f"wye.json: {what} names {said!r}, which an export cannot, because it may run code or load "
        f"what lies elsewhere; it can name: {listed or 'nothing'}. Export again"
    )


def _known(
    what: str, given: Mapping[str, Any], allowed: Collection[str] | None = None
) -> Mapping[str, Any]:
    """`given`. Errors: ValueError for a name that is none of `allowed` (None: all but `LOADING`)."""
    known = [name for name in given if name not in LOADING] if allowed is None else allowed
    for name in given:
        _one_of(what, name, known)
    return given


def _taken(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin so, taken out, by the rest of their names."""
    names = [name for name in tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): tensors.pop(name) for name in names}


def _step(name: str, tensors: dict[str, Tensor]) -> nn.Module:
    """The linear layer whose tensors are called so, else the activation of that name."""
    found = _taken(tensors, f"{name}.")
    if not found:
        from transformers.activations import ACT2FN

        return ACT2FN[name]
    out, width = found["weight"].shape
    linear = nn.Linear(width, out, bias="bias" in found)
    linear.load_state_dict(found)
    return linear
