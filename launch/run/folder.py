"""The folder of a run: what it is (config.json), what it measured (metrics.jsonl), where it can go
on (checkpoints/)."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import platform
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil

from common import __version__
from common.files import (
    append_text,
    cut_lines,
    lines_from_end,
    make_folder,
    open_own,
    read_json,
    refuse_link,
    remove,
    write_text,
)
from common.secrets import redacted
from data.options import branches_of, derived_of
from data.stored.derived import DERIVED
from engine.checkpoint.layout import replace_text
from engine.planning.planner import RunPlan
from engine.schedule import SCHEDULES
from launch.config.blocks import SampleWeightsBlock
from launch.config.groups import OF_BRANCH
from launch.config.options import ROOT, free_options
from launch.records import RUN_RECORD, flat, read_run
from models.towers.building import Tower

# Keys of the JSON file that may differ when a run goes on: the size of the global batch, how it is
# split and computed. What that does to the numbers is said when the run goes on.
DEEPSPEED_FREE_TO_CHANGE = tuple(
    """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps pipeline
    zero_optimization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    fp16 bf16 data_types communication_data_type prescale_gradients gradient_predivide_factor
    steps_per_print memory_breakdown comms_logger wandb tensorboard csv_monitor comet
    """.split()
)
BRANCHES_SPLIT = tuple(
    "layout stages replicas micro_batch_size schedule kept_micro_batches".split()
)
BRANCHES_FREE_TO_CHANGE = ("max_bad_steps", "compile", "communication", "fit")
PACKAGES = ("torch", "deepspeed", "transformers", "torchvision", "numpy", "pillow")


def choose_folder(run_dir: Path | None, data: Sequence[str]) -> Path:
    """--run-dir, or a new folder below runs/ named after the time and the data. Agents of a sweep
    may start in the same second, so the id that each has given to its run ends the name."""
    if run_dir is not None:
        return run_dir
    kind = "+".join(spec.split(":")[0] for spec in data)
    own = os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None
    return Path("runs") / "-".join(filter(None, (time.strftime("%Y%m%d-%H%M%S"), kind, own)))


class RunFolder:
    """Reads on every rank, writes on the first."""

    def __init__(self, path: Path, first_rank: bool):
        self.path, self.first_rank = path, first_rank
        self.checkpoints = path / "checkpoints"
        # files that grow by lines, of steps and evaluations, of changes of the batches and of the
        # weights of the losses, and of what was left out
        self.metrics = path / "metrics.jsonl"
        self.balance = path / "balance.jsonl"
        self.loss_weights = path / "loss_weights.jsonl"
        self.bad_steps = path / "bad_steps.jsonl"
        self.alerts = path / "alerts.jsonl"
        self.bad_samples = path / "bad_samples.jsonl"
        self.stop = path / "stop"  # who makes this file asks the run to end after its current step
        self.done = path / "done"  # is there when all steps are done
        self.costs = path / "costs.json"  # what the run was planned by, if it was measured
        if path.exists() and not path.is_dir():
            raise ValueError(f"--run-dir {path}: a file of this name exists; give a folder")
        if first_rank:
            make_folder(path)

    def claim(self) -> None:
        """On the first rank, keep other runs out of this folder as long as this object and its
        process live. Errors: ValueError where another one writes there.

        The system releases the lock however the process ends, and no child inherits it (POSIX
        record locks). Where the file system has none, a run of this machine is found by its
        process, and one of another machine is not seen.
        """
        if not self.first_rank:
            return
        for grows in (*self._of_steps, self.bad_samples):
            refuse_link(grows)  # before work is done that could not be recorded
        file = open_own(self.path / "lock")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = file.read().strip()
            if error.errno in (errno.EACCES, errno.EAGAIN) or _is_alive(holder):
                raise ValueError(
                    f"--run-dir {self.path}: another run writes there "
                    f"({holder or 'just started'}); give another folder, or end that run first "
                    f"(touch {self.stop})"
                ) from error
            logging.getLogger("wye").warning(
                "--run-dir %s: its file system has no locks (%s); start no second run there from "
                "another machine",
                *(self.path, error.strerror),
            )
        file.truncate(0)
        file.write(_holder(psutil.Process()))
        file.flush()
        self._lock = file  # to close it, or any other file object of it, would release the lock

    @property
    def _of_steps(self) -> tuple[Path, ...]:
        """Files whose lines have the step that they are of."""
        return self.metrics, self.balance, self.bad_steps, self.loss_weights, self.alerts

    def previous(self) -> dict[str, Any] | None:
        """The configuration of the run this folder already holds; None: it holds none. Errors: as
        `read_run`."""
        return read_run(self.path)

    def refuse_other_run(self, training: Mapping[str, Any], resume: str) -> None:
        """Raise ValueError when the folder holds a run that is not this one. `training`: what is
        known so far of what decides the numbers; `resume`: as --resume."""
        previous = self.previous()
        if previous is None:
            return
        if resume == "never":
            raise ValueError(
                f"--run-dir {self.path}: already holds a run, and --resume is never; give another "
                "folder, or --resume auto"
            )
        before = {key: previous["training"].get(key) for key in training}
        differences = list(_differences(before, redacted(json.loads(json.dumps(training)))))
        if differences:
            listed = [*differences[:8], *(["…"] if len(differences) > 8 else [])]
            shown = "\n".join(f"    {line}" for line in listed)
            raise ValueError(
                f"--run-dir {self.path}: already holds a run with another configuration; give "
                f"another folder, or the same configuration:\n{shown}"
            )

    def write_config(
        self,
        training: Mapping[str, Any],
        decided: Mapping[str, Any],
        plan: RunPlan,
        data: Mapping[str, Any],
        towers: Sequence[Tower],
        total_steps: int,
    ) -> dict[str, Any]:
        """Everything that was decided; returns it. `training`: what `refuse_other_run` compares;
        `decided`: the flags by name, and whatever else is to be kept."""
        record = {
            "version": __version__,
            "training": training,
            **decided,
            "total_steps": total_steps,
            "world_size": plan.graph.world_size,
            "stage_graph": plan.graph.record(),
            "layout": plan.graph.layout,
            "schedule": plan.schedule,
            "trainable": plan.trainable,
            "batches": {branch: batch.record() for branch, batch in plan.batches.items()},
            "data": data,
            "towers": {
                tower.branch: {**tower.config, "num_parameters": tower.num_parameters}
                for tower in towers
            },
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in PACKAGES},
            },
            "git_commit": git_commit(),
        }
        self.mark_done(False)
        record = redacted(record)
        self._replace(
            self.path / RUN_RECORD, json.dumps(record, indent=2, ensure_ascii=False) + "\n"
        )
        return record

    def mark_done(self, done: bool) -> None:
        """Make the file `done`, or take it away."""
        if self.first_rank and done:
            write_text(self.done, "")
        elif self.first_rank:
            remove(self.done, self.path)

    def read_costs(self) -> dict[str, Any] | None:
        """What this run was planned by, if it was measured, and the file is not damaged."""
        try:
            return read_json(self.costs) if self.costs.is_file() else None
        except ValueError:
            return None

    def write_costs(self, costs: Mapping[str, Any]) -> None:
        """What the plan was made by: a run that goes on is planned by the same."""
        self._replace(self.costs, json.dumps(costs) + "\n")

    def forget_after(self, step: int) -> None:
        """Drop what was logged of steps after `step`: the run goes on from there and measures them
        again."""
        for file in self._of_steps if self.first_rank else ():
            cut_lines(file, lambda line: _step_of(line) > step)

    def lacks(self, step: int, held_out: Set[str]) -> bool:
        """Was one of the sets `held_out` not evaluated after `step`? What there is of that
        evaluation is dropped then."""
        evaluated = self.evaluated(step)
        lacks = not held_out <= evaluated.keys()
        if lacks and evaluated and self.first_rank:
            cut_lines(self.metrics, lambda line: _evaluates(line, step))
        return lacks

    def evaluated(self, step: int) -> dict[str, dict[str, float]]:
        """What metrics.jsonl has of the evaluation after `step`, by held-out set; null as nan."""
        # lines come in the order of their steps, and those of an evaluation behind its step's
        lines = (line for _, line in lines_from_end(self.metrics))
        near = takewhile(lambda line: _step_of(line) >= step, lines)
        found = [json.loads(line) for line in near if _evaluates(line, step)]
        return {
            line["held_out"]: {k: math.nan if v is None else v for k, v in line.items()}
            for line in reversed(found)
        }

    def append(self, file: Path, values: Mapping[str, Any]) -> None:
        """One line to one of the files that grow; not-a-number and infinity, which JSON does not
        have, become null."""
        if self.first_rank:
            finite = {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in values.items()
            }
            append_text(file, json.dumps(finite) + "\n")

    def append_loss_weights(self, values: Mapping[str, Any]) -> None:
        """One line to loss_weights.jsonl, unless it ends in that line: a run that goes on decides
        once more what follows from the evaluation at which it begins."""
        _, last = next(lines_from_end(self.loss_weights), (0, ""))
        if self.first_rank and json.dumps(values) != last:
            self.append(self.loss_weights, values)

    def note_bad_sample(
        self, data: str, identity: str, where: str, reason: str, detail: str
    ) -> None:
        """Append a line to bad_samples.jsonl, on whichever rank found it: short enough to be
        written in one piece."""
        record = {
            "data": data,
            "id": identity,
            "where": where,
            "reason": reason,
            "detail": detail[:500],
        }
        append_text(self.bad_samples, json.dumps(redacted(record)) + "\n")

    def refuse_more_bad_steps(
        self, in_a_row: int, most: int, newest_checkpoint: Callable[[], Path | None]
    ) -> None:
        """Raise ValueError when `most` or more steps in a row were skipped because they were not
        finite."""
        if in_a_row >= most:
            raise ValueError(
                f"{in_a_row} steps in a row had a loss or gradients that are not finite, and "
                f'"max_bad_steps" is {most}; the last good checkpoint is '
                f"{newest_checkpoint() or 'not there, none was saved'}. Lower the learning rate, "
                f"or mend the samples that {self.bad_steps} lists; to go on as it is, raise "
                '"max_bad_steps"'
            )

    def _replace(self, path: Path, text: str) -> None:
        if self.first_rank:
            replace_text(path, text)


def _holder(process: psutil.Process) -> str:
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(process.create_time()))
    return f"process {process.pid} on {socket.gethostname()}, started {started}"


def _is_alive(holder: str) -> bool:
    """Is there still the process of this machine that `_holder` has described so?"""
    pid = holder.split(" ")[1] if holder else ""
    return (
        pid.isdigit()
        and psutil.pid_exists(int(pid))
        and _holder(psutil.Process(int(pid))) == holder
    )


def training_identity(
    options: Mapping[str, Any],
    config: Mapping[str, Any],
    branches: Mapping[str, Any],
    plan: RunPlan | None = None,
) -> dict[str, Any]:
    """What decides what a run trains: two runs with equal identities differ by rounding, by
    precision, and by what BatchNorm and dropout see, and by nothing else. Where the schedule has a
    loss per micro-batch the split decides the negatives, so it belongs to what is trained; `plan`
    is known later than the rest. `options`: the flags of train.py by name."""
    # None: "auto", which chooses none with a loss per micro-batch
    schedule = SCHEDULES.get(branches.get("schedule", ""))
    by_split = schedule is not None and schedule.loss_per_micro_batch
    branches = {**branches, "balance": _of_training(branches.get("balance"))}
    if weights := branches.get("sample_weights"):  # with its defaults, however it was written
        branches = {**branches, "sample_weights": vars(SampleWeightsBlock(**weights))}
    # these weights follow the evaluations, so what is trained depends on when they are
    by_evaluation = options["loss_weights"] == "alignment"
    free = [key for key in free_options() if key != "eval_every" or not by_evaluation]
    derived = derived_of(options["pairs"])  # earlier versions did not have all kinds
    free += [kind.most for kind in DERIVED.values() if kind is not derived]
    free += [] if derived else ["max_negatives"]
    # what earlier versions did not have, where it is not used
    free += [name for name in ("weights", "prefixes", "terms") if not options.get(name)]
    free += ["views_per_image"] if options.get("views_per_image", 1) == 1 else []
    if options["image_train_resize_mode"] == "shortest":  # as they cropped, and do not record
        free += ["image_train_resize_mode"]
    named = branches_of(options["pairs"])
    free += [name for each, own in OF_BRANCH.items() if each not in named for name in own.names]
    free_branches = [*BRANCHES_FREE_TO_CHANGE, *(() if by_split else BRANCHES_SPLIT)]
    known = {
        "options": _without(free, options),
        "deepspeed_config": _without(DEEPSPEED_FREE_TO_CHANGE, config),
        "branches": _without(free_branches, branches),
    }
    return {**known, "stages": plan.describe()} if by_split and plan is not None else known


def _of_training(balance: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The `balance` block where it changes what is trained. Packing a global batch in another way
    does not; other feed rates do."""
    balance = balance or {}
    return balance if balance.get("strategy") == "feed" else None


def _step_of(line: str) -> float:
    """Of a line that a run wrote; infinity where the machine went down before it was on the
    disk."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


def _evaluates(line: str, step: int) -> bool:
    """Is the line of metrics.jsonl one of the evaluation after `step`?"""
    return '"held_out"' in line and _step_of(line) == step


def _without(keys: Sequence[str], record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in keys}


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    records = flat(before), flat(now)
    for key in sorted({*records[0], *records[1]}):
        # {} is the same as nothing
        there, here = (None if each.get(key) == {} else each.get(key) for each in records)
        if there != here:
            yield f"{key}: there {json.dumps(there)}, here {json.dumps(here)}"


def git_commit() -> str | None:
    """None where the code came without its history, or there is no git. A copy of the code that
    launch.tools.submit has made has a file that says it."""
    if (ROOT / "COMMIT").is_file():
        return (ROOT / "COMMIT").read_text().strip() or None
    try:
        result = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    return result.stdout.strip() or None
