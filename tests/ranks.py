"""Run a function on several ranks of this machine, each a process of its own, and get what they
return.

For tests and measurements. The processes are forked from a server that has imported torch and
DeepSpeed once, so a call costs a fork, not an import, and leaves no state behind. Each call has its
own port and a time limit; no process outlives it.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# and with it torch, DeepSpeed, torchvision, transformers, and all of ours that a rank needs
PRELOAD = ["train"]
# which ZeRO imports, and with it torch's compiler: 3 s
PRELOAD += ["deepspeed.runtime.zero.muon.muon_optimizer"]
# which the end of a run imports, and with it plotly; and others that wait until they are needed
PRELOAD += ["launch.reporting.page", "torch.utils.cpp_extension", "evaluate"]
PRELOAD += ["transformers.models.bert.modeling_bert"]
PRELOAD += ["warmed"]

# ends what hangs: no call takes a tenth of it, and a busy machine may be five times as slow
LIMIT_S = 600.0
COLLECTIVE_LIMIT_S = 300.0  # less than that, so that a rank which waits for ever says where

_context = multiprocessing.get_context("forkserver")


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = LIMIT_S,
    started: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """`function(*args, **kwargs)` on ranks 0..world_size-1 of one process group; returns their
    results in order.

    `function` must be importable (module level). Raises RuntimeError with the traceback of the rank
    that failed first, or TimeoutError with the ranks that did not finish in `timeout_s`. `started`:
    False where the function calls `start_processes` itself.
    """
    _context.set_forkserver_preload(PRELOAD)
    from engine.processes.start import free_port

    port = free_port()
    pipes, workers = [], []
    for rank in range(world_size):
        receive, send = _context.Pipe(duplex=False)
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            **{name: os.environ[name] for name in ("TORCH_EXTENSIONS_DIR",) if name in os.environ},
        }
        worker = _context.Process(
            target=_main, args=(send, environment, started, function, args, kwargs), daemon=True
        )
        worker.start()
        send.close()
        pipes.append(receive)
        workers.append(worker)
    try:
        return _collect(pipes, workers, time.monotonic() + timeout_s, timeout_s)
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def run_cases(
    world_size: int, function: Callable[..., Any], cases: Sequence[tuple], **kwargs: Any
) -> list[list[Any]]:
    """What `run_ranks` returns for each of the cases, which are tuples of arguments.

    The ranks are started once for ten cases and run them one after another: starting them takes
    longer than to train a small model.
    """
    found: list[list[Any]] = []
    for first in range(0, len(cases), 10):
        of_ranks = run_ranks(world_size, _each, function, cases[first : first + 10], **kwargs)
        found += map(list, zip(*of_ranks, strict=True))
    return found


def run_all(
    function: Callable[..., Any], cases: Sequence[Any], *args: Any
) -> list[tuple[Any, list[Any]]]:
    """(case, what its ranks return) of `function(case, *args)`; each case has its `world_size`."""
    found = {}
    for world_size in sorted({case.world_size for case in cases}):
        own = [n for n, case in enumerate(cases) if case.world_size == world_size]
        ran = run_cases(world_size, function, [(cases[n], *args) for n in own])
        found |= dict(zip(own, ran, strict=True))
    return [(case, found[n]) for n, case in enumerate(cases)]


class Together:
    """`function(case)` on the ranks of a case, when it is asked for; on the same ranks that of the
    nine others that are next to it among those with as many."""

    def __init__(self, function: Callable[..., Any], cases: Sequence[Any]):
        self._function, self._cases = function, cases
        self._found: dict[str, list[Any]] = {}
        self._alone: set[str] = set()  # in whose group one has failed

    def __call__(self, case: Any) -> list[Any]:
        """Of each case once. Where one fails, the others run by themselves."""
        name = str(case)
        if name in self._alone:
            return run_ranks(case.world_size, self._function, case)
        if name not in self._found:
            alike = [each for each in self._cases if each.world_size == case.world_size]
            first = [*map(str, alike)].index(name) // 10 * 10
            group = alike[first : first + 10]
            try:
                ran = run_cases(case.world_size, self._function, [(each,) for each in group])
            except (RuntimeError, TimeoutError):
                self._alone |= {*map(str, group)}
                return self(case)
            self._found |= dict(zip(map(str, group), ran, strict=True))
        return self._found.pop(name)


def _each(function: Callable[..., Any], cases: Sequence[tuple]) -> list[Any]:
    found = []
    for case in cases:
        try:
            found.append(function(*case))
        except BaseException as error:
            raise RuntimeError(f"case {', '.join(map(str, case))}") from error
    return found


@contextmanager
def about(case: object) -> Iterator[None]:
    """Names the case in an assertion that fails in here."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from error


def _collect(pipes: list, workers: list, deadline: float, timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = multiprocessing.connection.wait(
            list(waiting), timeout=max(0.0, deadline - time.monotonic())
        )
        if not ready:
            raise TimeoutError(
                f"ranks {sorted(waiting.values())} of {len(pipes)} did not finish within "
                f"{timeout_s} s"
            )
        failed: list[tuple[float, str]] = []
        for pipe in ready:
            rank = waiting[pipe]
            try:
                failed_at, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                words = f"rank {rank} ended without a result (exit code {workers[rank].exitcode})"
                failed.append((-math.inf, words))
                continue
            if failed_at is None:
                results[rank] = value
            else:
                failed.append((failed_at, f"rank {rank} failed:\n{value}"))
        # the others lost their connection to the first, or to one that was killed, and may be read
        # beside it
        if failed:
            raise RuntimeError(min(failed)[1])
    return [results[rank] for rank in range(len(pipes))]


def _main(
    send: Any,
    environment: dict[str, str],
    started: bool,
    function: Callable[..., Any],
    args: tuple,
    kwargs: dict,
) -> None:
    os.environ.update(environment)
    import torch

    from engine.processes.start import start_processes, stop_processes

    torch.set_num_threads(1)  # one core per rank: ranks measure each other otherwise
    try:
        with open(os.devnull, "w") as quiet:
            sys.stdout = quiet
            if started:
                start_processes(timeout_s=COLLECTIVE_LIMIT_S)
            value = function(*args, **kwargs)
        send.send_bytes(pickle.dumps((None, value)))
        stop_processes()
    except BaseException:
        failed_at = time.monotonic()
        send.send_bytes(pickle.dumps((failed_at, traceback.format_exc())))
