"""Running compilers and the like: with a time limit, and in the language in which their errors are looked for."""

import os
import subprocess
from collections.abc import Sequence

LIMIT = 300.0       # seconds that a compiler may take


def run(command: Sequence[str], *, check: bool = False) -> "subprocess.CompletedProcess[str]":
    """The tool's end, with what it said as text, whatever the user's language and its encoding.

    Raises: subprocess.CalledProcessError where it fails and `check` is set; subprocess.TimeoutExpired after LIMIT.
    """
    return subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=LIMIT, check=check,
                          env={**os.environ, "LC_ALL": "C"})
