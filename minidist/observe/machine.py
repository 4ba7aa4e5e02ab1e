"""The machine of a measurement, as figures, profiles and JSON files record it."""

import os
import platform
import sys
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

import minidist
from minidist.device import blas
from minidist.device.processor import processor

__all__ = ["machine", "processor"]


def machine() -> dict[str, Any]:
    """Return date, cores, processor, system, versions and command line, by name; the version of MKL
    only if large products use it."""
    from importlib import metadata  # with email and zipfile, which few commands need

    # of the code that runs: of an old `pip install -e` the metadata name an old version
    versions = {"minidist": minidist.__version__}
    for name in (
        "numpy",
        *(["mkl"] if blas.find() else []),
        "mpi4py",
        "mpich",
        "torch",
    ):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "processor": processor(),
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": versions,
        "command": " ".join(["minidist", *sys.argv[1:]]),
    }
