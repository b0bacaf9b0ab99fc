"""The ranks of a run: its processes, started here with a watchdog, or what a dry run supposes of
them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from deepspeed.accelerator import get_accelerator

from common.secrets import redacted
from common.shell import REMEDY
from engine.checkpoint.layout import verify
from engine.config.reading import BranchesBlock
from engine.json_messages import from_first_rank
from engine.planning.costs import CostModel
from engine.planning.devices import find_device
from engine.planning.planner import RunPlan, plan_run
from engine.processes.agreement import refuse_differences
from engine.processes.communication import HOST
from engine.processes.determinism import compute_deterministically
from engine.processes.places import Places
from engine.processes.start import (
    COLLECTIVE_LIMIT_S,
    first_rank_first,
    start_processes,
)
from engine.processes.watchdog import Watchdog
from engine.topology import StageGraph
from launch.config.configuration import Abilities, asked_communication
from launch.config.options import Options
from launch.feeding import share_cores
from launch.run.failures import Run
from launch.run.folder import RunFolder, choose_folder
from launch.run.resuming import find_checkpoint
from launch.run.stopping import StopRequest
from launch.setup.costing import NOMINAL, compared, further_rows, run_costs, run_plan
from launch.setup.estimates import estimated_costs
from launch.setup.first_screen import (
    describe_device,
    describe_ranks,
    folder_to_watch,
)
from launch.setup.model import RunModel
from launch.terminal.last_words import say_last
from launch.terminal.quiet import quiet_ranks

# communicators of NCCL take seconds to make, a C++ op that is compiled before them minutes
CONNECTING_LIMIT_S = 600.0
# options that may differ between hosts: what these have, and where files lie there
OF_A_MACHINE = ("workers", "cache", "cache_limit", "stream_cache", "run_dir", "deepspeed_config")
CUT = (
    "where a shell has taken a part of an argument, which it does with {…}, *, ?, &, ;, > and quotes, "
    + REMEDY
)
KEPT = (
    "samples",
    "shards",
    "tokenizer",
    "token_counts",
)  # of a run's folder, which a dry run reads again


class LiveRanks:
    """The processes of this run, started here, with a watchdog that ends them all when one is lost.
    `run`: gets the watchdog and the folder, for the report of a failure.

    `number` of ranks, `described` in words; `rank`: of this one, `first`: is it the first?
    `workers`: loader processes of each. `costs`: what the layers cost here; `plan`: which rank runs
    which of them.
    """

    def __init__(self, options: Options, run: Run, stop: StopRequest):
        # the watchdog speaks before
        limit_s = max(COLLECTIVE_LIMIT_S, 2 * 60 * options.stall_limit)
        self.run, self.stop = run, stop
        self._connecting_s = max(CONNECTING_LIMIT_S, 60 * options.stall_limit)
        with ExitStack() as connecting:

            def watch(rank: int, places: Places, secret: str) -> None:
                self.watchdog = run.watchdog = Watchdog(rank, places, secret, tell=say_last).start()
                connecting.enter_context(self.connecting())

            self.processes = start_processes(
                limit_s, print, asked_communication(options), watch=watch
            )
        quiet_ranks(self.processes.rank)
        if options.deterministic:
            compute_deterministically()
        self.loading = share_cores(options, self.processes)
        self.costs = partial(run_costs, loading=self.loading, processes=self.processes)
        self.plan = partial(run_plan, processes=self.processes)
        places, device = self.processes.places, self.processes.device
        self.number, self.rank = self.processes.world_size, self.processes.rank
        self.first, self.workers = self.rank == 0, self.loading.num_workers
        self.abilities = Abilities.here(device)
        through_host = device.type != "cpu" and self.processes.communication == HOST
        self.described = describe_ranks(
            self.number,
            places.num_nodes,
            describe_device(device),
            len(set(places.devices)) if through_host else 0,
        )

    def connecting(self) -> AbstractContextManager[None]:
        """In here ranks connect with each other, and all end where that stands still."""
        return self.watchdog.limited(self._connecting_s, "connects with other ranks")

    def describe(self, graph: StageGraph, rank: int) -> str:
        """What a rank is, and where."""
        return graph.describe_rank(rank) + self.processes.places.where(rank)

    def first_first(self) -> AbstractContextManager[None]:
        """In here the first rank is alone before the others, which find what it made."""
        return first_rank_first(self.processes)

    def compare_options(self, options: Options) -> None:
        """Raise ValueError where another rank was given other options, before anything is made by
        them."""
        record = {k: v for k, v in options.record().items() if k not in OF_A_MACHINE}
        refuse_differences(redacted({"options": record}), CUT)

    def compare(self, record: Mapping[str, Any]) -> None:
        """Raise ValueError where another rank has another record."""
        refuse_differences(redacted(record))

    def open_folder(self, options: Options) -> RunFolder:
        where = Path(from_first_rank(str(choose_folder(options.run_dir, options.data))))
        folder = RunFolder(where, self.first)
        folder.claim()  # before a failure is written there
        self.run.folder = folder
        if self.first:
            self.stop.watch(folder.stop)
        return folder

    def find_checkpoint(self, resume: str, folder: RunFolder) -> tuple[Path | None, list[str]]:
        return find_checkpoint(resume, folder.checkpoints)

    def working_folder(self, folder: RunFolder) -> Path:
        """Where samples, tokenizer and token counts are kept."""
        return folder.path

    def describe_folder(self, folder: RunFolder) -> str:
        return folder_to_watch(folder.path)


class PlannedRanks:
    """What --ranks and --device say, and for what they leave open what is here: its kind of device,
    and its memory where it is a GPU. Layers are counted, not measured. `temporary`: a folder for
    what a run writes into its own."""

    first, rank, workers = True, 0, 0

    def __init__(self, options: Options, temporary: Path):
        self.temporary = temporary
        accelerator = get_accelerator()
        kind = accelerator.device_name()
        on_gpu = kind != "cpu"
        launched = int(os.environ.get("WORLD_SIZE", accelerator.device_count() if on_gpu else 1))
        self.number = options.ranks or max(1, launched)
        self.memory_bytes: float | None = None
        if options.device is not None:
            self.costed = options.device
            device = find_device(options.device)
            num_nodes = -(-self.number // device.ranks_per_node)
            self.described = describe_ranks(self.number, num_nodes, device.name)
            self.abilities = Abilities("cuda")
            return
        here = torch.device(kind)
        if kind == "cuda":
            self.memory_bytes = torch.cuda.get_device_properties(0).total_memory
        elif not on_gpu:
            # a CPU's memory is shared by its ranks, of which some may be elsewhere: not checked
            self.memory_bytes = float("inf")
        on_node = max(1, accelerator.device_count()) if on_gpu else self.number
        num_nodes = -(-self.number // on_node)
        self.described = describe_ranks(self.number, num_nodes, describe_device(here))
        self.abilities = Abilities.here(here)
        self.costed = NOMINAL.get(kind, "A100")

    def first_first(self) -> AbstractContextManager[None]:
        return nullcontext()

    def compare_options(self, options: Options) -> None:
        return

    def compare(self, record: Mapping[str, Any]) -> None:
        return

    def open_folder(self, options: Options) -> RunFolder:
        return RunFolder(choose_folder(options.run_dir, options.data), first_rank=False)

    def find_checkpoint(self, resume: str, folder: RunFolder) -> tuple[Path | None, list[str]]:
        return find_checkpoint(resume, folder.checkpoints, verify, list)

    def working_folder(self, folder: RunFolder) -> Path:
        for name in KEPT:
            if (folder.path / name).is_dir():
                shutil.copytree(folder.path / name, self.temporary / name, dirs_exist_ok=True)
        return self.temporary

    def describe_folder(self, folder: RunFolder) -> str:
        return f"{folder.path} (of the run; not written)"

    def costs(self, model: RunModel, config: Mapping[str, Any], **measured: Any) -> CostModel:
        """Counted, so of what a run measures them with only rows are needed."""
        return estimated_costs(
            model.towers,
            config,
            model.embed_dim,
            find_device(self.costed),
            self.memory_bytes,
            compared=compared(model),
            further=further_rows(model, measured["data"], measured["inputs"]),
        )

    def plan(
        self,
        model: RunModel,
        config: Mapping[str, Any],
        block: BranchesBlock,
        costs: CostModel,
        **tried: Any,
    ) -> RunPlan:
        """Predicted, so what a run tries it with is not needed."""
        return plan_run(config, block, self.number, costs)


Ranks: TypeAlias = LiveRanks | PlannedRanks  # of a run, started or planned for
