"""Training samples on one side, held-out samples on the other, and no content on both.

Two samples belong together when their pictures are equal, pixel by pixel, or when they share a caption (upper and lower
case and spacing aside). Such groups, and for `family` whole concepts, are never divided.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import numpy as np
from tqdm import tqdm

from data.sources import ConceptSource, Source


@dataclass(frozen=True, eq=False)
class Splits:
    """Indices into one source, int64, ascending; no index twice."""

    train: np.ndarray  # [N]
    held_out: dict[str, np.ndarray] = field(default_factory=dict)  # name -> [n]

    def __post_init__(self) -> None:
        every = np.concatenate([self.train, *self.held_out.values()])
        if len(np.unique(every)) < len(every):
            raise ValueError(f"splits share samples: {len(every)} indices, {len(np.unique(every))} different; each sample is on one side")


def split_source(source: Source, val_fraction: float = 0.1, seed: int = 0, progress: bool = False) -> Splits:
    """Hold out samples; a pure function of the source's content, `val_fraction` and `seed`.

    A source that knows concepts (the demo) gives two held-out sets of about `val_fraction` of all samples each:
    `family`, concepts of which training has no variant, and `composition`, drawn at random from the rest. Any other
    gives one, `validation`. 0 holds out nothing and decodes nothing. Otherwise each different file is decoded once,
    to compare pictures; `progress` shows a bar when that takes long.
    Errors: ValueError when the fraction is out of range or the samples cannot be divided.
    """
    names = ("family", "composition") if isinstance(source, ConceptSource) else ("validation",)
    limit = 1 / len(names)
    if not 0 <= val_fraction < limit:
        raise ValueError(f"val_fraction {val_fraction} with held-out sets {', '.join(names)}: 0 <= val_fraction < {limit:g} is needed")
    everything = np.arange(len(source), dtype=np.int64)
    if val_fraction == 0:
        return Splits(train=everything)
    rng = np.random.default_rng([seed, len(names)])
    wanted = max(1, min(round(val_fraction * len(source)), len(source) - 1))
    groups = content_groups(source, progress)
    free = np.ones(len(source), dtype=bool)
    held_out = {}
    for name in names:
        whole = concept_groups(source, groups) if name == "family" else groups
        chosen = _draw(whole, free, wanted, rng)
        free &= ~chosen
        held_out[name] = everything[chosen]
    if not free.any() or any(len(part) == 0 for part in held_out.values()):
        sizes = ", ".join(f"{name} {len(part)}" for name, part in held_out.items())
        raise ValueError(
            f"{source.spec}: {len(source)} samples in {len(np.unique(groups))} groups of equal content cannot be divided with "
            f"val_fraction {val_fraction}: train {free.sum()}, {sizes}; no side may be empty; give more samples, or val_fraction 0"
        )
    return Splits(train=everything[free], held_out=held_out)


def content_groups(source: Source, progress: bool = False) -> np.ndarray:
    """[N] int64: equal numbers for samples joined, directly or through others, by an equal picture or caption."""
    numbers = tqdm(range(len(source)), desc="comparing pictures", unit="sample", delay=2, disable=not progress)
    return _connected(
        [("picture", source.content_key(i)), *(("text", " ".join(text.split()).casefold()) for text in source.captions(i))] for i in numbers
    )


def concept_groups(source: ConceptSource, groups: np.ndarray) -> np.ndarray:
    """[N] int64: `groups` joined further, so that all variants of a concept have one number."""
    return _connected([("group", int(group)), ("family", source.family(i))] for i, group in enumerate(groups))


def split_report(source: Source, splits: Splits) -> dict[str, int]:
    """Sample counts: `samples`, `train`, each held-out set; where skin tones are known also
    `composition_in_another_skin_tone`: held-out samples of which training has another skin tone."""
    counts = {"samples": len(source), "train": len(splits.train)}
    counts |= {name: len(indices) for name, indices in splits.held_out.items()}
    if isinstance(source, ConceptSource) and "composition" in splits.held_out:
        trained = {source.toneless(int(i)) for i in splits.train}
        counts["composition_in_another_skin_tone"] = sum(source.toneless(int(i)) in trained for i in splits.held_out["composition"])
    return counts


def _connected(keys_of_samples: Iterable[Iterable[Hashable]]) -> np.ndarray:
    """Number the connected components of samples that share a key (union-find with path halving)."""
    parent: list[int] = []

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    first_with_key: dict[Hashable, int] = {}
    for i, keys in enumerate(keys_of_samples):
        parent.append(i)
        for key in keys:
            a, b = root(first_with_key.setdefault(key, i)), root(i)
            parent[max(a, b)] = min(a, b)
    return np.array([root(i) for i in range(len(parent))], dtype=np.int64)


def _draw(groups: np.ndarray, free: np.ndarray, wanted: int, rng: np.random.Generator) -> np.ndarray:
    """[N] bool: whole groups of free samples in random order, each taken if it still fits, as near to `wanted` as that gets."""
    labels, sizes = np.unique(groups[free], return_counts=True)
    size = dict(zip(labels.tolist(), sizes.tolist()))
    left, taken = wanted, []
    for label in rng.permutation(labels).tolist():
        if size[label] <= left:
            taken.append(label)
            left -= size[label]
        if left == 0:
            break
    others = sorted((size[label], label) for label in set(size).difference(taken))
    # One group too many is taken where that is nearer to the wanted number, or where else nothing would be held out.
    if len(others) > 1 and left and (others[0][0] - left < left or not taken):
        taken.append(others[0][1])
    return free & np.isin(groups, taken)
