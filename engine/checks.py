"""Types of values in the `branches` block, for `common.blocks`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field

from common.blocks import Count, Whole

AUTO = "auto"

if TYPE_CHECKING:  # who reads them knows the layout, and so which of the forms they have
    Counts: TypeAlias = Any
    Sizes: TypeAlias = Any
    Kept: TypeAlias = Any
else:
    _AUTO = Literal["auto"]
    _RULE = '"auto" or a whole number of at least {}, or an object of those by branch'
    Counts = Annotated[_AUTO | Count | dict[str, Count], Field(description=_RULE.format(1))]
    Sizes = Annotated[_AUTO | Count | dict[str, _AUTO | Count], Field(description=_RULE.format(1))]
    Kept = Annotated[
        _AUTO | Whole | dict[str, _AUTO | Whole] | None, Field(description=_RULE.format(0))
    ]
