"""The modalities of a run, one entry each: what loads its samples, in training and in evaluation,
which tower its branch has, and how its values are shown. A module of one's own adds or replaces
one:

    MODALITIES["tone"] = ModalityEntry(
        lambda inputs: Tone(), lambda wanted: tone_tower(wanted.name)
    )

With an entry of `data.stored.kinds.STORED` every data format reads its values (`examples/depth/`).
It is then asked for by `--pairs image:text,tone:text` and `--tower tone=NAME` (`data/README.md`,
"Add a modality").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from common.output import brief
from common.spelling import near, nearest
from data.bad_samples import REASONS, BadSample
from data.batching.buckets import side_multiple
from data.cache import SampleCache
from data.modalities.audio.features import AudioFeatures
from data.modalities.audio.modality import AudioModality
from data.modalities.image import ImageModality
from data.modalities.modality import Modality
from data.modalities.text import Languages, TextModality
from data.modalities.tokenizer import num_ids
from data.modalities.transforms import EvalTransform, Views, augmented, normalise
from data.modalities.video import FrameTimes, VideoModality
from data.modules import own_code
from data.options import IMAGE_TEXT, branches_of, read_pairs
from data.stored.derived import DERIVED
from data.stored.kinds import STORED, is_text
from launch.config.groups import OF_BRANCH, BranchOptions, by_modality
from launch.views import FilmView, ImageView, SoundView, View
from models.defaults import audio_name, image_name, text_name, video_name
from models.towers.audio import audio_input, audio_tower
from models.towers.building import refuse_unfit_tower, with_head
from models.towers.fusion import FusionSizes
from models.towers.image import image_tower
from models.towers.layers import Tower, Weights
from models.towers.text import text_tower
from models.towers.video import video_tower
from models.weights.audio import open_audio_weights
from models.weights.of_image import open_inner_weights

if TYPE_CHECKING:
    from data.index.sources import KnownSource, Source
    from launch.config.groups import BatchingOptions, InputOptions

    Cost = Callable[[Source, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Inputs:
    """What a modality may need to load samples. `tokenizer`: None where no pair has texts;
    `length_multiple`: of the tokens of a micro-batch's texts; `cache`: of decoded images and
    sounds; `patch_size`: of a ViT, pixels; `languages`: that the text tower tells apart;
    `share_frames`: that clips which overlap load a frame once, in evaluation by towers that read
    `video_frame_row`."""

    options: InputOptions
    tokenizer: PreTrainedTokenizerBase | None = None
    length_multiple: int = 1
    cache: SampleCache | None = None
    patch_size: int | None = None
    languages: Languages | None = None
    share_frames: bool = False


@dataclass(frozen=True)
class Wanted:
    """A tower that is asked for. `options`: train.py's, by name; `name`: of the modality's own
    option, or of --tower; "" where none is given."""

    options: Mapping[str, Any]
    name: str
    vocabulary: Vocabulary


@dataclass(frozen=True)
class ModalityEntry:
    """`load`: what turns samples into the tensors of the branch. `tower`: the branch's tower
    without a head; its `example` says what enters it. `view`: how values are shown; None: they are
    not, and no file is a query of the modality. `from_bytes`: of tensors that are loaded as bytes,
    by name, what makes values of them. `weights`: opens the weights that the tower starts from, a
    name, folder or file. `cost`: the options of a run -> what says of a source and indices of its
    samples what their values cost beside each other; None: all alike. `flags`: the options of
    train.py that name its tower and weights; None: --tower and --weights. `named`: the name of a
    tower with what it leaves open for a new run, which may depend on where its weights come from
    (`models/defaults.py`)."""

    load: Callable[[Inputs], Modality]
    tower: Callable[[Wanted], Tower]
    view: type[View] | None = None
    from_bytes: Mapping[str, Callable[..., Tensor]] = field(default_factory=dict)
    weights: Callable[[str, Tower], Weights] = open_inner_weights
    cost: Callable[[BatchingOptions], Cost | None] = lambda options: None
    flags: BranchOptions | None = None
    named: Callable[[str, str | None], str] = lambda name, weights: name

    def __post_init__(self) -> None:
        parts = {
            name: getattr(self, name) for name in ("load", "tower", "weights", "cost", "named")
        }
        if not isinstance(self.from_bytes, Mapping):
            raise _wrong(f"from_bytes is {brief(self.from_bytes)}; a mapping of tensors' names")
        parts |= {f"from_bytes[{name!r}]": make for name, make in self.from_bytes.items()}
        for name, part in parts.items():
            if not callable(part):
                raise _wrong(f"{name} is {brief(part)}; a function")
        if not isinstance(self.flags, BranchOptions | None):
            raise _wrong(f"flags is {brief(self.flags)}; one of launch.config.groups.OF_BRANCH")
        if self.view is None:
            return
        if not isinstance(self.view, type) or not issubclass(self.view, View):
            raise _wrong(f"view is {brief(self.view)}; a subclass of launch.views.View")
        named = (name for name in View.__annotations__ if name != "data")
        lacking = [*self.view.__abstractmethods__, *(n for n in named if not hasattr(self.view, n))]
        if lacking:
            raise _wrong(
                f"view {self.view.__name__} has no {', '.join(sorted(lacking))}; all of it"
            )
        if unknown := sorted({*self.view.others} - REASONS.keys()):
            raise _wrong(
                f"view {self.view.__name__}: others has {unknown[0]!r}"
                f"{nearest(unknown[0], [*REASONS])}; reasons of data.bad_samples.REASONS"
            )


def _wrong(what: str) -> ValueError:
    return ValueError(f"ModalityEntry: {what} is needed")


def entry_of(name: str) -> ModalityEntry:
    """Raises ValueError where there is none, or what is registered is no entry."""
    entry = MODALITIES.get(name)
    if isinstance(entry, ModalityEntry):
        return entry
    if entry is not None:
        raise ValueError(
            f"MODALITIES[{name!r}] is {brief(entry)}; a ModalityEntry of launch/modalities.py is "
            "needed"
        )
    if name in STORED and name not in DERIVED:
        raise ValueError(
            f"data sets hold '{name}', since STORED has an entry for it, and MODALITIES of "
            "launch/modalities.py has none, which says what loads it and which tower it has; "
            f"register MODALITIES[{name!r}] in a module of --import-module"
        )
    raise ValueError(
        f"there is no modality '{name}'; there are {', '.join(MODALITIES)}{near(name, MODALITIES)}, "
        f"and {' and '.join(kind.pair_name for kind in DERIVED.values())} for annotations; a module that "
        "adds one is named by --import-module"
    )


class Vocabulary(NamedTuple):
    """What a text tower must know of the tokenizer. None: as the tower's own configuration says."""

    size: int | None = None
    pad_id: int | None = None
    end_id: int | None = None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase | None) -> Vocabulary:
        return (
            cls()
            if tokenizer is None
            else cls(num_ids(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id)
        )


def views_of(inputs: Inputs) -> Views:
    """What is shown of images, and of all that lies on them (`data/modalities/placed.py`)."""
    options = inputs.options
    size = (options.image_size, options.image_size)
    return Views(
        augmented(size, options.augmentation or (), options.preprocessing),
        EvalTransform(size, options.preprocessing),
        side_multiple(inputs.patch_size),
    )


def _load_image(inputs: Inputs) -> Modality:
    return ImageModality(views_of(inputs), inputs.cache, inputs.patch_size)


def _load_text(inputs: Inputs) -> Modality:
    if inputs.tokenizer is None:
        raise ValueError("no pair has texts, so there is no tokenizer")
    most, multiple = inputs.options.max_text_tokens, inputs.length_multiple
    return TextModality(inputs.tokenizer, most, multiple, inputs.languages)


def _load_audio(inputs: Inputs) -> Modality:
    options = inputs.options
    if options.audio_tower is None or options.audio_size is None:
        raise ValueError("a pair with audio needs --audio-tower and --audio-size")
    features = audio_features(
        options.audio_tower,
        options.audio_seconds,
        options.audio_size,
        options.audio_augmentation or (),
    )
    return AudioModality(features, inputs.cache)


def _load_video(inputs: Inputs) -> Modality:
    options = inputs.options
    if options.video_frames is None:
        raise ValueError("a pair with video needs --video-tower and --video-frames")
    views = views_of(inputs)
    return VideoModality(
        views.train,
        views.evaluation,
        FrameTimes(options.video_frames, options.video_rate),
        inputs.cache,
        inputs.share_frames,
    )


def _frame_counts(options: BatchingOptions) -> Cost | None:
    """Frames, where their number follows from the length of a clip."""
    if options.video_rate is None:
        return None
    assert options.video_frames is not None
    return FrameTimes(options.video_frames, options.video_rate).of


def _text_tower(wanted: Wanted) -> Tower:
    size, pad_id, end_id = wanted.vocabulary
    return text_tower(wanted.name, size, wanted.options["max_text_tokens"], pad_id, end_id)


MODALITIES: dict[str, ModalityEntry] = {
    "image": ModalityEntry(
        _load_image,
        lambda wanted: image_tower(wanted.name, wanted.options["image_size"]),
        ImageView,
        {"pixel_values": normalise},
        flags=OF_BRANCH["image"],
        named=image_name,
    ),
    "text": ModalityEntry(_load_text, _text_tower, flags=OF_BRANCH["text"], named=text_name),
    "audio": ModalityEntry(
        _load_audio,
        lambda wanted: audio_tower(
            wanted.name, *(wanted.options[name] for name in ("audio_seconds", "audio_size"))
        ),
        SoundView,
        weights=open_audio_weights,
        flags=OF_BRANCH["audio"],
        named=audio_name,
    ),
    "video": ModalityEntry(
        _load_video,
        lambda wanted: video_tower(
            wanted.name, *(wanted.options[name] for name in ("image_size", "video_frames"))
        ),
        FilmView,
        {"video_frames": normalise},
        cost=_frame_counts,
        flags=OF_BRANCH["video"],
        named=video_name,
    ),
}
OWN = dict(MODALITIES)  # which no module added or replaced


def refuse_pairs(
    given: str, towers: Sequence[str], fusion: bool, weights: Sequence[str] = ()
) -> None:
    """Raise ValueError, in the words of a command line, for --pairs, --tower, --weights and
    --fusion that do not go together."""
    pairs, named = read_pairs(given), branches_of(given)
    for name in named:
        try:
            entry_of(name)
        except ValueError as error:
            raise ValueError(f"argument --pairs: {error}") from None
    different = {pair.made or frozenset(pair.branches) for pair in pairs}
    if any(len(pair) == 1 for pair in different) or len(different) < len(pairs):
        raise ValueError(
            f"argument --pairs: {given}: a pair is of two different modalities, and is named once"
        )
    if fusion and given != IMAGE_TEXT:
        raise ValueError(
            f"argument --fusion: it scores images with texts, and --pairs is {given}; leave one of "
            "them out"
        )
    for flag, values in (("tower", towers), ("weights", weights)):
        names = [each.partition("=")[0] for each in values]
        for name in names:
            if name in MODALITIES and entry_of(name).flags:
                raise ValueError(
                    f"argument --{flag}: {name} has a flag of its own, --{name}-{flag}"
                )
            if name not in named:
                raise ValueError(
                    f"argument --{flag}: no pair of --pairs {given} has '{name}'{near(name, named)}"
                )
            if names.count(name) > 1:
                raise ValueError(f"argument --{flag}: '{name}' is given twice; give it once")


def tower_of(
    branch: str,
    options: Mapping[str, Any],
    vocabulary: Vocabulary,
    scalars: Mapping[str, float],
    fusion: FusionSizes | None = None,
) -> Tower:
    """The tower of a branch with its head, from train.py's options by name; no layer is built yet.
    `scalars`: what its head owns of the losses' learned scalars, with first values. Errors:
    ValueError, FileNotFoundError."""
    entry, named = entry_of(branch), by_modality(options.get("tower"))
    name = options[entry.flags.tower] if entry.flags else named.get(branch, "")
    wanted = Wanted(options, name, vocabulary)
    if entry is OWN.get(branch):
        tower = entry.tower(wanted)
    else:
        with own_code(f"the tower of '{branch}': its function"):
            tower = entry.tower(wanted)
        refuse_unfit_tower(branch, tower)
    projection = options.get("projection", "linear")
    pairs = read_pairs(options.get("pairs", IMAGE_TEXT))
    derived = next((p.derived.name for p in pairs if p.derived and branch in p.derived.of), None)
    return with_head(tower, options["embed_dim"], scalars, fusion, projection, derived)


def refuse_unfit_towers(branches: Sequence[str], options: Mapping[str, Any]) -> None:
    """Raise ValueError for a tower of one's own that is none, before data is opened. Those of texts
    wait for their tokenizer."""
    for branch in branches:
        if entry_of(branch) is not OWN.get(branch) and not is_text(branch):
            tower_of(branch, options, Vocabulary(), {})


def audio_features(
    tower: str, seconds: float | None, size: int, augmentation: tuple[str, ...]
) -> AudioFeatures:
    """What turns sounds into the input of the audio tower of that name; the rest as in the flags of
    train.py. Errors: ValueError, FileNotFoundError."""
    reads = _audio_input(tower, seconds, size)
    return AudioFeatures(reads["extractor"], reads["values"], reads["num_samples"], augmentation)


_audio_input = lru_cache(audio_input)  # a loader is made for every evaluation


# -- how values are shown


def shown_as(modality: str) -> str:
    """The modality whose values show those of this one: of annotations that of what they are
    within."""
    return DERIVED[modality].of[0] if modality in DERIVED else modality


def view_of(modality: str) -> type[View] | None:
    """How its values are shown; None: they are not."""
    shown = shown_as(modality)
    return MODALITIES[shown].view if shown in MODALITIES else None


def in_windows(modality: str) -> bool:
    """Whether windows of its values are looked for, see `View.in_windows`."""
    view = view_of(modality)
    return view is not None and view.in_windows


def part_seen(modality: str, options: Mapping[str, Any]) -> str:
    """How much of a value a model sees, for a protocol; "": all of it. `options`: of its run."""
    view = view_of(modality)
    return view.part_seen(options) if view else ""


def encoded(source: KnownSource, modality: str, i: int) -> View | None:
    """The value of a sample; None for a modality that is not shown. Raises BadSample, Absent."""
    view = view_of(modality)
    return None if view is None else view.of(source, i)


def read_value(file: Path, modalities: Sequence[str]) -> tuple[str, View]:
    """The one of `modalities` that a file is of, by its content, and its value; where it may be of
    several, that whose files end most nearly as it does (`1.depth.png`). Raises ValueError where it
    is of none, and where it is damaged."""
    data, reasons = file.read_bytes(), {}

    def in_common(name: str) -> int:
        view = view_of(name)
        endings = view.endings if view else ()
        return max((len(each) for each in endings if file.name.endswith(f".{each}")), default=0)

    for name in sorted(modalities, key=in_common, reverse=True):
        if (view := view_of(name)) is None:
            continue
        value = view(data)
        try:
            value.decode()
            return name, value
        except BadSample as error:
            if error.reason not in value.others:
                raise ValueError(
                    f"{file}: cannot be read as {name}: {error.reason}, {error.detail}"
                ) from error
            reasons[name] = error.detail
        except ImportError as error:  # it says what to install
            raise ValueError(f"{file}: {error}") from error
    known = ", ".join(f"{name} ({reason})" for name, reason in reasons.items())
    raise ValueError(
        f"{file}: is no file of a modality of this model, which has {', '.join(modalities)}"
        + (f"; tried: {known}" if known else "")
    )


def names_a_file(text: str) -> bool:
    """Does a text end as the files of some modality do?"""
    ending = Path(text).suffix.lower().removeprefix(".")
    return any(each.view and ending in each.view.endings for each in MODALITIES.values())
