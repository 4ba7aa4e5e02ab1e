"""Whether a job left anything behind: processes (also grandchildren), threads, sockets, files in
/dev/shm."""

import contextlib
import gc
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

MARK = "LEFTOVERS_MARK"


def _processes(mark: str) -> list[str]:
    """Command lines of living processes that carry the mark in their environment, other than this
    one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if (
                int(folder.name) != os.getpid()
                and state != "Z"
                and mark.encode() in (folder / "environ").read_bytes()
            ):
                found.append((folder / "cmdline").read_text().replace("\0", " ") or folder.name)
    return found


def _children() -> list[str]:
    """Processes forked by this one, which have no environment of their own to be known by."""
    return [path.name for path in Path("/proc").glob("[0-9]*") if _parent(path) == os.getpid()]


def _parent(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _sockets() -> set[str]:
    """Return what this process has open, by number; those of its ranks end with them."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(os.readlink(path))
    return {name for name in found if name.startswith("socket:")}


def open_files() -> Counter[str]:
    """Return what this process has open, each name as often as it is; what only garbage holds is
    closed first.

    Something of an earlier test may be closed at any moment: a test asks what is there that was
    not, by subtraction.
    """
    gc.collect()
    names: Counter[str] = Counter()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            names[os.readlink(path)] += 1
    return names


def _segments() -> set[str]:
    """Shared memory of minidist; other jobs of this machine may be running MPI."""
    return {name for name in os.listdir("/dev/shm") if "minidist" in name}


@contextlib.contextmanager
def nothing_left(limit: float = 30.0) -> Iterator[dict[str, str]]:
    """Gives an environment for subprocesses; afterwards asserts that, within `limit` s, none of it
    is left."""
    mark = uuid.uuid4().hex
    threads = set(threading.enumerate())
    children = set(_children())
    segments = _segments()
    sockets = _sockets()
    yield {**os.environ, MARK: mark}
    deadline = time.monotonic() + limit

    def left() -> list[object]:
        return [
            *_processes(mark),
            *(set(threading.enumerate()) - threads),
            *(set(_children()) - children),
            *(_segments() - segments),
            *(_sockets() - sockets),
        ]

    while (found := left()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert found == [], found
