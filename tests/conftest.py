"""One torch extensions cache per environment, so that a killed run elsewhere cannot block the
tests, nor the tests others.

`pytest --numprocesses 3 --dist loadgroup --no-loadscope-reorder` runs files side by side. Those that
start train.py or ranks of their own come first, one after another with the rest: they take long and
wait for what they started.
"""

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

# a cache that two environments share is compiled anew each time they take turns
ENVIRONMENT = hashlib.blake2b(
    f"{sys.prefix} {version('torch')}".encode(), digest_size=6
).hexdigest()
os.environ.setdefault(
    "TORCH_EXTENSIONS_DIR",
    os.path.join(
        tempfile.gettempdir(), f"wye-tests-{os.getuid()}", f"torch_extensions-{ENVIRONMENT}"
    ),
)
# So is one that the system's ninja and that of the environment share. Earlier versions of the code,
# which tests start too, take the first that they find.
os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
os.environ.setdefault(
    "WYE_CACHE", os.path.join(tempfile.gettempdir(), f"wye-tests-{os.getuid()}", "costs")
)
os.environ.setdefault(
    "DS_ACCELERATOR", "cpu"
)  # also where there is a GPU: more ranks than that are asked for
# Whether there is a GPU is asked of the driver's library: to open the device in the server that ranks
# are forked from would close it to them.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# A shell's background job ignores Ctrl-C, nohup hang-ups, and so would every program that a test
# starts and signals. A handler here is none of theirs: they begin with the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# train.py tracks its runs where a login is found; those of tests are nobody's
os.environ["WANDB_MODE"] = "disabled"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_sessionstart() -> None:
    """The first time, before any test's time limit begins: a minute or two."""
    if not list(Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("*/*.so")):
        compiling = "from engine.processes.start import compile_shared_memory_op; compile_shared_memory_op()"
        subprocess.run(
            [sys.executable, "-c", compiling],
            cwd=Path(__file__).parents[1],
            stdout=subprocess.DEVNULL,
        )


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist, which reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file is a group, so that what a module's fixture makes is made once."""
    long: dict[str, list[pytest.Item]] = {}
    short: dict[str, list[pytest.Item]] = {}
    for item in items:
        item.add_marker(pytest.mark.xdist_group(str(item.path)))
        used = {getattr(each, "__module__", None) for each in vars(item.module).values()}
        files = long if used & {"launched", "ranks"} else short
        files.setdefault(str(item.path), []).append(item)
    # two of three are short while there are both
    others = iter(short.values())
    order = [file for each in long.values() for file in (each, next(others, []), next(others, []))]
    items[:] = [item for file in [*order, *others] for item in file]


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a module of one's own registers in a test is gone behind it."""
    from data.index.sources import KINDS
    from engine.schedule import SCHEDULES
    from launch.settings.modalities import MODALITIES
    from models.losses import LOSSES
    from models.towers.image import OWN

    before = [(each, dict(each)) for each in (KINDS, LOSSES, OWN, MODALITIES, SCHEDULES)]
    for name in [name for name in sys.modules if name.startswith("examples.")]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for each, entries in before:
        each.clear()
        each.update(entries)
    for name in [name for name in sys.modules if name.startswith("examples.")]:
        del sys.modules[name]
