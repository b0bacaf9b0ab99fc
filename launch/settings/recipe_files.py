"""Recipe files: a whole way to train in one JSON file of ds_configs/recipes/.

A recipe file is a configuration of DeepSpeed with one further key, `recipe`: what it is for, its
arithmetic, what it needs, what the planner predicts, and flags of train.py. `--recipe NAME` takes
both. What the command line says itself takes precedence.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from common.files import read_json
from engine.config.spelling import keys_of, nearest

RECIPES = Path(__file__).resolve().parents[2] / "ds_configs" / "recipes"
# Flags that a recipe may set: of what is trained and for how long. Not what to import, where to read
# and write, or what else only whoever types the command can decide.
FLAGS = (
    *("image-tower", "text-tower", "audio-tower", "image-weights", "text-weights"),
    *("audio-weights", "import", "embed-dim", "projection", "image-size", "image-buckets"),
    *("image-normalization", "image-interpolation", "image-resize", "image-resize-mode"),
    *("max-text-tokens", "audio-seconds", "audio-size", "max-audio-seconds"),
    *("augmentation", "audio-augmentation", "pairs", "loss", "label-smoothing", "duplicates"),
    *("fusion", "fusion-width", "fusion-heads", "fusion-scales", "matching-weight"),
    *("loss-weights", "loss-weights-every", "epochs", "steps", "seed", "val-fraction"),
    *("eval-every", "eval-ema", "save-every", "keep-checkpoints", "keep-every"),
    *("data-temperature", "data-floors", "data-weights", "data-adapt"),
)
EITHER = ("epochs", "steps")  # flags that exclude each other


@dataclass(frozen=True)
class RecipeFile:
    """The block `recipe`. Checked when made.

    `task`: what it is for; `arithmetic`: of its numbers, a line each; `needs`: data, weights, hardware;
    `ranks`, `device`: what it is planned for, the defaults of --ranks and --device; `plan`,
    `predicted`: what the planner says of that; `flags`: of train.py, without the leading dashes.
    """

    task: str
    arithmetic: tuple[str, ...]
    needs: str
    ranks: int
    device: str
    plan: str
    predicted: str
    flags: Mapping[str, Any]

    @classmethod
    def read(cls, file: Path) -> RecipeFile:
        """Errors: ValueError for a file without the block, or with another."""
        try:
            written = read_json(file)
        except ValueError as error:
            raise ValueError(f"{file}: not valid JSON: {error}") from error
        block = written.get("recipe") if isinstance(written, dict) else None
        if not isinstance(block, dict):
            raise ValueError(
                f'{file}: holds no "recipe"; give it as --deepspeed_config, or a file of {RECIPES}'
            )
        unknown = [key for key in block if key not in keys_of(cls)]
        if unknown:
            raise ValueError(
                f"{file}: unknown key 'recipe.{unknown[0]}'{nearest(unknown[0], keys_of(cls))}"
            )
        missing = [field.name for field in fields(cls) if field.name not in block]
        if missing:
            raise ValueError(f'{file}: "recipe" lacks {", ".join(missing)}')
        refused = [name for name in block["flags"] if name not in FLAGS]
        if refused:
            raise ValueError(
                f"{file}: recipe.flags: a recipe cannot set --{refused[0]}; give it on the command "
                f"line{nearest(refused[0], FLAGS)}"
            )
        return cls(**{**block, "arithmetic": tuple(block["arithmetic"])})

    def arguments(self, given: Sequence[str]) -> list[str]:
        """`flags` as words of a command line, without those that `given` words exclude."""
        words: list[str] = []
        others = {flag.partition("=")[0] for flag in given}
        for name, value in self.flags.items():
            excluded = [f"--{other}" for other in EITHER if name in EITHER and other != name]
            if others & {*excluded}:
                continue
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        return words


def add_recipe_flag(parser: Any) -> None:
    parser.add_argument(
        "--recipe",
        metavar="NAME|FILE",
        help=f"a file of {RECIPES.parent.name}/{RECIPES.name}/, such as clip_vit_b32: flags and the JSON file in one (default: none)",
    )


def find_recipe(name: str) -> Path:
    """By name or path. Errors: ValueError that says which there are."""
    known = {file.stem: file for file in sorted(RECIPES.glob("*.json"))}
    if name in known:
        return known[name]
    if Path(name).is_file():
        return Path(name)
    near = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"no file and no recipe {name!r}{hint} There are: {', '.join(known)}")


def with_recipe(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[list[str], Path | None, RecipeFile | None]:
    """The words of the command line behind those of its recipe, its file and what it says."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_recipe_flag(finder)
    name = finder.parse_known_args(list(arguments))[0].recipe
    if name is None:
        return list(arguments), None, None
    try:
        file = find_recipe(name)
        recipe = RecipeFile.read(file)
    except ValueError as error:
        parser.error(f"argument --recipe: {error}")
    return [*recipe.arguments(arguments), *arguments], file, recipe
