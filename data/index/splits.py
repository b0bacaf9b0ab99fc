"""Training samples on one side, held-out samples on the other, and no content on both.

Two samples belong together when their images are equal, pixel by pixel, when their sounds are
equal, sample by sample once decoded, or when they share a caption (upper and lower case and spacing
aside). Such groups, and for `family` whole concepts, are
never divided.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from data.decoding.images import decode_bytes, pixel_key
from data.formats.demo import SPOKEN
from data.index.sources import ConceptSource, KnownSource
from data.keys import hash64, plain_caption
from data.progress import progress_bar
from data.stored.image import IMAGE
from data.stored.kinds import other_files
from data.stored.text import TEXT


@dataclass(frozen=True, eq=False)
class Splits:
    """Samples of one source by side, int64, ascending; no sample is on two sides."""

    train: np.ndarray  # [N]
    held_out: Mapping[str, np.ndarray] = field(default_factory=dict)  # name -> [n]
    # kind of leak -> how many were left out of training because they would be on both sides
    leaks: Mapping[str, int] = field(default_factory=dict)


def split_source(
    source: KnownSource, val_fraction: float = 0.1, seed: int = 0, progress: bool = False
) -> Splits:
    """Hold out samples; a pure function of the source's content, `val_fraction` and `seed`.

    A source that knows concepts (the demo) gives two held-out sets of about `val_fraction` of all
    samples each: `family`, concepts of which training has no variant, and `composition`, drawn at
    random from the rest. One that knows speakers too (demo:voices) gives a third, `voices`: samples
    that training has, spoken by others than it hears; the other samples of new speakers are on no
    side. Scenes (demo:scenes) say themselves which of them are never trained on: at most as many of
    these are the sets `composition` and `concept`. Any other source gives one, `validation`. Bad
    samples are on no side. 0 holds out nothing and reads nothing; otherwise all captions are
    compared; `progress` shows a bar when that takes long. Errors: ValueError when the fraction is
    out of range or the samples cannot be divided.
    """
    names: tuple[str, ...] = ("validation",)
    if isinstance(source, ConceptSource):
        names = source.format.drawn_sets
    limit = 1 / max(1, len(names))
    if not 0 <= val_fraction < limit:
        raise ValueError(
            f"val_fraction {val_fraction} with held-out sets {', '.join(names)}: 0 <= val_fraction "
            f"< {limit:g} is needed"
        )
    everything = source.usable()
    apart: dict[str, np.ndarray] = {}
    if isinstance(source, ConceptSource):
        only = np.array([source.concept(int(i)).held_out or "" for i in everything])
        apart = {name: everything[only == name] for name in np.unique(only).tolist() if name}
        everything = everything[only == ""]
    if val_fraction == 0:
        return Splits(train=everything)
    rng = np.random.default_rng([seed, len(names)])
    wanted = max(1, min(round(val_fraction * len(everything)), len(everything) - 1))
    groups = content_groups(source, everything, progress)
    free = np.ones(len(everything), dtype=bool)
    held_out = {}
    for name in names:
        whole = groups
        if name == "family" and isinstance(source, ConceptSource):
            whole = concept_groups(source, everything, groups)
        chosen = _draw(whole, free, wanted, rng)
        free &= ~chosen
        held_out[name] = everything[chosen]
    if not free.any() or any(len(part) == 0 for part in held_out.values()):
        sizes = ", ".join(f"{name} {len(part)}" for name, part in held_out.items())
        raise ValueError(
            f"{source.spec}: {len(everything)} samples in {len(np.unique(groups))} groups of equal "
            f"content cannot be divided with val_fraction {val_fraction}: train {free.sum()}, "
            f"{sizes}; no side may be empty; give more samples, or val_fraction 0"
        )
    train = everything[free]
    for name, samples in apart.items():
        if name == SPOKEN:
            samples = _of_trained(source, samples, train)
        held_out[name] = np.sort(rng.permutation(samples)[:wanted])
    return Splits(train=train, held_out=held_out)


def _of_trained(source: KnownSource, spoken: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Those of the samples `spoken` of which `train` has the captions."""
    trained = {text for i in train for text in source.captions(int(i))}
    known = [i for i in spoken if not trained.isdisjoint(source.captions(int(i)))]
    return np.array(known, np.int64)


def content_groups(source: KnownSource, subset: np.ndarray, progress: bool = False) -> np.ndarray:
    """[n] int64: equal numbers for samples of the subset joined, directly or through others, by an
    equal image, sound, film or caption."""
    others = other_files()
    has = {
        modality: np.flatnonzero(~source.lacking(modality)[subset])
        for modality in (IMAGE.name, TEXT.name, *others)
    }
    # compact, for there are as many as captions
    with_text, text_keys = array("q"), array("Q")
    for sample in progress_bar(has["text"], "comparing captions", "sample", shown=progress):
        texts = {plain_caption(text) for text in source.captions(int(subset[sample]))}
        with_text.extend([sample] * len(texts))
        text_keys.extend(map(hash64, texts))
    keys = [_image_keys(source, subset[has["image"]])]
    keys += [source.keys(name)[subset[has[name]]] for name in others]
    return _connected(
        len(subset),
        np.concatenate(
            [has["image"], *(has[name] for name in others), np.array(with_text, np.int64)]
        ),
        np.concatenate([*keys, np.array(text_keys, np.uint64)]),
    )


def concept_groups(source: ConceptSource, subset: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """[n] int64: `groups` joined further, so that all variants of a concept have one number."""
    families = np.array([hash64(source.concept(int(i)).family) for i in subset], np.uint64)
    places = np.arange(len(subset))
    return _connected(
        len(subset),
        np.concatenate([places, places]),
        np.concatenate([groups.astype(np.uint64), families]),
    )


def _image_keys(source: KnownSource, subset: np.ndarray) -> np.ndarray:
    """[n] uint64, equal for images with equal pixels. Only those are decoded that look alike and
    are not equal byte for byte."""
    keys = source.keys("content")[subset]
    # each different content, once
    each, first, of = np.unique(keys, return_index=True, return_inverse=True)
    columns = [source.column(name)[subset[first]] for name in ("width", "height")]
    looks = source.column("perceptual_hash")[subset[first]]
    features = np.stack([column.astype(np.uint64) for column in (*columns, looks)], 1)
    _, alike, count = np.unique(features, axis=0, return_inverse=True, return_counts=True)
    for n in np.flatnonzero((count[alike.reshape(-1)] > 1) & (looks != 0)):
        each[n] = hash64(pixel_key(decode_bytes(source.value("image", int(subset[first[n]])))))
    return each[of.reshape(-1)]


def _connected(count: int, samples: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """[count]: equal numbers for samples that are joined. `samples[k]` has the key `keys[k]`."""
    different, key = np.unique(keys, return_inverse=True)
    nodes = count + len(different)  # each sample, then each key
    edges = (samples, count + key.reshape(-1))
    joined = coo_array((np.ones(len(samples), bool), edges), shape=(nodes, nodes))
    return connected_components(joined, directed=False)[1][:count].astype(np.int64)


def _draw(
    groups: np.ndarray, free: np.ndarray, wanted: int, rng: np.random.Generator
) -> np.ndarray:
    """[N] bool: whole groups of free samples in random order, each taken if it still fits, as near
    to `wanted` as that gets."""
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
    # One group too many is taken where that is nearer to the wanted number, or where else nothing
    # would be held out.
    if len(others) > 1 and left and (others[0][0] - left < left or not taken):
        taken.append(others[0][1])
    return free & np.isin(groups, taken)
