"""What a measurement was taken on: date, machine, versions and command, as figures and profiles carry them."""

import platform
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil


def machine() -> dict[str, Any]:
    """Date, machine, versions and command: what a figure needs to be worth something later."""
    versions = {}
    for name in ("minidist", "numpy", "mpi4py", "mpich", "torch"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "cores": psutil.cpu_count(),
            "processor": processor(), "system": platform.system(), "python": platform.python_version(),
            "versions": versions, "command": " ".join(["minidist", *sys.argv[1:]])}


def processor() -> str:
    """The processor's name where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
