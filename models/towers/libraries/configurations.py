"""Models of transformers by name: a preset, a local folder, or an id on the Hugging Face hub; which
of them are built, and what a name may change of them.

Code that comes with a model is never run: only architectures of transformers itself are built.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from common.model_sizes import read_model_config, refuse_sizes
from models.towers.layers import Layer
from models.towers.names import HF, nearest, refuse, split_name
from models.towers.pooling import AttentionPool
from models.towers.tracing.keys import of_annotations, read_keys


@dataclass(frozen=True)
class Preset:
    """A published model: where its weights are, and its configuration without asking the hub."""

    hub_id: str
    model_type: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> PreTrainedConfig:
        return AutoConfig.for_model(self.model_type, **self.values)


@dataclass(frozen=True)
class Family:
    """An architecture of transformers. `model`: its class; `pools`: what its features can be pooled
    by, the library's own first; `pooled_by`: the module with which the library pools, which a tower
    with another pooling does not have. `not_keys`: of `KEYS`, those that do nothing here."""

    model: str
    pools: tuple[str, ...]
    pooled_by: str | None = None
    not_keys: tuple[str, ...] = ()

    def pools_of(self, config: PreTrainedConfig) -> tuple[str, ...]:
        """`pools`, of a configuration that may leave out the module for one."""
        has_head = getattr(config, "vision_use_head", True)
        return tuple(pool for pool in self.pools if has_head or pool != "head")

    def unused(self, pool: str) -> tuple[str, ...]:
        """How the names of tensors begin that the library's model has and this tower does not."""
        return () if self.pooled_by in (None, pool) else (f"{self.pooled_by}.",)

    def made(self, config: PreTrainedConfig) -> Any:
        """The library's model, on the ambient device."""
        return getattr(transformers, self.model)(config)


# What a name may change of a configuration that has it: sizes, dropouts, activations, first values.
KEYS = """
hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_sizes depths embed_dim
num_heads dim n_layers n_heads hidden_dim emb_dim embedding_size d_model d_kv d_ff num_layers
encoder_layers encoder_attention_heads encoder_ffn_dim patch_embeds_hidden_size mlp_ratio
patch_size patch_stride num_patches num_register_tokens window_size local_attention
frequency_stride time_stride max_length num_mel_bins spec_size max_source_positions
max_position_embeddings type_vocab_size n_langs sinusoidal_pos_embds sinusoidal_embeddings
relative_attention_num_buckets relative_attention_max_distance
hidden_act hidden_activation activation activation_function layerscale_value layer_scale_init_value
hidden_dropout_prob attention_probs_dropout_prob attention_dropout activation_dropout dropout
dropout_rate embedding_dropout mlp_dropout drop_path_rate
layer_norm_eps layer_norm_epsilon norm_eps
initializer_range initializer_factor embed_init_std init_std
""".split()


class Chosen(NamedTuple):
    """What a tower's name says: the configuration as it is published, its id on the hub if there is
    one, the family, the pooling, and the values of other keys."""

    config: PreTrainedConfig
    hub_id: str | None
    family: Any
    pool: str
    values: dict[str, Any]


