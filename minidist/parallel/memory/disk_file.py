"""Files of regions, buffers, and what is lent between them: the parts of a Disk (disk.py)."""

import errno
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidist.device.account import MemoryAccount
from minidist.errors import DiskError, TimeoutError
from minidist.parallel.data.device_copies import host_bytes
from minidist.parallel.memory.transfer_lanes import LIMIT, Move

PAGE = 4096
"""Regions and buffers begin at multiples of it, in bytes."""


def pages(nbytes: int) -> int:
    """`nbytes`, up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


@dataclass(frozen=True)
class Region:
    """An array's place in a record."""

    offset: int
    dtype: np.dtype
    count: int

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


class Record:
    """A file of regions, zero until they are written.

    Args:    fd: the file's descriptor, closed with the record, or by close().
    Attributes: regions by name; nbytes: of the file
    """

    def __init__(self, name: str, fd: int) -> None:
        self.name, self.fd, self.nbytes = name, fd, 0
        self.close = weakref.finalize(self, os.close, fd)
        self.regions: dict[str, Region] = {}
        self.writing: list[Move] = []           # a read waits for the writes that were begun before it

    def add(self, key: str, dtype: Any, count: int) -> None:
        """A region of `count` numbers, behind the others; its space is reserved.

        Raises:  DiskError if the disk has no room, or files may not be so large.
        """
        region = Region(self.nbytes, np.dtype(dtype), count)
        if region.nbytes:
            with told(self.name, f"reserve {region.nbytes:,} bytes for {key}"):
                os.posix_fallocate(self.fd, region.offset, pages(region.nbytes))
        self.regions[key] = region
        self.nbytes += pages(region.nbytes)

    @property
    def master(self) -> str:
        """The region of what an optimizer updates."""
        return "master" if "master" in self.regions else "weights"

    @property
    def needed(self) -> list[str]:
        """The regions that an update reads: all, but weights that are a rounding of their masters."""
        return [key for key in self.regions if key != "weights" or self.master == "weights"]


@contextmanager
def told(name: str, what: str) -> Iterator[None]:
    """An OSError inside becomes a DiskError that names the file and the operation."""
    try:
        yield
    except DiskError:
        raise
    except OSError as error:
        advice = {errno.ENOSPC: "make room, or name another folder with --offload-dir",
                  errno.EFBIG: "raise the limit of file sizes (ulimit -f)"}.get(error.errno or 0, "check the disk")
        raise DiskError(f"offload: {name}: cannot {what}: {error.strerror or error}; {advice}") from error


class Loan:
    """A buffer lent for one record. `arrays[key]` is a region's place in it, filled once wait() has returned."""

    def __init__(self, record: Record, buffer: np.ndarray, give_back: Callable[[np.ndarray], None]) -> None:
        self.record, self.buffer, self._give_back = record, buffer, give_back
        self.move: Move | None = None
        self.ended = False
        self.arrays = {key: buffer[region.offset:region.offset + region.nbytes].view(region.dtype)
                       for key, region in record.regions.items()}

    def wait(self) -> "Loan":
        """Return when what was asked to be read is there."""
        if self.move is not None:
            self.move.wait()
        return self

    def end(self) -> None:
        """Give the buffer back; when it is being read into, once that has ended."""
        if self.move is not None:
            self.move.wait()
        if not self.ended:
            self.ended, self.arrays = True, {}
            self._give_back(self.buffer)


class Pool:
    """A fixed number of buffers: their number bounds what is in flight, and so the host memory that offloading takes.

    Args:    device: as Disk's; memory: the host's account.
    """

    def __init__(self, count: int, nbytes: int, device: str, memory: MemoryAccount) -> None:
        self.count, self.nbytes = count, nbytes
        buffers = (memory.hold(host_bytes(nbytes, device), "workspace") for _ in range(count))
        self._free: deque[np.ndarray] = deque(buffers)
        self._changed = threading.Condition(threading.Lock())

    def take(self, *, spare: int = 0, limit: float = LIMIT) -> np.ndarray | None:
        """A buffer: waits until one is free. With `spare`, None unless so many others are free at this moment.

        Raises:  TimeoutError after `limit` seconds.
        """
        with self._changed:
            if spare:
                return self._free.popleft() if len(self._free) > spare else None
            if not self._changed.wait_for(lambda: self._free, limit):
                raise TimeoutError(f"offload: none of {self.count} buffers came free in {limit:g} s; is the disk "
                                   f"still there?")
            return self._free.popleft()

    def give(self, buffer: np.ndarray) -> None:
        """Take a buffer back."""
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()

    @property
    def idle(self) -> bool:
        """Whether all buffers are here."""
        with self._changed:
            return len(self._free) == self.count
