"""Where the processes of a run listen: for strangers on the network, and for others on this
machine."""

import contextlib
import os

import psutil


def listening(run):
    """Where the processes of a run listen now."""
    found = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        leader = psutil.Process(run.pid)
        for process in (leader, *leader.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                found |= {
                    connection.laddr
                    for connection in process.net_connections("inet")
                    if connection.status == psutil.CONN_LISTEN
                }
    return found


def listening_unix(run):
    """The names of the Unix sockets at which the processes of a run listen now."""
    with open("/proc/net/unix") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    names = {row[6]: row[7] for row in rows if int(row[3], 16) & 0x10000 and len(row) > 7}
    held = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        leader = psutil.Process(run.pid)
        for process in (leader, *leader.children(recursive=True)):
            with contextlib.suppress(OSError):
                for handle in os.listdir(f"/proc/{process.pid}/fd"):
                    with contextlib.suppress(OSError):
                        held.add(os.readlink(f"/proc/{process.pid}/fd/{handle}"))
    return {name for inode, name in names.items() if f"socket:[{inode}]" in held}
