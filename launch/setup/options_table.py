"""`train.py --show-options`: each option of the command line and each key of the JSON file, its
value, and where that comes from."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.table import Table

from common.files import read_json
from common.secrets import redacted
from engine.checks import AUTO
from engine.config.auto import recorded
from engine.config.reading import BranchesBlock
from launch.config.groups import FLAGS
from launch.config.settings import with_settings
from launch.records import flat

if TYPE_CHECKING:
    from launch.setup.prepare import PreparedRun


PLANNED = ("layout", "stages", "replicas", "micro_batch_size", "schedule", "kept_micro_batches")
LENGTH = "scheduler.params.total_num_steps"


def options_table(run: PreparedRun) -> Table:
    """Rows: the options in the order of the help, then the keys of the JSON file."""
    table = Table(title="Options of this run", title_justify="left")
    for name in ("option", "value", "from"):
        table.add_column(name, overflow="fold")
    record = redacted(run.options.record())
    for name in filter(record.__contains__, FLAGS):
        source = run.options.sources.get(name, "default")
        if source == "default" and name in ("augmentation", "label_smoothing"):
            source = "the preset"
        table.add_row(f"--{name.replace('_', '-')}", _written(record[name]), source)
    table.add_section()
    for key, value, source in keys_of_run(run):
        table.add_row(key, _written(redacted(value)), source)
    return table


def keys_of_run(run: PreparedRun) -> Iterator[tuple[str, Any, str]]:
    """(key, value, where it comes from) of the JSON file, as it was settled."""
    written = read_json(run.config_file)
    written.pop("recipe", None)
    asked = flat(with_settings(written, run.options.set))
    by_set = [setting.partition("=")[0].strip() for setting in run.options.set]
    decided = flat({**run.config, "branches": _decided(run)})
    if decided.get(LENGTH) == AUTO:
        decided[LENGTH] = run.batching.total_steps
    previous = run.folder.previous()
    began = recorded(previous["training"]) if previous else {}
    for key, value in decided.items():
        default = key.startswith("branches.") and key not in asked
        if default and value == getattr(BranchesBlock, key.removeprefix("branches."), AUTO):
            continue
        if any(f"{key}.".startswith(f"{name}.") for name in by_set):
            source = "--set"
        elif asked.get(key, AUTO) != AUTO:
            source = run.config_file.name
        else:
            source = f"{_decider(key, began)} ({run.config_file.name}: auto)"
        yield key, value, source


def _decider(key: str, began: Mapping[str, Any]) -> str:
    """Who decides what the file leaves open. `began`: by key, what the run that goes on had."""
    if key == LENGTH:
        return "the length of the run"
    if key.startswith("branches.") and key.split(".")[1] in PLANNED:
        return "the planner"
    return "the run that goes on" if key in began else "the preset"


def _decided(run: PreparedRun) -> dict[str, Any]:
    """The `branches` block with what the planner chose in place of "auto"."""
    graph, batches = run.plan.graph, run.plan.batches
    block = {name: getattr(run.block, name) for name in BranchesBlock.__dataclass_fields__}
    block |= {"layout": graph.layout, "schedule": run.plan.schedule}
    block["micro_batch_size"] = {name: batch.micro_batch_size for name, batch in batches.items()}
    block["stages"] = dict(Counter("+".join(stage.layers) for stage in graph.stages))
    block["replicas"] = {name: batch.replicas for name, batch in batches.items()}
    return block


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
