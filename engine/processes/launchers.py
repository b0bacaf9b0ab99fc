"""Which rank this process is, in the words of the launchers that do not set RANK and the like."""

from __future__ import annotations

import re
import zlib
from collections.abc import MutableMapping
from dataclasses import dataclass

PORTS = range(20_000, 32_000)  # Linux gives 32768 and above to outgoing connections


@dataclass(frozen=True)
class Words:
    """The variables of one launcher. `job`: those that together name this start of this job."""

    size: str
    rank: str
    local_rank: str
    size_on_node: str
    job: tuple[str, ...]


# Those of a process that mpirun started, and of a task of srun. mpirun comes first: it starts its
# daemons with srun inside a job of Slurm. In the shell of an allocation there is no step, or one of
# one task, so that `python train.py` there is a run of one.
OPEN_MPI = Words(
    size="OMPI_COMM_WORLD_SIZE",
    rank="OMPI_COMM_WORLD_RANK",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    size_on_node="OMPI_COMM_WORLD_LOCAL_SIZE",
    job=("PMIX_NAMESPACE",),
)
SLURM = Words(
    size="SLURM_STEP_NUM_TASKS",
    rank="SLURM_PROCID",
    local_rank="SLURM_LOCALID",
    size_on_node="SLURM_STEP_TASKS_PER_NODE",
    job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
)


def adopt_launcher(environment: MutableMapping[str, str]) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in a process of several that
    `srun` or `mpirun` started. What is set already stays; with WORLD_SIZE, all does.

    Under mpirun on several nodes nothing says where the first rank is: MASTER_ADDR stays out.
    """
    words = next((each for each in (OPEN_MPI, SLURM) if each.size in environment), None)
    if "WORLD_SIZE" in environment or words is None or environment[words.size] == "1":
        return
    size = environment[words.size]
    found = {
        "RANK": environment[words.rank],
        "WORLD_SIZE": size,
        "LOCAL_RANK": environment[words.local_rank],
    }
    if environment.get(words.size_on_node) == size:
        found |= {"LOCAL_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
    elif "SLURM_STEP_NODELIST" in environment and words is SLURM:
        found["MASTER_ADDR"] = first_host(environment["SLURM_STEP_NODELIST"])
    # two jobs may share a node
    job = ".".join(environment.get(name, "") for name in words.job)
    found["MASTER_PORT"] = str(PORTS[zlib.crc32(job.encode()) % len(PORTS)])
    for name, value in found.items():
        environment.setdefault(name, value)


def first_host(hosts: str) -> str:
    """Of a list as Slurm writes it: rack1-n[08-11,15],rack2-n01."""
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", hosts).split(",")[0]
