"""Annotations in data sets: places within a value with phrases, as JSON or as lists of parquet
files."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.output import brief
from data.annotations import Annotation, Annotations, listed, read, too_many, written
from data.bad_samples import ABSENCES, ANNOTATION_LIMIT, BadSample
from data.stored.record import JSON, Stored

if TYPE_CHECKING:
    from data.formats.rows import Format, Sample
    from data.index.sources import Source


@dataclass(frozen=True)
class StoredAnnotations(Stored):
    """One kind of annotations. `of`: the modality of the values that they are within. `negatives`:
    the column of the index that counts those of a sample. `needed`: what one looks like, for
    messages."""

    of: str = ""
    negatives: str = ""
    needed: str = ""
    in_formats = True

    @abstractmethod
    def one(self, given: Mapping[str, Any], dropped: list[BadSample], format: Format) -> Any:
        """An annotation, checked as far as that needs no value. `dropped` gets what is wrong with
        phrases beside good ones. Raises BadSample."""

    @abstractmethod
    def placed(
        self, found: Annotations, measured: Mapping[str, Any], format: Format
    ) -> list[Annotation] | None:
        """The good ones on their value, of which `measured` has the columns; those that are not on
        it go from the good to the dropped ones. None: it was not measured."""

    @property
    def key(self) -> str:
        """Where JSON objects have them."""
        return self.names_in(JSON)[0]

    @property
    def count(self) -> str:
        """The column of the index that counts those with phrases."""
        return f"num_{self.several}"

    def numbers(self) -> Mapping[str, str]:
        return {self.count: "i4", self.negatives: "i4"}  # of all together

    def texts(self) -> tuple[str, ...]:
        return (self.several,)

    def check(self, value: Any, sample: Sample, row: Mapping[str, Any], format: Format) -> None:
        is_checked = isinstance(value, Annotations)
        sample.annotations[self.name] = value if is_checked else self.checked(value, format)

    def checked(self, given: Any, format: Format, total: int | None = None) -> Annotations:
        """The good ones of a row; what is no annotation but a BadSample is one that cannot be read.
        `total`: of which `given` are the first. Raises BadSample when none is good, with what is
        wrong with the first."""
        given = listed(given)
        if given is None or isinstance(given, list) and not given:
            raise BadSample("no-value", f"no {self.name} is given")
        if not isinstance(given, list):
            raise BadSample(
                "invalid-row",
                f"the {self.several} are {brief(given)}; a list of {self.needed} is needed",
            )
        found = Annotations.none(total or len(given))
        for each in given[:ANNOTATION_LIMIT]:
            try:
                found.good.append(self._one(each, found.phrases, format))
            except BadSample as problem:
                found.dropped.append(problem)
        if found.total > ANNOTATION_LIMIT:
            reason = f"too-many-{self.several}"
            found.dropped.append(too_many(found.total, reason, self.several))
        if not found.good:
            raise found.dropped[0]
        return found

    def _one(self, given: Any, dropped: list[BadSample], format: Format) -> Any:
        if isinstance(given, BadSample):
            raise given
        if not isinstance(given, (dict, Mapping)):
            raise BadSample(
                "invalid-row", f"a {self.name} is {brief(given)}; {self.needed} is needed"
            )
        return self.one(given, dropped, format)

    def columns(
        self, sample: Sample, measured: Mapping[str, Any], format: Format
    ) -> dict[str, Any]:
        """What the index has of those of a sample. The sample lacks them where their value was not
        measured, and where none has a phrase."""
        found, good = sample.annotations.get(self.name), list[Annotation]()
        placed = None if found is None else self.placed(found, measured, format)
        if found is not None and placed is None:
            sample.lacks[self.name] = BadSample("no-value", f"its {self.of} is missing or bad")
        elif found is not None and placed is not None:
            # candidates last, so that the first, as many as the index counts, have phrases
            good = sorted(placed, key=lambda each: not each.phrases)
            if not good or not good[0].phrases:
                no_text = BadSample("no-phrase", f"no {self.name} has a text")
                sample.lacks[self.name], good = [*found.dropped, no_text][0], []
        return {
            self.several: written(good),
            self.count: sum(1 for each in good if each.phrases),
            self.negatives: sum(len(each.negatives) for each in good),
        }

    def noted(self, sample: Sample) -> BadSample | None:
        """What is broken of those of a sample that is used with the others; None: nothing."""
        found = sample.annotations.get(self.name)
        if found is None or self.name in sample.lacks:
            return None
        broken = [each for each in found.phrases if each.reason not in ABSENCES]
        of = f"{len(broken)} phrases of its {self.several}"
        if found.dropped:
            number = found.total - len(found.good)
            broken, of = found.dropped, f"{number} of {found.total} {self.several}"
        return BadSample(broken[0].reason, f"{of}: {broken[0].detail}") if broken else None

    def box(self, source: Source, i: int, annotation: Annotation) -> tuple[float, ...]:
        """Where it is on a picture of the value of sample i: x1, y1, x2, y2 in fractions of the
        sides."""
        return annotation.extent

    def read(self, text: str) -> list[Annotation]:
        """What the index has of a sample."""
        return read(text)
