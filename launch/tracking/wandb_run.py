"""The W&B run of a training run. No login and no network never end a run: it goes on offline, with
one line."""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from common.files import make_folder, write_text
from common.output import only_shows, plain
from common.secrets import redact, redacted
from launch.tracking.alerts import Alert

INIT_TIMEOUT_S = 30
IDENTITY = "wandb_run_id"  # a file in the run's folder
STEP = "step"


def _never_ends_a_run(method: Callable) -> Callable:
    """Whatever W&B's client raises, training does not depend on it: tracking ends, with one
    line."""

    @wraps(method)
    def guarded(self: WandbRun, *arguments: Any, **keywords: Any) -> Any:
        if self._run is None:
            return None
        try:
            return method(self, *arguments, **keywords)
        except Exception as error:
            self._give_up(error)
            return None

    return guarded


class WandbRun:
    """A run that goes on continues the same W&B run, and so do the pieces that were recorded
    offline: `wandb sync` uploads all pieces with one id in the order in which they were made.

    `where`: arguments of `wandb.init` that are not None: project, group, entity. `mode`: "online",
    "offline" or "disabled".
    """

    def __init__(
        self,
        mode: str,
        folder: Path,
        where: Mapping[str, str | None],
        config: Mapping[str, Any],
        job_type: str | None = "train",
    ):
        self.folder = folder
        self._run: Any = None  # wandb's
        self._notes: dict[str, Any] = {}
        if mode == "disabled":
            return
        given = {key: value for key, value in where.items() if value is not None}
        common = given | {
            "name": folder.name,
            "resume": "allow",
            "dir": str(folder),
            "config": redacted(config),
            "job_type": job_type,
        }
        try:
            self._start(mode, common)
        except Exception as error:
            self._give_up(error)

    def _start(self, mode: str, common: Mapping[str, Any]) -> None:
        import wandb

        # pictures of tables wait there for their upload: beside the run, not in the user's home
        os.environ.setdefault("WANDB_DATA_DIR", str(self.folder.absolute() / "wandb" / "data"))
        make_folder(self.folder / "wandb", within=self.folder)
        identity = self.folder / IDENTITY
        run_id = (
            identity.read_text(encoding="utf-8").strip()
            if identity.is_file()
            # the agent of a sweep has chosen one
            else os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8]
        )
        quiet = wandb.Settings(
            init_timeout=INIT_TIMEOUT_S,
            login_timeout=INIT_TIMEOUT_S,
            silent=True,
            # it records the command line as it was given
            x_disable_meta=redact(given := shlex.join(sys.argv)) != given,
        )
        if mode == "online":
            try:
                # unless it is quiet and verifies nothing, login asks the server, again and again
                client = wandb.setup(quiet)
                if wandb.login(prompt=False, verify=False):
                    _reach(client.settings.base_url, INIT_TIMEOUT_S)
                    self._run = wandb.init(mode="online", id=run_id, settings=quiet, **common)
                else:
                    _say_offline("no W&B login was found (run `wandb login`)")
            except Exception as error:
                _say_offline(f"W&B could not be reached ({type(error).__name__}: {error})")
                # forget the failed start, so that the same run id can go on offline
                wandb.teardown()
        if self._run is None:
            self._run = wandb.init(mode="offline", id=run_id, settings=quiet, **common)
        write_text(identity, run_id + "\n")
        # every chart has the step of training as its axis, media and alerts too
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)

    @property
    def is_on(self) -> bool:
        return self._run is not None

    @_never_ends_a_run
    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Numbers, and W&B's media."""
        self._run.log({**values, STEP: step}, step=step)

    @_never_ends_a_run
    def draw(self, step: int, name: str, make: Callable[[], Any]) -> None:
        """`make` returns a figure of plotly."""
        import wandb

        figure = _made(name, make)
        if figure is not None:
            self._run.log({name: wandb.Plotly(figure), STEP: step}, step=step)

    @_never_ends_a_run
    def note(self, step: int, name: str, text: str) -> None:
        """One more row of a table of sentences."""
        import wandb

        table = self._notes.get(name)
        if table is None:
            table = self._notes[name] = wandb.Table(["step", "reason"], log_mode="INCREMENTAL")
        table.add_data(step, text)
        self._run.log({name: table, STEP: step}, step=step)

    @_never_ends_a_run
    def table(self, step: int, name: str, make: Callable[[], Any]) -> None:
        """`make` returns a wandb.Table."""
        table = _made(name, make)
        if table is not None:
            self._run.log({name: table, STEP: step}, step=step)

    @_never_ends_a_run
    def alert(self, alert: Alert) -> None:
        self._run.alert(title=alert.title, text=alert.text, level=alert.level)

    @_never_ends_a_run
    def summarize(self, values: Mapping[str, Any]) -> None:
        """What is said of the run as a whole."""
        self._run.summary.update(dict(values))

    @_never_ends_a_run
    def model(self, folder: Path, aliases: Sequence[str], metadata: Mapping[str, Any]) -> None:
        """All files of `folder` as an artifact, named after the run's folder."""
        import wandb

        name = re.sub(r"[^\w.-]", "_", self.folder.resolve().name, flags=re.ASCII)
        artifact = wandb.Artifact(name, type="model", metadata=dict(metadata))
        artifact.add_dir(str(folder))
        self._run.log_artifact(artifact, aliases=list(aliases))

    @_never_ends_a_run
    def finish(self, exit_code: int = 0) -> None:
        self._run.finish(exit_code=exit_code)

    def _give_up(self, error: Exception) -> None:
        self._run = None
        logging.getLogger("wye").warning(
            "W&B failed (%s: %s): tracking ends, metrics.jsonl goes on",
            type(error).__name__,
            plain(str(error)),
        )


def _made(name: str, make: Callable[[], Any]) -> Any:
    """What `make` returns. None where it fails: a picture less is no reason to track no more."""
    with only_shows(f"{name} is not shown in W&B"):
        return make()
    return None


def _reach(url: str, timeout_s: float) -> None:
    """Raise ConnectionError unless something answers at `url` within `timeout_s` seconds, whatever
    it answers.

    Asked before W&B's client, which tries again for minutes; in a thread, because looking up a name
    has no time limit.
    """
    outcome: list[BaseException | None] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(url, timeout=timeout_s).close()
        except urllib.error.HTTPError:
            outcome.append(None)  # a refusal is an answer
        except Exception as error:
            outcome.append(error)
        else:
            outcome.append(None)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(timeout_s)
    if not outcome:
        raise ConnectionError(f"no answer from {url} within {timeout_s:g} s")
    if outcome[0] is not None:
        raise ConnectionError(f"no answer from {url}: {outcome[0]}")


def _say_offline(reason: str) -> None:
    logging.getLogger("wye").warning(
        "%s: tracking goes on offline; `wandb sync` uploads it later", plain(reason)
    )
