"""Regions of images and their phrases: which box of its image a phrase finds, and which name a box
has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from launch.inference.embedding import Regions
from models.metrics.classification import zero_shot_accuracy
from models.metrics.regions import (
    NUM_BEYOND,
    NUM_UNSEEN,
    OVERLAP,
    PHRASE_TO_BOX,
    Said,
    box_sums,
    choice,
    overlapping,
    said_of,
)
from models.metrics.retrieval import query_figures

SAME, OVERLAPS, NAMED = f"{PHRASE_TO_BOX}_same", f"{PHRASE_TO_BOX}_iou_{OVERLAP}", "box_to_name"
PROTOCOL = (
    "phrase → box: the box that a phrase chooses among {} has an IoU of at least "
    f"{OVERLAP} with one of the phrase's own, and {{}} asks. box → name: among the distinct phrases "
    "of the set"
)

POOLED = (
    ". This model learned no regions: RoIAlign of the last map of its image tower goes through the "
    "layers behind it as the map of an image does"
)


NUM_GIVEN = "num_regions"
NUM_ALONE = "num_regions_without_phrase"  # which phrases of others may choose
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
        NUM_ALONE: regions.num_candidates_only,
    }
    if not len(phrase.key):
        return counts if regions.num_given else {}
    asked, row = regions.image[regions.said_of], regions.said_of
    of_images = phrase.embeds, region.embeds, asked, regions.image
    said = Said(asked, phrase.key, row)
    same = said_of(number, said)
    values = query_figures(PHRASE_TO_BOX, box_sums(*of_images, same).tolist())
    for name, is_right in ((SAME, same), (OVERLAPS, overlapping(regions.box, said))):
        values |= {
            f"{name}_{key}": value for key, value in choice(*of_images, is_right)._asdict().items()
        }
    # a region is called by its first phrase
    called = torch.from_numpy(np.unique(row.numpy(), return_index=True)[1])
    keys, names = phrase.key[called].numpy(), phrase.embeds[called]
    _, first, label = np.unique(keys, return_index=True, return_inverse=True)
    boxes = region.embeds[row[called]]
    named = zero_shot_accuracy(boxes, torch.from_numpy(label), names[first])
    values |= {f"{NAMED}_{key}": value for key, value in named.items()}
    values |= {f"{NAMED}_regions": len(called), f"{NAMED}_names": len(first)}
    return values | counts | {f"{NAMED}_chance": 1 / len(first)}


def protocol(
    figures: Sequence[Mapping[str, float]], all_phrases: bool = False, pooled: bool = False
) -> str:
    """What `region_figures` of some sets measured, for below their table."""
    total, out, alone = (
        sum(int(each[name]) for each in figures) for name in (NUM_GIVEN, NUM_UNSEEN, NUM_ALONE)
    )
    boxes = f"all annotated boxes of its image ({alone:,} of {total:,} have no phrase)"
    said = PROTOCOL.format(
        boxes if alone else "those given for its image",
        "every phrase of a box" if all_phrases else "the first phrase of a box",
    )
    return said + (POOLED if pooled else "") + (UNSEEN.format(out, total) if out else "")


def regions_rows(values: Mapping[str, float], held_out: str) -> list[dict[str, str]]:
    """Lines of a table: the figures of a set; none where no region with a phrase is seen."""
    if f"{NAMED}_names" not in values:
        return []
    names, by_chance = f"{values[f'{NAMED}_names']:g} names", values[f"{NAMED}_chance"]
    phrases, boxes = values[f"{PHRASE_TO_BOX}_queries"], values[f"{NAMED}_regions"]
    lines = [
        (phrases, f"phrase → box, IoU >= {OVERLAP}", *_choice(values, OVERLAPS)),
        (phrases, "phrase → box, the same", *_choice(values, SAME)),
        (boxes, "box → name", names, values[f"{NAMED}_top_1"], by_chance),
        (boxes, "box → name, mean per name", names, values[f"{NAMED}_mean_per_class"], by_chance),
    ]
    return [
        {
            "held-out set": f"{held_out} ({queries:.0f})",
            "query → answer": question,
            "among": among,
            "right %": f"{100 * right:.1f}",
            "chance %": f"{100 * chance:.1f}",
        }
        for queries, question, among, right, chance in lines
    ]


def _choice(values: Mapping[str, float], name: str) -> tuple[str, float, float]:
    candidates = f"{values[f'{name}_candidates']:.3g} boxes of its image"
    return candidates, values[f"{name}_right"], values[f"{name}_chance"]
