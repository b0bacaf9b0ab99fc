"""The image side and the text side of OpenCLIP's models: `open_clip:MODEL[:key=value,...]`.

MODEL is a name of `open_clip.list_models()` or a folder with an `open_clip_config.json`. The same
name as `--image-tower` and `--text-tower` gives the two sides of one model, with the activation,
the norms and the pooling of its configuration. The keys are the fields of OpenCLIP's
`CLIPVisionCfg` and `CLIPTextCfg`, and `quick_gelu`.

A side ends where its projection begins, for towers have a head of their own. A projection that is
more than a matrix stays in the tower: one with a bias (SigLIP's texts), of two layers, or inside of
an attention pool (RN50). `config["library_projection"]` says which it is.
"""

from __future__ import annotations

import functools
import importlib.util
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.model_sizes import read_model_config, refuse_sizes
from models.towers.derived import as_kind
from models.towers.layers import Tower
from models.towers.names import TWO_LAYERS, nearest, split_name
from models.towers.tracing.keys import of_annotations, read_keys
from models.towers.tracing.towers import Traceable, on_meta, refusals, traced_tower
from models.towers.tracing.trace import SAMPLES

PREFIX = "open_clip:"
VOCABULARY = 49408  # of CLIP's tokenizer, where a configuration does not say another number
CONFIG = "open_clip_config.json"
PARTS = ("embed_dim", "vision_cfg", "text_cfg")  # of a configuration
# how the names of a whole model's tensors begin, by the branch of the side
SIDE_PREFIXES = {"image": "visual.", "text": ""}
# The other side of a model while one side is made.
SMALL_IMAGE = {"layers": 1, "width": 64, "patch_size": 32, "image_size": 32}
SMALL_TEXT = {"layers": 1, "width": 64, "heads": 1, "vocab_size": 2, "context_length": 2}
# said in other ways (`--image-size`, `pool=`, the tokenizer), or of no use to a tower
NOT_IMAGE_KEYS = ("image_size", "output_tokens", "timm_model_pretrained", "pool_type")
NOT_TEXT_KEYS: tuple[str, ...]
NOT_TEXT_KEYS = ("eos_id", "pad_id", "output_tokens", "proj_type", "pool_type")
NOT_TEXT_KEYS += ("hf_tokenizer_name", "tokenizer_mode", "hf_model_name", "hf_model_pretrained")


def library() -> types.ModuleType:
    """open_clip, imported when it is needed. Errors: ImportError that says what to install."""
    try:
        import open_clip
    except ImportError as error:
        raise ImportError(
            "towers open_clip:MODEL need the package open_clip_torch; install it with "
            "pip install -r requirements-models.txt"
        ) from error
    return open_clip


@functools.cache
def names() -> tuple[str, ...]:
    """Of all models, without importing open_clip; none where it is not installed."""
    found = importlib.util.find_spec("open_clip")
    if found is None or found.origin is None:
        return ()
    return tuple(
        sorted(path.stem for path in Path(found.origin).parent.glob("model_configs/*.json"))
    )


def model_config(name: str) -> dict[str, Any]:
    """OpenCLIP's configuration of the model in a tower's name. Errors: ImportError, ValueError for
    a name that it has not and for sizes that no model has, FileNotFoundError."""
    model = split_name(name)[0].removeprefix(PREFIX)
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / CONFIG).is_file():
            raise FileNotFoundError(f"tower {name!r}: folder {folder} has no {CONFIG}")
        config = read_model_config(folder / CONFIG)
        model_cfg = config.get("model_cfg", config) if isinstance(config, dict) else {}
        if lacking := [key for key in PARTS if key not in model_cfg]:
            raise ValueError(
                f"{folder / CONFIG}: has no {', '.join(lacking)}; give a folder that OpenCLIP wrote"
            )
        return model_cfg
    config = library().get_model_config(model)
    if config is None:
        known = library().list_models()
        raise ValueError(
            f"tower {name!r}: OpenCLIP has no {model!r}; did you mean "
            f"{PREFIX}{nearest(model, known)}? open_clip.list_models() lists all {len(known)}"
        )
    return config


