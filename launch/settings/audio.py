"""Defaults of the flags of audio. Imports nothing that reads sounds, so that --help can do without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data.options import branches_of

DEMO_AUDIO = {
    "audio_tower": "resnet18:layers=1-1-1-1",
    "audio_seconds": 2.5,
    "audio_size": 96,
    "audio_augmentation": ("crop", "spec"),
}
AUDIO: dict[str, Any] = {
    "audio_tower": "hf:clap-htsat-unfused",
    "audio_seconds": None,
    "audio_size": 128,
    "audio_augmentation": ("crop", "spec"),
}
"""Defaults of the modality audio, where a pair has it."""


def audio_options(
    values: Mapping[str, Any], recorded: Mapping[str, Any], is_demo: bool
) -> dict[str, Any]:
    """What is of audio: as given, else as recorded, else the default; nothing where no pair has
    it."""
    if "audio" not in branches_of(values["pairs"]):
        return {}
    found: dict[str, Any] = {}
    for key, default in (DEMO_AUDIO if is_demo else AUDIO).items():
        earlier = recorded.get(key, default) if recorded.get("audio_tower") else default
        found[key] = earlier if values[key] is None else values[key]
    found["audio_augmentation"] = tuple(found["audio_augmentation"])
    return found
