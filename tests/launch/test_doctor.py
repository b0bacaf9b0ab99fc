"""python -m launch.tools.doctor: on a healthy machine, and on machines with one fault each."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from psutil import process_iter

sys.path.insert(0, str(Path(__file__).parents[1]))
from nodes import lacking, nodes, reached_by_ssh  # noqa: E402

from engine.processes.start import free_port
from launch.tools.doctor import check_launcher
from launch.tools.link_checks import compare
from launch.tools.machine_checks import FAIL, OK, WARN

ROOT = Path(__file__).parents[2]
ISOLATED = lacking()
SSHD = lacking("ssh", "ssh-keygen", "sshd")
# a clock that is a minute ahead
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *found) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, found);
    if (clock == CLOCK_REALTIME) found->tv_sec += 60;
    return status;
}
"""


def words(folder, *arguments):
    command = [sys.executable, "-m", "launch.tools.doctor", "--run-dir", folder / "run"]
    if "--port" not in arguments:
        command += ["--port", free_port()]
    return list(map(str, [*command, "--json", folder / "found.json", *arguments]))


def examined(folder, *arguments, within=()):
    """(exit status, (host, check, what was found) of faults, output). `within`: a command that runs
    what follows it."""
    done = subprocess.run(
        [*within, *words(folder, *arguments)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = json.loads((folder / "found.json").read_text())
    faults = {(f["host"], f["check"]): f["found"] for f in found if f["status"] == "fail"}
    for fault in faults.values():
        assert fault in done.stdout
    return done.returncode, faults, done.stdout


def with_mount(place, size):
    script = f'mount -t tmpfs -o size={size} none "{place}" && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, "sh"]


def with_gpus(monkeypatch, folder, *gpus):
    """A stub of nvidia-smi, first on PATH."""
    (folder / "bin").mkdir()
    stub = folder / "bin" / "nvidia-smi"
    stub.write_text("#!/bin/sh\n" + "".join(f"echo '{gpu}'\n" for gpu in gpus))
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv("DS_ACCELERATOR")


def test_a_healthy_machine_and_its_planned_run(tmp_path):
    """Nothing is left in the run's folder."""
    options = ["--", "--ranks", 8, "--device", "H100", "--run-dir", tmp_path / "run"]
    status, faults, said = examined(tmp_path, *options)
    assert (status, faults) == (0, {}), said
    for word in ("torch", "data: demo", "ranks: 8 ranks", "a step", " a rank (", "\nready"):
        assert word in said
    assert not list((tmp_path / "run").iterdir())


def test_a_taken_port(tmp_path):
    with socket.create_server(("", 0)) as taken:
        status, faults, _ = examined(tmp_path, "--port", taken.getsockname()[1])
    assert status == 1 and [*faults] == [("", "port")]


@pytest.mark.all("makes hosts of network namespaces")
@pytest.mark.skipif(ISOLATED is not None, reason=str(ISOLATED))
def test_a_full_disk(tmp_path):
    (tmp_path / "run").mkdir()
    status, faults, _ = examined(tmp_path, within=with_mount(tmp_path / "run", "16m"))
    assert status == 1 and [*faults] == [("", "disk")]


@pytest.mark.all("makes hosts of network namespaces")
@pytest.mark.skipif(ISOLATED is not None, reason=str(ISOLATED))
def test_a_small_shared_memory(tmp_path):
    status, faults, _ = examined(tmp_path, within=with_mount("/dev/shm", "16m"))
    assert status == 1 and [*faults] == [("", "/dev/shm")]


def test_too_few_open_files(tmp_path):
    status, faults, _ = examined(tmp_path, within=["sh", "-c", 'ulimit -n 128; exec "$@"', "sh"])
    assert status == 1 and faults == {("", "open files"): "at most 128"}


@pytest.mark.all("starts the doctor once more")
def test_unreadable_data(tmp_path):
    options = ["--", "--data", f"jsonl:{tmp_path / 'absent.jsonl'}"]
    status, faults, _ = examined(tmp_path, *options)
    assert status == 1 and "absent.jsonl" in faults["", "planned run"]


def test_a_busy_gpu(tmp_path, monkeypatch):
    with_gpus(monkeypatch, tmp_path, "NVIDIA H100 80GB HBM3, 70000, 81559, 0, 0")
    status, faults, _ = examined(tmp_path)
    assert status == 1 and "70,000" in faults["", "gpus"]


@pytest.fixture(scope="module")
def hosts(module_folder):
    """Three nodes with sshd, of which the last has another torch and a clock that is wrong."""
    if SSHD:
        pytest.skip(SSHD)
    folder = module_folder("hosts")
    other = folder / "packages" / "torch-1.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    (folder / "clock.c").write_text(CLOCK)
    library = str(folder / "clock.so")
    compiler = shutil.which("cc") or shutil.which("g++")
    subprocess.run(
        [compiler, "-x", "c", "-shared", "-fPIC", "-o", library, folder / "clock.c", "-ldl"],
        check=True,
    )
    with nodes(3) as made:
        for node in made:  # a name that /etc/hosts has not
            subprocess.run(node.command("hostname", "unheard-of"), check=True)
        wrong = f"SetEnv PYTHONPATH={other.parent} LD_PRELOAD={library}"
        settings = f"Match LocalAddress {made[2].address}\n{wrong}"
        with reached_by_ssh(made, folder, settings) as wrapped:
            yield made, wrapped


@pytest.fixture
def on_hosts(hosts, tmp_path, monkeypatch):
    made, wrapped = hosts
    monkeypatch.setenv("PATH", f"{wrapped}:{os.environ['PATH']}")
    monkeypatch.delenv("PYTHONPATH", raising=False)

    pdsh = tmp_path / "with_pdsh" / "pdsh"  # the doctor does not start it
    pdsh.parent.mkdir()
    pdsh.touch(0o755)
    monkeypatch.setenv("PATH", f"{pdsh.parent}:{os.environ['PATH']}")

    def of(*addresses, slots=1):
        file = tmp_path / "hosts"
        file.write_text("".join(f"{address} slots={slots}\n" for address in addresses))
        return ["--hostfile", file]

    return of, [node.address for node in made], made[0].command()


@pytest.mark.all("makes hosts of network namespaces")
def test_two_healthy_hosts(on_hosts, tmp_path, monkeypatch):
    hostfile, addresses, here = on_hosts
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    status, faults, said = examined(tmp_path, *hostfile(*addresses[:2], slots=2), within=here)
    # gloo by itself looks up the host's name, which is not known
    assert (status, faults) == (0, {}), said
    assert "within a host" in said and "between hosts" in said and "seen after" in said


@pytest.mark.all("makes hosts of network namespaces")
def test_every_fault_of_a_host_is_named(on_hosts, tmp_path, monkeypatch):
    """One that is not there, another version of torch, a clock that is a minute off."""
    hostfile, (first, _, wrong), here = on_hosts
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    dead = "10.213.0.99"
    status, faults, said = examined(tmp_path, *hostfile(first, wrong, dead), within=here)
    assert status == 1
    assert {*faults} == {
        (dead, "machine"),
        (wrong, "versions"),
        (wrong, "clock"),
    }, said
    assert "torch 1.0" in faults[wrong, "versions"]


@pytest.mark.all("makes hosts of network namespaces")
def test_ctrl_c_ends_what_was_started_on_all_hosts(on_hosts, tmp_path, monkeypatch):
    hostfile, addresses, here = on_hosts
    with_gpus(monkeypatch, tmp_path)
    stub, nap = tmp_path / "bin" / "nvidia-smi", ["sleep", f"60.{os.getpid()}"]
    stub.write_text(f"#!/bin/sh\nexec {' '.join(nap)}\n")
    # without a process that stands between: it would take the signal
    command = [*(word for word in here if word != "--pid"), *words(tmp_path)]
    run = subprocess.Popen(
        [*command, *map(str, hostfile(*addresses[:2]))], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60

    def wait_until_asleep(number):
        while (
            sum(process.info["cmdline"] == nap for process in process_iter(["cmdline"])) != number
        ):
            assert time.monotonic() < deadline
            time.sleep(0.05)

    wait_until_asleep(2)
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=30)
    assert run.returncode == 130 and "interrupted" in said, said
    wait_until_asleep(0)


def test_several_hosts_need_pdsh(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    hosts = {"node1": 8, "node2": 8}
    for program, status in ((None, FAIL), ("mpirun", WARN), ("pdsh", OK)):
        if program:
            (tmp_path / program).touch(0o755)
        ((host, found),) = check_launcher(hosts)
        assert (host, found.status) == ("", status) and ("apt install pdsh" in found.advice) == (
            status != OK
        )
    assert not [*check_launcher({"node1": 8})]  # DeepSpeed starts one host itself


@pytest.mark.all("makes hosts of network namespaces")
@pytest.mark.skipif(ISOLATED is not None, reason=str(ISOLATED))
def test_ranks_meet_where_a_hosts_own_name_stays_inside(monkeypatch):
    """As in Debian's /etc/hosts. The first host is given by its name."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with nodes(2) as made:
        checks = [
            subprocess.Popen(
                node.command(
                    *[sys.executable, "-m", "launch.tools.link_checks", node.name],
                    *[str(number), "1", "2", made[0].name, "29731"],
                ),
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for number, node in enumerate(made)
        ]
        said = [check.communicate(timeout=100)[0] for check in checks]
    assert [check.returncode for check in checks] == [0, 0], said
    assert "between hosts" in said[0]


def test_slow_links_are_compared_with_those_of_their_kind():
    links = [(0, 1, 90e9), (2, 3, 88e9), (0, 2, 9e9), (1, 2, 9e9), (0, 3, 2e9), (1, 3, 8e9)]
    hosts = ["a", "a", "b", "b"]
    slow = compare(hosts, links)
    assert slow.status == WARN and "rank 0 on a and rank 3 on b" in slow.found
    assert "rank 1" not in slow.found and compare(hosts, links[:4]).status == OK


@pytest.mark.parametrize(
    "line", ["", "node1", "node1 slots=0", "-oX slots=1", "a slots=1\na slots=2"]
)
def test_a_wrong_hostfile(line, tmp_path):
    (tmp_path / "hosts").write_text(line)
    command = words(tmp_path, "--hostfile", tmp_path / "hosts")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "slots=8" in done.stderr
