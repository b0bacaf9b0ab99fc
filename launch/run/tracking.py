"""Weights & Biases for the first rank. No login and no network never end a run: it goes on offline,
with one line."""

from __future__ import annotations

import logging
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

INIT_TIMEOUT_S = 30


class Tracker:
    """`log` what `metrics.jsonl` gets. A run that goes on continues the same W&B run."""

    def __init__(
        self, mode: str, project: str, folder: Path, config: Mapping[str, Any], first_rank: bool
    ):
        self._run = None
        if mode == "disabled" or not first_rank:
            return
        try:
            self._start(mode, project, folder, config)
        except Exception as error:
            self._give_up(error)

    def _start(self, mode: str, project: str, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        identity = folder / "wandb_run_id"
        run_id = (
            identity.read_text(encoding="utf-8").strip()
            if identity.is_file()
            else uuid.uuid4().hex[:8]
        )
        common = {
            "project": project,
            "name": folder.name,
            "resume": "allow",
            "dir": str(folder),
            "config": dict(config),
        }
        quiet = wandb.Settings(
            init_timeout=INIT_TIMEOUT_S, login_timeout=INIT_TIMEOUT_S, silent=True
        )
        if mode == "online":
            try:
                client = wandb.setup(
                    quiet
                )  # unless it is quiet and verifies nothing, login asks the server, again and again
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
        identity.write_text(run_id + "\n", encoding="utf-8")

    def log(self, values: Mapping[str, Any]) -> None:
        try:
            if self._run is not None:
                self._run.log({k: v for k, v in values.items() if k != "step"}, step=values["step"])
        except Exception as error:
            self._give_up(error)

    def finish(self, exit_code: int = 0) -> None:
        try:
            if self._run is not None:
                self._run.finish(exit_code=exit_code)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Whatever its client raises, training does not depend on it."""
        self._run = None
        logging.getLogger("wye").warning(
            "W&B failed (%s: %s): tracking ends, metrics.jsonl goes on", type(error).__name__, error
        )


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
        "%s: tracking goes on offline; `wandb sync` uploads it later", reason
    )
