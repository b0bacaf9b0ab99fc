"""Regions of images and their phrases: which box of its image a phrase finds, and which name a box
has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from launch.inference.embedding import Regions
from models.metrics.classification import zero_shot_accuracy
from models.metrics.regions import (
    NUM_BEYOND,
    NUM_UNSEEN,
    OVERLAP,
    PHRASE_TO_BOX,
    box_sums,
    choice,
    equal,
    overlapping,
)
from models.metrics.retrieval import query_figures

SAME, OVERLAPS, NAMED = f"{PHRASE_TO_BOX}_same", f"{PHRASE_TO_BOX}_iou_{OVERLAP}", "box_to_name"
PROTOCOL = (
    "phrase → box: the box that a phrase chooses among those given for its image has an IoU of at "
    f"least {OVERLAP} with one of the phrase's own. box → name: among the distinct phrases of the set"
)

POOLED = (
    ". This model learned no regions: RoIAlign of the last map of its image tower goes through the "
    "layers behind it as the map of an image does"
)


NUM_GIVEN = "num_regions"
UNSEEN = (
    ". {:,} of {:,} regions were not in the view of their images and are not measured; "
    "--image-resize-mode squash of train.py shows all"
)


def region_figures(regions: Regions) -> dict[str, float]:
    """As in training by the same box, `phrase_to_box_R@1` and so on; by the overlap of boxes; and
    of boxes among the distinct phrases as names. Without regions: none."""
    region, phrase, number = regions.region, regions.phrase, len(regions.image)
    counts: dict[str, float] = {
        NUM_GIVEN: regions.num_given,
        NUM_UNSEEN: regions.num_given - number,
        NUM_BEYOND: 0,
    }
    if not number:
        return counts if regions.num_given else {}
    of_images = phrase.embeds, region.embeds, regions.image
    values = query_figures(
        PHRASE_TO_BOX, box_sums(*of_images, regions.image, phrase.key, phrase.key).tolist()
    )
    overlaps = overlapping(regions.box, regions.image, phrase.key)
    for name, is_right in ((SAME, equal(phrase.key)), (OVERLAPS, overlaps)):
        values |= {
            f"{name}_{key}": value for key, value in choice(*of_images, is_right)._asdict().items()
        }
    _, first, label = np.unique(phrase.key.numpy(), return_index=True, return_inverse=True)
    named = zero_shot_accuracy(region.embeds, torch.from_numpy(label), phrase.embeds[first])
    values |= {f"{NAMED}_{key}": value for key, value in named.items()}
    return values | counts | {f"{NAMED}_names": len(first), f"{NAMED}_chance": 1 / len(first)}


def unseen(figures: Iterable[Mapping[str, float]]) -> str:
    """What to say below the table of regions that views do not show; empty where all are seen."""
    total, out = (sum(int(each[name]) for each in figures) for name in (NUM_GIVEN, NUM_UNSEEN))
    return UNSEEN.format(out, total) if out else ""


def regions_rows(values: Mapping[str, float], held_out: str, number: int) -> list[dict[str, str]]:
    """Lines of a table: the figures of a set with so many regions."""
    names, by_chance = f"{values[f'{NAMED}_names']:g} names", values[f"{NAMED}_chance"]
    lines = [
        (f"phrase → box, IoU >= {OVERLAP}", *_choice(values, OVERLAPS)),
        ("phrase → box, the same", *_choice(values, SAME)),
        ("box → name", names, values[f"{NAMED}_top_1"], by_chance),
        ("box → name, mean per name", names, values[f"{NAMED}_mean_per_class"], by_chance),
    ]
    return [
        {
            "held-out set": f"{held_out} ({number})",
            "query → answer": question,
            "among": among,
            "right %": f"{100 * right:.1f}",
            "chance %": f"{100 * chance:.1f}",
        }
        for question, among, right, chance in lines
    ]


def _choice(values: Mapping[str, float], name: str) -> tuple[str, float, float]:
    candidates = f"{values[f'{name}_candidates']:.3g} boxes of its image"
    return candidates, values[f"{name}_right"], values[f"{name}_chance"]
