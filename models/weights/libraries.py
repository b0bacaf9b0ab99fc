"""Weights of towers that libraries' adapters made: under which names libraries publish them, and
fitted to the tower where its size is another one."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from models.towers.layers import Tower
from models.towers.libraries import open_clip, timm
from models.towers.names import refuse
from models.weights.translation import Source, plain_names

log = logging.getLogger(__name__)

DEFAULT = "DEFAULT"
Shapes = dict[str, tuple[int, ...]]  # of a tower's tensors, by the library's names


def in_memory(state: dict[str, Any]) -> Source:
    """Of a dictionary as training scripts save them."""
    for wrapper in ("state_dict", "model"):  # which save more than the weights
        if isinstance(state.get(wrapper), dict):
            state = state[wrapper]
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return list(tensors), lambda name: tuple(tensors[name].shape), tensors.__getitem__


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
        return in_memory(timm.loaded(config["architecture"], config["arguments"], tag).state_dict())
    except RuntimeError as error:
        raise _unfit(f"weights {where!r}", tower, error) from error
    except Exception as error:  # of the hub's client there are many kinds
        raise FileNotFoundError(
            f"weights {where!r} of timm's {config['architecture']}.{tag} could not be had "
            f"({type(error).__name__}); check the network, or download {timm.hub_id(config['architecture'], tag)} "
            "and give its folder"
        ) from error


def published_open_clip(where: str, tower: Tower) -> str:
    """The file of OpenCLIP's own weights for the tower: `DEFAULT`, the first of its tags with the
    tower's activation, or a tag. Errors as `published_timm`; ValueError for weights that were trained with another activation."""
    library, model = open_clip.library(), tower.config["model"]
    tags = library.list_pretrained_tags_by_model(model)
    quick = tower.config["quick_gelu"]
    tag = open_clip.default_tag(model, quick) or where if where == DEFAULT else where
    if tag not in tags:
        raise refuse(f"{tower.branch} weights for tower {tower.name!r}:", where, [DEFAULT, *tags])
    config = library.get_pretrained_cfg(model, tag)
    if config.get("quick_gelu", False) != quick:
        raise ValueError(
            f"weights {where!r} of tower {tower.name!r} were trained with quick_gelu="
            f"{'false' if quick else 'true'}; give the tower that key"
        )
    try:
        return library.download_pretrained(config)
    except Exception as error:  # of the hub's client there are many kinds
        place = config.get("hf_hub", "").rstrip("/") or config.get("url")
        raise FileNotFoundError(
            f"weights {where!r} of OpenCLIP's {model} could not be had ({type(error).__name__}); "
            f"check the network, or download {place} and give its file"
        ) from error


# -- as the tower wants them


def named_as_tower(source: Source, tower: Tower) -> Source:
    """A file of weights with the names of the tower's library: of a whole OpenCLIP model only this
    side."""
    if tower.config.get("library") != "open_clip":
        return source
    names, shape_of, tensor_of = plain_names(source)
    visual = "visual."
    if any(name.startswith(visual) for name in names):
        images = tower.branch == "image"
        inside = {
            name.removeprefix(visual): name for name in names if name.startswith(visual) == images
        }
    else:
        inside = {name: name for name in names}
    return list(inside), lambda name: shape_of(inside[name]), lambda name: tensor_of(inside[name])


def fitted(source: Source, tower: Tower, shapes: Shapes, where: str) -> Source:
    """The same weights for the tower's size: position embeddings are interpolated, and timm's files
    of older or other writers are converted by timm. A file that fits stays as it is, and is read
    tensor by tensor; one that timm converts is read as a whole."""
    names, shape_of, tensor_of = source
    library = tower.config.get("library")
    fits = set(names).issuperset(shapes) and all(shape_of(n) == shapes[n] for n in shapes)
    if fits or library not in ("timm", "torchvision", "open_clip"):
        return source
    if library == "timm":
        return _by_timm(source, tower, shapes, where)
    resized = {
        name: shapes[name]
        for name in shapes
        if name in names and _is_positions(name) and shape_of(name) != shapes[name]
    }
    for name in [n for n in resized if _grids(shape_of(n), resized[n], tower.branch) is None]:
        del resized[name]
    for name, shape in resized.items():
        old, new = _grids(shape_of(name), shape, tower.branch)
        log.info("%s: %s is interpolated from %s to %s", where, name, _words(old), _words(new))
    return (
        names,
        lambda name: resized.get(name, shape_of(name)),
        lambda name: (
            _resized(tensor_of(name), resized[name], tower.branch)
            if name in resized
            else tensor_of(name)
        ),
    )


def _by_timm(source: Source, tower: Tower, shapes: Shapes, where: str) -> Source:
    names, shape_of, tensor_of = source
    config = tower.config
    state = {name: tensor_of(name) for name in names}
    try:
        model = timm.loaded(config["architecture"], config["arguments"], state=state)
    except (RuntimeError, KeyError, AssertionError) as error:
        log.info("%s: timm does not convert it either: %s", where, error)
        return source  # the check of names and shapes says what does not fit
    made = in_memory(model.state_dict())
    changed = [n for n in shapes if n in names and shape_of(n) != made[1](n)]
    for name in changed:
        log.info("%s: timm changes %s from %s to %s", where, name, shape_of(name), made[1](name))
    return made


def _is_positions(name: str) -> bool:
    return name.rpartition(".")[2] in ("pos_embedding", "positional_embedding")


def _grids(
    old: tuple[int, ...], new: tuple[int, ...], branch: str
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Rows and columns of two tables of positions [(1,) 1 + rows * columns, W], or for texts their
    lengths; None: they are not square, or of other widths."""
    if len(old) != len(new) or old[-1] != new[-1]:
        return None
    if branch == "text":
        return (old[-2],), (new[-2],)
    sides = [math.isqrt(shape[-2] - 1) for shape in (old, new)]
    if any(side**2 != shape[-2] - 1 for side, shape in zip(sides, (old, new))):
        return None
    return (sides[0],) * 2, (sides[1],) * 2


def _words(grid: tuple[int, ...]) -> str:
    return f"{'x'.join(map(str, grid))} {'patches' if len(grid) == 2 else 'tokens'}"


def _resized(positions: Tensor, shape: tuple[int, ...], branch: str) -> Tensor:
    """The table with `shape` [(1,) N, W]: bicubic with antialiasing between patches, the class
    token as it is; linear between tokens. As timm and OpenCLIP do."""
    table = positions.reshape(-1, shape[-1]).float()
    if branch == "text":
        made = F.interpolate(table.t()[None], shape[-2], mode="linear")[0].t()
    else:
        side, size = math.isqrt(len(table) - 1), math.isqrt(shape[-2] - 1)
        grid = table[1:].t().unflatten(1, (side, side))[None]  # [1, W, side, side]
        grid = F.interpolate(grid, (size, size), mode="bicubic", antialias=True)
        made = torch.cat([table[:1], grid[0].flatten(1).t()])
    return made.reshape(shape).to(positions.dtype)


def _unfit(what: str, tower: Tower, error: Exception) -> ValueError:
    return ValueError(
        f"{what}: timm cannot load them into tower {tower.name!r} ({error}); leave the keys that "
        "change its architecture to their defaults"
    )
