"""The number of CPUs that may be used, by files of control groups under a made-up root."""

import os
import re
from pathlib import Path

import pytest

from common.cpus import quota, usable_cpus


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Write files below a root; the process is bound to 64 CPUs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))

    def machine(**files):
        for name, text in files.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path

    return machine


def of_2(path):
    return f"sys/fs/cgroup/{path}cpu.max"


def of_1(mounted, name):
    return f"sys/fs/cgroup/{mounted}/cpu.cfs_{name}_us"


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, 64),
        ({"proc/self/cgroup": "0::/\n", of_2(""): "200000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", of_2(""): "150000 100000\n"}, 2),  # a part counts as one
        ({"proc/self/cgroup": "0::/\n", of_2(""): "5000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", of_2(""): "max 100000\n"}, 64),
        ({"proc/self/cgroup": "0::/\n", of_2(""): "9900000 100000\n"}, 64),
        # a group above has less
        (
            {
                "proc/self/cgroup": "0::/pods/one/main\n",
                of_2("pods/one/main/"): "800000 100000",
                of_2("pods/one/"): "max 100000",
                of_2("pods/"): "300000 100000",
            },
            3,
        ),
        # the path is the host's, of which the container sees its own group alone
        ({"proc/self/cgroup": "0::/host/docker/1f\n", of_2(""): "400000 100000"}, 4),
        ({"proc/self/cgroup": "0::/../../x\n", of_2(""): "400000 100000"}, 4),
        # version 1
        (
            {
                "proc/self/cgroup": "4:memory:/a\n3:cpu,cpuacct:/a\n2:cpuset:/a\n0::/\n",
                of_1("cpu,cpuacct/a", "quota"): "250000\n",
                of_1("cpu,cpuacct/a", "period"): "50000\n",
                of_1("cpu,cpuacct", "quota"): "-1\n",
                of_1("cpu,cpuacct", "period"): "100000\n",
            },
            5,
        ),
        (
            {
                "proc/self/cgroup": "3:cpuacct,cpu:/\n",
                of_1("cpu", "quota"): "700000",
                of_1("cpu", "period"): "100000",
            },
            7,
        ),
    ],
)
def test_the_least_of_affinity_and_quotas(machine, files, cpus):
    assert usable_cpus(machine(**files)) == cpus


def test_affinity_below_the_quota(machine, monkeypatch):
    root = machine(**{"proc/self/cgroup": "0::/a/b\n", of_2("a/"): "800000 100000"})
    assert quota(root) == (8.0, "/a")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 4})
    assert usable_cpus(root) == 2


def test_nothing_else_counts_cpus():
    """Where a rank is says which CPUs it is bound to, not how many it may use."""
    root = Path(__file__).resolve().parents[2]
    rooms = ("common", "data", "engine", "launch", "models")
    files = [*root.glob("*.py"), *(file for room in rooms for file in (root / room).rglob("*.py"))]
    asks = re.compile(r"\bcpu_count\(|sched_getaffinity\(")
    found = {file.relative_to(root).as_posix() for file in files if asks.search(file.read_text())}
    assert found == {"common/cpus.py", "engine/processes/places.py"}
