"""README.md is the front door: short, its two commands first, and they work."""

import re
import subprocess

import pytest
from documents import links
from imports import ROOT

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_BYTES = 8000


def test_it_is_short() -> None:
    assert len(TEXT.encode()) <= MOST_BYTES


def test_its_two_commands_come_first() -> None:
    """.ci/run reads them there."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    installs = [line for block in blocks for line in block.splitlines() if "pip install" in line]
    assert blocks[0].splitlines() == installs
    assert len(installs) == 2
    assert all(line.startswith("pip install -e ") and " && " in line for line in installs)


def test_it_leads_to_every_part_of_the_documents() -> None:
    parts = {link.partition("#")[0] for link in links(TEXT)}
    assert {f"docs/{name}" for name in ("quickstart.md", "words.md")} <= parts
    folders = sorted((ROOT / "docs").iterdir())
    assert all(
        any(link.startswith(f"docs/{folder.name}/") for link in parts)
        for folder in folders
        if folder.is_dir()
    )


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
