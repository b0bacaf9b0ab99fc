"""Image towers by name: the door to the libraries that they come from.

| name | tower |
|---|---|
| `resnet50`, `vit_b_16`, `convnext_tiny`, … | torchvision's, cut by hand |
| `efficientnet_b0`, `swin_t`, … | torchvision's other classifiers |
| `timm:NAME` | any of timm's models |
| `open_clip:MODEL` | the image side of one of OpenCLIP's models |
| `hf:NAME` | transformers' vision models |
| a name in `OWN` | one of your own |
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from models.towers.layers import Tower
from models.towers.libraries import (
    open_clip,
    timm,
    torchvision,
    torchvision_by_hand,
    transformers_image,
)
from models.towers.names import HF, alike, join_name, nearest, split_name

CONFIG = "config.json"  # of transformers' models

LIBRARIES: dict[str, Callable[[str, int], Tower]] = {
    timm.PREFIX: timm.image_tower,
    open_clip.PREFIX: open_clip.image_tower,
    HF: transformers_image.image_tower,
}
"""How names begin -> from a whole name and the image size to a tower without a head."""

OWN: dict[str, Callable[[str, int], Tower]] = {}
"""Towers of one's own: how names begin -> from a whole name and the image size to a tower without a
head."""


def image_tower(name: str, image_size: int) -> Tower:
    """The tower of `name` for images of `image_size` pixels a side; it has no head yet. Its own
    name is `full_name` of that.

    Without `pool` its features are the library model's output with the last layer of its classifier
    left out.
    """
    name = full_name(name)
    base = split_name(name)[0]
    if base in OWN:
        return OWN[base](name, image_size)
    for prefix, tower in LIBRARIES.items():
        if name.startswith(prefix):
            return tower(name, image_size)
    if base in torchvision_by_hand.ARCHITECTURES:
        return torchvision_by_hand.image_tower(name, image_size)
    return torchvision.image_tower(name, image_size)


def full_name(name: str) -> str:
    """The name with its library, for those that people type without: `ViT-B/32` is
    `open_clip:ViT-B-32`, `vit_base_patch16_224` is `timm:vit_base_patch16_224`, `efficientnet-b0`
    is `efficientnet_b0`, `openai/clip-vit-base-patch32` is `hf:` that. A folder is of the library
    whose configuration it holds. Errors: ValueError for a name that no library has."""
    base, overrides = split_name(name)
    if base in OWN or base.startswith(tuple(LIBRARIES)) or base in _torchvisions():
        return name
    timms = timm.names()
    of_timm = base.removeprefix("hf-hub:").removeprefix("hf_hub:").removeprefix("timm/")
    if of_timm.partition(".")[0] in timms:  # with a tag or without
        return join_name(timm.PREFIX + of_timm, overrides)
    clips = [open_clip.PREFIX + each for each in open_clip.names()]
    if open_clip.PREFIX + base.replace("/", "-") in clips:  # as OpenAI writes them
        return join_name(open_clip.PREFIX + base.replace("/", "-"), overrides)
    for known in (_torchvisions(), clips, [timm.PREFIX + each for each in timms]):
        found = [each for each in known if alike(base, [each.rpartition(":")[2]])]
        if len(found) == 1:
            return join_name(found[0], overrides)
        if found:
            raise ValueError(
                f"image tower {base!r} may be {' or '.join(found)}; write the one that is meant"
            )
    if transformers_image.hub_id_of(base):
        return join_name(HF + base, overrides)
    folder = Path(base).expanduser()
    for file, prefix in ((CONFIG, HF), (open_clip.CONFIG, open_clip.PREFIX)):
        if (folder / file).is_file():
            return join_name(prefix + base, overrides)
    raise _unknown(base, [*clips, *(timm.PREFIX + each for each in timms)])


def _unknown(base: str, others: Iterable[str]) -> ValueError:
    """`others`: full names of the libraries' towers that are not torchvision's."""
    if re.fullmatch(r"[\w-]+/[\w.-]+", base):
        return ValueError(
            f"image tower {base!r} is not known; a model of the Hugging Face hub is written "
            f"{HF}{base}, one of timm {timm.PREFIX}NAME and one of OpenCLIP "
            f"{open_clip.PREFIX}MODEL"
        )
    presets = (HF + each for each in transformers_image.PRESETS)
    # torchvision's last: of names that are the same, they are the ones without a prefix
    named = {each.partition(":")[2]: each for each in (*presets, *others)}
    named |= {each: each for each in (*_torchvisions(), *OWN)}
    return ValueError(
        f"image tower {base!r} is not known; did you mean {named[nearest(base, named)]!r}? Known: "
        f"{', '.join(sorted([*torchvision_by_hand.ARCHITECTURES, *OWN]))}, torchvision's other "
        "classifiers, timm:NAME, open_clip:MODEL and hf:ORGANISATION/MODEL"
    )


def _torchvisions() -> Iterable[str]:
    return {**dict.fromkeys(torchvision.names()), **torchvision_by_hand.ARCHITECTURES}
