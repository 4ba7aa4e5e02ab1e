"""What compilers built stays in the user's cache folder, under a name that holds a hash of everything it came from."""

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from minidist.errors import KernelError

LIMIT = 100.0       # seconds that a process waits for another's build


def folder() -> Path:
    """Where it stays: minidist/kernels in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minidist" / "kernels"


def place(stem: str, suffix: str, *parts: str) -> Path:
    """The file of what is built from these texts (sources, flags, the compiler's version)."""
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=10).hexdigest()
    return folder() / f"{stem}-{digest}{suffix}"


@contextlib.contextmanager
def missing(path: Path) -> Iterator[Path | None]:
    """A file to write if `path` is not there; it then takes its place. One process builds, others wait for it.

    Raises: KernelError if that one has not ended after LIMIT seconds.
    """
    if path.exists():
        yield None
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        _take(lock)
        if path.exists():
            yield None
            return
        new = path.with_suffix(".new" + path.suffix)
        yield new
        new.replace(path)


def _take(lock: IO[str]) -> None:
    deadline = time.monotonic() + LIMIT
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise KernelError(f"another process has been building a kernel for {LIMIT:g} s and holds {lock.name}; "
                                  f"end that process, or wait for it") from None
        time.sleep(0.02)
