"""Annotations and their phrases: which place of its sample a phrase finds, such as a box of its
image, and which name a place has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from data.stored.derived import Derived
from data.stored.kinds import several_of
from launch.inference.embedding import Annotated
from models.metrics.annotations import (
    OVERLAP,
    Said,
    choice,
    choice_sums,
    overlapping,
    said_of,
)
from models.metrics.classification import zero_shot_accuracy
from models.metrics.retrieval import query_figures

PROTOCOL = (
    "phrase → {place}: the {place} that a phrase chooses among {among} has an IoU of at least "
    f"{OVERLAP} with one of the phrase's own, and {{asks}} asks. {{place}} → name: among the distinct "
    "phrases of the set"
)
POOLED = (
    ". This model learned no regions: RoIAlign of the last map of its image tower goes through the "
    "layers behind it as the map of an image does"
)
UNSEEN = ". {:,} of {:,} {} were not in the view of their {} and are not measured"
SQUASH = "; --image-resize-mode squash of train.py shows all"


def annotation_figures(annotated: Annotated) -> dict[str, float]:
    """As in training by the same place, `phrase_to_box_R@1` and so on; by the overlap of places;
    and of places among the distinct phrases as names. Without annotations: none."""
    kind, rows, phrase = annotated.kind, annotated.rows, annotated.phrase
    number, begin = len(annotated.of), kind.phrase_to_extent
    counts: dict[str, float] = {
        _num_given(kind): annotated.num_given,
        kind.num_unseen: annotated.num_given - number,
        kind.num_beyond: 0,
        _num_alone(kind): annotated.num_candidates_only,
    }
    if not len(phrase.key):
        return counts if annotated.num_given else {}
    asked, row = annotated.of[annotated.said_of], annotated.said_of
    of_samples = phrase.embeds, rows.embeds, asked, annotated.of
    said = Said(asked, phrase.key, row)
    same = said_of(number, said)
    overlaps = overlapping(_as_boxes(annotated.extent), said)
    values = query_figures(begin, choice_sums(*of_samples, same).tolist())
    for name, is_right in ((_same(kind), same), (_overlaps(kind), overlaps)):
        values |= {
            f"{name}_{key}": value for key, value in choice(*of_samples, is_right)._asdict().items()
        }
    # a place is called by its first phrase
    called = torch.from_numpy(np.unique(row.numpy(), return_index=True)[1])
    keys, names = phrase.key[called].numpy(), phrase.embeds[called]
    _, first, label = np.unique(keys, return_index=True, return_inverse=True)
    named = zero_shot_accuracy(rows.embeds[row[called]], torch.from_numpy(label), names[first])
    values |= {f"{_named(kind)}_{key}": value for key, value in named.items()}
    values |= {
        f"{_named(kind)}_{kind.name}s": len(called),
        f"{_named(kind)}_names": len(first),
    }
    return values | counts | {f"{_named(kind)}_chance": 1 / len(first)}


def protocol(
    kind: Derived,
    figures: Sequence[Mapping[str, float]],
    all_phrases: bool = False,
    pooled: bool = False,
) -> str:
    """What `annotation_figures` of some sets measured, for below their table."""
    total, out, alone = (
        sum(int(each[name]) for each in figures)
        for name in (_num_given(kind), kind.num_unseen, _num_alone(kind))
    )
    place, of = kind.extent, kind.of[0]
    among = f"all annotated {kind.extents} of its {of} ({alone:,} of {total:,} have no phrase)"
    said = PROTOCOL.format(
        place=place,
        among=among if alone else f"those given for its {of}",
        asks=f"{'every' if all_phrases else 'the first'} phrase of a {place}",
    )
    said += POOLED if pooled else ""
    unseen = UNSEEN.format(out, total, several_of(kind.name), several_of(of))
    return said + (unseen + SQUASH * kind.in_view if out else "")


def annotation_rows(
    kind: Derived, values: Mapping[str, float], held_out: str
) -> list[dict[str, str]]:
    """Lines of a table: the figures of a set; none where no annotation with a phrase is seen."""
    named, place = _named(kind), kind.extent
    if f"{named}_names" not in values:
        return []
    names, by_chance = f"{values[f'{named}_names']:g} names", values[f"{named}_chance"]
    phrases = values[f"{kind.phrase_to_extent}_queries"]
    places = values[f"{named}_{kind.name}s"]
    lines = [
        (phrases, f"phrase → {place}, IoU >= {OVERLAP}", *_choice(kind, values, _overlaps(kind))),
        (phrases, f"phrase → {place}, the same", *_choice(kind, values, _same(kind))),
        (places, f"{place} → name", names, values[f"{named}_top_1"], by_chance),
        (
            places,
            f"{place} → name, mean per name",
            names,
            values[f"{named}_mean_per_class"],
            by_chance,
        ),
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


def title(kind: Derived) -> str:
    """Of the table."""
    return f"{several_of(kind.name)} of {several_of(kind.of[0])}".capitalize()


def _choice(kind: Derived, values: Mapping[str, float], name: str) -> tuple[str, float, float]:
    candidates = f"{values[f'{name}_candidates']:.3g} {kind.extents} of its {kind.of[0]}"
    return candidates, values[f"{name}_right"], values[f"{name}_chance"]


def _as_boxes(extent: Tensor) -> Tensor:
    """[n, 4] x1, y1, x2, y2: spans [n, 2] with the whole height."""
    if extent.shape[1:] != (2,):
        return extent
    start, end = extent.unbind(1)
    return torch.stack([start, torch.zeros_like(start), end, torch.ones_like(end)], 1)


def _same(kind: Derived) -> str:
    return f"{kind.phrase_to_extent}_same"


def _overlaps(kind: Derived) -> str:
    return f"{kind.phrase_to_extent}_iou_{OVERLAP}"


def _named(kind: Derived) -> str:
    return f"{kind.extent}_to_name"


def _num_given(kind: Derived) -> str:
    return f"num_{kind.name}s"


def _num_alone(kind: Derived) -> str:
    """Which phrases of others may choose."""
    return f"num_{kind.name}s_without_phrase"
