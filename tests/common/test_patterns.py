"""No regular expression of the product takes more than a step or so for a character, whatever text
it is given: a name of 100 KB in a stranger's archive may not take a minute."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from backtracking import growth

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("common", "data", "models", "engine", "launch", "train.py", "evaluate.py", "export.py")
METHODS = ("match", "fullmatch", "search", "sub", "subn", "split", "findall", "finditer")
MOST = 2.7  # times the steps for twice the text: 2 and what is constant, or 4


def files() -> Iterator[Path]:
    for name in PRODUCT:
        yield from sorted((ROOT / name).rglob("*.py")) if (ROOT / name).is_dir() else [ROOT / name]


def evaluated(node: ast.expr, known: dict[str, Any]) -> Any:
    """A constant, with x for what only a run knows."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(evaluated(each, known)) for each in node.values)
    try:
        inner = node.value if isinstance(node, ast.FormattedValue) else node
        return eval(compile(ast.Expression(inner), "", "eval"), {"re": re, **known})
    except Exception:
        return "x"


def patterns() -> dict[str, tuple[re.Pattern, set[str]]]:
    """Where it is -> the pattern, and the methods by which it is used."""
    found: dict[str, tuple[re.Pattern, set[str]]] = {}
    texts = {file: file.read_text(encoding="utf-8") for file in files()}
    every = "\n".join(texts.values())
    for file, text in texts.items():
        known: dict[str, Any] = {}
        tree = ast.parse(text)
        of_names: dict[ast.AST, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                known[node.targets[0].id] = evaluated(node.value, known)
                of_names[node.value] = node.targets[0].id
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
                if isinstance(node.value, ast.Tuple):
                    pairs = zip(node.value.elts, node.targets[0].elts)
                    of_names |= {a: b.id for a, b in pairs if isinstance(b, ast.Name)}
        for node in ast.walk(tree):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if not is_call or ast.unparse(node.func.value) != "re":
                continue
            name = node.func.attr
            if name not in (*METHODS, "compile"):
                continue
            where = f"{file.relative_to(ROOT)}:{node.lineno}"
            place = {"sub": 3, "subn": 3, "split": 2}.get(name, 2 if name != "compile" else 1)
            flags = [evaluated(k.value, known) for k in node.keywords if k.arg == "flags"]
            flags += [evaluated(each, known) for each in node.args[place:][:1] if name != "split"]
            numbers = [flag for flag in flags if isinstance(flag, int)]
            pattern = re.compile(evaluated(node.args[0], known), *numbers[:1])
            used = {name} - {"compile"}
            if given := of_names.get(node):
                used |= {*re.findall(rf"\b{given}\.({'|'.join(METHODS)})\(", every)}
            found[where] = pattern, used or {"search"}
    return found


@pytest.mark.all("tries every pattern")
def test_no_pattern_takes_four_times_the_steps_for_twice_the_text():
    slow = {}
    of_the_user = "launch/tools/submit.py"  # a pattern of shards in a command of one's own
    for where, (pattern, methods) in patterns().items():
        searched = methods - {"match", "fullmatch"}
        found, text = growth(pattern, "sub" if searched else "match")
        if found > MOST and not where.startswith(of_the_user):
            slow[where] = f"{pattern.pattern!r}: {found:.1f} on {text}"
    assert len(patterns()) > 60
    assert not slow, "\n".join(f"{where} {found}" for where, found in slow.items())


@pytest.mark.parametrize(
    ("pattern", "method", "least", "most"),
    [
        ("a+b", "match", 0, 2.4),
        ("a+b", "search", 3.3, 4.2),
        (r"(a|b)*\s+$", "search", 3.3, 4.2),
        (r"(?<!a)a++b", "search", 0, 2.4),
        ("(a+)+b", "match", float("inf"), float("inf")),
        ("[0-9]{256}", "search", 0, 2.2),
    ],
)
def test_steps_are_counted(pattern, method, least, most):
    assert least <= growth(re.compile(pattern), method)[0] <= most
