"""transformers' `ClapModel`, sounds and texts: what one in a folder says of a run, whether two
towers with their heads are one, its configuration, and its names.

**The scale.** ClapModel has two, `logit_scale_a` and `logit_scale_t`. LAION-CLAP, where its
published weights come from, multiplies the similarities of both directions with the first one; the
second belongs to a loss on further features (`mlp_loss` in its `loss.py`), which ClapModel does not
have. So one scale is learned here, as in CLIP: it starts as `logit_scale_a`, and both names hold it
in an export, where `logits_per_text` is `logits_per_audio` transposed.

ClapModel's own `return_loss` differs from that: it takes the cross entropy over the sounds twice
(`logits_per_audio.t()`), once with each scale, and never over the texts. Training here takes both
directions, as LAION-CLAP does.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import ClapConfig, PreTrainedConfig

from common.files import read_json
from models.towers.head import HIDDEN_ACT, HIDDEN_ACT_KEY, read_projection
from models.towers.layers import Tower
from models.towers.libraries.transformers_audio import EXTRACTORS, refuse_fusion
from models.towers.names import TWO_LAYERS
from models.weights.of_transformers import OF_TRANSFORMERS, library_config, same_pairs
from models.weights.translation import Pair, Source, pairs_of

log = logging.getLogger(__name__)

MODEL_TYPE, PAIRS = "clap", "audio:text"
SCALES = ("logit_scale_a", "logit_scale_t")
TOWERS = ("clap_audio_model", "avg"), ("clap_text_model", "pooler")  # type and pooling


def options_of_clap(folder: Path, config: PreTrainedConfig) -> dict[str, Any]:
    """train.py's options that go on with the ClapModel in `folder`, but for those of its tokenizer.
    Errors: ValueError for one that fuses, FileNotFoundError for one without a feature extractor."""
    refuse_fusion(f"--import {folder}", config.audio_config)
    activation = config.projection_hidden_act
    own = "" if activation == HIDDEN_ACT else f":{HIDDEN_ACT_KEY}={activation}"
    return {
        "pairs": PAIRS,
        "audio_tower": f"hf:{folder}",
        "audio_seconds": _seconds(folder),
        "text_tower": f"{folder}:pool={TOWERS[1][1]}",
        "embed_dim": config.projection_dim,
        "loss": "infonce",
        "projection": f"mlp{own}",
    }


def _seconds(folder: Path) -> float:
    """Of a clip, as the feature extractor says."""
    for name in EXTRACTORS:
        if (folder / name).is_file():
            found = read_json(folder / name)
            found = found.get("feature_extractor", found)
            if "sampling_rate" in found:
                return float(found.get("max_length_s", 10))
    raise FileNotFoundError(
        f"--import {folder}: holds none of {' and '.join(EXTRACTORS)} with a sampling_rate, so the "
        "rate of its sounds and its mel bins are not known; save its ClapFeatureExtractor there"
    )


def is_clap(names: Iterable[str]) -> bool:
    """Are these the names in a file of a whole ClapModel?"""
    return {*SCALES, "audio_projection.linear1.weight"} <= set(names)


def note_scales(where: str, source: Source) -> None:
    """Warn where the scale that is not gone on with is another one."""
    kept, left = (source[name].tensor().item() for name in SCALES)
    if kept != left:
        log.warning(
            "--import %s: %s is exp(%.4f) and %s exp(%.4f); training goes on with the first, as "
            "LAION-CLAP's loss does, and an export writes it under both names",
            *(where, SCALES[0], kept, SCALES[1], left),
        )


def what_clap_lacks(audio: Tower, text: Tower) -> list[str]:
    """Why these towers with their heads and scalars are no ClapModel, a reason each; none: they are
    one."""
    reasons = []
    for tower, (kind, pool) in zip((audio, text), TOWERS):
        config = tower.config
        found = config.get("config", {}).get("model_type")
        if config.get("library") != OF_TRANSFORMERS or found != kind:
            reasons.append(f"transformers' ClapModel has no {tower.branch} tower {tower.name}")
        elif config["pool"] != pool:
            reasons.append(f"ClapModel pools by pool={pool}, not {config['pool']}")
    if TWO_LAYERS in text.config:
        reasons.append(f"ClapModel has no {TWO_LAYERS} behind its text tower")
    projection = audio.config.get("projection", "linear")
    if read_projection(projection)[0] != "mlp":
        reasons.append(f"ClapModel has projections of two layers, not --projection {projection}")
    if any(name.endswith("logit_bias") for name in _scalars(audio, text)):
        reasons.append("transformers' ClapModel has no logit_bias")
    return reasons


def clap_config(audio: Tower, text: Tower, logit_scale: float) -> ClapConfig:
    """Of two towers that lack nothing. `logit_scale`: its logarithm."""
    return ClapConfig(
        # ClapModel's projection asks for the width under this name; the tower has it from others
        audio_config={**library_config(audio), "hidden_size": audio.width},
        text_config=library_config(text),
        projection_dim=audio.config["embed_dim"],
        projection_hidden_act=read_projection(audio.config["projection"])[1],
        logit_scale_init_value=math.exp(logit_scale),
        architectures=["ClapModel"],
        dtype="float32",
    )


def clap_pairs(audio: Tower, text: Tower) -> list[Pair]:
    """Our names and those in the folder of a ClapModel."""
    pairs = [*same_pairs(audio, "audio_model"), *same_pairs(text, "text_model")]
    for branch in ("audio", "text"):
        ours, theirs = f"head.{branch}_projection.", f"{branch}_projection."
        pairs += pairs_of("linear1.* = linear1.*\nlinear2.* = linear2.*", ours, theirs)
    scale = scale_of(audio, text)
    if scale is None:
        return pairs
    here = lambda kept, left: (kept.reshape(1),)  # noqa: E731
    there = lambda own: (own.reshape(()), own.reshape(()).clone())  # noqa: E731
    return [*pairs, Pair((scale,), SCALES, here, there)]


def scale_of(audio: Tower, text: Tower) -> str | None:
    """The canonical name of the scale that sounds and texts are compared with; None: no loss
    compares them, or it learns none."""
    known = ("audio_text_logit_scale", "text_audio_logit_scale")
    return next((f"head.{name}" for name in _scalars(audio, text) if name in known), None)


def _scalars(*towers: Tower) -> list[str]:
    return [name for tower in towers for name in tower.specs[-1].template.scalars]