# -- images


def image_tower(name: str, image_size: int) -> Tower:
    """The image side for images of `image_size` pixels a side; it has no head yet. Errors:
    ImportError, FileNotFoundError; ValueError with OpenCLIP's own words for what it refuses."""
    config = model_config(name)
    library()
    from open_clip.model import CLIPVisionCfg

    own = {"pool": str, "quick_gelu": bool}
    values = read_keys(
        name, split_name(name)[1], of_annotations(CLIPVisionCfg), NOT_IMAGE_KEYS, own
    )
    quick_gelu = values.pop("quick_gelu", config.get("quick_gelu", False))
    if "pool" in values:
        key = "timm_pool" if "timm_model_name" in config["vision_cfg"] else "pool_type"
        values[key] = {"cls": "tok"}.get(values["pool"], values.pop("pool"))
    vision = {**config["vision_cfg"], **values, "image_size": image_size}
    vision |= {"output_tokens": False, "timm_model_pretrained": False}
    refuse_sizes(f"tower {name!r}", vision)
    make = partial(_image_side, name, config["embed_dim"], vision, quick_gelu)
    record = {
        **_record(name, config, make),
        "architecture": vision.get("timm_model_name")
        or (
            "ModifiedResNet" if isinstance(vision["layers"], (list, tuple)) else "VisionTransformer"
        ),
        "pool": vision.get("timm_pool") or vision.get("pool_type", "tok"),
        "image_size": image_size,
        "quick_gelu": quick_gelu,
        "config": vision,
    }
    timm_leaves = _timm_leaves() if vision.get("timm_model_name") else ((), ())
    traceable = Traceable(
        "image",
        lambda: make()[0],
        ("pixel_values", (SAMPLES, 3, image_size, image_size), torch.float32),
        not_taken=f"image tower {name!r} does not take images of {image_size} pixels a side",
        remedy=f"give --image-size {config['vision_cfg'].get('image_size', 224)}",
        leaf_functions=timm_leaves[0],
        leaf_modules=timm_leaves[1],
    )
    return traced_tower(traceable, name, record)


def _image_side(
    name: str, embed_dim: int, vision: dict[str, Any], quick_gelu: bool
) -> tuple[nn.Module, str | None]:
    """Without its projection, and the projection's name; None: it stays in."""
    with _refusals(name):
        side = library().CLIP(embed_dim, vision, SMALL_TEXT, quick_gelu).visual
    if isinstance(getattr(side, "proj", None), nn.Parameter):
        side.proj = None
        return side, "visual.proj"
    head = getattr(side, "head", None)
    last = getattr(head, "proj", None)
    if isinstance(last, nn.Linear) and last.bias is None:
        head.proj = nn.Identity()
        return side, "visual.head.proj.weight"
    return side, None


def _timm_leaves() -> tuple[tuple[Callable, ...], tuple[type[nn.Module], ...]]:
    from models.towers.libraries import timm

    models = timm.library().models
    return tuple(models.get_notrace_functions()), tuple(models.get_notrace_modules())


# -- texts


