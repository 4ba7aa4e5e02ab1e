"""What README.md shows is what happens."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from minidist.cli import COMMANDS

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("transport", ["threads", "tcp", "shm", "mpi"])
def test_the_program_prints_the_sum_on_every_rank(transport, tmp_path):
    program = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)[1].replace(
        '"threads"', f'"{transport}"', 1
    )
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("array([6., 4.])") == 4


def test_every_link_leads_somewhere():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", TEXT) if "://" not in link]
    assert len(links) > 8
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_command_exists():
    named = set(
        re.findall(r"minidist (\w+)", "\n".join(re.findall(r"```\w*\n(.*?)```", TEXT, re.DOTALL)))
    ) - {"as"}
    assert named and named <= set(COMMANDS)


@pytest.mark.soak
def test_the_first_command_as_it_stands_leaves_one_run_that_every_command_can_read(tmp_path):
    """Without --out, in an empty folder; .ci/run makes a few steps of it."""
    first = re.search(r"```sh\n.*? && (.*)\n", TEXT)[1]
    done = subprocess.run(
        first, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    (run,) = (tmp_path / "runs").iterdir()
    for look in ("report", "watch --once", "sample", "diagnose"):
        done = subprocess.run(
            ["minidist", *look.split(), str(run)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"minidist {look}: {done.stdout}{done.stderr}"
