"""What is clipped together and how: the `gradient_clipping` block, read and checked. Plain Python,
no process group.

A group is always there for each branch, named after it, and one named `head`: the first part of a
parameter's canonical name. A group of one's own takes the parameters whose names its patterns
match, first come, first served; what is left stays in these.

| kind | what happens to the gradient g of a group, ‖g‖ its norm |
|---|---|
| `norm` | g ← g · min(1, limit / (‖g‖ + 1e-6)), as torch.nn.utils.clip_grad_norm_ |
| `adaptive` | as `norm`, with a limit that follows the group's own norms, see `engine/optimizer/clipping.py` |
| `none` | nothing; the norm is measured all the same |
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from common.blocks import block, read_block, refuse_other_word
from common.spelling import nearest, nearest_pattern

HEAD = "head"  # the group of what stands behind the towers
# The keys that each kind takes besides `match`. `limit` must be given to the first.
KEYS_OF_KIND = {
    "norm": ("limit",),
    "adaptive": ("factor", "decay", "warmup_steps", "limit"),
    "none": (),
}
FACTOR, DECAY, WARMUP_STEPS = 1.5, 0.99, 100


def _kind(value: Any) -> Any:
    if value == "value":
        raise ValueError(
            'got "value", and elements are no longer limited one by one; use "norm" or "adaptive", '
            "which limit the norm of the group"
        )
    return refuse_other_word(value, list(KEYS_OF_KIND))


def _patterns(match: Any) -> tuple[str, ...]:
    if match == [] or not (
        isinstance(match, (list, tuple)) and all(isinstance(pattern, str) for pattern in match)
    ):
        raise ValueError(
            f'got {match!r}; it is a list of patterns of parameter names, such as ["head.*"]'
        )
    return tuple(match)


@block
class ClippingRule:
    """How the gradients of one group are clipped.

    `limit`: of the norm, under adaptive during the warm-up (None: none holds then). `match`:
    patterns of canonical names as in `fnmatch`, for a group of one's own; empty for those of the
    branches and the head. The last three belong to adaptive: the limit is `factor` times the mean,
    `decay` is the mean's weight of the past, and `warmup_steps` are the applied steps before that
    limit holds.
    """

    kind: Annotated[str, BeforeValidator(_kind)]
    limit: Annotated[
        float | None,
        Field(gt=0, description='a number above 0; to clip nothing, write {"kind": "none"}'),
    ] = None
    match: Annotated[tuple[str, ...], BeforeValidator(_patterns)] = ()
    factor: Annotated[
        float,
        Field(gt=1, description="a number above 1, or the limit would fall from step to step"),
    ] = FACTOR
    decay: Annotated[
        float, Field(gt=0, lt=1, description=f"a number between 0 and 1, such as {DECAY}")
    ] = DECAY
    warmup_steps: Annotated[
        int, Field(ge=1, description="a whole number of at least 1: a mean needs a step")
    ] = WARMUP_STEPS

    def __post_init__(self) -> None:
        if self.kind == "norm" and self.limit is None:
            raise ValueError('a rule of kind "norm" needs a "limit", such as 1.0')

    @property
    def bound(self) -> float:
        """The limit; infinity where there is none."""
        return math.inf if self.limit is None else self.limit


def clipping_rules(block: Any, branches: Sequence[str]) -> dict[str, ClippingRule]:
    """group -> rule, of every group: those of the branches, the head, then one's own in the order
    of the block.

    `block` is `branches.gradient_clipping` as written. None: a limit of 1 for each of the former;
    otherwise what is not named is not clipped. A bare number is a limit of the norm, and 0 means
    none. Errors: ValueError with the key.
    """
    given = (*branches, HEAD)
    if block is None:
        return {group: ClippingRule("norm", 1.0) for group in given}
    if not isinstance(block, Mapping):
        raise ValueError(
            f"branches.gradient_clipping: got {block!r}; give each group its limit: "
            f"{json.dumps(dict.fromkeys(given, 1.0))}"
        )
    own = {group: _read_rule(group, written, given) for group, written in block.items()}
    return {group: own.pop(group, ClippingRule("none")) for group in given} | own


def _read_rule(group: str, written: Any, given: Sequence[str]) -> ClippingRule:
    where = f"branches.gradient_clipping.{group}"
    has_pattern = isinstance(written, Mapping) and "match" in written
    if group not in given and not has_pattern:
        raise ValueError(
            f"branches.gradient_clipping: unknown group {group!r} (a group of your own says which "
            "parameters it takes: "
            f'{{"match": ["{given[0]}.embeddings.*"], "kind": "norm", "limit": 1.0}}){nearest(group, given)}'
        )
    if group in given and has_pattern:
        raise ValueError(
            f"{where}.match: {group!r} is every parameter of that name which no other group takes; "
            "give a group of another name"
        )
    if not isinstance(written, Mapping):
        if isinstance(written, bool) or not (
            isinstance(written, (int, float)) and 0 <= written < math.inf
        ):
            raise ValueError(
                f"{where}: got {written!r}; a limit is a number ≥ 0, and 0 means no clipping; or "
                "an object such as "
                '{"kind": "norm", "limit": 1.0}'
            )
        return ClippingRule("norm", float(written)) if written else ClippingRule("none")
    rule = read_block(ClippingRule, {"kind": "norm", **written}, where)
    valid = ("kind", *(("match",) if has_pattern else ()), *KEYS_OF_KIND[rule.kind])
    for key in written:
        if key not in valid:
            raise ValueError(
                f'{where}: unknown key {key!r} for kind "{rule.kind}"{nearest(key, valid)}'
            )
    return rule


def group_of(canonical_name: str, rules: Mapping[str, ClippingRule]) -> str:
    """The clipping group of a parameter: the first that has a pattern for it, else the first part
    of its name."""
    for group, rule in rules.items():
        if any(fnmatchcase(canonical_name, pattern) for pattern in rule.match):
            return group
    group = canonical_name.split(".", 1)[0]
    if group not in rules:
        given = [group for group, rule in rules.items() if not rule.match]
        raise ValueError(
            f"parameter {canonical_name!r} belongs to no clipping group; names start with one of "
            f"{', '.join(given)}"
        )
    return group


def refuse_idle_patterns(rules: Mapping[str, ClippingRule], canonical_names: Sequence[str]) -> None:
    """Raise ValueError for a pattern that matches no parameter, and for a group whose parameters
    all belong to an earlier one."""
    taken = {group_of(name, rules) for name in canonical_names}
    for group, rule in rules.items():
        where = f"branches.gradient_clipping.{group}"
        for pattern in rule.match:
            if not any(fnmatchcase(name, pattern) for name in canonical_names):
                raise ValueError(
                    f"{where}.match: {pattern!r} matches no "
                    f"parameter{nearest_pattern(pattern, canonical_names)}"
                )
        if rule.match and group not in taken:
            raise ValueError(
                f"{where}: every parameter that it matches belongs to a group before it; put the "
                "narrower patterns first"
            )