def text_tower(
    name: str,
    vocab_size: int | None,
    max_text_tokens: int,
    pad_token_id: int | None = None,
    eos_token_id: int | None = None,
) -> Tower:
    """The text side; it has no head yet. Errors: as `image_tower`; ValueError for texts that are
    longer than its positions.

    `vocab_size`, `pad_token_id`, `eos_token_id`: the tokenizer's; None: as the configuration says.
    Where that pools at the highest id of a text, and the tokenizer says which one ends it, the
    tower pools there: for CLIP's tokenizer that is the same.

    A tower whose tokens see the ones behind them, or that pools the last position, is given texts
    of its whole length, as OpenCLIP's tokenizers make them: shorter ones are padded, and
    `attention_mask` is not asked. Other towers do not see what comes behind the end.
    """
    config = model_config(name)
    text, quick_gelu = _text_config(name, config, vocab_size, pad_token_id, eos_token_id)
    # CLIP's tokenizer of transformers pads with the token that ends a text, OpenCLIP's does not
    ends = pad_token_id is not None and pad_token_id == eos_token_id
    positions = text["context_length"]
    if not 1 <= max_text_tokens <= positions:
        raise ValueError(
            f"text tower {name!r} has {positions} positions, so max_text_tokens={max_text_tokens} "
            f"must be from 1 to {positions}; lower --max-text-tokens, or override context_length "
            "and train from scratch"
        )
    whole = text["no_causal_mask"] or text["embed_cls"] or text["pool_type"] == "last"
    make = partial(_text_side, name, config["embed_dim"], text, quick_gelu)
    record = {
        **_record(name, config, make),
        "architecture": "TextTransformer",
        "pool": text["pool_type"],
        "max_text_tokens": max_text_tokens,
        "hub_id": None,
        "eos_token_id": eos_token_id,
        "quick_gelu": quick_gelu,
        "config": text,
    }
    traceable = Traceable(
        "text",
        lambda: make()[0],
        ("input_ids", (SAMPLES, max_text_tokens), torch.int64),
        f"text tower {name!r} does not take texts of {max_text_tokens} tokens",
        "give another --max-text-tokens",
        partial(
            _padded,
            length=positions,
            pad_id=text["pad_id"],
            end_id=eos_token_id if ends else None,
        )
        if whole
        else _as_it_is,
        drop_last=("attention_mask",),
    )
    return traced_tower(traceable, name, record)


def _text_config(
    name: str,
    config: dict[str, Any],
    vocab_size: int | None,
    pad_token_id: int | None,
    eos_token_id: int | None,
) -> tuple[dict[str, Any], bool]:
    """(all fields of `CLIPTextCfg`, quick_gelu) of a tower's name with the tokenizer's numbers."""
    library()
    from open_clip.model import CLIPTextCfg

    own = {"pool": str, "quick_gelu": bool}
    values = read_keys(name, split_name(name)[1], of_annotations(CLIPTextCfg), NOT_TEXT_KEYS, own)
    quick_gelu = values.pop("quick_gelu", config.get("quick_gelu", False))
    if "pool" in values:
        values["pool_type"] = values.pop("pool")
    text = {**config["text_cfg"], **values, "output_tokens": False}
    if text.get("hf_model_name"):
        two_layers = text.get("hf_proj_type", "mlp") == "mlp"
        raise ValueError(
            f"text tower {name!r}: its texts go through transformers' {text['hf_model_name']}, "
            f"which is a tower of its own; give --text-tower {text['hf_model_name']}:pool=mean"
            + (f",{TWO_LAYERS}={config['embed_dim']}" if two_layers else "")
            + ", or --import the whole model"
        )
    if vocab_size is not None and "vocab_size" not in values:
        text["vocab_size"] = vocab_size
    if pad_token_id is not None and pad_token_id != eos_token_id:
        text["pad_id"] = pad_token_id
    by_end = text.get("pool_type", "argmax") in ("argmax", "eos")
    if by_end and not text.get("embed_cls"):  # which pools a token of its own
        if eos_token_id is not None:
            text |= {"pool_type": "eos", "eos_id": eos_token_id}
        elif vocab_size not in (None, config["text_cfg"].get("vocab_size", VOCABULARY)):
            raise ValueError(
                f"text tower {name!r} pools where a text ends, and the tokenizer has no token that "
                "ends one; give the tower pool=last, or --tokenizer openai/clip-vit-base-patch32"
            )
    return asdict(CLIPTextCfg(**text)), quick_gelu


