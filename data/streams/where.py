"""Which rows of a table are read: the expressions of `?where=`.

    similarity > 0.3 and width >= 256 and language in ('en', 'de') and not punsafe > 0.5

They are written as in Python: `and`, `or`, `not`, comparisons, also in chains (`0.2 < x <= 0.5`),
`in` and `not in` a list, `is None` and `is not None`, `+ - * /` of columns and numbers (in double
precision, where a division by 0 is infinite), numbers, strings, True and False. A column of truth
values is a condition itself. Nothing is run as Python.

Nulls are as in SQL: what is compared with a null is neither true nor false, nor is its `not`, and a
row is read where the whole is true. NaN is a number, which only `!=` is true of.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.dataset import Scanner

from common.spelling import near
from data.values import plain_column

LONGEST = 2000  # characters
DEEPEST = 40  # levels
READ = 64  # expressions that are kept as they were read
SINGLE = re.compile(r"(?<![=<>!:])=(?!=)")
SHOWN = 60  # characters of a piece in a message
COMPARISONS: dict[type[ast.AST], Callable[[Any, Any], pc.Expression]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
SUMS: dict[type[ast.AST], Callable[[Any, Any], pc.Expression]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: pc.divide,
}


def parse(text: str) -> pc.Expression:
    """Errors: ValueError for anything but what is described above."""
    return _read(text)[0]


def columns(text: str) -> tuple[str, ...]:
    """In the order in which they are named. Errors: as `parse`."""
    return _read(text)[1]


def apply(text: str, table: pa.Table) -> np.ndarray:
    """Whether each row is read, bool [N]. Errors: as `parse`; ValueError for columns that are not
    there or hold something else."""
    expression, names = _read(text)
    for name in names:
        if name not in table.column_names:
            raise ValueError(
                f"where={_cut(text)}: the data has no column {name!r}"
                f"{near(name, table.column_names)}; it has {_cut(', '.join(table.column_names))}"
            )
    for name in names:
        number = table.column_names.index(name)
        table = table.set_column(number, name, plain_column(table[name]))
    try:
        scanner = Scanner.from_batches(
            table.to_batches(), schema=table.schema, columns={"": expression}, use_threads=False
        )
        rows = scanner.to_table().column(0)
        if not pa.types.is_boolean(rows.type) and not pa.types.is_null(rows.type):
            raise TypeError(f"it is no condition, but gives {rows.type}")
        return rows.cast(pa.bool_()).fill_null(False).to_numpy()
    except (pa.ArrowException, TypeError) as error:
        kinds = ", ".join(f"{name}: {table.schema.field(name).type}" for name in names)
        raise ValueError(
            f"where={_cut(text)}: does not fit the columns ({kinds}): {error}"
        ) from error


@lru_cache(READ)
def _read(text: str) -> tuple[pc.Expression, tuple[str, ...]]:
    if len(text) > LONGEST:
        raise ValueError(f"where={_cut(text)}: has {len(text)} characters; {LONGEST} are the most")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        ast.parse(f"({text.strip()})", mode="eval")  # a comment, which may hide conditions, is none
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        said = getattr(error, "msg", error)
        if _with_two_signs(text):
            said = "a single = compares nothing; write == for equal"
        raise ValueError(
            f"where={_cut(text)}: cannot be read ({said}); write as in "
            "where=similarity>0.3 and language in ('en', 'de')"
        ) from error
    reader = _Reader(text.strip())
    return reader.condition(tree), tuple(reader.names)


def _with_two_signs(text: str) -> bool:
    """Whether it could be read with == instead of each =, as SQL has it."""
    twice = SINGLE.sub("==", text)
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        ast.parse(twice.strip(), mode="eval")
        return twice != text
    return False


class _Reader:
    """Makes expressions of the pieces of `text`, and notes the columns."""

    def __init__(self, text: str) -> None:
        self.text, self.names = text, dict[str, None]()

    def condition(self, node: ast.expr, depth: int = 0) -> pc.Expression:
        self.check_depth(node, depth)
        if isinstance(node, ast.BoolOp):
            parts = [self.condition(each, depth + 1) for each in node.values]
            join = operator.and_ if isinstance(node.op, ast.And) else operator.or_
            return _joined(join, parts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ~self.condition(node.operand, depth + 1)
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            return _joined(
                operator.and_,
                [
                    self.comparison(node, left, sign, right, depth + 1)
                    for left, sign, right in zip(sides, node.ops, sides[1:])
                ],
            )
        if isinstance(node, ast.Name) or (
            isinstance(node, ast.Constant) and isinstance(node.value, bool)
        ):
            return self.value(node, depth)
        raise self.refused(node, "is no condition")

    def comparison(
        self, whole: ast.Compare, left: ast.expr, sign: ast.cmpop, right: ast.expr, depth: int
    ) -> pc.Expression:
        value = self.value(left, depth)
        if isinstance(sign, (ast.Is, ast.IsNot)):
            if not (isinstance(right, ast.Constant) and right.value is None):
                raise self.refused(whole, "compares by `is`, which is for None alone")
            return value.is_null() if isinstance(sign, ast.Is) else value.is_valid()
        if isinstance(sign, (ast.In, ast.NotIn)):
            listed = right.elts if isinstance(right, (ast.Tuple, ast.List)) else [right]
            if not listed or not all(map(_is_literal, listed)):
                raise self.refused(right, "is no list of numbers or strings")
            # by comparisons: a null in `is_in` would be False, and true under `not`
            found = _joined(operator.or_, [value == self.value(each, depth) for each in listed])
            return found if isinstance(sign, ast.In) else ~found
        return COMPARISONS[type(sign)](value, self.value(right, depth))

    def value(self, node: ast.expr, depth: int) -> pc.Expression:
        self.check_depth(node, depth)
        if isinstance(node, ast.Name):
            self.names[node.id] = None
            return pc.field(node.id)
        if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float, str)):
            return self.literal(node, node.value)
        if isinstance(node, ast.Constant) and node.value is None:
            raise self.refused(node, "is compared by `is None` or `is not None` alone")
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            if _is_literal(node):
                return self.literal(node, ast.literal_eval(node))
            return pc.negate(self.number(node.operand, depth + 1))
        if isinstance(node, ast.BinOp) and type(node.op) in SUMS:
            left, right = (self.number(each, depth + 1) for each in (node.left, node.right))
            return SUMS[type(node.op)](left, right)
        raise self.refused(node, "is neither a column nor a number, string, sum or product")

    def number(self, node: ast.expr, depth: int) -> pc.Expression:
        """In double precision: integers would wrap or be cut by a division."""
        if isinstance(node, ast.Constant) and isinstance(node.value, (bool, str)):
            raise self.refused(node, "is no number to compute with")
        return self.value(node, depth).cast(pa.float64(), safe=False)

    def literal(self, node: ast.expr, value: bool | int | float | str) -> pc.Expression:
        try:
            return pc.scalar(value)
        except (OverflowError, UnicodeError, pa.ArrowException) as error:
            raise self.refused(node, "is too large, or no text") from error

    def check_depth(self, node: ast.expr, depth: int) -> None:
        if depth > DEEPEST:
            raise self.refused(node, f"is nested more than {DEEPEST} levels deep")

    def refused(self, node: ast.expr, why: str) -> ValueError:
        piece = ast.get_source_segment(self.text, node) or ""
        return ValueError(
            f"where={_cut(self.text)}: {_cut(piece)!r} {why}; there are and, or, not, comparisons, "
            "in, is None, + - * /, columns, numbers, strings, True and False"
        )


def _joined(join: Callable[[Any, Any], Any], parts: list[pc.Expression]) -> pc.Expression:
    """By halves, so that a long list is not nested deeply."""
    while len(parts) > 1:
        parts = [
            join(*parts[i : i + 2]) if i + 1 < len(parts) else parts[i]
            for i in range(0, len(parts), 2)
        ]
    return parts[0]


def _is_literal(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
        return isinstance(node, ast.Constant) and type(node.value) in (int, float)
    return isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float, str))


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
