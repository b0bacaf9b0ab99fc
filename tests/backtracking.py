"""Counts the steps that a regular expression takes, as a matcher with backtracking takes them, on
texts that are made of its own parts.

    growth(re.compile("(a*)b"), "search")   # 4 where twice the text takes four times the steps

Steps are those of a model that Python's matcher is faster than by a factor, never by an order:
literals that it looks for ahead are compared one by one here.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib import import_module
from itertools import product
from typing import Any

c, parser = (
    import_module(new if sys.version_info >= (3, 11) else old)
    for new, old in (("re._constants", "sre_constants"), ("re._parser", "sre_parse"))
)
COPIES = 16  # of a part, in the shorter text
STEPS = 30_000  # of one that is quadratic are fewer, of an exponential one more
COMMON = ("a", " ", "/")  # of which texts are made, too
PARTS = 20  # characters of a pattern
MOST = 6  # repetitions in place of a number that is fixed: {256} is a factor, and no growth
ATOMIC, POSSESSIVE = (getattr(c, name, None) for name in ("ATOMIC_GROUP", "POSSESSIVE_REPEAT"))
Match = Callable[[int], bool]


@lru_cache(1000)
def listed(pattern: re.Pattern) -> list:
    return as_lists(parser.parse(pattern.pattern, pattern.flags))


def as_lists(tree: Any) -> list:
    """As plain lists, of which a matcher takes parts in no time."""
    return [(op, of_item(given)) for op, given in tree]


def of_item(given: Any) -> Any:
    if isinstance(given, parser.SubPattern):
        return as_lists(given)
    if isinstance(given, tuple):
        return tuple(map(of_item, given))
    is_branch = isinstance(given, list) and any(isinstance(e, parser.SubPattern) for e in given)
    return [of_item(each) for each in given] if is_branch else given


class TooMany(Exception):
    """Steps."""


class Counter:
    """Matches one text. `steps`: so far."""

    def __init__(self, pattern: re.Pattern, text: str, most: int) -> None:
        self.text, self.steps, self.most = text, 0, most
        self.tree = listed(pattern)
        self.ignore_case = bool(pattern.flags & re.IGNORECASE)
        self.dot_all = bool(pattern.flags & re.DOTALL)

    def run(self, method: str) -> int:
        """All matches as `method` of a pattern looks for them."""
        at, end = 0, len(self.text)
        while at <= end:
            found: list[int] = []

            def whole(stop: int) -> bool:
                if method == "fullmatch" and stop != end:
                    return False
                found.append(stop)
                return True

            self.sequence(self.tree, 0, at, whole)
            if method in ("match", "fullmatch") or method == "search" and found:
                break
            at = max(found[0], at + 1) if found else at + 1
        return self.steps

    def sequence(self, items: list, first: int, at: int, then: Match) -> bool:
        """Whether the items from `first` on match at a place and `then` does behind them."""
        while first < len(items):
            self.steps += 1
            if self.steps > self.most:
                raise TooMany
            op, given = items[first]
            if op in (c.LITERAL, c.NOT_LITERAL, c.ANY, c.IN):
                if at >= len(self.text) or not self.is_one(op, given, self.text[at]):
                    return False
                first, at = first + 1, at + 1
            elif op is c.AT:
                if not self.is_at(given, at):
                    return False
                first += 1
            elif op in (c.ASSERT, c.ASSERT_NOT):
                if self.looks(given, at) != (op is c.ASSERT):
                    return False
                first += 1
            else:
                rest: Match = lambda stop, n=first + 1: self.sequence(items, n, stop, then)  # noqa: E731
                return self.choice(op, given, at, rest)
        return then(at)

    def choice(self, op: Any, given: Any, at: int, rest: Match) -> bool:
        if op is c.SUBPATTERN:
            return self.sequence(given[3], 0, at, rest)
        if op is ATOMIC:
            found: list[int] = []
            return self.sequence(given, 0, at, lambda s: not found.append(s)) and rest(found[0])
        if op is c.BRANCH:
            return any(self.sequence(each, 0, at, rest) for each in given[1])
        if op is c.GROUPREF:
            return rest(at)
        least, most, item = given
        if most is not c.MAXREPEAT:
            least, most = min(least, MOST), min(most, MOST)
        if len(item) == 1 and item[0][0] in (c.LITERAL, c.NOT_LITERAL, c.ANY, c.IN):
            return self.run_of(op, least, most, item[0], at, rest)
        return self.repeat(op, least, most, item, at, rest, 0)

    def run_of(self, op: Any, least: int, most: Any, one: Any, at: int, rest: Match) -> bool:
        """A repeat of single characters, without recursion."""
        end = at
        limit = len(self.text) if most is c.MAXREPEAT else min(len(self.text), at + most)
        while end < limit and self.is_one(*one, self.text[end]):
            end, self.steps = end + 1, self.steps + 1
        if self.steps > self.most:
            raise TooMany
        if end < at + least:
            return False
        if op is POSSESSIVE:
            return rest(end)
        places = range(at + least, end + 1)
        return any(rest(stop) for stop in (places if op is c.MIN_REPEAT else reversed(places)))

    def repeat(
        self, op: Any, least: int, most: Any, items: list, at: int, rest: Match, number: int
    ) -> bool:
        def again(stop: int) -> bool:
            empty = stop == at and number >= least
            return not empty and self.repeat(op, least, most, items, stop, rest, number + 1)

        more = most is c.MAXREPEAT or number < most
        if number < least:
            return self.sequence(items, 0, at, again)
        if op is POSSESSIVE:
            while more:
                found: list[int] = []
                if not self.sequence(items, 0, at, lambda s: not found.append(s)) or found[0] == at:
                    break
                at, number = found[0], number + 1
                more = most is c.MAXREPEAT or number < most
            return rest(at)
        if op is c.MIN_REPEAT:
            return rest(at) or (more and self.sequence(items, 0, at, again))
        return (more and self.sequence(items, 0, at, again)) or rest(at)

    def looks(self, given: Any, at: int) -> bool:
        direction, items = given
        if direction < 0:
            low = sum(1 for _ in items)  # of single characters
            return at >= low and self.sequence(items, 0, at - low, lambda s: True)
        return self.sequence(items, 0, at, lambda s: True)

    def is_one(self, op: Any, given: Any, char: str) -> bool:
        if op is c.ANY:
            return self.dot_all or char != "\n"
        if op is c.IN:
            return is_in(given, char) or self.ignore_case and is_in(given, char.swapcase())
        same = ord(char) == given or self.ignore_case and ord(char.swapcase()) == given
        return same != (op is c.NOT_LITERAL)

    def is_at(self, where: Any, at: int) -> bool:
        if where in (c.AT_BEGINNING, c.AT_BEGINNING_STRING):
            return at == 0
        if where in (c.AT_END, c.AT_END_STRING):
            return at == len(self.text) or at == len(self.text) - 1 and self.text[at] == "\n"
        before = at > 0 and is_word(self.text[at - 1])
        after = at < len(self.text) and is_word(self.text[at])
        return (before != after) == (where is c.AT_BOUNDARY)


def is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


CATEGORIES = {"DIGIT": str.isdigit, "SPACE": str.isspace, "WORD": is_word}


def is_in(members: list, char: str) -> bool:
    wanted = True
    for op, given in members:
        if op is c.NEGATE:
            wanted = False
        elif op is c.CATEGORY:
            name = str(given).removeprefix("CATEGORY_")
            if CATEGORIES[name.removeprefix("NOT_")](char) != name.startswith("NOT_"):
                return wanted
        elif given[0] <= ord(char) <= given[1] if op is c.RANGE else given == ord(char):
            return wanted
    return not wanted


def samples(items: Any) -> Iterator[str]:
    """A text or two that each item may match, in order; of alternatives each."""
    for op, given in items:
        if op is c.LITERAL:
            yield chr(given)
        elif op is c.NOT_LITERAL:
            yield "a" if given != ord("a") else "b"
        elif op is c.ANY:
            yield "a"
        elif op is c.IN:
            yield next((char for char in "a1 ./-,_=" if is_in(given, char)), chr(_first(given)))
        elif op is c.SUBPATTERN:
            yield "".join(samples(given[3]))
        elif op is ATOMIC:
            yield "".join(samples(given))
        elif op is c.BRANCH:
            yield "".join(samples(given[1][0]))
        elif op in (c.MAX_REPEAT, c.MIN_REPEAT, POSSESSIVE):
            yield "".join(samples(given[2])) * max(1, min(given[0], MOST))


def _first(members: list) -> int:
    return next(
        (g[0] if op is c.RANGE else g for op, g in members if op in (c.RANGE, c.LITERAL)), 97
    )


def characters(items: Any) -> set[str]:
    """Of each item one that it matches."""
    found: set[str] = set()
    for op, given in items:
        if op in (c.LITERAL, c.NOT_LITERAL, c.ANY, c.IN):
            found |= {*samples([(op, given)])}
            if op is c.IN:  # also one of the others within
                found |= {chr(g) for o, g in given if o is c.LITERAL and is_in(given, chr(g))}
        elif op is c.BRANCH:
            found |= {char for each in given[1] for char in characters(each)}
        elif op is c.SUBPATTERN:
            found |= characters(given[3])
        elif op in (c.MAX_REPEAT, c.MIN_REPEAT, POSSESSIVE):
            found |= characters(given[2])
        elif op in (c.ASSERT, c.ASSERT_NOT):
            found |= characters(given[1])
        elif op is ATOMIC:
            found |= characters(given)
    return found


def texts(pattern: re.Pattern) -> Iterator[Callable[[int], str]]:
    """Of a number of copies, a text: what a match begins with, copies of its parts, and an end that
    no match has."""
    tree = listed(pattern)
    pieces = [*samples(tree)]
    begins = {"".join(pieces[:k]): None for k in range(1, len(pieces) + 1)}
    single = sorted({*characters(tree), *COMMON})[:PARTS]
    units = {*single, *begins, *(before + each for before in COMMON for each in single)}
    for begin, unit in product(("", *[*begins][:3], *[*begins][-1:]), sorted(units)):
        yield lambda number, b=begin, u=unit: b + u * number + "\n!"


def growth(pattern: re.Pattern, method: str) -> tuple[float, str]:
    """The most by which the steps on twice the text are more, and on what; about 2 is a linear one,
    and after one of 3 no other text is tried."""
    worst = (0.0, "")
    for text in texts(pattern):
        steps = [0, 0]
        for number, copies in enumerate((COPIES, 2 * COPIES)):
            counter = Counter(pattern, text(copies), STEPS)
            try:
                steps[number] = counter.run(method)
            except (TooMany, RecursionError):
                return math.inf, repr(text(2))
        if steps[1] > 8 * len(text(2 * COPIES)):  # else it is too little to tell
            worst = max(worst, (steps[1] / steps[0], repr(text(2))))
            if worst[0] > 3:
                break
    return worst
