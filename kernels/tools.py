"""Running compilers and other tools: with a time limit, and with messages in English."""

import os
import subprocess
from collections.abc import Sequence

LIMIT = 300.0  # seconds that a compiler may take


def run(command: Sequence[str], *, check: bool = False) -> "subprocess.CompletedProcess[str]":
    """Run a tool to its end. Returns: its status and its output as text, in English for every
    language of the user.

    Raises:  subprocess.CalledProcessError if it fails and `check` is set; subprocess.TimeoutExpired
             after LIMIT.
    """
    return subprocess.run(
        command,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=LIMIT,
        check=check,
        env={**os.environ, "LC_ALL": "C"},
    )
