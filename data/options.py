"""What to train on, as the command line says it. Imports nothing that reads data, so that a
plan can be made without it."""

from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from data.modules import add_module_flag

IMAGE_TEXT = "image:text"


@dataclass(frozen=True)
class PairOption:
    """One pair of `--pairs`: two modalities, and what their loss counts in the sum over the
    pairs."""

    first: str
    second: str
    weight: float = 1.0

    @property
    def modalities(self) -> tuple[str, str]:
        return self.first, self.second


def read_pairs(given: str) -> tuple[PairOption, ...]:
    """`image:text,tone:text:0.5` -> its pairs; `text:image` is `image:text`. Errors: ValueError for
    what is not written so."""
    pairs = []
    for each in given.split(","):
        words = each.strip().split(":")
        try:
            first, second, weight = words if len(words) == 3 else (*words, "1")
            if (first, second) == ("text", "image"):
                first, second = second, first  # its scalars have the names of one pair
            pairs.append(PairOption(first, second, float(weight)))
        except ValueError:
            raise ValueError(
                f"'{each}' is no pair; write FIRST:SECOND or FIRST:SECOND:WEIGHT, such as "
                "image:text or tone:text:0.5"
            ) from None
        if not first or not second or not 0 < pairs[-1].weight < float("inf"):
            raise ValueError(f"'{each}': two modalities and a weight above 0 are needed")
    return tuple(pairs)


def branches_of(given: str) -> tuple[str, ...]:
    """The modalities of `--pairs`, each a branch, in the order in which they are first named."""
    return tuple(dict.fromkeys(name for pair in read_pairs(given) for name in pair.modalities))


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
    max_audio_seconds: float | None = None  # longer sounds are bad samples
    on_leak: str = "refuse"  # or "drop"
    leak_bits: int | None = (
        None  # images whose perceptual hashes differ in so many bits are the same
    )
    index_check: str = "decode"  # or "header"
    seed: int = 0
    data_root: tuple[str, ...] | None = (
        None  # further folders that the images of all specs may lie in
    )
    pairs: str = IMAGE_TEXT  # of modalities that are compared: a sample must have both of one

    def compared(self) -> tuple[tuple[str, str], ...]:
        """The modalities of each pair."""
        return compared(self.pairs)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "DataOptions":
        """Of train.py's options by name, as config.json keeps them; others are passed over."""
        known = {field.name: record[field.name] for field in fields(cls) if field.name in record}
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in known.items()
        }
        return cls(**values)


def compared(given: str) -> tuple[tuple[str, str], ...]:
    """The modalities of each pair of `--pairs`."""
    return tuple(pair.modalities for pair in read_pairs(given))


def add_pairs_flags(parser: ArgumentParser) -> None:
    """Flags of a command that reads a data set as a run with these pairs would."""
    parser.add_argument(
        "--pairs",
        default=IMAGE_TEXT,
        metavar="A:B,...",
        help="as --pairs of the run: a sample is used where it has both of some pair "
        "(default: %(default)s)",
    )
    add_module_flag(parser)
