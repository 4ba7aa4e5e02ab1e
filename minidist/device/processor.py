"""The name of the processor."""

import platform
from pathlib import Path


def processor() -> str:
    """Return the processor's name from /proc/cpuinfo, or the platform's name for it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
