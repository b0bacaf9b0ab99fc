"""Every mutant has its place in the code, and is code."""

import ast

from mutants import ROOT, all_mutants


def test_every_mutant_has_its_place_and_can_be_parsed():
    for mutant in all_mutants():
        source = (ROOT / mutant.file).read_text(encoding="utf-8")
        faulty = mutant.applied(source)
        assert ast.dump(ast.parse(faulty)) != ast.dump(ast.parse(source)), mutant.name
        for word in mutant.tests.split():
            if word.startswith("tests/"):
                assert (ROOT / word.partition("::")[0]).exists(), mutant.name