@dataclass(frozen=True)
class Catalogue:
    """The towers of a branch: `families` by the model_type of a configuration, `presets` by name,
    and what people type for these, in small letters. `part`: where a configuration of several
    towers has that of this branch; `example`: an id on the hub."""

    branch: str
    part: str
    families: Mapping[str, Any]
    presets: Mapping[str, Preset]
    aliases: Mapping[str, str]
    example: str

    def preset_of(self, name: str) -> str | None:
        """The preset that is meant by its name, an alias, or its id on the hub with or without the
        organisation, in any case and with `_` for `-`; None: by none of them."""
        return self._spellings().get(name.removeprefix(HF).lower().replace("_", "-"))

    def hub_id_of(self, name: str) -> str | None:
        """The id on the hub of a preset that is named in any of its ways; None: it is no preset."""
        known = self.preset_of(name)
        return self.presets[known].hub_id if known else None

    def _spellings(self) -> dict[str, str]:
        """What a preset may be called -> the preset. Of presets with one id on the hub the first is
        meant."""
        ids: dict[str, str] = {}
        for known, preset in self.presets.items():
            for word in (preset.hub_id, preset.hub_id.rpartition("/")[2]):
                ids.setdefault(word.lower().replace("_", "-"), known)
        return {**ids, **self.aliases, **{known: known for known in self.presets}}

    def find(self, base: str) -> tuple[PreTrainedConfig, str | None]:
        """The configuration of what `base` names, and its id on the hub if there is one. Errors:
        ValueError for an unknown name, FileNotFoundError."""
        where = base.removeprefix(HF)
        what = f"{self.branch} tower {where!r}"
        if known := self.preset_of(where):
            return self.presets[known].config(), self.presets[known].hub_id
        folder = Path(where).expanduser()
        if folder.is_dir():
            if not (folder / "config.json").is_file():
                raise FileNotFoundError(
                    f"{what} is a folder without config.json; give a Hugging Face model folder"
                )
            return self._auto_config(folder), None
        if "/" not in where:
            spellings = self._spellings()
            meant = spellings[nearest(where.lower().replace("_", "-"), spellings)]
            raise ValueError(
                f"{what} is not known; did you mean {meant!r}? Known: {', '.join(self.presets)}, a "
                f"local folder with a config.json, or a Hugging Face id such as {self.example}"
            )
        if where.count("/") > 1 or where.startswith((".", "/", "~")):
            raise FileNotFoundError(
                f"{what} looks like a path but is no folder; give an existing one, or "
                "ORGANISATION/MODEL"
            )
        try:
            # asks once; transformers would ask for several files, and wait a minute for a network
            folder = Path(snapshot_download(where, allow_patterns=["config.json"]))
            (folder / "config.json").stat()  # there may be none on the hub
        except (OSError, HfHubHTTPError, ValueError) as error:
            raise FileNotFoundError(
                f"{what}: its configuration could not be had from the Hugging Face hub; check the "
                "id and the network, or download the model and give its folder"
            ) from error
        return self._auto_config(folder), where

    def _auto_config(self, folder: Path) -> PreTrainedConfig:
        """Errors: ValueError for sizes that no model has, or none with the weights beside it."""
        read_model_config(folder / "config.json")  # some make long lists as they are read
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        config = getattr(config, self.part, config)
        # the library's own: a file may name a kernel of the hub, whose code would be run
        config._attn_implementation = None
        return config

    def family_of(self, name: str, config: PreTrainedConfig) -> Any:
        """Errors: ValueError for a configuration of no family."""
        if config.model_type not in self.families:
            raise ValueError(
                f"{self.branch} tower {name!r} is of type {config.model_type!r}; supported types: "
                f"{', '.join(sorted(self.families))}, and models of several towers that hold one"
            )
        return self.families[config.model_type]

    def of_library(self, base: str) -> tuple[Any, tuple[str, ...], str | None]:
        """Of what `base` names (a name without its overrides): the family, what it can be pooled
        by, and its id on the hub if there is one."""
        config, hub_id = self.find(base)
        family = self.family_of(base, config)
        return family, family.pools_of(config), hub_id

    def read(self, name: str, **own: type) -> Chosen:
        """`own`: further keys, with their kinds. Errors: ValueError, FileNotFoundError."""
        base, overrides = split_name(name)
        config, hub_id = self.find(base)
        family = self.family_of(name, config)
        declared = of_annotations(type(config), PreTrainedConfig)
        keys = {key: declared[key] for key in KEYS if key in declared}
        values = read_keys(name, overrides, keys, family.not_keys, {"pool": str, **own})
        pools = family.pools_of(config)
        pool = values.pop("pool", pools[0])
        if pool not in pools:
            raise refuse(f"{self.branch} tower {name!r}: pool", pool, pools)
        return Chosen(config, hub_id, family, pool, values)


def remade(
    name: str,
    config: PreTrainedConfig,
    values: Mapping[str, Any],
    derived: Collection[str] = (),
) -> PreTrainedConfig:
    """With other `values`, and without those that are `derived`: what the configuration works out
    of the others when it is made. Errors: ValueError for values that the library refuses."""
    given = {key: value for key, value in config.to_dict().items() if key not in derived}
    given |= {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}
    refuse_sizes(f"tower {name!r}", given)
    try:
        return type(config).from_dict(given)
    except StrictDataclassError as error:
        raise ValueError(f"tower {name!r}: {error}") from error


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
