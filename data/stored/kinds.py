"""All modalities as data sets know them, by name: see `record.py`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import Any

from common.output import brief
from common.spelling import nearest
from data.stored.annotations import StoredAnnotations
from data.stored.audio import AUDIO
from data.stored.image import IMAGE
from data.stored.moments import MOMENTS
from data.stored.record import FORMS, PLACE, Stored, StoredFile
from data.stored.regions import REGIONS
from data.stored.text import TEXT, StoredText
from data.stored.video import VIDEO

STORED: dict[str, Stored] = {
    each.name: each for each in (IMAGE, TEXT, AUDIO, VIDEO, REGIONS, MOMENTS)
}

OWN = dict(STORED)  # which no module added


def stored(name: str) -> Stored:
    """Of a modality that has no entry, one whose values are no files."""
    return STORED.get(name) or Stored(name)


def is_own(kind: Stored) -> bool:
    """Whether a module added it."""
    return kind is not OWN.get(kind.name)


def refuse_unfit() -> None:
    """Raise ValueError for what a module added to `STORED` and cannot be read beside the others."""
    for name, kind in STORED.items():
        if kind is OWN.get(name):
            continue
        if not isinstance(kind, Stored):
            raise ValueError(
                f"STORED[{name!r}] is {brief(kind)}; a Stored or StoredFile of data/stored/record.py "
                "is needed"
            )
        if kind.name != name:
            raise kind.wrong(f"it is registered as STORED[{name!r}]; give both the same name")
        if kind.parts == name or kind.parts and kind.parts not in STORED:
            known = [each for each in STORED if each != name]
            raise kind.wrong(
                f"parts is {kind.parts!r}, no other modality{nearest(kind.parts, known)}"
            )
        if isinstance(kind, StoredFile):
            _refuse_columns(kind)
        for other in STORED.values():
            if other is not kind and isinstance(other, Stored):
                _refuse_shared(kind, other)


def _refuse_columns(kind: StoredFile) -> None:
    """Raise ValueError for a column of a name that the index may have for something else."""
    of_place = {f"{kind.name}_{column}" for column in (*PLACE, "path")}
    for column in (*kind.measured, *kind.said):
        if column in of_place or not column.startswith(f"{kind.name}_"):
            raise kind.wrong(
                f"the column {column!r} of measured and said: it must begin with '{kind.name}_', and "
                f"be none of {', '.join(sorted(of_place))}"
            )


def _refuse_shared(kind: Stored, other: Stored) -> None:
    """Raise ValueError where two modalities would be read from one place or kept in one column."""
    places = {
        f"of {form} rows the key": (kind.names_in(form), other.names_in(form)) for form in FORMS
    }
    if isinstance(kind, StoredFile) and isinstance(other, StoredFile):
        places["the ending"] = kind.endings, other.endings
    places["the column of an index"] = (
        (*kind.numbers(), *kind.texts()),
        (*other.numbers(), *other.texts()),
    )
    for what, (own, taken) in places.items():
        if shared := [word for word in own if word in taken]:
            raise kind.wrong(
                f"{what} {shared[0]!r} is that of {other.name}; take another, such as "
                f"{_another(kind.name, what, shared[0])!r}"
            )


def _another(name: str, what: str, word: str) -> str:
    return f"{name}.{word}" if what == "the ending" else f"{name}_{word}"


class Registered:
    """What a module added to `STORED`. Pickled before what needs it, it is registered where it is
    unpickled: in a process that may not have imported that module."""

    def __reduce__(self) -> tuple[Callable[..., Registered], tuple[Any, ...]]:
        return _registered, (*(kind for name, kind in STORED.items() if kind is not OWN.get(name)),)


def _registered(*kinds: Stored) -> Registered:
    STORED.update((kind.name, kind) for kind in kinds)
    return Registered()


def files_of(modalities: Sequence[str] | None = None) -> list[StoredFile]:
    """Those whose values are encoded files, of all modalities or of some, in the order of
    `STORED`."""
    return [
        kind
        for name, kind in STORED.items()
        if isinstance(kind, StoredFile) and (modalities is None or name in modalities)
    ]


def annotations_of(modalities: Container[str]) -> list[StoredAnnotations]:
    """Those of some modalities that are annotations, in the order of `STORED`."""
    return [
        kind
        for name, kind in STORED.items()
        if isinstance(kind, StoredAnnotations) and name in modalities
    ]


def other_files() -> list[str]:
    """The names of the modalities whose values are encoded files, but for images."""
    return [kind.name for kind in files_of() if kind is not IMAGE]


def is_file(name: str) -> bool:
    return isinstance(STORED.get(name), StoredFile)


def several_of(name: str) -> str:
    """What values of a modality are called together."""
    return stored(name).several or f"values of {name}"


def whole_of(part: str, names: Collection[str]) -> str:
    """The one of some modalities whose values are made of those of `part`, where `part` is not
    itself among them; else `part`."""
    if part in names:
        return part
    return next((name for name in names if stored(name).parts == part), part)


def is_text(name: str) -> bool:
    """Whether values are texts: a sample may have several, its captions, which were read with the
    index and are made tokens of."""
    return isinstance(STORED.get(name), StoredText)


def text_of(names: Iterable[str]) -> str | None:
    """The one of some modalities whose values are texts; None: there is none."""
    return next(filter(is_text, names), None)


def names_of_rows(form: str) -> dict[str, tuple[str, ...]]:
    """What rows of a form may hold of all modalities -> the keys or columns that it may stand
    under. `form`: of `FORMS`."""
    assert form in FORMS
    found: dict[str, tuple[str, ...]] = {}
    for name, kind in STORED.items():
        if kind.in_formats and (names := kind.names_in(form)):
            found |= {name: names, **{key: (key,) for key in kind.beside}}
    return found
