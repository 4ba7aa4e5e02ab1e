"""Settings every test shares: the Hypothesis profile of the CI sample, and one BLAS thread."""

import sys
from pathlib import Path

import numpy  # noqa: F401 - loads the BLAS that is limited below
import pytest
import threadpoolctl
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))  # `from helpers import ...`, `from strategies import ...`

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=25, database=None,
                          suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")

threadpoolctl.threadpool_limits(1)  # many small products, and ranks as threads: BLAS threads of their own only wait


@pytest.fixture(scope="session", autouse=True)
def no_profile(tmp_path_factory):
    """The communication profile of whoever runs the tests must not change what `auto` means in them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield
