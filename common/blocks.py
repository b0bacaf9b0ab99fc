"""JSON objects as typed dataclasses: what is misspelt, of another type or out of range is refused in
one line with key, value and rule.

    @block
    class Average:
        decay: Annotated[float, Field(gt=0, lt=1, description="a number between 0 and 1")] = 0.9999

    read_block(Average, {"decay": 2}, "branches.ema")
    # ValueError: branches.ema.decay: got 2; it is a number between 0 and 1

Descriptions are the rules of messages. What concerns several keys is checked in `__post_init__`,
whose ValueError is told as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from common.spelling import nearest

Kind = TypeVar("Kind")
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

Switch = Annotated[bool, Field(description="true or false")]
NotNegative = Annotated[float, Field(ge=0, description="a number of at least 0")]
Positive = Annotated[float, Field(gt=0, description="a number above 0")]
Fraction = Annotated[float, Field(ge=0, lt=1, description="a number from 0, below 1")]
Share = Annotated[float, Field(ge=0, le=1, description="a number from 0 to 1")]
Whole = Annotated[int, Field(ge=0, description="a whole number of at least 0")]
Count = Annotated[int, Field(ge=1, description="a whole number of at least 1")]


@dataclass_transform(frozen_default=True)
def block(cls: type[Kind]) -> type[Kind]:
    """A frozen dataclass, checked when made: pydantic's ValidationError, which is a ValueError."""
    return dataclass(frozen=True, config=STRICT)(cls)


def one_of(*words: str) -> BeforeValidator:
    """For a value that is one of these words: `Annotated[str, one_of("a", "b")]`."""

    return BeforeValidator(lambda value: refuse_other_word(value, words))


def refuse_other_word(value: Any, words: Sequence[str]) -> Any:
    """The value. Raises ValueError unless it is one of these words."""
    if value not in words:
        raise ValueError(f"unknown value {value!r}{nearest(str(value), words)}")
    return value


def read_block(kind: type[Kind], written: Any, where: str, example: str = "{}") -> Kind:
    """`written` as an instance of a `block`. `where`: the key at which it stands; `example`: what
    may be written there. Raises ValueError for the first thing that is wrong."""
    if not isinstance(written, Mapping):
        raise ValueError(f"{where}: got {written!r}; it is an object such as {example}")
    fields: Mapping[str, Any] = kind.__pydantic_fields__  # type: ignore[attr-defined]
    refuse_unknown(written, fields, where)
    try:
        return kind(**written)
    except ValidationError as error:
        raise ValueError(first_fault(error, fields, written, where)) from None


def refuse_unknown(
    given: Iterable[str], valid: Collection[str], where: str, hint: str = ""
) -> None:
    """Raise ValueError for a key that is not valid."""
    prefix = f"{where}." if where else ""
    for key in given:
        if key not in valid:
            raise ValueError(f"unknown key '{prefix}{key}'{hint}{nearest(key, list(valid))}")


def first_fault(
    error: ValidationError,
    fields: Mapping[str, Any],
    given: Mapping[str, Any],
    where: str,
    present: Collection[str] = (),
) -> str:
    """The first thing that is wrong, in one line; empty: nothing but keys that are missing and
    `present` elsewhere. `fields`: of the model, by key."""
    prefix = f"{where}." if where else ""
    for fault in error.errors():
        if not fault["loc"]:  # of several keys, which the message names
            return f"{where}: {fault.get('ctx', {}).get('error', fault['msg'])}"
        key = str(fault["loc"][0])
        if fault["type"] == "value_error":
            return f"{prefix}{key}: {fault['ctx']['error']}"
        if fault["type"] != "missing" or key not in present:
            rule = fields[key].description
            said = f"it is {rule}" if rule else fault["msg"]
            return f"{prefix}{key}: got {given.get(key)!r}; {said}"
    return ""
