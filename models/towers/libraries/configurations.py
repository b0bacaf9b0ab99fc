"""Models of transformers by name: a preset, a local folder, or an id on the Hugging Face hub.

Code that comes with a model is never run: only architectures of transformers itself are built.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from models.towers.layers import Layer
from models.towers.names import nearest
from models.towers.pooling import AttentionPool


@dataclass(frozen=True)
class Preset:
    """A published model: the configuration without asking the hub, and where its weights are."""

    hub_id: str
    config: type[PreTrainedConfig]
    values: dict[str, Any] = field(default_factory=dict)


def preset_of(name: str, presets: Mapping[str, Preset], aliases: Mapping[str, str]) -> str | None:
    """The preset that is meant by its name, an alias, or its id on the hub with or without the
    organisation, in any case and with `_` for `-`; None: by none of them."""
    return spellings_of(presets, aliases).get(name.lower().replace("_", "-"))


def spellings_of(presets: Mapping[str, Preset], aliases: Mapping[str, str]) -> dict[str, str]:
    """What a preset may be called, in small letters -> the preset. Of presets with one id on the
    hub the first is meant."""
    ids: dict[str, str] = {}
    for known, preset in presets.items():
        for word in (preset.hub_id, preset.hub_id.rpartition("/")[2]):
            ids.setdefault(word.lower().replace("_", "-"), known)
    return {**ids, **aliases, **{known: known for known in presets}}


def find_config(
    what: str,
    base: str,
    part: str,
    presets: Mapping[str, Preset],
    aliases: Mapping[str, str],
    example: str,
) -> tuple[PreTrainedConfig, str | None]:
    """The configuration of a preset, a local folder or a hub id, and the id on the hub if there is
    one.

    `what` it is, for messages ("text tower"); `part`: of the configuration of a model of images and
    texts ("text_config"); `example`: of an id. Errors: ValueError for an unknown name,
    FileNotFoundError.
    """
    if known := preset_of(base, presets, aliases):
        return presets[known].config(**presets[known].values), presets[known].hub_id
    folder = Path(base).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(
                f"{what} {base!r} is a folder without config.json; give a Hugging Face model folder"
            )
        return _auto_config(str(folder), part), None
    if "/" not in base:
        raise ValueError(
            f"{what} {base!r} is not known; did you mean {_nearest(base, presets, aliases)!r}? "
            f"Known: {', '.join(presets)}, a local folder with a config.json, or a Hugging Face id "
            f"such as {example}"
        )
    if base.count("/") > 1 or base.startswith((".", "/", "~")):
        raise FileNotFoundError(
            f"{what} {base!r} looks like a path but is no folder; give an existing one, or "
            "ORGANISATION/MODEL"
        )
    try:
        # asks once; transformers would ask for several files, and wait for a network for a minute
        return _auto_config(snapshot_download(base, allow_patterns=["config.json"]), part), base
    except (OSError, HfHubHTTPError, ValueError) as error:
        raise FileNotFoundError(
            f"{what} {base!r}: its configuration could not be had from the Hugging Face hub; check "
            "the id and the network, or download the model and give its folder"
        ) from error


def _nearest(base: str, presets: Mapping[str, Preset], aliases: Mapping[str, str]) -> str:
    spellings = spellings_of(presets, aliases)
    return spellings[nearest(base.lower().replace("_", "-"), spellings)]


def _auto_config(where: str, part: str) -> PreTrainedConfig:
    config = AutoConfig.from_pretrained(where, trust_remote_code=False)
    config = getattr(config, part, config)
    # the library's own: a file may name a kernel of the hub, whose code would be run
    config._attn_implementation = None
    return config


def changed(config: PreTrainedConfig, values: Mapping[str, object]) -> PreTrainedConfig:
    """A copy with these values."""
    config = copy.deepcopy(config)
    for key, value in values.items():
        setattr(config, key, value)
    return config


def saved_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors by the names that they have in files, those of transformers'
    `save_pretrained` and of the hub: they stay when the library renames its modules. A tensor of
    two names (tied weights) has the first."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        first.setdefault(id(tensor), name)
    return revert_weight_conversion(model, {name: state[name] for name in first.values()})


def initialise(layer: Layer, model: Any) -> None:
    """The library's own rules, inner modules first, as its `initialize_weights` does."""
    layer.apply(model._init_weights)
    for module in layer.modules():
        if isinstance(module, AttentionPool):  # which the library's model does not have
            module.reset_parameters()
