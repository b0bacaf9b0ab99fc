"""One torch extensions cache per environment, so that a killed run elsewhere cannot block the
tests, nor the tests others.

`pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder` runs files side by side, the tests of
each in one process, so that what a module's fixture makes is made once. Files that start train.py or
ranks of their own come first, one after another with the rest: they take long and wait for what they
started.

Folders of tests that failed are left until another run fails; those of others go with them. All
together write 9 GB, of which at most 0.8 GB are there at a time.
"""

import gc
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
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
# also where there is a GPU: more ranks than that are asked for
os.environ.setdefault("DS_ACCELERATOR", "cpu")
# Whether there is a GPU is asked of the driver's library: to open the device in the server that ranks
# are forked from would close it to them.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# A shell's background job ignores Ctrl-C, nohup hang-ups, and so would every program that a test
# starts and signals. A handler here is none of theirs: they begin with the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)
# What programs that a test killed leave in the folder for temporary files goes at the end. (pytest's
# own folders stay where they are: Python has looked up the place above.)
if "PYTEST_XDIST_WORKER" not in os.environ:
    TEMPORARY = tempfile.TemporaryDirectory(prefix="wye-tests-", ignore_cleanup_errors=True)
    os.environ["TMPDIR"] = TEMPORARY.name
os.environ.setdefault("OMP_NUM_THREADS", "1")
# train.py tracks its runs where a login is found; those of tests are nobody's
os.environ["WANDB_MODE"] = "disabled"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_sessionstart() -> None:
    """The first time, before any test's time limit begins: a minute or two."""
    if not list(Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("*/*.so")):
        compiling = (
            "from engine.processes.ops import compile_shared_memory_op; compile_shared_memory_op()"
        )
        subprocess.run(
            [sys.executable, "-c", compiling],
            cwd=Path(__file__).parents[1],
            stdout=subprocess.DEVNULL,
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all",
        action="store_true",
        help="also the tests that are marked `all`: they take long, or need what lies beside the project",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("all")
        if marker is not None and not config.getoption("--all"):
            item.add_marker(pytest.mark.skip(f"{marker.args[0]}: bash launch/test.sh --all"))
    long: dict[str, list[pytest.Item]] = {}
    short: dict[str, list[pytest.Item]] = {}
    for item in items:
        used = {getattr(each, "__module__", None) for each in vars(item.module).values()}
        files = long if used & {"launched", "ranks"} else short
        files.setdefault(str(item.path), []).append(item)
    # two of three are short while there are both
    others = iter(short.values())
    order = [file for each in long.values() for file in (each, next(others, []), next(others, []))]
    items[:] = [item for file in [*order, *others] for item in file]


def pytest_collection_finish() -> None:
    """What was imported stays: collections of garbage need not look through it each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def module_folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Path]]:
    """Makes folders for the tests of a file, which go with the last of them unless one failed."""
    failed = request.session.testsfailed
    made: list[Path] = []

    def make(name: str) -> Path:
        made.append(tmp_path_factory.mktemp(name))
        return made[-1]

    yield make
    if request.session.testsfailed == failed:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a module of one's own registers in a test is gone behind it."""
    from data.index.sources import KINDS
    from data.stored.kinds import STORED
    from engine.schedule import SCHEDULES
    from launch.modalities import MODALITIES
    from models.losses import LOSSES
    from models.towers.image import OWN

    before = [(each, dict(each)) for each in (KINDS, LOSSES, OWN, MODALITIES, SCHEDULES, STORED)]
    for name in [name for name in sys.modules if name.startswith("examples.")]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for each, entries in before:
        each.clear()
        each.update(entries)
    for name in [name for name in sys.modules if name.startswith("examples.")]:
        del sys.modules[name]
