"""Compiled files in the user's cache folder. The name of a file contains a hash of all its sources
and flags."""

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from minidist.errors import KernelError
from minidist.files import open_regular

LIMIT = 100.0  # seconds that a process waits for another's build


def folder() -> Path:
    """Return the folder: minidist/kernels in the user's cache folder. Raises: KernelError for a
    user without a home."""
    try:
        return (
            Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            / "minidist"
            / "kernels"
        )
    except RuntimeError as error:
        raise KernelError(
            "what compilers build is kept in the user's home, and this user has none; set "
            "XDG_CACHE_HOME to a folder"
        ) from error


def place(stem: str, suffix: str, *parts: str) -> Path:
    """Return the path of the file built from these texts (sources, flags, the compiler's
    version)."""
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=10).hexdigest()
    return folder() / f"{stem}-{digest}{suffix}"


@contextlib.contextmanager
def missing(path: Path) -> Iterator[Path | None]:
    """Context manager: a new file to write if `path` does not exist, else None; it is renamed to
    `path` at the end.

    One process builds, others wait for it.
    Raises:  KernelError if the builder has not ended after LIMIT seconds, or if the folder cannot
             be written.
    """
    if path.exists():
        yield None
        return
    with _lock(path) as lock:
        _take(lock)
        try:
            yield from _new(path)
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # also of a child's copy: a process may fork meanwhile


def _new(path: Path) -> Iterator[Path | None]:
    if path.exists():
        yield None
        return
    # else a compiler that outlives its process would write
    new = path.with_suffix(f".{os.getpid()}{path.suffix}")
    try:  # into the next one's
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _open_member(file: str, flags: int) -> int:
    return open_regular(file, member=True, flags=flags)


def _lock(path: Path) -> IO[str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path.with_suffix(".lock"), "w", opener=_open_member)
    except OSError as error:
        raise KernelError(
            f"what compilers build is kept in {path.parent}, and nothing can be written there: "
            f"{error.strerror}; set XDG_CACHE_HOME to a folder of yours"
        ) from error


def _take(lock: IO[str]) -> None:
    deadline = time.monotonic() + LIMIT
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise KernelError(
                    f"another process has been building a kernel for {LIMIT:g} s and holds "
                    f"{lock.name}; end that process, or wait for it"
                ) from None
        time.sleep(0.02)
