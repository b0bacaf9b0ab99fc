"""DeepSpeed's launcher on the hosts that are there: what of its command changes at each start."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.run.hosts import Host, Pool, read_hostfile

HOSTFILE = ("--hostfile", "-H")
SPLIT = ("--hostfile", "--num_gpus", "--ssh_port")  # may be written --flag=value
# The hosts are chosen here, so the launcher cannot be told which.
REFUSED = ("--include", "--exclude", "--num_nodes", "--node_rank", "--no_ssh", "--master_addr")


@dataclass(frozen=True)
class Limits:
    """How many ranks a run may have. `most`: None without a limit."""

    least: int
    most: int | None = None

    @classmethod
    def parse(cls, text: str) -> Limits:
        """For argparse: MIN or MIN:MAX."""
        found = re.fullmatch("([1-9][0-9]{0,8})(?::([1-9][0-9]{0,8}))?", text)
        if found is None:
            raise argparse.ArgumentTypeError(
                f"{text!r}: MIN or MIN:MAX is needed, numbers of ranks such as 4:16"
            )
        least, most = int(found[1]), found[2] and int(found[2])
        if most and most < least:
            raise argparse.ArgumentTypeError(f"{text}: MIN is above MAX")
        return cls(least, most or None)


@dataclass(frozen=True)
class ElasticCommand:
    """`words`: of the launcher's command; `place`: of the value among them that each start replaces:
    the hostfile where `has_file`, else the number of GPUs."""

    limits: Limits
    pool: Pool
    words: Sequence[str]
    place: int
    has_file: bool

    def command(self, value: str) -> list[str]:
        return [*self.words[: self.place], value, *self.words[self.place + 1 :]]

    @classmethod
    def of(cls, limits: Limits, command: Sequence[str]) -> ElasticCommand:
        """Errors: ValueError, OSError for a command without a launcher's hosts, or with a file of
        them that cannot be read."""
        words, script = _launcher_words(command)
        places = {}
        for number, word in enumerate(words[:script]):
            if word in REFUSED:
                raise ValueError(
                    f"--elastic chooses the hosts; leave out {word}, and name them in --hostfile"
                )
            if word in (*SPLIT, *HOSTFILE):
                places["--hostfile" if word in HOSTFILE else word] = number + 1
        file, gpus, port = (places.get(flag) for flag in SPLIT)
        if (file is None) == (gpus is None):
            raise ValueError(
                "--elastic needs DeepSpeed's launcher with --hostfile FILE or --num_gpus N before "
                "the script"
                if file is None
                else "--elastic: give --hostfile or --num_gpus, not both; the file says how many "
                "slots a host has"
            )
        if gpus is not None:
            if not re.fullmatch("[1-9][0-9]{0,8}", words[gpus]):
                raise ValueError(
                    f"--num_gpus {words[gpus]!r}: a whole number is needed, the most that --elastic "
                    "takes"
                )
            here = Pool([Host("localhost", int(words[gpus]))], is_here=True)
            return cls(limits, here, words, gpus, has_file=False)
        assert file is not None
        try:
            hosts = read_hostfile(Path(words[file]))
        except OSError as error:
            raise ValueError(
                f"--hostfile {words[file]}: cannot be read ({error.strerror})"
            ) from error
        pool = Pool(hosts, () if port is None else ("-p", words[port]))
        # one host that is left may be another one than this, so it is reached by ssh, too
        forced = [*words[: file - 1], "--force_multi", *words[file - 1 :]]
        return cls(limits, pool, forced, file + 1, has_file=True)


def _launcher_words(command: Sequence[str]) -> tuple[list[str], int]:
    """The words with --flag=value in two, up to the script, and where that is."""
    words: list[str] = []
    for number, word in enumerate(command):
        if word.endswith(".py"):
            return [*words, *command[number:]], len(words)
        flag, equals, value = word.partition("=")
        if equals and flag in (*SPLIT, *REFUSED):
            words += [flag, value]
        else:
            words.append(word)
    return words, len(words)
