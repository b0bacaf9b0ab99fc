"""Recipe files: a whole way to train in one JSON file of ds_configs/recipes/.

A recipe file is a configuration of DeepSpeed with one further key, `recipe`: what it is for, its
arithmetic, what it needs, what the planner predicts, and flags of train.py. `--recipe NAME` takes
both. What the command line says itself takes precedence. A recipe may come from somebody else: it
names neither data nor modules, and no place where metrics go.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.blocks import Count, block, read_block
from common.files import read_json
from common.spelling import near, nearest
from launch.config.groups import FLAGS

MONITORS = ("wandb", "tensorboard", "csv_monitor", "comet")  # blocks that say where metrics go
RECIPES = Path(__file__).resolve().parents[2] / "ds_configs" / "recipes"


@block
class RecipeFile:
    """The block `recipe`, of `file`.

    `task`: what it is for; `arithmetic`: of its numbers, a line each; `needs`: data, weights,
    hardware; `ranks`, `device`: what it is planned for, the defaults of --ranks and --device;
    `plan`, `predicted`: what the planner says of that; `flags`: of train.py, without the leading
    dashes.
    """

    file: Path
    task: str
    arithmetic: list[str]
    needs: str
    ranks: Count
    device: str
    plan: str
    predicted: str
    flags: dict[str, Any]

    def __post_init__(self) -> None:
        allowed = [
            flag.name or name.replace("_", "-") for name, flag in FLAGS.items() if flag.in_recipe
        ]
        for name in self.flags:
            if name not in allowed:
                raise ValueError(
                    f"a recipe cannot set --{name}; give it on the command line"
                    f"{nearest(name, allowed)}"
                )

    @classmethod
    def read(cls, file: Path) -> RecipeFile:
        """Errors: ValueError for a file without the block, or with another."""
        try:
            written = read_json(file)
        except ValueError as error:
            raise ValueError(f"{file}: not valid JSON: {error}") from error
        recipe = written.get("recipe") if isinstance(written, dict) else None
        if not isinstance(recipe, dict):
            raise ValueError(
                f'{file}: holds no "recipe"; give it as --deepspeed_config, or a file of {RECIPES}'
            )
        for name in (name for name in MONITORS if name in written):
            raise ValueError(
                f"{file}: a recipe cannot set {name}, which says where metrics go: it may come from "
                f"somebody else; take the block out, and give --set '{name}={{…}}'"
            )
        if "file" in recipe:
            raise ValueError(f"{file}: unknown key 'recipe.file'; remove it")
        try:
            return read_block(cls, {**recipe, "file": file}, "recipe")
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None

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
