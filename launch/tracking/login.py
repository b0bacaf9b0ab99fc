"""Whether Weights & Biases is used: what the command line, the JSON file and the machine say. Reads
a few small files; W&B's client, which takes a second to import, is not needed for that."""

from __future__ import annotations

import configparser
import netrc
import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:  # the command line reads this module, and needs no DeepSpeed
    from deepspeed.monitor.config import WandbConfig

SERVER = "https://api.wandb.ai"
MODES = ("auto", "online", "offline", "disabled")
SAME_AS = {"dryrun": "offline", "run": "online"}  # older words of W&B's own WANDB_MODE
HOW_TO_SWITCH_IT_ON = (
    "W&B: off, because no login was found; run `wandb login` to track runs, or add --wandb offline "
    "to record this one for `wandb sync`"
)


def choose_mode(asked: str, block: WandbConfig) -> tuple[str, str]:
    """The mode, "online", "offline" or "disabled", and a line for the user or an empty one.
    `asked`: as --wandb; `block`: the JSON's `wandb`.

    "auto": what WANDB_MODE or W&B's settings say, else what `enabled` of the block says, else
    online where a login is found.
    """
    if asked != "auto":
        return asked, ""
    if own := _own_mode():
        return own, ""
    if "enabled" in block.model_fields_set:
        return ("online" if block.enabled else "disabled"), ""
    return ("online", "") if login_found() else ("disabled", HOW_TO_SWITCH_IT_ON)


def login_found() -> bool:
    """Does W&B's client find a login for its server: in the environment, in netrc or in its
    settings? Whether the server takes it is not asked."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    settings = _settings()
    if settings.get("api_key") or settings.get("identity_token_file"):
        return True
    server = os.environ.get("WANDB_BASE_URL") or settings.get("base_url") or SERVER
    try:
        return netrc.netrc(_netrc_file()).authenticators(urlsplit(server).netloc) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _own_mode() -> str | None:
    """What the user has told W&B's client for all programs; None: nothing."""
    settings = _settings()
    if (os.environ.get("WANDB_DISABLED") or settings.get("disabled", "")).lower() in ("true", "1"):
        return "disabled"
    mode = (os.environ.get("WANDB_MODE") or settings.get("mode", "")).lower()
    mode = SAME_AS.get(mode, mode)
    return mode if mode in MODES[1:] else None


def _settings() -> dict[str, str]:
    """Of W&B's settings files, the one of the working directory before the user's; empty where
    there are none that can be read."""
    folder = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
    here = Path(os.environ.get("WANDB_DIR") or ".").expanduser() / "wandb"
    parser = configparser.ConfigParser(interpolation=None)
    for file in (folder / "settings", here / "settings"):
        try:
            parser.read(file, encoding="utf-8")
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue
    return dict(parser["default"]) if parser.has_section("default") else {}


def _netrc_file() -> Path:
    """As W&B's client chooses it."""
    if given := os.environ.get("NETRC"):
        return Path(given).expanduser()
    usual, windows = Path("~/.netrc").expanduser(), Path("~/_netrc").expanduser()
    return windows if not usual.exists() and windows.exists() else usual
