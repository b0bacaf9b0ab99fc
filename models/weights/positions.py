"""Learned positions for more tokens, or for images of another size, than the weights have.

P positions in the file, W width.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from models.towers.layers import Tower
from models.towers.libraries.transformers_text import first_position

KEPT = 20  # Long-CLIP: the positions that CLIP's short captions have trained well

Resize = Callable[[Tensor, tuple[int, ...]], Tensor]
"""From a tensor in the file and the shape in the tower to the tensor of the tower. Raises ValueError
where none can be made of it."""

_OF_TEXT = ("position_embedding.weight", "position_embeddings.weight")


def stretched_positions(weight: Tensor, positions: int, kept: int = KEPT) -> Tensor:
    """[P, W] -> [`positions`, W], more than P: the first `kept` stay, the others are spread over
    the rest by linear interpolation (Long-CLIP, Zhang et al. 2024, section 3.2).

    With r = (P - kept) / (positions - kept), row k >= kept is the old row kept + r (k - kept);
    behind the last old row it goes on by the last difference. Raises ValueError for a table that
    does not become longer, or has fewer than two rows behind `kept`.
    """
    rows = weight.shape[0]
    if positions <= rows or rows < kept + 2:
        raise ValueError(
            f"{rows} positions cannot be stretched to {positions} behind the first {kept}; a "
            f"longer table, and one of at least {kept + 2}, is needed"
        )
    old = kept + torch.arange(positions - kept) * ((rows - kept) / (positions - kept))
    below = old.long().clamp(max=rows - 2)
    share = (old - below)[:, None].to(weight.device)
    below = below.to(weight.device)
    return torch.cat([weight[:kept], torch.lerp(weight[below], weight[below + 1], share)])


def resizers(tower: Tower) -> dict[str, Resize]:
    """By canonical name, for the tensors of a tower of transformers that can be made of a file with
    another number of positions."""
    if tower.config.get("library") != "transformers" or tower.branch != "text":
        return {}
    names = [name for spec in tower.specs for name in spec.canonical_parameters]
    kept = KEPT + first_position(tower.config["config"])
    return {
        name: lambda weight, shape: stretched_positions(weight, shape[0], kept)
        for name in names
        if name.endswith(_OF_TEXT)
    }
