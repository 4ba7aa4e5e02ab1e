"""The machine of a measurement, as figures, profiles and JSON files record it."""

import platform
import sys
from contextlib import suppress
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil


def machine() -> dict[str, Any]:
    """Date, cores, processor, system, versions and command line, by name."""
    versions = {}
    for name in ("minidist", "numpy", "mpi4py", "mpich", "torch"):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "cores": psutil.cpu_count(),
            "processor": processor(), "system": platform.system(), "python": platform.python_version(),
            "versions": versions, "command": " ".join(["minidist", *sys.argv[1:]])}


def processor() -> str:
    """The processor's name from /proc/cpuinfo, or the platform's name for it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
