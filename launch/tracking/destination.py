"""Where the W&B run of a run is: what the user says, never what a folder or a recipe says alone."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.records import RUN_RECORD

if TYPE_CHECKING:
    from deepspeed.monitor.config import WandbConfig

PROJECT = "wye"
Destination = dict[str, str | None]  # arguments of wandb.init: project, group, entity


def where(given: str | None, block: WandbConfig) -> Destination:
    """The project is --wandb-project, that of the JSON file, WANDB_PROJECT or `wye`; the first that
    is given."""
    own = block.project if "project" in block.model_fields_set else None
    project = given or own or os.environ.get("WANDB_PROJECT") or PROJECT
    return {"project": project, "group": block.group, "entity": block.team}


def where_recorded(record: Mapping[str, Any], folder: Path, trusts: bool) -> Destination:
    """Of the run in `folder`, whose record may be another one's. `trusts`: whatever it says.

    Errors: ValueError for a project or a team (entity) that the user's variables do not name.
    """
    said, file = record.get("tracking"), folder / RUN_RECORD
    said = said if isinstance(said, dict) else {}
    found = {key: said.get(key) for key in ("project", "group", "entity")}
    for key, value in found.items():
        if not isinstance(value, str | None):
            raise ValueError(f"{file}: tracking.{key} is {value!r}, and no text; take it out")
    named = {"project": "WANDB_PROJECT", "entity": "WANDB_ENTITY"}
    own = {"project": PROJECT, "entity": None}
    others = {
        variable: found[key]
        for key, variable in named.items()
        if found[key] not in (None, os.environ.get(variable) or own[key])
    }
    if others and not trusts:
        words = " ".join(f"{variable}={shlex.quote(str(v))}" for variable, v in others.items())
        raise ValueError(
            f"{file}: says that its W&B run is elsewhere ({words}), and the folder of a run may come "
            "from somebody else; if the export is to go there, set these variables, or add --trust-run"
        )
    return found
