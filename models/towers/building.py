"""Both towers with their heads, and what each of their layers costs."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from common.output import brief
from models.losses import InfoNCE
from models.towers.annotations import PhrasesHead
from models.towers.fusion import FusionSizes, pair_inputs, pair_scores, tap_image, tap_text
from models.towers.head import Head, head, read_projection
from models.towers.image import image_tower
from models.towers.layers import LayerSpec, Tower, runs
from models.towers.moments import tap_frames
from models.towers.names import TWO_LAYERS
from models.towers.regions import tap_maps
from models.towers.text import text_tower

__all__ = [
    "LayerCounts",
    "Tower",
    "build_towers",
    "changing_buffers",
    "count_flops",
    "describe_layers",
    "meta_inputs",
    "refuse_unfit_tower",
    "runs_on",
    "takes_other_sizes",
    "with_head",
]


def build_towers(
    image_name: str,
    text_name: str,
    embed_dim: int,
    image_size: int,
    vocab_size: int | None,
    max_text_tokens: int,
    pad_token_id: int | None = None,
    eos_token_id: int | None = None,
    scalars: Mapping[str, float] = InfoNCE.parameters,
    fusion: FusionSizes | None = None,
) -> tuple[Tower, Tower]:
    """The image tower and the text tower, heads included; no layer is built yet. Syntax of the
    names: `models/README.md`.

    `scalars`: what the loss learns, by name with first values (its `parameters`); the image head
    owns them. `fusion`: both heads also make tokens, and the text head scores pairs of them.
    """
    image = image_tower(image_name, image_size)
    text = text_tower(text_name, vocab_size, max_text_tokens, pad_token_id, eos_token_id)
    return with_head(image, embed_dim, scalars, fusion), with_head(text, embed_dim, {}, fusion)


ANNOTATED: dict[str, Callable[[Tower], tuple[tuple[LayerSpec, ...], Callable[..., Head]]]] = {
    "region": lambda tower: tap_maps(tower, meta_inputs(tower, 2)["pixel_values"]),
    "moment": tap_frames,
}
"""Annotations by name -> from a tower without a head to its layers with taps, and what makes the
head that embeds them."""


def with_head(
    tower: Tower,
    embed_dim: int,
    scalars: Mapping[str, float] | None = None,
    fusion: FusionSizes | None = None,
    projection: str = "linear",
    annotations: str | None = None,
) -> Tower:
    """The tower with the head of its branch as last layer, and for `fusion` the taps that bring its
    maps there. `scalars`: what the branch owns of what the losses learn, by name with first values;
    None: those of InfoNCE for images, nothing for others. `annotations`: a key of
    `ANNOTATED`, whose places the head of this tower also embeds, or that of texts phrases of them.
    `projection`: as
    `read_projection` takes it; with `none` the tower's features are the embeddings, as in SigLIP.
    Errors: ValueError where they are not as wide, and for another projection."""
    if read_projection(projection)[0] == "none" and tower.width != embed_dim:
        raise ValueError(
            f"{tower.branch} tower {tower.name!r} makes {tower.width} features, so without a "
            f"projection the embeddings cannot be {embed_dim} wide; give --embed-dim "
            f"{tower.width}, or --projection linear"
        )
    if fusion is not None and TWO_LAYERS in tower.config:
        raise ValueError(
            f"{tower.branch} tower {tower.name!r}: --fusion reads tokens as wide as the tower's "
            f"features, which {TWO_LAYERS} changes; leave one of them out"
        )
    if scalars is None:
        scalars = InfoNCE.parameters if tower.branch == "image" else {}
    if fusion is not None and annotations:
        raise ValueError(f"fusion scores images with texts alone; leave the {annotations}s out")
    width, maps, of_pixels = tower.width, None, _reads_pixels(tower)
    config = {**tower.config, "tower": tower.name, "width": width, "embed_dim": embed_dim}
    if fusion is not None:
        config["fusion"] = asdict(fusion)
        if of_pixels:
            pixels = meta_inputs(tower, 2)["pixel_values"]
            tower, maps, config["num_image_tokens"] = tap_image(tower, pixels, fusion.scales)
        else:
            tower = tap_text(tower)
    make: Callable[..., Head] | None = None
    if annotations:
        config[f"{annotations}s"] = True
        if of_pixels:
            specs, make = ANNOTATED[annotations](tower)
            tower = replace(tower, specs=specs)
        else:
            make = partial(PhrasesHead, tower.branch)
    last = head(tower.branch, width, embed_dim, scalars, projection, fusion, maps, make)
    if projection != "linear":
        config["projection"] = projection
    return replace(tower, specs=(*tower.specs, last), config=config)


def _reads_pixels(tower: Tower) -> bool:
    """Whether it is of images, and not of texts."""
    return "image_size" in tower.config


def meta_inputs(
    tower: Tower, micro_batch_size: int, num_tokens: int | None = None
) -> dict[str, Tensor]:
    """The first layer's inputs, without data: shapes as in the run. `num_tokens` of a text: default
    the tower's max_text_tokens."""
    if tower.example is not None:
        return tower.example(micro_batch_size)
    if _reads_pixels(tower):
        size = tower.config["image_size"]
        return {"pixel_values": torch.empty(micro_batch_size, 3, size, size, device="meta")}
    shape = (
        micro_batch_size,
        tower.config["max_text_tokens"] if num_tokens is None else num_tokens,
    )
    return {
        name: torch.empty(shape, dtype=torch.int64, device="meta")
        for name in ("input_ids", "attention_mask")
    }


