"""Blocks of JSON: the first thing that is wrong is one line with key, value and rule."""

from typing import Annotated

import pytest
from pydantic import Field

from common.blocks import Count, Positive, Switch, block, one_of, read_block


@block
class Window:
    kind: Annotated[str, one_of("hann", "hamming")]
    size: Count
    step: Annotated[int | None, Field(ge=1, description="a whole number of at least 1")] = None
    gain: Positive = 1.0
    centred: Switch = True

    def __post_init__(self) -> None:
        if self.step is not None and self.step > self.size:
            raise ValueError(f"step {self.step} is above size {self.size}; lower it")


GOOD = {"kind": "hann", "size": 4}


def test_what_is_wrong_is_said_in_one_line():
    for written, said in (
        ([], "a.b: got []; it is an object such as {}"),
        ({**GOOD, "szie": 1}, "unknown key 'a.b.szie'; did you mean 'size'?"),
        ({**GOOD, "xyzzy": 1}, "unknown key 'a.b.xyzzy'; valid keys: kind, size, step"),
        ({"kind": "hann"}, "a.b.size: got None; it is a whole number of at least 1"),
        ({**GOOD, "kind": "han"}, "a.b.kind: unknown value 'han'; did you mean 'hann'?"),
        ({**GOOD, "size": True}, "a.b.size: got True; it is a whole number"),
        ({**GOOD, "size": 0}, "a.b.size: got 0; it is a whole number"),
        ({**GOOD, "size": 2.0}, "a.b.size: got 2.0; it is a whole number"),
        ({**GOOD, "gain": "2"}, "a.b.gain: got '2'; it is a number above 0"),
        ({**GOOD, "gain": float("nan")}, "a.b.gain: got nan; it is a number above 0"),
        ({**GOOD, "centred": 1}, "a.b.centred: got 1; it is true or false"),
        ({**GOOD, "step": 5}, "a.b: step 5 is above size 4; lower it"),
    ):
        with pytest.raises(ValueError) as error:
            read_block(Window, written, "a.b")
        assert str(error.value).startswith(said) and "\n" not in str(error.value)


def test_what_is_right_is_kept():
    read = read_block(Window, {**GOOD, "gain": 2, "step": None}, "a.b")
    assert read == Window("hann", 4, None, 2.0, True) and isinstance(read.gain, float)
    with pytest.raises(AttributeError):
        read.size = 5
