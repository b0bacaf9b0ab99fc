"""From a sample to the tensors that enter the towers: one `Modality` per branch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from data.cache import SampleCache
from data.index.sources import Source
from data.loader import MicroBatchDataset
from data.modalities.audio.modality import AudioModality
from data.modalities.image import ImageModality
from data.modalities.modality import Modality
from data.modalities.preprocessing import Preprocessing
from data.modalities.text import Languages, TextModality
from data.modalities.transforms import augmented, eval_transform, normalise
from data.prepare import PreparedData
from engine.executor import FromBytes
from launch.batching.planned import side_multiple
from launch.config.groups import InputOptions
from launch.modalities import MODALITIES, audio_features
from models.towers.layers import Tower


def micro_batch_dataset(
    data: PreparedData,
    source: Source,
    options: InputOptions,
    branches: Collection[str],
    cache: SampleCache | None = None,
    patch_size: int | None = None,
    languages: Languages | None = None,
) -> MicroBatchDataset:
    """Micro-batches of `source` with the tensors of `branches` and no others."""
    modalities = [
        modality(name, data, options, cache=cache, patch_size=patch_size, languages=languages)
        for name in sorted(branches)
    ]
    return MicroBatchDataset(source, modalities, options.seed)


def modality(
    name: str,
    data: PreparedData,
    options: InputOptions,
    cache: SampleCache | None = None,
    patch_size: int | None = None,
    languages: Languages | None = None,
) -> Modality:
    """The one of a branch. `cache`: of decoded images and sounds; `patch_size`: of a ViT, pixels;
    `languages`: that the text tower tells apart."""
    if name in MODALITIES:
        return MODALITIES[name].load()
    if name == "text":
        return TextModality(
            data.text_tokenizer, options.max_text_tokens, data.length_multiple, languages
        )
    if name == "audio":
        if options.audio_tower is None or options.audio_size is None:
            raise ValueError("a pair with audio needs --audio-tower and --audio-size")
        features = audio_features(
            options.audio_tower,
            options.audio_seconds,
            options.audio_size,
            options.audio_augmentation or (),
        )
        return AudioModality(features, cache)
    preprocessing = options.preprocessing
    return ImageModality(
        augmented(options.image_size, options.augmentation or (), preprocessing),
        eval_transform(options.image_size, preprocessing),
        cache,
        side_multiple(patch_size),
        patch_size,
    )


def from_bytes(preprocessing: Preprocessing) -> dict[str, FromBytes]:
    """What makes values of the bytes that modalities load, by the name of the tensor."""
    if "image" in MODALITIES:  # one's own
        return {}
    return {"pixel_values": partial(normalise, preprocessing=preprocessing)}


def as_values(tensors: dict[str, Tensor], preprocessing: Preprocessing) -> dict[str, Tensor]:
    """A micro-batch as float32 towers read it, for those who call them without an engine."""
    made = from_bytes(preprocessing)
    return {
        name: made[name](tensor, torch.float32) if name in made else tensor
        for name, tensor in tensors.items()
    }


def languages_of(towers: Sequence[Tower]) -> Languages | None:
    """Those that the text tower tells apart; None: it does not."""
    known = next((t.config["languages"] for t in towers if "languages" in t.config), None)
    return Languages(**known) if known else None
