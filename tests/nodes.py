"""Several nodes on one machine: network namespaces on a bridge that leads nowhere else, each with
its own addresses, loopback and, if asked for, sshd. They share the file system.

For tests and measurements, as root on Linux.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

SSHD = "/usr/sbin/sshd"  # wants to be called by its whole path


@dataclass(frozen=True)
class Node:
    name: str
    address: str

    def command(self, *words: str) -> list[str]:
        """That runs these words on the node, which is called by its own name there."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name]
        return ["ip", "netns", "exec", self.name, *named, *words]


def lacking(*programs: str) -> str | None:
    """Why no nodes can be made here, or None. `programs`: that they need besides."""
    missing = [name for name in ("ip", "tc", *programs) if not shutil.which(name)]
    if missing:
        return f"needs {', '.join(missing)} (Debian: iproute2, openssh-server, pdsh)"
    if os.geteuid():
        return "needs root, to make network namespaces"
    tried = subprocess.run(["ip", "netns", "list"], capture_output=True)
    # a container may forbid it to root, too
    made = subprocess.run(["unshare", "--net", "true"], capture_output=True)
    return None if tried.returncode == made.returncode == 0 else "needs network namespaces"


@contextmanager
def nodes(count: int, megabits: int | None = None) -> Iterator[list[Node]]:
    """As many nodes, removed at the end. `megabits`: a limit per second to what each sends."""
    mark = f"wn{os.getpid() % 10_000}"
    made = [Node(f"{mark}-{node}", f"10.213.0.{node + 1}") for node in range(count)]
    with ExitStack() as undo:
        _ip("link", "add", mark, "type", "bridge")
        undo.callback(_ip, "link", "del", mark)
        _ip("link", "set", mark, "up")
        for node in made:
            _ip("netns", "add", node.name)
            undo.callback(_ip, "netns", "del", node.name)
            outside = _outside(node)
            _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", node.name)
            undo.callback(_ip, "link", "del", outside)  # a namespace's own end goes some time later
            _ip("link", "set", outside, "master", mark, "up")
            _ip("-n", node.name, "addr", "add", f"{node.address}/24", "dev", "eth0")
            _ip("-n", node.name, "link", "set", "eth0", "up")
            _ip("-n", node.name, "link", "set", "lo", "up")
            if megabits:
                limit = f"root tbf rate {megabits}mbit burst 128kb latency 200ms"
                subprocess.run(
                    node.command("tc", "qdisc", "add", "dev", "eth0", *limit.split()), check=True
                )
        yield made


def plug(made: list[Node], number: int, connected: bool) -> None:
    """Put a node's cable in, or pull it out."""
    _ip("link", "set", _outside(made[number]), "up" if connected else "down")


def _outside(node: Node) -> str:
    """The end of its cable at the bridge."""
    return f"{node.name}v"


@contextmanager
def reached_by_ssh(made: list[Node], folder: Path, *settings: str) -> Iterator[Path]:
    """sshd on each node; gives a folder for the head of PATH, whose `ssh` gets there without a
    password. `folder`: for keys and logs; `settings`: more lines of sshd_config."""
    for key in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True
        )
    shutil.copy(folder / "user.pub", folder / "authorized")
    Path("/run/sshd").mkdir(exist_ok=True)
    lines = [
        f"HostKey {folder / 'host'}",
        f"AuthorizedKeysFile {folder / 'authorized'}",
        "PidFile none",
        "StrictModes no",
        "UsePAM no",
        "PermitRootLogin yes",
        *settings,
    ]
    (folder / "sshd_config").write_text("\n".join(lines) + "\n")
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    wrapper = bin_folder / "ssh"
    wrapper.write_text(
        f'#!/bin/sh\nexec {shutil.which("ssh")} -F /dev/null -i "{folder}/user" -o LogLevel=ERROR '
        '-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o ServerAliveInterval=5 "$@"\n'
    )
    wrapper.chmod(0o755)
    with ExitStack() as undo:
        for node in made:
            log = undo.enter_context((folder / f"sshd-{node.name}.log").open("w"))
            server = subprocess.Popen(
                node.command(SSHD, "-D", "-e", "-f", str(folder / "sshd_config")), stderr=log
            )
            undo.callback(server.wait)
            undo.callback(server.terminate)
        for node in made:
            _until_reached(made[0], node, str(wrapper))
        yield bin_folder


def _until_reached(source: Node, node: Node, ssh: str) -> None:
    for _ in range(100):
        tried = subprocess.run(
            source.command(ssh, node.address, "true"), capture_output=True, text=True
        )
        if tried.returncode == 0:
            return
        time.sleep(0.1)
    raise TimeoutError(f"no ssh to {node.address}: {tried.stderr}")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
