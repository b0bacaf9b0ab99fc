"""Whether Weights & Biases is used: what the command line, the JSON file and W&B's own client
say."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from launch.config.groups import WANDB_MODES

if TYPE_CHECKING:  # the command line reads this module, and needs no DeepSpeed
    from deepspeed.monitor.config import WandbConfig

# words of W&B's own WANDB_MODE: older ones, and one for runs of several writers
SAME_AS = {"dryrun": "offline", "run": "online", "shared": "online"}
HOW_TO_SWITCH_IT_ON = (
    "W&B: off, because no login was found; run `wandb login` to track runs, or add --wandb offline "
    "to record this one for `wandb sync`"
)


def choose_mode(asked: str, block: WandbConfig) -> tuple[str, str]:
    """The mode, "online", "offline" or "disabled", and a line for the user or an empty one.
    `asked`: as --wandb; `block`: the JSON's `wandb`.

    "auto": what WANDB_MODE or W&B's settings say, else what `enabled` of the block says, else
    online where W&B's client has a login. A WANDB_MODE that W&B does not know, which would keep its
    client from starting, is taken out of the environment.
    """
    told = os.environ.get("WANDB_MODE", "")
    if told not in (*WANDB_MODES[1:], *SAME_AS):
        os.environ.pop("WANDB_MODE", None)
    if asked != "auto":
        return asked, ""
    if told and "WANDB_MODE" not in os.environ:
        words = ", ".join(WANDB_MODES[1:])
        return "disabled", f"W&B: off, because WANDB_MODE is {told!r}; set it to one of {words}"
    # transformers' variable, which W&B's client does not know
    if os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1"):
        return "disabled", ""
    try:
        # takes half a second to import
        import wandb

        settings = wandb.setup(wandb.Settings(silent=True)).settings
    except Exception as error:  # a settings file that is damaged, for example
        reason = " ".join(str(error).split())
        return "disabled", f"W&B: off, because its client does not start ({reason})"
    mode, notice = "online", ""
    if "mode" in settings.model_fields_set:
        mode = SAME_AS.get(settings.mode, settings.mode)
        if settings.mode == "shared":
            notice = "W&B: its mode is shared; one process writes a run here, so it is online"
    elif "enabled" in block.model_fields_set:
        mode = "online" if block.enabled else "disabled"
    else:
        # a key that cannot be one raises: starting the run says so
        with suppress(Exception):
            if not wandb.login(prompt=False, verify=False):
                mode, notice = "disabled", HOW_TO_SWITCH_IT_ON
    if mode == "disabled":
        wandb.teardown()  # ends the process that `setup` has started
    return mode, notice
