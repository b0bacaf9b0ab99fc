"""Patches of images in towers that make one sequence of tokens of an image (ViTs), and leaving some
of them out.

B micro-batch, N tokens, D width, K patches that are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

SMALLEST_PATCH = 7  # pixels, of towers that stay at one resolution


def patch_side(first: nn.Module) -> int | None:
    """Return the pixels a side of the patches that the first layer of an image tower cuts images
    into, once, or None where it does not."""
    for module in first.modules():
        # a network of several resolutions begins with smaller ones
        if isinstance(module, nn.Conv2d) and module.stride == module.kernel_size:
            side = module.kernel_size[0]
            return side if side >= SMALLEST_PATCH and module.padding in ("valid", (0, 0)) else None
    return None


def kept_tokens(tokens: Tensor, kept_patches: Tensor, prefix: int) -> Tensor:
    """Leave patches out (FLIP: Li et al. 2023): from `tokens` [B, N, D] take the first `prefix`,
    which are of no patch (class token, registers), and those of `kept_patches` [B, K], which
    numbers an image's patches row by row from 0; returns [B, prefix + K, D]."""
    first = torch.arange(prefix, device=tokens.device).expand(len(tokens), -1)
    kept = torch.cat([first, kept_patches + prefix], 1)
    return tokens.gather(1, kept[:, :, None].expand(-1, -1, tokens.shape[2]))
