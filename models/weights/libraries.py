"""Weights of towers that libraries' adapters made: under which names libraries publish them, and
under which names their files have them."""

from __future__ import annotations

import logging

from huggingface_hub import snapshot_download

from models.towers.layers import Tower
from models.towers.libraries import open_clip, timm
from models.towers.names import refuse
from models.weights.translation import Source, in_memory, plain_names

log = logging.getLogger(__name__)

DEFAULT = "DEFAULT"
Shapes = dict[str, tuple[int, ...]]  # of a tower's tensors, by the library's names


# -- by name


def published_timm(where: str, tower: Tower) -> Source:
    """timm's own weights for the tower: `DEFAULT` or a tag, as timm loads them. Errors: ValueError
    for a tag that there is not, FileNotFoundError without network."""
    config = tower.config
    tags = timm.tags(config["architecture"])
    tag = (config["tag"] or (tags[0] if tags else "")) if where == DEFAULT else where
    if tag not in tags:
        raise refuse(f"image weights for tower {tower.name!r}:", where, [DEFAULT, *tags])
    try:
        refuse_unreachable(timm.hub_id(config["architecture"], tag))
        return in_memory(timm.loaded(config["architecture"], config["arguments"], tag).state_dict())
    except RuntimeError as error:
        raise _unfit(f"weights {where!r}", tower, error) from error
    except Exception as error:  # of the hub's client there are many kinds
        place = timm.hub_id(config["architecture"], tag)
        raise FileNotFoundError(
            f"weights {where!r} of timm's {config['architecture']}.{tag} could not be had "
            f"({type(error).__name__}); check the network, or download {place} and give its folder"
        ) from error


def published_open_clip(where: str, tower: Tower) -> str:
    """The file of OpenCLIP's own weights for the tower: `DEFAULT`, the first of its tags with the
    tower's activation, or a tag. Errors as `published_timm`; ValueError for weights that were
    trained with another activation."""
    library, model = open_clip.library(), tower.config["model"]
    tags = library.list_pretrained_tags_by_model(model)
    quick = tower.config["quick_gelu"]
    tag = open_clip.default_tag(model, quick) if where == DEFAULT else where
    if tag is None and tags:
        raise ValueError(
            f"weights {where!r} of tower {tower.name!r}: all that OpenCLIP has of {model} were "
            f"trained with quick_gelu={'false' if quick else 'true'}; give the tower that key"
        )
    if tag not in tags:
        raise refuse(f"{tower.branch} weights for tower {tower.name!r}:", where, [DEFAULT, *tags])
    config = library.get_pretrained_cfg(model, tag)
    if config.get("quick_gelu", False) != quick:
        raise ValueError(
            f"weights {where!r} of tower {tower.name!r} were trained with quick_gelu="
            f"{'false' if quick else 'true'}; give the tower that key"
        )
    try:
        refuse_unreachable(config.get("hf_hub", ""))
        return library.download_pretrained(config)
    except Exception as error:  # of the hub's client there are many kinds
        place = config.get("hf_hub", "").rstrip("/") or config.get("url")
        raise FileNotFoundError(
            f"weights {where!r} of OpenCLIP's {model} could not be had ({type(error).__name__}); "
            f"check the network, or download {place} and give its file"
        ) from error


def refuse_unreachable(hub_id: str) -> None:
    """Raise what the hub's client raises where a model is neither in its cache nor to be had.

    `snapshot_download` asks once. The libraries ask for each file, and wait for half a minute
    between attempts before they say that there is no network. An address that is no
    ORGANISATION/MODEL passes.
    """
    if "://" not in hub_id and hub_id.count("/") >= 1:
        snapshot_download("/".join(hub_id.split("/")[:2]), allow_patterns=["config.json"])


# -- as the tower wants them


def named_as_tower(source: Source, tower: Tower) -> Source:
    """A file of weights with the names of the tower's library: of a whole OpenCLIP model only this
    side."""
    if tower.config.get("library") != "open_clip":
        return source
    source, visual = plain_names(source), open_clip.SIDE_PREFIXES["image"]
    if not any(name.startswith(visual) for name in source):
        return source
    side = open_clip.SIDE_PREFIXES[tower.branch]
    return {
        name.removeprefix(side): stored
        for name, stored in source.items()
        if name.startswith(visual) == bool(side)
    }


def converted_by_timm(source: Source, tower: Tower, shapes: Shapes, where: str) -> Source:
    """The same weights for one of timm's towers: timm converts files of older or other writers, and
    interpolates the positions of another image size. A file that fits stays as it is, and is read
    tensor by tensor; one that timm converts is read as a whole."""
    fits = source.keys() >= shapes.keys() and all(
        tuple(source[name].shape()) == shape for name, shape in shapes.items()
    )
    if tower.config.get("library") != "timm" or fits:
        return source
    config = tower.config
    state = {name: stored.tensor() for name, stored in source.items()}
    try:
        model = timm.loaded(config["architecture"], config["arguments"], state=state)
    except (RuntimeError, KeyError, AssertionError) as error:
        log.info("%s: timm does not convert it either: %s", where, error)
        return source  # the check of names and shapes says what does not fit
    made = in_memory(model.state_dict())
    for name in shapes.keys() & state.keys():
        before, behind = tuple(state[name].shape), tuple(made[name].shape())
        if before != behind:
            log.info("%s: timm changes %s from %s to %s", where, name, before, behind)
    return made


def _unfit(what: str, tower: Tower, error: Exception) -> ValueError:
    return ValueError(
        f"{what}: timm cannot load them into tower {tower.name!r} ({error}); leave the keys that "
        "change its architecture to their defaults"
    )
