"""Recipe files: a whole way to train in one JSON file of ds_configs/recipes/.

A recipe file is a configuration of DeepSpeed with one further key, `recipe`: what it is for, its
arithmetic, what it needs, what the planner predicts, and flags of train.py. `--recipe NAME` takes
both. What the command line says itself takes precedence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.files import read_json
from common.options import flags_of
from common.spelling import keys_of, near, nearest
from launch.config.groups import GROUPS

RECIPES = Path(__file__).resolve().parents[2] / "ds_configs" / "recipes"


@dataclass(frozen=True)
class RecipeFile:
    """The block `recipe`. Checked when made.

    `task`: what it is for; `arithmetic`: of its numbers, a line each; `needs`: data, weights,
    hardware; `ranks`, `device`: what it is planned for, the defaults of --ranks and --device; `plan`,
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
    file: Path

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
        keys = [key for key in keys_of(cls) if key != "file"]
        unknown = [key for key in block if key not in keys]
        if unknown:
            raise ValueError(
                f"{file}: unknown key 'recipe.{unknown[0]}'{nearest(unknown[0], keys)}"
            )
        missing = [key for key in keys if key not in block]
        if missing:
            raise ValueError(f'{file}: "recipe" lacks {", ".join(missing)}')
        allowed = [
            flag.name or name.replace("_", "-")
            for kind in GROUPS
            for name, _, flag in flags_of(kind)
            if flag.in_recipe
        ]
        refused = [name for name in block["flags"] if name not in allowed]
        if refused:
            raise ValueError(
                f"{file}: recipe.flags: a recipe cannot set --{refused[0]}; give it on the command "
                f"line{nearest(refused[0], allowed)}"
            )
        return cls(**{**block, "arithmetic": tuple(block["arithmetic"]), "file": file})

    def arguments(self) -> list[str]:
        """`flags` as words of a command line."""
        return [
            word
            for name, value in self.flags.items()
            for word in ([f"--{name}"] if value is True else [f"--{name}", str(value)])
        ]


def find_recipe(name: str) -> Path:
    """By name or path. Errors: ValueError that says which there are."""
    known = {file.stem: file for file in sorted(RECIPES.glob("*.json"))}
    if name in known:
        return known[name]
    if Path(name).is_file():
        return Path(name)
    hint = near(name, known) or "."
    raise ValueError(f"no file and no recipe {name!r}{hint} There are: {', '.join(known)}")
