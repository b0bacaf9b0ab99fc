"""Both towers with their heads, and what each of their layers costs."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from models.head import head_spec
from models.image import image_tower
from models.layers import Tower
from models.text import text_tower

__all__ = ["Tower", "build_towers", "count_flops", "meta_inputs", "with_head"]


def with_head(tower: Tower, embed_dim: int) -> Tower:
    """The tower with the head of its branch as last layer."""
    return replace(
        tower,
        specs=(*tower.specs, head_spec(tower.branch, tower.width, embed_dim)),
        config={**tower.config, "tower": tower.name, "width": tower.width, "embed_dim": embed_dim},
    )


def build_towers(
    image_name: str,
    text_name: str,
    embed_dim: int,
    image_size: int,
    vocab_size: int | None,
    max_text_tokens: int,
    pad_token_id: int | None = None,
    eos_token_id: int | None = None,
) -> tuple[Tower, Tower]:
    """The image tower and the text tower, heads included; no layer is built yet. Syntax of the names: `models/README.md`."""
    image = image_tower(image_name, image_size)
    text = text_tower(text_name, vocab_size, max_text_tokens, pad_token_id, eos_token_id)
    return with_head(image, embed_dim), with_head(text, embed_dim)


def meta_inputs(tower: Tower, micro_batch_size: int, num_tokens: int | None = None) -> dict[str, Tensor]:
    """The first layer's inputs, without data: shapes as in the run. `num_tokens`: default the tower's max_text_tokens."""
    if tower.branch == "image":
        size = tower.config["image_size"]
        return {"pixel_values": torch.empty(micro_batch_size, 3, size, size, device="meta")}
    shape = (micro_batch_size, tower.config["max_text_tokens"] if num_tokens is None else num_tokens)
    return {name: torch.empty(shape, dtype=torch.int64, device="meta") for name in ("input_ids", "attention_mask")}


def count_flops(tower: Tower, inputs: dict[str, Tensor]) -> list[float]:
    """Floating-point operations of the forward of each layer on `inputs` (see `meta_inputs`); nothing is computed.

    Counts matrix products, convolutions and attention (a multiply-add is 2), as `torch.utils.flop_counter` does; a causal mask
    halves nothing. Meant for ratios: between the branches, and between the stages of a branch.
    """
    counts = []
    tensors = inputs
    for spec in tower.specs:
        # templates are in training mode and gradients are on: in inference ViT would take a fused path that is not counted
        with torch.enable_grad(), FlopCounterMode(display=False) as counter:
            tensors = spec.template(tensors)
        counts.append(float(counter.get_total_flops()))
    return counts
