"""The name syntax of towers, `NAME[:key=value,...]`, read strictly: unknown names and keys are
refused, the nearest one named."""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from common.model_sizes import refuse_sizes

HF = "hf:"  # how image towers of transformers are called; those of texts need not be
TWO_LAYERS = "mlp_proj"  # key of a text tower of transformers: OpenCLIP's hf_proj_type=mlp

KINDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a word",
    tuple: "integers joined by '-', such as 2-2-6-2",
}


def nearest(word: str, valid: Iterable[str]) -> str:
    """The valid word most like `word`; there is always one."""
    return difflib.get_close_matches(word, list(valid), n=1, cutoff=0.0)[0]


def alike(word: str, known: Iterable[str]) -> list[str]:
    """Those of `known` that differ from `word` in case and in what joins its parts only:
    `efficientnet-b0` and `efficientnet_b0`, `ViT-B/32` and `ViT-B-32`."""
    return [each for each in known if _letters(each) == _letters(word)]


def _letters(word: str) -> str:
    word = re.sub(r"@(\d+)px$", r"\1", word.lower())  # OpenAI writes ViT-L/14@336px
    return re.sub(r"[^a-z0-9]", "", word)


def refuse(what: str, word: str, valid: Iterable[str]) -> ValueError:
    """The error for an unknown word: names the nearest valid one and lists them all."""
    valid = sorted(valid)
    return ValueError(
        f"{what} {word!r} is not known; did you mean {nearest(word, valid)!r}? Known: "
        f"{', '.join(valid)}"
    )


def split_name(name: str) -> tuple[str, dict[str, str]]:
    """Cut `vit_b_16:num_layers=4,num_heads=3` into its base and its overrides (values still text).

    Only what follows the last colon and holds a `=` is taken for overrides, so a path may contain
    colons.
    """
    base, colon, tail = name.rpartition(":")
    if not colon or "=" not in tail:
        return name, {}
    overrides: dict[str, str] = {}
    for item in tail.split(","):
        key, equals, value = item.partition("=")
        if not (key and equals and value):
            raise ValueError(
                f"tower {name!r}: {item!r} is not of the form key=value; write "
                "NAME:key=value,key=value"
            )
        if key in overrides:
            raise ValueError(f"tower {name!r}: {key} is given twice; keep one")
        overrides[key] = value
    return base, overrides


def join_name(base: str, overrides: Mapping[str, str]) -> str:
    """What `split_name` cuts."""
    return (
        f"{base}:{','.join(f'{key}={value}' for key, value in overrides.items())}"
        if overrides
        else base
    )


def parse_overrides(
    name: str, overrides: Mapping[str, str], kinds: Mapping[str, type]
) -> dict[str, Any]:
    """Read each value as the kind that its key asks for. `kinds`: key -> int, float, bool, str or
    tuple (of integers). Errors: ValueError, also for sizes that no model has."""
    values: dict[str, Any] = {}
    for key, text in overrides.items():
        if key not in kinds:
            raise refuse(f"tower {name!r}: key", key, kinds)
        values[key] = _parse(name, key, text, kinds[key])
    refuse_sizes(f"tower {name!r}", values)
    return values


def _parse(name: str, key: str, text: str, kind: type) -> object:
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        if kind is tuple:
            return tuple(int(part) for part in text.split("-"))
        return kind(text)
    except (ValueError, KeyError) as error:
        raise ValueError(f"tower {name!r}: {key}={text} must be {KINDS[kind]}") from error
