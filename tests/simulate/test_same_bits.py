"""Equal inputs simulate to equal bits: on every platform, in every Python, in every process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "simulated_bits.py"


def simulated(*platform: str, seed: str = "0") -> dict[str, Any]:
    """Return the times of the jobs, from a process of its own."""
    words = [sys.executable, str(SCRIPT), *platform]
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    ended = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


@pytest.fixture(scope="module")
def here() -> dict[str, Any]:
    return simulated()


def test_another_platform_simulates_the_same_bits(here: dict[str, Any]) -> None:
    """Its index type has 32 bits, its sum() is CPython 3.12's, its sets have another order."""
    found = simulated("narrow-index", "exact-sum", seed="1")
    assert found.keys() == here.keys()
    for name, job in here.items():
        assert found[name] == job, name


@pytest.mark.soak
@pytest.mark.parametrize("seed", ["1", "2", "3"])
@pytest.mark.parametrize("platform", ["", "narrow-index", "exact-sum"])
def test_each_difference_of_a_platform_by_itself(
    platform: str, seed: str, here: dict[str, Any]
) -> None:
    assert simulated(platform, seed=seed) == here
