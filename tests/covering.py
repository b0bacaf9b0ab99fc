"""Few cases in which every two values of any two factors meet that are allowed together.

Faults of a program lie mostly where two features meet, seldom where three do (Kuhn, Wallace and Gallo
2004), and the number of such cases grows with the product of the two largest factors instead of with
that of all. Made case by case: of some ways to fill one up, that which covers most (AETG: Cohen et al.
1997).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

Factors = Mapping[
    str, Sequence[str]
]  # factor -> values, the cheapest first; all are different words
Case = dict[str, str]
Pair = frozenset[str]  # two values
TRIES = 12  # orders in which the factors of a case are filled


def apart_of(rules: Iterable[tuple[Sequence[str], Sequence[str]]]) -> set[Pair]:
    """Rules: none of the first values goes with any of the second."""
    return {frozenset((a, b)) for some, others in rules for a in some for b in others}


def pairs_of(values: Iterable[str]) -> set[Pair]:
    return {frozenset(two) for two in combinations(values, 2)}


def all_pairs(factors: Factors) -> list[Pair]:
    """Of two factors each, in order."""
    return [
        frozenset((a, b))
        for one, other in combinations(factors.values(), 2)
        for a in one
        for b in other
    ]


def covering(factors: Factors, apart: set[Pair], seed: int = 0) -> list[Case]:
    """The same cases each time, others with another seed. A pair that no whole case can have is in
    none."""
    words = [value for values in factors.values() for value in values]
    if len(set(words)) < len(words):
        raise ValueError("two values are the same word")
    factor_of = {value: name for name, values in factors.items() for value in values}
    left = dict.fromkeys(pair for pair in all_pairs(factors) if pair not in apart)
    draw, cases = random.Random(seed), []
    while left:
        first = next(iter(left))
        begun = {factor_of[value]: value for value in sorted(first)}
        best: Case | None = None
        most = 0
        for _ in range(TRIES):
            order = [name for name in factors if name not in begun]
            draw.shuffle(order)
            case = _filled(dict(begun), order, factors, apart, left)
            if case is None:
                break
            covered = sum(pair in left for pair in pairs_of(case.values()))
            if covered > most:
                best, most = case, covered
        if best is None:
            del left[first]
            continue
        for pair in pairs_of(best.values()):
            left.pop(pair, None)
        cases.append({name: best[name] for name in factors})
    return [_cheaper(case, n, cases, factors, apart) for n, case in enumerate(cases)]


def _cheaper(
    case: Case, number: int, cases: list[Case], factors: Factors, apart: set[Pair]
) -> Case:
    """With the first value of each factor by which nothing is lost that no other case has. The case
    is changed where it stands."""
    others = set().union(*(pairs_of(c.values()) for n, c in enumerate(cases) if n != number))
    for name in reversed(factors):
        for value in factors[name]:
            rest = [other for of, other in case.items() if of != name]
            now, then = ({frozenset((each, r)) for r in rest} for each in (case[name], value))
            if now <= others and not then & apart:
                case[name] = value
                break
    return case


def _filled(
    case: Case, order: Sequence[str], factors: Factors, apart: set[Pair], left: Mapping[Pair, None]
) -> Case | None:
    """With values for the other factors, each of which covers most with those before; where two
    cover as much, the cheaper. None: there are none that go together."""
    if not order:
        return case
    name, *rest = order
    given = list(case.values())
    for each in order:  # what leaves a later factor nothing would be found out again and again
        if all(any(frozenset((v, g)) in apart for g in given) for v in factors[each]):
            return None

    def covered(value: str) -> int:
        return sum(frozenset((value, other)) in left for other in given)

    for value in sorted(factors[name], key=covered, reverse=True):  # stable
        if any(frozenset((value, other)) in apart for other in given):
            continue
        found = _filled({**case, name: value}, rest, factors, apart, left)
        if found is not None:
            return found
    return None
