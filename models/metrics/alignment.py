"""How two sets of embeddings lie to each other: sums that replicas add up, and the figures that
follow.

With n pairs of unit vectors xᵢ (image) and yᵢ (text):

    alignment        mean ‖xᵢ − yᵢ‖² of pairs; 0 is best
    uniformity       log mean over i ≠ j of exp(−2 ‖xᵢ − xⱼ‖²), of one branch; lower is better
    modality_gap     ‖mean x − mean y‖
    cosine_pairs     mean xᵢ·yᵢ
    cosine_others    mean over i ≠ j of xᵢ·yⱼ
    effective_rank   exp of the entropy of the covariance's eigenvalues, in parts of their sum

The first two: Wang & Isola 2020; the gap: Liang et al. 2022; the rank: Roy & Vetterli 2007.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from models.metrics.retrieval import blocks

PAIRWISE = 4  # sums that are numbers; behind them that of the rows [D] and of their products [D, D]


def alignment_sums(own: Tensor, other: Tensor, target: Tensor) -> Tensor:
    """float64 [4 + D + D²], over the rows `own` [b, D] and their partners `other[target]` in
    `other` [B, D]. Those of all rows of a branch add up."""
    width = own.shape[1]
    partner = other[target]
    cosine = (own.double() * partner.double()).sum()
    distance = (own.double() - partner.double()).square().sum()
    every = own.double().sum(0) @ other.double().sum(0)
    # of the other branch, so that each of its rows comes once: a rank has all of them, but of its
    # own branch a replica's only
    spread = own.new_zeros((), dtype=torch.float64)
    for rows in blocks(len(partner), len(other)):
        similarity = partner[rows] @ other.T
        # −2 ‖x − y‖² of unit vectors
        spread += similarity.sub_(1).mul_(4).exp_().sum(1).double().sum()
    spread -= torch.exp(4 * ((partner * partner).sum(1) - 1)).double().sum()
    products = own.double().T @ own.double()
    return torch.cat(
        [
            torch.stack([distance, cosine, every, spread]),
            own.double().sum(0),
            products.reshape(width * width),
        ]
    )


def alignment_figures(
    image_to_text: Tensor,
    text_to_image: Tensor,
    num_pairs: int,
    branches: Sequence[str] = ("image", "text"),
) -> dict[str, float]:
    """The figures above from the sums of both directions; empty with less than two pairs.
    `branches`: the names behind `uniformity/` and `effective_rank/`."""
    if num_pairs < 2:
        return {}
    width = int(((len(image_to_text) - PAIRWISE) * 4 + 1) ** 0.5 - 1) // 2  # D² + D
    distance, cosine, every, text_spread = image_to_text[:PAIRWISE].tolist()
    image_spread = float(text_to_image[PAIRWISE - 1])
    others = num_pairs * (num_pairs - 1)
    first, second = branches
    sums = {first: image_to_text[PAIRWISE:], second: text_to_image[PAIRWISE:]}
    means = {branch: values[:width] / num_pairs for branch, values in sums.items()}
    figures = {
        "alignment": distance / num_pairs,
        "modality_gap": float((means[first] - means[second]).norm()),
        "cosine_pairs": cosine / num_pairs,
        "cosine_others": (every - cosine) / others,
    }
    for branch, spread in ((first, image_spread), (second, text_spread)):
        figures[f"uniformity/{branch}"] = float(
            torch.tensor(max(spread / others, 1e-300), dtype=torch.float64).log()
        )
        covariance = sums[branch][width:].view(width, width) / num_pairs - torch.outer(
            means[branch], means[branch]
        )
        figures[f"effective_rank/{branch}"] = _effective_rank(covariance)
    return figures


def _effective_rank(covariance: Tensor) -> float:
    if not covariance.isfinite().all():  # a model that diverged is measured, too
        return math.nan
    eigenvalues = torch.linalg.eigvalsh(covariance).clamp(min=0)
    if not float(eigenvalues.sum()) > 1e-12:  # all rows are one
        return 1.0
    shares = eigenvalues / eigenvalues.sum()
    return float(torch.exp(-torch.special.xlogy(shares, shares).sum()))
