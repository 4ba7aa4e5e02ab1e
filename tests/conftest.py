"""Settings every test shares: the Hypothesis profile of the CI sample, one BLAS thread, and how many workers."""

import os
import sys
from pathlib import Path

import numpy  # noqa: F401 - loads the BLAS that is limited below
import pytest
import threadpoolctl
from hypothesis import HealthCheck, settings

from minidist import account

# Where this is set, each of the hundreds of Pythons that tests start would compile all of minidist again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

sys.path.insert(0, str(Path(__file__).parent))  # `from helpers import ...`, `from strategies import ...`

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=25, database=None,
                          suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")

threadpoolctl.threadpool_limits(1)  # many small products, and ranks as threads: BLAS threads of their own only wait

MOST_WORKERS = 8  # many tests start several processes themselves
SPARE_WORKERS = 1  # tests also sleep and wait: a sixth of the time that they take


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Plain `pytest` takes a worker (`-n`) a core and SPARE_WORKERS; CONTRIBUTING.md says when there are none.

    A worker steals tests from another that has more to do; tests of one file mostly stay with one worker.
    """
    option = config.option
    chosen = option.keyword or getattr(option, "lf", False)     # no `lf` under -p no:cacheprovider
    whole = all(Path(argument).is_dir() for argument in config.args) and not chosen
    usual = option.markexpr in config.getini("addopts")
    looking = option.usepdb or option.capture == "no"
    free = getattr(option, "numprocesses", 0) is None and option.dist == "no" and not hasattr(config, "workerinput")
    if free and whole and usual and not looking:
        workers = len(os.sched_getaffinity(0)) + SPARE_WORKERS
        option.numprocesses, option.dist = min(MOST_WORKERS, workers), "worksteal"


@pytest.fixture(scope="session", autouse=True)
def no_profile(tmp_path_factory):
    """The communication profile of whoever runs the tests must not change what `auto` means in them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(autouse=True)
def own_account():
    """What an earlier test left in memory, or a limit it set, is not this test's."""
    with account.use(account.MemoryAccount()) as memory:
        yield memory
