"""No worker outlives the process that asked for it, even one that is killed and cannot clean up."""

import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
LIMIT_S = 120  # ends what hangs
# Workers of a loader, of the cache's filling and of the index's building, all with nothing to do.
SCRIPT = """
if __name__ == "__main__":
    import itertools, os, time
    from concurrent.futures import ProcessPoolExecutor
    import numpy as np
    from data.index import building as index_build
    from data import processes
    from data.loader import MicroBatchDataset, micro_batches
    from data.modalities.image import ImageModality
    from data.batching.requests import MicroBatchRequest
    from data.index.sources import open_source
    from data.modalities.transforms import EvalTransform, TrainTransform, Views
    from data.stored.kinds import Registered

    images = ImageModality(Views(TrainTransform((16, 16)), EvalTransform((16, 16))))
    dataset = MicroBatchDataset(open_source("demo"), [images])
    batches = micro_batches(dataset, (MicroBatchRequest(n, 0, np.array([n]), np.array([0]), True) for n in itertools.count()), 2)
    next(batches)
    work = index_build._Work(None, "decode", None, ())
    pool = ProcessPoolExecutor(1, processes.start_method(), index_build._start_worker, (Registered(), work))
    pool.submit(os.getpid).result()
    print("ready", flush=True)
    THEN
"""


def test_workers_end_when_the_process_that_asked_for_them_is_killed():
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.replace("THEN", "time.sleep(1000)")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 4  # the fork server, and three workers
    finally:
        process.kill()
    _, left = psutil.wait_procs(family, timeout=LIMIT_S)
    for other in left:
        other.kill()
    assert not left, [" ".join(other.cmdline())[:100] for other in left]


LEFT_BEHIND = """
if __name__ == "__main__":
    import os, signal
    from concurrent.futures import ProcessPoolExecutor
    from data import processes
    from data.progress import progress_bar

    arguments = ([1], "", "it", None, False)
    pool = ProcessPoolExecutor(1, processes.start_method(), progress_bar, arguments)
    os.kill(pool.submit(os.getpid).result(), signal.SIGKILL)
    pool.shutdown()
"""


def test_a_worker_that_is_killed_leaves_no_semaphore_behind():
    """tqdm's lock is one of the system, unless it is given another; Python warns of what is left."""
    result = subprocess.run(
        [sys.executable, "-c", LEFT_BEHIND],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert result.returncode == 0 and not result.stderr, result.stderr


# DataLoader asks whether its workers live when a batch takes more than five seconds
ASKED_TO_END = """
    import contextlib, multiprocessing, psutil, signal
    for number in (signal.SIGTERM, signal.SIGUSR1):
        for one in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has just ended, as the first pool does
                if "resource_tracker" not in " ".join(one.cmdline()):
                    one.send_signal(number)
        time.sleep(1)
    print(len(multiprocessing.active_children()), next(batches) is not None, flush=True)
    os._exit(0)
"""


def test_workers_that_load_on_are_seen_to_live():
    """The two of the loader, of whom one is asked for a batch; those that fill and index end."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("    THEN", ASKED_TO_END)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert result.stdout == "ready\n2 True\n", result.stdout + result.stderr


OUTLASTS = """
import os, signal, threading, time
from data import processes

def timers():
    return sum(isinstance(each, threading.Timer) for each in threading.enumerate())

processes.GRACE_S = 3600
processes.outlast_signals()
for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
    os.kill(os.getpid(), number)
    print("loads on", timers(), flush=True)
processes.GRACE_S = 0.05
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(LIMIT)
"""


def test_what_asks_a_run_to_end_lets_a_worker_load_on_for_a_while():
    """Only SIGTERM, after which its rank may be killed, makes it end some time later, if nobody
    has ended it: its rank waits for it."""
    result = subprocess.run(
        [sys.executable, "-c", OUTLASTS.replace("LIMIT", str(2 * LIMIT_S))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert result.stdout == "loads on 0\nloads on 0\nloads on 1\n", result.stderr
    assert result.returncode == 1 and result.stderr == ""


SHARED = """
import gc, psutil, sys
def unshared(times):
    for _ in range(times):
        gc.collect()
    return psutil.Process().memory_full_info().uss
if __name__ == "__main__":
    from concurrent.futures import ProcessPoolExecutor
    from data import processes
    with ProcessPoolExecutor(1, processes.start_method()) as pool:
        print(*(pool.submit(unshared, times).result() for times in (0, 2)), sep="\\n")
"""


def test_workers_share_what_their_server_has_imported(tmp_path):
    """Also once they have looked for garbage."""
    script = tmp_path / "shared.py"
    script.write_text(f"import sys; sys.path[:0] = [{str(ROOT)!r}]\n{SHARED}")
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    before, after = map(int, done.stdout.split())
    assert after - before < 10_000_000, (before, after)
