"""Starting processes: where they are, how they communicate, and what is refused before a GPU is
touched."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

import psutil
import pytest
import torch.distributed as dist
from ranks import run_ranks
from refusals import refused
from unlike_cases import compare_records, start_unlike

from engine.processes import places as places_module
from engine.processes.communication import communication_of
from engine.processes.launchers import adopt_launcher
from engine.processes.ops import _check_path
from engine.processes.places import Place, Places, RefusedByFirstRank, meet, own_address
from engine.processes.start import QUEUES, _prepare_devices, free_port, prepare_for
from engine.processes.store import meeting, open_store


def on(nodes, devices, num_devices=1, kind="cuda", **alike):
    """Places of ranks, by the names of their nodes and devices."""
    alike = {"accelerator": kind, **alike}
    return [
        Place(node, node, device, num_devices, 0, alike) for node, device in zip(nodes, devices)
    ]


def test_ranks_communicate_from_device_to_device_where_each_has_its_own():
    for asked, kind, told, chosen in (
        ("auto", "cuda", on("aabb", "0123", 2), "device"),
        # each process sees one GPU, its own (Slurm's --gpus-per-task, Kubernetes), on any nodes
        ("auto", "cuda", on("aaaa", "0123"), "device"),
        ("device", "cuda", on("abcc", "0123"), "device"),
        ("auto", "cuda", on("aa", "00"), "host"),
        ("host", "cuda", on("aab", "001"), "host"),
        ("host", "cuda", on("aa", "01", 2), "host"),
        ("device", "cpu", on("aab", "aab", kind="cpu"), "host"),
    ):
        assert communication_of(asked, kind, told) == chosen, (asked, kind, told)


UNLIKE_TORCH = on("a", "0", torch="2.9") + on("bcdefg", "123456", torch="2.10")


@pytest.mark.parametrize(
    ("asked", "told", "words"),
    [
        ("device", on("aa", "00"), "ranks 0 and 1 … 2 processes, which see 1 GPU … --num_gpus 1"),
        ("auto", on("abb", "011"), 'ranks 1 and 2 take the same GPU … the node b … "host"'),
        # two containers that are given one GPU
        ("auto", on("ab", "00"), 'the node a has 1 process, … "communication": "host"'),
        ("auto", on("aa", "00", 2), "ranks 0 and 1 … LOCAL_RANK"),
        ("host", on("ab", ["0", ""], 0), "DS_ACCELERATOR asks for cuda … on the node b"),
        ("auto", UNLIKE_TORCH, 'torch: "2.9" on rank 0; "2.10" on ranks 1, 2, 3, 4 and 2 more'),
        (
            "auto",
            on("a", "0") + on("b", "1", kind="cpu"),
            'accelerator: "cuda" on rank 0; "cpu" on',
        ),
    ],
)
def test_ranks_that_may_not_share_gpus_or_are_unlike_hear_it_from_the_first(
    met, asked, told, words
):
    """Through a store, as before there is a process group: one message, and nobody waits."""
    said = met(told, partial(communication_of, asked, "cuda"))
    assert [type(one) for one in said] == [ValueError] + [RefusedByFirstRank] * (len(told) - 1)
    with refused(words):
        raise said[0]


def test_a_host_that_waits_for_each_kernel_is_refused_where_kernels_wait_for_ranks(met):
    told = on("ab", "01")
    told[1] = replace(told[1], launch_blocking=True)
    first, second = met(told, partial(communication_of, "auto", "cuda"))
    with refused(
        'CUDA_LAUNCH_BLOCKING is set for rank 1 of 2 … Unset it … "communication": "host"'
    ):
        raise first
    assert isinstance(second, RefusedByFirstRank)
    assert communication_of("host", "cuda", told) == "host"
    assert communication_of("auto", "cuda", told[1:]) == "device"


@pytest.mark.parametrize(
    ("given", "ranks", "taken", "said"),
    [("", 8, "32", ""), ("1", 8, "32", "1"), ("8", 2, "32", "8"), ("32", 2, "32", "")]
    + [("1", 1, "1", ""), ("many", 2, "many", "")],
)
def test_ranks_have_queues_enough(given, ranks, taken, said, monkeypatch):
    """Megatron's environments have CUDA_DEVICE_MAX_CONNECTIONS=1."""
    monkeypatch.setattr(os, "environ", {QUEUES: given} if given else {})
    assert _prepare_devices(ranks) == said and os.environ[QUEUES] == taken


