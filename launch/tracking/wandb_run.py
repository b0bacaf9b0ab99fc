"""The W&B run of a training run, and an export as its artifact. Without a login or a network it is
recorded offline, with one line."""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.files import make_folder, refuse_links_out_of, write_text
from common.output import only_shows, plain
from common.secrets import redact, redacted
from launch.tracking.alerts import Alert
from launch.tracking.backend import Backend
from launch.tracking.login import choose_mode

if TYPE_CHECKING:
    from launch.inference.trained import Trained

INIT_TIMEOUT_S = 30
IDENTITY = "wandb_run_id"  # a file in the run's folder
STEP = "step"


class WandbRun(Backend):
    """A run that goes on continues the same W&B run, and so do the pieces that were recorded
    offline: `wandb sync` uploads all pieces with one id in the order in which they were made.

    `mode`: "online" or "offline"; `where`: arguments of `wandb.init` that are not None: project,
    group, entity.
    """

    def __init__(
        self,
        mode: str,
        folder: Path,
        where: Mapping[str, str | None],
        config: Mapping[str, Any],
        job_type: str | None = "train",
    ):
        import wandb

        self.folder = folder
        self._notes: dict[str, Any] = {}  # tables by name
        # pictures of tables wait there for their upload: beside the run, not in the user's home
        os.environ.setdefault("WANDB_DATA_DIR", str(folder.absolute() / "wandb" / "data"))
        refuse_links_out_of(make_folder(folder / "wandb", within=folder))
        identity, command = folder / IDENTITY, shlex.join(sys.argv)
        run_id = identity.read_text(encoding="utf-8").strip() if identity.is_file() else None
        # the agent of a sweep has chosen an id
        run_id = run_id or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8]
        settings = wandb.Settings(
            init_timeout=INIT_TIMEOUT_S,
            login_timeout=INIT_TIMEOUT_S,
            silent=True,
            # it records the command line as it was given
            x_disable_meta=redact(command) != command,
        )
        given = {key: value for key, value in where.items() if value is not None}
        how: dict[str, Any] = given | {
            "id": run_id,
            "settings": settings,
            "name": folder.name,
            "resume": "allow",
            "dir": str(folder),
            "config": redacted(config),
            "job_type": job_type,
        }
        self._run: Any = _online(how) if mode == "online" else None
        if self._run is None:
            self._run = wandb.init(mode="offline", **how)
        write_text(identity, run_id + "\n")
        # every chart has the step of training as its axis, media and alerts too
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, values: Mapping[str, Any], step: int, samples: int | None) -> None:
        # W&B draws None as a gap
        self._run.log({**values, STEP: step}, step=step)

    def note(self, name: str, text: str, step: int) -> None:
        """One more row of a table of sentences."""
        import wandb

        if name not in self._notes:
            self._notes[name] = wandb.Table(["step", "reason"], log_mode="INCREMENTAL")
        self._notes[name].add_data(step, text)
        self.log({name: self._notes[name]}, step, None)

    def alert(self, alert: Alert, step: int) -> None:
        self._run.alert(title=alert.title, text=alert.text, level=alert.level)

    def media(self, name: str, make: Callable[[], Any], step: int) -> None:
        # a picture less is no reason to track no more
        with only_shows(f"{name} is not shown in W&B"):
            self.log({name: make()}, step, None)

    def summarize(self, name: str, text: str) -> None:
        self._run.summary[name] = text

    def finish(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)

    def model(self, folder: Path, aliases: Sequence[str], metadata: Mapping[str, Any]) -> None:
        """All files of `folder` as an artifact, named after the run's folder."""
        import wandb

        name = re.sub(r"[^\w.-]", "_", self.folder.resolve().name, flags=re.ASCII)
        artifact = wandb.Artifact(name, type="model", metadata=dict(metadata))
        artifact.add_dir(str(folder))
        self._run.log_artifact(artifact, aliases=list(aliases))


def log_export(
    trained: Trained, run_dir: Path, export: Path, averaged: bool, place: Mapping[str, str | None]
) -> None:
    """Adds all files of the export to the run, as a new version with the aliases `latest`, `step-N`
    and, for the moving average of the weights, `ema`. `place`: of the run, as `WandbRun` has `where`.
    A run that was not tracked gets its W&B run now. Without a login or a network it is recorded
    offline; a failure is one warning."""
    from deepspeed.monitor.config import WandbConfig  # which a W&B run does without

    # asked for by name, so online unless W&B's own settings say otherwise
    mode, notice = choose_mode("auto", WandbConfig(enabled=True))
    if mode == "disabled":
        reason = notice or "W&B: off, by WANDB_MODE, WANDB_DISABLED or the settings of its client"
        logging.getLogger("wye").warning("the export is not in W&B; %s", reason)
        return
    with only_shows("the export is not in W&B"):
        run = WandbRun(mode, run_dir, place, {}, job_type=None)
        aliases = ["latest", f"step-{trained.step}", *(["ema"] if averaged else [])]
        run.model(export, aliases, {"step": trained.step, "averaged": averaged})
        run.finish(0)


def _online(how: dict[str, Any]) -> Any:
    """wandb's run; None, with one line, without a login or where the server does not answer."""
    import wandb

    try:
        # unless it is quiet and verifies nothing, login asks the server, again and again
        wandb.setup(how["settings"])
        if wandb.login(prompt=False, verify=False):
            return wandb.init(mode="online", **how)
        reason = "no W&B login was found (run `wandb login`)"
    except Exception as error:
        reason = f"W&B could not be reached ({type(error).__name__}: {error})"
        # forget the failed start, so that the same run id can go on offline
        wandb.teardown()
    logging.getLogger("wye").warning(
        "%s: tracking goes on offline; `wandb sync` uploads it later", plain(reason)
    )
    return None
