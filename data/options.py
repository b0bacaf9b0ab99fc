"""What to train on, as the command line says it. Imports nothing of data/, so that a plan can be made without it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class DataOptions:
    """What to train on, and what to do about samples that should not be there."""

    data: tuple[str, ...]  # specs
    data_weights: tuple[float, ...] | None = None  # of each; None: 1
    data_temperature: float = 1.0  # of their shares in an epoch; 1: as the weights say
    data_floors: tuple[float, ...] | None = None  # smallest share of each; None: 0
    val_data: str | None = None
    val_fraction: float = 0.1
    limit_samples: int | None = None  # train on so many, drawn at random
    max_bad_fraction: float = 0.01
    on_leak: str = "refuse"  # or "drop"
    leak_bits: int | None = None  # pictures whose perceptual hashes differ in so many bits are the same
    index_check: str = "decode"  # or "header"
    seed: int = 0
    data_root: tuple[str, ...] | None = None  # further folders that the pictures of all specs may lie in

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "DataOptions":
        """Of train.py's options by name, as config.json keeps them; others are passed over."""
        known = {field.name: record[field.name] for field in fields(cls) if field.name in record}
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in known.items()})
