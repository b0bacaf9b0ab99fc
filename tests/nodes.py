"""Several hosts on one machine. Each has namespaces of its own: its network, on a bridge that leads
nowhere else, its name, its processes, its /dev/shm and, where asked for, folders and sshd. They share
the rest of the file system.

For tests and measurements, as root on Linux.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

SSHD = "/usr/sbin/sshd"  # wants to be called by its whole path
OWN = "--uts", "--ipc", "--mount", "--pid"
# The first process of a host, with which all others end; it takes in those that lost their parent.
HOST = """
set -e
mount -t proc proc /proc
mount -t tmpfs shm /dev/shm
mount --bind "$1/hosts-$0" /etc/hosts
hostname "$0"
for own in "${@:2}"; do
    mkdir -p "$1/$0$own" "$own"
    cp -a "$own/." "$1/$0$own" || : # others may write there
    mount --bind "$1/$0$own" "$own"
done
echo up
sleep infinity
:"""


@dataclass(frozen=True)
class Node:
    name: str
    address: str
    pid: int = 0  # of its first process, as it is called outside

    def command(self, *words: str) -> list[str]:
        """That runs these words on the node."""
        return ["nsenter", "--target", str(self.pid), "--net", *OWN, f"--wd={os.getcwd()}", *words]


def lacking(*programs: str) -> str | None:
    """Why no nodes can be made here, or None. `programs`: that they need besides."""
    missing = [name for name in ("ip", "tc", "nsenter", *programs) if not shutil.which(name)]
    if missing:
        return (
            f"needs {', '.join(missing)} (Debian: iproute2, openssh-server, pdsh, openmpi-bin, "
            "slurm-wlm)"
        )
    if os.geteuid():
        return "needs root, to make network namespaces"
    tried = subprocess.run(["ip", "netns", "list"], capture_output=True)
    # a container may forbid it to root, too
    mounting = ["unshare", "--net", "--fork", *OWN, "mount", "-t", "tmpfs", "none", "/dev/shm"]
    made = subprocess.run(mounting, capture_output=True)
    return None if tried.returncode == made.returncode == 0 else "needs network namespaces"


@contextmanager
def nodes(count: int, megabits: int | None = None, own: Sequence[str] = ()) -> Iterator[list[Node]]:
    """As many nodes, removed at the end with all that runs there. `megabits`: a limit per second to
    what each sends. `own`: folders of which each gets a copy."""
    mark = f"wn{os.getpid() % 10_000}"
    made = []
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory()))
        _ip("link", "add", mark, "type", "bridge")
        undo.callback(_ip, "link", "del", mark)
        _ip("link", "set", mark, "up")
        named = [(f"{mark}-{node}", f"10.213.0.{node + 1}") for node in range(count)]
        for name, address in named:
            # its own name stays inside, as Debian's installer has it
            hosts = [("localhost", "127.0.0.1"), *({**dict(named), name: "127.0.1.1"}).items()]
            lines = "".join(f"{to}\t{known}\n" for known, to in hosts)
            (folder / f"hosts-{name}").write_text(lines)
            _ip("netns", "add", name)
            undo.callback(_ip, "netns", "del", name)
            outside = _outside(name)
            _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
            undo.callback(_ip, "link", "del", outside)  # a namespace's own end goes some time later
            _ip("link", "set", outside, "master", mark, "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            pid = undo.enter_context(_started(name, folder, own))
            made.append(Node(name, address, pid))
            if megabits:
                limit = f"root tbf rate {megabits}mbit burst 128kb latency 200ms"
                subprocess.run(
                    made[-1].command("tc", "qdisc", "add", "dev", "eth0", *limit.split()),
                    check=True,
                )
        yield made


@contextmanager
def _started(name: str, folder: Path, own: Sequence[str]) -> Iterator[int]:
    setup = ["bash", "-c", HOST, name, str(folder), *own]
    words = ["ip", "netns", "exec", name, "unshare", "--fork", "--kill-child", *OWN, *setup]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "up\n", f"{name} did not start"
        yield psutil.Process(process.pid).children()[0].pid
    finally:
        process.kill()
        process.wait()


def plug(made: list[Node], number: int, connected: bool) -> None:
    """Put a node's cable in, or pull it out."""
    _ip("link", "set", _outside(made[number].name), "up" if connected else "down")


def _outside(name: str) -> str:
    """The end of a node's cable at the bridge."""
    return f"{name}v"


def see_late(node: Node, folder: Path) -> None:
    """From now on the node sees up to half a minute late what others do in a folder, as with NFS.
    Nothing changes where there is no bindfs."""
    if not (shutil.which("bindfs") and Path("/dev/fuse").exists()):
        return
    late = "attr_timeout=30,entry_timeout=30,negative_timeout=30"
    subprocess.run(node.command("bindfs", "-o", late, str(folder), str(folder)), check=True)


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


@contextmanager
def slurm(made: list[Node], folder: Path) -> Iterator[dict[str, str]]:
    """munged, slurmctld and a slurmd on each node; gives the variables of its commands, which run
    on a node. `folder`: for keys, state and logs."""
    # of sockets, whose whole names may have 107 characters
    spool = Path(tempfile.mkdtemp(prefix="slurm-"))
    key, socket = folder / "munge.key", spool / "munge.socket"
    key.write_bytes(os.urandom(64))
    key.chmod(0o400)
    (folder / "state").mkdir()
    settings = {
        "ClusterName": "wye",
        "SlurmctldHost": made[0].name,
        "SlurmUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={socket}",
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": spool / "%n",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "%n.pid",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SlurmdParameters": "config_overrides",
        "ReturnToService": 2,
        "MessageTimeout": 100,  # on a busy machine a step takes its time to begin
        "NodeName": f"{','.join(node.name for node in made)} CPUs=8",
        "PartitionName": "all Nodes=ALL Default=YES",
    }
    file = folder / "slurm.conf"
    file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # touches none in this version
    of_munged = {"socket": socket, "key-file": key, "pid-file": folder / "munged.pid"}
    of_munged |= {"seed-file": folder / "seed", "log-file": folder / "munged.log"}
    daemons = [
        (
            made[0],
            ["munged", "--foreground", "--force"] + [f"--{k}={v}" for k, v in of_munged.items()],
        ),
        (made[0], ["slurmctld", "-D"]),
        *((node, ["slurmd", "-D", "-N", node.name]) for node in made),
    ]
    variables = {**os.environ, "SLURM_CONF": str(file)}
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, spool, ignore_errors=True)
        log = undo.enter_context((folder / "slurm.log").open("w"))
        for node, words in daemons:
            daemon = subprocess.Popen(
                node.command(*words), env=variables, stdout=log, stderr=subprocess.STDOUT
            )
            undo.callback(daemon.wait)
            undo.callback(daemon.kill)
            while words[0] == "munged" and not socket.exists():
                time.sleep(0.02)
        states: list[str] = []
        deadline = time.monotonic() + 60
        # the controller takes jobs, and loses them, before it has looked for those of earlier
        began = "SchedulerParameters="
        while states != ["idle"] * len(made) or began not in (folder / "slurm.log").read_text():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no Slurm: {(folder / 'slurm.log').read_text()[-3000:]}")
            time.sleep(0.1)
            asked = made[0].command("sinfo", "--noheader", "--Node", "--format=%T")
            shown = subprocess.run(asked, env=variables, capture_output=True, text=True)
            states = shown.stdout.split()
        yield variables
