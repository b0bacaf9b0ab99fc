"""Contrastive losses on blocks of logits. Plain functions of tensors: nothing here knows of processes.

A loss is computed side by side: one side has b own rows and all B rows of the other modality; the other side likewise.
What a side must know of the other is one number per row (`statistics`). B: global batch, D: embedding width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

LOGIT_SCALE_LIMIT = math.log(100.0)


class InfoNCE:
    """Symmetric cross entropy over similarities (CLIP: Radford et al. 2021, section 2.3), the mean of both directions.

    `logit_scale` [1] is in log space; the scale used is its exponential, at most 100 as in CLIP.
    """

    parameters = ("logit_scale",)

    def logits(self, own: Tensor, other: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        """Similarities of own rows [b, D] with the other side [B, D], scaled: [b, B]."""
        return logit_scale_exp(parameters["logit_scale"]) * (own @ other.T)

    def statistics(self, logits: Tensor) -> Tensor:
        """Log-sum-exp of each row: [b]."""
        return logits.logsumexp(1)

    def share(self, logits: Tensor, own_statistics: Tensor, target: Tensor) -> Tensor:
        """This side's part of the loss []: the parts of all sides of both modalities add up to the mean over pairs and directions.

        `own_statistics` [b] are the log-sum-exps of the own rows, `target` [b] names the partner of each own row.
        """
        partner = logits.gather(1, target[:, None])[:, 0]  # [b]
        return (own_statistics - partner).sum() / (2 * logits.shape[1])

    def gradient(self, logits: Tensor, own_statistics: Tensor, other_statistics: Tensor, target: Tensor) -> Tensor:
        """∂L/∂logits [b, B] of the whole loss; `other_statistics` [B] are the log-sum-exps of the other side's rows."""
        d_logits = (logits - own_statistics[:, None]).exp_().add_((logits - other_statistics[None, :]).exp_())
        d_logits[torch.arange(len(target), device=logits.device), target] -= 2
        return d_logits.div_(2 * logits.shape[1])

    def embedding_gradient(self, d_logits: Tensor, other: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        """∂L/∂own: [b, D]."""
        return logit_scale_exp(parameters["logit_scale"]) * (d_logits @ other)

    def parameter_gradients(self, d_logits: Tensor, logits: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """∂L/∂logit_scale [1] from these rows; the rows of one side together give the whole."""
        return {"logit_scale": (d_logits * logits).sum().reshape(1)}

    def constrained(self, gradients: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole gradients, of all rows, as the optimizer is to see them.

        At the limit only a gradient that leads back below it passes: the clamp is a projection, and the scale cannot get stuck.
        """
        outward = (parameters["logit_scale"] >= LOGIT_SCALE_LIMIT) & (gradients["logit_scale"] < 0)
        return {"logit_scale": gradients["logit_scale"].masked_fill(outward, 0.0)}


def logit_scale_exp(logit_scale: Tensor) -> Tensor:
    """exp(logit_scale), at most 100."""
    return logit_scale.clamp(max=LOGIT_SCALE_LIMIT).exp()
