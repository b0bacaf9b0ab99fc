"""Which rows of a table are read: the conditions of `?where=`, in SQL.

    similarity > 0.3 and width between 256 and 4096 and lower(language) in ('en', 'de')

sqlglot reads them in Spark's dialect, which has strings in either quotes, `==` beside `=` and names
in backticks; pyarrow computes them. What version 0.1 took is read too: `is None`, lists in brackets
and comparisons in chains (`0.2 < x <= 0.5`). Only the columns of the table can be reached: what is
not in the tables below is refused, so that a condition from a stranger does no harm.

Nulls are as in SQL: what is compared with a null is neither true nor false, nor is its `not`, and a
row is read where the whole is true. NaN is a number, which only `!=` is true of. Sums, products and
quotients are in double precision, where a division by 0 is infinite.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.dataset import Scanner

from common.spelling import near
from data.values import plain_column

DIALECT = "spark"
LONGEST = 2000  # characters
DEEPEST = 40  # levels
ESCAPED = re.compile(r"""\\[\\'"nrt]""")  # what Python and Spark read alike
READ = 64  # expressions that are kept as they were read
SHOWN = 60  # characters of a piece in a message
KEYWORDS = "AND OR NOT IN IS NULL TRUE FALSE BETWEEN LIKE ILIKE RLIKE".split()
PARTS = {"this", "expression", "expressions", "low", "high"}  # of a node, that are read
HINTS = {"is_string", "typed", "safe"}  # of a node, that change nothing here


def _joined(join: Callable[[Any, Any], Any], parts: Sequence[pc.Expression]) -> pc.Expression:
    """By halves, so that a long list is not nested deeply."""
    while len(parts) > 1:
        parts = [join(*pair) for pair in zip(parts[::2], parts[1::2])] + [*parts[len(parts) & ~1 :]]
    return parts[0]


def _in(value: pc.Expression, *listed: pc.Expression) -> pc.Expression:
    """By comparisons: a null in `is_in` would be False, and true under `not`."""
    return _joined(operator.or_, [value == each for each in listed])


def _of(kind: pa.DataType, compute: Callable[..., pc.Expression]) -> Callable[..., pc.Expression]:
    return lambda *values: compute(*(value.cast(kind, safe=False) for value in values))


TEXT, DOUBLE = pa.string(), pa.float64()  # in which integers neither wrap nor are cut by a division
COMPARISONS: dict[str, Callable[..., pc.Expression]] = {
    "LT": operator.lt,
    "LTE": operator.le,
    "GT": operator.gt,
    "GTE": operator.ge,
    "EQ": operator.eq,
    "NEQ": operator.ne,
}
PATTERNS: dict[str, Callable[[pc.Expression, str], pc.Expression]] = {
    "Like": pc.match_like,
    "ILike": partial(pc.match_like, ignore_case=True),
    "RegexpLike": pc.match_substring_regex,  # RE2: its time is linear in the text
}
COMPUTED: dict[str, Callable[..., pc.Expression]] = {  # by the name of sqlglot's node
    "Paren": lambda inside: inside,
    "And": lambda *parts: _joined(operator.and_, parts),
    "Or": lambda *parts: _joined(operator.or_, parts),
    "Not": operator.invert,
    "In": _in,
    "Between": lambda value, low, high: (value >= low) & (value <= high),
    "Add": _of(DOUBLE, operator.add),
    "Sub": _of(DOUBLE, operator.sub),
    "Mul": _of(DOUBLE, operator.mul),
    "Div": _of(DOUBLE, pc.divide),
    "Neg": _of(DOUBLE, pc.negate),
    "Abs": _of(DOUBLE, pc.abs),
    "Lower": _of(TEXT, pc.utf8_lower),
    "Upper": _of(TEXT, pc.utf8_upper),
    "Length": _of(TEXT, pc.utf8_length),
}
LOOSE = ("In", "Is", "Not", "Between", *PATTERNS)  # which languages bind unlike beside comparisons
REFUSED = {
    "Null": "is compared by `is null` or `is not null` alone",
    "Concat": 'are two strings; write "it\'s" for a string with a quote',
}
ALLOWED = (
    "there are and, or, not, comparisons, in, between, like, ilike, rlike, is null, + - * /, "
    "lower, upper, length, abs, columns, numbers, strings, true and false"
)


def parse(text: str) -> pc.Expression:
    """Errors: ValueError for anything but what is described above, and where sqlglot is not
    installed."""
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
    sqlglot = _sqlglot()
    try:
        dialect = sqlglot.Dialect.get_or_raise(DIALECT)
        tokens = [_plain(token, text, sqlglot.TokenType) for token in dialect.tokenize(text)]
        trees = dialect.parser().parse_into(sqlglot.exp.Condition, tokens, text)
        if len(trees) != 1 or trees[0] is None:
            raise ValueError(f"is {len(list(filter(None, trees)))} conditions; one is needed")
        reader = _Reader()
        return reader.expression(trees[0]), tuple(reader.names)
    except sqlglot.ParseError as error:
        found = error.errors[-1]
        said = f"{found['description']} {found['highlight']!r}"
    except (sqlglot.TokenError, RecursionError) as error:
        said = str(error)
    except ValueError as error:
        raise ValueError(f"where={_cut(text)}: {error}") from error
    raise ValueError(
        f"where={_cut(text)}: cannot be read ({_cut(said)}); write as in "
        "where=similarity>0.3 and language in ('en', 'de')"
    )


def _sqlglot() -> Any:
    try:
        import sqlglot
    except ImportError as error:
        raise ValueError(
            "where: the Python package 'sqlglot' is not installed, which reads the conditions of "
            "filters; run: pip install -r requirements-filters.txt"
        ) from error
    return sqlglot


def _plain(token: Any, text: str, kinds: Any) -> Any:
    """The token with words that are no keyword here as names, numbers as Python writes them too and
    `None` as null. Errors: ValueError for a comment, which may hide conditions, and for a string
    in which Spark reads another character than version 0.1."""
    if token.comments:
        raise ValueError(f"has a comment, {_cut(token.comments[0])!r}; leave it out")
    written = text[token.start : token.end + 1]
    if token.token_type == kinds.STRING:
        if "\\" in ESCAPED.sub("", written):
            raise ValueError(f"{_cut(written)}: write \\\\ for a backslash in a string")
    elif token.token_type != kinds.NUMBER and "0" <= written[0] <= "9":  # 1_000, 0x10
        token.token_type, token.text = kinds.NUMBER, str(int(written, 0))
    elif token.text == "None" and token.token_type == kinds.VAR:
        token.token_type = kinds.NULL
    elif token.text.isidentifier() and token.text.upper() not in KEYWORDS:
        if token.token_type != kinds.IDENTIFIER:  # in backticks
            token.token_type = kinds.VAR
    return token


class _Reader:
    """Makes expressions of what sqlglot has read, and notes the columns."""

    def __init__(self) -> None:
        self.names = dict[str, None]()

    def expression(self, node: Any, depth: int = 0) -> pc.Expression:
        if depth > DEEPEST:
            raise ValueError(f"is nested more than {DEEPEST} levels deep")
        kind, filled = _kind(node), {name for name, part in node.args.items() if part}
        if filled - PARTS - HINTS or kind in REFUSED or kind == "In" and not node.expressions:
            raise _refused(node, REFUSED.get(kind, "is not known here"))
        if kind == "Column":
            self.names[node.name] = None
            return pc.field(node.name)
        if _is_literal(node):
            return _literal(node)
        if kind == "Is" and _kind(node.expression) == "Null":
            if _kind(node.this.unnest()) in COMPARISONS:  # 0.1 read `a < b is None` otherwise
                raise _refused(node, "compares a comparison")
            return self.expression(node.this, depth + 1).is_null()
        if kind in PATTERNS and node.expression.is_string:
            text = self.expression(node.this, depth + 1).cast(TEXT)
            return PATTERNS[kind](text, node.expression.this)
        if kind in COMPARISONS:
            sides, signs = _chain(node)
            if joined := [side for side in sides if _kind(side) in LOOSE]:
                raise _refused(joined[0], "needs parentheses, to be compared as a whole")
            values = [self.expression(side, depth + 1) for side in sides]
            pairs = zip(signs, values, values[1:])
            return _joined(operator.and_, [COMPARISONS[sign](a, b) for sign, a, b in pairs])
        if kind in COMPUTED:
            parts = node.flatten(False) if kind in ("And", "Or") else node.iter_expressions()
            return COMPUTED[kind](*(self.expression(part, depth + 1) for part in parts))
        raise _refused(node, "is not known here")


def _chain(node: Any) -> tuple[list[Any], list[str]]:
    """The sides of `a < b <= c`, which is `a < b and b <= c`, and the signs between them."""
    if _kind(node) not in COMPARISONS:
        return [node], []
    (left, before), (right, behind) = _chain(node.this), _chain(node.expression)
    return [*left, *right], [*before, _kind(node), *behind]


def _is_literal(node: Any) -> bool:
    if _kind(node) == "Neg":
        return _kind(node.this.unnest()) == "Literal" and not node.this.unnest().is_string
    return _kind(node) in ("Literal", "Boolean")


def _literal(node: Any) -> pc.Expression:
    given = f"-{node.this.unnest().this}" if _kind(node) == "Neg" else node.this
    try:
        if not node.is_string and not isinstance(given, bool):
            given = int(given) if given.lstrip("-").isdigit() else float(given)
        return pc.scalar(given)
    except (ValueError, OverflowError, pa.ArrowException) as error:
        raise _refused(node, "is no number, too large, or no text") from error


def _kind(node: Any) -> str:
    return type(node).__name__


def _refused(node: Any, why: str) -> ValueError:
    return ValueError(f"{_cut(node.sql(DIALECT))!r} {why}; {ALLOWED}")


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
