"""A command does its work also where its output goes nowhere."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from minidist.streams import standard_output
with standard_output() as output:
    for _ in range(3):
        print("x" * 5000, "\\ud800")
        sys.stdout.flush()
    os.write(2, f"done {os.open('/dev/null', 0) > 2} {output.lost}\\n".encode())
"""


@pytest.mark.parametrize(
    ("where", "lost"),
    [(">&-", ""), ("| true", ""), ("> /dev/full", "stdout: No space left on device")],
)
def test_output_that_goes_nowhere(where: str, lost: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"$0" -c "$1" {where}', sys.executable, PROGRAM],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == f"done True {lost}\n" and done.stdout == ""


def test_output_that_goes_somewhere() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == ("x" * 5000 + " \\ud800\n") * 3 and done.stderr == "done True \n"