def _text_side(
    name: str, embed_dim: int, text: dict[str, Any], quick_gelu: bool
) -> tuple[nn.Module, str | None]:
    """Without its projection, and the projection's name; None: it stays in."""
    with _refusals(name):
        side = library().CustomTextCLIP(embed_dim, SMALL_IMAGE, text, quick_gelu).text
    causal = not text["no_causal_mask"] and not text["embed_cls"]
    blocks = side.transformer.resblocks
    for i, block in enumerate(blocks):
        # typeshed wants a hashable argument, and mypy does not see that a class is
        blocks[i] = as_kind(block, _of_any_length(type(block), causal))  # type: ignore[arg-type]
    if isinstance(side.text_projection, nn.Parameter):
        side.text_projection = None
        return side, "text_projection"
    return side, None


@functools.cache
def _of_any_length(kind: type[nn.Module], causal: bool) -> type[nn.Module]:
    """A block that takes as much of its mask as it has tokens: OpenCLIP's towers are given texts of
    their whole length, ours only as long as the longest of a micro-batch.

    `causal`: the mask hides what comes later and nothing else. Then attention is told so and needs
    no mask, which the fastest kernels of a GPU do not take.
    """

    def forward(self, q_x, k_x=None, v_x=None, attn_mask=None):
        length = q_x.shape[1]
        mask = None if attn_mask is None else attn_mask[..., :length, :length]
        return kind.forward(self, q_x, k_x, v_x, mask)

    def attention(self, q_x, k_x=None, v_x=None, attn_mask=None):
        mask = attn_mask.to(q_x.dtype)  # torch asks for it beside `is_causal`
        return self.attn(q_x, q_x, q_x, need_weights=False, attn_mask=mask, is_causal=True)[0]

    named = {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    if causal and kind is library().transformer.ResidualAttentionBlock:  # others ask for no `attn`
        named["attention"] = attention
    return type(kind.__name__, (kind,), named)


def _as_it_is(model: nn.Module, input_ids: Tensor) -> Tensor:
    return model(input_ids)


def _padded(
    model: nn.Module, input_ids: Tensor, length: int, pad_id: int, end_id: int | None
) -> Tensor:
    """With texts of the whole length. `end_id`: what ends a text, where it is padded with that too;
    then all behind the first one becomes `pad_id`."""
    if end_id is not None:
        ends = (input_ids == end_id).to(torch.int64)
        input_ids = input_ids.masked_fill(ends.cumsum(1) > ends, pad_id)
    return model(F.pad(input_ids, (0, length - input_ids.shape[1]), value=pad_id))


# -- both


def _record(
    name: str, config: dict[str, Any], make: Callable[[], tuple[nn.Module, str | None]]
) -> dict[str, Any]:
    found: list[str | None] = []

    def side() -> nn.Module:
        made, projection = make()
        found.append(projection)
        return made

    on_meta(side)
    return {
        "library": "open_clip",
        "model": split_name(name)[0].removeprefix(PREFIX),
        "output_dim": config["embed_dim"],
        "custom_text": config.get("custom_text", False),
        "library_projection": found[-1],
    }


def _refusals(name: str) -> AbstractContextManager[None]:
    return refusals(f"tower {name!r}: OpenCLIP cannot make it", "change the keys that do not fit")


# -- weights


def published(name: str, where: str) -> dict[str, Any]:
    """OpenCLIP's record of its weights `where`, a tag or `DEFAULT`, for the tower of a name; empty
    where there are none. `DEFAULT`: the first that were trained with the tower's activation."""
    model = split_name(name)[0].removeprefix(PREFIX)
    tag = default_tag(model, quick_gelu(name)) if where == "DEFAULT" else where
    return library().get_pretrained_cfg(model, tag) if tag else {}


def quick_gelu(name: str) -> bool:
    given = split_name(name)[1].get("quick_gelu")
    return model_config(name).get("quick_gelu", False) if given is None else given == "true"


def default_tag(model: str, quick: bool) -> str | None:
    """The first of its weights that were trained with its activation; None: there are none."""
    for tag in library().list_pretrained_tags_by_model(model):
        if library().get_pretrained_cfg(model, tag).get("quick_gelu", False) == quick:
            return tag
    return None
