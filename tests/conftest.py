"""Settings every test shares: the Hypothesis profile of the CI sample, one BLAS thread, and how
many workers."""

import gc
import os
import signal
import sys
import tempfile
from pathlib import Path

import numpy  # noqa: F401 - loads the BLAS that is limited below
import pytest
import threadpoolctl
from hypothesis import HealthCheck, settings

from minidist.device import account
from minidist.errors import KernelError
from minidist.kernels import cache
from minidist.launch.launchers import clean_environment

# Where this is set, each of the hundreds of Pythons that tests start would compile all of minidist
# again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What is printed into a pipe is looked at, so nobody's taste in colours, nor the width of a
# terminal, may be in it.
for _name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
    os.environ.pop(_name, None)

# Nor the language of whoever runs the tests.
for _name in ("LC_ALL", "LC_MESSAGES"):
    os.environ.pop(_name, None)
os.environ["LANG"] = "C.UTF-8"

# Started with `&` or nohup, Ctrl-C is ignored, also by the programs that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# OpenBLAS starts its threads as it is loaded: 30 ms of each Python that a test starts, and its
# ranks share two cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# On a cluster's node a test is no rank of the job in which pytest was started.
for _name in set(os.environ) - set(clean_environment(os.environ)):
    del os.environ[_name]

# Built kernels are the user's, so that nobody builds them twice; of a user who can keep none, a
# temporary folder's.
try:
    cache.folder().mkdir(parents=True, exist_ok=True)
    _kept = os.access(cache.folder(), os.W_OK)
except (OSError, KernelError):
    _kept = False
if not _kept:
    os.environ["XDG_CACHE_HOME"] = str(Path(tempfile.gettempdir(), f"minidist-tests-{os.getuid()}"))

# `from helpers import ...`; ranks under mpirun find it too
sys.path.insert(0, str(Path(__file__).parent / "support"))
from sampling import left_out, sampled_tests  # noqa: E402

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=15,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ci")

# many small products, and ranks as threads: BLAS threads of their own only wait
threadpoolctl.threadpool_limits(1)

MOST_WORKERS = 8  # many tests start several processes themselves
# tests also sleep and wait: with 1 the two cores are idle for a seventh of the time
SPARE_WORKERS = 2


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Plain `pytest` takes a worker (`-n`) a core and SPARE_WORKERS; CONTRIBUTING.md says when
    there are none.

    A worker steals tests from another that has more to do; tests of one file mostly stay with one
    worker.
    """
    option = config.option
    chosen = option.keyword or getattr(option, "lf", False)  # no `lf` under -p no:cacheprovider
    whole = all(Path(argument).is_dir() for argument in config.args) and not chosen
    usual = option.markexpr in config.getini("addopts")
    looking = option.usepdb or option.capture == "no"
    free = (
        getattr(option, "numprocesses", 0) is None
        and option.dist == "no"
        and not hasattr(config, "workerinput")
    )
    if free and whole and usual and not looking:
        workers = len(os.sched_getaffinity(0)) + SPARE_WORKERS
        option.numprocesses = min(MOST_WORKERS, workers)
        option.dist = "worksteal"


SOAK_SECONDS = 1800  # a hundred plans of up to 16 ranks, 20 steps each, take a quarter of an hour


@pytest.hookimpl(tryfirst=True)  # before marks decide
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give soak to the cases that the mark `sampled` of their test leaves out, and SOAK_SECONDS to
    each soak test."""
    for cases in sampled_tests(items):
        for case in left_out(cases):
            case.add_marker(pytest.mark.soak)
    for item in items:
        if item.get_closest_marker("soak") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SOAK_SECONDS))


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Collecting makes thousands of objects that stay: the garbage collector would look at them a
    hundred times."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Workers build all kernels before a test's time runs, each from another one on, if any test
    asks for them.

    Else a job of ranks, whose time is limited, might wait for g++ on a machine whose cache is empty
    and that is busy. What was collected lives to the end: the garbage collector need not look at it
    again, nor copy it in forked ranks.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    worker = getattr(session.config, "workerinput", {}).get("workerid")
    if worker is not None and "kernel_checks" in sys.modules:
        sys.modules["kernel_checks"].build_all(6 * int(worker.removeprefix("gw")))


@pytest.fixture(scope="session", autouse=True)
def no_profile(tmp_path_factory):
    """The communication profile of whoever runs the tests must not change what `auto` means in
    them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_lines_of_progress():
    """On a busy machine a command of a test may take as long as one that says what it does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minidist.progress.LINES_EVERY", 3600.0)
        yield


@pytest.fixture(autouse=True)
def own_account():
    """What an earlier test left in memory, or a limit it set, is not this test's."""
    with account.use(account.MemoryAccount()) as memory:
        yield memory
