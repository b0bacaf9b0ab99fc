"""Signs that a shell has changed a command on its way to this process.

A shell takes `{0..9}`, `*`, `?`, `&`, `;`, `|`, `<`, `>` and quotes of an argument for its own.
DeepSpeed's launcher sends the command to other hosts by `pdsh`, as a text in which only arguments
with a space are quoted, and a shell on each host reads that text. All hosts lose the same, so that
comparing them shows nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import stat
import sys
from pathlib import Path

from common.files import remove

LAUNCHER = "deepspeed.launcher.launch"  # of one host; it starts the ranks
RUNNERS = ("deepspeed", "deepspeed.pt", "ds", "deepspeed.launcher.runner")  # start it without ssh
OF_PDSH = re.compile(r";\s*echo\s+XXRETCODE:\$\?\s*$")  # what `pdsh -S` adds to a command
REMEDY = "put the argument into quotes, or give the arguments in a file, as @FILE"
REMEDY_OVER_SSH = (
    "pdsh quotes no argument without a space: give the arguments in a file that all hosts see, as "
    "@FILE"
)


def refuse_cut_command() -> None:
    """Raise ValueError where the shell that started this process has visibly cut its command. An
    empty file that the shell has made of a piece of it is removed."""
    output = _file_of(os.getpid(), 1)
    if output is not None and output.name.startswith("="):
        _remove_empty(output)
        raise ValueError(
            f"a shell has taken the > of an argument that has >{output.name} in it for `write to a "
            f"file`, and what came after it is not seen here; {REMEDY}"
        )
    if cause := _lost_on_the_way(os.getppid()):
        raise ValueError(f"{cause}, and what came after it is not seen here; {REMEDY_OVER_SSH}")


def _lost_on_the_way(launcher: int) -> str | None:
    """What a shell on this host has done with the command that came by ssh. `launcher`: DeepSpeed's
    of this host, if it is one."""
    if "SSH_CONNECTION" not in os.environ or not is_launcher(launcher):
        return None
    above = command_of(_parent_of(launcher))
    if any(Path(word).name in RUNNERS for word in above[:4]):
        return None  # it has started the ranks of this host itself
    # A shell without job control starts what an & ends with SIGQUIT ignored (POSIX, 2.11), which
    # is passed on; sshd starts the shell without.
    if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
        return "a shell on this host has ended the command at the & of an argument"
    output = _file_of(launcher, 1)
    if output is not None:
        _remove_empty(output)
        return (
            f"a shell on this host has taken the > of an argument for `write to the file "
            f"{output.name}`"
        )
    if "-c" in above[:-1]:
        sign = _first_sign(above[above.index("-c") + 1], sys.argv[0])
        return sign and f"a shell on this host has ended the command at the {sign} of an argument"
    return None


def _first_sign(text: str, script: str) -> str | None:
    """The first sign outside quotes that ends a command, after the name of the script."""
    after = OF_PDSH.sub("", text).rpartition(script)[2]
    words = shlex.shlex(after, posix=True, punctuation_chars=";|&")
    words.commenters = ""
    try:
        return next((word for word in words if word[0] in ";|&"), None)
    except ValueError:  # a quote that nothing closes, of which a shell has said so
        return None


def is_launcher(process: int) -> bool:
    """Whether it is DeepSpeed's launcher of one host."""
    return any(LAUNCHER in word for word in command_of(process))


def command_of(process: int) -> list[str]:
    """Its words; none where it is gone."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        return [os.fsdecode(word) for word in words]
    return []


def _parent_of(process: int) -> int:
    with contextlib.suppress(OSError):  # the name of a program may hold spaces and brackets
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _file_of(process: int, number: int) -> Path | None:
    """The regular file that a process has open under this number."""
    with contextlib.suppress(OSError):
        link = f"/proc/{process}/fd/{number}"
        return Path(os.readlink(link)) if stat.S_ISREG(os.stat(link).st_mode) else None
    return None


def _remove_empty(file: Path) -> None:
    with contextlib.suppress(OSError):  # another rank has removed it
        if file.stat().st_size == 0:
            remove(file, within=file.parent)