def test_what_a_process_finds_is_said(monkeypatch):
    for value, blocking in ((None, False), ("0", False), ("1", True)):
        monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
        if value:
            monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", value)
        assert Place.here("cpu", 0, 1).launch_blocking == blocking


def test_all_know_where_all_are(met):
    told = on("abab", "0123")
    numbers = (0, 1, 0, 1)
    places = Places(numbers, numbers, (0, 1, 2, 3), pids=(0,) * 4, hosts=tuple("abab"))
    places = replace(places, addresses=("",) * 4)
    found = met(told, lambda told: "device")
    assert {(each.places, each.decided) for each in found} == {(places, "device")}
    # drawn for these, and nowhere to be read later
    assert len({each.secret for each in found}) == 1 and len(found[0].secret) == 32
    assert met.stores and not any(store.check(["places"]) for store in met.stores)
    assert places.beside(2) == [0, 2] and places.across(2) == [2, 3]
    assert places.where(2) == " on a" and Places.together(4).where(2) == ""


def test_a_rank_that_never_comes_is_named(met):
    first, second = met(on("aaa", "012"), lambda told: "device", absent=[1])
    assert isinstance(first, TimeoutError) and "of 3 ranks, 1 did not come" in str(first)
    assert isinstance(second, OSError)


@pytest.fixture
def met(monkeypatch):
    """`meet` on all ranks at these places but those `absent`: what each gets, or the error."""

    def rank_meets(decide, told, timeout, rank):
        try:
            with meeting(rank, len(told), timeout):
                store = open_store(rank, len(told), timeout)
                stores.append(store)  # the first one's serves the others until all have met
                return meet(store, rank, len(told), told[rank], decide)
        except (ValueError, OSError) as error:
            return error

    stores = []

    def all_meet(told, decide, absent=()):
        # a busy machine may take seconds to begin the other's thread
        timeout = timedelta(seconds=8 if absent else 60)
        coming = [rank for rank in range(len(told)) if rank not in absent]
        with ThreadPoolExecutor(len(coming)) as threads:
            return list(threads.map(partial(rank_meets, decide, told, timeout), coming))

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    all_meet.stores = stores
    return all_meet


def test_an_environment_below_a_path_with_a_space_is_answered(tmp_path):
    _check_path(tmp_path / "env" / "torch")
    with refused("the path holds a space"):
        _check_path(tmp_path / "my env" / "torch")


def test_a_port_that_is_taken_is_named(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        monkeypatch.setenv("LOCAL_SIZE", "2")
        with pytest.raises(OSError, match=f"port {port} is taken .*--master_port"):
            open_store(0, 2, timedelta(seconds=10))


def test_two_runs_on_one_port_do_not_hear_each_other(monkeypatch):
    """The second one's first rank is refused its port, and its other ranks find the first one's
    store."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("LOCAL_SIZE", "2")
    monkeypatch.setattr("engine.processes.store.is_launcher", lambda process: True)
    soon, launchers = timedelta(seconds=10), {"first": 7, "second": 8}

    def opened(run, rank):
        monkeypatch.setattr(os, "getppid", lambda: launchers[run])
        return open_store(rank, 2, soon)

    first = opened("first", 0)
    with pytest.raises(OSError, match="is taken"):
        opened("second", 0)
    stray, other = opened("second", 1), opened("first", 1)
    stray.set("place/1", "of another run")
    first.set("places", "")
    assert not first.check(["place/1"]) and other.check(["places"])
    assert not stray.check(["places"])
    with refused("as rank 1: two runs were started on one port"):
        opened("first", 1)


def test_agents_that_have_started_their_ranks_unlike_often_meet(monkeypatch):
    """As under torchrun, where one came later than the other and each counts for itself."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    stores = []
    for rank in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(rank))
        stores.append(open_store(rank, 2, timedelta(seconds=10)))
    stores[0].set("told", "by the first")
    stores[1].wait(["told"], timedelta(seconds=10))  # to set is not answered: it may come late