def refuse_unfit_tower(branch: str, tower: Any) -> None:
    """Raise ValueError where what a function of one's own returned is no tower of a branch, without
    its head. Its layers are run on the meta device."""
    of = f"the tower of '{branch}'"
    if not isinstance(tower, Tower):
        raise ValueError(
            f"{of}: its function returned {brief(tower)}; a Tower of models/towers/layers.py is needed"
        )
    if tower.branch != branch:
        raise ValueError(f"{of}: it says that it is of branch {tower.branch!r}; write {branch!r}")
    if tower.example is None and not {"image_size", "max_text_tokens"} & tower.config.keys():
        raise ValueError(
            f"{of}: it has no example, a function (samples) -> what enters the first layer, on the "
            "meta device; Tower(…, example=…) takes it"
        )
    features = f"{branch}_features"
    try:
        tensors = dict(meta_inputs(tower, 2))
        for spec in tower.specs:
            tensors = spec.template(tensors)
        shape = tuple(tensors[features].shape) if features in tensors else None
    except Exception as error:  # whatever the layers raise
        raise ValueError(
            f"{of}: its layers do not run on its own example: {type(error).__name__}: {error}"
        ) from error
    if shape != (2, tower.width):
        found = f"of shape {list(shape)}" if shape else f"not among {', '.join(tensors)}"
        raise ValueError(
            f"{of}: of two samples its last layer must make {features} [2, {tower.width}], as its "
            f"width says; they are {found}"
        )


def takes_other_sizes(tower: Tower) -> bool:
    """Does an image tower take images of other sides than those that it was made for? Tried with
    one that is wider."""
    (pixels,) = meta_inputs(tower, 2).values()
    more = tower.config.get("patch_size", 32)
    return runs_on(tower, {"pixel_values": torch.cat([pixels, pixels[..., :more]], dim=-1)})


def runs_on(tower: Tower, tensors: dict[str, Tensor]) -> bool:
    """Do the layers of a tower run on these tensors, which are on the meta device?"""
    return runs(tower.specs, tensors)


def changing_buffers(tower: Tower) -> list[str]:
    """The canonical names of buffers of the state that a training forward changes, beside those of
    batch normalisation; on the meta device."""
    held = [
        (layer, local, buffer, buffer._version)
        for layer in (spec.template for spec in tower.specs)
        for local, buffer in layer.named_buffers()
        if local in layer.canonical_names
        and not isinstance(layer.get_submodule(local.rpartition(".")[0]), _BatchNorm)
    ]
    if not held:
        return []
    tensors = meta_inputs(tower, 2)
    with torch.no_grad():
        for spec in tower.specs:
            tensors = spec.template(tensors)
    return [
        layer.canonical_names[local]
        for layer, local, buffer, version in held
        if dict(layer.named_buffers())[local] is not buffer or buffer._version != version
    ]


