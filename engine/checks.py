"""Types of values in the `branches` block, for `common.blocks`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from common.blocks import Count, Whole

AUTO = "auto"
Auto = Literal["auto"]

_RULE = '"auto" or a whole number of at least'
# by branch, or for all of them
Counts = Annotated[
    Auto | Count | dict[str, Count],
    Field(description=f"{_RULE} 1; or an object of those by branch"),
]
Sizes = Annotated[
    Auto | Count | dict[str, Auto | Count],
    Field(description=f"{_RULE} 1, or an object of those by branch"),
]
Kept = Annotated[
    Auto | Whole | dict[str, Auto | Whole] | None,
    Field(description=f"{_RULE} 0, or an object of those by branch"),
]