def test_ranks_of_one_node_under_an_agent_meet_where_no_other_machine_is(monkeypatch):
    """The store of torchrun's agent listens on all interfaces; it has the port of the ranks' own
    and nothing else."""
    soon = timedelta(seconds=10)
    agents = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=soon)
    for name, value in {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "LOCAL_WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)

    def opened(rank):  # in a process of its own, whose variables are those of the agent
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", str(agents.port))
        return open_store(rank, 2, soon), int(os.environ["MASTER_PORT"])

    agents.set("start-0/port", "1")  # of an earlier start
    (first, port), (second, same) = opened(0), opened(1)
    first.set("told", "by the first")
    second.wait(["told"], soon)
    assert port == same != agents.port
    listening = [one.laddr for one in psutil.Process().net_connections("inet")]
    assert {place.ip for place in listening if place.port == port} == {"127.0.0.1"}
    # as SECURITY.md warns
    assert {place.ip for place in listening if place.port == agents.port} & {"::", "0.0.0.0"}
    assert agents.num_keys() == 2 + agents.check(["init/"])  # those of the two starts
    agents.set("start-1/port", "80; or words")
    with refused("first rank listens on port '80; or words' … start with deepspeed"):
        opened(1)


def test_a_store_that_nobody_holds_is_named(monkeypatch):
    port, soon = free_port(), timedelta(seconds=1)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(ConnectionError, match=f"rank 1 of 2 .*127.0.0.1:{port}"):
        with meeting(1, 2, soon):
            open_store(1, 2, soon)


def test_ranks_of_unlike_environments_start_together(tmp_path):
    """No launcher says how many ranks a node has; two nodes of two ranks and one; one rank has one
    core. The links are measured all the same, and waits for the first rank cost no group."""
    started = run_ranks(3, start_unlike, tmp_path, started=False)
    cores = len(os.sched_getaffinity(0))
    assert [one["ranks_on_node"] for one in started] == [2, 2, 1]
    assert [one["LOCAL_SIZE"] for one in started] == ["2", "2", "1"]
    assert {one["devices"] for one in started} == {(0, 0, 0)}  # on a CPU, whose memory they share
    assert [one["threads"] for one in started] == [cores, 1, cores]
    assert len({one["secret"] for one in started}) == 1
    # the watchdog begins before anything but the store connects ranks
    watched = [(rank, False, one["secret"]) for rank, one in enumerate(started)]
    assert [one["watched"] for one in started] == watched
    first, *others = (one["machine"] for one in started)
    assert others == [first] * 2 and first.ranks_per_node == 1
    assert min(first.link_bytes_per_s, first.node_bytes_per_s, first.link_latency_s) > 0
    # the first holds the store, and with it the ends of connections that others are closing
    assert [one["descriptors_left"] for one in started[1:]] == [0] * 2
    assert [one["seen"] for one in started] == [False, True, True]
    soft, hard = started[0]["file_limits"]
    assert soft == hard


def test_records_that_differ_between_ranks_are_named_on_all():
    (same, first, long), (_, second, _) = run_ranks(2, compare_records)
    assert same is None and first == second
    assert "plan.stages: 4 on rank 0; 5 on rank 1" in first and "alike" not in first.splitlines()[1]
    shown = f"data: …{'a' * 80}0{'b' * 79}… on rank 0; …{'a' * 80}1{'b' * 79}… on rank 1"
    assert long.endswith(f"\n    {shown}\n    give them alike")


def test_ranks_of_srun_and_mpirun_know_their_number():
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    step |= {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    step |= {"SLURM_STEP_NODELIST": "rack1-n[08-11,15],rack2-n01"}
    four = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "rack1-n08"}
    assert adopted(step) == four
    on_one = {"SLURM_LOCALID": "3", "SLURM_STEP_TASKS_PER_NODE": "4"}
    alone = four | {"LOCAL_RANK": "3", "LOCAL_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}
    assert adopted(step | on_one) == alone
    names = ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")
    mpi = {f"OMPI_COMM_WORLD_{name}": number for name, number in zip(names, "2110")}
    of_mpi = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}  # its daemon is a task of srun
    assert adopted(step | mpi) == of_mpi
    assert adopted(mpi | {"MASTER_ADDR": "there"}) == of_mpi
    for none in (
        step | {"WORLD_SIZE": "8"},  # of torchrun's agent in each task
        step | {"SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # salloc, or sbatch
        {},
    ):
        assert adopted(none) == {}, none
    ports = {adopted(step | {"SLURM_JOB_ID": job}, "MASTER_PORT")["MASTER_PORT"] for job in "789"}
    assert len(ports) == 3


@pytest.mark.parametrize(
    ("size", "rank", "local_rank", "local_size"),
    [
        ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
        ("PMI_SIZE", "PMI_RANK", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),  # Cray MPICH
        ("PMI_SIZE", "PALS_RANKID", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
        *(
            tuple(f"{of}_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE"))
            for of in ("OMPI_COMM_WORLD", "MV2_COMM_WORLD", "JSM_NAMESPACE")
        ),
    ],
)
def test_ranks_of_other_launchers_know_their_number(size, rank, local_rank, local_size):
    told = {size: "4", rank: "3", local_rank: "1", local_size: "2"}
    three = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    assert adopted(told) == three
    # its daemons are tasks of srun, one on each node
    daemon = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    assert adopted(told | daemon) == three
    on_one = three | {"LOCAL_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}
    assert adopted(told | {local_size: "4"}) == on_one
    assert adopted(told | {size: "1"}) == adopted(told | {"WORLD_SIZE": "1"}) == {}
    for missing in (rank, local_rank):
        alone = {name: value for name, value in told.items() if name != missing}
        with refused(f"one of 4 ({size}), and  … {missing} … is not set"):
            adopted(alone)


def test_a_task_of_srun_with_pmi_2_is_one_of_srun():
    task = {"PMI_SIZE": "4", "PMI_RANK": "3", "SLURM_STEP_NUM_TASKS": "4"}
    task |= {"SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
    assert adopted(task) == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    assert adopted(task | {"SLURM_STEP_NUM_TASKS": "1"}) == {}  # a run of its own
    with refused("one of 4 (PMI_SIZE)"):
        adopted(task | {"SLURM_STEP_NUM_TASKS": "2"})


def adopted(environment, *also):
    """What is added to it, without the port."""
    after = dict(environment)
    adopt_launcher(after)
    return {
        name: value
        for name, value in after.items()
        if name not in environment and (name != "MASTER_PORT" or name in also)
    }


def test_ranks_of_several_nodes_listen_where_a_way_leads_to_the_others(monkeypatch):
    """Not at what a host's own name means there: 127.0.1.1 on Debian's."""
    inside, outside = (NamedAddress(address) for address in ("127.0.0.1", "10.1.0.7"))
    known = {"lo": [inside], "ib0": [NamedAddress("10.9.0.7")], "eth1": [outside]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: known)
    ways = {"10.1.0.8": "10.1.0.7"}
    monkeypatch.setattr(places_module, "own_address", lambda other: ways.get(other, ""))
    two = replace(Places.together(3), nodes=(0, 0, 1))
    # rank 2 is here and leads to the first host; or here is the first, whose name stays inside
    assert replace(two, addresses=("", "", "10.1.0.7")).interface(2) == "eth1"
    assert replace(two, addresses=("", "", "10.1.0.8")).interface(1) == "eth1"
    assert replace(two, addresses=("", "", "10.1.0.99")).interface(0) is None
    assert replace(two, addresses=("", "", "")).interface(2) is None and two.interface(0) is None
    for given, chosen in (({}, "eth1"), ({"GLOO_SOCKET_IFNAME": "ib0"}, "ib0")):
        monkeypatch.setattr(os, "environ", given)
        prepare_for(replace(two, addresses=("", "", "10.1.0.7")), 2, "host")
        assert os.environ["GLOO_SOCKET_IFNAME"] == chosen


@dataclass
class NamedAddress:
    address: str


def test_a_way_to_this_machine_by_a_name_that_stays_inside_is_none():
    assert own_address("127.0.1.1") == own_address("localhost") == own_address("") == ""
    assert own_address("no such name") == ""
    machine = {
        one.address
        for found in psutil.net_if_addrs().values()
        for one in found
        if one.family == socket.AF_INET and not one.address.startswith("127.")
    }
    assert all(own_address(address) == address for address in machine)
