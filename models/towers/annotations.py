"""The heads of branches that also embed annotations: places within their values, such as regions of
images (`regions.py`) and moments of films (`moments.py`), and the phrases that are said of them.

    text_features of captions and, behind them, of phrases ─── project ──> text_embeds, phrase_embeds

B micro-batch, n its annotations, t its captions, C channels, D embedding size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from models.towers.fusion import token_projection
from models.towers.head import Head


class AnnotationsHead(Head):
    """The head of a branch that also embeds annotations: NAME_embeds [n, D] fp32 of length 1, of
    `extents` int32 [n, ...], where they are, and NAME_row int64 [n], of which sample each is; none
    where these are not given. `tapped`: what the tower makes for it, see `pooled`, of C channels
    together."""

    def __init__(
        self,
        branch: str,
        name: str,
        extents: str,
        tapped: Sequence[str],
        channels: int,
        width: int,
        embed_dim: int,
        *given: Any,
    ) -> None:
        """`width`, `embed_dim`, `given`: as `Head`."""
        super().__init__(branch, width, embed_dim, *given)
        self.projection_of_places = f"{name}_projection"
        self.reads_if_given = (extents, f"{name}_row")
        self.reads = self.drops = (*self.reads, *tapped)
        self.drops = (*self.drops, *self.reads_if_given)
        self.makes = (*self.makes, f"{name}_embeds")
        self.add_module(self.projection_of_places, token_projection(channels, embed_dim))
        self._name_parameters()

    @abstractmethod
    def pooled(
        self, tapped: Sequence[Tensor], extents: Tensor | None, row: Tensor | None
    ) -> Tensor:
        """The mean features of annotations [n, C], in the dtype of what is tapped; [0, C] where
        none are given."""

    def compute(self, features: Tensor, *tapped: Tensor, **given: Tensor) -> tuple[Tensor, ...]:
        made = super().compute(features)
        found = self.pooled(tapped, *map(given.get, self.reads_if_given))
        embeds = self.get_submodule(self.projection_of_places)(found)
        return *made, F.normalize(embeds.float(), dim=-1)


class PhrasesHead(Head):
    """The head of texts with phrases, which stand behind the captions: `text_features` [t + n, W]
    and `phrase_position` [n] -> `text_embeds` [t, D], `phrase_embeds` [n, D]; all are captions
    where it is not given."""

    reads_if_given = ("phrase_position",)

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.makes = (*self.makes, "phrase_embeds")

    def compute(
        self, features: Tensor, phrase_position: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        embeds, *scalars = super().compute(features)
        num_phrases = 0 if phrase_position is None else len(phrase_position)
        captions, phrases = embeds.split([len(embeds) - num_phrases, num_phrases])
        return captions * 1, *scalars, phrases * 1


def learned_names(name: str) -> tuple[str, str]:
    """How the canonical names begin of what a pair of annotations and phrases learns beside the
    towers."""
    return f"head.{name}_projection.", f"head.{name}_phrase_logit_"
