"""Test how much a two-core machine can simulate: processor time and memory of whole commands.

    pytest -m soak tests/simulate/test_scale.py -s              prints both for each command

Processor time, because other programs cannot lengthen it; each command is one process that computes
on one core.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

SECONDS = 60.0
GIB = 4.0
FOLDED = (
    "simulate --cluster h100:2048x8 --model llama3-70b --batch 2048 --plan dp=256,pp=8,tp=8 "
    "--zero 1 --microbatches 8"
)
UNFOLDED = (
    "simulate --cluster h100:128x8 --model llama3-70b --batch 1024 --plan dp=16,pp=8,tp=8 --zero 1 "
    "--microbatches 8 --unfolded"
)

PLANS = "plan --cluster h100:128x8 --model mixtral-8x7b --batch 1024 --confirm 0"


class Used(NamedTuple):
    """What a command used."""

    seconds: float
    gib: float
    output: str


def used(command: str, folder: Path) -> Used:
    """Run `minidist …` to its end. It may say that the plan does not fit (3)."""
    with open(folder / "output", "w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "minidist", *shlex.split(command)], stdout=output
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        found = Used(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20, output.read())
    assert process.returncode in (0, 3), found.output
    print(f"\nminidist {command}: {found.seconds:.1f} s of a processor, {found.gib:.2f} GiB")
    return found


@pytest.mark.soak
@pytest.mark.parametrize("command", [FOLDED, UNFOLDED], ids=["16384-folded", "1024-unfolded"])
def test_a_large_job_is_simulated_within_a_minute(command: str, tmp_path: Path) -> None:
    found = used(command, tmp_path)
    assert found.seconds < SECONDS and found.gib < GIB


@pytest.mark.soak
def test_a_hundred_thousand_plans_are_ranked_within_a_minute(tmp_path: Path) -> None:
    found = used(PLANS, tmp_path)
    count = re.search(r"([\d,]+) plans enumerated", found.output)
    assert count and int(count[1].replace(",", "")) >= 100_000, found.output
    assert found.seconds < SECONDS and found.gib < GIB


@pytest.mark.soak
def test_a_sixteenth_of_it_takes_seconds(tmp_path: Path) -> None:
    """1,024 ranks, folded: each day sees whether the messages of rings of all ranks are walked one
    by one."""
    found = used(UNFOLDED.replace(" --unfolded", "").replace("llama3-70b", "llama3-8b"), tmp_path)
    assert found.seconds < 20 and found.gib < 2
