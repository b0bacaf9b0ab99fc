"""From the command line's words to what the loaders need: source, splits, tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from data.sources import Source, open_source
from data.splits import Splits, split_source
from data.tokenizer import load_tokenizer

HELD_OUT = "held_out/"


@dataclass(frozen=True)
class HeldOut:
    """A named set of samples that training never sees: `subset` [n] of `source`."""

    source: Source
    subset: np.ndarray


@dataclass(frozen=True)
class PreparedData:
    """The training samples `train` [N] of `source`, the held-out sets, and the tokenizer of both."""

    source: Source
    train: np.ndarray
    held_out: dict[str, HeldOut]
    tokenizer: PreTrainedTokenizerBase

    def summary(self) -> dict[str, object]:
        return {
            "source": self.source.spec,
            "train_samples": len(self.train),
            "held_out_samples": {n: len(h.subset) for n, h in self.held_out.items()},
        }


def prepare_data(spec: str, val_spec: str | None, val_fraction: float, seed: int, tokenizer: str | None, folder: Path) -> PreparedData:
    """Open, divide and tokenize; what takes long is kept in `folder` and found there the next time.

    Held-out samples come from `val_spec` when given, else are `val_fraction` of `spec`. `tokenizer` is a folder or a
    Hugging Face id; None trains a WordPiece on the training captions. Errors: ValueError, OSError.
    """
    source = open_source(spec)
    if val_spec is not None:
        validation = open_source(val_spec)
        train = np.arange(len(source), dtype=np.int64)
        held_out = {"validation": HeldOut(validation, np.arange(len(validation), dtype=np.int64))}
    else:
        splits = _kept_splits(folder / "splits.npz", source, val_fraction, seed)
        train, held_out = splits.train, {name: HeldOut(source, subset) for name, subset in splits.held_out.items()}
    kept = folder / "tokenizer"
    if tokenizer is None and kept.is_dir():
        return PreparedData(source, train, held_out, load_tokenizer(str(kept)))
    captions = (caption for i in train for caption in source.captions(int(i))) if tokenizer is None else None
    return PreparedData(source, train, held_out, load_tokenizer(tokenizer, captions, kept if tokenizer is None else None))


def _kept_splits(file: Path, source: Source, val_fraction: float, seed: int) -> Splits:
    made_of = json.dumps({"data": source.spec, "val_fraction": val_fraction, "seed": seed})
    if file.is_file():
        with np.load(file) as arrays:
            kept_of = str(arrays["made_of"])
            splits = Splits(
                arrays["train"], {name.removeprefix(HELD_OUT): arrays[name] for name in arrays.files if name.startswith(HELD_OUT)}
            )
        if kept_of != made_of:
            raise ValueError(f"{file}: divides other samples ({kept_of}) than are asked for ({made_of}); give another --run-dir")
        kept = len(splits.train) + sum(len(subset) for subset in splits.held_out.values())
        if kept != len(source):
            raise ValueError(
                f"{file}: divides {kept} samples, but {source.spec} now has {len(source)}; the data changed under "
                "the run: give another --run-dir, or the data of before"
            )
        return splits
    splits = split_source(source, val_fraction, seed, progress=True)
    np.savez(file, made_of=made_of, train=splits.train, **{HELD_OUT + name: subset for name, subset in splits.held_out.items()})
    return splits
