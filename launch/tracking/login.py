"""Whether Weights & Biases is used: what the command line, the JSON file and W&B's own client
say."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line reads this module, and needs no DeepSpeed
    from deepspeed.monitor.config import WandbConfig

SAME_AS = {"dryrun": "offline", "run": "online"}  # older words of W&B's own WANDB_MODE
HOW_TO_SWITCH_IT_ON = (
    "W&B: off, because no login was found; run `wandb login` to track runs, or add --wandb offline "
    "to record this one for `wandb sync`"
)


def choose_mode(asked: str, block: WandbConfig) -> tuple[str, str]:
    """The mode, "online", "offline" or "disabled", and a line for the user or an empty one.
    `asked`: as --wandb; `block`: the JSON's `wandb`.

    "auto": what WANDB_MODE or W&B's settings say, else what `enabled` of the block says, else
    online where W&B's client has a login.
    """
    if asked != "auto":
        return asked, ""
    # transformers' variable, which W&B's client does not know
    if os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1"):
        return "disabled", ""
    try:
        # takes half a second to import
        import wandb

        settings = wandb.setup(wandb.Settings(silent=True)).settings
    except Exception as error:  # a settings file that is damaged, for example
        return "disabled", f"W&B: off, because its client does not start ({error})"
    if "mode" in settings.model_fields_set:
        return SAME_AS.get(settings.mode, settings.mode), ""
    if "enabled" in block.model_fields_set:
        return ("online" if block.enabled else "disabled"), ""
    try:
        found = wandb.login(prompt=False, verify=False)
    except Exception:  # a key that cannot be one: starting the run says so
        found = True
    return ("online", "") if found else ("disabled", HOW_TO_SWITCH_IT_ON)
