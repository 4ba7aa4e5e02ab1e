"""docs/howto/own-collective.md: its programs run, and print what the page shows."""

import os
import re
import subprocess
import sys

import pytest
from documents import Command, File, parts
from imports import ROOT

PAGE = ROOT / "docs/howto/own-collective.md"


def shown(line, printed):
    """Return whether a text has a line of the page, in which "…" stands for anything."""
    wanted = ".*".join(re.escape(piece.strip()) for piece in line.split("…"))
    return re.search(wanted, printed) is not None


@pytest.mark.soak  # tests/testing/test_checker.py finds such bugs in the default run
def test_the_page_writes_a_collective_and_finds_its_planted_bug(tmp_path):
    found = parts(PAGE.read_text(encoding="utf-8"))
    ran = []
    for part in found:
        if isinstance(part, File):
            (tmp_path / part.name).write_text(part.text, encoding="utf-8")
            continue
        assert isinstance(part, Command)
        python, program = part.text.split()
        assert python == "python"
        done = subprocess.run(
            [sys.executable, program],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        printed = done.stdout + done.stderr
        assert done.returncode == part.status, printed
        missing = [line for line in part.output if not shown(line, printed)]
        assert part.output and not missing, f"{program} does not print {missing} but {printed}"
        ran.append(program)
    assert ran == [part.name for part in found if isinstance(part, File)]


def test_a_line_that_is_not_printed_is_found():
    assert shown(
        "rank 0: element [0] is 0.0, NumPy has …", "  rank 0: element [0] is 0.0, NumPy has 4"
    )
    assert not shown("rank 0: element [0] is 0.0", "rank 0: element [0] is 1.0")