def count_flops(tower: Tower, inputs: dict[str, Tensor]) -> list[float]:
    """Floating-point operations of the forward of each layer on `inputs` (see `meta_inputs`);
    nothing is computed.

    Counts matrix products, convolutions and attention (a multiply-add is 2), as
    `torch.utils.flop_counter` does; a causal mask halves nothing. Meant for ratios: between the
    branches, and between the stages of a branch.
    """
    counts = []
    tensors = inputs
    for spec in tower.specs:
        # templates are in training mode and gradients are on: in inference ViT would take a fused
        # path that is not counted
        with torch.enable_grad(), FlopCounterMode(display=False) as counter:
            tensors = spec.template(tensors)
        counts.append(float(counter.get_total_flops()))
    return counts


@dataclass(frozen=True)
class LayerCounts:
    """What one layer does for one sample in a training forward, counted. Bytes of
    `activation_bytes` and `output_bytes` as in `LayerCost`."""

    name: str
    num_parameters: int
    flops: float  # as `count_flops`
    convolution_flops: float  # of these, in convolutions: under fp32 they may run at another rate
    # kept for the backward: what the layer made and its graph saved, and its output; the input is
    # its maker's
    activation_bytes: float
    output_bytes: float  # of all named tensors behind the layer
    # read and written by its kernels, one by one, as eager torch runs them; without the parameters
    moved_bytes: float
    num_kernels: int  # per micro-batch, whatever its size


def describe_layers(
    tower: Tower, precision_bytes: int, num_tokens: int | None = None
) -> list[LayerCounts]:
    """The counts of every layer, in order, on the meta device: no memory, no arithmetic, any tower
    in seconds.

    `precision_bytes`: of a weight, 4 (fp32) or 2 (bf16; fp16 is the same). Counted at two samples,
    because batch normalisation refuses one where nothing but the sample is left to average over.
    `num_tokens` as in `meta_inputs`.
    """
    return _described(tower.specs, meta_inputs(tower, _COUNTED, num_tokens), precision_bytes)


def describe_pairs(image: Tower, text: Tower, precision_bytes: int) -> LayerCounts:
    """The counts of the pairs that are made for one text; towers with fusion."""
    (found,) = _described(
        [pair_scores(FusionSizes(**image.config["fusion"]))],
        pair_inputs(image, text, _COUNTED),
        precision_bytes,
    )
    return found


def token_bytes(towers: Sequence[Tower], precision_bytes: int) -> dict[str, float]:
    """Of the tokens that the heads make for fusion of one image, and of one text as long as it can
    be; none without fusion."""
    if not any("fusion" in tower.config for tower in towers):
        return {}
    image, text = towers
    numbers = {"image": image.config["num_image_tokens"], "text": text.config["max_text_tokens"]}
    return {
        branch: precision_bytes * number * image.config["fusion"]["width"]
        for branch, number in numbers.items()
    }


def _described(
    specs: Sequence[LayerSpec], tensors: dict[str, Tensor], precision_bytes: int
) -> list[LayerCounts]:
    if precision_bytes not in _DTYPES:
        raise ValueError(
            f"precision_bytes={precision_bytes} must be one of {', '.join(map(str, _DTYPES))}: "
            "bytes of a weight"
        )
    dtype, samples = _DTYPES[precision_bytes], _COUNTED
    tensors = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    described = []
    for position, spec in enumerate(specs):
        layer = copy.deepcopy(spec.template)
        # DeepSpeed casts parameters and leaves buffers in fp32
        for parameter in layer.parameters():
            parameter.data = parameter.data.to(dtype)
        given = {
            name: t.detach().requires_grad_(position > 0 and t.is_floating_point())
            for name, t in tensors.items()
        }
        saved = _Saved()
        # templates are in training mode and gradients are on: in inference ViT would take a fused
        # path that is not counted
        with (
            torch.enable_grad(),
            _FusedAttention(),
            saved,
            FlopCounterMode(display=False, custom_mapping=_FLOPS) as flops,
            _Traffic(layer) as traffic,
        ):
            tensors = layer(given)
        described.append(
            LayerCounts(
                name=spec.name,
                num_parameters=spec.num_parameters,
                flops=flops.get_total_flops() / samples,
                convolution_flops=flops.get_flop_counts()["Global"].get(
                    torch.ops.aten.convolution, 0
                )
                / samples,
                activation_bytes=saved.num_bytes(
                    tensors.values(),
                    not_counted=(
                        *layer.parameters(),
                        *layer.buffers(),
                        *(given.values() if position else ()),
                    ),
                )
                / samples,
                output_bytes=sum(t.numel() * t.element_size() for t in tensors.values()) / samples,
                moved_bytes=traffic.moved_bytes / samples,
                num_kernels=traffic.num_kernels,
            )
        )
    return described


