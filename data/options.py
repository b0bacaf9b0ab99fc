"""What to train on and how it is read, as the command line says it. Imports nothing that reads
data, so that `--help` and a plan can do without."""

from __future__ import annotations

import math
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from common.options import (
    Once,
    OptionGroup,
    at_least,
    fraction,
    number_where,
    numbers,
    option,
    positive,
)
from data.bad_samples import SECONDS_LIMIT
from data.index.roots import KINDS_WITH_PATHS, root, takes_roots
from data.modules import add_module_flag
from data.spec_files import SPEC
from data.stored.derived import DERIVED, Derived

IMAGE_TEXT = "image:text"
DEFAULT_LOSS = "infonce"
SPECS = (
    "demo | demo:LANG[+LANG...] | demo:voices | demo:scenes | demo:clips | "
    "jsonl:FILE | csv:FILE | tsv:FILE | "
    "parquet:FILES | coco:IMAGES:CAPTIONS.json | karpathy:FILE?split=train+restval | "
    "vg:IMAGES:FILE | refcoco:IMAGES:REFS.p?split=val | flickr30k-entities:IMAGES:DIR?split=val | "
    "imagefolder:DIR | audiofolder:DIR | videofolder:DIR | subtitles:DIR | "
    "webdataset:SHARDS | stream:SHARDS | python:MODULE:NAME"
)


@dataclass(frozen=True)
class PairOption:
    """One pair of `--pairs`: two modalities, and what their loss counts in the sum of all."""

    first: str
    second: str
    weight: float = 1.0

    @property
    def derived(self) -> Derived | None:
        """The kind of rows that are compared, where they are not those of the samples."""
        kind = DERIVED.get(self.first)
        return kind if kind and kind.pair == (self.first, self.second) else None

    @property
    def modalities(self) -> tuple[str, str]:
        """Of which a sample must have both."""
        kind = self.derived
        return (kind.of[0], kind.name) if kind else (self.first, self.second)

    @property
    def branches(self) -> tuple[str, str]:
        """That make what is compared."""
        kind = self.derived
        return kind.of if kind else (self.first, self.second)

    @property
    def made(self) -> tuple[str, str] | None:
        """Names of the rows that are compared, where they are not those of the samples."""
        kind = self.derived
        return kind.rows if kind else None

    @property
    def name(self) -> str:
        return "_".join(self.made or self.branches)


def read_pairs(given: str) -> tuple[PairOption, ...]:
    """`image:text,tone:text:0.5` -> its pairs; `text:image` is `image:text`. Errors: ValueError for
    what is not written so."""
    pairs = []
    for each in given.split(","):
        words = each.strip().split(":")
        try:
            first, second, weight = words if len(words) == 3 else (*words, "1")
            turned = [("text", "image"), ("text", "video")]
            turned += [kind.pair[::-1] for kind in DERIVED.values()]
            if (first, second) in turned:
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


def as_given(pairs: Iterable[PairOption]) -> str:
    """Pairs as `--pairs` takes them."""
    return ",".join(
        f"{pair.first}:{pair.second}" + ("" if pair.weight == 1 else f":{pair.weight:g}")
        for pair in pairs
    )


def loss_names(loss: str, pairs: str) -> tuple[str, ...]:
    """`--loss` of each pair of `--pairs`: one for all, or `image:text=sigmoid,region:text=infonce`,
    where pairs that are not named have infonce. Errors: ValueError for another pair, and for a pair
    that is named twice."""
    known = read_pairs(pairs)
    if "=" not in loss:
        return (loss,) * len(known)
    found: dict[str, str] = {}
    for each in loss.split(","):
        of, _, name = each.strip().partition("=")
        asked = [
            pair.name for pair in read_pairs(of) if pair in [replace(k, weight=1) for k in known]
        ]
        if len(asked) != 1 or asked[0] in found or not name:
            raise ValueError(
                f"--loss: '{each}': write PAIR=LOSS once for each of some pairs of --pairs {pairs}, such as "
                f"{known[0].first}:{known[0].second}=sigmoid"
            )
        found[asked[0]] = name
    return tuple(found.get(pair.name, DEFAULT_LOSS) for pair in known)


def loss_for(loss: str, pairs: str) -> str:
    """`--loss` for these `--pairs`, of more pairs that it may name; one name where they have one.
    Errors: ValueError."""
    if "=" not in loss:
        return loss
    known = {(pair.first, pair.second) for pair in read_pairs(pairs)}
    kept = [
        each
        for each in loss.split(",")
        if (of := read_pairs(each.partition("=")[0])[0]) and (of.first, of.second) in known
    ]
    names = {*loss_names(",".join(kept), pairs)} if kept else {DEFAULT_LOSS}
    return names.pop() if len(names) == 1 else ",".join(kept)


@dataclass(frozen=True)
class TermOption:
    """One of `--terms`."""

    branches: tuple[str, ...]
    loss: str
    weight: float

    @property
    def name(self) -> str:
        """As it is written."""
        return f"{'+'.join(self.branches)}={self.loss}"


