"""How the processes of data/ start: those that load and those that fill the cache share one fork server."""

import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver


def start_method() -> multiprocessing.context.BaseContext:
    """Workers start from a fork server, or where there is none afresh; not by forking this process.

    In a rank run the threads of CUDA, NCCL and the tokenizer; a lock that one of them holds stays shut for ever in a fork.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Imported once by the server instead of once by each worker; "__main__" is Python's own default.
    context.set_forkserver_preload(["__main__", "data.loader"])
    return context


def start_early() -> None:
    """Start the fork server, without waiting for it: what workers import takes some seconds, in which this process can do other things."""
    if start_method().get_start_method() == "forkserver":
        multiprocessing.forkserver.ensure_running()