_COUNTED = 2  # samples
_DTYPES = {4: torch.float32, 2: torch.bfloat16}


class _Saved(torch.autograd.graph.saved_tensors_hooks):
    """Notes every storage that the graph built inside keeps for its backward."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        super().__init__(self._note, lambda tensor: tensor)

    def _note(self, tensor: Tensor) -> Tensor:
        self._add(tensor)
        return tensor.detach()

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = (
            storage  # by identity, which meta tensors have too; several tensors may share one
        )

    def num_bytes(self, outputs: Iterable[Tensor], not_counted: Iterable[Tensor]) -> int:
        """Bytes of the storages noted and those of `outputs`, but for those of `not_counted`."""
        for tensor in outputs:
            self._add(tensor)
        for tensor in not_counted:
            self._storages.pop(tensor.untyped_storage()._cdata, None)
        return sum(storage.nbytes() for storage in self._storages.values())


class _FusedAttention(TorchFunctionMode):
    """Attention in one kernel that keeps no probabilities, as GPUs run it. By itself torch takes
    the unfused way on the meta device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return _FUSED.get(func, func)(*args, **(kwargs or {}))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    **_: object,
) -> Tensor:
    """The fused kernel that exists on every machine. It saves what those of a GPU save (theirs draw
    dropout again in the backward)."""
    shape = (*query.shape[:-1], value.shape[-1])
    kept = None  # for the backward
    if (
        attn_mask is not None
        and attn_mask.dtype == query.dtype
        and attn_mask.dim() == query.dim() == 4
    ):
        kept = attn_mask.detach()
    # [B, heads, L, D]: some towers have windows as a further dimension, or no heads
    query, key, value = (
        (t if t.dim() > 3 else t[None]).flatten(0, -4) if t.dim() != 4 else t
        for t in (query, key, value)
    )
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=kept
    )[0]
    return found.reshape(shape)


def _attention_flops(query_shape, key_shape, value_shape, *_, **__) -> int:
    return sdpa_flop_count(query_shape, key_shape, value_shape)


# which torch 2.6 does not count
_FLOPS = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}


def _with_fused_attention(function: Callable[..., Any]) -> FunctionType:
    """A copy of one of torch's functions that finds `_attend` under the name of torch's attention:
    a mode does not reach inside it."""
    names = {**function.__globals__, "scaled_dot_product_attention": _attend}
    changed = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    changed.__kwdefaults__ = function.__kwdefaults__
    return changed


_FUSED = {
    F.scaled_dot_product_attention: _attend,
    F.multi_head_attention_forward: _with_fused_attention(F.multi_head_attention_forward),
}


class _Traffic(TorchDispatchMode):
    """Adds up what kernels read and write. Views move nothing; a look-up in a table reads what it
    writes, not the table."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._parameters = {parameter.untyped_storage()._cdata for parameter in layer.parameters()}
        self.moved_bytes = self.num_kernels = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        read, written = self._tensors((args, kwargs)), self._tensors(result)
        if not self._moves_nothing(func, read, written):
            self.num_kernels += 1
            reads = written if func is torch.ops.aten.embedding.default else read
            self.moved_bytes += sum(t.numel() * t.element_size() for t in (*reads, *written))
        return result

    def _moves_nothing(self, func, read: list[Tensor], written: list[Tensor]) -> bool:
        if func in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default):
            return True
        given = {tensor.untyped_storage()._cdata for tensor in read} | self._parameters
        return not func._schema.is_mutable and all(
            tensor.untyped_storage()._cdata in given for tensor in written
        )

    def _tensors(self, tree: object) -> list[Tensor]:
        return [
            leaf
            for leaf in tree_leaves(tree)
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self._parameters
        ]