def read_terms(given: str) -> tuple[TermOption, ...]:
    """`image=infonce:0.5,image+text+audio=NAME` -> its terms. Errors: ValueError for what is not
    written so, and for terms of two branches."""
    terms = []
    for each in given.split(",") if given else ():
        branches, _, of = each.strip().partition("=")
        loss, _, weight = of.partition(":")
        try:
            term = TermOption(tuple(branches.split("+")), loss, float(weight or 1))
        except ValueError:
            term = TermOption((), "", 0.0)
        if not all(term.branches) or not term.loss or not 0 < term.weight < math.inf:
            raise ValueError(
                f"'{each}' is no term; write A=LOSS or A+B+C=LOSS and a weight above 0 behind it, "
                "such as image=infonce:0.5"
            )
        if len(term.branches) == 2:
            pair = ":".join(term.branches)
            raise ValueError(
                f"'{each}': two branches are a pair; give {pair} to --pairs and --loss"
            )
        terms.append(term)
    return tuple(terms)


def branches_of(given: str) -> tuple[str, ...]:
    """The branches of `--pairs`, in the order in which they are first named."""
    return tuple(dict.fromkeys(name for pair in read_pairs(given) for name in pair.branches))


def derived_of(given: str) -> Derived | None:
    """The kind of annotations that a pair of `--pairs` compares; None: there is none."""
    return next((pair.derived for pair in read_pairs(given) if pair.derived), None)


def compared(given: str) -> tuple[tuple[str, str], ...]:
    """Of each pair of `--pairs` the modalities of which a sample must have both."""
    return tuple(pair.modalities for pair in read_pairs(given))


