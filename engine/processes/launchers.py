"""Which rank this process is, in the words of the launchers that do not set RANK and the like."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

PORTS = range(20_000, 32_000)  # Linux gives 32768 and above to outgoing connections


@dataclass(frozen=True)
class Words:
    """The variables of one launcher; of several names for one fact, the first that is set counts.
    `job`: those that together name this start of this job. `size_on_node` may be missing."""

    size: str
    rank: tuple[str, ...]
    local_rank: tuple[str, ...]
    size_on_node: tuple[str, ...]
    job: tuple[str, ...]


# mpirun and mpiexec come before srun, by which they start their daemons inside a job of Slurm. In the
# shell of an allocation there is no step, or one of one task, so that `python train.py` there is a
# run of one.
SLURM = "srun"
LAUNCHERS = {
    "Open MPI's mpirun": Words(
        size="OMPI_COMM_WORLD_SIZE",
        rank=("OMPI_COMM_WORLD_RANK",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        size_on_node=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE",),
    ),
    "MVAPICH's mpirun_rsh": Words(
        size="MV2_COMM_WORLD_SIZE",
        rank=("MV2_COMM_WORLD_RANK",),
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        size_on_node=("MV2_COMM_WORLD_LOCAL_SIZE",),
        job=("PBS_JOBID", "LSB_JOBID", "SLURM_JOB_ID"),
    ),
    "IBM's jsrun": Words(
        size="JSM_NAMESPACE_SIZE",
        rank=("JSM_NAMESPACE_RANK",),
        local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
        size_on_node=("JSM_NAMESPACE_LOCAL_SIZE",),
        job=("LSB_JOBID", "JSM_NAMESPACE_NAME"),
    ),
    # MPICH, Intel MPI, Cray PALS; also a task of `srun --mpi=pmi2`, which lacks the local rank
    "mpiexec": Words(
        size="PMI_SIZE",
        rank=("PALS_RANKID", "PMI_RANK"),
        local_rank=("MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        size_on_node=("MPI_LOCALNRANKS", "PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
        job=("PALS_APID", "PBS_JOBID", "LSB_JOBID", "SLURM_JOB_ID"),
    ),
    SLURM: Words(
        size="SLURM_STEP_NUM_TASKS",
        rank=("SLURM_PROCID",),
        local_rank=("SLURM_LOCALID",),
        size_on_node=("SLURM_STEP_TASKS_PER_NODE",),
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
}


def adopt_launcher(environment: MutableMapping[str, str]) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in a process of several that a
    launcher of `LAUNCHERS` started. What is set already stays; with WORLD_SIZE, all does.

    Except under srun, nothing says where the first rank is on several nodes: MASTER_ADDR stays out.
    Errors: ValueError where the launcher says that there are several processes, but not which one
    this is.
    """
    if "WORLD_SIZE" in environment:
        return
    name = _launcher(environment)
    if name is None or environment[LAUNCHERS[name].size] == "1":
        return
    words = LAUNCHERS[name]
    size = environment[words.size]
    found = {
        "RANK": _first(environment, words.rank),
        "WORLD_SIZE": size,
        "LOCAL_RANK": _first(environment, words.local_rank),
    }
    if _first(environment, words.size_on_node) == size:
        found |= {"LOCAL_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
    elif "SLURM_STEP_NODELIST" in environment and name == SLURM:
        found["MASTER_ADDR"] = first_host(environment["SLURM_STEP_NODELIST"])
    # two jobs may share a node
    job = ".".join(environment.get(each, "") for each in words.job)
    found["MASTER_PORT"] = str(PORTS[zlib.crc32(job.encode()) % len(PORTS)])
    for variable, value in found.items():
        environment.setdefault(variable, value)


def _launcher(environment: MutableMapping[str, str]) -> str | None:
    """The first that says all, or that there is one process. Errors: ValueError."""
    lacking: dict[str, list[str]] = {}  # by launcher, what a process of several would need
    sizes: set[str] = set()
    for name, words in LAUNCHERS.items():
        size = environment.get(words.size)
        if size is None:
            continue
        needed = (words.rank, words.local_rank)
        if size != "1":
            sizes.add(size)
            missing = [" or ".join(names) for names in needed if not _first(environment, names)]
            if missing:
                lacking[name] = missing
                continue
        if len(sizes) <= 1:
            return name
        break
    if not lacking:
        return None
    name, missing = next(iter(lacking.items()))
    if rank := _first(environment, LAUNCHERS[name].rank):
        environment.setdefault("RANK", rank)  # the first one says it
    raise ValueError(
        f"{name} started this process as one of {environment[LAUNCHERS[name].size]} "
        f"({LAUNCHERS[name].size}), and {', '.join(missing)} is not set; set it, or RANK, "
        "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; for a run of this process alone: "
        "WORLD_SIZE=1 RANK=0 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500"
    )


def _first(environment: Mapping[str, str], names: Sequence[str]) -> str:
    return next((environment[name] for name in names if name in environment), "")


def first_host(hosts: str) -> str:
    """Of a list as Slurm writes it: rack1-n[08-11,15],rack2-n01."""
    return re.sub(r"\[([^][,-]+)(?:[,-][^][]*)?\]", r"\1", hosts).split(",")[0]
