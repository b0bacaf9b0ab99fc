"""Every two values that are allowed together are in a case, and no others."""

from itertools import product

import pytest
from covering import all_pairs, apart_of, covering, pairs_of
from parity_cases import FACTORS, RULES, SEED, name_of

NUMBERS = {
    name: [f"{name}{n}" for n in range(size)] for name, size in zip("abcdef", (4, 3, 3, 2, 2, 2))
}
APART = [
    ((), ()),
    (("a0", "a1"), ("b0",)),
    (("c2",), ("d0", "e1")),
    (("d1",), ("f0",)),
]


@pytest.mark.parametrize("number", range(len(APART) + 1))
def test_every_pair_that_some_whole_case_can_have_is_covered(number):
    apart = apart_of(APART[:number])
    every = [pairs_of(values) for values in product(*NUMBERS.values())]
    possible = set().union(*(pairs for pairs in every if not pairs & apart))
    cases = covering(NUMBERS, apart)
    found = [pairs_of(case.values()) for case in cases]
    assert set().union(*found) == possible
    assert cases == covering(NUMBERS, apart)
    assert len(cases) < len(every) / 10


def test_a_pair_that_excludes_itself_by_what_all_cases_need_is_in_none():
    factors = {"a": ["a0", "a1"], "b": ["b0", "b1"], "c": ["c0"]}
    cases = covering(factors, apart_of([(("a1",), ("c0",))]))
    assert {case["a"] for case in cases} == {"a0"} and {case["b"] for case in cases} == {"b0", "b1"}
    assert len(all_pairs(factors)) == 8


def test_values_of_the_same_name_are_refused():
    with pytest.raises(ValueError, match="same word"):
        covering({"a": ["on", "off"], "b": ["on"]}, set())


def test_every_two_features_that_are_allowed_together_meet_in_a_case_of_parity():
    apart = apart_of(RULES)
    cases = covering(FACTORS, apart, SEED)
    found = set().union(*(pairs_of(case.values()) for case in cases))
    assert found == {*all_pairs(FACTORS)} - apart
    assert len({name_of(case) for case in cases}) == len(cases)