def pairs(text: str) -> str:
    """`--pairs`, written in one way."""
    try:
        found = read_pairs(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
    derived = [kind.pair_name for kind in DERIVED.values() if kind in [p.derived for p in found]]
    if len(derived) > 1:
        raise ArgumentTypeError(
            f"{text!r} has {' and '.join(derived)}; a run compares annotations of one kind, so leave "
            f"{' or '.join(derived)} out"
        )
    return as_given(found)


def terms(text: str) -> str:
    """`--terms`, as it is written."""
    try:
        read_terms(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
    return text.replace(" ", "")


def workers(text: str) -> str | int:
    """`--workers`."""
    if text != "auto" and not text.isdigit():
        raise ArgumentTypeError(f"{text!r} is neither 'auto' nor a whole number")
    return text if text == "auto" else int(text)


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


@dataclass(frozen=True, kw_only=True)
class PairsOptions(OptionGroup):
    title = "objective"
    pairs: str = option(
        IMAGE_TEXT,
        "modalities that are compared, each pair with a loss of its own and its weight in the sum; "
        "a sample takes part in the pairs of which it has both; region:text compares regions of "
        "images with their phrases, moment:text moments of films",
        "A:B[:WEIGHT],...",
        pairs,
        shown="as in --import, else image:text",
        in_recipe=True,
    )

    @property
    def branches(self) -> tuple[str, ...]:
        return branches_of(self.pairs)

    def compared(self) -> tuple[tuple[str, str], ...]:
        """The modalities of each pair."""
        return compared(self.pairs)


@dataclass(frozen=True, kw_only=True)
class SeedOptions(OptionGroup):
    title = "how to run"
    seed: int = option(
        0, "of weights, order, augmentation and dropout", "N", at_least(0), in_recipe=True
    )


@dataclass(frozen=True, kw_only=True)
class BadSampleOptions(OptionGroup):
    title = "data"
    max_bad_fraction: float = option(
        0.01, "stop when more of the samples cannot be used", "F", fraction, free=True
    )
    max_audio_seconds: float | None = option(
        None,
        "longer sounds are bad samples, which --max-bad-fraction counts",
        "S",
        number_where(
            lambda value: 0 < value <= SECONDS_LIMIT,
            f"not above 0, or above {SECONDS_LIMIT:,}, the longest sound that is read",
        ),
        shown=f"{SECONDS_LIMIT:,}; more is never read",
        in_recipe=True,
    )


@dataclass(frozen=True, kw_only=True)
class DataOptions(SeedOptions, PairsOptions, BadSampleOptions):
    """What to train on, and what to do about samples that should not be there."""

    title = "data"
    data: tuple[str, ...] = option(
        ("demo",),
        f"{SPECS}, or @FILE with one or several; repeat it to mix several (data/README.md)",
        "SPEC",
        SPEC,
        action="append",
        shown="demo",
    )
    data_root: tuple[str, ...] | None = option(
        None,
        "a further folder that the images of --data and --val-data may lie in: paths in data files "
        "count from the file's own folder first, then from each DIR in order; repeat it for several",
        "DIR",
        root,
        action="append",
        shown="the own folder only",
    )
    data_weights: tuple[float, ...] | None = option(
        None,
        "how often the samples of each --data come in an epoch",
        "W,W,...",
        numbers,
        shown="once",
        in_recipe=True,
    )
    data_temperature: float = option(
        1.0,
        "the share of a --data in an epoch goes with (samples * weight)^(1/T); large: all the same",
        "T",
        positive,
        in_recipe=True,
    )
    data_floors: tuple[float, ...] | None = option(
        None,
        "smallest share of each --data in an epoch, together at most 1",
        "F,F,...",
        numbers,
        shown="0",
        in_recipe=True,
    )
    data_adapt: float = option(
        0.0,
        "how fast the weights of each --data follow its loss, from epoch to epoch: where it falls "
        "more slowly they grow; 0: not at all",
        "RATE",
        number_where(lambda value: 0 <= value <= 1, "not in 0 <= RATE <= 1"),
        in_recipe=True,
    )
    val_data: str | None = option(
        None,
        "held-out samples from elsewhere, instead of a part of --data; @FILE as there",
        "SPEC",
        SPEC,
        action=Once,
    )
    val_fraction: float = option(
        0.1, "part of --data held out, never trained on", "F", fraction, in_recipe=True
    )
    limit_samples: int | None = option(
        None, "train on N samples only, to try a pipeline", "N", at_least(2), shown="all"
    )
    on_leak: str = option(
        "refuse",
        "training samples that are also in --val-data",
        choices=("refuse", "drop"),
    )
    leak_bits: int | None = option(
        None,
        "images count as equal when their perceptual hashes differ in up to N of 64 bits",
        "N",
        at_least(0),
        shown="only equal files do",
    )
    stream_cache: float | None = option(
        None,
        "disk that the shards of stream: may take on a machine, in WYE_CACHE",
        "GIB",
        positive,
        shown="half of what is free",
        free=True,
    )
    on_bad_shard: str = option(
        "refuse",
        "shards of stream: that are gone, have changed under the run, or hold another number of "
        "samples than a file beside them tells; drop: leave them out, up to --max-bad-fraction",
        choices=("refuse", "drop"),
        free=True,
    )
    index_check: str = option(
        "decode",
        "how images are checked when a data set is first opened; header: faster, truncated ones "
        "are found in training",
        choices=("decode", "header"),
    )

    @property
    def demo(self) -> str | None:
        """What follows `demo:` in all of the data, such as `scenes`; "": several things, or
        nothing; None: not all data are embedded ones."""
        named = {tuple(f"{spec}:".split(":")[:2]) for spec in self.data}
        if {kind for kind, _ in named} != {"demo"}:
            return None
        return named.pop()[1] if len(named) == 1 else ""

    def check(self) -> None:
        """Raise ValueError, in the words of a command line, for options that do not go together."""
        self._check_several(
            "data-weights",
            self.data_weights,
            lambda weights: all(0 <= weight < math.inf for weight in weights) and any(weights),
            "numbers >= 0, not all 0, such as 1,0.5",
        )
        self._check_several(
            "data-floors",
            self.data_floors,
            lambda floors: all(0 <= f <= 1 for f in floors) and math.fsum(floors) <= 1 + 1e-9,
            "numbers from 0 to 1, together at most 1, such as 0.2,0",
        )
        several = {"data-floors": self.data_floors, "data-adapt": self.data_adapt}
        several["data-temperature"] = None if self.data_temperature == 1 else self.data_temperature
        given = [flag for flag, value in several.items() if value]
        if len(self.data) == 1 and given:
            raise ValueError(
                f"argument --{given[0]}: {_as_typed(several[given[0]])}; one --data has nothing to "
                "share, give several"
            )
        specs = [*self.data, *filter(None, [self.val_data])]
        if self.data_root and not any(map(takes_roots, specs)):
            raise ValueError(
                f"argument --data-root: {self.data_root[0]}; it is for data specs of the kinds "
                f"{', '.join(KINDS_WITH_PATHS)}, and none is given; leave it out"
            )

    def _check_several(
        self,
        flag: str,
        given: tuple[float, ...] | None,
        rule: Callable[[tuple[float, ...]], bool],
        words: str,
    ) -> None:
        if given is not None and (len(given) != len(self.data) or not rule(given)):
            raise ValueError(
                f"argument --{flag}: {_as_typed(given)!r}; {len(self.data)} --data need "
                f"{len(self.data)} {words}"
            )


def _as_typed(value: Any) -> str:
    return ",".join(f"{each:g}" for each in value) if isinstance(value, tuple) else f"{value:g}"


@dataclass(frozen=True, kw_only=True)
class LoadingOptions(BadSampleOptions):
    """How samples are read."""

    title = "loading"
    workers: str | int = option(
        "auto", "data loading processes per rank", "auto|N", workers, free=True
    )
    cache: str = option(
        "off",
        "keep decoded images and sounds; auto: in ~/.cache/wye, or the folder that WYE_CACHE names",
        "off|auto|DIR",
        free=True,
    )
    cache_limit: float = option(50.0, "size limit of --cache", "GIB", float, free=True)

    @property
    def num_workers(self) -> int:
        """Of a rank, after the cores have been shared among the ranks."""
        if isinstance(self.workers, str):
            raise ValueError(f"--workers {self.workers} is not settled; call share_cores first")
        return self.workers
